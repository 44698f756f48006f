"""Loads heads as they are projected, adds their bias and normalises them."""

import triton
import triton.language as tl

from .records import dims_block

PER_HEAD, OVER_ALL = 1, 2  # what a norm's mean is taken over; 0 is no norm
_OVER_ALL = tl.constexpr(OVER_ALL)


@triton.jit
def _load_constants(numbers, stride, heads, head, dims, in_head, valid):
    """Loads what each head has one of for each dim, float32 [1, dims], or [BLOCK_T, dims] where the tile's rows
    are heads."""
    if heads.NORM.WHOLE:
        mask = valid[:, None] & in_head[None, :]
        row = tl.load(numbers + head * stride + dims[None, :], mask=mask, other=0.0)
    else:
        row = tl.load(numbers + head * stride + dims, mask=in_head, other=0.0)[None, :]
    return row.to(tl.float32)


@triton.jit
def _load_projected(source, heads, head, dims, in_head, valid):
    tile = tl.load(source + dims[None, :], mask=valid[:, None] & in_head[None, :], other=0.0)
    if heads.HAS_BIAS:
        bias = _load_constants(heads.bias, heads.stride_bias, heads, head, dims, in_head, valid)
        tile = tile.to(tl.float32) + bias
    return tile


@triton.jit
def norm_stats(source, heads, head, valid):
    """Returns the mean, which is 0 where it is not subtracted, and the factor by which the heads are
    normalised, each float32 [BLOCK_T]; without a norm, they have no meaning."""
    mean, factor = valid, valid
    if heads.NORM.KIND > 0:
        D: tl.constexpr = heads.DIM
        COUNT: tl.constexpr = heads.DIM * heads.NORM.HEADS
        dims = tl.arange(0, dims_block(D))
        numbers = _load_projected(source, heads, head, dims, dims < D, valid).to(tl.float32)
        mean = tl.zeros([valid.shape[0]], tl.float32)
        if heads.NORM.CENTRED:
            mean = tl.sum(numbers, 1)
            if heads.NORM.KIND == _OVER_ALL:
                mean = tl.zeros_like(mean) + tl.sum(mean, 0)
            mean = mean / COUNT
            numbers = tl.where(valid[:, None] & (dims < D)[None, :], numbers - mean[:, None], 0.0)
        squares = tl.sum(numbers * numbers, 1)
        if heads.NORM.KIND == _OVER_ALL:
            squares = tl.zeros_like(squares) + tl.sum(squares, 0)
        factor = tl.rsqrt(squares / COUNT + heads.norm_eps)
    return mean, factor


@triton.jit
def load_dims(source, heads, head, dims, in_head, valid, stats):
    """Loads `dims` of a head of each token, [BLOCK_T, dims]; in float32 with the bias added and normalised, if
    there is a bias or a norm. `stats`: of `norm_stats`."""
    tile = _load_projected(source, heads, head, dims, in_head, valid)
    if heads.NORM.KIND > 0:
        tile = tile.to(tl.float32)
        if heads.NORM.CENTRED:
            tile = tile - stats[0][:, None]
        tile = tile * stats[1][:, None]
        if heads.NORM.ROUNDED_BEFORE:
            tile = tile.to(source.dtype.element_ty).to(tl.float32)
        if heads.NORM.HAS_WEIGHT:
            weight = _load_constants(heads.norm_weight, heads.stride_norm, heads, head, dims, in_head, valid)
            if heads.NORM.PLUS_ONE:
                weight += 1.0
            tile = tile * weight
        tile = tile.to(source.dtype.element_ty).to(tl.float32)
        tile = tl.where(in_head[None, :], tile, 0.0)
    return tile
