"""Linear layers over a few tokens with weights of 4 bits, which lie in the order of humming-kernels 0.1.20.

A word has eight numbers, of two rows n = 16 r + g and n + 8, and of four columns from c = 16 u + 2 t on:

    bits   0      4      8      12     16     20     24     28     32
           ├─ n ──┼─ n ──┼ n+8 ─┼ n+8 ─┼─ n ──┼─ n ──┼ n+8 ─┼ n+8 ─┤
             c      c+8    c      c+8    c+1    c+9    c+1    c+9

The words of 64 rows and 16 columns are `[8 g, 4 t, 4 r]`. So the four words that a thread loads at once are its
part of the left operands of four products of the tensor cores (mma.m16n8k16):

    out^T [64, 8]  +=  weight [64, 16]  ·  x^T [16, 8]        a warp: 64 rows, some groups of columns

Two instructions make two numbers of an operand, as the last bits of 128 in bfloat16, and of 16 in float16. This
and the zero are taken off as multiples of the sum of x, which is a product with ones. A warp loads its first
groups before it waits for the kernel that writes x.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightkv.triton_kernels import tuning

MAX_TOKENS = 8
_ROWS = 64  # of a program


class Int4Tensors(NamedTuple):
    """A weight `[N, K]` as humming-kernels holds it. Its inputs are in G groups, and its rows are filled up to
    M, a multiple of 128.

    `words`: int32 `[K / 16, 2 M]`. `scales`: of the type of x, `[G, M]`; row 8 j + i of each 64 is at 8 i + j.
    `zeros`: int32 words of eight, in the order of the scales, `[G, M / 8]`; None: 8.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None


