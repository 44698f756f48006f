"""Says which keys the queries of a tile see, and computes the running softmax of a warpgroup's rows, in the
kernels for compute capability 9 (Gluon). What a call has beside plain attention is applied here."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightkv.triton_kernels.attention.variants.hooks import LOG2_E

from .hopper_values import add_values, scale_at
from .prefill_hopper_items import ROWS
from .prefill_hopper_tiles import copy_layout, pair_up, product_layout, tile_layout, unpack_pairs

COLUMN_DIMS = gl.constexpr(16)  # of the piece with which ALiBi is added, as many as a product has at once
_LOG2_E = gl.constexpr(LOG2_E)


class SoftmaxRows(NamedTuple):
    """What the softmax needs of the rows of a warpgroup: a number for each row, `[ROWS]`, but for `origin`,
    `pairs` and `tree`.

    `positions`: of the queries. `last_keys`: the last key that each query sees.

    With ALiBi, the loop counts a key's distance from `origin`, the tile's last key, and not from the query. The
    keys that matter are near it, so their distances are small numbers, and exact after millions of tokens.
    `slopes`: in units of the scores. `bias`: what the scores in the loop lack for it; `end_peak` adds it.
    `pairs`: a tuple with the result of `slope_pairs`, or an empty one.

    `tree`: of a tree of guesses, pointers to the words of each row, the number of words, and the request's
    first query."""

    positions: Any
    last_keys: Any
    origin: Any
    slopes: Any
    bias: Any
    pairs: Any
    tree: Any


@gluon.jit
def keys_of(tile, piece, features, shape, SHARES: gl.constexpr):
    """Returns the keys [begin, end) that the tile's queries see, and the key tiles [first, last] that hold
    them; of the keys that the item is limited to, which is a whole number of key tiles."""
    _kv_head, _row, first_row, num_rows, _q_begin, prefix = tile
    begin = 0
    if features.WINDOW > 0:
        begin = gl.maximum(prefix + first_row // shape.GROUP - features.WINDOW + 1, 0)
    if features.CHUNK > 0:
        begin = gl.maximum(prefix + first_row // shape.GROUP, 0) // features.CHUNK * features.CHUNK
    end = prefix + (gl.minimum(first_row + shape.BLOCK_M, num_rows) - 1) // shape.GROUP + 1
    if features.AFTER > 0:
        end = gl.minimum(end + features.AFTER, prefix + num_rows // shape.GROUP)
    if features.added is not None:
        end = gl.minimum(end, features.width)
    if SHARES:
        begin = gl.maximum(begin, piece[0])
        end = gl.minimum(end, piece[1])
    if features.added is not None:
        end = gl.where(begin < end, end, 0)
    return begin, end, begin // shape.BLOCK_N, gl.cdiv(gl.maximum(end, 0), shape.BLOCK_N) - 1


@gluon.jit
def end_of_whole(tile, keys, features, shape, MEMBER: gl.constexpr, SHARES: gl.constexpr):
    """Returns where the key tiles end that all rows of a warpgroup see as a whole: those after it need masks,
    and those before it, from the first one on, need none. `keys`: of `keys_of`."""
    _begin, _end, first, last = keys
    first_row, prefix = tile[2] + MEMBER * ROWS, tile[5]
    whole = first
    if features.WINDOW == 0:  # a window is short: all of its tiles are masked
        seen_by_all = prefix + first_row // shape.GROUP + 1 + features.AFTER
        if features.tree is not None:
            seen_by_all = gl.minimum(seen_by_all, prefix)
        whole = gl.minimum(gl.maximum(seen_by_all, 0) // shape.BLOCK_N, last)
    if SHARES:
        whole = gl.maximum(whole, first)
    if features.CHUNK > 0:
        # Unless the last row's chunk begins where the key tiles do, all of them are masked. Such tiles of two
        # chunks are few, if a chunk is much longer than the tile's queries.
        last_position = prefix + (gl.minimum(first_row + ROWS, tile[3]) - 1) // shape.GROUP
        begin = gl.maximum(last_position, 0) // features.CHUNK * features.CHUNK
        whole = gl.where(begin <= first * shape.BLOCK_N, whole, first)
    return whole


@gluon.jit
def joins_sinks(tile, piece, features, shape, SHARES: gl.constexpr):
    """Returns whether the sinks of a softmax join an item: of a tile's parts, they join the first."""
    joins = True
    if SHARES and features.sink_logits is not None:
        joins = piece[0] <= keys_of(tile, piece, features, shape, False)[0]
    return joins


