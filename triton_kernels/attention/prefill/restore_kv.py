"""Copies K and V of whole requests to a scratch, which prefill reads instead of the pool: it reads a key many
times, and finds and restores it once. There are two kinds of scratch.

One has the type of computation, and the keys of the requests one after the other. Quantised K and V are
restored in it, and the kernels for 16 bits run over it:

    request      0          1    2
    scratch   [ k0 k1 k2 | k0 | k0 k1 ........ ]      request b begins at begins[b]

The other has the elements of K and V in fp8 as Hopper's fp8 products read them. A weighted sum of V is a
product over keys, and such a product reads what it adds up next to each other. So V lies transposed: the keys
of a dim are neighbours, and requests begin at multiples of 128. Of every 16 keys, those that one thread of a
warp holds the scores of lie together, so that weights need not be moved between threads:

    place   0 1 2 3   4 5  6  7   8 9 10 11   12 13 14 15
    key     0 1 8 9   2 3 10 11   4 5 12 13    6  7 14 15
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_inputs import REQUESTS, check_scales
from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.paged_kv import HeadShape, PagedKV
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.write.head_tiles import constants_of

from .restore_kernel import Heads, Shape, Words, restore_kv_kernel

ALIGNMENT = 128  # keys; the requests of a scratch in fp8 begin at multiples of it
FP8 = torch.float8_e4m3fn


class Scratch(NamedTuple):
    """K and V of requests.

    `k`: `[capacity, num_kv_heads, Dk]` and `v`: `[capacity, num_kv_heads, Dv]` of one floating type, any
    strides, except that the last one is 1; both may be views of one buffer. In e4m3 they are contiguous, `v` is
    `[num_kv_heads, Dv, capacity]`, its keys in the order above, with zeros after a request's last key up to a
    multiple of 128, and `capacity` is such a multiple.
    `begins`: int32 `[B]`, contiguous, ascending: where the keys of each request begin, at the end of those
    before or after it; in e4m3 at multiples of 128.
    `scales`: in e4m3, float32 `[num_kv_heads, 2]`, contiguous: a value of K and of V is `element * scale`.
    """

    k: Tensor
    v: Tensor
    begins: Tensor
    scales: Tensor | None = None

    @classmethod
    def empty(
        cls, capacity: int, heads: HeadShape, dtype: torch.dtype, begins: Tensor, scales: Tensor | None = None
    ) -> "Scratch":
        """Returns a scratch on the device of `begins` whose keys are not written. Raises ValueError for a
        capacity in e4m3 that is no multiple of 128."""
        num_heads, device = heads.num_kv_heads, begins.device
        if dtype != FP8:
            both = torch.empty(
                capacity, num_heads, heads.key_dim + heads.value_dim, dtype=dtype, device=device
            )
            return cls(both[..., : heads.key_dim], both[..., heads.key_dim :], begins)
        if capacity % ALIGNMENT:
            raise ValueError(f"the capacity is {capacity}; give a multiple of {ALIGNMENT}")
        k = torch.empty(capacity, num_heads, heads.key_dim, dtype=dtype, device=device)
        v = torch.empty(num_heads, heads.value_dim, capacity, dtype=dtype, device=device)
        return cls(k, v, begins, scales)

    def read(self, request: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns the first `length` keys of a request in e4m3 in plain torch, float32 `[length, num_kv_heads,
        Dk]` and `[length, num_kv_heads, Dv]`. Synchronises."""
        assert self.scales is not None
        begin = int(self.begins[request])
        keys = torch.arange(length, device=self.k.device)
        places = begin + (keys & ~15 | (keys & 6) << 1 | (keys & 8) >> 2 | keys & 1)
        k = self.k[begin : begin + length].float() * self.scales[:, :1]
        v = self.v.float()[:, :, places].permute(2, 0, 1) * self.scales[:, 1:]
        return k, v


