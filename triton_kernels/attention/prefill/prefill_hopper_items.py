"""What `prefill_hopper.py` does around its loop over key tiles: it reads the items of the work list, finds
the rows of K and V, starts and continues the softmax of a warpgroup's rows, and writes their output (Gluon)."""

from functools import cache

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lightkv.triton_kernels.attention.records import Index
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E

from . import prefill_plan

ITEM_FIELDS = gl.constexpr(prefill_plan.ITEM_FIELDS)
_LOG2_E = gl.constexpr(LOG2_E)


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
def pass_item(item, turn, shared):
    """Passes the item to the computing warpgroups, once they no longer read q of the one before. `shared`: what
    a program has in shared memory, of which this needs the item and its barrier, and that of q."""
    mbarrier.wait(shared[6], (turn & 1) ^ 1)
    shared[0].store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(shared[4])


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


@gluon.jit
def keys_of(
    tile,
    piece,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    AFTER: gl.constexpr,
    SHARES: gl.constexpr,
):
    """Returns the keys [begin, end) that the tile's queries see, and the key tiles [first, last] that hold
    them; of the keys that the item is limited to, which is a whole number of key tiles."""
    _kv_head, _row, first_row, num_rows, _q_begin, prefix = tile
    begin = 0
    if WINDOW > 0:
        begin = gl.maximum(prefix + first_row // GROUP - WINDOW + 1, 0)
    if CHUNK > 0:
        begin = gl.maximum(prefix + first_row // GROUP, 0) // CHUNK * CHUNK
    end = prefix + (gl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP + 1
    if AFTER > 0:
        end = gl.minimum(end + AFTER, prefix + num_rows // GROUP)
    if SHARES:
        begin = gl.maximum(begin, piece[0])
        end = gl.minimum(end, piece[1])
    return begin, end, begin // BLOCK_N, gl.cdiv(gl.maximum(end, 0), BLOCK_N) - 1


@cache
def _in_gluon(hook: triton.JITFunction) -> triton.JITFunction:
    return gluon.jit(hook.fn)


def in_gluon(index: Index) -> Index:
    """Returns an index whose lookup Gluon's kernels can call."""
    hooks = index.hooks
    return index._replace(hooks=hooks._replace(place=gl.constexpr(_in_gluon(hooks.place.value))))


@gluon.jit
def find_slots(index, row, key_tile, begin, end, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Returns the slots of a key tile; for a key outside [begin, end), the slot of the nearest key inside, so
    that no free slot is read."""
    positions = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout)
    positions = gl.minimum(gl.maximum(positions, begin), end - 1)
    start, entries = index.hooks.place(index, row, positions, None)
    return gl.load(start + (entries >> index.SHIFT)) + (entries & ((1 << index.SHIFT) - 1))


@gluon.jit
def find_inner_slots(index, row, key_tile, exists, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Returns the slots of a key tile of which every key is read; zeros if it does not exist."""
    positions = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout)
    mask = gl.full([BLOCK_N], exists, gl.int1, layout)
    start, entries = index.hooks.place(index, row, positions, mask)
    slots = gl.load(start + (entries >> index.SHIFT), mask=mask, other=0)
    return slots + (entries & ((1 << index.SHIFT) - 1))


@gluon.jit
def row_pointers(head, slots, stride, layout: gl.constexpr, D: gl.constexpr):
    """Returns pointers to a head's rows at `slots`: [BLOCK_N, D]. Elements have 2 bytes, and a stride is less
    than 2**30 of them.

    An offset has 64 bits, but slot and stride have 32, of which one instruction makes a pointer. Written in
    Gluon, both are extended first, and there are four.
    """
    head += gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = gl.inline_asm_elementwise(
        "mad.wide.s32 $0, $1, $2, $3;",
        "=l,r,r,l",
        [slots[:, None], 2 * stride, head.to(gl.int64)[None, :]],
        dtype=gl.int64,
        is_pure=True,
        pack=1,
    )
    pointers = pointers.to(head.dtype.scalar)
    return gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 8])


@gluon.jit
def start_softmax(
    sink_logits,
    joins,
    tile,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    layout: gl.constexpr,
):
    """Returns the peak and the sum with which the softmax of a warpgroup's rows starts; as `start_softmax` in
    `attend_keys`, with one `joins` for all rows."""
    # The peak starts at a finite number, not at -inf: weights of a row whose keys are all masked are 0, not
    # NaN.
    peak = gl.full([ROWS], -1.0e30, gl.float32, layout)
    total = gl.full([ROWS], 0.0, gl.float32, layout)
    if sink_logits is not None:
        heads = tile[0] * GROUP + (tile[2] + HALF * ROWS + gl.arange(0, ROWS, layout)) % GROUP
        sinks = gl.where(joins, gl.load(sink_logits + heads) * _LOG2_E, float("-inf"))
        peak = gl.maximum(peak, sinks)
        total = gl.exp2(sinks - peak)
    return peak, total


@gluon.jit
def load_slopes(alibi_slopes, tile, HALF: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, layout):
    """Returns the slopes of a warpgroup's rows in base 2; None without ALiBi."""
    slopes = None
    if alibi_slopes is not None:
        rows = tile[2] + HALF * ROWS + gl.arange(0, ROWS, layout)
        slopes = gl.load(alibi_slopes + tile[0] * GROUP + rows % GROUP) * _LOG2_E
    return slopes


@gluon.jit
def rows_of_tree(tree, tile, HALF: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, layout):
    """Returns pointers to the words of a tree of guesses of each of a warpgroup's rows, how many there are, and
    the request's first query; None without a tree."""
    of_tree = None
    if tree[0] is not None:
        rows = gl.minimum(tile[2] + HALF * ROWS + gl.arange(0, ROWS, layout), tile[3] - 1)
        of_tree = (tree[0] + (tile[4] + rows // GROUP).to(gl.int64) * tree[2], tree[1], tile[5])
    return of_tree


@gluon.jit
def _hide_outside_tree(s, of_tree, first_key, last):
    """Hides the keys after the column `last` of each row, and the queries' own keys whose bits are not set.

    The 32 columns of a part of the tile have their bits in two neighbouring words of a row. Shifted by a
    thread's columns, these have the thread's bits at positions that are constants to the compiler. Keys before
    the queries count as set bits.
    """
    words, num_words, own_begin = of_tree
    parts = s.reshape([s.shape[0], s.shape[1] // 32, 4, 8])
    layout: gl.constexpr = parts.type.layout
    of_eight: gl.constexpr = gl.SliceLayout(3, layout)
    of_part: gl.constexpr = gl.SliceLayout(2, of_eight)
    words = gl.convert_layout(words, gl.SliceLayout(1, of_part))[:, None]
    begin = first_key - own_begin
    word = (begin >> 5) + gl.arange(0, s.shape[1] // 32, gl.SliceLayout(0, of_part))[None, :]
    low = gl.load(words + word, mask=(word >= 0) & (word < num_words), other=gl.where(word < 0, -1, 0))
    word += 1
    high = gl.load(words + word, mask=(word >= 0) & (word < num_words), other=gl.where(word < 0, -1, 0))
    both = (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)
    bits = (both >> (begin & 31)).to(gl.int32)  # [rows, parts], bit c is that of the part's column c
    last = gl.convert_layout(last, gl.SliceLayout(1, of_part))[:, None]
    last -= 32 * gl.arange(0, s.shape[1] // 32, gl.SliceLayout(0, of_part))[None, :]
    bits &= gl.where(last >= 31, -1, gl.where(last < 0, 0, (2 << (last & 31)) - 1))
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, layout))))
    bits = bits[:, :, None][:, :, :, None] >> column[None, :][None, :, :][None, :, :, :]
    eight = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, of_eight)))[None, :][None, :, :]
    shown = (bits & (1 << (8 * eight))[:, :, :, None]) != 0
    return gl.convert_layout(gl.where(shown, parts, float("-inf")).reshape(s.shape), s.type.layout)


@gluon.jit
def _add_alibi(s, slopes):
    """Adds slope * key to the scores, with one multiply-add each, as far as it is the same for 8 neighbouring
    keys: these numbers are constants to the compiler. `_alibi_of_columns` is what is left."""
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 8])
    layout: gl.constexpr = parts.type.layout
    part = gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout))).to(gl.float32)
    slopes = gl.convert_layout(slopes, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    parts += slopes[:, None][:, :, None] * (8.0 * part)[None, :][:, :, None]
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout)


