"""What `attention.py` measures: the rows, their values, the layout that lightkv and FlashInfer read, and the
expected output.

A row's K/V values are made once, request after request. Each side lays them out as it reads them, and the
expected output is computed in float64 from the values themselves.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attend_keys import attend_reference
from lightkv.triton_kernels.attention.paged_kv import HeadShape, PagedKV

TOLERANCE = 2e-2  # relative to an element plus its head's root mean square
REFERENCE_SCORES = 2**27  # the most scores that the reference holds at a time
CONTIGUOUS = 31  # the shift of one run per request
GARBAGE = 8.0  # in free slots: finite, since a peer may read what it masks, but large enough to be found


class Row(NamedTuple):
    """Requests with `lengths` tokens in the cache, the last `q_lens` of which are queries. All requests have
    the first `shared` tokens in common."""

    name: str
    lengths: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    shared: int = 0

    @property
    def is_prefill(self) -> bool:
        return max(self.q_lens) > 1

    @property
    def bytes(self) -> int:
        """The bytes of K/V, read once, and for a prefill also those of the queries and the output."""
        num_tokens = sum(self.lengths) - (len(self.lengths) - 1) * self.shared
        rows = 2 * num_tokens * self.num_kv_heads
        if self.is_prefill:
            rows += 2 * sum(self.q_lens) * self.num_heads
        return rows * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """The operations for the visible pairs of a query and a key."""
        pairs = 0
        for length, q_len in zip(self.lengths, self.q_lens, strict=True):
            pairs += q_len * (length - q_len) + q_len * (q_len + 1) // 2
        return 4 * self.head_dim * self.num_heads * pairs


def even(name: str, batch: int, length: int, num_heads: int = 32, num_kv_heads: int = 8) -> Row:
    return Row(name, (length,) * batch, (1,) * batch, num_heads, num_kv_heads)


def skewed(name: str, batch: int, mean: int, seed: int) -> Row:
    rng = Random(seed)
    lengths = tuple(max(16, int(rng.lognormvariate(0, 1.2) * mean / 2.05)) for _ in range(batch))
    return Row(name, lengths, (1,) * batch)


def chunks(name: str, fresh: Sequence[int], prefixes: Sequence[int]) -> Row:
    lengths = tuple(new + before for new, before in zip(fresh, prefixes, strict=True))
    return Row(name, lengths, tuple(fresh))


def mixed(name: str, fresh: Sequence[int], prefixes: Sequence[int], batch: int, length: int) -> Row:
    """Returns a row of chunks, followed by the decodes of a batch."""
    prefill = chunks(name, fresh, prefixes)
    return Row(name, prefill.lengths + (length,) * batch, prefill.q_lens + (1,) * batch)


def sharing(name: str, batch: int, shared: int, own: int) -> Row:
    return even(name, batch, shared + own)._replace(shared=shared)


DECODE = (
    even("B1 × 1k", 1, 1024),
    even("B1 × 8k", 1, 8192),
    even("B1 × 128k", 1, 131072),
    even("B8 × 4k", 8, 4096),
    even("B32 × 1k", 32, 1024),
    even("B64 × 8k", 64, 8192),
    even("B256 × 2k", 256, 2048),
    skewed("B64 skewed", 64, 4096, 1),
    skewed("B16 skewed", 16, 8192, 3),
    even("64/8 heads, B64 × 4k", 64, 4096, 64),
    even("32/32 heads, B32 × 4k", 32, 4096, 32, 32),
    even("8/1 heads, B64 × 8k", 64, 8192, 8, 1),
)
PREFILL = (
    chunks("4 × 4k fresh", [4096] * 4, [0] * 4),
    chunks("1 × 16k fresh", [16384], [0]),
    chunks("16 × 1k fresh", [1024] * 16, [0] * 16),
    chunks("chunk 2k after 30k", [2048], [30720]),
    chunks("8 × (chunk 512 after 4k)", [512] * 8, [4096] * 8),
    chunks("ragged", [37, 900, 2500, 64, 1200, 333, 4096, 18], [0, 512, 0, 8000, 128, 3000, 0, 16000]),
)


MIXED = (
    mixed("chunk 2k after 6k + 64 × 4k", [2048], [6144], 64, 4096),
    mixed("chunk 512 after 3.5k + 32 × 2k", [512], [3584], 32, 2048),
    mixed("4 × 512 fresh + 256 × 2k", [512] * 4, [0] * 4, 256, 2048),
)
GROUPS = (
    sharing("64 × 512 after the same 16k", 64, 16384, 512),
    sharing("32 × 1k after the same 2k", 32, 2048, 1024),
)
HEAD_DIMS = tuple(  # the heads of Llama-3.2-1B and Gemma-2-9B
    row._replace(name=f"{num_heads}/8/{dim}, {row.name}", num_heads=num_heads, head_dim=dim)
    for num_heads, dim in ((32, 64), (16, 256))
    for row in (PREFILL[0], PREFILL[4])
)
# Rows of decode that are also measured with several queries, and with writing K/V.
SEVERAL_QUERIES = dict.fromkeys(("B1 × 8k", "B32 × 1k", "B64 × 8k"), 8)
WRITTEN = ("B1 × 1k", "B32 × 1k", "B256 × 2k")


def chosen(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Returns the rows whose names contain one of the texts, where x stands for ×; all rows if there are no
    texts."""
    texts = [name.replace("×", "x").lower() for name in names]
    return [
        row for row in rows if not texts or any(text in row.name.replace("×", "x").lower() for text in texts)
    ]


