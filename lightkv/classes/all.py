"""The class of layers that see everything.

entry      0                                length
           ├────── seen, and kept ────────────┤
"""

from dataclasses import dataclass
from typing import ClassVar

NEVER = 1 << 60  # a length that no sequence reaches


@dataclass(frozen=True)
class All:
    """Every earlier token is seen."""

    size: int = 0
    slack: int = 0
    reuses: ClassVar[bool] = False

    def __str__(self) -> str:
        return "all tokens"

    def first_seen(self, position: int) -> int:
        return 0

    def boundary(self, limit: int) -> int:
        return 0

    def first_kept(self, length: int) -> int:
        return 0

    def gone_at(self, position: int) -> int:
        return NEVER
