"""The kernel of decode: a program attends to its share of the keys, item by item. The loop over keys is in
`attend_keys.py`, the work list in `decode_plan.py`; `decode_attention.py` says what an item is."""

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

from .decode_plan import ITEM_FIELDS, PART_FIELDS, SHARE_FIELDS
from .decode_sinks import SINK_TILE, attend_sinks

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_PART_FIELDS = tl.constexpr(PART_FIELDS)
_SINK_TILE = tl.constexpr(SINK_TILE)


@triton.jit
def _load_item(item, is_item):
    """Returns the request (-1 - prefix for a shared prefix), row, first key and end of the keys of an item."""
    request = tl.load(item, mask=is_item, other=0)
    row = tl.load(item + 1, mask=is_item, other=0)
    begin = tl.load(item + 2, mask=is_item, other=0)
    end = tl.load(item + 3, mask=is_item, other=0)
    return request, row, begin, end


@triton.jit(
    do_not_specialize=["own_parts", "mask_width"],
    do_not_specialize_on_alignment=[
        "index", "indirection", "items", "shares", "parts", "members", "lengths", "sink_logits", "alibi_slopes",
        "mask_columns",
    ],
)  # fmt: skip
def decode_kernel(
    q,
    k_cache,  # of int16 words where quantised
    v_cache,
    columns,  # scales and middles of K, then those of V; or None
    v_columns,  # those of V where they stand apart; or None
    index,
    indirection,
    items,  # [capacity, 4]
    shares,  # [workers + 1, 8]
    parts,  # [B, 4]
    members,  # [G, MEMBERS]
    lengths,  # [B]
    sink_logits,  # [H] float32; or None
    sink_cos,  # [B, PAIRS] float32, of a ring's sinks; or None
    sink_sin,
    alibi_slopes,  # [H] float32; or None
    mask,  # [1 or H, B * num_queries, mask_width], of values or int32 words of bits; or None
    mask_columns,  # [B]; or None
    out,
    lse,  # [B * num_queries, H] float32, base 2
    partial_out,  # [parts, num_queries * H, DV] float32
    partial_lse,  # [parts, num_queries * H] float32, base 2
    own_parts,
    score_scale,
    cap_scale,
    stride_q_b,
    stride_q_h,
    stride_k_slot,
    stride_k_h,
    stride_v_slot,
    stride_v_h,
    stride_columns_slot,
    stride_columns_h,
    stride_index,
    stride_indirection,
    stride_out_b,
    stride_out_h,
    mask_width,
    stride_mask_h,
    stride_mask_t,
    GROUP: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    MEMBERS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    SINKS: tl.constexpr,
    RING: tl.constexpr,  # 0: the rows are no rings
    SEES_SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr,
    FORMAT: tl.constexpr,  # of `format_code`
    PACKED: tl.constexpr,
):
    IS_TREE: tl.constexpr = mask is not None and mask.dtype.element_ty == tl.int32
    kv_head = tl.program_id(0).to(tl.int64)
    worker = tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    tile_rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + tile_rows % GROUP  # [BLOCK_M]
    queries = tile_rows // GROUP % NUM_QUERIES
    member = tile_rows // (GROUP * NUM_QUERIES)
    of_head = (None, None, None)
    if FORMAT > 0:
        of_head = head_columns(columns, v_columns, kv_head, stride_columns_slot, stride_columns_h, FORMAT)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    share = shares + worker * _SHARE_FIELDS
    first_item = tl.load(share)
    end_item = tl.load(share + _SHARE_FIELDS)
    next_request, next_row, next_begin, next_end = _load_item(share + 1, True)
    for item in range(first_item, end_item):
        request, begin, end = next_request.to(tl.int64), next_begin, next_end
        row = next_row.to(tl.int64)
        index_row = index + row * stride_index, indirection, stride_index, SINKS, RING
        if indirection is not None:
            index_row = index, indirection + row * stride_indirection, stride_index, SINKS, RING
        following = items + (item + 1) * _ITEM_FIELDS
        next_request, next_row, next_begin, next_end = _load_item(following, item + 1 < end_item)
        positions = begin + tl.arange(0, BLOCK_N)
        slots = find_slots(index_row, positions, positions < end, SHIFT)  # [BLOCK_N]
        is_prefix = request < 0
        of_request = parts + tl.maximum(request, 0) * _PART_FIELDS
        num_parts = tl.load(of_request + 1)
        part = own_parts + item  # the number of the partial output
        owner, in_tile = request, member < 1
        if MEMBERS > 1:
            num_parts = tl.where(is_prefix, 2, num_parts + tl.load(of_request + 3))
            part = tl.where(is_prefix, item * MEMBERS + member, part)
            listed = is_prefix & (member < MEMBERS)
            of_prefix = tl.load(members + (-1 - request) * MEMBERS + member, mask=listed, other=-1)
            owner = tl.where(is_prefix, of_prefix, tl.where(in_tile, request, -1))
            in_tile = owner >= 0
        tokens = owner * NUM_QUERIES + queries  # [BLOCK_M]
        q_heads = q + tokens[:, None] * stride_q_b + heads[:, None] * stride_q_h
        q_tiles = load_query(q_heads, in_tile, DK, BLOCK_DK, FORMAT, PACKED)
        q_sums = sum_query(q_tiles, FORMAT, PACKED)

        # Every query sees the keys in [begin, full_end); only some queries see those in [full_end, end):
        #   begin ├──── not masked ────┤ full_end ├─ masked ─┤ end
        if NUM_QUERIES > 1 or alibi_slopes is not None or IS_TREE:
            length = tl.load(lengths + tl.maximum(request, 0))
            if MEMBERS > 1:
                length = tl.where(is_prefix, end + NUM_QUERIES, length)  # every query sees all of its keys
            query_positions = length - NUM_QUERIES + queries
            visible_end = tl.minimum(end, length - NUM_QUERIES + (0 if IS_TREE else 1 + AFTER))
        else:
            query_positions = tl.zeros([BLOCK_M], tl.int32) + (end - 1)
            visible_end = end
        if (CHUNK > 0 and (NUM_QUERIES > 1 or MEMBERS > 1)) or (alibi_slopes is not None and MEMBERS > 1):
            own_length = tl.load(lengths + tl.where(in_tile, owner, 0))  # [BLOCK_M]
            query_positions = own_length - NUM_QUERIES + queries
        if CHUNK > 0 and (NUM_QUERIES > 1 or MEMBERS > 1):
            # If a query's chunk begins after `begin`, all tiles are masked.
            seen_from = tl.where(in_tile, first_key(query_positions, 0, CHUNK), 0)
            visible_end = tl.where(tl.max(seen_from, 0) > begin, begin, visible_end)
        full_end = begin
        if NUM_QUERIES == 1 or WINDOW == 0:
            full_end = begin + tl.maximum(visible_end - begin, 0) // BLOCK_N * BLOCK_N

        # Of a request's parts, the first one of its own is joined by the sinks.
        joins = in_tile
        if sink_logits is not None:
            joins = in_tile & (request >= 0) & (tl.load(of_request) == own_parts + item)
        peak, total = start_softmax(sink_logits, heads, joins, BLOCK_M)
        slopes = load_slopes(alibi_slopes, heads, in_tile)
        mask_tile = (None, None, None)
        if mask is not None:
            mask_pointers, mask_widths = mask_rows(
                mask, mask_columns, mask_width, stride_mask_h, stride_mask_t, heads, tokens, owner, in_tile
            )
            own_begin = end  # none of a request's queries is among the keys of a shared prefix
            if IS_TREE:
                own_begin = length - NUM_QUERIES
            mask_tile = (mask_pointers, mask_widths, own_begin)
            if not IS_TREE:
                full_end = end_of_whole_tiles(begin, full_end, mask_widths, in_tile, BLOCK_N)
            if (
                WINDOW == 0 and CHUNK == 0 and MEMBERS == 1
            ):  # such multiples: the mask is read in whole vectors
                begin = begin // 16 * 16
                full_end = full_end // 16 * 16
        acc = start_output(BLOCK_M, BLOCK_DV, FORMAT)
        if SEES_SINKS:  # in the request's first part
            is_first = tl.load(of_request) == own_parts + item
            num_sinks = tl.where(is_first, tl.minimum(tl.load(lengths + request), SINKS), 0)
            acc, total, peak = attend_sinks(
                q + request * stride_q_b + heads[:, None] * stride_q_h, in_tile, acc, total, peak,
                k_cache + kv_head * stride_k_h, v_cache + kv_head * stride_v_h, of_head, index_row, num_sinks,
                sink_cos + request * PAIRS if sink_cos is not None else None,
                sink_sin + request * PAIRS if sink_sin is not None else None,
                stride_k_slot, stride_v_slot, score_scale, cap_scale,
                DK, DV, BLOCK_DK, BLOCK_DV, SHIFT, SOFTCAP, PAIRS, _SINK_TILE, FORMAT, PACKED,
            )  # fmt: skip
        for MASKED in tl.static_range(0, 2):
            acc, total, peak, slots = attend_keys(
                q_tiles,
                q_sums,
                acc,
                total,
                peak,
                slots,
                k_cache + kv_head * stride_k_h,
                v_cache + kv_head * stride_v_h,
                of_head,
                index_row,
                query_positions,
                slopes,
                mask_tile,
                full_end if MASKED else begin,
                end if MASKED else full_end,
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
                # Where the queries are one request's single one, `begin` applies the window and the chunk.
                WINDOW if NUM_QUERIES > 1 else 0,
                CHUNK if NUM_QUERIES > 1 or MEMBERS > 1 else 0,
                AFTER,
                SOFTCAP,
                MASKED == 1,
                FORMAT,
                PACKED,
            )
        partials = (part * NUM_QUERIES + queries).to(tl.int64) * num_heads + heads  # [BLOCK_M]
        for PART in tl.static_range(0, fields_of(v_kind(FORMAT))):
            dims, in_head = output_dims(BLOCK_DV, DV, PART, FORMAT)
            finished = finish_output(acc, total, PART, FORMAT, PACKED)
            out_mask = in_tile[:, None] & in_head[None, :]
            if num_parts == 1:
                heads_out = out + tokens[:, None] * stride_out_b + heads[:, None] * stride_out_h
                tl.store(heads_out + dims[None, :], finished.to(out.dtype.element_ty), mask=out_mask)
            else:
                tl.store(partial_out + partials[:, None] * DV + dims[None, :], finished, mask=out_mask)
        if num_parts > 1:
            tl.store(partial_lse + partials, peak + tl.log2(total), mask=in_tile)
        elif HAS_LSE:
            tl.store(lse + tokens * num_heads + heads, peak + tl.log2(total), mask=in_tile)