# --------------------------------------------------------------------------------
# Values and expected output


class Batch(NamedTuple):
    """Values of a row, request after request: `q` `[T, H, D]`, the last q_lens tokens; `kv` `[sum(lengths), 2 *
    num_kv_heads, D]`, each token's K heads and then its V heads."""

    q: Tensor
    kv: Tensor
    lengths: list[int]
    q_lens: list[int]
    shared: int = 0  # tokens of the common prefix

    @property
    def num_kv_heads(self) -> int:
        return self.kv.shape[1] // 2

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.q.shape[1], self.num_kv_heads, self.q.shape[2], self.q.shape[2])

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

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
    counts = (sum(row.lengths), 2 * row.num_kv_heads), (sum(row.q_lens), row.num_heads)
    kv, q = (
        torch.randn(*count, row.head_dim, dtype=row.dtype, device=device, generator=generator)
        for count in counts
    )
    for begin in offsets(row.lengths)[1:-1].tolist() if row.shared else ():
        kv[begin : begin + row.shared] = kv[: row.shared]
    return Batch(q, kv, list(row.lengths), list(row.q_lens), row.shared)


def offsets(counts: Sequence[int]) -> Tensor:
    """Returns int32 `[len(counts) + 1]` on the host: where each begins, and the end of the last."""
    return torch.tensor([0, *counts]).cumsum(0).int()


def reference(batch: Batch) -> Tensor:
    """Computes the expected output, float32 `[T, H, D]`, from the values themselves, some queries at a time."""
    out = torch.empty(batch.q.shape, dtype=torch.float32, device=batch.q.device)
    num_heads = batch.q.shape[1]
    q_begin = kv_begin = 0
    for length, q_len in zip(batch.lengths, batch.q_lens, strict=True):
        k, v = batch.kv[kv_begin : kv_begin + length].chunk(2, dim=1)
        count = max(1, REFERENCE_SCORES // (num_heads * length))
        for begin in range(0, q_len, count):
            end = min(begin + count, q_len)
            visible = length - q_len + end  # keys that the last of these queries sees
            out[q_begin + begin : q_begin + end] = attend_reference(
                batch.q[q_begin + begin : q_begin + end],
                k[:visible],
                v[:visible],
                torch.arange(visible - (end - begin), visible, device=out.device),
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
# The layout that lightkv and FlashInfer read


class Paged(NamedTuple):
    """A batch's K/V in pages of 2**shift tokens, or with shift 31 in one run per request, in random order. Slot
    0 (or its page) and slots between runs are free. Requests share whole pages of common tokens."""

    pool: Tensor  # [num_slots, 2 * num_kv_heads, D]
    first_slots: Tensor  # int32 [B, most pages of a request]: each page's first slot; 0 past a request's end
    slots: Tensor  # int64 [sum(lengths)]: each token's slot
    num_pages: list[int]  # of each request
    shift: int

    @property
    def table(self) -> Tensor:
        """int32 `[B, most pages of a request]`: the pages' numbers."""
        return self.first_slots >> self.shift

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """`[num_slots, num_kv_heads, D]` of K and of V: views of the pool."""
        k_cache, v_cache = self.pool.chunk(2, dim=1)
        return k_cache, v_cache

    @property
    def kv(self) -> PagedKV:
        """The pool and the index, as lightkv's operators take them."""
        return PagedKV(*self.caches, self.first_slots, self.shift)

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """`[num_pages, 2**shift, num_kv_heads, D]` of K and of V: views, as FlashInfer reads them."""
        k_pages, v_pages = self.pool.unflatten(0, (-1, 1 << self.shift)).chunk(2, dim=2)
        return k_pages, v_pages


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
    return Paged(pool, first_slots, slots, num_pages, shift)