@gluon.constexpr_function
def _layout(num_warps):
    """Returns the layout of what a thread holds of 64 rows: `[warps, 8 g, 4 t, 4 r]`."""
    warps = [[1 << bit, 0, 0, 0] for bit in range(int(num_warps).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    shape = [int(num_warps), 8, 4, 4]
    return gl.DistributedLinearLayout([[0, 0, 0, 1], [0, 0, 0, 2]], lanes, warps, [], shape)


@gluon.constexpr_function
def _unpacking(place, is_bf16):
    """Returns the code that makes the numbers at `place` and four behind it in a word, each with 128 more (in
    float16: 16)."""
    shift = 4 * int(place) if is_bf16 else 4 * int(place) - 6
    bits, constant = ("0x000F000F", "0x43004300") if is_bf16 else ("0x03C003C0", "0x4C004C00")
    move = f"shr.u32 word, $1, {shift};" if shift >= 0 else f"shl.b32 word, $1, {-shift};"
    return f"{{ .reg .b32 word; {move} lop3.b32 $0, word, {bits}, {constant}, 0xEA; }}"


@gluon.constexpr_function
def _product(is_bf16):
    kind = "bf16.bf16" if is_bf16 else "f16.f16"
    operands = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32 {operands};"


@gluon.jit
def _unpack(words, place: gl.constexpr, IS_BF16: gl.constexpr):
    code: gl.constexpr = _unpacking(place, IS_BF16)
    return gl.inline_asm_elementwise(code, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _mma(a, b, c, IS_BF16: gl.constexpr):
    """Returns a · b + c: the rows g and g + 8 of a, the tokens 2 t and 2 t + 1 of both."""
    code: gl.constexpr = _product(IS_BF16)
    return gl.inline_asm_elementwise(
        code,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _load_group(words, scales, zeros, group, inside, STRIDE: gl.constexpr, UNITS: gl.constexpr):
    """Returns a group of columns, 16 at a time, and its scales and zeros."""
    found = ()  # type: tuple
    for u in gl.static_range(UNITS):
        at = words + (group * UNITS + u) * STRIDE
        found += (gl.load(at, mask=inside, other=0, eviction_policy="evict_first"),)
    scale = gl.load(scales + group * (STRIDE // 4), mask=inside, other=0)
    zero = scale  # not read without zeros
    if zeros is not None:
        zero = gl.load(zeros + group * (STRIDE // 16), mask=inside, other=0)
    return found, scale, zero


@gluon.jit
def _load_inputs(pairs, there, UNITS: gl.constexpr):
    """Returns a group of columns of x: a right operand, which are two words, for each 16 of them."""
    found = ()  # type: tuple
    for u in gl.static_range(UNITS):
        first = gl.load(pairs + u * 8, mask=there, other=0)
        found += ((first, gl.load(pairs + u * 8 + 4, mask=there, other=0)),)
    return found


@gluon.jit
def _half(pairs, UPPER: gl.constexpr, dtype: gl.constexpr):
    """Returns one of two numbers in 16 bits as float32."""
    bits = pairs >> 16 if UPPER else pairs
    return bits.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def _store(out, bias, total, row, token, num_rows, num_tokens, stride):
    inside = (row < num_rows) & (token < num_tokens)
    if bias is not None:
        total += gl.load(bias + row, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + token * stride + row, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["num_tokens"])
def _few_tokens_kernel(
    x,  # [T, K]
    words,  # of `Int4Tensors`
    scales,
    zeros,
    bias,  # [N] or None
    out,  # [T, N]
    parts,  # [blocks, SPLITS, 8, 64] float32; None for one split
    tickets,  # [blocks], zeros before and after; None for one split
    num_tokens,
    N: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    SPLITS: gl.constexpr,
    EARLY: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = _layout(WARPS)
    UNITS: gl.constexpr = GROUP // 16
    PAIRS: gl.constexpr = NUM_GROUPS * GROUP // 2  # of a token
    TURNS: gl.constexpr = (NUM_GROUPS + WARPS * SPLITS - 1) // (WARPS * SPLITS)
    DEPTH: gl.constexpr = TURNS if TURNS <= 2 else 1  # groups that a warp loads ahead
    dtype: gl.constexpr = x.dtype.element_ty
    IS_BF16: gl.constexpr = dtype == gl.bfloat16
    CONSTANT: gl.constexpr = 128.0 if IS_BF16 else 16.0
    block = gl.program_id(0)
    split = gl.program_id(1)
    # Rows are padded. Two scales are in a word, and eight zeros.
    STRIDE: gl.constexpr = (N + 127) // 128 * 256
    M: gl.constexpr = gl.SliceLayout(3, L)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, M)))[:, None, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, M)))[None, :, None, None]
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, M)))[None, None, :, None]
    r = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first = (split * WARPS + warp) * TURNS
    words += block * 128 + g * 16 + t * 4 + r + first * UNITS * STRIDE
    scales = scales.to(gl.pointer_type(gl.int32), bitcast=True)
    scales += block * 32 + g * 4 + r + first * (STRIDE // 4)
    if zeros is not None:
        zeros += block * 8 + g + first * (STRIDE // 16)
    held = ()  # type: tuple
    for i in gl.static_range(DEPTH):
        inside = first + i < NUM_GROUPS
        held += (_load_group(words, scales, zeros, i, inside, STRIDE, UNITS),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    pairs = x.to(gl.pointer_type(gl.int32), bitcast=True) + g * PAIRS + t + first * (GROUP // 2)
    token = g < num_tokens
    zero = gl.zeros([WARPS, 8, 4, 4], gl.float32, L)
    nothing = gl.zeros([WARPS, 8, 4, 1], gl.float32, L)
    one = gl.full([WARPS, 8, 4, 1], 0x3F803F80 if IS_BF16 else 0x3C003C00, gl.int32, L)
    total = (zero, zero, zero, zero)
    for begin in range(0, TURNS, DEPTH):
        for i in gl.static_range(DEPTH):
            here, later = begin + i, begin + i + DEPTH
            there = token & (first + here < NUM_GROUPS)
            b = _load_inputs(pairs + here * (GROUP // 2), there, UNITS)
            group = held[0]
            following = group
            if TURNS > DEPTH:
                inside = (first + later < NUM_GROUPS) & (later < TURNS)
                following = _load_group(words, scales, zeros, later, inside, STRIDE, UNITS)
            held = held[1:]
            held += (following,)
            product = (zero, zero, zero, zero)
            ones = (nothing, nothing, nothing, nothing)
            for u in gl.static_range(UNITS):
                word = group[0][u]
                a = (
                    _unpack(word, 0, IS_BF16),
                    _unpack(word, 2, IS_BF16),
                    _unpack(word, 1, IS_BF16),
                    _unpack(word, 3, IS_BF16),
                )
                product = _mma(a, b[u], product, IS_BF16)
                ones = _mma((one, one, one, one), b[u], ones, IS_BF16)
            above, below = _half(group[1], False, dtype), _half(group[1], True, dtype)
            zero_above, zero_below = CONSTANT + 8.0, CONSTANT + 8.0
            if zeros is not None:
                eight = group[2] >> r * 8
                zero_above, zero_below = CONSTANT + (eight & 15), CONSTANT + (eight >> 4 & 15)
            total = (
                total[0] + (product[0] - zero_above * ones[0]) * above,
                total[1] + (product[1] - zero_above * ones[1]) * above,
                total[2] + (product[2] - zero_below * ones[0]) * below,
                total[3] + (product[3] - zero_below * ones[1]) * below,
            )
    # [warps, 8 g, 4 t, 4 r, 2 tokens, 2 rows] are summed over warps: [tokens, rows].
    joined = gl.join(gl.join(total[0], total[1]), gl.join(total[2], total[3]))
    joined = gl.reshape(gl.permute(joined, (0, 2, 4, 3, 5, 1)), (WARPS, 8, 64))
    S: gl.constexpr = gl.BlockedLayout([WARPS, 1, 2], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    summed = gl.sum(gl.convert_layout(joined, S), 0)
    token = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(0, S)))[:, None]
    row = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(0, S)))[None, :]
    out += block * 64
    if bias is not None:
        bias += block * 64
    left = N - block * 64
    if SPLITS == 1:
        _store(out, bias, summed, row, token, left, num_tokens, N)
    else:
        parts += block * (SPLITS * 512) + token * 64 + row
        gl.store(parts + split * 512, summed, mask=token < num_tokens)
        tl.debug_barrier()  # the part of every thread is stored before the ticket is taken
        if gl.atomic_add(tickets + block, 1, sem="acq_rel") == SPLITS - 1:
            whole = gl.zeros_like(summed)
            for other in gl.static_range(SPLITS):
                whole += gl.load(parts + other * 512, mask=token < num_tokens, other=0.0, volatile=True)
            _store(out, bias, whole, row, token, left, num_tokens, N)
            gl.store(tickets + block, 0)


class Int4Launch(NamedTuple):
    """Warps of a program, and how many programs share the rows of a block."""

    num_warps: int
    splits: int


def int4_launch(device: tuning.DeviceClass, num_rows: int, num_groups: int) -> Int4Launch:
    """Returns the launch of `int4_linear` for a weight of so many rows and groups of columns, as
    `bench.kernels.linear --int4` finds it on an H200."""
    blocks, splits, most = triton.cdiv(num_rows, _ROWS), 1, 3 * device.num_multiprocessors
    while 2 * blocks * splits <= most and num_groups >= 16 * splits:
        splits *= 2
    return Int4Launch(8 if blocks * splits <= 2 * device.num_multiprocessors else 4, splits)


def tickets_for(num_rows: int, device: torch.device) -> Tensor:
    """Returns the tickets that `int4_linear` needs for a weight of so many rows: int32 zeros."""
    return torch.zeros(triton.cdiv(num_rows, _ROWS), dtype=torch.int32, device=device)


def int4_linear(x: Tensor, weight: Int4Tensors, bias: Tensor | None, tickets: Tensor, out: Tensor) -> Tensor:
    """Writes x · weight^T + bias to `out` and returns it.

    Args:
        x: `[T, K]` of 1 to `MAX_TOKENS` tokens, float16 or bfloat16, contiguous.
        weight: of N rows, and of the type of x.
        bias: `[N]`, or None.
        tickets: of `tickets_for`; may serve any number of products with as many rows, one after the other.
        out: `[T, N]`, contiguous.

    Sums are float32, rounded once at the end, and always the same. Nothing synchronises, so a CUDA graph can
    capture it.

    Raises:
        ValueError: x or out does not fit the weight.
    """
    (num_tokens, dim), (num_rows, num_groups) = x.shape, (out.shape[1], len(weight.scales))
    is_whole = x.is_contiguous() and out.is_contiguous() and x.data_ptr() % 4 == 0
    fits = dim == 16 * len(weight.words) and 2 * num_rows <= weight.words.shape[1]
    if not is_whole or not fits or x.dtype != weight.scales.dtype or num_tokens > MAX_TOKENS:
        raise ValueError(
            f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}, to {tuple(out.shape)} with strides "
            f"{out.stride()}, beside words {tuple(weight.words.shape)} and scales of {weight.scales.dtype}; "
            f"give up to {MAX_TOKENS} contiguous tokens of the weight's columns and type"
        )
    num_warps, splits = int4_launch(tuning.device_class(x.device), num_rows, num_groups)
    parts = None
    if splits > 1:
        size = len(tickets) * splits * 8 * _ROWS
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    _few_tokens_kernel[(len(tickets), splits)](
        x,
        *weight,
        bias,
        out,
        parts,
        tickets if splits > 1 else None,
        num_tokens,
        N=num_rows,
        NUM_GROUPS=num_groups,
        GROUP=dim // num_groups,
        SPLITS=splits,
        num_warps=num_warps,
        maxnreg=128,  # sixteen warps on a multiprocessor
        **tuning.early_options(x.device),
    )
    return out


def int4_linear_reference(x: Tensor, weight: Int4Tensors, bias: Tensor | None, num_rows: int) -> Tensor:
    """Computes `int4_linear` in plain torch, in float32."""
    num_groups, blocks = len(weight.scales), weight.scales.shape[1] // _ROWS

    def rows_of(ordered: Tensor) -> Tensor:  # [G, N] in the order of the scales, as [N, G]
        return ordered.view(num_groups, blocks, 8, 8).permute(1, 3, 2, 0).reshape(-1, num_groups)

    shifts = torch.arange(0, 32, 4, device=x.device)
    numbers = (weight.words.view(-1, blocks, 8, 4, 4, 1) >> shifts & 15).unflatten(-1, (2, 2, 2))
    # [u, block, g, t, r, second column, lower row, columns from 8 on] as [N, K]
    numbers = numbers.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(blocks * _ROWS, -1).float()
    zeros = torch.full_like(numbers[:, :num_groups], 8)
    if weight.zeros is not None:
        zeros = rows_of((weight.zeros.unsqueeze(-1) >> shifts & 15).flatten(1)).float()
    group = numbers.shape[1] // num_groups
    scales = rows_of(weight.scales).float()
    values = (numbers.unflatten(1, (-1, group)) - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)
    out = x.float() @ values.flatten(1)[:num_rows].t()
    return out if bias is None else out + bias.float()
