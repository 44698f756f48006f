"""What the sides of `attention.py` get: the values of a row, the layout that lightkv and its peers read, and
the expected output.

A row's K/V values are made once, request after request. Each side lays them out as it reads them, and the
expected output is computed in float64 from the values themselves.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.lookups import Pages
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, HeadShape, PagedKV
from lightkv.triton_kernels.attention.variants.variant import Scored

from .attention_rows import Row

TOLERANCE = 2e-2  # relative to an element plus its head's root mean square
REFERENCE_SCORES = 2**27  # the most scores that the reference holds at a time
CONTIGUOUS = 31  # the shift of one run per request
GARBAGE = 8.0  # in free slots: finite, since a peer may read what it masks, but large enough to be found


# --------------------------------------------------------------------------------
# Values and expected output


class Batch(NamedTuple):
    """Values of a row, request after request: `q` `[T, H, Dk]`, the last q_lens tokens; `kv` `[sum(lengths),
    num_kv_heads * (Dk + Dv)]`, each token's K heads and then its V heads."""

    q: Tensor
    kv: Tensor
    lengths: list[int]
    q_lens: list[int]
    heads: HeadShape
    shared: int = 0  # tokens of the common prefix

    @property
    def num_kv_heads(self) -> int:
        return self.heads.num_kv_heads

    @property
    def keys_values(self) -> tuple[Tensor, Tensor]:
        """`[sum(lengths), num_kv_heads, Dk]` and `[..., Dv]`: views of `kv`."""
        return split_heads(self.kv, self.heads)

    @property
    def scale(self) -> float:
        return float(self.heads.key_dim**-0.5)

    def empty_out(self) -> Tensor:
        """Returns a new tensor for the output, `[T, H, Dv]`."""
        return self.q.new_empty(*self.q.shape[:2], self.heads.value_dim)

    def is_even(self) -> bool:
        """Returns whether all requests have the same length and number of queries, so that they fit a dense
        tensor."""
        return len(set(self.lengths)) == len(set(self.q_lens)) == 1

    @property
    def num_prefills(self) -> int:
        """The number of requests with several queries, which come first."""
        return sum(q_len > 1 for q_len in self.q_lens)


def make_batch(row: Row, device: torch.device) -> Batch:
    """Makes normal random values, the same each time; K/V does not depend on the number of queries."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (sum(row.lengths), row.num_kv_heads * row.dims), (sum(row.q_lens), row.num_heads, row.head_dim)
    kv, q = (torch.randn(*size, dtype=row.dtype, device=device, generator=generator) for size in sizes)
    heads = HeadShape(row.num_heads, row.num_kv_heads, row.head_dim, row.dims - row.head_dim)
    for begin in offsets(row.lengths)[1:-1].tolist() if row.shared else ():
        kv[begin : begin + row.shared] = kv[: row.shared]
    return Batch(q, kv, list(row.lengths), list(row.q_lens), heads, row.shared)


def split_heads(kv: Tensor, heads: HeadShape) -> tuple[Tensor, Tensor]:
    """Returns views of K and V `[n, num_kv_heads, D]` in rows `[n, num_kv_heads * (Dk + Dv)]`."""
    width = heads.num_kv_heads * heads.key_dim
    return kv[:, :width].unflatten(1, (-1, heads.key_dim)), kv[:, width:].unflatten(1, (-1, heads.value_dim))


def offsets(counts: Sequence[int]) -> Tensor:
    """Returns int32 `[len(counts) + 1]` on the host: where each begins, and the end of the last."""
    return torch.tensor([0, *counts]).cumsum(0).int()


def reference(batch: Batch) -> Tensor:
    """Computes the expected output, float32 `[T, H, Dv]`, from the values, some queries at a time."""
    out = batch.empty_out().float()
    num_heads, (keys, values) = batch.heads.num_heads, batch.keys_values
    q_begin = kv_begin = 0
    for length, q_len in zip(batch.lengths, batch.q_lens, strict=True):
        k, v = (half[kv_begin : kv_begin + length] for half in (keys, values))
        count = max(1, REFERENCE_SCORES // (num_heads * length))
        for begin in range(0, q_len, count):
            end = min(begin + count, q_len)
            visible = length - q_len + end  # keys that the last of these queries sees
            out[q_begin + begin : q_begin + end] = attend_reference(
                batch.q[q_begin + begin : q_begin + end],
                k[:visible],
                v[:visible],
                DEFAULT_OPTIONS,
                Scored.of_last(slice(0, end - begin), 0, visible, out.device),
            )
        q_begin, kv_begin = q_begin + q_len, kv_begin + length
    return out


def check(got: Tensor, expected: Tensor) -> None:
    """Raises ArithmeticError unless every element is close to the expected one.

    The bound is relative to the element and its head: the mean of many values is small, so an absolute bound
    that suits short requests would accept zeros for long ones.
    """
    size = expected.square().mean(dim=-1, keepdim=True).sqrt() + expected.abs()
    error = (got.float() - expected).abs() / size
    if not bool((error <= TOLERANCE).all()):
        worst = error.nan_to_num(float("inf")).max().item()
        raise ArithmeticError(f"wrong by up to {worst:.3g} of the values' size, more than {TOLERANCE}")


# --------------------------------------------------------------------------------
# The layout that lightkv and its peers read


class Paged(NamedTuple):
    """A batch's K/V in pages of 2**shift tokens, or with shift 31 in one run per request, in random order. Slot
    0 (or its page) and slots between runs are free. Requests share whole pages of common tokens."""

    pool: Tensor  # [num_slots, num_kv_heads * (Dk + Dv)]
    first_slots: Tensor  # int32 [B, most pages of a request]: each page's first slot; 0 past a request's end
    slots: Tensor  # int64 [sum(lengths)]: each token's slot
    num_pages: list[int]  # of each request
    shift: int
    heads: HeadShape

    @property
    def table(self) -> Tensor:
        """int32 `[B, most pages of a request]`: the pages' numbers."""
        return self.first_slots >> self.shift

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """`[num_slots, num_kv_heads, D]` of K and of V: views of the pool."""
        return split_heads(self.pool, self.heads)

    @property
    def kv(self) -> PagedKV:
        """The pool and the index, as lightkv's operators take them."""
        return PagedKV(*self.caches, self.first_slots, Pages(self.shift))

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """`[num_pages, 2**shift, num_kv_heads, D]` of K and of V: views, as FlashInfer and FlashAttention 3
        read them."""
        k_pages, v_pages = (cache.unflatten(0, (-1, 1 << self.shift)) for cache in self.caches)
        return k_pages, v_pages

    @property
    def blocks(self) -> Tensor:
        """`[num_slots, blocks, elements]`: the pool's rows in blocks of a power of two, which a kernel that
        only reads needs."""
        dims = self.heads.key_dim | self.heads.value_dim
        return self.pool.unflatten(1, (-1, dims & -dims))


