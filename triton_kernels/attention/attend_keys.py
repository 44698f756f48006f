"""Attention of a tile of queries to a range of keys: the loop that decode and prefill share, its checks and its
reference.

One formula finds a token, `slot = index[row, pos >> shift] + (pos & (2**shift - 1))`, so a token table, a page
table and one contiguous run are the same kernel with another `shift`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.strides import has_unit_stride

from .paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def find_slots(index_row, positions, valid, SHIFT: tl.constexpr):
    """Returns the slots, int64, of the tokens at `positions`. Positions that are not valid read no index
    entry."""
    entries = tl.load(index_row + (positions >> SHIFT), mask=valid, other=0)
    return (entries + (positions & ((1 << SHIFT) - 1))).to(tl.int64)


@triton.jit
def _load_rows(
    cache_head, slots, valid, stride_slot, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Loads one head's K or V at `slots`, [BLOCK_N, BLOCK_D]; zeros where not valid: a free slot may hold
    NaN."""
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
def first_key(positions, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the first key that queries at `positions` see; 0 where there is neither a window nor a chunk."""
    first = tl.zeros_like(positions)
    if WINDOW > 0:
        first = tl.maximum(positions - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(positions, 0) // CHUNK * CHUNK
    return first


@triton.jit
def start_softmax(sink_logits, heads, joins, BLOCK_M: tl.constexpr):
    """Returns the peak and the sum, each [BLOCK_M], with which the running softmax of a tile's rows starts.

    A sink is a score without a value, so the rows that it joins start at its score, with a sum of 1. A row
    whose keys are cut into parts has to be joined by its sink in one of them. `heads`, `joins`: [BLOCK_M].
    """
    # The peak starts at a finite number and not at -inf, so that a row whose keys are all masked has weights of
    # 0 instead of NaN.
    peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sink_logits is not None:
        sinks = tl.load(sink_logits + heads, mask=joins, other=float("-inf")) * _LOG2_E
        peak = tl.maximum(peak, sinks)
        total = tl.exp2(sinks - peak)
    return peak, total


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, BLOCK_DK]
    acc,  # [BLOCK_M, BLOCK_DV] float32, un-normalised output
    total,  # [BLOCK_M] float32, sum of the weights
    peak,  # [BLOCK_M] float32, largest score so far, in base 2
    slots,  # [BLOCK_N] int64, slots of the tile at `begin`; loaded one tile ahead, so loads of K need not wait
    k_head,
    v_head,
    index_row,
    query_positions,  # [BLOCK_M]
    begin,
    end,  # tiles start in [begin, end)
    num_keys,  # no key at num_keys or beyond is read
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
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attends to the keys of the tiles in [begin, end) with a running softmax.

    Unless MASKED, every key of every tile has to be visible to every query. Returns acc, total, peak, and the
    slots of the next tile.
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
            if CHUNK > 0:
                visible = visible & (positions[None, :] >= (query_positions // CHUNK * CHUNK)[:, None])
            scores = tl.where(visible, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, total, peak, slots


def score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """Returns `(score_scale, cap_scale)`. A score in base 2 is `score_scale * s`, where s is the dot product
    or, with a soft-cap, `tanh(x) = 2 * sigmoid(2 * x) - 1` with `2 * x = cap_scale * dot product`."""
    if softcap:
        return softcap * LOG2_E, 2.0 * scale / softcap
    return scale * LOG2_E, 0.0


def check_requests(rows: Tensor, lengths: Tensor) -> None:
    """Raises ValueError unless these are `[B]` of their types. Reads no tensor's contents."""
    if rows.dtype not in (torch.int32, torch.int64) or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous int32 or int64, got {rows.dtype}")
    if lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise ValueError(f"lengths must be contiguous int32, got {lengths.dtype}")
    if rows.dim() != 1 or rows.shape != lengths.shape:
        raise ValueError(f"rows and lengths must be [B], got {tuple(rows.shape)} and {tuple(lengths.shape)}")


def check_attention_inputs(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
    out: Tensor | None,
    lse: Tensor | None,
) -> float:
    """Returns the layer's scale. Raises ValueError where shapes, strides, dtypes or numbers do not fit; reads
    no tensor's contents."""
    k_cache, v_cache, index, shift = kv
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
        if tensor is not None and not has_unit_stride(tensor):
            raise ValueError(
                f"the last stride of {name} must be 1, got {tensor.stride()}; make it contiguous"
            )
    if lse is not None and (
        lse.dtype != torch.float32 or lse.shape != q.shape[:2] or not lse.is_contiguous()
    ):
        raise ValueError(
            f"lse must be contiguous float32 {tuple(q.shape[:2])}, got {lse.dtype} {tuple(lse.shape)}"
        )
    if index.dim() != 2 or index.dtype != torch.int32:
        raise ValueError(f"index must be int32 [rows, entries], got {index.dtype} {tuple(index.shape)}")
    check_requests(rows, lengths)
    scale = options.scale_for(key_dim)
    if not scale > 0 or not 0 <= shift <= 31 or options.softcap < 0:
        raise ValueError(
            f"scale must be positive, shift in 0..31, softcap 0 (off) or more; got scale {scale}, "
            f"shift {shift}, softcap {options.softcap}"
        )
    check_mask(options.window, options.chunk)
    sinks = options.sink_logits
    if sinks is not None and (
        sinks.dtype != torch.float32 or sinks.shape != (num_heads,) or not sinks.is_contiguous()
    ):
        raise ValueError(
            f"sink_logits must be contiguous float32 [{num_heads}], one for each query head; got {sinks.dtype} "
            f"{tuple(sinks.shape)}"
        )
    return scale


def check_mask(window: int, chunk: int) -> None:
    """Raises ValueError for a window or chunk below 0, and for both at once."""
    if window < 0 or chunk < 0 or (window and chunk):
        raise ValueError(
            f"a layer has a window, or chunks, or neither (0); got a window of {window} and chunks of {chunk}"
        )


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, query_positions: Tensor, options: AttentionOptions = DEFAULT_OPTIONS
) -> Tensor:
    """Computes causal attention of one request in float64: q `[n, H, Dk]`, k `[L, num_kv_heads, Dk]`, v `[L,
    num_kv_heads, Dv]`, query_positions int `[n]` -> `[n, H, Dv]`. The output of a query that sees no key is
    zeros."""
    scale, softcap = options.scale_for(q.shape[2]), options.softcap
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_reference(query_positions, torch.arange(len(k), device=q.device), options)
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = join_sinks_reference(scores.logsumexp(dim=2), options.sink_logits)  # [H, n]
    weights = (scores - lse.clamp(min=-1e30)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v)


def visible_reference(query_positions: Tensor, key_positions: Tensor, options: AttentionOptions) -> Tensor:
    """Returns which keys the queries see, bool `[n, L]`: by causality, the window or the chunks."""
    queries, keys = query_positions[:, None], key_positions[None, :]
    visible = keys <= queries
    if options.window:
        visible &= keys > queries - options.window
    if options.chunk:
        visible &= keys >= queries // options.chunk * options.chunk
    return visible


def join_sinks_reference(lse: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Returns the log-sum-exp `[H, n]` (base e) of scores and the heads' sinks, from that of the scores."""
    return lse if sink_logits is None else torch.logaddexp(lse, sink_logits.to(lse.dtype)[:, None])


def find_slots_reference(index_row: Tensor, positions: Tensor, shift: int) -> Tensor:
    """Returns the slots, int64, of the tokens at `positions` of one row of the index."""
    positions = positions.long()
    return index_row[positions >> shift].long() + (positions & ((1 << shift) - 1))
