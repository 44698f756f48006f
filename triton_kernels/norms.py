"""Norms, as the kernels of layers and of new heads compute them, and their reference."""

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """A norm over the last dim: x / sqrt(mean(x²) + eps) · weight + bias.

    `weight`, `bias`: `[C]`; None for factors of 1 and for no bias. `centred`: the mean is subtracted first
    (LayerNorm). `plus_one`: the factor is 1 + weight (Gemma). `rounded_before`: the normalised row is rounded
    to the dtype of x before it is multiplied with the weight (Llama); otherwise only the result is rounded.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool = False
    plus_one: bool = False
    rounded_before: bool = True


def norm_reference(x: Tensor, norm: Norm, dtype: torch.dtype, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """Normalises x in plain torch; returns numbers of `dtype`, to which it rounds. `dims`: over which means are
    taken."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm.centred:
        wide = wide - wide.mean(dims, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + norm.eps)
    if norm.rounded_before:
        wide = wide.to(dtype).to(wide.dtype)
    if norm.weight is not None:
        weight = norm.weight.to(wide.dtype)
        wide = wide * (weight + 1.0 if norm.plus_one else weight)
    if norm.bias is not None:
        wide = wide + norm.bias.to(wide.dtype)
    return wide.to(dtype)
