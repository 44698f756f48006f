"""The classic paged attention of vLLM (v1): one query per sequence, K/V in blocks of a layout made for its
loads.

It is for those who have K/V in this layout; lightkv itself attends with `decode_attention.py`. A block holds
some tokens of one sequence, head by head. Keys are cut into vectors of x dims (16 bytes), and the same vector
of all tokens of a block is side by side; of values, all tokens of one dim are side by side:

    k_cache  [num_blocks, num_kv_heads, head_dim / x, block_size, x]
    v_cache  [num_blocks, num_kv_heads, head_dim, block_size]

A program has all query heads of a K/V head, so K/V is read once, and multiplies with matrix instructions. In
one pass, as in the original, it has all tokens of one sequence. With a work list (`decode_plan.py`), it has an
equal share of the tokens of all sequences, as in `decode_attention`, however few or uneven these are. Unlike
the original, it stores no scores: its softmax is a running one. `paged_attention_v2.py` has partitions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.decode.decode_plan import DecodePlan
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants import Alibi
from lightkv.triton_kernels.attention.variants.variant import Scored

from .paged_attention_inputs import PagedInputs
from .paged_attention_kernel import attend_partitions, attend_shares
from .paged_attention_v2 import attend_in_partitions


@torch.library.custom_op("lightkv::paged_attention_v1", mutates_args=("out",))
def _paged_attention_v1(
    tensors: Sequence[Tensor],
    variants: str,
    variant_tensors: Sequence[Tensor],
    variant_numbers: Sequence[float],
    scale: float,
    out: Tensor,
) -> None:
    inputs = PagedInputs.of_flat(tensors, variants, variant_tensors, variant_numbers, scale)
    attend_partitions(inputs, out, None, None, 0)


@torch.library.custom_op("lightkv::paged_attention_shares", mutates_args=("out",))
def _paged_attention_shares(
    tensors: Sequence[Tensor],
    variants: str,
    variant_tensors: Sequence[Tensor],
    variant_numbers: Sequence[float],
    scale: float,
    out: Tensor,
    items: Tensor,
    shares: Tensor,
    parts: Tensor,
    split: Tensor,
) -> None:
    inputs = PagedInputs.of_flat(tensors, variants, variant_tensors, variant_numbers, scale)
    attend_shares(inputs, DecodePlan(items, shares, parts, split, None), out)


for _operator in (_paged_attention_v1, _paged_attention_shares):
    _operator.register_fake(lambda *_: None)  # the outputs are arguments


def paged_attention_v1(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    alibi_slopes: Tensor | None = None,
    plan: DecodePlan | None = None,
    partition_size: int = 0,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the attention of each sequence's newest token to all its tokens, itself included.

    Args:
        q: `[num_seqs, H, D]`, any strides, except that the last one is 1; H is a multiple of num_kv_heads and D
            of x; query head h reads K/V head h // (H / num_kv_heads).
        k_cache: `[num_blocks, num_kv_heads, D / x, block_size, x]` in the dtype of q, with one head of a block
            contiguous; block_size and x are powers of two (usually 8, 16 or 32, and 16 bytes).
        v_cache: `[num_blocks, num_kv_heads, D, block_size]`, likewise.
        block_tables: int32 `[num_seqs, max_blocks]`, contiguous: the block of each block_size tokens of a
            sequence.
        seq_lens: int32 `[num_seqs]`, tokens of each sequence; at most max_blocks * block_size and max_seq_len,
            which is not checked. The output of a sequence of length 0 is zeros.
        scale: multiplies the scores; positive.
        alibi_slopes: float32 `[H]`, contiguous; ALiBi adds slope * (position - position of the query) to a
            score. None for none.
        plan: the work list of `decode_plan` for seq_lens, without limits and prefixes; one serves
            all layers of a step. None for one pass, a program for each K/V head of a sequence.
        partition_size: tokens of a partition, a multiple of block_size, for `paged_attention_v2`; 0 for none.
        max_seq_len: bounds the partitions; see `paged_attention_v2`.
        out: `[num_seqs, H, D]` to write to, with a last stride of 1; allocated in the dtype of q if None.

    Returns:
        `[num_seqs, H, D]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit, there is a plan for another step, or there
            are both a plan and partitions.
    """
    options = AttentionOptions(scale).plus(None if alibi_slopes is None else Alibi(alibi_slopes))
    inputs = PagedInputs(q, k_cache, v_cache, block_tables, seq_lens, options)
    if partition_size != 0 and plan is None:
        return attend_in_partitions(inputs, partition_size, max_seq_len, out, None)
    inputs.check()
    if plan is not None:
        _check_plan(plan, len(q), partition_size)
    out = inputs.output(out)
    if plan is None:
        _paged_attention_v1(*inputs.flat(), out)
    else:
        _paged_attention_shares(*inputs.flat(), out, *plan[:4])
    return out


def _check_plan(plan: DecodePlan, num_seqs: int, partition_size: int) -> None:
    if partition_size != 0:
        raise ValueError(
            f"a plan has shares instead of partitions, got both, with {partition_size} tokens; leave one"
        )
    if (len(plan.parts), plan.limits, plan.num_queries, plan.num_members) != (num_seqs, (), 1, 1):
        raise ValueError(
            f"the plan is for {len(plan.parts)} requests of {plan.num_queries} queries with {plan.limits} and "
            f"{plan.num_members} to a prefix, but the call has {num_seqs} sequences of one query, without any "
            "of these; make a plan for this call"
        )


def paged_attention_v1_reference(inputs: PagedInputs) -> Tensor:
    """Computes `paged_attention_v1` in plain torch and float64, one sequence at a time. Reads tables and
    lengths on the host, so on a GPU it synchronises."""
    q = inputs.q
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        scored = Scored.of_last(slice(seq, seq + 1), seq, length, q.device)
        k, v = inputs.keys(seq, 0, length)
        out[seq] = attend_reference(q[seq : seq + 1], k, v, inputs.options, scored)[0].to(q.dtype)
    return out
