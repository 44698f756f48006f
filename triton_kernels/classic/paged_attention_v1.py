"""The classic paged attention of vLLM (v1): one query per sequence, K/V in blocks of a layout made for its
loads.

It is for those who have K/V in this layout; lightkv itself attends with `decode_attention.py`. A block holds
some tokens of one sequence, head by head. Keys are cut into vectors of x dims (16 bytes), and the same vector
of all tokens of a block is side by side; of values, all tokens of one dim are side by side:

    k_cache  [num_blocks, num_kv_heads, head_dim / x, block_size, x]
    v_cache  [num_blocks, num_kv_heads, head_dim, block_size]

A program has all query heads of a K/V head, so K/V is read once, and multiplies with matrix instructions. v1 is
`paged_attention_v2.py` with buffers of its own. Unlike the original, it stores no scores: its softmax is a
running one.
"""

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.variants.variant import Scored

from .paged_attention_inputs import PagedInputs
from .paged_attention_v2 import paged_attention_v2


def paged_attention_v1(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    alibi_slopes: Tensor | None = None,
    partition_size: int | None = None,
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
        partition_size: tokens of a partition, a multiple of block_size, or 0 for one partition of all. If None,
            512, or fewer where the device would be idle.
        max_seq_len: bounds the partitions; see `paged_attention_v2`.
        out: `[num_seqs, H, D]` to write to, with a last stride of 1; allocated in the dtype of q if None.

    Returns:
        `[num_seqs, H, D]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    tensors = q, k_cache, v_cache, block_tables, seq_lens
    if partition_size == 0:
        partition_size = max(1, block_tables.shape[-1]) * k_cache.shape[-2]
    return paged_attention_v2(
        *tensors,
        scale=scale,
        alibi_slopes=alibi_slopes,
        partition_size=partition_size,
        max_seq_len=max_seq_len,
        out=out,
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
