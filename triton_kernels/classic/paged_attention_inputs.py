"""Checks what the operators of the classic paged attention are given."""

import torch
from torch import Tensor


def check_paged_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    scale: float,
) -> None:
    """Raises ValueError unless the arguments of `paged_attention_v1`, which are described there, fit."""
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
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"q, k_cache and v_cache must have one dtype, got {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
        )
    if alibi_slopes is not None and (
        alibi_slopes.dtype != torch.float32
        or alibi_slopes.shape != (num_heads,)
        or not alibi_slopes.is_contiguous()
    ):
        raise ValueError(
            f"alibi_slopes must be contiguous float32 [{num_heads}], one for each query head; got "
            f"{alibi_slopes.dtype} {tuple(alibi_slopes.shape)}"
        )
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