@gluon.jit
def _alibi_of_columns(parts, slopes, first_key):
    """Returns what ALiBi adds to every eighth score of a row, beside `_add_alibi`: [rows, 8]. A thread holds
    two of the columns. `parts`: the scores, [rows, columns / 8, 8]."""
    of_columns: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    column = gl.arange(0, 8, gl.SliceLayout(0, of_columns)).to(gl.float32) + first_key.to(gl.float32)
    return gl.convert_layout(slopes, gl.SliceLayout(1, of_columns))[:, None] * column[None, :]


@gluon.jit
def _after_both(peak):
    """Returns `peak` unchanged, but each of a thread's two rows' after both are known.

    Otherwise ptxas computes the second row's peak after the first row's exponentials, and these wait for each
    other. The smaller of a number and the least finite one is never larger than a peak.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a, b;
        min.f32 a, $2, 0fFF7FFFFF;
        min.f32 b, $3, 0fFF7FFFFF;
        max.f32 $0, $2, b;
        max.f32 $1, $3, a;
        }""",
        "=&f,=&f,f,f",
        [peak],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def online_softmax(
    s,
    peak,
    first_key,
    positions,
    last_keys,
    slopes,
    origin,
    of_tree,
    scales,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BOTH_ROWS_FIRST: gl.constexpr,
    MASKED: gl.constexpr,
    EXTRA_BITS: gl.constexpr,
):
    """Returns the weights of a tile's scores, the factor by which earlier sums decay, and the new peak; as in
    `attend_keys`. With slopes, in units of the scores, the bias of ALiBi is counted from the key `origin`.
    BOTH_ROWS_FIRST: as `_after_both` says, which pays for head dims over 64. EXTRA_BITS: the peak is kept so
    much lower, and so weights and sums are 2**EXTRA_BITS times as large."""
    layout: gl.constexpr = s.type.layout
    BLOCK_N: gl.constexpr = s.shape[1]
    score_scale, cap_scale = scales
    if SOFTCAP:
        s = 2.0 / (1.0 + gl.exp(-s * cap_scale)) - 1.0  # tanh
    if slopes is not None:
        s = _add_alibi(s, slopes)
    if MASKED:
        columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        last = last_keys - first_key  # the last column that a row sees
        if of_tree is not None:
            s = _hide_outside_tree(s, of_tree, first_key, last)
        else:
            s = gl.where(columns[None, :] <= last[:, None], s, float("-inf"))
        if WINDOW > 0:
            s = gl.where(columns[None, :] > (positions - first_key - WINDOW)[:, None], s, float("-inf"))
        if CHUNK > 0:
            begin = positions // CHUNK * CHUNK - first_key
            s = gl.where(columns[None, :] >= begin[:, None], s, float("-inf"))
    if slopes is not None:
        parts = s.reshape([s.shape[0], BLOCK_N // 8, 8])
        bias = _alibi_of_columns(parts, slopes, first_key - origin)  # [rows, 8]
        most = gl.convert_layout(gl.max(gl.max(parts, 1) + bias, 1), gl.SliceLayout(1, layout))
    else:
        most = gl.convert_layout(gl.max(_thread_max(s), 1), gl.SliceLayout(1, layout))
    most *= score_scale
    if EXTRA_BITS:
        most -= EXTRA_BITS
    new_peak = gl.maximum(peak, most)
    if BOTH_ROWS_FIRST:
        new_peak = _after_both(new_peak)
    if slopes is not None:
        of_row: gl.constexpr = gl.SliceLayout(1, bias.type.layout)
        base = gl.convert_layout(new_peak, of_row)[:, None] - bias * score_scale
        weights = gl.exp2(parts * score_scale - base[:, None, :])
        weights = gl.convert_layout(weights.reshape(s.shape), layout)
    else:
        weights = gl.exp2(s * score_scale - new_peak[:, None])
    return weights, gl.exp2(peak - new_peak), new_peak


# A row of a wgmma's accumulator is held by four threads, each with 2 neighbouring columns of every 8. Reducing
# within threads first takes no shuffle, and in several chains instead of one it takes less time.


@gluon.jit
def _thread_max(s):
    """Returns the maxima of the columns that one thread holds: [rows, 4]."""
    parts = s.reshape([s.shape[0], s.shape[1] // 32, 4, 4, 2])
    return gl.max(gl.max(gl.max(parts, 4), 2), 1)


@gluon.jit
def thread_sums(weights):
    """Returns the sums of the columns that one thread holds: [rows, 4]."""
    parts = weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def pack_pairs(weights, dtype: gl.constexpr):
    """Rounds weights to 16 bits, two neighbouring columns in an int32: [rows, columns / 2].

    A loop that carries 16-bit values would have the compiler take every pair apart and put it together again.
    """
    low, high = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    PAIR: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + PAIR + ".f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack_pairs(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """Returns what `pack_pairs` has packed, [rows, columns] of `dtype`, in the layout of an operand."""
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    both = gl.join(low, high).reshape([pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(both, layout)


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
def write_part(acc, peak, total, partials, part, num_kv_heads, tile, HALF: gl.constexpr):
    """Normalises a warpgroup's rows, in pieces, and writes those that belong to the request to a partial
    output."""
    ROWS: gl.constexpr = acc[0].shape[0]
    D: gl.constexpr = total_width(acc)
    acc_row: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    partial_out, partial_lse = partials
    kv_head, _row, first_row, num_rows, _q_begin, _prefix = tile
    values = _normalise(acc, total)
    rows = HALF * ROWS + gl.arange(0, ROWS, acc_row)
    place = (part * num_kv_heads + kv_head) * (2 * ROWS) + rows
    in_tile = first_row + rows < num_rows
    for i in gl.static_range(len(acc)):
        _write_part_piece(values[i], partial_out, place * D, in_tile)
        partial_out += acc[i].shape[1]
    total = gl.convert_layout(total, acc_row)
    gl.store(partial_lse + place, gl.convert_layout(peak, acc_row) + gl.log2(total), mask=in_tile)


@gluon.jit
def _write_part_piece(values, partial_out, place, in_tile):
    layout: gl.constexpr = values.type.layout
    place = gl.convert_layout(place, gl.SliceLayout(1, layout))[:, None]
    in_tile = gl.convert_layout(in_tile, gl.SliceLayout(1, layout))[:, None]
    dims = gl.arange(0, values.shape[1], gl.SliceLayout(0, layout))
    gl.store(partial_out + place + dims[None, :], values, mask=in_tile)


@gluon.jit
def write_tile(
    acc, peak, total, out, lse, num_heads, out_strides, tile, HALF: gl.constexpr, GROUP: gl.constexpr
):
    """Normalises a warpgroup's rows, in pieces, and writes those that belong to the request."""
    ROWS: gl.constexpr = acc[0].shape[0]
    acc_row: gl.constexpr = gl.SliceLayout(1, acc[0].type.layout)
    kv_head, _row, first_row, num_rows, q_begin, _prefix = tile
    values = _normalise(acc, total)
    for i in gl.static_range(len(acc)):
        _write_piece(values[i], out, out_strides, tile, HALF, GROUP)
        out += acc[i].shape[1]
    if lse is not None:
        rows = first_row + HALF * ROWS + gl.arange(0, ROWS, acc_row)
        tokens = (q_begin + rows // GROUP).to(gl.int64)
        heads = kv_head * GROUP + rows % GROUP
        values = gl.convert_layout(peak, acc_row) + gl.log2(gl.convert_layout(total, acc_row))
        gl.store(lse + tokens * num_heads + heads, values, mask=rows < num_rows)


@gluon.jit
def _write_piece(values, out, out_strides, tile, HALF: gl.constexpr, GROUP: gl.constexpr):
    ROWS: gl.constexpr = values.shape[0]
    D: gl.constexpr = values.shape[1]
    # Each swap is a shuffle. Both at once would go through shared memory, which is full.
    swapped: gl.constexpr = _row_pieces(ROWS, D, 1)
    layout: gl.constexpr = _row_pieces(ROWS, D, 2 if D > 16 else 1)
    kv_head, _row, first_row, num_rows, q_begin, _prefix = tile
    values = gl.convert_layout(gl.convert_layout(values.to(out.dtype.element_ty), swapped), layout)
    rows = first_row + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    tokens = (q_begin + rows // GROUP).to(gl.int64)
    heads = kv_head * GROUP + rows % GROUP
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = out + (tokens * out_strides[0] + heads * out_strides[1])[:, None] + dims[None, :]
    gl.store(pointers, values, mask=(rows < num_rows)[:, None])
