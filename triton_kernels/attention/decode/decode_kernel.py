"""The kernel of decode: a program attends to its share of the keys, item by item. The loop over keys is in
`attend_keys.py`, the work list in `decode_plan.py`; `decode_attention.py` says what an item is."""

import triton
import triton.language as tl

from lightkv.triton_kernels.attention.attend_keys import (
    attend_keys,
    find_slots,
    finish_output,
    load_query,
    sum_query,
)
from lightkv.triton_kernels.attention.lookups.lookup import KeptQuery
from lightkv.triton_kernels.attention.records import start_sums
from lightkv.triton_kernels.attention.variants import hooks
from lightkv.triton_kernels.quantised.unpack import fields_of, kind_of

from .decode_plan import ITEM_FIELDS, PART_FIELDS, SHARE_FIELDS


@triton.jit
def _load_item(item, is_item):
    """Returns the request (-1 - prefix for a shared prefix), row, first key and end of the keys of an item."""
    request = tl.load(item, mask=is_item, other=0)
    row = tl.load(item + 1, mask=is_item, other=0)
    begin = tl.load(item + 2, mask=is_item, other=0)
    end = tl.load(item + 3, mask=is_item, other=0)
    return request, row, begin, end


@triton.jit
def _find_rows(
    request, end, member, members, lengths, heads, queries, variants, together, CAUSAL: tl.constexpr
):
    """Returns the rows of an item's tile, and the end of the keys that every query sees, a window and the like
    aside."""
    NUM_QUERIES: tl.constexpr = together.NUM_QUERIES
    MEMBERS: tl.constexpr = together.MEMBERS
    owner = request
    in_tile = member < 1
    if MEMBERS > 1:
        is_prefix = request < 0
        listed = is_prefix & (member < MEMBERS)
        of_prefix = tl.load(members + (-1 - request) * MEMBERS + member, mask=listed, other=-1)
        owner = tl.where(is_prefix, of_prefix, tl.where(in_tile, request, -1))
        in_tile = owner >= 0
    own_begin = end  # no query is among the keys of a shared prefix
    if NUM_QUERIES > 1 or variants.flags.reads_positions or variants.flags.hides_own:
        length = tl.load(lengths + tl.maximum(request, 0))
        if MEMBERS > 1:
            length = tl.where(request < 0, end + NUM_QUERIES, length)  # every query sees all of its keys
        own_begin = length - NUM_QUERIES
        positions = own_begin + queries
        seen_by_all = end
        if variants.flags.hides_own:
            seen_by_all = tl.minimum(end, own_begin)
        elif CAUSAL:
            seen_by_all = tl.minimum(end, own_begin + 1)
    else:
        positions = tl.zeros_like(queries) + (end - 1)
        seen_by_all = end
    if MEMBERS > 1 and (variants.flags.reads_positions or variants.flags.has_first_key):
        positions = tl.load(lengths + tl.where(in_tile, owner, 0)) - NUM_QUERIES + queries
    tokens = owner * NUM_QUERIES + queries  # [BLOCK_M]
    requests = tl.zeros_like(heads) + owner
    return hooks.Rows(heads, tokens, requests, positions, in_tile, own_begin), seen_by_all


