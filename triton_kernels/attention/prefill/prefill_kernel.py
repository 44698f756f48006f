"""The kernel of prefill that runs wherever Triton does: a program computes a tile of queries or a part of its
rows, over all keys or a share of them. The loop over keys is in `attend_keys.py`, the work list in
`prefill_plan.py`."""

import triton
import triton.language as tl

from lightkv.triton_kernels.attention.attend_keys import (
    attend_keys,
    find_slots,
    finish_output,
    load_query,
    sum_query,
)
from lightkv.triton_kernels.attention.records import start_sums
from lightkv.triton_kernels.attention.variants import hooks
from lightkv.triton_kernels.quantised.unpack import fields_of, kind_of

from .prefill_plan import ITEM_FIELDS


@triton.jit
def _find_keys(item, rows, first_row, num_rows, prefix, variants, shape, SHARES: tl.constexpr):
    """Returns the keys of an item: where they begin, the end of those that every row sees, and their end; and
    whether the softmax of its rows starts here.

    Keys in [begin, full_end) are visible to every row, keys in [full_end, num_keys) to some of them:

        begin ├──── not masked ────┤ full_end ├─ masked ─┤ num_keys
    """
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    first_position = prefix + first_row // shape.GROUP
    last_position = prefix + (tl.minimum(first_row + shape.BLOCK_M, num_rows) - 1) // shape.GROUP
    if shape.CAUSAL:
        num_keys = tl.maximum(last_position + 1, 0)
        seen_by_all = first_position + 1  # the keys before it, but for a window or chunk
    else:
        num_keys = tl.maximum(prefix + num_rows // shape.GROUP, 0)
        seen_by_all = num_keys
    if variants.flags.hides_own:
        seen_by_all = tl.minimum(seen_by_all, prefix)
    begin = 0
    if variants.flags.has_first_key:
        begin = hooks.first_key(variants, first_position)
        # Where the last row sees later keys alone, no key is visible to every row.
        seen_by_all = tl.where(hooks.first_key(variants, last_position) > begin, begin, seen_by_all)
    full_end = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_N * BLOCK_N
    joins = rows.in_tile
    if SHARES:
        if variants.flags.has_join:  # of a tile's parts, its first is where the softmax starts
            joins = rows.in_tile & (tl.load(item + 6) <= begin)
        begin = tl.maximum(begin, tl.load(item + 6))
        num_keys = tl.minimum(num_keys, tl.load(item + 7))
        full_end = begin + tl.maximum(tl.minimum(full_end, num_keys) - begin, 0) // BLOCK_N * BLOCK_N
    if variants.flags.is_short:
        full_end = begin
    return begin, full_end, num_keys, joins


@triton.jit
def _attend_item(
    q,
    cache,
    index,
    item,
    kv_head,
    num_kv_heads,
    outputs,
    score_scale,
    variants,
    shape,
    rows_before,
    TILE_ROWS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Computes BLOCK_M rows of a tile of TILE_ROWS, after `rows_before` of them, over the keys that the item is
    limited to."""
    GROUP: tl.constexpr = shape.GROUP
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    request, row = tl.load(item), tl.load(item + 1).to(tl.int64)
    first_row, num_rows = tl.load(item + 2) + rows_before, tl.load(item + 3)
    q_begin, prefix = tl.load(item + 4), tl.load(item + 5)
    tile_rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    queries = tile_rows // GROUP
    tokens = (q_begin + queries).to(tl.int64)
    heads = kv_head * GROUP + tile_rows % GROUP
    requests = tl.zeros_like(queries) + request
    rows = hooks.Rows(heads, tokens, requests, prefix + queries, tile_rows < num_rows, prefix)
    begin, full_end, num_keys, joins = _find_keys(
        item, rows, first_row, num_rows, prefix, variants, shape, SHARES
    )
    if TILE_ROWS > BLOCK_M:  # the request may have fewer rows than programs begin before
        num_keys = tl.where(first_row < num_rows, num_keys, begin)
        full_end = tl.minimum(full_end, num_keys)
    positions = begin + tl.arange(0, BLOCK_N)
    slots = find_slots(index, row, positions, positions < num_keys)  # [BLOCK_N]
    q_heads = q.data + tokens[:, None] * q.stride_token + heads[:, None] * q.stride_head
    q_tiles = load_query(q_heads, rows.in_tile, shape)
    q_sums = sum_query(q_tiles, shape.FORMAT, shape.PACKED)
    peak, total = hooks.start_softmax(variants, rows, joins, BLOCK_M)
    states = hooks.start_rows(variants, rows)
    full_end = hooks.whole_end(variants, states, begin, full_end, rows.in_tile, BLOCK_N)
    if variants.flags.has_load and not variants.flags.has_first_key:
        # A part begins at such a multiple: what is loaded by position is loaded in whole vectors.
        begin = begin // 16 * 16
        full_end = full_end // 16 * 16
    sums = start_sums(total, peak, slots, shape)
    sums = attend_keys(
        q_tiles, q_sums, sums, cache, kv_head, index, row, rows.positions, variants, states, begin, full_end,
        num_keys, score_scale, shape, 1 if variants.flags.is_short else 0,
    )  # fmt: skip
    part_row = rows_before + tl.arange(0, BLOCK_M)
    if SHARES:
        part_row += (tl.load(item + 8).to(tl.int64) * num_kv_heads + kv_head) * TILE_ROWS
    _store(outputs, sums, rows, item, part_row, num_kv_heads, shape, SHARES)


@triton.jit
def _store(outputs, sums, rows, item, place, num_kv_heads, shape, SHARES: tl.constexpr):
    """Writes the output of an item, or its part of the output if it has one: to the rows `place` of all
    parts."""
    in_tile = rows.in_tile
    is_part = False
    if SHARES:
        part = tl.load(item + 8)
        is_part = part >= 0
    heads_out = outputs.out + rows.tokens[:, None] * outputs.stride_token
    heads_out += rows.heads[:, None] * outputs.stride_head
    for FIELD in tl.static_range(0, fields_of(kind_of(shape.FORMAT))):
        finished, dims, out_mask = finish_output(sums, in_tile, FIELD, shape)
        if SHARES:
            partials = outputs.partial_out + place[:, None] * shape.DV + dims[None, :]
            tl.store(partials, finished, mask=out_mask & is_part)
            out_mask = out_mask & (part < 0)
        tl.store(heads_out + dims[None, :], finished.to(outputs.out.dtype.element_ty), mask=out_mask)
    lse = sums.peak + tl.log2(sums.total)
    if SHARES:
        tl.store(outputs.partial_lse + place, lse, mask=in_tile & is_part)
        in_tile = in_tile & (part < 0)
    if outputs.lse is not None:
        tl.store(outputs.lse + rows.tokens * (num_kv_heads * shape.GROUP) + rows.heads, lse, mask=in_tile)


@triton.jit(do_not_specialize_on_alignment=["items"])
def prefill_kernel(
    q,  # `Heads`
    cache,  # `Cache`
    index,  # `Index`
    items,  # [capacity, 12]
    outputs,  # `Outputs`; its parts are [parts, num_kv_heads, BLOCK_M, DV] and [parts, num_kv_heads, BLOCK_M]
    num_kv_heads,
    score_scale,
    variants,  # `Variants`
    shape,  # `Shape`
    SHARES: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of a tile, each BLOCK_M rows
):
    # Neighbouring programs read neighbouring heads of the same tokens.
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    number = tl.program_id(0) // num_kv_heads // PROGRAMS
    rows_before = tl.program_id(0) // num_kv_heads % PROGRAMS * shape.BLOCK_M
    TILE_ROWS: tl.constexpr = PROGRAMS * shape.BLOCK_M
    item = items + number * ITEM_FIELDS
    if tl.load(item) < 0:
        return
    if SHARES:
        while number >= 0:
            item = items + number * ITEM_FIELDS
            _attend_item(
                q, cache, index, item, kv_head, num_kv_heads, outputs, score_scale, variants, shape,
                rows_before, TILE_ROWS, True,
            )  # fmt: skip
            number = tl.load(item + 9)  # the next one of the share
    else:
        _attend_item(
            q, cache, index, item, kv_head, num_kv_heads, outputs, score_scale, variants, shape, rows_before,
            TILE_ROWS, False,
        )  # fmt: skip
