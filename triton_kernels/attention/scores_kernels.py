"""The kernels of `attention_scores.py`: each query's log-sum-exp, and the probabilities of each key."""

import triton
import triton.language as tl

from lightkv.triton_kernels.quantised.unpack import (
    k_groups,
    k_has_middle,
    k_kind,
    load_columns,
    word_block,
    words_of,
)

from .attend_keys import (
    LOG2_E,
    find_slots,
    head_columns,
    key_scores,
    load_query,
    load_slopes,
    start_softmax,
    sum_query,
)
from .attention_mask import add_values, is_in_tree, load_values, mask_rows

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _score_tile(
    q,
    query_positions,
    q_begin,
    num_rows,
    first_row,
    kv_head,
    keys,  # of `_load_keys`
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
    AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    of_scores,
    request,
    own_begin,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Computes the scores, in base 2, of a tile of query rows (queries times GROUP heads) with a tile of keys.

    Returns scores [BLOCK_M, BLOCK_N], -inf where a key is not visible; int64 tokens and heads, and in_tile,
    each [BLOCK_M].
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    in_tile = rows < num_rows
    tokens = (q_begin + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    q_heads = q + tokens[:, None] * stride_q_t + heads[:, None] * stride_q_h
    q_tiles = load_query(q_heads, in_tile, DK, BLOCK_DK, FORMAT, PACKED)
    ends = tl.load(query_positions + tokens, mask=in_tile, other=-1)  # [BLOCK_M]
    scores = key_scores(q_tiles, sum_query(q_tiles, FORMAT, PACKED), keys[0], keys[1], FORMAT, PACKED)
    if SOFTCAP:
        scores = 2.0 * tl.sigmoid(scores * cap_scale) - 1.0  # tanh
    alibi_slopes, mask, mask_columns, mask_width, stride_mask_h, stride_mask_t = of_scores
    last_keys = ends
    if AFTER > 0:
        last_keys += AFTER
    visible = positions[None, :] <= last_keys[:, None]
    if WINDOW > 0:
        visible = visible & (positions[None, :] > ends[:, None] - WINDOW)
    if CHUNK > 0:
        visible = visible & (positions[None, :] >= (ends // CHUNK * CHUNK)[:, None])
    if mask is not None:
        pointers, widths = mask_rows(
            mask, mask_columns, mask_width, stride_mask_h, stride_mask_t, heads, tokens, request, in_tile
        )
        if mask.dtype.element_ty == tl.int32:
            visible = visible & is_in_tree(pointers, widths, positions, own_begin)
        else:
            values = load_values(pointers, widths, positions, True, True)
            scores = add_values(scores, values, _LOG2_E / score_scale)
    scores = scores * score_scale
    if alibi_slopes is not None:
        slopes = load_slopes(alibi_slopes, heads, in_tile)
        scores += slopes[:, None] * (positions[None, :] - ends[:, None]).to(tl.float32)
    return tl.where(visible, scores, float("-inf")), tokens, heads, in_tile


@triton.jit
def _load_keys(
    k_head, of_head, index_row, positions, valid, stride_k_slot, SHIFT: tl.constexpr, DK: tl.constexpr,
    BLOCK_DK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Loads one head's keys at `positions`, [BLOCK_N, BLOCK_DK], or their words, and their scales and middles;
    zeros where not valid: a free slot may hold NaN."""
    slots = find_slots(index_row, positions, valid, SHIFT)
    NUM_WORDS: tl.constexpr = words_of(DK, k_kind(FORMAT))
    BLOCK: tl.constexpr = word_block(BLOCK_DK, k_kind(FORMAT))
    words = tl.arange(0, BLOCK)
    k = tl.load(
        k_head + slots[:, None] * stride_k_slot + words[None, :],
        mask=valid[:, None] & (words < NUM_WORDS)[None, :],
        other=0,
    )
    beside = (valid, valid)  # not read
    if k_groups(FORMAT) > 0:
        beside = load_columns(
            of_head[0], slots, valid, of_head[2], k_groups(FORMAT), BLOCK, NUM_WORDS, k_has_middle(FORMAT),
            True,
        )  # fmt: skip
    return k, beside


@triton.jit(
    do_not_specialize=["mask_width"],
    do_not_specialize_on_alignment=[
        "index", "rows", "q_starts", "query_positions", "lengths", "sink_logits", "alibi_slopes",
        "mask_columns",
    ],
)  # fmt: skip
def lse_kernel(
    q,
    k_cache,  # of int16 words where quantised
    columns,  # its scales and middles; or None
    index,
    rows,
    q_starts,
    query_positions,
    lengths,
    sink_logits,  # [H] float32; or None
    alibi_slopes,  # [H] float32; or None
    mask,  # [1 or H, T, mask_width], of values or int32 words of bits; or None
    mask_columns,  # [B]; or None
    lse,  # [T, H] float32, base 2
    score_scale,
    cap_scale,
    stride_q_t,
    stride_q_h,
    stride_k_slot,
    stride_k_h,
    stride_columns_slot,
    stride_columns_h,
    stride_index,
    mask_width,
    stride_mask_h,
    stride_mask_t,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr,  # of `format_code`
    PACKED: tl.constexpr,
):
    of_scores = (alibi_slopes, mask, mask_columns, mask_width, stride_mask_h, stride_mask_t)
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
    of_head = (None, None, None)
    if FORMAT > 0:
        of_head = head_columns(columns, None, kv_head, stride_columns_slot, stride_columns_h, FORMAT)

    tile_rows = first_row + tl.arange(0, BLOCK_M)
    sink_heads = kv_head * GROUP + tile_rows % GROUP
    peak, total = start_softmax(sink_logits, sink_heads, tile_rows < num_rows, BLOCK_M)
    for start in range(0, length, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        valid = positions < length
        keys = _load_keys(
            k_head, of_head, index_row, positions, valid, stride_k_slot, SHIFT, DK, BLOCK_DK, FORMAT
        )
        scores, _, _, _ = _score_tile(
            q, query_positions, q_begin, num_rows, first_row, kv_head, keys,
            tl.where(valid, positions, 2147483647), score_scale, cap_scale, stride_q_t, stride_q_h,
            GROUP, DK, BLOCK_M, BLOCK_DK, WINDOW, CHUNK, AFTER, SOFTCAP, of_scores, request,
            length - num_rows // GROUP, FORMAT, PACKED,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # The scores are products, which may be rounded only after the subtraction: none may exceed the peak.
        weights = tl.exp2(tl.minimum(scores - new_peak[:, None], 0.0))
        total = total * tl.exp2(peak - new_peak) + tl.sum(weights, 1)
        peak = new_peak

    query_rows = first_row + tl.arange(0, BLOCK_M)
    tokens = (q_begin + query_rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + query_rows % GROUP
    num_heads = tl.num_programs(0) * GROUP
    tl.store(lse + tokens * num_heads + heads, peak + tl.log2(total), mask=query_rows < num_rows)


@triton.jit(
    do_not_specialize=["mask_width"],
    do_not_specialize_on_alignment=[
        "index", "rows", "q_starts", "query_positions", "lengths", "alibi_slopes", "mask_columns",
    ],
)  # fmt: skip
def scores_kernel(
    q,
    k_cache,  # of int16 words where quantised
    columns,  # its scales and middles; or None
    index,
    rows,
    q_starts,
    query_positions,
    lengths,
    alibi_slopes,  # [H] float32; or None
    mask,  # [1 or H, T, mask_width], of values or int32 words of bits; or None
    mask_columns,  # [B]; or None
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
    stride_columns_slot,
    stride_columns_h,
    stride_index,
    stride_out,
    mask_width,
    stride_mask_h,
    stride_mask_t,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr,  # of `format_code`
    PACKED: tl.constexpr,
):
    of_scores = (alibi_slopes, mask, mask_columns, mask_width, stride_mask_h, stride_mask_t)
    request = tl.program_id(1).to(tl.int64)
    positions = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    q_begin = tl.load(q_starts + request)
    num_rows = (tl.load(q_starts + request + 1) - q_begin) * GROUP
    length = tl.load(lengths + request)
    valid = positions < length
    row = tl.load(rows + request).to(tl.int64)
    index_row = index + row * stride_index, None, stride_index, 0, 0
    num_heads = num_kv_heads * GROUP

    acc = tl.zeros([BLOCK_N], tl.float32)
    for head in range(num_kv_heads):
        kv_head = tl.zeros([], tl.int64) + head
        of_head = (None, None, None)
        if FORMAT > 0:
            of_head = head_columns(columns, None, kv_head, stride_columns_slot, stride_columns_h, FORMAT)
        keys = _load_keys(
            k_cache + kv_head * stride_k_h, of_head, index_row, positions, valid, stride_k_slot, SHIFT, DK,
            BLOCK_DK, FORMAT,
        )  # fmt: skip
        for first_row in range(0, num_rows, BLOCK_M):
            scores, tokens, heads, in_tile = _score_tile(
                q, query_positions, q_begin, num_rows, first_row, kv_head, keys,
                tl.where(valid, positions, 2147483647), score_scale, cap_scale, stride_q_t, stride_q_h,
                GROUP, DK, BLOCK_M, BLOCK_DK, WINDOW, CHUNK, AFTER, SOFTCAP, of_scores, request,
                length - num_rows // GROUP, FORMAT, PACKED,
            )  # fmt: skip
            # With +inf, rows beyond the tile and queries that see no key have probabilities of 0.
            row_lse = tl.load(lse + tokens * num_heads + heads, mask=in_tile, other=float("inf"))
            row_lse = tl.where(row_lse > float("-inf"), row_lse, float("inf"))
            acc += tl.sum(tl.exp2(tl.minimum(scores - row_lse[:, None], 0.0)), 0)
    tl.store(out + request * stride_out + positions, acc, mask=positions < width)
