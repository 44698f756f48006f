"""Attention probabilities: how much the queries of a step attend to each entry of their row.

Attention kernels never store probabilities. Where they are needed, for example to rank tokens for eviction,
they are computed again from q and the keys in the cache: first each query's log-sum-exp, then, key by key, the
probabilities summed over heads and queries. One program sums up a key in a fixed order, so equal calls return
equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .attend_keys import LOG2_E, find_slots, score_scales, start_softmax
from .attention_inputs import check_attention_inputs
from .attention_reference import find_slots_reference, join_sinks_reference, visible_reference
from .paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV


@triton.jit
def _score_tile(
    q,
    query_positions,
    q_begin,
    num_rows,
    first_row,
    kv_head,
    k,  # [BLOCK_N, BLOCK_DK]
    positions,  # [BLOCK_N], entries of the keys
    score_scale,
    cap_scale,
    stride_q_t,
    stride_q_h,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Computes the scores, in base 2, of a tile of query rows (queries times GROUP heads) with a tile of keys.

    Returns scores [BLOCK_M, BLOCK_N], -inf where a key is not visible; int64 tokens and heads, and in_tile,
    each [BLOCK_M].
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    in_tile = rows < num_rows
    tokens = (q_begin + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_DK)
    q_tile = tl.load(
        q + tokens[:, None] * stride_q_t + heads[:, None] * stride_q_h + dims[None, :],
        mask=in_tile[:, None] & (dims < DK)[None, :],
        other=0.0,
    )  # [BLOCK_M, BLOCK_DK]
    ends = tl.load(query_positions + tokens, mask=in_tile, other=-1)  # [BLOCK_M]
    scores = tl.dot(q_tile, tl.trans(k.to(q_tile.dtype)), input_precision="ieee")
    if SOFTCAP:
        scores = 2.0 * tl.sigmoid(scores * cap_scale) - 1.0  # tanh
    visible = positions[None, :] <= ends[:, None]
    if WINDOW > 0:
        visible = visible & (positions[None, :] > ends[:, None] - WINDOW)
    if CHUNK > 0:
        visible = visible & (positions[None, :] >= (ends // CHUNK * CHUNK)[:, None])
    return tl.where(visible, scores * score_scale, float("-inf")), tokens, heads, in_tile


@triton.jit
def _load_keys(
    k_head, index_row, positions, valid, stride_k_slot, SHIFT: tl.constexpr, DK: tl.constexpr,
    BLOCK_DK: tl.constexpr,
):  # fmt: skip
    """Loads one head's keys at `positions`, [BLOCK_N, BLOCK_DK]; zeros where not valid: a free slot may hold
    NaN."""
    slots = find_slots(index_row, positions, valid, SHIFT)
    dims = tl.arange(0, BLOCK_DK)
    return tl.load(
        k_head + slots[:, None] * stride_k_slot + dims[None, :],
        mask=valid[:, None] & (dims < DK)[None, :],
        other=0.0,
    )


@triton.jit(
    do_not_specialize_on_alignment=["index", "rows", "q_starts", "query_positions", "lengths", "sink_logits"]
)
def _lse_kernel(
    q,
    k_cache,
    index,
    rows,
    q_starts,
    query_positions,
    lengths,
    sink_logits,  # [H] float32; or None
    lse,  # [T, H] float32, base 2
    score_scale,
    cap_scale,
    stride_q_t,
    stride_q_h,
    stride_k_slot,
    stride_k_h,
    stride_index,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * BLOCK_M
    request = tl.program_id(2).to(tl.int64)
    q_begin = tl.load(q_starts + request)
    num_rows = (tl.load(q_starts + request + 1) - q_begin) * GROUP
    if first_row >= num_rows:
        return
    length = tl.load(lengths + request)
    row = tl.load(rows + request).to(tl.int64)
    index_row = index + row * stride_index, None, stride_index, 0, 0
    k_head = k_cache + kv_head * stride_k_h

    tile_rows = first_row + tl.arange(0, BLOCK_M)
    sink_heads = kv_head * GROUP + tile_rows % GROUP
    peak, total = start_softmax(sink_logits, sink_heads, tile_rows < num_rows, BLOCK_M)
    for start in range(0, length, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        valid = positions < length
        k = _load_keys(k_head, index_row, positions, valid, stride_k_slot, SHIFT, DK, BLOCK_DK)
        scores, _, _, _ = _score_tile(
            q, query_positions, q_begin, num_rows, first_row, kv_head, k,
            tl.where(valid, positions, 2147483647), score_scale, cap_scale, stride_q_t, stride_q_h,
            GROUP, DK, BLOCK_M, BLOCK_DK, WINDOW, CHUNK, SOFTCAP,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(scores - new_peak[:, None]), 1)
        peak = new_peak

    query_rows = first_row + tl.arange(0, BLOCK_M)
    tokens = (q_begin + query_rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + query_rows % GROUP
    num_heads = tl.num_programs(0) * GROUP
    tl.store(lse + tokens * num_heads + heads, peak + tl.log2(total), mask=query_rows < num_rows)


@triton.jit(do_not_specialize_on_alignment=["index", "rows", "q_starts", "query_positions", "lengths"])
def _scores_kernel(
    q,
    k_cache,
    index,
    rows,
    q_starts,
    query_positions,
    lengths,
    lse,  # [T, H] float32, base 2
    out,  # [B, width] float32
    num_kv_heads,
    width,
    score_scale,
    cap_scale,
    stride_q_t,
    stride_q_h,
    stride_k_slot,
    stride_k_h,
    stride_index,
    stride_out,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    positions = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    q_begin = tl.load(q_starts + request)
    num_rows = (tl.load(q_starts + request + 1) - q_begin) * GROUP
    valid = positions < tl.load(lengths + request)
    row = tl.load(rows + request).to(tl.int64)
    index_row = index + row * stride_index, None, stride_index, 0, 0
    num_heads = num_kv_heads * GROUP

    acc = tl.zeros([BLOCK_N], tl.float32)
    for head in range(num_kv_heads):
        kv_head = tl.zeros([], tl.int64) + head
        k = _load_keys(
            k_cache + kv_head * stride_k_h, index_row, positions, valid, stride_k_slot, SHIFT, DK, BLOCK_DK
        )
        for first_row in range(0, num_rows, BLOCK_M):
            scores, tokens, heads, in_tile = _score_tile(
                q, query_positions, q_begin, num_rows, first_row, kv_head, k,
                tl.where(valid, positions, 2147483647), score_scale, cap_scale, stride_q_t, stride_q_h,
                GROUP, DK, BLOCK_M, BLOCK_DK, WINDOW, CHUNK, SOFTCAP,
            )  # fmt: skip
            # With +inf, rows beyond the tile and queries that see no key have probabilities of 0.
            row_lse = tl.load(lse + tokens * num_heads + heads, mask=in_tile, other=float("inf"))
            row_lse = tl.where(row_lse > float("-inf"), row_lse, float("inf"))
            acc += tl.sum(tl.exp2(scores - row_lse[:, None]), 0)
    tl.store(out + request * stride_out + positions, acc, mask=positions < width)


@torch.library.custom_op("lightkv::attention_lse", mutates_args=("lse",))
def _attention_lse(
    q: Tensor,
    k_cache: Tensor,
    index: Tensor,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    sink_logits: Tensor | None,
    lse: Tensor,
    max_q_len: int,
    scale: float,
    shift: int,
    window: int,
    chunk: int,
    softcap: float,
) -> None:
    num_requests, num_kv_heads = len(rows), k_cache.shape[1]
    if num_requests == 0 or max_q_len == 0:
        return
    group = q.shape[1] // num_kv_heads
    launch = tuning.scores_launch(q.shape[2], q.element_size())
    score_scale, cap_scale = score_scales(scale, softcap)
    _lse_kernel[(num_kv_heads, triton.cdiv(max_q_len * group, launch.block_m), num_requests)](
        q,
        k_cache,
        index,
        rows,
        q_starts,
        query_positions,
        lengths,
        sink_logits,
        lse,
        score_scale,
        cap_scale,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        index.stride(0),
        GROUP=group,
        DK=q.shape[2],
        BLOCK_M=launch.block_m,
        BLOCK_DK=tuning.padded_dim(q.shape[2]),
        BLOCK_N=launch.block_n,
        SHIFT=shift,
        WINDOW=window,
        CHUNK=chunk,
        SOFTCAP=softcap != 0.0,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


_attention_lse.register_fake(lambda *_: None)  # the output is an argument


@torch.library.custom_op("lightkv::attention_scores", mutates_args=("out",))
def _attention_scores(
    q: Tensor,
    k_cache: Tensor,
    index: Tensor,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    lse: Tensor,
    out: Tensor,
    scale: float,
    shift: int,
    window: int,
    chunk: int,
    softcap: float,
) -> None:
    num_requests, width = out.shape
    if num_requests == 0 or width == 0:
        return
    launch = tuning.scores_launch(q.shape[2], q.element_size())
    score_scale, cap_scale = score_scales(scale, softcap)
    _scores_kernel[(triton.cdiv(width, launch.block_n), num_requests)](
        q,
        k_cache,
        index,
        rows,
        q_starts,
        query_positions,
        lengths,
        lse,
        out,
        k_cache.shape[1],
        width,
        score_scale,
        cap_scale,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        index.stride(0),
        out.stride(0),
        GROUP=q.shape[1] // k_cache.shape[1],
        DK=q.shape[2],
        BLOCK_M=launch.block_m,
        BLOCK_DK=tuning.padded_dim(q.shape[2]),
        BLOCK_N=launch.block_n,
        SHIFT=shift,
        WINDOW=window,
        CHUNK=chunk,
        SOFTCAP=softcap != 0.0,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


_attention_scores.register_fake(lambda *_: None)  # the output is an argument


def attention_lse(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    max_q_len: int,
) -> Tensor:
    """Computes the log-sum-exp of each query's scores, in base 2, the head's sink included: float32 `[T, H]`,
    -inf where a query sees no key and has no sink, or belongs to no request. Arguments and errors are those of
    `attention_scores`."""
    scale = check_attention_inputs(q, kv, rows, lengths, options, None, None)
    _check_queries(q, rows, q_starts, query_positions)
    if kv.ring is not None or kv.indirection is not None:
        raise ValueError("scores are those of a row's own entries; pass kv without a ring and an indirection")
    if max_q_len < 0:
        raise ValueError(f"max_q_len must be 0 or more, got {max_q_len}")
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    _attention_lse(
        q,
        kv.k,
        kv.index,
        rows,
        q_starts,
        query_positions,
        lengths,
        options.sink_logits,
        lse,
        max_q_len,
        scale,
        kv.shift,
        options.window,
        options.chunk,
        options.softcap,
    )
    return lse


def attention_scores(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    max_q_len: int,
    width: int,
) -> Tensor:
    """Computes how much the queries attend to each entry of their row: probabilities, summed over queries and
    heads.

    Args:
        q: `[T, H, Dk]`, request after request; H is a multiple of num_kv_heads.
        kv: the layer's K/V and the index that finds it; V is not read. The dot products run in the dtype of q
            and accumulate in float32.
        rows: int32 or int64 `[B]`, each request's row of the index.
        q_starts: int32 `[B + 1]`: the queries of request b are q[q_starts[b] : q_starts[b + 1]].
        query_positions: int32 `[T]`, the entry of each query, which attends to it and to the entries before.
        lengths: int32 `[B]`, how many entries a request's row has; at most num_entries * 2**shift, which is not
            checked.
        max_q_len: an upper bound on the queries of a request, which sizes the grid.
        width: the number of entries to return scores for.
        options: scale, window, soft-cap, chunk and sinks.

    Returns:
        float32 `[B, width]`, zero beyond a request's length. If `width` covers them, a request's entries add up
        to its number of queries times H, less what the sinks take.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    if width < 0:
        raise ValueError(f"width must be 0 or more, got {width}")
    lse = attention_lse(q, kv, rows, q_starts, query_positions, lengths, options, max_q_len=max_q_len)
    out = torch.empty(len(rows), width, dtype=torch.float32, device=q.device)
    _attention_scores(
        q,
        kv.k,
        kv.index,
        rows,
        q_starts,
        query_positions,
        lengths,
        lse,
        out,
        options.scale_for(q.shape[2]),
        kv.shift,
        options.window,
        options.chunk,
        options.softcap,
    )
    return out


