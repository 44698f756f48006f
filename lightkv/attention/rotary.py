"""Rotary positions apart from the model: turning q and k by a step's cosines and sines, and turning q back by
some positions, with angles in float64. Knows angles and no model. Dimensions beyond 2n do not turn.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RotaryEmbedding:
    """What q and k of a step are to be turned by.

    `cos`, `sin`: `[T, n]`, float32 or of the type of q and k: the cosines and sines of each token's angles,
    times what a scaling asks for. `interleaved`: the dimensions 2i and 2i + 1 of a head are a pair (GPT-J);
    else i and i + n (NeoX).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def rotate(self, x: torch.Tensor) -> None:
        """Turn `x` `[T, H, D]` in place. Sums and products are float32, rounded once at the end."""
        num_pairs = self.cos.shape[1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # x itself where it is wide
        cos, sin = (table.to(wide.dtype)[:, None] for table in (self.cos, self.sin))  # [T, 1, n]
        turning = wide[..., : 2 * num_pairs]
        if self.interleaved:
            first, second = turning[..., ::2], turning[..., 1::2]
        else:
            first, second = turning[..., :num_pairs], turning[..., num_pairs:]
        from_second, from_first = second * sin, first * sin
        first.mul_(cos).sub_(from_second)
        second.mul_(cos).add_(from_first)
        if wide is not x:
            x.copy_(wide)


@dataclass(frozen=True)
class Rotary:
    """The frequencies that q and k were turned by.

    `inverse`: float64 `[n]`, radians a position, of the pairs of dimensions i, i + n of a head (NeoX's layout).
    """

    inverse: torch.Tensor

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Of integer `positions` `[...]`: float64 `[..., n]`, since far positions leave float32 no fraction."""
        return positions.double()[..., None] * self.inverse

    def rotate_back(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """`x` `[T, H, D]`, each token's heads as they would be `by[t]` positions earlier; of x's type."""
        num_pairs = len(self.inverse)
        angles = self.angles(by)[:, None]  # [T, 1, n]
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        first, second, rest = x.split((num_pairs, num_pairs, x.shape[-1] - 2 * num_pairs), dim=-1)
        parts = (first * cos + second * sin, second * cos - first * sin, rest)
        return torch.cat([part.to(x.dtype) for part in parts], dim=-1)
