"""The tiles of `prefill_fp8_hopper.py`: copies to shared memory, weights in e4m3, and products on the tensor
cores (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma

from .prefill_hopper_tiles import copy_layout, product_layout


@gluon.jit
def copy_tile(source, stride, target, full):
    """Starts the copy of a tile whose rows are `stride` bytes apart; the barrier `full` completes when it has
    arrived."""
    rows = gl.arange(0, target.shape[0], gl.SliceLayout(1, copy_layout(target.shape[1], 1)))
    start_copy(source, stride, rows, target)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def start_copy(source, stride, rows, target):
    """Starts the copy of rows, `stride` bytes apart in global memory, to a tile."""
    WIDTH: gl.constexpr = target.shape[1]
    layout: gl.constexpr = copy_layout(WIDTH, 1)
    places = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    pointers = source + (rows * stride)[:, None] + places[None, :]
    pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 16])
    async_copy.async_copy_global_to_shared(target, pointers)


@gluon.jit
def pack_fours(weights, own_q):
    """Rounds weights to e4m3, four of a thread in an int32: [rows, columns / 4].

    A thread holds columns 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16. They are the keys 4t to 4t + 3 of the
    scratch.
    """
    ROWS: gl.constexpr = weights.shape[0]
    NUM: gl.constexpr = weights.shape[1]
    fours = (
        weights.reshape([ROWS, NUM // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, NUM // 4, 2, 2])
    )
    low, high = gl.split(fours)  # the first and the second of each pair: [ROWS, NUM // 4, 2]
    a, c = gl.split(low)
    b, d = gl.split(high)
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def unpack_fours(fours, layout: gl.constexpr):
    """Returns what `pack_fours` has packed, [rows, columns] in e4m3, in the layout of an operand."""
    pairs = gl.join(fours.to(gl.int16), (fours >> 16).to(gl.int16))
    low, high = pairs.to(gl.int8), (pairs >> 8).to(gl.int8)
    both = gl.join(low, high).reshape([fours.shape[0], fours.shape[1] * 4])
    return gl.convert_layout(both.to(gl.float8e4nv, bitcast=True), layout)


@gluon.jit
def empty_output(tiles):
    """Returns the output before the first tile."""
    DV: gl.constexpr = tiles.v[0].shape[1]
    ROWS: gl.constexpr = tiles.q[0].shape[1]
    return (gl.zeros([ROWS, DV], gl.float32, product_layout(DV, 8)),)


@gluon.jit
def begin_part(fours, v_tile, out):
    """Starts the computation of a tile's part of the output on the tensor cores. Returns it, and what this
    reads."""
    fence_async_shared()
    layout: gl.constexpr = out[0].type.layout
    p = unpack_fours(fours, gl.DotOperandLayout(0, layout, 4))
    part = gl.zeros(out[0].shape, gl.float32, layout)
    part = warpgroup_mma(p, v_tile[0].permute((1, 0)), part, use_acc=False, is_async=True)
    return (part,), (fours,)