def restore_kv(kv: PagedKV, rows: Tensor, lengths: Tensor, scratch: Scratch) -> None:
    """Writes K and V of the first `lengths[b]` tokens of each request to a scratch, in its type: `element *
    scale (+ zero point)` in float32, rounded once. Products with a Hadamard matrix stay so. To a scratch in
    e4m3 it writes the elements of e4m3 as they are.

    Everything that varies is read on the device, and the grid follows from the scratch: nothing synchronises,
    and a captured launch may be replayed. Tokens beyond the scratch are left out, and what no token has stays
    as it was. The values of rows, lengths and begins are not checked: in e4m3 a request's keys, rounded up to a
    multiple of 128, have to end before those of the next, and within the scratch.

    Args:
        kv: the K/V of a layer and its index, with a plain lookup; for a scratch in e4m3, K/V in e4m3 with
        static
            scales, whose strides and head dims are multiples of 16.
        rows: int32 or int64 `[B]`, contiguous: each request's row of the index.
        lengths: int32 `[B]`, contiguous.
        scratch: of the same heads.

    Raises:
        ValueError: shapes, strides or dtypes do not fit, the lookup is not plain, or groups are not a
            power of 2 of elements. Nothing is written then.
    """
    _check(kv, rows, lengths, scratch)
    capacity, num_requests, is_fp8 = len(scratch.k), len(rows), scratch.k.dtype == FP8
    if not capacity or not num_requests:
        return
    num_kv_heads, key_dim, value_dim = kv.k.shape[1], kv.key_dim, kv.value_dim
    width = tuning.padded_dim(max(key_dim, value_dim))
    # In the type of computation each thread has 64 elements, so that several of its loads overlap.
    block_t = ALIGNMENT if is_fp8 else max(8, 8192 // width)
    turns = tuning.block_for(num_requests).bit_length()
    numbers = num_kv_heads, kv.lookup.page_shift, turns, block_t, is_fp8
    if is_fp8:
        both: tuple[Any, Any] = (_words_of(kv.k, scratch.k, key_dim), _words_of(kv.v, scratch.v, value_dim))
    else:
        of_k = kv.format.elements.num_scales(key_dim)
        both = _heads_record(kv, kv.k, scratch.k, 0), _heads_record(kv, kv.v, scratch.v, of_k)
    restore_kv_kernel[(2 * num_kv_heads * triton.cdiv(capacity, block_t),)](
        *both,
        kv.index,
        rows,
        lengths,
        scratch.begins,
        num_requests,
        capacity,
        kv.index.stride(0),
        Shape(*map(tl.constexpr, numbers)),
        num_warps=4,
        enable_fp_fusion=False,  # as in torch, a product is rounded before the zero point is added
    )


def _heads_record(kv: PagedKV, stored: Tensor, out: Tensor, first_scale: int) -> Heads:
    """Returns K or V of a layer, and where it is restored to, as the kernel takes them."""
    scales_slot = scales_head = 0
    if kv.scales is not None:
        scales_slot, scales_head = 0 if kv.format.is_static else kv.scales.stride(0), kv.scales.stride(1)
    dim = out.shape[2]
    constants = first_scale, constants_of(kv.format.elements, dim), dim, tuning.padded_dim(dim)
    return Heads(
        stored,
        kv.scales,
        out,
        stored.stride(0),
        stored.stride(1),
        scales_slot,
        scales_head,
        out.stride(0),
        out.stride(1),
        *map(tl.constexpr, constants),
    )


def _words_of(stored: Tensor, out: Tensor, dim: int) -> Words:
    """Returns K or V and its scratch as the kernel takes them."""
    words = stored.view(torch.int32)
    constants = tl.constexpr(dim // 4), tl.constexpr(tuning.padded_dim(dim) // 4)
    return Words(words, out.view(torch.int32), words.stride(0), words.stride(1), *constants)


_COMPUTED = Tensors(
    k="floats [capacity, h, Dk] with a last stride of 1", v="floats [capacity, h, Dv] with a last stride of 1"
)
_IN_FP8 = Tensors(
    k="contiguous float8_e4m3fn [capacity, h, Dk]",
    v="contiguous float8_e4m3fn [h, Dv, capacity]",
    scales="contiguous float32 [h, 2]",
)


def _check(kv: PagedKV, rows: Tensor, lengths: Tensor, scratch: Scratch) -> None:
    """Raises ValueError where the arguments of `restore_kv` do not fit each other."""
    if not kv.lookup.is_plain:
        raise ValueError(f"K/V that {type(kv.lookup).__name__} finds is not restored; attend to it as it is")
    if kv.v_scales is not None:
        raise ValueError("K/V whose scales of K and of V stand apart is not restored; attend to it as it is")
    REQUESTS.check({}, rows=rows, lengths=lengths, begins=scratch.begins, index=kv.index)
    sizes = {"h": kv.k.shape[1], "Dk": kv.key_dim, "Dv": kv.value_dim}
    check_scales(kv)
    if scratch.k.dtype != FP8:
        _COMPUTED.check(sizes, k=scratch.k, v=scratch.v)
        if scratch.k.dtype != scratch.v.dtype:
            raise ValueError(f"a scratch has one type, got {scratch.k.dtype} and {scratch.v.dtype}")
        return
    if not (kv.format.elements.is_float and kv.format.is_static):
        raise ValueError(
            f"the K/V is stored as {kv.format}; prefill in fp8 reads fp8 with static scales (fp8-static)"
        )
    _IN_FP8.check(sizes, k=scratch.k, v=scratch.v, scales=scratch.scales)
    multiples = *kv.k.stride()[:2], *kv.v.stride()[:2], kv.key_dim, kv.value_dim
    if any(size % 16 for size in multiples) or kv.k.stride(2) != 1 or kv.v.stride(2) != 1:
        raise ValueError(
            f"strides and head dims of K and V must be multiples of 16, and the last stride 1, got {multiples}"
        )


def restore_kv_reference(kv: PagedKV, rows: Tensor, lengths: Tensor, scratch: Scratch) -> None:
    """Computes `restore_kv` in plain torch. Synchronises."""
    _check(kv, rows, lengths, scratch)
    out_k, out_v = scratch.k, scratch.v
    for row, length, begin in zip(rows.tolist(), lengths.tolist(), scratch.begins.tolist(), strict=True):
        length = min(length, len(out_k) - begin)
        if length <= 0:
            continue
        end, slots = begin + length, slots_reference(kv, row, torch.arange(length, device=out_k.device))
        if out_k.dtype != FP8:
            k, v = kv.read(slots)
            out_k[begin:end], out_v[begin:end] = k.to(out_k.dtype), v.to(out_v.dtype)
            continue
        places = torch.arange(-(-length // ALIGNMENT) * ALIGNMENT, device=out_k.device)
        keys = (places & ~15 | (places & 2) << 2 | (places & 12) >> 1 | places & 1).clamp(max=length)
        k, v, bytes_k, bytes_v = (part.view(torch.uint8) for part in (kv.k, kv.v, out_k, out_v))
        bytes_k[begin:end] = k[slots]
        padded = torch.cat((v[slots], torch.zeros_like(v[:1])))
        bytes_v[:, :, begin : begin + len(places)] = padded[keys].permute(1, 2, 0)
