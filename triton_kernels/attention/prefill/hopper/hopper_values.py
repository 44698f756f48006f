"""Masks of values in the kernels for compute capability 9: tiles of them come to shared memory beside K and V,
and are added to the scores (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from lightkv.triton_kernels.attention.variants.hooks import LOG2_E

from .prefill_hopper_items import ROWS
from .prefill_hopper_tiles import WARPS, value_bytes

_LOG2_E = gl.constexpr(LOG2_E)
_COARSE_BELOW = gl.constexpr(-(2.0**26))  # peaks, in base 2, whose rounding would make a weight overflow


@gluon.constexpr_function
def _tile_layout(num_bytes, width):
    return gl.NVMMASharedLayout(min(int(num_bytes) * int(width), 128), 8 * int(num_bytes), 2)


@gluon.constexpr_function
def _copy_layout(num_bytes, width):
    """Returns the layout of a copy, of 16 bytes a thread."""
    columns = min(int(num_bytes) * int(width) // 16, 32)
    return gl.BlockedLayout([1, 16 // int(num_bytes)], [32 // columns, columns], [int(WARPS), 1], [1, 0])


@gluon.jit
def allocate_values(features, shape, NUM: gl.constexpr):
    """Returns tiles of values in shared memory, `[members * NUM, ROWS, BLOCK_N]`, the rows of a tile's
    warpgroups one after the other, and the barriers of each of the NUM that say that it is full or empty.
    Without a mask of values, the tuple is empty."""
    tiles = ()  # type: tuple
    if features.added is not None:
        dtype: gl.constexpr = features.added.dtype.element_ty
        layout: gl.constexpr = _tile_layout(value_bytes(dtype), shape.BLOCK_N)
        MEMBERS: gl.constexpr = shape.BLOCK_M // ROWS
        values = gl.allocate_shared_memory(dtype, [MEMBERS * NUM, ROWS, shape.BLOCK_N], layout)
        full = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(NUM):
            mbarrier.init(full.index(i), count=32 * WARPS)
            mbarrier.init(empty.index(i), count=MEMBERS)
        tiles += (values, full, empty)
    return tiles


@gluon.jit
def copy_values(features, tile, key_tile, count, tiles, shape):
    """Starts the copy of a tile of values, once there is room for it. `count`: key tiles so far."""
    if len(tiles) > 0:
        NUM: gl.constexpr = tiles[1].shape[0]
        MEMBERS: gl.constexpr = tiles[0].shape[0] // NUM
        stage = count % NUM
        mbarrier.wait(tiles[2].index(stage), (count // NUM & 1) ^ 1)
        for member in gl.static_range(MEMBERS):
            target = tiles[0].index(MEMBERS * stage + member)
            pointers = _value_pointers(
                features, tile, key_tile, member, shape.GROUP, target.shape[0], target.shape[1]
            )
            async_copy.async_copy_global_to_shared(target, pointers)
        async_copy.mbarrier_arrive(tiles[1].index(stage), increment_count=False)


@gluon.jit
def _value_pointers(
    features, tile, key_tile, member, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Returns pointers to the values of a warpgroup's rows. Rows after the request's last repeat that row.
    Columns after the last vector of a row repeat that; they are hidden, as all keys at `width` and beyond."""
    NUM_BYTES: gl.constexpr = value_bytes(features.added.dtype.element_ty)
    VECTOR: gl.constexpr = 16 // NUM_BYTES
    layout: gl.constexpr = _copy_layout(NUM_BYTES, BLOCK_N)
    kv_head, _row, first_row, num_rows, q_begin, _prefix = tile
    rows = first_row + member * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    rows = gl.minimum(rows, num_rows - 1)
    tokens = (q_begin + rows // GROUP).to(gl.int64)
    heads = kv_head * GROUP + rows % GROUP
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    last = (features.width - 1) // VECTOR * VECTOR
    vectors = gl.minimum(key_tile * BLOCK_N + columns // VECTOR * VECTOR, last)
    pointers = (
        features.added + (tokens * features.stride_added_token + heads * features.stride_added_head)[:, None]
    )
    pointers += (vectors + columns % VECTOR)[None, :]
    return gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, VECTOR])


