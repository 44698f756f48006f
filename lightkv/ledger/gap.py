"""The gap in a sequence that has dropped tokens (`TokenLedger.release`, `keep`)."""

from typing import NamedTuple

from .prefix_tree import Segment


class Gap(NamedTuple):
    """What a sequence has dropped; all zero where it holds all its tokens.

        position   0       start                      start + dropped
                   ├─ node ─┤   dropped, no entries    ├─ the other entries ─┤

    start: the first entries, which stay whatever is dropped (`sink_tokens` of `TokenLedger.release`); `keep`
    may have dropped tokens anywhere after them. dropped: positions that are not held any more. node: the last
    segment before the gap, or the root where none is held there; None where the gap is not in the shared path.
    """

    start: int = 0
    dropped: int = 0
    node: Segment | None = None

    def require_start(self, start: int) -> None:
        """Raises ValueError where the next tokens to be dropped cannot begin after the first `start`."""
        if self.dropped and (start > self.start or (start < self.start and self.node is not None)):
            raise ValueError(f"{self.start} sinks were kept so far; {start} cannot be from now on")

    def widened(self, start: int, count: int) -> "Gap":
        """Returns the gap once `count` more tokens are dropped, and the first `start` ones stay."""
        return Gap(start, self.dropped + count, self.node)

    def after(self, node: Segment | None) -> "Gap":
        """Returns the gap once `node` is the last segment before it."""
        return self if node is self.node else Gap(self.start, self.dropped, node)

    def cut(self, length: int) -> "Gap":
        """Returns the gap once only the first `length` entries are left: none if they all come before it."""
        return NO_GAP if length <= self.start else self


NO_GAP = Gap()