@triton.jit(
    do_not_specialize=["own_parts"],
    do_not_specialize_on_alignment=["items", "shares", "parts", "members", "lengths"],
)
def decode_kernel(
    q,  # `Heads`
    cache,  # `Cache`
    index,  # `Index`
    items,  # [capacity, 4]
    shares,  # [workers + 1, 8]
    parts,  # [B, 4]
    members,  # [G, MEMBERS]
    lengths,  # [B]
    own_parts,
    outputs,  # `Outputs`; its parts are [parts, num_queries * H, DV] and [parts, num_queries * H]
    score_scale,
    variants,  # `Variants`
    together,  # `Together`
    shape,  # `Shape`
    EARLY: tl.constexpr,
):
    GROUP: tl.constexpr = shape.GROUP
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    NUM_QUERIES: tl.constexpr = together.NUM_QUERIES
    MEMBERS: tl.constexpr = together.MEMBERS
    kv_head = tl.program_id(0).to(tl.int64)
    worker = tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    tile_rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + tile_rows % GROUP  # [BLOCK_M]
    queries = tile_rows // GROUP % NUM_QUERIES
    member = tile_rows // (GROUP * NUM_QUERIES)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    share = shares + worker * SHARE_FIELDS
    first_item = tl.load(share)
    end_item = tl.load(share + SHARE_FIELDS)
    next_request, next_row, next_begin, next_end = _load_item(share + 1, True)
    for item in range(first_item, end_item):
        request, begin, end = next_request.to(tl.int64), next_begin, next_end
        row = next_row.to(tl.int64)
        following = items + (item + 1) * ITEM_FIELDS
        next_request, next_row, next_begin, next_end = _load_item(following, item + 1 < end_item)
        positions = begin + tl.arange(0, BLOCK_N)
        slots = find_slots(index, row, positions, positions < end)  # [BLOCK_N]
        of_request = parts + tl.maximum(request, 0) * PART_FIELDS
        num_parts = tl.load(of_request + 1)
        part = own_parts + item  # the number of the partial output
        if MEMBERS > 1:
            num_parts = tl.where(request < 0, 2, num_parts + tl.load(of_request + 3))
            part = tl.where(request < 0, item * MEMBERS + member, part)
        rows, seen_by_all = _find_rows(
            request, end, member, members, lengths, heads, queries, variants, together, shape.CAUSAL
        )
        q_heads = q.data + rows.tokens[:, None] * q.stride_token + heads[:, None] * q.stride_head
        q_tiles = load_query(q_heads, rows.in_tile, shape)
        q_sums = sum_query(q_tiles, shape.FORMAT, shape.PACKED)
        if variants.flags.is_short:
            seen_by_all = begin
        elif variants.flags.has_first_key:
            # If a query sees keys after `begin` alone, all tiles are masked.
            seen_from = tl.where(rows.in_tile, hooks.first_key(variants, rows.positions), 0)
            seen_by_all = tl.where(tl.max(seen_from, 0) > begin, begin, seen_by_all)
        full_end = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_N * BLOCK_N

        # Of a request's parts, the first one of its own is where its softmax starts.
        is_first = (request >= 0) & (tl.load(of_request) == own_parts + item)
        peak, total = hooks.start_softmax(variants, rows, rows.in_tile & is_first, BLOCK_M)
        states = hooks.start_rows(variants, rows)
        full_end = hooks.whole_end(variants, states, begin, full_end, rows.in_tile, BLOCK_N)
        if variants.flags.has_load and together.ALIGNED:  # so what variants load is loaded in whole vectors
            begin = begin // 16 * 16
            full_end = full_end // 16 * 16
        sums = start_sums(total, peak, slots, shape)
        query = KeptQuery(q_heads, rows.in_tile, request, kv_head, is_first, lengths)
        sums = index.hooks.attend_kept(query, sums, cache, index, row, variants, states, score_scale, shape)
        sums = attend_keys(
            q_tiles, q_sums, sums, cache, kv_head, index, row, rows.positions, variants, states, begin,
            full_end, end, score_scale, shape, 0,
        )  # fmt: skip
        _store(outputs, sums, rows, part, queries, num_parts, num_heads, NUM_QUERIES, shape)


@triton.jit
def _store(outputs, sums, rows, part, queries, num_parts, num_heads, NUM_QUERIES: tl.constexpr, shape):
    """Writes the output of an item, or its part of the output if the request has several."""
    out = outputs.out
    partials = (part * NUM_QUERIES + queries).to(tl.int64) * num_heads + rows.heads  # [BLOCK_M]
    for FIELD in tl.static_range(0, fields_of(kind_of(shape.FORMAT))):
        finished, dims, out_mask = finish_output(sums, rows.in_tile, FIELD, shape)
        if num_parts == 1:
            heads_out = (
                out + rows.tokens[:, None] * outputs.stride_token + rows.heads[:, None] * outputs.stride_head
            )
            tl.store(heads_out + dims[None, :], finished.to(out.dtype.element_ty), mask=out_mask)
        else:
            tl.store(
                outputs.partial_out + partials[:, None] * shape.DV + dims[None, :], finished, mask=out_mask
            )
    if num_parts > 1:
        tl.store(outputs.partial_lse + partials, sums.peak + tl.log2(sums.total), mask=rows.in_tile)
    elif outputs.lse is not None:
        tl.store(
            outputs.lse + rows.tokens * num_heads + rows.heads,
            sums.peak + tl.log2(sums.total),
            mask=rows.in_tile,
        )
