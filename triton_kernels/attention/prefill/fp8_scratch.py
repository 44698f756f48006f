"""K and V of whole requests in fp8, laid out as Hopper's fp8 products read them.

    request      0                      1
    scratch   [ k0 k1 k2 . . . . . . | k0 k1 . . . ]     request b begins at begins[b], a multiple of 128

A weighted sum of V is a product over keys, and an fp8 product reads what it adds up next to each other. So V
lies transposed: the keys of a dim are neighbours. Of every 16 keys, those that one thread of a warp holds the
scores of lie together, so that weights need not be moved between threads:

    place   0 1 2 3   4 5  6  7   8 9 10 11   12 13 14 15
    key     0 1 8 9   2 3 10 11   4 5 12 13    6  7 14 15
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attend_keys import slots_at
from lightkv.triton_kernels.attention.attention_inputs import check_scales
from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.paged_kv import HeadShape, PagedKV
from lightkv.triton_kernels.layout.strides import has_unit_stride

from .scratch_requests import block_of, check_requests_of, find_requests

ALIGNMENT = 128  # keys; the requests of a scratch begin at multiples of it
LARGEST = 448.0  # of e4m3
_LARGEST = tl.constexpr(LARGEST)


class Fp8Scratch(NamedTuple):
    """K and V of requests in e4m3.

    `k`: `[capacity, num_kv_heads, Dk]`, contiguous; `capacity` is a multiple of 128.
    `v`: `[num_kv_heads, Dv, capacity]`, contiguous, its keys in the order above; zeros after a request's last
    key, up to a multiple of 128.
    `begins`: int32 `[B]`, contiguous, ascending multiples of 128: where the keys of each request begin.
    `scales`: float32 `[num_kv_heads, 2]`, contiguous: a value of K and of V is `element * scale`.
    """

    k: Tensor
    v: Tensor
    begins: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, capacity: int, heads: HeadShape, begins: Tensor, scales: Tensor) -> "Fp8Scratch":
        """Returns a scratch on the device of `begins` whose keys are not written. Raises ValueError for a
        capacity that is no multiple of 128."""
        if capacity % ALIGNMENT:
            raise ValueError(f"the capacity is {capacity}; give a multiple of {ALIGNMENT}")
        kind, device = torch.float8_e4m3fn, begins.device
        k = torch.empty(capacity, heads.num_kv_heads, heads.key_dim, dtype=kind, device=device)
        v = torch.empty(heads.num_kv_heads, heads.value_dim, capacity, dtype=kind, device=device)
        return cls(k, v, begins, scales)

    def read(self, request: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns the first `length` keys of a request in plain torch, float32 `[length, num_kv_heads, Dk]` and
        `[length, num_kv_heads, Dv]`. Synchronises."""
        begin = int(self.begins[request])
        keys = torch.arange(length, device=self.k.device)
        places = begin + (keys & ~15 | (keys & 6) << 1 | (keys & 8) >> 2 | keys & 1)
        k = self.k[begin : begin + length].float() * self.scales[:, :1]
        v = self.v.float()[:, :, places].permute(2, 0, 1) * self.scales[:, 1:]
        return k, v


class _Words(NamedTuple):
    """K or V as words of four elements, and the scratch that it is copied to. `WORDS`: of a head."""

    stored: Any
    out: Any
    stride_slot: Any
    stride_head: Any
    WORDS: Any
    BLOCK: Any


@triton.jit
def _byte(words, WHICH: tl.constexpr):
    """Returns one of the four bytes of int32 words."""
    return (words >> (8 * WHICH)) & 255


@triton.jit
def _bytes_of(w0, w1, w2, w3, WHICH: tl.constexpr):
    """Returns words of the same byte of four words."""
    low = _byte(w0, WHICH) | (_byte(w1, WHICH) << 8)
    return low | (_byte(w2, WHICH) << 16) | (_byte(w3, WHICH) << 24)


@triton.jit
def _load_keys(heads, head, index_row, keys, length, words, SHIFT: tl.constexpr):
    """Returns the words of keys, zeros for those that are not there. `heads`: `_Words`."""
    valid = keys < length
    slots = slots_at(index_row, keys, valid, SHIFT)
    mask = valid[:, None] & (words < heads.WORDS)[None, :]
    places = heads.stored + head * heads.stride_head + slots[:, None] * heads.stride_slot
    return tl.load(places + words[None, :], mask=mask, other=0)


