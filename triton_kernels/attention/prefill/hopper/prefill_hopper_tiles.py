"""The tiles of `prefill_hopper.py`: its copies to shared memory and its products on the tensor cores (Gluon).

The shapes of Gluon's tensors are powers of two. Other head dims are a sum of these, so a tile is a tuple of
pieces, the widest first, and has no columns of padding:

    head dim 128    ├──────────────────────────── 128 ─────────────────────────────┤
    head dim 96     ├────────────── 64 ──────────────┼────── 32 ──────┤
    head dim 80     ├────────────── 64 ──────────────┼── 16 ──┤

A score is the sum of the products of the pieces of q and K. Each piece of V has a piece of the output. The
slots are found once for K and V, so V's pieces have to be as wide as the first ones of K.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_slots import find_inner_slots, find_slots

WARPS = gl.constexpr(4)  # of a warpgroup, which executes a wgmma together


_CHUNK = gl.constexpr(64)  # elements of 128 bytes, within which shared memory is swizzled


@gluon.constexpr_function
def num_pieces(head_dim):
    return int(head_dim).bit_count()


@gluon.constexpr_function
def piece_width(head_dim, piece):
    """Returns the width of a piece: of the head dim's powers of two, the largest are first."""
    bits = [bit for bit in range(int(head_dim).bit_length()) if int(head_dim) >> bit & 1]
    return 1 << bits[-1 - int(piece)]


@gluon.constexpr_function
def value_bytes(dtype):
    return dtype.primitive_bitwidth // 8


@gluon.constexpr_function
def tile_layout(head_dim, piece, num_bytes=2):
    """Returns the layout of a piece in shared memory, whose rows are swizzled within 128 bytes at most, of
    elements of some bytes."""
    row_bytes = int(num_bytes) * piece_width(head_dim, piece)
    return gl.NVMMASharedLayout(min(row_bytes, 128), 8 * int(num_bytes), 2)


