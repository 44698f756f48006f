"""Writes heads in the type they are computed in: each half of the rotated dims is a tile of its own, so a dim
is loaded once, and the program's cosines and sines serve all of its heads."""

import triton
import triton.language as tl

from .load_heads import load_dims, norm_stats
from .records import Store, dims_block, place_of


@triton.constexpr_function
def _pairs_block(pairs):
    return triton.next_power_of_2(max(pairs, 1))


@triton.jit
def _load_angles(angles, tile, PAIRS: tl.constexpr):
    """Returns the cosines and the sines of all pairs, float32 [BLOCK_T, pairs]."""
    cosines, sines = tile.token, tile.token
    if PAIRS > 0:
        pair = tl.arange(0, _pairs_block(PAIRS))
        is_pair = tile.valid[:, None] & (pair < PAIRS)[None, :]
        row = tile.token[:, None]
        cosines = tl.load(angles.cos + row * angles.stride_cos + pair[None, :], mask=is_pair, other=0.0)
        sines = tl.load(angles.sin + row * angles.stride_sin + pair[None, :], mask=is_pair, other=0.0)
        cosines, sines = cosines.to(tl.float32), sines.to(tl.float32)
    return cosines, sines


@triton.jit
def _store_dims(target, numbers, dims, valid, END: tl.constexpr):
    numbers = numbers.to(target.dtype.element_ty)
    tl.store(target + dims[None, :], numbers, mask=valid[:, None] & (dims < END)[None, :])


@triton.jit
def _write_head(source, stored, slot, heads, head, angles, tile, IN_PLACE: tl.constexpr):
    """Adds the bias, normalises, rotates the first 2 * PAIRS dims, and copies the other dims."""
    D: tl.constexpr = heads.DIM
    PAIRS: tl.constexpr = heads.PAIRS
    HAS_REST: tl.constexpr = 2 * PAIRS < D and not (IN_PLACE and not heads.HAS_BIAS and heads.NORM.KIND == 0)
    BLOCK_T: tl.constexpr = tile.valid.shape[0]
    BLOCK_PAIRS: tl.constexpr = _pairs_block(PAIRS)
    valid = tile.valid
    target, _ = place_of(source, stored, slot, head, IN_PLACE)
    stats = norm_stats(source, heads, head, valid)
    pairs = tl.arange(0, BLOCK_PAIRS)
    both = tl.arange(0, 2 * BLOCK_PAIRS)
    rest_dims = tl.arange(0, dims_block(D - 2 * PAIRS)) + 2 * PAIRS
    if HAS_REST:
        rest = load_dims(source, heads, head, rest_dims, rest_dims < D, valid, stats)
    if PAIRS > 0:
        if heads.INTERLEAVED:
            numbers = load_dims(source, heads, head, both, both < 2 * PAIRS, valid, stats).to(tl.float32)
            first, second = tl.split(tl.reshape(numbers, [BLOCK_T, BLOCK_PAIRS, 2]))  # [BLOCK_T, BLOCK_PAIRS]
        else:
            first = load_dims(source, heads, head, pairs, pairs < PAIRS, valid, stats).to(tl.float32)
            second = load_dims(source, heads, head, pairs + PAIRS, pairs < PAIRS, valid, stats).to(tl.float32)
        rotated_first = first * angles[0] - second * angles[1]
        rotated_second = second * angles[0] + first * angles[1]
    if IN_PLACE:
        tl.debug_barrier()  # several threads read an element of a small tile, and one writes it
    if HAS_REST:
        _store_dims(target, rest, rest_dims, valid, D)
    if PAIRS > 0:
        if heads.INTERLEAVED:
            rotated = tl.reshape(tl.join(rotated_first, rotated_second), [BLOCK_T, 2 * BLOCK_PAIRS])
            _store_dims(target, rotated, both, valid, 2 * PAIRS)
        else:
            _store_dims(target, rotated_first, pairs, valid, PAIRS)
            _store_dims(target + PAIRS, rotated_second, pairs, valid, PAIRS)


AS_COMPUTED = Store(tl.constexpr(_load_angles), tl.constexpr(_write_head), tl.constexpr(False))