@gluon.jit
def start_softmax(tile, joins, features, shape, MEMBER: gl.constexpr, layout: gl.constexpr):
    """Returns the peak and the sum with which the softmax of a warpgroup's rows starts; as `start_softmax` of
    the variants' hooks, with one `joins` for all rows."""
    # The peak starts at a finite number, not at -inf: weights of a row whose keys are all masked are 0, not
    # NaN.
    peak = gl.full([ROWS], -1.0e30, gl.float32, layout)
    total = gl.full([ROWS], 0.0, gl.float32, layout)
    if features.sink_logits is not None:
        heads = tile[0] * shape.GROUP + (tile[2] + MEMBER * ROWS + gl.arange(0, ROWS, layout)) % shape.GROUP
        sinks = gl.where(joins, gl.load(features.sink_logits + heads) * _LOG2_E, float("-inf"))
        peak = gl.maximum(peak, sinks)
        total = gl.exp2(sinks - peak)
    return peak, total


@gluon.jit
def scales_in(scales, unit, features):
    """Returns the `scales` of `online_softmax` for scores that have to be multiplied with `unit`."""
    score_scale, cap_scale = scales
    if features.SOFTCAP:
        cap_scale *= unit
    else:
        score_scale *= unit
    return score_scale, cap_scale


@gluon.jit
def start_rows(tile, end, peak, score_scale, features, shape, MEMBER: gl.constexpr, layout: gl.constexpr):
    """Returns the `SoftmaxRows` of a warpgroup, whose keys end at `end`, and the peak as the loop counts it."""
    rows = tile[2] + MEMBER * ROWS + gl.arange(0, ROWS, layout)
    positions = tile[5] + rows // shape.GROUP
    last_keys = positions
    if features.AFTER > 0:
        last_keys = gl.minimum(positions + features.AFTER, end - 1)
    elif features.added is not None:
        last_keys = gl.minimum(positions, end - 1)
    origin = end - 1
    slopes, bias = peak, peak  # without ALiBi, they are not used
    pairs = ()  # type: tuple
    if features.slopes is not None:
        slopes = gl.load(features.slopes + tile[0] * shape.GROUP + rows % shape.GROUP) * _LOG2_E
        bias = slopes * (origin - positions).to(gl.float32)
        peak -= bias
        slopes = slopes / score_scale
        if features.ADDS_COLUMNS:
            pairs = (slope_pairs(slopes),)
    tree = (positions, 0, 0)  # without a tree of guesses, it is not used
    if features.tree is not None:
        row = gl.minimum(rows, tile[3] - 1) // shape.GROUP
        words, num_words, stride = features.tree
        tree = (words + (tile[4] + row).to(gl.int64) * stride, num_words, tile[5])
    return SoftmaxRows(positions, last_keys, origin, slopes, bias, pairs, tree), peak


@gluon.jit
def end_peak(peak, rows, score_scale, features):
    """Returns the peak of the loop as a peak of the scores, in base 2."""
    if features.added is not None:
        peak *= score_scale / scale_at(peak, features, score_scale)
    if features.slopes is not None:
        peak += rows.bias
    return peak


@gluon.jit
def _hide_outside_tree(s, tree, first_key, last):
    """Hides the keys after the column `last` of each row, and the queries' own keys whose bits are not set.

    The 32 columns of a part of the tile have their bits in two neighbouring words of a row. Shifted by a
    thread's columns, these have the thread's bits at positions that are constants to the compiler. Keys before
    the queries count as set bits.
    """
    words, num_words, own_begin = tree
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


# The tensor cores add ALiBi's slope * column to the products of q and K: q has three more dims, whose sum is
# the slope, and K has the number of the column in each of them. Both are bf16, in which these numbers are
# exact, whatever q and K are. What is the same for a row in a tile goes into the peak.


@gluon.jit
def slope_pairs(slopes):
    """Returns slopes `[ROWS]` as a piece of q of 16 dims, two of them in an int32: `[ROWS, 8]`."""
    layout: gl.constexpr = product_layout(COLUMN_DIMS)
    slopes = gl.convert_layout(slopes, gl.SliceLayout(1, layout))
    high = slopes.to(gl.bfloat16).to(gl.float32)
    low = (slopes - high).to(gl.bfloat16).to(gl.float32)
    dims = gl.arange(0, COLUMN_DIMS, gl.SliceLayout(0, layout))[None, :]
    others = gl.where(dims == 2, (slopes - high - low)[:, None], 0.0)
    return pair_up(gl.where(dims == 0, high[:, None], gl.where(dims == 1, low[:, None], others)), gl.bfloat16)


