"""How the programs of `prefill_hopper_skeleton.py` read the items of the work list, and write the output of a
warpgroup's rows (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightkv.triton_kernels.attention.prefill import prefill_plan

ITEM_FIELDS = gl.constexpr(prefill_plan.ITEM_FIELDS.value)
ROWS = gl.constexpr(64)  # of a tile, for each computing warpgroup: those of one wgmma


@gluon.jit
def item_at(place, order):
    """Returns the item at a place of the order in which programs take them; -1 after the last.

    `order`: the entries of the list that programs begin at, the K/V heads of a section, and all K/V heads. An
    item is an entry for one head, `entry * num_kv_heads + head`. Of a section's heads, the first entries come
    first.
    """
    num_entries, section_heads, num_kv_heads = order
    section = place // gl.maximum(num_entries * section_heads, 1)
    first_head = section * section_heads
    heads = gl.maximum(gl.minimum(section_heads, num_kv_heads - first_head), 1)
    within = place - first_head * num_entries
    item = within // heads * num_kv_heads + first_head + within % heads
    return gl.where(place < num_entries * num_kv_heads, item, -1)


@gluon.jit
def tile_of(items, item, num_kv_heads):
    """Returns an item's kv_head, row of the index, first row, rows of the request, first query, keys before
    it."""
    tile = items + item // num_kv_heads * ITEM_FIELDS
    kv_head, row = (item % num_kv_heads).to(gl.int64), gl.load(tile + 1).to(gl.int64)
    return kv_head, row, gl.load(tile + 2), gl.load(tile + 3), gl.load(tile + 4), gl.load(tile + 5)


@gluon.jit
def piece_of(items, item, num_kv_heads, SHARES: gl.constexpr):
    """Returns what an item is limited to if keys are shared out (first key, end of the keys), its part, and the
    next item of its share; otherwise four zeros."""
    if SHARES:
        piece = items + item // num_kv_heads * ITEM_FIELDS
        following = gl.load(piece + 9)
        next_item = gl.where(following < 0, -1, following * num_kv_heads + item % num_kv_heads)
        found = gl.load(piece + 6), gl.load(piece + 7), gl.load(piece + 8), next_item
    else:
        found = 0, 0, 0, 0
    return found


@gluon.constexpr_function
def _row_pieces(num_rows, head_dim, num_swaps):
    """Returns the layout of a wgmma's accumulator after `num_swaps` swaps of columns among the four threads of
    a row. A thread has 2 neighbouring columns at first, 4 after one swap, 8 after two."""
    columns = [[0, 1 << bit] for bit in range(int(head_dim).bit_length() - 1)]
    lanes, registers = columns[1:3], [columns[0], *columns[3:]]
    for swap in range(num_swaps):
        lanes[swap], registers[1 + swap] = registers[1 + swap], lanes[swap]
    lanes += [[1, 0], [2, 0], [4, 0]]
    registers.append([8, 0])
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [num_rows, head_dim])


@gluon.constexpr_function
def total_width(pieces):
    """Returns the head dim of a tile in pieces, or of several such tiles."""
    return sum(int(piece.shape[-1]) for piece in pieces)


@gluon.jit
def _normalise(acc, total):
    """Divides the rows of each piece by their totals."""
    found = ()  # type: tuple
    for i in gl.static_range(len(acc)):
        sums = gl.convert_layout(total, gl.SliceLayout(1, acc[i].type.layout))
        found += (acc[i] * (1.0 / gl.where(sums > 0.0, sums, 1.0))[:, None],)
    return found


@gluon.jit
def write_partial(
    acc, peak, total, outputs, part, num_kv_heads, tile, MEMBER: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Normalises a warpgroup's rows, in pieces, and writes those that belong to the request to a partial
    output."""
    D: gl.constexpr = total_width(acc)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    partial_out, partial_lse = outputs.partial_out, outputs.partial_lse
    kv_head, _row, first_row, num_rows, _q_begin, _prefix = tile
    values = _normalise(acc, total)
    rows = MEMBER * ROWS + gl.arange(0, ROWS, acc_row)
    place = (part * num_kv_heads + kv_head) * BLOCK_M + rows
    in_tile = first_row + rows < num_rows
    for i in gl.static_range(len(acc)):
        _write_partial_piece(values[i], partial_out, place * D, in_tile)
        partial_out += acc[i].shape[1]
    total = gl.convert_layout(total, acc_row)
    gl.store(partial_lse + place, gl.convert_layout(peak, acc_row) + gl.log2(total), mask=in_tile)


@gluon.jit
def _write_partial_piece(values, partial_out, place, in_tile):
    layout: gl.constexpr = values.type.layout
    place = gl.convert_layout(place, gl.SliceLayout(1, layout))[:, None]
    in_tile = gl.convert_layout(in_tile, gl.SliceLayout(1, layout))[:, None]
    dims = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    gl.store(partial_out + place + dims[None, :], values, mask=in_tile)


@gluon.jit
def write_tile(acc, peak, total, outputs, num_heads, tile, MEMBER: gl.constexpr, GROUP: gl.constexpr):
    """Normalises a warpgroup's rows, in pieces, and writes those that belong to the request."""
    acc_row: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    kv_head, _row, first_row, num_rows, q_begin, _prefix = tile
    values = _normalise(acc, total)
    out = outputs.out
    for i in gl.static_range(len(acc)):
        _write_piece(values[i], out, outputs, tile, MEMBER, GROUP)
        out += acc[i].shape[1]
    if outputs.lse is not None:
        rows = first_row + MEMBER * ROWS + gl.arange(0, ROWS, acc_row)
        tokens = (q_begin + rows // GROUP).to(gl.int64)
        heads = kv_head * GROUP + rows % GROUP
        values = gl.convert_layout(peak, acc_row) + gl.log2(gl.convert_layout(total, acc_row))
        gl.store(outputs.lse + tokens * num_heads + heads, values, mask=rows < num_rows)


@gluon.jit
def _write_piece(values, out, outputs, tile, MEMBER: gl.constexpr, GROUP: gl.constexpr):
    D: gl.constexpr = values.shape[1]
    # Each swap is a shuffle. Both at once would go through shared memory, which is full.
    swapped: gl.constexpr = _row_pieces(ROWS, D, 1)
    layout: gl.constexpr = _row_pieces(ROWS, D, 2 if D > 16 else 1)
    kv_head, _row, first_row, num_rows, q_begin, _prefix = tile
    values = gl.convert_layout(gl.convert_layout(values.to(out.dtype.element_ty), swapped), layout)
    rows = first_row + MEMBER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    tokens = (q_begin + rows // GROUP).to(gl.int64)
    heads = kv_head * GROUP + rows % GROUP
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    places = tokens * outputs.stride_token + heads * outputs.stride_head
    pointers = out + places[:, None] + dims[None, :]
    gl.store(pointers, values, mask=(rows < num_rows)[:, None])
