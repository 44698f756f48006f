"""Quantising heads of K and V in plain torch: the specification of what the kernels write and read.

    scale   = max |x| / largest                      symmetric; largest is 127, 7 or 448
    scale   = (max x - min x) / 15                   with a zero point, which is min x + 8 * scale
    element = round((x - zero_point) / scale)        to even; stored as two's complement, or as e4m3
    x       ≈ element * scale + zero_point

With a zero point, x is cut off at ±65,280 first, so that the zero point and every value that is read are
finite in float16, whatever the scale is rounded to. The element 2i of 4 bits is the low nibble of byte i.
Scales are rounded to their type before they are used, so reading applies the numbers that writing did.
"""

import torch
from torch import Tensor

from .kv_format import Elements, KVFormat

SMALLEST_SCALE = 2.0**-17  # float16 has seven bits of precision there
LARGEST_SCALE = 65504.0
LARGEST_WITH_ZERO_POINT = 65280.0  # of a value: the largest of float16, less what rounding may add


def hadamard(dim: int, device: torch.device | None = None) -> Tensor:
    """Returns the matrix of the Hadamard transform, float32 `[dim, dim]`, symmetric and its own inverse, in
    blocks of the largest power of 2 that divides `dim`."""
    block = dim & -dim
    rows = torch.arange(dim, device=device)
    both = rows[:, None] & rows[None, :] & (block - 1)
    for shift in (8, 4, 2, 1):
        both = both ^ (both >> shift)
    signs = 1 - 2 * (both & 1)
    same_block = rows[:, None] // block == rows[None, :] // block
    return torch.where(same_block, signs, 0).float() * block**-0.5


def apply_hadamard(x: Tensor) -> Tensor:
    """Returns heads `[..., dim]`, multiplied by `hadamard`, in their own type. Doing it twice gives x again."""
    return x @ hadamard(x.shape[-1], x.device).to(x.dtype)


def quantise(
    x: Tensor, elements: Elements, scale_dtype: torch.dtype, static: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantises heads.

    Args:
        x: `[..., dim]`, before the Hadamard transform.
        elements: how they are stored; quantised.
        scale_dtype: of the scales.
        static: the scales, if the elements have static ones: broadcasts with `[..., 1]`.

    Returns:
        The elements, `[..., dim]` of `elements.stored`, or `[..., dim / 2]` of 4 bits, and the scales `[...,
        elements.num_scales(dim)]`, those of the groups and then their zero points.
    """
    dim = x.shape[-1]
    x = x.float()
    if elements.has_hadamard:
        x = apply_hadamard(x)
    if elements.has_zero_point:
        x = x.clamp(-LARGEST_WITH_ZERO_POINT, LARGEST_WITH_ZERO_POINT)
    x = x.unflatten(-1, (elements.groups(dim), -1))
    zero_point = None
    if elements.is_static:
        assert static is not None
        scale = static.float().expand(*x.shape[:-2], 1)
    elif elements.has_zero_point:
        low, high = x.amin(-1), x.amax(-1)
        scale = rounded((high - low) * (1 / 15), scale_dtype)
        zero_point = (low + scale * 8).to(scale_dtype).float()
    else:
        scale = rounded(x.abs().amax(-1) * (1 / elements.largest), scale_dtype)
    if zero_point is not None:
        x = x - zero_point[..., None]
    x = (x * (1.0 / scale)[..., None]).flatten(-2)
    scales = scale if zero_point is None else torch.cat((scale, zero_point), -1)
    return pack(x, elements), scales.to(scale_dtype)


def rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns float32 scales as `dtype` stores them, within the bounds of float16."""
    return scale.clamp(SMALLEST_SCALE, LARGEST_SCALE).to(dtype).float()


def pack(x: Tensor, elements: Elements) -> Tensor:
    """Rounds x `[..., dim]`, divided by its scales, to stored elements."""
    if elements.is_float:
        return x.clamp(-elements.largest, elements.largest).to(torch.float8_e4m3fn)
    lowest = -8.0 if elements.has_zero_point else -elements.largest
    x = x.round().clamp(lowest, elements.largest).to(torch.int8)
    if elements.bits == 8:
        return x
    nibbles = x.view(torch.uint8) & 15
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def unpack(stored: Tensor, elements: Elements) -> Tensor:
    """Returns the stored numbers of heads, float32 `[..., dim]`."""
    if elements.bits != 4:
        return stored.float()
    nibbles = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    return (nibbles ^ 8).float() - 8


def dequantise(stored: Tensor, scales: Tensor, elements: Elements) -> Tensor:
    """Returns heads, float32 `[..., dim]`, from their elements and scales `[..., elements.num_scales(dim)]`.
    Where a Hadamard matrix multiplied them, they still are its products, as queries that are multiplied, too,
    attend to them."""
    x = unpack(stored, elements)
    groups = scales.shape[-1] // (2 if elements.has_zero_point else 1)
    x = x.unflatten(-1, (groups, -1)) * scales[..., :groups, None].float()
    if elements.has_zero_point:
        x = x + scales[..., groups:, None].float()
    return x.flatten(-2)


def split_scales(scales: Tensor, layer_format: KVFormat, k_dim: int) -> tuple[Tensor, Tensor]:
    """Splits the scales and zero points of heads into those of K and those of V."""
    of_k = layer_format.elements.num_scales(k_dim)
    return scales[..., :of_k], scales[..., of_k:]
