"""The programs of prefill on compute capability 9: some warps load while others compute (Gluon).

A program has three or four warpgroups of four warps, and stays on its multiprocessor until the work list is
done. One warpgroup copies q, and tiles of K and V, to shared memory, as far ahead as there is room; the others
compute, each 64 of a tile's rows. An item is a tile of queries for one K/V head; its key tiles are read from
the last to the first, so the masked ones on the diagonal come first.

    loading         K j, V j │ K j-1, V j-1 │ …          next item: K, q, V │ …
                        │ full        ▲ empty
    shared memory   stages of K and of V: a tile each         q: one tile
                        │ full        ▲ empty
    computing       scores j │ ─── output j+1 ───          │ scores j-1 │ ─── output j ───         (wgmma)
                             │ ─── softmax j  ─── wait for │            │ ─── softmax j-1 ───

Programs take the next item from a counter, because items differ too much to assign them beforehand. The program
that finishes last resets the counter, so one run at a time may use a plan. The K/V heads are computed in
sections, whose K and V stay in the L2 cache (`prefill_tuning.SECTION_BYTES`).

What a kind of K and V asks for is in its hooks: `Loading` says how rows come to shared memory, `Weighing` how
weights are multiplied with V. `prefill_hopper.py` gathers rows of 16 bits, `prefill_fp8_hopper.py` copies tiles
of a scratch in fp8. What a call asks for beside plain attention is known to `hopper_scores.py` alone.

The kernels compute the same as that of `prefill_kernel.py`, which is easier to read.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from .hopper_scores import (
    column_tiles,
    end_of_whole,
    end_peak,
    in_threads,
    joins_sinks,
    keys_of,
    online_softmax,
    scales_in,
    slope_piece,
    start_rows,
    start_softmax,
    thread_sums,
)
from .hopper_values import allocate_values, copy_values, pass_values, take_values
from .prefill_hopper_items import ROWS, item_at, piece_of, tile_of, write_partial, write_tile
from .prefill_hopper_tiles import WARPS, product_layout, scale_rows, tile_at, wait_output


@gluon.constexpr_function
def _loading_registers(members, computing):
    """Returns the registers of a thread that loads, beside `members` warpgroups that compute with `computing`
    registers a thread: a thread of each warpgroup may have 504 of three together, and 512 of four."""
    return (504 if int(members) == 2 else 512) - int(members) * int(computing)


class Work(NamedTuple):
    """The work list of `prefill_plan`: `items` `[capacity, 12]`, and `counters` `[4]`: items taken, programs
    finished, items to begin at, heads of a section."""

    items: Any
    counters: Any
    num_kv_heads: Any


class Tiles(NamedTuple):
    """What a program has in shared memory: the item, tiles of q, K and V, each a tuple of pieces with a first
    dim of halves or stages, and barriers. Those of K, V and `empty` are one for each stage. `columns`: of
    `column_tiles`. `added`: of `allocate_values`."""

    item: Any
    q: Any
    k: Any
    v: Any
    columns: Any
    added: Any
    item_full: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    empty: Any


class Loading(NamedTuple):
    """How K and V come to shared memory, as jit functions. `source`: a record of the kind's own.

    `start(source, tile, keys, tiles)` returns `place`, a tuple: what the copies for an item need.
    `find_last(source, place, keys, tiles)` returns `found`, a tuple: where the item's last key tile is, which
        is copied first.
    `find_before(source, place, keys, tiles, key_tile, exists, FROM_ZERO)` returns `found` of another key tile,
        if it exists, while the key tile after it has yet to be copied. FROM_ZERO: queries see the keys from the
        first one on.
    `copy_k(source, place, found, key_tile, target, full)` starts the copy of a tile of K, and has the barrier
        `full` complete when it has arrived; `copy_v` likewise.
    `copy_q(q, tile, target, full, GROUP)` does so for a tile's queries.
    """

    start: Any
    find_last: Any
    find_before: Any
    copy_k: Any
    copy_v: Any
    copy_q: Any


class Weighing(NamedTuple):
    """How scores are computed and weights are multiplied with V, as jit functions. `source`: a record of the
    kind's own. An output is a tuple of pieces.

    `unit(source, tile)` returns the number that an item's products of q and K have to be multiplied with.
    `start(tiles)` returns the output before the first key tile.
    `score(k_tile, own_q)` starts the product of a tile's scores.
    `pack(weights, own_q)` returns the weights as the loop carries them.
    `multiply(packed, v_tile, out)` starts the products of weights and V. It returns them, a tuple as long as an
        output, and another tuple: what they read until they are done.
    `add(out, products)` returns the output with a tile's products.
    `finish(source, tile, out)` returns the output after the last tile.

    PACKS_FIRST: `pack` runs before the wait for the products instead of after it. SLACK_BITS, EXTRA_BITS:
    of `online_softmax`.
    """

    unit: Any
    start: Any
    score: Any
    pack: Any
    multiply: Any
    add: Any
    finish: Any
    PACKS_FIRST: Any
    SLACK_BITS: Any
    EXTRA_BITS: Any


class Kind(NamedTuple):
    """How the kernels treat a kind of K and V. STAGGERED: a tile of K and the tile of V before it become empty
    together, since their scores and their part of the output are computed together; otherwise K and V of a tile
    do, after their part of the output."""

    loading: Loading
    weighing: Weighing
    STAGGERED: Any


@gluon.jit
def _load(source, q, work, tiles, features, shape, kind, SHARES: gl.constexpr):
    """What the loading warpgroup does."""
    STAGES: gl.constexpr = tiles.k[0].shape[0]
    FROM_ZERO: gl.constexpr = features.WINDOW == 0 and features.CHUNK == 0
    count = 0  # key tiles so far, over all items
    turn = 0  # items so far
    order = gl.load(work.counters + 2), gl.load(work.counters + 3), work.num_kv_heads
    item = item_at(gl.program_id(0), order)
    while item >= 0:
        tile = tile_of(work.items, item, work.num_kv_heads)
        piece = piece_of(work.items, item, work.num_kv_heads, SHARES)
        keys = keys_of(tile, piece, features, shape, SHARES)
        _begin, end, first, last = keys
        if end > 0:
            place = kind.loading.start(source, tile, keys, tiles)
            following = kind.loading.find_last(source, place, keys, tiles)
            for j in range(last - first + 1):
                stage = count % STAGES
                found = following
                following = kind.loading.find_before(
                    source, place, keys, tiles, last - 1 - j, j < last - first, FROM_ZERO
                )
                mbarrier.wait(tiles.empty.index(stage), (count // STAGES & 1) ^ 1)
                kind.loading.copy_k(
                    source, place, found, last - j, tile_at(tiles.k, stage), tiles.k_full.index(stage)
                )
                if j == 0:
                    _pass_item(item, turn, tiles)
                    kind.loading.copy_q(q, tile, tiles.q, tiles.q_full, shape.GROUP)
                copy_values(features, tile, last - j, count, tiles.added, shape)
                if kind.STAGGERED:  # V of the tile that was here goes with K of the tile after that
                    mbarrier.wait(tiles.empty.index((count + 1) % STAGES), ((count + 1) // STAGES & 1) ^ 1)
                kind.loading.copy_v(
                    source, place, found, last - j, tile_at(tiles.v, stage), tiles.v_full.index(stage)
                )
                count += 1
        else:
            _pass_item(item, turn, tiles)
            kind.loading.copy_q(q, tile, tiles.q, tiles.q_full, shape.GROUP)
        turn += 1
        item = -1
        if SHARES:
            item = piece[3]
        if item < 0:
            at = gl.num_programs(0) + gl.atomic_add(work.counters, 1, sem="relaxed")
            item = item_at(at, order)
    _pass_item(-1, turn, tiles)
    if gl.atomic_add(work.counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(work.counters, 0)
        gl.store(work.counters + 1, 0)


@gluon.jit
def _pass_item(item, turn, tiles):
    """Passes the item to the computing warpgroups, once they no longer read q of the one before."""
    mbarrier.wait(tiles.q_empty, (turn & 1) ^ 1)
    tiles.item.store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(tiles.item_full)


@gluon.jit
def _compute(
    source,
    work,
    outputs,
    scales,
    tiles,
    features,
    shape,
    kind,
    MEMBER: gl.constexpr,
    SHARES: gl.constexpr,
):
    """What a computing warpgroup does. `scales`: of scores in base 2, and of those that are capped."""
    row: gl.constexpr = gl.SliceLayout(1, product_layout(shape.BLOCK_N, tiles.q[0].dtype.primitive_bitwidth))
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    num_heads = work.num_kv_heads * shape.GROUP
    count = 0
    turn = 0
    mbarrier.wait(tiles.item_full, 0)
    item = gl.max(tiles.item.load(one), 0)
    while item >= 0:
        tile = tile_of(work.items, item, work.num_kv_heads)
        piece = piece_of(work.items, item, work.num_kv_heads, SHARES)
        keys = keys_of(tile, piece, features, shape, SHARES)
        computes = keys[1] > 0
        if SHARES:  # few rows are the rule then
            computes = computes & (tile[2] + MEMBER * ROWS < tile[3])
        joins = joins_sinks(tile, piece, features, shape, SHARES)
        peak, total = start_softmax(tile, joins, features, shape, MEMBER, row)
        out = kind.weighing.start(tiles)
        mbarrier.wait(tiles.q_full, turn & 1)
        if computes:
            out, peak, total, count = _attend(
                out, peak, total, count, source, tile, keys, scales, tiles, features, shape, kind, MEMBER,
                SHARES,
            )  # fmt: skip
        else:
            mbarrier.arrive(tiles.q_empty)
            if SHARES:
                count = _pass_tiles(count, keys, tiles)
        if SHARES:
            if piece[2] >= 0:
                write_partial(
                    out, peak, total, outputs, piece[2], work.num_kv_heads, tile, MEMBER, shape.BLOCK_M
                )
            else:
                write_tile(out, peak, total, outputs, num_heads, tile, MEMBER, shape.GROUP)
        else:
            write_tile(out, peak, total, outputs, num_heads, tile, MEMBER, shape.GROUP)
        turn += 1
        mbarrier.wait(tiles.item_full, turn & 1)
        item = gl.max(tiles.item.load(one), 0)


@gluon.jit
def _attend(
    out,
    peak,
    total,
    count,
    source,
    tile,
    keys,
    scales,
    tiles,
    features,
    shape,
    kind,
    MEMBER: gl.constexpr,
    SHARES: gl.constexpr,
):
    """Returns the output of a warpgroup's rows over the keys of an item, the peak and the sum of their softmax,
    and how many key tiles there were so far."""
    STAGES: gl.constexpr = tiles.k[0].shape[0]
    row: gl.constexpr = peak.type.layout
    s_layout: gl.constexpr = product_layout(shape.BLOCK_N)
    _begin, end, first, last = keys
    scales = scales_in(scales, kind.weighing.unit(source, tile), features)
    rows, peak = start_rows(tile, end, peak, scales[0], features, shape, MEMBER, row)
    whole = end_of_whole(tile, keys, features, shape, MEMBER, SHARES)
    own_q = tile_at(tiles.q, MEMBER)
    stage = count % STAGES
    mbarrier.wait(tiles.k_full.index(stage), count // STAGES & 1)
    s = kind.weighing.score(tile_at(tiles.k, stage) + tiles.columns, own_q + slope_piece(rows, s_layout))
    values = take_values(count, tiles.added, MEMBER, s_layout)
    s = warpgroup_mma_wait(0, deps=[s])
    weights, decay, peak = online_softmax(
        s, in_threads(peak, s), last * shape.BLOCK_N, rows, values, scales, features, True,
        kind.weighing.SLACK_BITS,
        kind.weighing.EXTRA_BITS,
    )  # fmt: skip
    sums = thread_sums(weights)  # of each of the four threads of a row
    if features.sink_logits is not None:
        sums += in_threads(total * 0.25, s) * decay
    mbarrier.wait(tiles.v_full.index(stage), count // STAGES & 1)
    if kind.STAGGERED:
        mbarrier.arrive(tiles.empty.index(stage))
    packed = kind.weighing.pack(weights, own_q)
    count += 1
    for WHOLE in gl.static_range(2 if features.WINDOW == 0 else 1):
        num_steps = whole - first if WHOLE else last - whole
        for j in range(num_steps):
            # The scores of this tile are computed while the weights of the tile before go into the output.
            before = stage
            stage = count % STAGES
            mbarrier.wait(tiles.k_full.index(stage), count // STAGES & 1)
            s = kind.weighing.score(
                tile_at(tiles.k, stage) + tiles.columns, own_q + slope_piece(rows, s_layout)
            )
            out = scale_rows(out, decay)
            products, read = kind.weighing.multiply(packed, tile_at(tiles.v, before), out)
            values = take_values(count, tiles.added, MEMBER, s_layout)
            s = warpgroup_mma_wait(len(tiles.v), deps=[s])
            first_key = ((whole if WHOLE else last) - 1 - j) * shape.BLOCK_N
            weights, decay, peak = online_softmax(
                s, peak, first_key, rows, values, scales, features, WHOLE == 0, kind.weighing.SLACK_BITS,
                kind.weighing.EXTRA_BITS,
            )  # fmt: skip
            sums = sums * decay + thread_sums(weights)
            if kind.weighing.PACKS_FIRST:
                packed = kind.weighing.pack(weights, own_q)
            # This wait also ends a basic block; without it ptxas moves the next wait above the softmax.
            mbarrier.wait(tiles.v_full.index(stage), count // STAGES & 1)
            products = wait_output(products, read)
            mbarrier.arrive(tiles.empty.index(stage if kind.STAGGERED else before))
            if not kind.weighing.PACKS_FIRST:
                packed = kind.weighing.pack(weights, own_q)
            out = kind.weighing.add(out, products)
            count += 1
    mbarrier.arrive(tiles.q_empty)
    fence_async_shared()
    out = scale_rows(out, decay)
    products, read = kind.weighing.multiply(packed, tile_at(tiles.v, stage), out)
    products = wait_output(products, ())
    if not kind.STAGGERED:
        mbarrier.arrive(tiles.empty.index(stage))
    out = kind.weighing.add(out, products)
    total = gl.convert_layout(gl.sum(sums, 1), row)
    peak = gl.convert_layout(gl.max(peak, 1), row)
    return kind.weighing.finish(source, tile, out), end_peak(peak, rows, scales[0], features), total, count


@gluon.jit
def _pass_tiles(count, keys, tiles):
    """Lets the key tiles of an item pass, of which a warpgroup without rows reads none."""
    STAGES: gl.constexpr = tiles.k[0].shape[0]
    for _j in range(keys[3] - keys[2] + 1):
        stage = count % STAGES
        mbarrier.wait(tiles.k_full.index(stage), count // STAGES & 1)
        mbarrier.wait(tiles.v_full.index(stage), count // STAGES & 1)
        mbarrier.arrive(tiles.empty.index(stage))
        pass_values(count, tiles.added)
        count += 1
    return count


@gluon.jit
def _with_barriers(q_tiles, k_tiles, v_tiles, columns, values, STAGES: gl.constexpr):
    """Returns the `Tiles` of a program, with barriers that are initialised."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    MEMBERS: gl.constexpr = q_tiles[0].shape[0]
    item = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    # Every loading thread arrives when its copies have completed; each computing warpgroup arrives once.
    mbarrier.init(item_full, count=1)
    mbarrier.init(q_full, count=32 * WARPS)
    mbarrier.init(q_empty, count=MEMBERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=32 * WARPS)
        mbarrier.init(v_full.index(stage), count=32 * WARPS)
        mbarrier.init(empty.index(stage), count=MEMBERS)
    fence_async_shared()
    return Tiles(
        item, q_tiles, k_tiles, v_tiles, columns, values, item_full, q_full, q_empty, k_full, v_full, empty
    )


