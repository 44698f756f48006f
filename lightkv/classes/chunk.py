"""The class of layers that see the tokens of a query's own chunk, of `size` tokens.

    entry      0            size          2 size         3 size   length
               ├── passed ────┼─── passed ──┼── slack ──────┼─ seen ─┤

A chunk is kept until the sequence has gone `slack` positions into the next one; then all of it passes.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Chunk:
    """The earlier tokens of a query's chunk are seen."""

    size: int
    slack: int
    reuses: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"chunks of {self.size:,} tokens"

    def first_seen(self, position: int) -> int:
        return position // self.size * self.size

    def boundary(self, limit: int) -> int:
        return limit // self.size * self.size

    def first_kept(self, length: int) -> int:
        return max(length - self.slack, 0) // self.size * self.size

    def gone_at(self, position: int) -> int:
        return (position // self.size + 1) * self.size + self.slack