@gluon.jit
def slope_piece(rows, s_layout: gl.constexpr):
    """Returns a tuple with the piece of q that `slope_pairs` has made, as an operand of the product, or an
    empty one."""
    piece = ()  # type: tuple
    for i in gl.static_range(len(rows.pairs)):
        piece += (unpack_pairs(rows.pairs[i], gl.bfloat16, gl.DotOperandLayout(0, s_layout, 2)),)
    return piece


@gluon.jit
def column_tiles(features, shape):
    """Returns a tuple with the piece of K that belongs to `slope_piece`, in shared memory, `[BLOCK_N, 16]`, or
    an empty one. The asynchronous proxy has yet to see it."""
    tiles = ()  # type: tuple
    if features.ADDS_COLUMNS:
        layout: gl.constexpr = copy_layout(COLUMN_DIMS)
        columns = gl.arange(0, shape.BLOCK_N, gl.SliceLayout(1, layout)).to(gl.float32)[:, None]
        dims = gl.arange(0, COLUMN_DIMS, gl.SliceLayout(0, layout))[None, :]
        tile = gl.allocate_shared_memory(
            gl.bfloat16, [shape.BLOCK_N, COLUMN_DIMS], tile_layout(COLUMN_DIMS, 0)
        )
        tile.store(gl.where(dims < 3, columns, 0.0).to(gl.bfloat16))
        tiles += (tile,)
    return tiles


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
    """Returns what ALiBi adds to every eighth score of a row, beside `_add_alibi`: [rows, 4, 2]. A thread holds
    two of the columns. `parts`: the scores, [rows, columns / 8, 4, 2]."""
    of_columns: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    of_pairs: gl.constexpr = gl.SliceLayout(2, of_columns)
    pair = 2.0 * gl.arange(0, 4, gl.SliceLayout(0, of_pairs)).to(gl.float32) + first_key.to(gl.float32)
    which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, of_columns))).to(gl.float32)
    column = pair[None, :][:, :, None] + which[None, :][:, None, :]
    return gl.convert_layout(slopes, gl.SliceLayout(1, of_pairs))[:, None][:, :, None] * column


@gluon.constexpr_function
def _raise_peaks_asm(slack):
    """Returns what `_raise_peaks` does with a thread's two rows. $0, $1: their new peaks; $2, $3: the factors;
    $4, $5: the thread's maxima; $6, $7: the peaks before. The difference is compared, which is exact for near
    numbers: a sum of a large peak and the slack may be rounded to a number that a score does not exceed."""
    return f"""{{
        .reg .pred higher, any;
        .reg .f32 above, other, most;
        sub.f32 above, $4, $6;
        setp.gt.f32 higher, above, {int(slack)}.0;
        sub.f32 above, $5, $7;
        setp.gt.or.f32 higher, above, {int(slack)}.0, higher;
        vote.sync.any.pred any, higher, 0xffffffff;
        mov.f32 $0, $6;
        mov.f32 $1, $7;
        mov.f32 $2, 0f3F800000;
        mov.f32 $3, 0f3F800000;
        @!any bra.uni KEPT${{:uid}};
        shfl.sync.bfly.b32 other, $4, 1, 31, 0xffffffff;
        max.f32 most, $4, other;
        shfl.sync.bfly.b32 other, most, 2, 31, 0xffffffff;
        max.f32 most, most, other;
        max.f32 $0, $6, most;
        shfl.sync.bfly.b32 other, $5, 1, 31, 0xffffffff;
        max.f32 most, $5, other;
        shfl.sync.bfly.b32 other, most, 2, 31, 0xffffffff;
        max.f32 most, most, other;
        max.f32 $1, $7, most;
        sub.f32 most, $6, $0;
        ex2.approx.ftz.f32 $2, most;
        sub.f32 most, $7, $1;
        ex2.approx.ftz.f32 $3, most;
        KEPT${{:uid}}:
        }}"""


@gluon.jit
def _raise_peaks(most, peak, SLACK_BITS: gl.constexpr):
    """Returns the peaks of rows, and the factor by which what was summed up before decays, each `[rows, 4]`.

    `most`: the maxima of each thread's columns. A warp keeps the peaks of its rows while no score is more than
    SLACK_BITS above the peak of its row: then all factors are 1, and its threads need not tell each other their
    maxima. Weights may be as large as 2**SLACK_BITS; the result is the same, since the sum has them too.
    """
    ASM: gl.constexpr = _raise_peaks_asm(SLACK_BITS)
    return gl.inline_asm_elementwise(
        ASM, "=&f,=&f,=&f,=&f,f,f,f,f", [most, peak], dtype=(gl.float32, gl.float32), is_pure=True, pack=2
    )


