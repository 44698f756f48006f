"""The kernels of `attention_scores.py`: each query's log-sum-exp, and the probabilities of each key."""

import triton
import triton.language as tl

from lightkv.triton_kernels.attention.variants.hooks import (
    Rows,
    change_scores,
    hide,
    load_ahead,
    offset_of,
    start_rows,
    start_softmax,
)
from lightkv.triton_kernels.quantised.unpack import (
    has_zero_point,
    k_groups,
    kind_of,
    load_scales,
    word_block,
    words_of,
)

from .attend_keys import find_slots, key_scores, load_query, load_rows, sum_query


@triton.jit
def _rows_of(batch, request, kv_head, first_row, shape):
    """Returns a tile of the query rows (queries times GROUP heads) of a request."""
    q_begin = tl.load(batch.q_starts + request)
    num_queries = tl.load(batch.q_starts + request + 1) - q_begin
    numbers = first_row + tl.arange(0, shape.BLOCK_M)
    queries = numbers // shape.GROUP
    in_tile = queries < num_queries
    tokens = (q_begin + queries).to(tl.int64)
    heads = kv_head * shape.GROUP + numbers % shape.GROUP
    positions = tl.load(batch.query_positions + tokens, mask=in_tile, other=-1)
    requests = tl.zeros_like(queries) + request
    return Rows(heads, tokens, requests, positions, in_tile, tl.load(batch.lengths + request) - num_queries)


@triton.jit
def _score_tile(q, rows, keys, start, length, variants, states, score_scale, shape):
    """Returns the scores, in base 2, of a tile of query rows with the keys from `start` on: [BLOCK_M, BLOCK_N],
    -inf where a key is not visible. `keys`: of `_load_keys`."""
    positions = start + tl.arange(0, shape.BLOCK_N)
    valid = positions < length
    q_sums = sum_query(q, shape.FORMAT, shape.PACKED)
    scores = key_scores(q, q_sums, keys[0], keys[1], shape.FORMAT, shape.PACKED)
    loaded = load_ahead(variants, states, positions, True, True)
    scores = change_scores(variants, states, loaded, scores, score_scale) * score_scale
    if variants.flags.has_offset:
        scores += offset_of(variants, states, start, rows.positions)[:, None]
    visible = tl.broadcast_to(valid[None, :], scores.shape)
    if shape.CAUSAL:
        visible = visible & (positions[None, :] <= rows.positions[:, None])
    visible = hide(variants, states, visible, rows.positions, positions)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _load_keys(cache, kv_head, index, row, start, length, shape):
    """Loads one head's keys from `start` on, [BLOCK_N, BLOCK_DK], or their words, and their scales and zero
    points; zeros from `length` on: a free slot may hold NaN."""
    FORMAT: tl.constexpr = shape.FORMAT
    positions = start + tl.arange(0, shape.BLOCK_N)
    valid = positions < length
    slots = find_slots(index, row, positions, valid)
    NUM_WORDS: tl.constexpr = words_of(shape.DK, kind_of(FORMAT))
    BLOCK: tl.constexpr = word_block(shape.BLOCK_DK, kind_of(FORMAT))
    k_head = cache.k + kv_head * cache.stride_k_head
    k = load_rows(k_head, slots, valid, cache.stride_k_slot, NUM_WORDS, BLOCK, True, False)
    beside = (valid, valid)  # not read
    if k_groups(FORMAT) > 0:
        beside = load_scales(
            cache.scales + kv_head * cache.stride_scales_head, slots, valid, cache.stride_scales_slot,
            k_groups(FORMAT), BLOCK, NUM_WORDS, has_zero_point(FORMAT), True,
        )  # fmt: skip
    return k, beside


@triton.jit
def _load_query_rows(q, rows, shape):
    heads = q.data + rows.tokens[:, None] * q.stride_token + rows.heads[:, None] * q.stride_head
    return load_query(heads, rows.in_tile, shape)


@triton.jit
def lse_kernel(
    q,  # `Heads`
    cache,  # `Cache`, whose V is not read
    index,  # `Index`
    batch,  # `ScoredBatch`
    lse,  # [T, H] float32, base 2
    score_scale,
    variants,  # `Variants`
    shape,  # `Shape`
):
    kv_head = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * shape.BLOCK_M
    request = tl.program_id(2).to(tl.int64)
    num_queries = tl.load(batch.q_starts + request + 1) - tl.load(batch.q_starts + request)
    if first_row >= num_queries * shape.GROUP:
        return
    length = tl.load(batch.lengths + request)
    row = tl.load(batch.rows + request).to(tl.int64)
    rows = _rows_of(batch, request, kv_head, first_row, shape)
    states = start_rows(variants, rows)
    peak, total = start_softmax(variants, rows, rows.in_tile, shape.BLOCK_M)
    for start in range(0, length, shape.BLOCK_N):
        keys = _load_keys(cache, kv_head, index, row, start, length, shape)
        query = _load_query_rows(q, rows, shape)
        scores = _score_tile(query, rows, keys, start, length, variants, states, score_scale, shape)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # The scores are products, which may be rounded only after the subtraction: none may exceed the peak.
        weights = tl.exp2(tl.minimum(scores - new_peak[:, None], 0.0))
        total = total * tl.exp2(peak - new_peak) + tl.sum(weights, 1)
        peak = new_peak
    num_heads = tl.num_programs(0) * shape.GROUP
    tl.store(lse + rows.tokens * num_heads + rows.heads, peak + tl.log2(total), mask=rows.in_tile)


@triton.jit
def scores_kernel(
    q,  # `Heads`
    cache,  # `Cache`, whose V is not read
    index,  # `Index`
    batch,  # `ScoredBatch`
    lse,  # [T, H] float32, base 2
    out,  # [B, width] float32
    num_kv_heads,
    width,
    stride_out,
    score_scale,
    variants,  # `Variants`
    shape,  # `Shape`
):
    request = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * shape.BLOCK_N
    num_rows = (tl.load(batch.q_starts + request + 1) - tl.load(batch.q_starts + request)) * shape.GROUP
    length = tl.load(batch.lengths + request)
    row = tl.load(batch.rows + request).to(tl.int64)
    num_heads = num_kv_heads * shape.GROUP

    acc = tl.zeros([shape.BLOCK_N], tl.float32)
    for head in range(num_kv_heads):
        kv_head = tl.zeros([], tl.int64) + head
        keys = _load_keys(cache, kv_head, index, row, start, length, shape)
        for first_row in range(0, num_rows, shape.BLOCK_M):
            rows = _rows_of(batch, request, kv_head, first_row, shape)
            states = start_rows(variants, rows)
            query = _load_query_rows(q, rows, shape)
            scores = _score_tile(query, rows, keys, start, length, variants, states, score_scale, shape)
            # With +inf, rows beyond the tile and queries that see no key have probabilities of 0.
            row_lse = tl.load(
                lse + rows.tokens * num_heads + rows.heads, mask=rows.in_tile, other=float("inf")
            )
            row_lse = tl.where(row_lse > float("-inf"), row_lse, float("inf"))
            acc += tl.sum(tl.exp2(tl.minimum(scores - row_lse[:, None], 0.0)), 0)
    positions = start + tl.arange(0, shape.BLOCK_N)
    tl.store(out + request * stride_out + positions, acc, mask=positions < width)
