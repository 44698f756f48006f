"""Soft-capping: scores become cap * tanh(score / cap), as in Gemma-2 and Grok-1."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hooks import Hooks
from .variant import Scored, Variant


class _Data(NamedTuple):
    """`cap_scale`: twice what makes the argument of tanh of a dot product."""

    cap_scale: float


@triton.jit
def _score(data, state, loaded, scores, score_scale):
    return 2.0 * tl.sigmoid(scores * data.cap_scale) - 1.0  # tanh


@dataclass(frozen=True)
class Softcap(Variant):
    """`cap`: the bound of scores, positive."""

    cap: float

    hooks = Hooks(score=tl.constexpr(_score))
    on_hopper = (16, 8)

    def check(self, q: Tensor, num_requests: int) -> None:
        if not self.cap > 0:
            raise ValueError(f"a soft-cap must be positive, got {self.cap}; leave it out for no cap")

    def data(self, scale: float) -> _Data:
        return _Data(2.0 * scale / self.cap)

    def rescale(self, scale: float) -> float:
        return self.cap

    def for_hopper(self, scale: float) -> dict[str, Any]:
        return {"cap_scale": self.data(scale).cap_scale, "SOFTCAP": tl.constexpr(True)}

    def cap_scores(self, scores: Tensor) -> Tensor:
        """Returns scaled scores, capped."""
        return self.cap * torch.tanh(scores / self.cap)

    def scores_reference(self, scores: Tensor, scored: Scored) -> Tensor:
        return self.cap_scores(scores)
