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

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.decode.decode_combine import combine_parts
from lightkv.triton_kernels.attention.decode.decode_plan import DecodePlan
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants import Alibi
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from lightkv.triton_kernels.attention.variants.variant import Scored

from .paged_attention_inputs import check_paged_inputs
from .paged_attention_kernel import attend_partitions, share_kernel, tile_options
from .paged_attention_v2 import paged_attention_v2


@torch.library.custom_op("lightkv::paged_attention_v1", mutates_args=("out",))
def _paged_attention_v1(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    alibi_slopes: Tensor | None,
    out: Tensor,
    scale: float,
) -> None:
    attend_partitions(q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, out, None, None, scale, 0)


@torch.library.custom_op("lightkv::paged_attention_shares", mutates_args=("out",))
def _paged_attention_shares(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    alibi_slopes: Tensor | None,
    items: Tensor,
    shares: Tensor,
    parts: Tensor,
    split: Tensor,
    out: Tensor,
    scale: float,
) -> None:
    if len(q) == 0:
        return
    plan = DecodePlan(items, shares, parts, split, None)
    num_programs, options = tile_options(q, k_cache)
    partial_lse = torch.empty((plan.num_parts, q.shape[1]), dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*partial_lse.shape, q.shape[2]), dtype=torch.float32, device=q.device)
    share_kernel[(num_programs, len(shares) - 1)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        alibi_slopes,
        items,
        shares,
        parts,
        out,
        partial_out,
        partial_lse,
        scale * LOG2_E,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        block_tables.stride(0),
        *out.stride()[:2],
        **options,
    )
    combine_parts(partial_out, partial_lse, plan, out, None, 1)


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
    if partition_size != 0 and plan is None:
        return paged_attention_v2(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            scale=scale,
            alibi_slopes=alibi_slopes,
            partition_size=partition_size,
            max_seq_len=max_seq_len,
            out=out,
        )
    arguments = (q, k_cache, v_cache, block_tables, seq_lens)
    check_paged_inputs(*arguments, alibi_slopes, out, scale)
    if plan is not None:
        _check_plan(plan, len(q), partition_size)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if plan is None:
        _paged_attention_v1(*arguments, alibi_slopes, out, scale)
    else:
        _paged_attention_shares(*arguments, alibi_slopes, *plan[:4], out, scale)
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


def copy_to_blocks(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Copies K/V of a pool to this kernel's layout. k_cache and v_cache are `[num_slots, num_kv_heads, D]`;
    slots, an integer tensor `[num_blocks, block_size]`, names the slot to copy to each place of each block.
    Returns k_cache and v_cache of num_blocks blocks. Raises ValueError if D is not a multiple of the x dims in
    16 bytes."""
    x = 16 // k_cache.element_size()
    if k_cache.shape != v_cache.shape or k_cache.shape[2] % x:
        raise ValueError(
            f"K and V must be alike, with a multiple of {x} dims; got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    k, v = k_cache[slots.long()], v_cache[slots.long()]  # [num_blocks, block_size, num_kv_heads, D]
    return k.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()


def paged_attention_v1_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Computes `paged_attention_v1` in plain torch and float64, one sequence at a time. Reads tables and
    lengths on the host, so on a GPU it synchronises."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    block_size = k_cache.shape[3]
    options = AttentionOptions(scale).plus(None if alibi_slopes is None else Alibi(alibi_slopes))
    for seq, length in enumerate(seq_lens.tolist()):
        positions = torch.arange(length, device=q.device)
        blocks, offsets = block_tables[seq, positions // block_size].long(), positions % block_size
        k = k_cache[blocks, :, :, offsets].flatten(2)  # [length, num_kv_heads, D]
        v = v_cache[blocks, :, :, offsets]
        scored = Scored.of_last(slice(seq, seq + 1), seq, length, q.device)
        result = attend_reference(q[seq : seq + 1], k, v, options, scored)
        out[seq] = result[0].to(q.dtype)
    return out