@gluon.constexpr_function
def copy_layout(width, num_bytes=2):
    """Returns the layout of a copy: a thread copies 16 of every 128 bytes of a row, its neighbours the rest. So
    few threads share a row, and each needs few slots."""
    columns = max(min(int(num_bytes) * int(width), 128) // 16, 1)
    return gl.BlockedLayout([1, 16 // int(num_bytes)], [32 // columns, columns], [4, 1], [1, 0])


@gluon.constexpr_function
def slots_layout(width):
    """Returns the layout of the slots whose rows are copied."""
    return gl.SliceLayout(1, copy_layout(width))


@gluon.constexpr_function
def product_layout(width, element_bits=16):
    """Returns the layout of what a wgmma computes, `width` columns for each row, from elements of some bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, int(width), 256 // int(element_bits)])


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, NUM: gl.constexpr, ROWS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Returns room for `NUM` tiles in shared memory: pieces of `[NUM, ROWS, width]`."""
    NUM_BYTES: gl.constexpr = value_bytes(dtype)
    tiles = ()  # type: tuple
    for i in gl.static_range(num_pieces(HEAD_DIM)):
        tiles += (
            gl.allocate_shared_memory(
                dtype, [NUM, ROWS, piece_width(HEAD_DIM, i)], tile_layout(HEAD_DIM, i, NUM_BYTES)
            ),
        )
    return tiles


@gluon.jit
def tile_at(tiles, i):
    """Returns tile `i` of several, in pieces of `[ROWS, width]`."""
    found = ()  # type: tuple
    for piece in gl.static_range(len(tiles)):
        found += (tiles[piece].index(i),)
    return found


# --------------------------------------------------------------------------------
# Copies


@gluon.jit
def find_slots_of_pieces(index, row, key_tile, begin, end, tiles):
    """Returns the result of `find_slots` for the copy of each piece."""
    slots = ()  # type: tuple
    for i in gl.static_range(len(tiles)):
        slots += (
            find_slots(index, row, key_tile, begin, end, tiles[i].shape[1], slots_layout(tiles[i].shape[2])),
        )
    return slots


@gluon.jit
def find_inner_slots_of_pieces(index, row, key_tile, exists, tiles):
    """Returns the result of `find_inner_slots` for the copy of each piece."""
    slots = ()  # type: tuple
    for i in gl.static_range(len(tiles)):
        slots += (
            find_inner_slots(
                index, row, key_tile, exists, tiles[i].shape[1], slots_layout(tiles[i].shape[2])
            ),
        )
    return slots


@gluon.jit
def row_pointers(head, slots, stride, layout: gl.constexpr, D: gl.constexpr):
    """Returns pointers to a head's rows at `slots`: [BLOCK_N, D]. Elements have 2 bytes, and a stride is less
    than 2**30 of them.

    An offset has 64 bits, but slot and stride have 32, of which one instruction makes a pointer. Written in
    Gluon, both are extended first, and there are four. It makes that of a thread's first 16 bytes; the others
    are 128 bytes and more behind, which are constants of the copies.
    """
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    head += dims % _CHUNK
    pointers = gl.inline_asm_elementwise(
        "mad.wide.s32 $0, $1, $2, $3;",
        "=l,r,r,l",
        [slots[:, None], 2 * stride, head.to(gl.int64)[None, :]],
        dtype=gl.int64,
        is_pure=True,
        pack=1,
    )
    pointers = pointers.to(head.dtype.scalar) + (dims // _CHUNK * _CHUNK)[None, :]
    return gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 8])


@gluon.jit
def copy_rows(head, slots, stride, tile, full):
    """Starts the copy of one head's K or V at `slots`; the barrier `full` completes when it has arrived."""
    for i in gl.static_range(len(tile)):
        pointers = row_pointers(head, slots[i], stride, copy_layout(tile[i].shape[1]), tile[i].shape[1])
        async_copy.async_copy_global_to_shared(tile[i], pointers)
        head += tile[i].shape[1]
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _q_pointers(data, q, tile, member, GROUP: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    layout: gl.constexpr = copy_layout(D, value_bytes(data.dtype.element_ty))
    kv_head, _row, first_row, num_rows, q_begin, _prefix = tile
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    rows = first_row + member * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    rows = gl.minimum(rows, num_rows - 1)
    tokens = (q_begin + rows // GROUP).to(gl.int64)
    heads = kv_head * GROUP + rows % GROUP
    return data + (tokens * q.stride_token + heads * q.stride_head)[:, None] + dims[None, :]


@gluon.jit
def copy_q(q, tile, q_smem, q_full, GROUP: gl.constexpr):
    """Starts the copy of a tile's queries; rows after the request's last repeat that row. `q`: `Heads`."""
    data = q.data
    MEMBERS: gl.constexpr = q_smem[0].shape[0]
    for i in gl.static_range(len(q_smem)):
        for member in gl.static_range(MEMBERS):
            target = q_smem[i].index(member)
            pointers = _q_pointers(data, q, tile, member, GROUP, target.shape[0], target.shape[1])
            async_copy.async_copy_global_to_shared(target, pointers)
        data += q_smem[i].shape[2]
    async_copy.mbarrier_arrive(q_full, increment_count=False)


# --------------------------------------------------------------------------------
# Products


@gluon.jit
def begin_scores(k_tile, own_q):
    """Starts the computation of a tile's scores on the tensor cores."""
    ROWS: gl.constexpr = own_q[0].shape[0]
    BLOCK_N: gl.constexpr = k_tile[0].shape[0]
    layout: gl.constexpr = product_layout(BLOCK_N, 8 * value_bytes(k_tile[0].dtype))
    fence_async_shared()  # makes what cp.async wrote visible to the asynchronous proxy of wgmma
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    for i in gl.static_range(len(k_tile)):
        s = warpgroup_mma(own_q[i], k_tile[i].permute((1, 0)), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def empty_output(tiles):
    """Returns the output before the first tile, in pieces."""
    ROWS: gl.constexpr = tiles.q[0].shape[1]
    acc = ()  # type: tuple
    for i in gl.static_range(len(tiles.v)):
        acc += (gl.full([ROWS, tiles.v[i].shape[2]], 0.0, gl.float32, product_layout(tiles.v[i].shape[2])),)
    return acc


@gluon.jit
def pack_pairs(weights, own_q):
    """Rounds weights to the type of q, of 16 bits, as `pair_up` does."""
    return pair_up(weights, own_q[0].dtype)


@gluon.jit
def pair_up(values, dtype: gl.constexpr):
    """Rounds values to a type of 16 bits, two neighbouring columns in an int32: [rows, columns / 2].

    A loop that carries 16-bit values would have the compiler take every pair apart and put it together again.
    """
    low, high = gl.split(values.reshape([values.shape[0], values.shape[1] // 2, 2]))
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


@gluon.jit
def begin_output(pairs, v_tile, acc):
    """Starts adding a tile's weights times V to the output on the tensor cores. Returns the output, and what
    these products read."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    p = unpack_pairs(pairs, v_tile[0].dtype, p_layout)
    found = ()  # type: tuple
    for i in gl.static_range(len(v_tile)):
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, acc[i].type.layout, 2))
        found += (warpgroup_mma(weights, v_tile[i], acc[i], is_async=True),)
    return found, (p,)


@gluon.jit
def wait_output(acc, operands):
    """Returns the output once it is computed; until then, its products read `operands`, a tuple."""
    if len(acc + operands) == 1:
        return (warpgroup_mma_wait(0, deps=[acc[0]]),)
    else:
        return warpgroup_mma_wait(0, deps=acc + operands)[: len(acc)]


@gluon.constexpr_function
def _scale_asm(num):
    """Returns what multiplies a thread's `num` elements by their factors, $n to $2n - 1, where one of a warp's
    threads has a factor that is not 1."""
    rows = (
        f"setp.neu.f32 other, ${num}, 0f3F800000;",
        f"setp.neu.or.f32 other, ${num + 2}, 0f3F800000, other;",
    )
    products = "\n".join(f"mul.f32 ${i}, ${i}, ${num + i};" for i in range(num))
    return f"""{{
        .reg .pred other, any;
        {rows[0]}
        {rows[1]}
        vote.sync.any.pred any, other, 0xffffffff;
        @!any bra.uni KEPT${{:uid}};
        {products}
        KEPT${{:uid}}:
        }}"""


@gluon.constexpr_function
def _scale_constraints(num):
    return ",".join(["=f"] * num + ["f"] * num + [str(i) for i in range(num)])


@gluon.jit
def scale_rows(acc, factors):
    """Returns the output with each row times a factor, `[rows, 4]`, of each of a row's four threads. Factors
    are 1 as a rule (`hopper_scores._raise_peaks`), and a warp whose factors are all 1 multiplies nothing."""
    found = ()  # type: tuple
    for i in gl.static_range(len(acc)):
        found += (_scale_piece(acc[i], factors, acc[i].shape[0] * acc[i].shape[1] // (32 * WARPS)),)
    return found


@gluon.jit
def _scale_piece(acc, factors, NUM: gl.constexpr):
    ASM: gl.constexpr = _scale_asm(NUM)
    CONSTRAINTS: gl.constexpr = _scale_constraints(NUM)
    parts = acc.reshape([acc.shape[0], acc.shape[1] // 8, 4, 2])
    of_threads: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, parts.type.layout))
    factors = gl.convert_layout(factors, of_threads)[:, :, None][:, None, :, :]
    parts = gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [factors, parts], dtype=gl.float32, is_pure=True, pack=NUM
    )
    return gl.convert_layout(parts.reshape(acc.shape), acc.type.layout)
