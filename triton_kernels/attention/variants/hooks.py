"""The hooks of a variant that kernels call, and how those of several variants compose.

A hook is a small jit function. It gets the `data` of its variant and the `state` that its `start` returned for
the tile of queries, both tuples. The hooks of all variants of a call are applied one after the other:

    start    once a tile of queries      what it needs of each row
    join     once a row                  the peak and the sum with which the row's softmax starts
    load     a tile of keys ahead        what it needs of the tile
    score    each tile of keys           new scores, in units of the dot product
    offset   each tile of keys           what it adds to all scores of a row, in base 2
    sees     each tile that is masked    which keys the rows see
    whole    once a tile of queries      where the key tiles end that need no mask

Those that a variant does not set change nothing, and leave no instruction.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)


class Rows(NamedTuple):
    """What a tile of queries is, each `[BLOCK_M]` except `own_begin`.

    `heads`, `tokens`: of q. `requests`: of the batch. `positions`: of the queries. `in_tile`: which rows there
    are. `own_begin`: the position of the request's first query.
    """

    heads: Any
    tokens: Any
    requests: Any
    positions: Any
    in_tile: Any
    own_begin: Any


@triton.jit
def _start(data, rows):
    return ()


@triton.jit
def _join(data, rows, joins, peak, total):
    return peak, total


@triton.jit
def _load(data, state, positions, exists, MASKED: tl.constexpr):
    return ()


@triton.jit
def _score(data, state, loaded, scores, score_scale):
    return scores


@triton.jit
def _offset(data, state, offset, start, query_positions):
    return offset


@triton.jit
def _sees(data, state, visible, query_positions, positions):
    return visible


@triton.jit
def _first_key(data, first, positions):
    return first


@triton.jit
def _whole(data, state, begin, end, in_tile, BLOCK_N: tl.constexpr):
    return end


class Hooks(NamedTuple):
    """The hooks of a variant. `first_key`: the first key that queries at some positions see, where the variant
    limits it; plans call it, too."""

    start: Any = tl.constexpr(_start)
    join: Any = tl.constexpr(_join)
    load: Any = tl.constexpr(_load)
    score: Any = tl.constexpr(_score)
    offset: Any = tl.constexpr(_offset)
    sees: Any = tl.constexpr(_sees)
    first_key: Any = tl.constexpr(_first_key)
    whole: Any = tl.constexpr(_whole)


class Flags(NamedTuple):
    """What kernels have to know of the variants of a call, as constants.

    `has_first_key`: one limits the first key that a query sees. `is_short`: one so much that no key tile is
    seen as a whole by a tile of queries. `has_offset`, `has_load`, `has_join`: one sets these hooks.
    `may_exceed`: scores may be so low that rounding takes them above the peak. `reads_positions`: a hook reads
    the queries' positions also where a request has one query. `hides_own`: one hides some keys from `own_begin`
    on.
    """

    has_first_key: Any = False
    is_short: Any = False
    has_offset: Any = False
    has_load: Any = False
    has_join: Any = False
    may_exceed: Any = False
    reads_positions: Any = False
    hides_own: Any = False


class Bound(NamedTuple):
    """A variant as a kernel gets it."""

    hooks: Hooks
    data: Any


class Variants(NamedTuple):
    """The variants of a call as a kernel gets them: a tuple of `Bound`, their number and what they need."""

    of: tuple[Bound, ...]
    num: Any
    flags: Flags


@triton.jit
def start_rows(variants, rows):
    """Returns the states of all variants for a tile of queries."""
    states = ()  # type: tuple
    for i in tl.static_range(variants.num):
        states += (variants.of[i].hooks.start(variants.of[i].data, rows),)
    return states


@triton.jit
def start_softmax(variants, rows, joins, BLOCK_M: tl.constexpr):
    """Returns the peak and the sum, each [BLOCK_M], with which the running softmax of a tile's rows starts.

    `joins`: the rows whose softmax starts here. A row whose keys are cut into parts starts it in one of them.
    """
    # The peak starts at a finite number and not at -inf, so that a row whose keys are all masked has weights of
    # 0 instead of NaN.
    peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for i in tl.static_range(variants.num):
        peak, total = variants.of[i].hooks.join(variants.of[i].data, rows, joins, peak, total)
    return peak, total


@triton.jit
def load_ahead(variants, states, positions, exists, MASKED: tl.constexpr):
    """Returns what the variants load of the tile of keys at `positions`, if the tile exists. Unless MASKED, the
    variants' `whole` has shown that they have all of it."""
    loaded = ()  # type: tuple
    for i in tl.static_range(variants.num):
        loaded += (variants.of[i].hooks.load(variants.of[i].data, states[i], positions, exists, MASKED),)
    return loaded


@triton.jit
def change_scores(variants, states, loaded, scores, score_scale):
    """Returns the scores [BLOCK_M, BLOCK_N], in units of the dot product, changed by all variants."""
    for i in tl.static_range(variants.num):
        scores = variants.of[i].hooks.score(variants.of[i].data, states[i], loaded[i], scores, score_scale)
    return scores


@triton.jit
def offset_of(variants, states, start, query_positions):
    """Returns what the variants add to all scores of a row, in base 2, in the tile of keys at `start`."""
    offset = tl.zeros_like(query_positions).to(tl.float32)
    for i in tl.static_range(variants.num):
        offset = variants.of[i].hooks.offset(variants.of[i].data, states[i], offset, start, query_positions)
    return offset


@triton.jit
def hide(variants, states, visible, query_positions, positions):
    """Returns which of the keys that are visible so far [BLOCK_M, BLOCK_N] all variants let the queries see."""
    for i in tl.static_range(variants.num):
        visible = variants.of[i].hooks.sees(
            variants.of[i].data, states[i], visible, query_positions, positions
        )
    return visible


@triton.jit
def first_key(variants, positions):
    """Returns the first key that queries at `positions` see."""
    first = positions * 0  # of any shape, or none
    for i in tl.static_range(variants.num):
        first = variants.of[i].hooks.first_key(variants.of[i].data, first, positions)
    return first


@triton.jit
def whole_end(variants, states, begin, end, in_tile, BLOCK_N: tl.constexpr):
    """Returns where the tiles of BLOCK_N keys from `begin` on end that lie before `end` and need no mask."""
    for i in tl.static_range(variants.num):
        end = variants.of[i].hooks.whole(variants.of[i].data, states[i], begin, end, in_tile, BLOCK_N)
    return end
