"""Chunked attention: a query at position p sees the tokens from p // size * size on, as in Llama-4."""

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
    return visible & (positions[None, :] >= (query_positions // data.size * data.size)[:, None])


@triton.jit
def _first_key(data, first, positions):
    return tl.maximum(first, tl.maximum(positions, 0) // data.size * data.size)


@dataclass(frozen=True)
class Chunk(Variant):
    """`size`: of a chunk, in tokens; positive."""

    size: int

    hooks = Hooks(sees=tl.constexpr(_sees), first_key=tl.constexpr(_first_key))
    flags = Flags(has_first_key=True)
    on_hopper = (16, 8)

    def check(self, q: Tensor, num_requests: int) -> None:
        if self.size < 1:
            raise ValueError(f"a chunk must be positive, got {self.size}; leave it out for none")

    def data(self, scale: float) -> _Data:
        return _Data(tl.constexpr(self.size))

    def first_key(self, position: int) -> int:
        return max(position, 0) // self.size * self.size

    def most_keys(self) -> int:
        return self.size

    def for_hopper(self, scale: float) -> dict[str, Any]:
        return {"CHUNK": tl.constexpr(self.size)}

    def sees_reference(self, scored: Scored) -> Tensor:
        return scored.keys[None, :] >= (scored.positions // self.size * self.size)[:, None]
