"""What the operators of the classic paged attention are given, and its checks."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.checks import Tensors

_TAKEN = Tensors(
    q="[S, H, D] with a last stride of 1",
    k_cache="[blocks, h, vectors, block_size, x]",
    v_cache="[blocks, h, D, block_size]",
    block_tables="contiguous int32 [S, entries]",
    seq_lens="contiguous int32 [S]",
    out="[S, H, D] with a last stride of 1",
)


class PagedInputs(NamedTuple):
    """The queries, K/V in blocks, the sequences and the options of a call. `paged_attention_v1` describes the
    tensors. `options`: with a scale, and with variants that change scores alone."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    options: AttentionOptions

    def check(self, out: Tensor | None) -> Tensor:
        """Returns `out`, or a new tensor of the shape and dtype of q. Raises ValueError unless the tensors and
        the scale fit."""
        q, k_cache, v_cache, block_tables, seq_lens, options = self
        tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": block_tables}
        sizes = _TAKEN.check({}, **tensors, seq_lens=seq_lens, out=out)
        num_seqs, num_heads, head_dim, block_size, x = (
            sizes[one] for one in ("S", "H", "D", "block_size", "x")
        )
        if sizes["vectors"] * x != head_dim or num_heads % sizes["h"]:
            raise ValueError(
                f"k_cache {tuple(k_cache.shape)} must have the {head_dim} dims of q in vectors, and "
                f"{num_heads} query heads share {sizes['h']} K/V heads evenly"
            )
        if block_size & (block_size - 1) or x & (x - 1):
            raise ValueError(f"block_size and x must be powers of two, got {block_size} and {x}")
        if k_cache.stride()[2:] != (block_size * x, x, 1) or v_cache.stride()[2:] != (block_size, 1):
            raise ValueError(
                "a head's part of a block must be contiguous, got strides "
                f"{k_cache.stride()} and {v_cache.stride()}"
            )
        if not q.dtype == k_cache.dtype == v_cache.dtype:
            raise ValueError(
                f"q and caches must have one dtype, got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
            )
        for one in options.variants:
            one.check(q, num_seqs)
        if not options.scale_for(head_dim) > 0:
            raise ValueError(f"scale must be positive, got {options.scale}")
        return torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out

    def keys(self, seq: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Returns K and V of the tokens [begin, end) of a sequence, each `[tokens, num_kv_heads, D]`."""
        block_size = self.k_cache.shape[3]
        positions = torch.arange(begin, end, device=self.q.device)
        blocks, offsets = self.block_tables[seq, positions // block_size].long(), positions % block_size
        return self.k_cache[blocks, :, :, offsets].flatten(2), self.v_cache[blocks, :, :, offsets]