@gluon.jit
def take_values(count, tiles, MEMBER: gl.constexpr, layout: gl.constexpr):
    """Returns a warpgroup's rows of a tile of values, for `add_values`: a tuple that is empty without a mask of
    values.

    Values of 16 bits and bytes are loaded here, while the scores are computed. There are no registers for those
    of 32 bits, so the tuple has the place in shared memory, and the barrier that says that it was read.
    """
    found = ()  # type: tuple
    if len(tiles) > 0:
        NUM: gl.constexpr = tiles[1].shape[0]
        stage = count % NUM
        mbarrier.wait(tiles[1].index(stage), count // NUM & 1)
        MEMBERS: gl.constexpr = tiles[0].shape[0] // NUM
        own = tiles[0].index(MEMBERS * stage + MEMBER)
        if value_bytes(own.dtype) == 4:
            found += (own, tiles[2].index(stage))
        elif value_bytes(own.dtype) == 1:
            found += (_load_pairs(own, layout),)
            mbarrier.arrive(tiles[2].index(stage))
        else:
            found += (own.load(layout),)
            mbarrier.arrive(tiles[2].index(stage))
    return found


@gluon.jit
def _load_pairs(tile, layout: gl.constexpr):
    """Returns bytes as uint16, two neighbouring columns in each: [rows, columns / 2]."""
    WIDTH: gl.constexpr = tile.shape[1] // 2
    pairs = tile._reinterpret(gl.uint16, [tile.shape[0], WIDTH], _tile_layout(2, WIDTH))
    return pairs.load(pair_layout(tile.shape[0], tile.shape[1]))


@gluon.constexpr_function
def pair_layout(num_rows, num_columns):
    """Returns the layout of `num_columns / 2` pairs of neighbouring columns, of which each is where a wgmma's
    accumulator has the two columns."""
    columns = [[0, 1 << bit] for bit in range(int(num_columns).bit_length() - 2)]
    lanes, registers = [*columns[:2], [1, 0], [2, 0], [4, 0]], [[8, 0], *columns[2:]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [num_rows, num_columns // 2])


@gluon.jit
def pass_values(count, tiles):
    """Lets a tile of values pass that a warpgroup does not read."""
    if len(tiles) > 0:
        NUM: gl.constexpr = tiles[1].shape[0]
        stage = count % NUM
        mbarrier.wait(tiles[1].index(stage), count // NUM & 1)
        mbarrier.arrive(tiles[2].index(stage))


@gluon.jit
def add_values(s, values, score_scale):
    """Returns the scores with the values of `take_values`."""
    if len(values) > 1:
        added = values[0].load(s.type.layout)
        mbarrier.arrive(values[1])
        s += added * (_LOG2_E / score_scale)
    elif len(values) > 0:
        if values[0].dtype == gl.uint16:
            s = _hide_pairs(s, values[0])
        else:
            s += values[0].to(gl.float32) * (_LOG2_E / score_scale)
    return s


@gluon.jit
def _hide_pairs(s, pairs):
    """Hides the scores whose byte of `_load_pairs` is 0."""
    low, high = gl.split(s.reshape([s.shape[0], s.shape[1] // 2, 2]))
    pairs = gl.convert_layout(pairs, low.type.layout).to(gl.int32)
    low = gl.where((pairs & 255) != 0, low, float("-inf"))
    high = gl.where(pairs > 255, high, float("-inf"))
    return gl.convert_layout(gl.join(low, high).reshape(s.shape), s.type.layout)


@gluon.jit
def scale_at(level, features, score_scale):
    """Returns the scale of each row's scores, whose largest ones are `level` in base 2: `score_scale` without a
    mask of values.

    Where all keys so far have a value like -1e10, the product of score and scale, which is rounded only after
    the peak is subtracted, may exceed the peak, which is rounded, by hundreds. There the scale is
    `coarse_scale`, the next larger power of two, with which the product is exact. Two such scores that differ
    at all differ by so much that the smaller one has no weight in either scale.
    """
    scale = score_scale
    if features.added is not None:
        scale = gl.where(level < _COARSE_BELOW, features.coarse_scale, score_scale)
    return scale
