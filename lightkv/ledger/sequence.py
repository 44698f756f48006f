"""One open sequence: its row of the token table, what it shares, and how many slots it has.

Knows no token id beyond its prompt's, no slot and no count of the pool. Only the ledger changes one.
"""

from collections.abc import Iterator

from .prefix_tree import Segment


class Sequence:
    """A row, whose entries 0 to `length` have slots: first those that it shares, then its own.

        entry      0                    shared               length          len(prompt) + outputs
                   ├──── shared path ────┼──── private tail ───┼─── no slots yet ───┤
        held as    segments of the tree   its own

    An entry is a position less what has been dropped (`release`, `keep`): as long as nothing has, the two are
    the same. Once something is dropped out of the path, the path is in two parts:

        position   0         num_sinks       num_sinks + dropped
                   ├─ sink_node ─┤   dropped, no entries   ├─ node ──┼─ private tail ─┤

    row: 1 and up; 0 once closed. prompt: int32 bytes. shared: entries that are in segments. length: entries
    that have a slot. num_hit: tokens found in the cache when it was opened. dropped: positions that it has
    passed and holds no more; the next token's position is `length + dropped`. num_sinks: its first entries that
    stay whatever is dropped, as `release` was told.
    """

    __slots__ = (
        "dropped",
        "length",
        "node",
        "num_hit",
        "num_sinks",
        "prompt",
        "root",
        "row",
        "shared",
        "sink_node",
    )

    def __init__(self, row: int, prompt: bytes, root: Segment, node: Segment, shared: int) -> None:
        self.row = row
        self.prompt = prompt
        self.root = root
        self.node = node
        # The root where nothing is held above the gap; None: the path has no gap.
        self.sink_node: Segment | None = None
        self.shared = shared
        self.length = shared
        self.num_hit = shared
        self.dropped = 0
        self.num_sinks = 0

    @property
    def num_private(self) -> int:
        """Tokens that this sequence alone holds."""
        return self.length - self.shared

    @property
    def position(self) -> int:
        """The position of its next token."""
        return self.length + self.dropped

    def path(self) -> Iterator[Segment]:
        """The segments that it holds, the deepest first."""
        row = self.row
        for end in (self.node, self.sink_node):
            node = end
            while node is not None and node.parent is not None and row in node.holders:
                yield node
                node = node.parent

    def __repr__(self) -> str:
        dropped = f", dropped={self.dropped}" if self.dropped else ""
        return f"Sequence(row={self.row}, length={self.length}, shared={self.shared}{dropped})"
