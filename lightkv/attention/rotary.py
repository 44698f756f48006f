"""Rotary positions apart from the model: turning q back by some positions, with angles in float64.

Knows frequencies and no model. A pair of dimensions i, i + n of a head turns by `inverse[i]` a position
(NeoX's layout); dimensions beyond 2n do not turn.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotary:
    """The frequencies that q and k were turned by. `inverse`: float64 `[n]`, radians a position."""

    inverse: torch.Tensor

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Of integer `positions` `[...]`: float64 `[..., n]`, since far positions leave float32 no fraction."""
        return positions.double()[..., None] * self.inverse

    def turn_back(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """`x` `[T, H, D]`, each token's heads as they would be `by[t]` positions earlier; of x's type."""
        num_pairs = len(self.inverse)
        angles = self.angles(by)[:, None]  # [T, 1, n]
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        first, second, rest = x.split((num_pairs, num_pairs, x.shape[-1] - 2 * num_pairs), dim=-1)
        parts = (first * cos + second * sin, second * cos - first * sin, rest)
        return torch.cat([part.to(x.dtype) for part in parts], dim=-1)