@triton.jit
def _copy_keys(
    heads, head, target, index_row, begin, length, stride_out, SHIFT: tl.constexpr, BLOCK_T: tl.constexpr
):
    keys = tl.arange(0, BLOCK_T)
    words = tl.arange(0, heads.BLOCK)
    found = _load_keys(heads, head, index_row, begin + keys, length, words, SHIFT)
    mask = (begin + keys < length)[:, None] & (words < heads.WORDS)[None, :]
    tl.store(target + keys[:, None] * stride_out + words[None, :], found, mask=mask)


@triton.jit
def _transpose_values(
    heads, head, target, index_row, begin, length, stride_out, SHIFT: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Four words of four keys' V become four words of four dims: [BLOCK_T / 4, words] each."""
    fours = tl.arange(0, BLOCK_T // 4)
    words = tl.arange(0, heads.BLOCK)
    keys = begin + fours // 4 * 16 + fours % 4 * 2  # the first of the four
    w0 = _load_keys(heads, head, index_row, keys, length, words, SHIFT)
    w1 = _load_keys(heads, head, index_row, keys + 1, length, words, SHIFT)
    w2 = _load_keys(heads, head, index_row, keys + 8, length, words, SHIFT)
    w3 = _load_keys(heads, head, index_row, keys + 9, length, words, SHIFT)
    target += 4 * words.to(tl.int64)[:, None] * stride_out + fours[None, :]
    mask = (words < heads.WORDS)[:, None] & (fours >= 0)[None, :]
    for which in tl.static_range(4):
        tl.store(target + which * stride_out, tl.trans(_bytes_of(w0, w1, w2, w3, which)), mask=mask)


@triton.jit(
    do_not_specialize=["num_requests", "capacity"],
    do_not_specialize_on_alignment=["index", "rows", "lengths", "begins"],
)
def _fill_kernel(
    k,  # `_Words`
    v,
    index,
    rows,
    lengths,
    begins,
    num_requests,
    capacity,
    stride_index,
    KV_HEADS: tl.constexpr,
    SHIFT: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    program, first, exists = block_of(begins, lengths, num_requests, capacity, KV_HEADS, BLOCK_T)
    if exists:
        # Requests begin at multiples of the block, so all of it is of the first token's.
        request = tl.max(find_requests(begins, first, num_requests, TURNS, BLOCK_T))
        found = request >= 0
        length = tl.load(lengths + request, mask=found, other=0)
        begin = first - tl.load(begins + request, mask=found, other=0)
        row = tl.load(rows + request, mask=found, other=0).to(tl.int64)
        index_row = index + row * stride_index
        if program < KV_HEADS:
            head = program.to(tl.int64)
            target = k.out + (first.to(tl.int64) * KV_HEADS + head) * k.WORDS
            _copy_keys(k, head, target, index_row, begin, length, KV_HEADS * k.WORDS, SHIFT, BLOCK_T)
        else:
            head = (program - KV_HEADS).to(tl.int64)
            target = v.out + head * v.WORDS * capacity + first // 4
            _transpose_values(v, head, target, index_row, begin, length, capacity // 4, SHIFT, BLOCK_T)


def fill_fp8_scratch(kv: PagedKV, rows: Tensor, lengths: Tensor, scratch: Fp8Scratch) -> None:
    """Writes the elements of the first `lengths[b]` tokens of each request to a scratch.

    Everything that varies is read on the device, and the grid follows from the scratch: nothing synchronises,
    and a captured launch may be replayed. The values of rows, lengths and begins are not checked: a request's
    keys, rounded up to a multiple of 128, have to end before those of the next, and within the scratch.

    Args:
        kv: the K/V of a layer and its index, with a plain lookup, in e4m3 with static
            scales. Its strides and head dims are multiples of 16.
        rows: int32 or int64 `[B]`, contiguous: each request's row of the index.
        lengths: int32 `[B]`, contiguous.
        scratch: of the same heads.

    Raises:
        ValueError: shapes or dtypes do not fit, or the K/V is stored otherwise. Nothing is written then.
    """
    _check(kv, rows, lengths, scratch)
    capacity, num_kv_heads, key_dim = scratch.k.shape
    if not capacity or not len(rows):
        return
    _fill_kernel[(2 * num_kv_heads * (capacity // ALIGNMENT),)](
        _words_of(kv.k, scratch.k, key_dim),
        _words_of(kv.v, scratch.v, kv.value_dim),
        kv.index,
        rows,
        lengths,
        scratch.begins,
        len(rows),
        capacity,
        kv.index.stride(0),
        KV_HEADS=num_kv_heads,
        SHIFT=kv.lookup.page_shift,
        TURNS=tuning.block_for(len(rows)).bit_length(),
        BLOCK_T=ALIGNMENT,
        num_warps=4,
    )


def _words_of(stored: Tensor, out: Tensor, dim: int) -> _Words:
    """Returns K or V and its scratch as the kernel takes them."""
    words = stored.view(torch.int32)
    constants = tl.constexpr(dim // 4), tl.constexpr(tuning.padded_dim(dim) // 4)
    return _Words(words, out.view(torch.int32), words.stride(0), words.stride(1), *constants)


def _check(kv: PagedKV, rows: Tensor, lengths: Tensor, scratch: Fp8Scratch) -> None:
    """Raises ValueError where the arguments of `fill_fp8_scratch` do not fit each other."""
    if not kv.lookup.is_plain:
        raise ValueError(
            f"K/V that {type(kv.lookup).__name__} finds is not copied to a scratch in fp8; use the token table"
        )
    if not (kv.format.elements.is_float and kv.format.is_static):
        raise ValueError(
            f"the K/V is stored as {kv.format}; prefill in fp8 reads fp8 with static scales (fp8-static)"
        )
    check_scales(kv)
    check_requests_of(kv, rows, lengths, scratch.begins, "begins")
    if not (has_unit_stride(kv.k) and has_unit_stride(kv.v)):
        raise ValueError(f"the last stride of K and V must be 1, got {kv.k.stride()} and {kv.v.stride()}")
    sizes = *kv.k.stride()[:2], *kv.v.stride()[:2], kv.key_dim, kv.value_dim
    if any(size % 16 for size in sizes):
        raise ValueError(f"strides and head dims of K and V must be multiples of 16, got {sizes}")
    heads = kv.k.shape[1]
    wanted = (len(scratch.k), heads, kv.key_dim), (heads, kv.value_dim, len(scratch.k))
    if (scratch.k.shape, scratch.v.shape) != wanted or scratch.scales.shape != (heads, 2):
        raise ValueError(
            f"the scratch must be {wanted[0]} and {wanted[1]} with scales {(heads, 2)}, got "
            f"{tuple(scratch.k.shape)}, {tuple(scratch.v.shape)} and {tuple(scratch.scales.shape)}"
        )


def fill_fp8_scratch_reference(kv: PagedKV, rows: Tensor, lengths: Tensor, scratch: Fp8Scratch) -> None:
    """Computes `fill_fp8_scratch` in plain torch. Synchronises."""
    _check(kv, rows, lengths, scratch)
    places = torch.arange(len(scratch.k), device=kv.k.device)
    keys = places & ~15 | (places & 2) << 2 | (places & 12) >> 1 | places & 1
    for row, length, begin in zip(rows.tolist(), lengths.tolist(), scratch.begins.tolist(), strict=True):
        slots = slots_reference(kv, row, torch.arange(length, device=kv.k.device))
        end = begin + -(-length // ALIGNMENT) * ALIGNMENT
        k, v, out_k, out_v = (part.view(torch.uint8) for part in (kv.k, kv.v, scratch.k, scratch.v))
        out_k[begin : begin + length] = k[slots]
        padded = torch.cat((v[slots], torch.zeros_like(v[:1])))
        out_v[:, :, begin:end] = padded[keys[: end - begin].clamp(max=length)].permute(1, 2, 0)


def to_fp8_reference(x: Tensor, scale: float) -> Tensor:
    """Returns x in e4m3 in units of `scale`, rounded to even and bounded."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_kernel(
    x, out, num_rows, scale, stride_t, stride_h, H: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (dims < D)[None, :]
    source = x + (rows // H).to(tl.int64)[:, None] * stride_t + (rows % H)[:, None] * stride_h + dims[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32) / scale
    values = tl.clamp(values, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL).to(kind)
    tl.store(out + rows.to(tl.int64)[:, None] * D + dims[None, :], values, mask=mask)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """Returns heads `[T, H, D]`, whose last stride is 1, in e4m3 in units of `scale`, contiguous."""
    num_tokens, num_heads, dim = x.shape
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    block_d = tuning.padded_dim(dim)
    block_r = max(1, 4096 // block_d)
    if num_tokens:
        _quantise_kernel[(triton.cdiv(num_tokens * num_heads, block_r),)](
            x, out, num_tokens * num_heads, scale, *x.stride()[:2], num_heads, dim, block_r, block_d
        )
    return out
