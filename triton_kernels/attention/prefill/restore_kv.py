"""Restores quantised K/V of whole requests to a contiguous scratch in the type of computation, over which the
16-bit kernels then run: prefill reads a key many times, and restores it once.

    request      0          1    2
    scratch   [ k0 k1 k2 | k0 | k0 k1 ........ ]      request b begins at starts[b]
"""

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


@triton.jit
def find_requests(starts, first, num_requests, TURNS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns the last request that begins at or before each token of the scratch from `first` on, int32
    [BLOCK_T], or -1: that of the first token by bisection, where 2**TURNS is more than the number of requests,
    and then those that begin within the block, mostly none."""
    found = -1
    for turn in tl.static_range(TURNS):
        later = found + (1 << (TURNS - 1 - turn))
        begin = tl.load(starts + later, mask=later < num_requests, other=2147483647)
        found = tl.where(begin <= first, later, found)
    tokens = first + tl.arange(0, BLOCK_T)
    requests = tl.full([BLOCK_T], 0, tl.int32) + found
    following = found + 1
    begin = tl.load(starts + following, mask=following < num_requests, other=2147483647)
    while begin < first + BLOCK_T:
        requests = tl.where(begin <= tokens, following, requests)
        following += 1
        begin = tl.load(starts + following, mask=following < num_requests, other=2147483647)
    return requests


@triton.jit
def _restore_head(
    source,  # [BLOCK_T, 1] pointers to the head of each token
    columns,  # [BLOCK_T, 1] pointers to its scales
    target,  # [BLOCK_T, 1] pointers
    valid,  # [BLOCK_T]
    ELEMENTS: tl.constexpr,  # of `constants_of`
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    BITS: tl.constexpr = ELEMENTS[0]
    GROUP: tl.constexpr = ELEMENTS[2]
    HAS_MIDDLE: tl.constexpr = ELEMENTS[3]
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
        in_columns = valid[:, None] & (groups < GROUPS)[None, :]
        columns += groups[None, :]
        scale = tl.load(columns, mask=in_columns, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_GROUPS]
        grouped = tl.reshape(tile, [BLOCK_T, BLOCK_GROUPS, BLOCK_GROUP]) * scale[:, :, None]
        if HAS_MIDDLE:
            middle = tl.load(columns + GROUPS, mask=in_columns, other=0.0).to(tl.float32)
            grouped += middle[:, :, None]
        tile = tl.reshape(grouped, [BLOCK_T, BLOCK_D])
    dims = tl.arange(0, BLOCK_D)
    in_head = valid[:, None] & (dims < D)[None, :]
    tl.store(target + dims[None, :], tile.to(target.dtype.element_ty), mask=in_head)


@triton.jit(
    do_not_specialize=["num_requests", "capacity"],
    do_not_specialize_on_alignment=["index", "rows", "lengths", "starts"],
)
def _restore_kv_kernel(
    k,
    v,
    scales,
    index,
    rows,
    lengths,
    starts,
    out_k,
    out_v,
    num_requests,
    capacity,
    stride_k_slot,
    stride_k_h,
    stride_v_slot,
    stride_v_h,
    stride_scales_slot,
    stride_scales_h,
    stride_index,
    stride_out_k_t,
    stride_out_k_h,
    stride_out_v_t,
    stride_out_v_h,
    KV_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_ELEMENTS: tl.constexpr,
    V_ELEMENTS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    SHIFT: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # Heads run fastest, so neighbouring programs read neighbouring heads.
    program = tl.program_id(0) % (2 * KV_HEADS)
    first = tl.program_id(0) // (2 * KV_HEADS) * BLOCK_T
    last = num_requests - 1
    if first < tl.minimum(tl.load(starts + last) + tl.load(lengths + last), capacity):
        tokens = first + tl.arange(0, BLOCK_T)
        request = find_requests(starts, first, num_requests, TURNS, BLOCK_T)
        is_found = request >= 0
        position = tokens - tl.load(starts + request, mask=is_found, other=0)
        length = tl.load(lengths + request, mask=is_found, other=0)
        valid = is_found & (position < length) & (tokens < capacity)
        row = tl.load(rows + request, mask=valid, other=0).to(tl.int64)
        slot = slots_at(index + row * stride_index, position, valid, SHIFT)[:, None]  # [BLOCK_T, 1]
        token = tokens.to(tl.int64)[:, None]
        columns = scales + slot * stride_scales_slot if scales is not None else None
        if program < KV_HEADS:
            head = program.to(tl.int64)
            _restore_head(
                k + slot * stride_k_slot + head * stride_k_h,
                columns + head * stride_scales_h if scales is not None else None,
                out_k + token * stride_out_k_t + head * stride_out_k_h,
                valid,
                K_ELEMENTS,
                DK,
                BLOCK_DK,
                BLOCK_T,
            )
        else:
            head = (program - KV_HEADS).to(tl.int64)
            _restore_head(
                v + slot * stride_v_slot + head * stride_v_h,
                columns + (head * stride_scales_h + K_COLUMNS) if scales is not None else None,
                out_v + token * stride_out_v_t + head * stride_out_v_h,
                valid,
                V_ELEMENTS,
                DV,
                BLOCK_DV,
                BLOCK_T,
            )


def restore_kv(
    kv: PagedKV, rows: Tensor, lengths: Tensor, starts: Tensor, out_k: Tensor, out_v: Tensor
) -> None:
    """Writes K and V of the first `lengths[b]` tokens of each request to the rows from `starts[b]` on of a
    scratch, in its type: `element * scale (+ middle)` in float32, rounded once. Rotated heads stay rotated.

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
    block_dk, block_dv = tuning.padded_dim(key_dim), tuning.padded_dim(value_dim)
    launch = tuning.restore_launch(max(block_dk, block_dv))
    is_static = kv.format.is_static
    _restore_kv_kernel[(2 * num_kv_heads * triton.cdiv(capacity, launch.block_m),)](
        kv.k,
        kv.v,
        kv.scales,
        kv.index,
        rows,
        lengths,
        starts,
        out_k,
        out_v,
        num_requests,
        capacity,
        *kv.k.stride()[:2],
        *kv.v.stride()[:2],
        *((0, 0) if kv.scales is None else (0 if is_static else kv.scales.stride(0), kv.scales.stride(1))),
        kv.index.stride(0),
        *out_k.stride()[:2],
        *out_v.stride()[:2],
        KV_HEADS=num_kv_heads,
        DK=key_dim,
        DV=value_dim,
        K_ELEMENTS=constants_of(kv.format.k, key_dim),
        V_ELEMENTS=constants_of(kv.format.v, value_dim),
        K_COLUMNS=kv.format.k.columns(key_dim),
        SHIFT=kv.lookup.page_shift,
        TURNS=tuning.block_for(num_requests).bit_length(),
        BLOCK_T=launch.block_m,
        BLOCK_DK=block_dk,
        BLOCK_DV=block_dv,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,  # as in torch, a product is rounded before the middle is added
    )


def _check(kv: PagedKV, rows: Tensor, lengths: Tensor, starts: Tensor, out_k: Tensor, out_v: Tensor) -> None:
    """Raises ValueError where the arguments of `restore_kv` do not fit each other."""
    if not kv.lookup.is_plain:
        raise ValueError(f"K/V that {type(kv.lookup).__name__} finds is not restored; attend to it as it is")
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64) or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous int32 or int64 [B], got {rows.dtype} {tuple(rows.shape)}")
    for name, tensor in (("lengths", lengths), ("starts", starts)):
        if tensor.shape != rows.shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 {tuple(rows.shape)}, as rows; got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
    for name, out, cache, dim in (("out_k", out_k, kv.k, kv.key_dim), ("out_v", out_v, kv.v, kv.value_dim)):
        wanted = (len(out_k), cache.shape[1], dim)
        if out.shape != wanted or not has_unit_stride(out) or not out.is_floating_point():
            raise ValueError(
                f"{name} must be of a floating type, [capacity, kv_heads, dim] {wanted} with a last stride of "
                f"1; got {out.dtype} {tuple(out.shape)} with strides {out.stride()}"
            )
    if out_k.dtype != out_v.dtype:
        raise ValueError(f"out_k and out_v must have one type, got {out_k.dtype} and {out_v.dtype}")
    if kv.index.dim() != 2 or kv.index.dtype != torch.int32 or not has_unit_stride(kv.index):
        raise ValueError(
            f"the index must be int32 [rows, entries] with a last stride of 1, got {kv.index.dtype} "
            f"{tuple(kv.index.shape)} with strides {kv.index.stride()}"
        )
    columns = kv.format.columns(kv.key_dim, kv.value_dim)
    if kv.format.is_quantised and (
        kv.scales is None or kv.scales.shape[1:] != (kv.k.shape[1], columns) or not has_unit_stride(kv.scales)
    ):
        raise ValueError(
            f"the format has {columns} scales and middles for each of {kv.k.shape[1]} heads; pass "
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