def copy_to_blocks(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Copies K/V of a pool to the layout of `paged_attention_v1`. k_cache and v_cache are `[num_slots,
    num_kv_heads, D]`; slots, an integer tensor `[num_blocks, block_size]`, names the slot to copy to each place
    of each block. Returns k_cache and v_cache of num_blocks blocks. Raises ValueError if D is not a multiple of
    the x dims in 16 bytes."""
    x = 16 // k_cache.element_size()
    if k_cache.shape != v_cache.shape or k_cache.shape[2] % x:
        raise ValueError(
            f"K and V must be alike, with a multiple of {x} dims; got {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    k, v = k_cache[slots.long()], v_cache[slots.long()]  # [num_blocks, block_size, num_kv_heads, D]
    return k.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()


def scatter(batch: Batch, shift: int) -> Paged:
    """Writes the batch's K/V to the pages, or runs, of a new pool."""
    device, page = batch.kv.device, 1 << shift
    generator = torch.Generator(device).manual_seed(shift + 1)
    lengths = torch.tensor(batch.lengths, device=device)
    if shift == CONTIGUOUS:
        num_pages = [1] * len(lengths)
        order = torch.randperm(len(lengths), device=device, generator=generator)
        ends = (lengths[order] + 1).cumsum(0)
        first_slots = torch.empty_like(lengths)
        first_slots[order] = ends - lengths[order]
        first_slots, num_slots = first_slots[:, None].int(), 1 + sum(batch.lengths) + len(lengths)
    else:
        num_pages = [-(-length // page) for length in batch.lengths]
        counts = torch.tensor(num_pages, device=device)
        order = 1 + torch.randperm(sum(num_pages), device=device, generator=generator)
        first_slots = torch.zeros(len(num_pages), max(num_pages), dtype=torch.int32, device=device)
        is_page = torch.arange(max(num_pages), device=device) < counts[:, None]
        first_slots[is_page] = order.int() << shift
        first_slots[:, : batch.shared >> shift] = first_slots[0, : batch.shared >> shift].clone()
        num_slots = (1 + sum(num_pages)) << shift

    request = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    positions = torch.arange(len(request), device=device) - (lengths.cumsum(0) - lengths)[request]
    slots = first_slots[request, positions >> shift].long() + (positions & (page - 1))
    pool = torch.full((num_slots, *batch.kv.shape[1:]), GARBAGE, dtype=batch.kv.dtype, device=device)
    pool[slots] = batch.kv
    return Paged(pool, first_slots, slots, num_pages, shift, batch.heads)