@gluon.jit
def online_softmax(
    s,
    peak,
    first_key,
    rows,
    values,
    scales,
    features,
    MASKED: gl.constexpr,
    SLACK_BITS: gl.constexpr,
    EXTRA_BITS: gl.constexpr,
):
    """Returns the weights of a tile's scores, the factor by which earlier sums decay, and the new peak; as in
    `attend_keys`, but `[rows, 4]`: each of the four threads of a row has them. `rows`: `SoftmaxRows`. `values`:
    of `take_values`. `scales`: of the scores in base 2, and of those that are capped. SLACK_BITS: as
    `_raise_peaks` says. EXTRA_BITS: the peak is kept so much lower, and so weights and sums are 2**EXTRA_BITS
    times as large."""
    layout: gl.constexpr = s.type.layout
    BLOCK_N: gl.constexpr = s.shape[1]
    score_scale, cap_scale = scales
    if features.SOFTCAP:
        s = 2.0 / (1.0 + gl.exp(-s * cap_scale)) - 1.0  # tanh
    if features.slopes is not None and not features.ADDS_COLUMNS:
        s = _add_alibi(s, rows.slopes)
    s = add_values(s, values, score_scale)
    if MASKED:
        columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        last = rows.last_keys - first_key  # the last column that a row sees
        if features.tree is not None:
            s = _hide_outside_tree(s, rows.tree, first_key, last)
        else:
            s = gl.where(columns[None, :] <= last[:, None], s, float("-inf"))
        if features.WINDOW > 0:
            begin = rows.positions - first_key - features.WINDOW
            s = gl.where(columns[None, :] > begin[:, None], s, float("-inf"))
        if features.CHUNK > 0:
            begin = rows.positions // features.CHUNK * features.CHUNK - first_key
            s = gl.where(columns[None, :] >= begin[:, None], s, float("-inf"))
    parts = s.reshape([s.shape[0], BLOCK_N // 8, 4, 2])
    halves = s.reshape([s.shape[0], 2, BLOCK_N // 16, 4, 2])  # for four chains of a row in a thread
    most = gl.convert_layout(gl.max(gl.max(halves, 2), 1), gl.SliceLayout(1, parts.type.layout))
    of_columns: gl.constexpr = features.slopes is not None and not features.ADDS_COLUMNS
    if of_columns:
        bias = _alibi_of_columns(parts, rows.slopes, first_key - rows.origin)
        most += bias
    most = gl.max(most, 2)
    if features.ADDS_COLUMNS:
        row_bias = in_threads(rows.slopes * (first_key - rows.origin).to(gl.float32), s)
        most += row_bias
    most *= scale_at(most * score_scale, features, score_scale)
    if EXTRA_BITS:
        most -= EXTRA_BITS
    peak, decay = _raise_peaks(most, peak, SLACK_BITS)
    if of_columns:
        base = peak[:, :, None] - bias * score_scale
        weights = gl.exp2(parts * score_scale - base[:, None, :, :])
    elif features.ADDS_COLUMNS:
        base = peak - row_bias * score_scale
        weights = gl.exp2(parts * score_scale - base[:, :, None][:, None, :, :])
    elif features.added is not None:
        scale = scale_at(peak, features, score_scale)
        weights = gl.exp2(parts * scale[:, :, None][:, None, :, :] - peak[:, :, None][:, None, :, :])
    else:
        weights = gl.exp2(parts * score_scale - peak[:, :, None][:, None, :, :])
    return gl.convert_layout(weights.reshape(s.shape), layout), decay, peak


# A row of a wgmma's accumulator is held by four threads, each with 2 neighbouring columns of every 8. What is
# reduced is reduced within threads first, which takes no shuffle, in several chains, since one takes longer.


@gluon.jit
def in_threads(of_rows, s):
    """Returns values of rows, `[rows]`, in each of the four threads of a row of the scores `s`: `[rows, 4]`."""
    layout: gl.constexpr = thread_sums(s).type.layout
    values = gl.convert_layout(of_rows, gl.SliceLayout(1, layout))[:, None]
    return gl.zeros([s.shape[0], 4], of_rows.dtype, layout) + values


@gluon.jit
def thread_sums(weights):
    """Returns the sums of the columns that one thread holds: [rows, 4]."""
    parts = weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 1), 2)
