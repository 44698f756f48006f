"""The classic paged attention of vLLM (v1): one query per sequence, K/V in blocks of a layout made for its
loads.

It is a baseline; lightkv itself attends with `decode_attention.py`. A block holds some tokens of one sequence,
head by head. Keys are cut into vectors of x dims (16 bytes), and the same vector of all tokens of a block is
side by side; of values, all tokens of one dim are side by side:

    k_cache  [num_blocks, num_kv_heads, head_dim / x, block_size, x]
    v_cache  [num_blocks, num_kv_heads, head_dim, block_size]

A program has one query head of one sequence and one partition of its tokens. In the one-pass form a partition
is all of them; otherwise `merge_states` merges the partitions. Sums run over lanes, without matrix
instructions, and every query head reads its K/V head again. Unlike the original, it stores no scores: its
softmax is a running one.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.attend_keys import LOG2_E
from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.merge_states import merge_states
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions

from . import tuning


@triton.jit(do_not_specialize_on_alignment=["block_tables", "seq_lens"])
def _paged_attention_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    out,  # [num_seqs, H, D], or in partitions float32 [num_seqs, H, num_partitions, D]
    lse,  # float32 [num_seqs, H, num_partitions], base 2; None in one pass
    score_scale,
    stride_q_seq,
    stride_q_h,
    stride_k_block,
    stride_k_h,
    stride_v_block,
    stride_v_h,
    stride_table,
    stride_out_seq,
    stride_out_h,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTITION_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    partition = tl.program_id(2)
    begin = partition * PARTITION_SIZE
    end = tl.load(seq_lens + seq)
    out += seq * stride_out_seq + head * stride_out_h
    if PARTITION_SIZE > 0:
        lse += (seq * tl.num_programs(0) + head) * tl.num_programs(2) + partition
        if begin >= end:
            tl.store(lse, float("-inf"))
            return
        out += partition * D
        end = tl.minimum(end, begin + PARTITION_SIZE)

    vecs = tl.arange(0, BLOCK_D // X)[:, None, None]
    lanes = tl.arange(0, X)[None, None, :]
    dims = tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, BLOCK_N)
    table = block_tables + seq * stride_table
    k_head = k_cache + head // GROUP * stride_k_h + vecs * (BLOCK_SIZE * X) + lanes
    v_head = v_cache + head // GROUP * stride_v_h + dims[:, None] * BLOCK_SIZE
    in_head = vecs < D // X
    q_vecs = tl.load(q + seq * stride_q_seq + head * stride_q_h + vecs * X + lanes, mask=in_head, other=0.0)
    q_vecs = q_vecs.to(tl.float32) * score_scale  # [BLOCK_D / X, 1, X]

    # The peak starts at a finite number, not at -inf: weights of a masked first tile are 0, not NaN.
    peak = -1.0e30
    total = tl.zeros([BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_N], tl.float32)  # summed over the tokens at the end
    full_end = begin + (end - begin) // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(0, 2):
        for start in range(full_end if MASKED else begin, end if MASKED else full_end, BLOCK_N):
            positions = start + tokens
            offsets = positions % BLOCK_SIZE
            if MASKED:
                valid = positions < end
                block = tl.load(table + positions // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
                k_mask = in_head & valid[None, :, None]
                v_mask = (dims < D)[:, None] & valid[None, :]
            else:
                block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
                k_mask = in_head
                v_mask = (dims < D)[:, None]
            k_offsets = (block * stride_k_block + offsets * X)[None, :, None]
            k = tl.load(k_head + k_offsets, mask=k_mask, other=0.0)  # [BLOCK_D / X, BLOCK_N, X]
            v = tl.load(v_head + (block * stride_v_block + offsets)[None, :], mask=v_mask, other=0.0)

            scores = tl.sum(tl.sum(q_vecs * k.to(tl.float32), 2), 0)  # [BLOCK_N]
            if MASKED:
                scores = tl.where(valid, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 0))
            weights = tl.exp2(scores - new_peak)
            decay = tl.exp2(peak - new_peak)
            total = total * decay + weights
            acc = acc * decay + weights[None, :] * v.to(tl.float32)
            peak = new_peak

    total = tl.sum(total, 0)
    result = tl.sum(acc, 1) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + dims, result.to(out.dtype.element_ty), mask=dims < D)
    if PARTITION_SIZE > 0:
        tl.store(lse, peak + tl.log2(total))


@torch.library.custom_op("lightkv::paged_attention_v1", mutates_args=("out", "lse"))
def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    partition_size: int,
) -> None:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, _, block_size, x = k_cache.shape[1:]
    if num_seqs == 0:
        return
    grid = num_heads, num_seqs, 1 if lse is None else lse.shape[2]
    device = tuning.device_class(q.device)
    launch = tuning.paged_attention_launch(device, head_dim, math.prod(grid))
    _paged_attention_kernel[grid](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        lse,
        scale * LOG2_E,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        block_tables.stride(0),
        *out.stride()[:2],
        GROUP=num_heads // num_kv_heads,
        D=head_dim,
        X=x,
        BLOCK_SIZE=block_size,
        PARTITION_SIZE=partition_size,
        BLOCK_D=tuning.padded_dim(head_dim),
        BLOCK_N=launch.block_n,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


_paged_attention.register_fake(lambda *_: None)  # the outputs are arguments


def paged_attention_v1(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    partition_size: int = 0,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the attention of each sequence's newest token to all its tokens, itself included.

    Args:
        q: `[num_seqs, H, D]`, any strides, except that the last one is 1; H is a multiple of num_kv_heads and D
            of x; query head h reads K/V head h // (H / num_kv_heads).
        k_cache: `[num_blocks, num_kv_heads, D / x, block_size, x]`, with one head of a block contiguous;
            block_size and x are powers of two (usually 8, 16 or 32, and 16 bytes).
        v_cache: `[num_blocks, num_kv_heads, D, block_size]`, likewise.
        block_tables: int32 `[num_seqs, max_blocks]`, contiguous: the block of each block_size tokens of a
            sequence.
        seq_lens: int32 `[num_seqs]`, tokens of each sequence; at most max_blocks * block_size and max_seq_len,
            which is not checked. The output of a sequence of length 0 is zeros.
        scale: multiplies the scores; positive.
        partition_size: tokens per program, a multiple of block_size (usually 512); 0 for all of them, in one
            pass.
        max_seq_len: bounds the partitions that are launched; if None, the capacity of the tables does.
        out: `[num_seqs, H, D]` to write to, with a last stride of 1; allocated in the dtype of q if None.

    Returns:
        `[num_seqs, H, D]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    _check(q, k_cache, v_cache, block_tables, seq_lens, out, scale, partition_size)
    block_size = k_cache.shape[3]
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    arguments = (q, k_cache, v_cache, block_tables, seq_lens)
    if partition_size == 0:
        _paged_attention(*arguments, out, None, scale, 0)
        return out
    room = block_tables.shape[1] * block_size
    longest = room if max_seq_len is None else max_seq_len
    if not 0 <= longest <= room:
        raise ValueError(f"max_seq_len must be at most the {room} tokens of a table, got {longest}")
    num_partitions = max(1, triton.cdiv(longest, partition_size))
    shape = (*q.shape[:2], num_partitions)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
    _paged_attention(*arguments, partial_out, lse, scale, partition_size)
    merge_states(partial_out.permute(2, 0, 1, 3), lse.permute(2, 0, 1), out=out)
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor | None,
    scale: float,
    partition_size: int,
) -> None:
    if q.dim() != 3 or k_cache.dim() != 5 or v_cache.dim() != 4:
        raise ValueError(
            "q must be [num_seqs, heads, head_dim], k_cache [blocks, kv_heads, head_dim / x, block_size, x], "
            f"v_cache [blocks, kv_heads, head_dim, block_size]; got {tuple(q.shape)}, {tuple(k_cache.shape)}, "
            f"{tuple(v_cache.shape)}"
        )
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, num_vecs, block_size, x = k_cache.shape
    if v_cache.shape != (num_blocks, num_kv_heads, head_dim, block_size) or num_vecs * x != head_dim:
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} must have the same blocks, and "
            f"the {head_dim} dims of q"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not share {num_kv_heads} K/V heads evenly")
    if block_size & (block_size - 1) or x & (x - 1):
        raise ValueError(f"block_size and x must be powers of two, got {block_size} and {x}")
    if k_cache.stride()[2:] != (block_size * x, x, 1) or v_cache.stride()[2:] != (block_size, 1):
        raise ValueError(
            "a head's part of a block must be contiguous, got strides "
            f"{k_cache.stride()} and {v_cache.stride()}"
        )
    if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or not block_tables.is_contiguous():
        raise ValueError(
            f"block_tables must be contiguous int32 [num_seqs, blocks], got {block_tables.dtype}"
        )
    if seq_lens.dtype != torch.int32 or seq_lens.dim() != 1 or not seq_lens.is_contiguous():
        raise ValueError(f"seq_lens must be contiguous int32 [num_seqs], got {seq_lens.dtype}")
    if len(block_tables) != num_seqs or len(seq_lens) != num_seqs:
        raise ValueError(
            f"q has {num_seqs} sequences, block_tables {len(block_tables)}, seq_lens {len(seq_lens)}"
        )
    if out is not None and out.shape != q.shape:
        raise ValueError(f"out must have shape {tuple(q.shape)}, got {tuple(out.shape)}")
    for name, tensor in (("q", q), ("out", out)):
        if tensor is not None and tensor.stride(2) != 1:
            raise ValueError(
                f"the last stride of {name} must be 1, got {tensor.stride()}; make it contiguous"
            )
    if not scale > 0 or partition_size < 0 or partition_size % block_size:
        raise ValueError(
            f"scale must be positive, and partition_size a multiple of the {block_size} tokens of a block, or "
            f"0; got {scale} and {partition_size}"
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
) -> Tensor:
    """Computes `paged_attention_v1` in plain torch and float64, one sequence at a time. Reads tables and
    lengths on the host, so on a GPU it synchronises."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    block_size = k_cache.shape[3]
    for seq, length in enumerate(seq_lens.tolist()):
        positions = torch.arange(length, device=q.device)
        blocks, offsets = block_tables[seq, positions // block_size].long(), positions % block_size
        k = k_cache[blocks, :, :, offsets].flatten(2)  # [length, num_kv_heads, D]
        v = v_cache[blocks, :, :, offsets]
        last = torch.tensor([length - 1], device=q.device)
        result = attend_reference(q[seq : seq + 1], k, v, last, AttentionOptions(scale))
        out[seq] = result[0].to(q.dtype)
    return out
