"""What the operators of the classic paged attention are given, and its checks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants import VARIANTS
from lightkv.triton_kernels.attention.variants.variant import Flat, flatten, rebuild


class PagedInputs(NamedTuple):
    """The queries, K/V in blocks, the sequences and the options of a call. `paged_attention_v1` describes the
    tensors. `options`: with a scale, and with variants that change scores alone."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    options: AttentionOptions

    @classmethod
    def of_flat(
        cls,
        tensors: Sequence[Tensor],
        variants: str,
        variant_tensors: Sequence[Tensor],
        variant_numbers: Sequence[float],
        scale: float,
    ) -> "PagedInputs":
        """Returns the inputs that `flat` took apart."""
        used = rebuild(Flat(variants, list(variant_tensors), list(variant_numbers)), VARIANTS)
        q, k_cache, v_cache, block_tables, seq_lens = tensors
        return cls(q, k_cache, v_cache, block_tables, seq_lens, AttentionOptions(scale, variants=used))

    def flat(self) -> tuple[list[Tensor], str, list[Tensor], list[float], float]:
        """Returns the inputs as a registered operator takes them."""
        return list(self[:5]), *flatten(self.options.variants), self.options.scale_for(self.q.shape[2])

    def check(self) -> None:
        """Raises ValueError unless the tensors and the scale fit."""
        q, k_cache, v_cache, block_tables, seq_lens, options = self
        if q.dim() != 3 or k_cache.dim() != 5 or v_cache.dim() != 4:
            raise ValueError(
                "q must be [num_seqs, heads, head_dim], k_cache [blocks, kv_heads, head_dim / x, block_size, "
                f"x], v_cache [blocks, kv_heads, head_dim, block_size]; got {tuple(q.shape)}, "
                f"{tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
            )
        num_seqs, num_heads, head_dim = q.shape
        num_blocks, num_kv_heads, num_vecs, block_size, x = k_cache.shape
        if v_cache.shape != (num_blocks, num_kv_heads, head_dim, block_size) or num_vecs * x != head_dim:
            raise ValueError(
                f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} must have the same blocks, "
                f"and the {head_dim} dims of q"
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
        if q.stride(2) != 1:
            raise ValueError(f"the last stride of q must be 1, got {q.stride()}; make it contiguous")
        if not q.dtype == k_cache.dtype == v_cache.dtype:
            raise ValueError(
                f"q, k_cache and v_cache must have one dtype, got {q.dtype}, {k_cache.dtype} and "
                f"{v_cache.dtype}"
            )
        for one in options.variants:
            one.check(q, num_seqs)
        if not options.scale_for(head_dim) > 0:
            raise ValueError(f"scale must be positive, got {options.scale}")

    def output(self, out: Tensor | None) -> Tensor:
        """Returns `out`, or a new tensor of the shape and dtype of q. Raises ValueError if it does not fit."""
        if out is None:
            return torch.empty_like(self.q, memory_format=torch.contiguous_format)
        if out.shape != self.q.shape:
            raise ValueError(f"out must have shape {tuple(self.q.shape)}, got {tuple(out.shape)}")
        if out.stride(2) != 1:
            raise ValueError(f"the last stride of out must be 1, got {out.stride()}; make it contiguous")
        return out

    def keys(self, seq: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Returns K and V of the tokens [begin, end) of a sequence, each `[tokens, num_kv_heads, D]`."""
        block_size = self.k_cache.shape[3]
        positions = torch.arange(begin, end, device=self.q.device)
        blocks, offsets = self.block_tables[seq, positions // block_size].long(), positions % block_size
        return self.k_cache[blocks, :, :, offsets].flatten(2), self.v_cache[blocks, :, :, offsets]
