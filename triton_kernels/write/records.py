"""What the kernel that writes K/V takes together: named tuples of pointers, strides and constants. Names in
capitals are constants of a compilation."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class NormConstants(NamedTuple):
    """KIND: what the mean of a norm is over (`load_heads`). WHOLE: a program writes all heads of a token, which
    are HEADS; otherwise HEADS is 1. HAS_WEIGHT: there is one. CENTRED, PLUS_ONE, ROUNDED_BEFORE: as in
    `Norm`."""

    KIND: Any
    WHOLE: Any
    HAS_WEIGHT: Any
    CENTRED: Any
    PLUS_ONE: Any
    ROUNDED_BEFORE: Any
    HEADS: Any


class NewHeads(NamedTuple):
    """The heads of q, K or V as they are projected, `[T, heads, DIM]`, and their bias, `[heads, DIM]`, or None;
    the weight and the epsilon of their norm, or None. The first 2 * PAIRS dims are rotated, INTERLEAVED or by
    halves. ELEMENTS: of `constants_of`, how the heads are stored. NORM: `NormConstants`."""

    data: Any
    stride_token: Any
    stride_head: Any
    bias: Any
    stride_bias: Any
    norm_weight: Any
    stride_norm: Any
    norm_eps: Any
    HAS_BIAS: Any
    DIM: Any
    PAIRS: Any
    INTERLEAVED: Any
    ELEMENTS: Any
    NORM: Any


class StoredHeads(NamedTuple):
    """Where the heads of K or V are stored by slot, and where their scales and zero points are, from
    FIRST_SCALE on; None where nothing is quantised."""

    data: Any
    stride_slot: Any
    stride_head: Any
    scales: Any
    stride_scales_slot: Any
    stride_scales_head: Any
    HAS_SCALES: Any
    FIRST_SCALE: Any


class Angles(NamedTuple):
    """Cosines and sines, a row for each token; None for no rotation."""

    cos: Any
    sin: Any
    stride_cos: Any
    stride_sin: Any


class Tile(NamedTuple):
    """The rows of a program, each `[BLOCK_T]`: which of the step's tokens they are, and which of them exist.
    They are tokens, of which a program writes one head after the other, or the heads of one token."""

    token: Any
    valid: Any


class Store(NamedTuple):
    """How a program writes a head of each of its tokens, as two hooks.

    `angles(angles, tile, PAIRS)` returns what `write` needs of the rotation, once a program.
    `write(source, stored, slot, heads, head, angles, tile, IN_PLACE)` loads a head of each row from the
    pointers `source`, adds its bias, normalises it, rotates it, and stores it with its scales: in `stored`,
    `StoredHeads`, at `slot`, or IN_PLACE at `source` again; `source` and `slot` are `[BLOCK_T, 1]`. `head`: its
    number, or `[BLOCK_T, 1]` where the rows are heads.
    APART: two programs write K and V of a head, and not one.
    """

    angles: Any
    write: Any
    APART: Any


class Shape(NamedTuple):
    """The constants of a launch: programs of K and V, programs of q, heads and tokens of each; and whether the
    next launch may begin early."""

    KV_PROGRAMS: Any
    Q_PROGRAMS: Any
    HEADS: Any
    BLOCK_T: Any
    EARLY: Any


@triton.constexpr_function
def dims_block(dims):
    """Returns the width of a tile of so many dims, as `tuning.padded_dim` does."""
    return max(16, triton.next_power_of_2(dims))


@triton.jit
def place_of(source, stored, slot, head, IN_PLACE: tl.constexpr):
    """Returns pointers to where a head of each token and its scales are stored, [BLOCK_T, 1]. Those to scales
    have no meaning where there are none."""
    target = source if IN_PLACE else stored.data + slot * stored.stride_slot + head * stored.stride_head
    scales = target
    if stored.HAS_SCALES and not IN_PLACE:
        scales = stored.scales + slot * stored.stride_scales_slot + head * stored.stride_scales_head
        scales += stored.FIRST_SCALE
    return target, scales