def _check_queries(q: Tensor, rows: Tensor, q_starts: Tensor, query_positions: Tensor) -> None:
    """Raises ValueError where q_starts or query_positions do not fit. Reads no tensor's contents."""
    for name, tensor, length in (
        ("q_starts", q_starts, len(rows) + 1),
        ("query_positions", query_positions, len(q)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != (length,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 [{length}], got {tensor.dtype} {tuple(tensor.shape)}"
            )


def attention_scores_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Computes `attention_scores` `[B, width]` and `attention_lse` `[T, H]` in plain torch, one request at a
    time, in float32, or in float64 where q is. Reads rows, q_starts and lengths on the host, so on a GPU it
    synchronises."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale, softcap = options.scale_for(q.shape[2]), options.softcap
    num_heads, num_kv_heads = q.shape[1], kv.k.shape[1]
    out = torch.zeros(len(rows), width, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    starts = q_starts.tolist()
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        queries = slice(starts[request], starts[request + 1])
        entries = torch.arange(length, device=q.device)
        k = kv.k[find_slots_reference(kv.index[row], entries, kv.shift)].to(dtype)  # [L, num_kv_heads, Dk]
        # [num_kv_heads, group * n, Dk]: query heads that share a K/V head are rows of one matrix
        q_rows = q[queries].to(dtype).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.matmul(q_rows, k.permute(1, 2, 0)) * scale
        scores = scores.view(num_heads, queries.stop - queries.start, length)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        visible = visible_reference(query_positions[queries].long(), entries, options)
        scores = scores.masked_fill_(~visible, float("-inf"))
        # [H, n], -inf where a query sees no key
        row_lse = join_sinks_reference(scores.logsumexp(2), options.sink_logits)
        lse[queries] = row_lse.T * LOG2_E
        weights = scores.sub_(row_lse.clamp(min=-1e30)[..., None]).exp_()
        shown = min(length, width)
        out[request, :shown] = weights.sum((0, 1))[:shown]
    return out, lse
