"""The class of layers that see a window of `size` tokens: the query's own, and those before it.

    entry      0        length - slack - size + 1         length - size + 1     length
               ├─ passed ─────────┼── slack, to go back by ───────┼───── seen ─────┤

In a decode step, the new token takes the slot of the one that passes.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Window:
    """The `size - 1` tokens before a query are seen."""

    size: int
    slack: int
    reuses: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"the last {self.size:,} tokens"

    def first_seen(self, position: int) -> int:
        return max(position - self.size + 1, 0)

    def boundary(self, limit: int) -> int:
        return limit if self.size == 1 else 0

    def first_kept(self, length: int) -> int:
        return max(length - self.slack - self.size + 1, 0)

    def gone_at(self, position: int) -> int:
        return position + self.size + self.slack
