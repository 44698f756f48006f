"""Decode attention: one query token a request, against its K/V found through an index.

One formula finds a token, `slot = index[row, pos >> shift] + (pos & (2**shift - 1))`, so a table of
tokens, a table of pages and one contiguous run are the same kernel with another `shift`.

A request's keys are cut into splits. Each split leaves a normalised partial result and the log-sum-exp
of its scores (base 2), and a second kernel combines them. The number of splits comes from shapes alone
and how long a split is from device memory, so a captured launch follows lengths as they change.

Knows nothing of models, of the allocator, or of how K/V came into the cache. `prefill_attention.py`
shares the loop over keys (`attend_keys`), the checks and the specification.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning

LOG2_E = math.log2(math.e)


@triton.jit
def find_slots(index_row, positions, valid, SHIFT: tl.constexpr):
    """The slots, int64, of the tokens at `positions`; a place that is not valid reads no index."""
    entries = tl.load(index_row + (positions >> SHIFT), mask=valid, other=0)
    return (entries + (positions & ((1 << SHIFT) - 1))).to(tl.int64)


@triton.jit
def _load_rows(
    cache_head, slots, valid, stride_slot, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """One head's K or V at `slots`, [BLOCK_N, BLOCK_D]; zeros where masked, so no free slot's NaN gets in."""
    dims = tl.arange(0, BLOCK_D)
    pointers = cache_head + slots[:, None] * stride_slot + dims[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=valid[:, None] & (dims < D)[None, :], other=0.0)
    elif D != BLOCK_D:
        rows = tl.load(pointers, mask=(dims < D)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, BLOCK_DK]
    acc,  # [BLOCK_M, BLOCK_DV] float32, un-normalised output
    total,  # [BLOCK_M] float32, sum of the weights
    peak,  # [BLOCK_M] float32, largest score so far in base 2
    slots,  # [BLOCK_N] int64, slots of the tile at `begin`: carried, so that loads of K need not wait
    k_head,
    v_head,
    index_row,
    query_positions,  # [BLOCK_M]
    begin,
    end,  # the tiles start in [begin, end)
    num_keys,  # no key at or beyond it is read
    stride_k_slot,
    stride_v_slot,
    score_scale,
    cap_scale,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys of the tiles in [begin, end) with a running softmax.

    Unless MASKED, every key of every tile is visible to every query. Returns acc, total, peak, and the
    slots of the tile that follows.
    """
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        valid = positions < num_keys
        k = _load_rows(k_head, slots, valid, stride_k_slot, DK, BLOCK_DK, MASKED)  # [BLOCK_N, BLOCK_DK]
        v = _load_rows(v_head, slots, valid, stride_v_slot, DV, BLOCK_DV, MASKED)  # [BLOCK_N, BLOCK_DV]
        slots = find_slots(index_row, positions + BLOCK_N, positions + BLOCK_N < num_keys, SHIFT)

        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if SOFTCAP:
            scores = 2.0 * tl.sigmoid(scores * cap_scale) - 1.0  # tanh
        if MASKED:
            visible = valid[None, :] & (positions[None, :] <= query_positions[:, None])
            if WINDOW > 0:
                visible = visible & (positions[None, :] > query_positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak, slots


@triton.jit
def _split_keys(length, num_splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key that a request's newest token attends to, and the keys in each of its splits."""
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    keys_per_split = tl.cdiv(tl.cdiv(length - first, num_splits), BLOCK_N) * BLOCK_N
    return first, keys_per_split


@triton.jit(do_not_specialize_on_alignment=["index", "rows", "lengths"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    index,
    rows,
    lengths,
    out,
    partial_out,  # [B, H, num_splits, DV] float32
    partial_lse,  # [B, H, num_splits] float32, base 2
    score_scale,
    cap_scale,
    stride_q_b,
    stride_q_h,
    stride_k_slot,
    stride_k_h,
    stride_v_slot,
    stride_v_h,
    stride_index,
    stride_out_b,
    stride_out_h,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    num_splits = tl.num_programs(1)

    length = tl.load(lengths + request)
    first, keys_per_split = _split_keys(length, num_splits, WINDOW, BLOCK_N)
    begin = first + split * keys_per_split
    end = tl.minimum(begin + keys_per_split, length)
    if not ONE_SPLIT and begin >= length:
        return

    index_row = index + tl.load(rows + request).to(tl.int64) * stride_index
    positions = begin + tl.arange(0, BLOCK_N)
    slots = find_slots(index_row, positions, positions < end, SHIFT)  # [BLOCK_N]

    group = tl.arange(0, BLOCK_G)
    heads = kv_head * GROUP + group  # [BLOCK_G]
    k_dims = tl.arange(0, BLOCK_DK)
    q_tile = tl.load(
        q + request * stride_q_b + heads[:, None] * stride_q_h + k_dims[None, :],
        mask=(group < GROUP)[:, None] & (k_dims < DK)[None, :],
        other=0.0,
    )  # [BLOCK_G, BLOCK_DK]

    # A finite floor in place of -inf: a row whose keys are all masked stays at weight 0 and not at NaN.
    peak = tl.full([BLOCK_G], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    acc, total, peak, slots = attend_keys(
        q_tile,
        acc,
        total,
        peak,
        slots,
        k_cache + kv_head * stride_k_h,
        v_cache + kv_head * stride_v_h,
        index_row,
        tl.zeros([BLOCK_G], tl.int32) + (length - 1),
        begin,
        end,
        end,
        stride_k_slot,
        stride_v_slot,
        score_scale,
        cap_scale,
        DK,
        DV,
        BLOCK_DK,
        BLOCK_DV,
        BLOCK_N,
        SHIFT,
        0,  # the window is in `first`
        SOFTCAP,
        True,
    )
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]

    v_dims = tl.arange(0, BLOCK_DV)
    out_mask = (group < GROUP)[:, None] & (v_dims < DV)[None, :]
    if ONE_SPLIT:
        pointers = out + request * stride_out_b + heads[:, None] * stride_out_h + v_dims[None, :]
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=out_mask)
    else:
        num_heads = tl.num_programs(0) * GROUP
        partials = (request * num_heads + heads) * num_splits + split  # [BLOCK_G]
        tl.store(partial_out + partials[:, None] * DV + v_dims[None, :], acc, mask=out_mask)
        tl.store(partial_lse + partials, peak + tl.log2(total), mask=group < GROUP)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["lengths"])
def _combine_kernel(
    partial_out,  # [B, H, num_splits, DV] float32
    partial_lse,  # [B, H, num_splits] float32, base 2
    lengths,
    out,
    num_splits,
    stride_out_b,
    stride_out_h,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + request)
    first, keys_per_split = _split_keys(length, num_splits, WINDOW, BLOCK_N)
    # Splits beyond these were empty and wrote nothing.
    num_written = tl.cdiv(length - first, tl.maximum(keys_per_split, 1))

    partials = (request * tl.num_programs(0) + head) * num_splits
    dims = tl.arange(0, BLOCK_DV)
    peak = -1.0e30
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, num_written, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)  # [BLOCK_S]
        written = splits < num_written
        lse = tl.load(partial_lse + partials + splits, mask=written, other=float("-inf"))
        tile = tl.load(
            partial_out + (partials + splits)[:, None] * DV + dims[None, :],
            mask=written[:, None] & (dims < DV)[None, :],
            other=0.0,
        )  # [BLOCK_S, BLOCK_DV]
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        weights = tl.exp2(lse - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * tile, 0)
        peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)
    pointers = out + request * stride_out_b + head * stride_out_h + dims
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=dims < DV)


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """`(score_scale, cap_scale)`: a score in base 2 is `score_scale * s`, where s is the dot product or,
    under a soft-cap, `tanh(x) = 2 * sigmoid(2 * x) - 1` with `2 * x = cap_scale * dot product`."""
    if softcap:
        return softcap * LOG2_E, 2.0 * scale / softcap
    return scale * LOG2_E, 0.0


