"""Rotary positions apart from any model: rotates q and k by a step's cosines and sines, and rotates q back by a
number of positions with angles in float64."""

from dataclasses import dataclass

import torch

from lightkv.triton_kernels.norms import norm_reference
from lightkv.triton_kernels.write.inputs import HeadNorms, Rotation
from lightkv.triton_kernels.write.write_kv import rotate_in_place, rotate_reference


@dataclass(frozen=True)
class RotaryEmbedding:
    """The cosines and sines that q and k of a step are rotated by.

    `cos`, `sin`: `[T, n]`, float32 or of the type of q and k, of each token's angles, times the attention
    factor of a scaling. Dims from 2n on are not rotated. `interleaved`: dims 2i and 2i + 1 of a head are a pair
    (GPT-J); otherwise dims i and i + n (NeoX). `norms`: of q and k, which come before; None for none.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    norms: HeadNorms | None = None

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Normalises q `[T, H, D]` and k `[T, num_kv_heads, D]`, and rotates them, in place."""
        if self.norms is not None:
            for heads, norm in ((q, self.norms.q), (k, self.norms.k)):
                heads.copy_(norm_reference(heads, norm, heads.dtype, self.norms.dims))
        self.rotate(q)
        self.rotate(k)

    def rotate(self, x: torch.Tensor) -> None:
        """Rotates `x` `[T, H, D]` in place. Sums and products are float32, rounded once at the end."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # x itself where it is wide
        rotate_in_place(wide, Rotation(self.cos, self.sin, self.interleaved))
        if wide is not x:
            x.copy_(wide)


@dataclass(frozen=True)
class Rotary:
    """The frequencies that q and k were rotated by.

    `inverse`: float64 `[n]`, radians per position, of the pairs of dims i and i + n of a head (NeoX's layout).
    """

    inverse: torch.Tensor

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the angles at integer `positions` `[...]`, float64 `[..., n]`: float32 would leave far
        positions no fraction."""
        return positions.double()[..., None] * self.inverse

    def rotate_back(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Returns `x` `[T, H, D]` with each token's heads rotated to `by[t]` positions earlier; of x's type."""
        angles = self.angles(by)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rotate_reference(x, Rotation(angles.cos().to(dtype), -angles.sin().to(dtype))).to(x.dtype)
