"""Restores quantised K/V of whole requests to a contiguous scratch in the type of computation, over which the
16-bit kernels then run: prefill reads a key many times, and restores it once.

    request      0          1    2
    scratch   [ k0 k1 k2 | k0 | k0 k1 ........ ]      request b begins at starts[b]
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attend_keys import slots_at
from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.paged_kv import PagedKV
from lightkv.triton_kernels.layout.strides import has_unit_stride
from lightkv.triton_kernels.write.head_tiles import constants_of

from .scratch_requests import block_of, check_requests_of, find_requests


class _Heads(NamedTuple):
    """K or V, and where it is restored to. `scales`: of K and V, or None; the first one of a head is
    `FIRST_SCALE`. `ELEMENTS`: of `constants_of`."""

    stored: Any
    scales: Any
    out: Any
    stride_slot: Any
    stride_head: Any
    stride_scales_slot: Any
    stride_scales_head: Any
    stride_out_token: Any
    stride_out_head: Any
    FIRST_SCALE: Any
    ELEMENTS: Any
    D: Any
    BLOCK_D: Any


@triton.jit
def _restore_head(
    heads,  # `_Heads`
    head,  # int64
    slot,  # [BLOCK_T, 1] of each token, int64
    token,  # [BLOCK_T, 1] of the scratch, int64
    valid,  # [BLOCK_T]
    BLOCK_T: tl.constexpr,
):
    ELEMENTS: tl.constexpr = heads.ELEMENTS
    D: tl.constexpr = heads.D
    BLOCK_D: tl.constexpr = heads.BLOCK_D
    scales = None
    if heads.scales is not None:
        scales = heads.scales + slot * heads.stride_scales_slot
        scales += head * heads.stride_scales_head + heads.FIRST_SCALE
    source = heads.stored + slot * heads.stride_slot + head * heads.stride_head
    target = heads.out + token * heads.stride_out_token + head * heads.stride_out_head
    BITS: tl.constexpr = ELEMENTS[0]
    GROUP: tl.constexpr = ELEMENTS[2]
    HAS_ZERO_POINT: tl.constexpr = ELEMENTS[3]
    WIDTH: tl.constexpr = D // 2 if BITS == 4 else D
    places = tl.arange(0, BLOCK_D // 2 if BITS == 4 else BLOCK_D)
    in_row = valid[:, None] & (places < WIDTH)[None, :]
    if BITS == 4:
        stored = tl.load(source + places[None, :], mask=in_row, other=0).to(tl.int32)
        # Shifts of a signed number repeat the sign of a nibble, which is at the top.
        low, high = (stored << 28) >> 28, (stored << 24) >> 28
        tile = tl.reshape(tl.join(low, high), [BLOCK_T, BLOCK_D]).to(tl.float32)
    else:
        tile = tl.load(source + places[None, :], mask=in_row, other=0.0).to(tl.float32)
    if BITS < 16:
        GROUPS: tl.constexpr = D // GROUP if GROUP > 0 else 1
        BLOCK_GROUP: tl.constexpr = GROUP if GROUP > 0 else BLOCK_D
        BLOCK_GROUPS: tl.constexpr = BLOCK_D // BLOCK_GROUP
        groups = tl.arange(0, BLOCK_GROUPS)
        in_scales = valid[:, None] & (groups < GROUPS)[None, :]
        scales += groups[None, :]
        scale = tl.load(scales, mask=in_scales, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_GROUPS]
        grouped = tl.reshape(tile, [BLOCK_T, BLOCK_GROUPS, BLOCK_GROUP]) * scale[:, :, None]
        if HAS_ZERO_POINT:
            zero_point = tl.load(scales + GROUPS, mask=in_scales, other=0.0).to(tl.float32)
            grouped += zero_point[:, :, None]
        tile = tl.reshape(grouped, [BLOCK_T, BLOCK_D])
    dims = tl.arange(0, BLOCK_D)
    in_head = valid[:, None] & (dims < D)[None, :]
    tl.store(target + dims[None, :], tile.to(target.dtype.element_ty), mask=in_head)


@triton.jit(
    do_not_specialize=["num_requests", "capacity"],
    do_not_specialize_on_alignment=["index", "rows", "lengths", "starts"],
)
def _restore_kv_kernel(
    k,  # `_Heads`
    v,
    index,
    rows,
    lengths,
    starts,
    num_requests,
    capacity,
    stride_index,
    KV_HEADS: tl.constexpr,
    SHIFT: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    program, first, exists = block_of(starts, lengths, num_requests, capacity, KV_HEADS, BLOCK_T)
    if exists:
        tokens = first + tl.arange(0, BLOCK_T)
        request = find_requests(starts, first, num_requests, TURNS, BLOCK_T)
        is_found = request >= 0
        position = tokens - tl.load(starts + request, mask=is_found, other=0)
        length = tl.load(lengths + request, mask=is_found, other=0)
        valid = is_found & (position < length) & (tokens < capacity)
        row = tl.load(rows + request, mask=valid, other=0).to(tl.int64)
        slot = slots_at(index + row * stride_index, position, valid, SHIFT)[:, None]  # [BLOCK_T, 1]
        token = tokens.to(tl.int64)[:, None]
        if program < KV_HEADS:
            _restore_head(k, program.to(tl.int64), slot, token, valid, BLOCK_T)
        else:
            _restore_head(v, (program - KV_HEADS).to(tl.int64), slot, token, valid, BLOCK_T)


def _launch_for(width: int) -> tuning.Launch:
    """Returns the launch, with the tokens of a program in `block_m`, for heads that are padded
    to `width`: each thread has 64 elements, so that several of its loads are on their way at once."""
    return tuning.Launch(block_m=max(8, 8192 // width), block_n=0, num_warps=4, num_stages=1)


def restore_kv(
    kv: PagedKV, rows: Tensor, lengths: Tensor, starts: Tensor, out_k: Tensor, out_v: Tensor
) -> None:
    """Writes K and V of the first `lengths[b]` tokens of each request to the rows from `starts[b]` on of a
    scratch, in its type: `element * scale (+ zero point)` in float32, rounded once. Products with a Hadamard
    matrix stay so.

    Everything that varies is read on the device, and the grid follows from the scratch: nothing synchronises,
    and a captured launch may be replayed. Tokens beyond the scratch are left out, and rows of the scratch that
    no token has stay as they were. The values of rows, lengths and starts are not checked.

    Args:
        kv: the K/V of a layer and its index, with a plain lookup.
        rows: int32 or int64 `[B]`, contiguous: each request's row of the index.
        lengths: int32 `[B]`, contiguous.
        starts: int32 `[B]`, contiguous, ascending, each at least the one before and its length: prefix sums of
            the lengths, or with gaps.
        out_k: `[capacity, num_kv_heads, Dk]` of any floating type, any strides, except that the last one is 1.
        out_v: `[capacity, num_kv_heads, Dv]` of the same type, likewise; both may be views of one buffer.

    Raises:
        ValueError: shapes, strides or dtypes do not fit, the lookup is not plain, or groups are not a
            power of 2 of elements. Nothing is written then.
    """
    _check(kv, rows, lengths, starts, out_k, out_v)
    capacity, num_requests = len(out_k), len(rows)
    if not capacity or not num_requests:
        return
    num_kv_heads, key_dim, value_dim = kv.k.shape[1], kv.key_dim, kv.value_dim
    launch = _launch_for(tuning.padded_dim(max(key_dim, value_dim)))
    _restore_kv_kernel[(2 * num_kv_heads * triton.cdiv(capacity, launch.block_m),)](
        _heads_record(kv, kv.k, out_k, 0),
        _heads_record(kv, kv.v, out_v, kv.format.elements.num_scales(key_dim)),
        kv.index,
        rows,
        lengths,
        starts,
        num_requests,
        capacity,
        kv.index.stride(0),
        KV_HEADS=num_kv_heads,
        SHIFT=kv.lookup.page_shift,
        TURNS=tuning.block_for(num_requests).bit_length(),
        BLOCK_T=launch.block_m,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,  # as in torch, a product is rounded before the zero point is added
    )


def _heads_record(kv: PagedKV, stored: Tensor, out: Tensor, first_scale: int) -> _Heads:
    """Returns K or V of a layer, and where it is restored to, as the kernel takes them."""
    scales_slot = scales_head = 0
    if kv.scales is not None:
        scales_slot, scales_head = 0 if kv.format.is_static else kv.scales.stride(0), kv.scales.stride(1)
    dim = out.shape[2]
    constants = first_scale, constants_of(kv.format.elements, dim), dim, tuning.padded_dim(dim)
    return _Heads(
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


def _check(kv: PagedKV, rows: Tensor, lengths: Tensor, starts: Tensor, out_k: Tensor, out_v: Tensor) -> None:
    """Raises ValueError where the arguments of `restore_kv` do not fit each other."""
    if not kv.lookup.is_plain:
        raise ValueError(f"K/V that {type(kv.lookup).__name__} finds is not restored; attend to it as it is")
    check_requests_of(kv, rows, lengths, starts, "starts")
    for name, out, cache, dim in (("out_k", out_k, kv.k, kv.key_dim), ("out_v", out_v, kv.v, kv.value_dim)):
        wanted = (len(out_k), cache.shape[1], dim)
        if out.shape != wanted or not has_unit_stride(out) or not out.is_floating_point():
            raise ValueError(
                f"{name} must be of a floating type, [capacity, kv_heads, dim] {wanted} with a last stride of "
                f"1; got {out.dtype} {tuple(out.shape)} with strides {out.stride()}"
            )
    if out_k.dtype != out_v.dtype:
        raise ValueError(f"out_k and out_v must have one type, got {out_k.dtype} and {out_v.dtype}")
    num_scales = kv.format.num_scales(kv.key_dim, kv.value_dim)
    if kv.format.is_quantised and (
        kv.scales is None
        or kv.scales.shape[1:] != (kv.k.shape[1], num_scales)
        or not has_unit_stride(kv.scales)
    ):
        raise ValueError(
            f"the format has {num_scales} scales and zero points for each of {kv.k.shape[1]} heads; pass "
            f"KVPool.scales, got {None if kv.scales is None else tuple(kv.scales.shape)}"
        )


def restore_kv_reference(
    kv: PagedKV, rows: Tensor, lengths: Tensor, starts: Tensor, out_k: Tensor, out_v: Tensor
) -> None:
    """Computes `restore_kv` in plain torch."""
    _check(kv, rows, lengths, starts, out_k, out_v)
    for row, length, start in zip(rows.tolist(), lengths.tolist(), starts.tolist(), strict=True):
        count = min(length, len(out_k) - start)
        if count > 0:
            positions = torch.arange(count, device=out_k.device)
            k, v = kv.read(slots_reference(kv, row, positions))
            out_k[start : start + count] = k.to(out_k.dtype)
            out_v[start : start + count] = v.to(out_v.dtype)