@torch.library.custom_op("lightkv::decode_attention", mutates_args=("out",))
def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: Tensor,
    rows: Tensor,
    lengths: Tensor,
    out: Tensor,
    scale: float,
    shift: int,
    window: int,
    softcap: float,
) -> None:
    num_requests, num_heads, key_dim = q.shape
    num_kv_heads, value_dim = v_cache.shape[1:]
    if num_requests == 0:
        return
    group = num_heads // num_kv_heads
    max_length = index.shape[1] << shift
    if window:
        max_length = min(max_length, window)
    num_splits = tuning.decode_splits(tuning.device_class(q.device), num_requests, num_kv_heads, max_length)
    launch = tuning.decode_launch(key_dim, value_dim, q.element_size())
    block_dv = tuning.padded_dim(value_dim)
    one_split = num_splits == 1
    # One split writes the output itself; then these two are never touched.
    partial_shape = (0,) if one_split else (num_requests, num_heads, num_splits)
    partial_lse = torch.empty(partial_shape, dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*partial_shape, value_dim), dtype=torch.float32, device=q.device)
    score_scale, cap_scale = score_scales(scale, softcap)
    _decode_kernel[(num_kv_heads, num_splits, num_requests)](
        q,
        k_cache,
        v_cache,
        index,
        rows,
        lengths,
        out,
        partial_out,
        partial_lse,
        score_scale,
        cap_scale,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        index.stride(0),
        *out.stride()[:2],
        GROUP=group,
        DK=key_dim,
        DV=value_dim,
        BLOCK_G=tuning.padded_dim(group),  # the rows of a dot are at least 16 too
        BLOCK_DK=tuning.padded_dim(key_dim),
        BLOCK_DV=block_dv,
        BLOCK_N=launch.block_n,
        SHIFT=shift,
        WINDOW=window,
        SOFTCAP=softcap != 0.0,
        ONE_SPLIT=one_split,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if one_split:
        return
    _combine_kernel[(num_heads, num_requests)](
        partial_out,
        partial_lse,
        lengths,
        out,
        num_splits,
        *out.stride()[:2],
        DV=value_dim,
        BLOCK_DV=block_dv,
        BLOCK_N=launch.block_n,
        BLOCK_S=16,
        WINDOW=window,
        num_warps=4,
    )


_decode_attention.register_fake(lambda *_: None)  # the output is an argument


def check_attention_inputs(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: Tensor,
    rows: Tensor,
    lengths: Tensor,
    out: Tensor | None,
    *,
    scale: float,
    shift: int,
    window: int,
    softcap: float,
) -> None:
    """Raise ValueError where shapes, strides, dtypes or numbers do not fit. Reads no tensor's contents."""
    if q.dim() != 3 or k_cache.dim() != 3 or v_cache.dim() != 3:
        raise ValueError(
            f"q must be [tokens, heads, dim] and the caches [slots, kv_heads, dim]; got {tuple(q.shape)}, "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    num_heads, key_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    if k_cache.shape[2] != key_dim or v_cache.shape[:2] != k_cache.shape[:2] or num_heads % num_kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)} must have the head dim of k_cache {tuple(k_cache.shape)} and a multiple of "
            f"its heads, and v_cache {tuple(v_cache.shape)} as many slots and heads"
        )
    out_shape = (*q.shape[:2], v_cache.shape[2])
    if out is not None and tuple(out.shape) != out_shape:
        raise ValueError(f"out must have shape {out_shape}, got {tuple(out.shape)}")
    for name, tensor in (
        ("q", q),
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("index", index),
        ("out", out),
    ):
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(
                f"the last stride of {name} must be 1, got {tensor.stride()}; make it contiguous"
            )
    if index.dim() != 2 or index.dtype != torch.int32:
        raise ValueError(f"index must be int32 [rows, entries], got {index.dtype} {tuple(index.shape)}")
    if rows.dtype not in (torch.int32, torch.int64) or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous int32 or int64, got {rows.dtype}")
    if lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise ValueError(f"lengths must be contiguous int32, got {lengths.dtype}")
    if rows.dim() != 1 or rows.shape != lengths.shape:
        raise ValueError(f"rows and lengths must be [B], got {tuple(rows.shape)} and {tuple(lengths.shape)}")
    if not scale > 0 or not 0 <= shift <= 31 or window < 0 or softcap < 0:
        raise ValueError(
            f"scale must be positive, shift in 0..31, window and softcap 0 (off) or more; got scale {scale}, "
            f"shift {shift}, window {window}, softcap {softcap}"
        )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    shift: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each request's newest token to the tokens it has in the cache, itself included.

    Everything that varies from step to step (lengths, rows, the index) is read on the device: no
    synchronisation, and a captured launch may be replayed with other values in the same tensors.

    Args:
        q: `[B, H, Dk]`, H a multiple of num_kv_heads; query head h reads K/V head h // (H / num_kv_heads).
        k_cache: `[num_slots, num_kv_heads, Dk]`, any strides but a last one of 1. The dots run in the dtype
            of q, accumulate in float32.
        v_cache: `[num_slots, num_kv_heads, Dv]`, likewise.
        index: int32 `[num_rows, num_entries]`: first slot of each 2**shift tokens of a row.
        rows: int32 or int64 `[B]`, each request's row of the index.
        lengths: int32 `[B]`, tokens to attend to, the newest included; at most num_entries * 2**shift, which
            is not checked. A request of length 0 gets zeros.
        scale: multiplies the scores; positive.
        shift: 0 for a table of tokens, log2(page) for a table of pages, 31 for one contiguous run.
        window: attend to the last `window` tokens only; 0 for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        out: `[B, H, Dv]` to write to; allocated in the dtype of q if None.

    Returns:
        `[B, H, Dv]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    check_attention_inputs(
        q,
        k_cache,
        v_cache,
        index,
        rows,
        lengths,
        out,
        scale=scale,
        shift=shift,
        window=window,
        softcap=softcap,
    )
    if q.shape[0] != rows.shape[0]:
        raise ValueError(f"decode takes one query a request, got {q.shape[0]} for {rows.shape[0]} rows")
    if out is None:
        out = q.new_empty((*q.shape[:2], v_cache.shape[2]))
    _decode_attention(q, k_cache, v_cache, index, rows, lengths, out, scale, shift, window, softcap)
    return out


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, query_positions: Tensor, *, scale: float, window: int, softcap: float
) -> Tensor:
    """Causal attention of one sequence in float32: q `[n, H, Dk]`, k `[L, num_kv_heads, Dk]`, v `[L,
    num_kv_heads, Dv]`, query_positions int `[n]` -> `[n, H, Dv]`. A query that sees no key gets zeros."""
    group = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = torch.arange(len(k), device=q.device)
    visible = key_positions[None, :] <= query_positions[:, None]
    if window:
        visible &= key_positions[None, :] > query_positions[:, None] - window
    scores = scores.masked_fill(~visible, float("-inf"))
    blind = ~visible.any(dim=1)  # softmax would give NaN
    weights = scores.softmax(dim=2).masked_fill(blind[:, None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def find_slots_reference(index_row: Tensor, positions: Tensor, shift: int) -> Tensor:
    """The slots, int64, of the tokens at `positions` of one row of the index."""
    positions = positions.long()
    return index_row[positions >> shift].long() + (positions & ((1 << shift) - 1))


def decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    shift: int = 0,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """The specification of `decode_attention`: plain torch in float32, one request at a time.

    Reads lengths and rows on the host, so on a GPU it synchronises.
    """
    out = q.new_zeros((*q.shape[:2], v_cache.shape[2]))
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        slots = find_slots_reference(index[row], torch.arange(length, device=q.device), shift)
        position = lengths[request : request + 1] - 1
        out[request] = attend_reference(
            q[request, None],
            k_cache[slots],
            v_cache[slots],
            position,
            scale=scale,
            window=window,
            softcap=softcap,
        )[0].to(q.dtype)
    return out
