"""Writes heads where K or V is quantised: a whole head of each token is one tile, over which its scale is
found."""

import triton
import triton.language as tl

from .head_tiles import write_elements
from .load_heads import load_dims, norm_stats
from .records import Store, dims_block, place_of


@triton.jit
def _find_angles(angles, tile, PAIRS: tl.constexpr):
    """Returns pointers to each token's cosines and sines, [BLOCK_T, 1]."""
    cos, sin = tile.token, tile.token
    if PAIRS > 0:
        cos = angles.cos + tile.token[:, None] * angles.stride_cos
        sin = angles.sin + tile.token[:, None] * angles.stride_sin
    return cos, sin


@triton.jit
def _load_head(source, heads, head, angles, valid):
    """Loads a head of each token, float32 [BLOCK_T, BLOCK_D]; adds the bias, normalises, and rotates the
    first 2 * PAIRS dims. A dim and its partner are both loaded by index, so that no tile has to be cut."""
    D: tl.constexpr = heads.DIM
    PAIRS: tl.constexpr = heads.PAIRS
    stats = norm_stats(source, heads, head, valid)
    dims = tl.arange(0, dims_block(D))
    numbers = load_dims(source, heads, head, dims, dims < D, valid, stats).to(tl.float32)
    if PAIRS > 0:
        is_paired = dims < 2 * PAIRS
        if heads.INTERLEAVED:
            is_first = dims % 2 == 0
            partner, pair = dims ^ 1, dims // 2
        else:
            is_first = dims < PAIRS
            pair = tl.where(is_first, dims, dims - PAIRS)
            partner = tl.where(is_first, dims + PAIRS, pair)
        partners = load_dims(source, heads, head, partner, is_paired, valid, stats).to(tl.float32)
        is_loaded = valid[:, None] & is_paired[None, :]
        cosines = tl.load(angles[0] + pair[None, :], mask=is_loaded, other=0.0).to(tl.float32)
        sines = tl.load(angles[1] + pair[None, :], mask=is_loaded, other=0.0).to(tl.float32)
        rotated = numbers * cosines + partners * tl.where(is_first[None, :], -sines, sines)
        numbers = tl.where(is_paired[None, :], rotated, numbers)
    return numbers


@triton.jit
def _write_head(source, stored, slot, heads, head, angles, tile, IN_PLACE: tl.constexpr):
    D: tl.constexpr = heads.DIM
    BLOCK_T: tl.constexpr = tile.valid.shape[0]
    numbers = _load_head(source, heads, head, angles, tile.valid)
    if IN_PLACE:
        tl.debug_barrier()  # other threads read the elements that a thread writes
    # After the loads, which otherwise would wait for the slots.
    target, scales = place_of(source, stored, slot, head, IN_PLACE)
    write_elements(numbers, target, scales, tile.valid, heads.ELEMENTS, D, dims_block(D), BLOCK_T)


QUANTISED = Store(tl.constexpr(_find_angles), tl.constexpr(_write_head), tl.constexpr(True))
