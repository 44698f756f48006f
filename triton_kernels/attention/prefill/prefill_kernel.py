"""The kernel of prefill that runs wherever Triton does: a program computes a tile of queries, or a share of the
keys of several tiles. The loop over keys is in `attend_keys.py`, the work list in `prefill_plan.py`."""

import triton
import triton.language as tl

from lightkv.triton_kernels.attention.attend_keys import (
    attend_keys,
    find_slots,
    finish_output,
    first_key,
    head_columns,
    load_query,
    load_slopes,
    output_dims,
    start_output,
    start_softmax,
    sum_query,
)
from lightkv.triton_kernels.attention.attention_mask import end_of_whole_tiles, mask_rows
from lightkv.triton_kernels.quantised.unpack import fields_of, v_kind

from .prefill_plan import ITEM_FIELDS

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)


@triton.jit
def _load_tile(item):
    """Returns the request, row of the index, first row, rows of the request, first query and keys before it of
    an item."""
    row = tl.load(item + 1).to(tl.int64)
    return tl.load(item), row, tl.load(item + 2), tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)


@triton.jit
def _attend_item(
    tensors,
    partials,
    item,
    tile,
    kv_head,
    num_kv_heads,
    scales,
    strides,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    SINKS: tl.constexpr,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SHARES: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Computes a tile, or, where keys are shared out, the part of it that the item is limited to."""
    q_strides, k_strides, v_strides, columns_strides, index_strides, out_strides, mask_sizes = strides
    q, k_cache, v_cache, columns, v_columns, index, indirection, out, lse = tensors[0]
    sink_logits, alibi_slopes, mask, mask_columns = tensors[1]
    IS_TREE: tl.constexpr = mask is not None and mask.dtype.element_ty == tl.int32
    request, row, first_row, num_rows, q_begin, prefix = tile
    tile_rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    queries = tile_rows // GROUP
    tokens = (q_begin + queries).to(tl.int64)
    heads = kv_head * GROUP + tile_rows % GROUP
    in_tile = tile_rows < num_rows
    query_positions = prefix + queries
    first_position = prefix + first_row // GROUP
    last_position = prefix + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP

    # Keys in [begin, full_end) are visible to every row, keys in [full_end, num_keys) to some of them:
    #   begin ├──── not masked ────┤ full_end ├─ masked ─┤ num_keys
    num_keys = tl.maximum(last_position + 1, 0)
    seen_by_all = first_position + 1  # the keys before it, but for a window or chunk
    if AFTER > 0:
        num_keys = tl.maximum(tl.minimum(last_position + 1 + AFTER, prefix + num_rows // GROUP), 0)
        seen_by_all = tl.minimum(first_position + 1 + AFTER, num_keys)
    if IS_TREE:
        seen_by_all = tl.minimum(seen_by_all, prefix)
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        full_end = begin
    else:
        begin = 0
        full_end = tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
    if CHUNK > 0:
        begin = first_key(first_position, 0, CHUNK)
        full_end = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_N * BLOCK_N
        # If the tile ends in a later chunk than it begins in, no key is visible to every row.
        full_end = tl.where(first_key(last_position, 0, CHUNK) > begin, begin, full_end)
    joins = in_tile
    if SHARES:
        if sink_logits is not None:  # of a tile's parts, its first is joined by the sinks
            joins = in_tile & (tl.load(item + 6) <= begin)
        begin = tl.maximum(begin, tl.load(item + 6))
        num_keys = tl.minimum(num_keys, tl.load(item + 7))
        full_end = begin + tl.maximum(tl.minimum(full_end, num_keys) - begin, 0) // BLOCK_N * BLOCK_N
    # A window is only a few tiles long: all of them are masked, and the loop without a mask is left out.
    FIRST_LOOP: tl.constexpr = 1 if WINDOW > 0 else 0

    index_row = index + row * index_strides[0], indirection, index_strides[0], SINKS, RING
    if indirection is not None:
        index_row = index, indirection + row * index_strides[1], index_strides[0], SINKS, RING
    positions = begin + tl.arange(0, BLOCK_N)
    slots = find_slots(index_row, positions, positions < num_keys, SHIFT)  # [BLOCK_N]

    q_heads = q + tokens[:, None] * q_strides[0] + heads[:, None] * q_strides[1]
    q_tiles = load_query(q_heads, in_tile, DK, BLOCK_DK, FORMAT, PACKED)

    peak, total = start_softmax(sink_logits, heads, joins, BLOCK_M)
    slopes = load_slopes(alibi_slopes, heads, in_tile)
    mask_tile = (None, None, None)
    if mask is not None:
        mask_pointers, mask_widths = mask_rows(
            mask, mask_columns, mask_sizes[0], mask_sizes[1], mask_sizes[2], heads, tokens, request, in_tile
        )
        mask_tile = (mask_pointers, mask_widths, prefix)
        if not IS_TREE:
            full_end = end_of_whole_tiles(begin, full_end, mask_widths, in_tile, BLOCK_N)
        if WINDOW == 0 and CHUNK == 0:  # a part begins at such a multiple: the mask is read in whole vectors
            begin = begin // 16 * 16
            full_end = full_end // 16 * 16
    acc = start_output(BLOCK_M, BLOCK_DV, FORMAT)
    q_sums = sum_query(q_tiles, FORMAT, PACKED)
    of_head = (None, None, None)
    if FORMAT > 0:
        of_head = head_columns(columns, v_columns, kv_head, columns_strides[0], columns_strides[1], FORMAT)
    k_head = k_cache + kv_head * k_strides[1]
    v_head = v_cache + kv_head * v_strides[1]
    for MASKED in tl.static_range(FIRST_LOOP, 2):
        acc, total, peak, slots = attend_keys(
            q_tiles,
            q_sums,
            acc,
            total,
            peak,
            slots,
            k_head,
            v_head,
            of_head,
            index_row,
            query_positions,
            slopes,
            mask_tile,
            full_end if MASKED else begin,
            num_keys if MASKED else full_end,
            num_keys,
            k_strides[0],
            v_strides[0],
            scales[0],
            scales[1],
            DK,
            DV,
            BLOCK_DK,
            BLOCK_DV,
            BLOCK_N,
            SHIFT,
            WINDOW,
            CHUNK,
            AFTER,
            SOFTCAP,
            MASKED == 1,
            FORMAT,
            PACKED,
        )

    is_part = False
    if SHARES:
        part = tl.load(item + 8)
        is_part = part >= 0
        partial_out, partial_lse = partials
        place = (part.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    for PART in tl.static_range(0, fields_of(v_kind(FORMAT))):
        dims, in_head = output_dims(BLOCK_DV, DV, PART, FORMAT)
        finished = finish_output(acc, total, PART, FORMAT, PACKED)
        out_mask = in_tile[:, None] & in_head[None, :]
        if SHARES:
            tl.store(partial_out + place[:, None] * DV + dims[None, :], finished, mask=out_mask & is_part)
            out_mask = out_mask & (part < 0)
        pointers = out + tokens[:, None] * out_strides[0] + heads[:, None] * out_strides[1] + dims[None, :]
        tl.store(pointers, finished.to(out.dtype.element_ty), mask=out_mask)
    if SHARES:
        tl.store(partial_lse + place, peak + tl.log2(total), mask=in_tile & is_part)
        in_tile = in_tile & (part < 0)
    if HAS_LSE:
        tl.store(lse + tokens * (num_kv_heads * GROUP) + heads, peak + tl.log2(total), mask=in_tile)


@triton.jit(
    do_not_specialize=["mask_width"],
    do_not_specialize_on_alignment=[
        "index", "indirection", "items", "sink_logits", "alibi_slopes", "mask_columns",
    ],
)  # fmt: skip
def prefill_kernel(
    q,
    k_cache,  # of int16 words where quantised
    v_cache,
    columns,  # scales and middles of K, then those of V; or None
    v_columns,  # those of V where they stand apart; or None
    index,
    indirection,
    items,  # [capacity, 12]
    sink_logits,  # [H] float32; or None
    alibi_slopes,  # [H] float32; or None
    mask,  # [1 or H, T, mask_width], of values or int32 words of bits; or None
    mask_columns,  # [B]; or None
    out,
    lse,  # [T, H] float32, base 2
    partial_out,  # [parts, num_kv_heads, BLOCK_M, DV] float32; None if no tile is ever cut
    partial_lse,  # [parts, num_kv_heads, BLOCK_M] float32, base 2
    num_kv_heads,
    score_scale,
    cap_scale,
    stride_q_t,
    stride_q_h,
    stride_k_slot,
    stride_k_h,
    stride_v_slot,
    stride_v_h,
    stride_columns_slot,
    stride_columns_h,
    stride_index,
    stride_indirection,
    stride_out_t,
    stride_out_h,
    mask_width,
    stride_mask_h,
    stride_mask_t,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    SINKS: tl.constexpr,
    RING: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    SHARES: tl.constexpr,
    FORMAT: tl.constexpr,  # of `format_code`
    PACKED: tl.constexpr,
):
    # Neighbouring programs read neighbouring heads of the same tokens.
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    number = tl.program_id(0) // num_kv_heads
    item = items + number * _ITEM_FIELDS
    tile = _load_tile(item)
    if tile[0] < 0:
        return
    tensors = (
        (q, k_cache, v_cache, columns, v_columns, index, indirection, out, lse),
        (sink_logits, alibi_slopes, mask, mask_columns),
    )
    partials, mask_sizes = (partial_out, partial_lse), (mask_width, stride_mask_h, stride_mask_t)
    scales, q_strides, out_strides, index_strides = (
        (score_scale, cap_scale),
        (stride_q_t, stride_q_h),
        (stride_out_t, stride_out_h),
        (stride_index, stride_indirection),
    )
    k_strides, v_strides = (stride_k_slot, stride_k_h), (stride_v_slot, stride_v_h)
    columns_strides = (stride_columns_slot, stride_columns_h)
    strides = (q_strides, k_strides, v_strides, columns_strides, index_strides, out_strides, mask_sizes)
    if SHARES:
        while number >= 0:
            item = items + number * _ITEM_FIELDS
            _attend_item(
                tensors, partials, item, _load_tile(item), kv_head, num_kv_heads, scales, strides,
                GROUP, DK, DV, BLOCK_M, BLOCK_DK, BLOCK_DV, BLOCK_N, SHIFT, SINKS, RING, WINDOW,
                CHUNK, AFTER, SOFTCAP, HAS_LSE, True, FORMAT, PACKED,
            )  # fmt: skip
            number = tl.load(item + 9)  # the next one of the share
    else:
        _attend_item(
            tensors, partials, item, tile, kv_head, num_kv_heads, scales, strides,
            GROUP, DK, DV, BLOCK_M, BLOCK_DK, BLOCK_DV, BLOCK_N, SHIFT, SINKS, RING, WINDOW, CHUNK,
            AFTER, SOFTCAP, HAS_LSE, False, FORMAT, PACKED,
        )  # fmt: skip
