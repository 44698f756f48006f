"""A sliding window: a query sees itself and the `size - 1` tokens before it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .hooks import Flags, Hooks
from .variant import Scored, Variant


class _Data(NamedTuple):
    size: Any  # constexpr


@triton.jit
def _sees(data, state, visible, query_positions, positions):
    return visible & (positions[None, :] > query_positions[:, None] - data.size)


@triton.jit
def _first_key(data, first, positions):
    return tl.maximum(first, positions - data.size + 1)


@dataclass(frozen=True)
class Window(Variant):
    """`size`: how many tokens a query sees, itself included; positive."""

    size: int

    hooks = Hooks(sees=tl.constexpr(_sees), first_key=tl.constexpr(_first_key))
    # A window is only a few tiles long: all of them are masked.
    flags = Flags(has_first_key=True, is_short=True)
    on_hopper = (16, 8)

    def check(self, q: Tensor, num_requests: int) -> None:
        if self.size < 1:
            raise ValueError(f"a window must be positive, got {self.size}; leave it out for none")

    def data(self, scale: float) -> _Data:
        return _Data(tl.constexpr(self.size))

    def first_key(self, position: int) -> int:
        return max(position - self.size + 1, 0)

    def most_keys(self) -> int:
        return self.size

    def for_hopper(self, scale: float) -> dict[str, Any]:
        return {"WINDOW": tl.constexpr(self.size)}

    def sees_reference(self, scored: Scored) -> Tensor:
        return scored.keys[None, :] > scored.positions[:, None] - self.size
