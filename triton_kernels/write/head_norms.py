"""Norms of the heads of q and K, which the kernel that writes K/V applies before positions: what they are, and
their reference."""

from typing import NamedTuple

import torch
from torch import Tensor


class HeadNorm(NamedTuple):
    """A norm of heads: x / sqrt(mean(x²) + eps) · weight, where the mean is that of a head, or, if it is
    `over_all`, of all heads of a token together.

    `weight`: `[D]`, or one for each head, `[heads, D]`, contiguous; None for factors of 1. `centred`: the mean
    of x is subtracted first. `plus_one`: the factor is 1 + weight. `rounded_before`: the normalised numbers are
    rounded to the type of x before they are multiplied with the weight; the product is rounded in any case.
    """

    weight: Tensor | None
    eps: float
    centred: bool = False
    plus_one: bool = False
    rounded_before: bool = True
    over_all: bool = False

    def check(self, name: str, heads: Tensor) -> None:
        """Raises ValueError where the norm does not fit the heads `name`, `[T, heads, D]`."""
        shapes = (heads.shape[1:], heads.shape[2:])
        weight = self.weight
        if weight is None:
            return
        if weight.shape not in shapes or not weight.is_contiguous() or not weight.is_floating_point():
            raise ValueError(
                f"the weight of the norm of {name} must be [dim] {tuple(shapes[1])} or [heads, dim] "
                f"{tuple(shapes[0])}, contiguous floats; got {weight.dtype} {tuple(weight.shape)} with strides "
                f"{weight.stride()}"
            )


class HeadNorms(NamedTuple):
    """The norms of q and of k; both are over all heads, or neither is."""

    q: HeadNorm
    k: HeadNorm

    def check(self, q: Tensor | None, k: Tensor) -> None:
        """Raises ValueError where the norms do not fit q and k, `[T, heads, D]`."""
        if q is None:
            raise ValueError("norms are given, and no q; pass q, which is normalised in place")
        if self.q.over_all != self.k.over_all:
            raise ValueError("one of the norms is over all heads; both have to be, or neither")
        self.q.check("q", q)
        self.k.check("k", k)


def normalise_reference(x: Tensor, norm: HeadNorm, dtype: torch.dtype) -> Tensor:
    """Normalises heads `[T, heads, D]` in plain torch; returns numbers of `dtype`, to which it rounds."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = (1, 2) if norm.over_all else (2,)
    if norm.centred:
        wide = wide - wide.mean(dims, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + norm.eps)
    if norm.rounded_before:
        wide = wide.to(dtype).to(wide.dtype)
    if norm.weight is not None:
        weight = norm.weight.to(wide.dtype)
        wide = wide * (weight + 1.0 if norm.plus_one else weight)
    return wide.to(dtype)