@gluon.jit
def run_program(
    q,
    q_tiles,
    k_tiles,
    v_tiles,
    loaded,
    weighed,
    work,
    outputs,
    scales,
    features,
    shape,
    kind,
    STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr,
    SHARES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
):
    """Runs a program of prefill.

    `q`: `Heads`. `q_tiles`, `k_tiles`, `v_tiles`: what `Tiles` says, allocated. `loaded`, `weighed`: the
    `source` of the kind's `Loading` and of its `Weighing`. `work`: `Work`. `outputs`: `Outputs`, whose parts
    are `[parts, num_kv_heads, BLOCK_M, DV]` and `[parts, num_kv_heads, BLOCK_M]`. `scales`: as `_compute` takes
    them. `features`: `HopperFeatures`. `shape`: `Shape`. `kind`: `Kind`. VALUE_STAGES: tiles of
    values. COMPUTE_REGISTERS: of a thread that computes; a thread that loads has what is left.
    """
    tiles = _with_barriers(
        q_tiles,
        k_tiles,
        v_tiles,
        column_tiles(features, shape),
        allocate_values(features, shape, VALUE_STAGES),
        STAGES,
    )
    if shape.BLOCK_M == 3 * ROWS:
        gl.warp_specialize(
            [
                (_compute, (weighed, work, outputs, scales, tiles, features, shape, kind, 0, SHARES)),
                (_compute, (weighed, work, outputs, scales, tiles, features, shape, kind, 1, SHARES)),
                (_compute, (weighed, work, outputs, scales, tiles, features, shape, kind, 2, SHARES)),
                (_load, (loaded, q, work, tiles, features, shape, kind, SHARES)),
            ],
            [WARPS, WARPS, WARPS],
            [COMPUTE_REGISTERS, COMPUTE_REGISTERS, _loading_registers(3, COMPUTE_REGISTERS)],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (weighed, work, outputs, scales, tiles, features, shape, kind, 0, SHARES)),
                (_compute, (weighed, work, outputs, scales, tiles, features, shape, kind, 1, SHARES)),
                (_load, (loaded, q, work, tiles, features, shape, kind, SHARES)),
            ],
            [WARPS, WARPS],
            [COMPUTE_REGISTERS, _loading_registers(2, COMPUTE_REGISTERS)],
        )
