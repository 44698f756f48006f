"""One open sequence: its row of the token table, what it shares, and how many slots it has. Only the ledger
changes one."""

import reprlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from lightkv.triton_kernels.layout.ring import Ring

from .prefix_tree import Namespace, Segment
from .sessions import Session


def require_sequence(value: object) -> None:
    """Raises TypeError unless `value` is a sequence of a ledger."""
    if not isinstance(value, Sequence):
        raise TypeError(
            f"got {reprlib.repr(value)} ({type(value).__name__}); give what open or fork returned"
        )


def require_list(sequences: Seq["Sequence"]) -> None:
    """Raises TypeError unless these can be the sequences of a batch."""
    if not isinstance(sequences, Seq):
        raise TypeError(f"sequences is {reprlib.repr(sequences)}; give a list, such as [sequence]")


def require_lists(sequences: Seq["Sequence"], counts: Seq[int]) -> None:
    """Raises TypeError unless both can be the lists of a batch, ValueError if one is longer than the other."""
    require_list(sequences)
    if not isinstance(counts, Seq):
        raise TypeError(f"counts is {reprlib.repr(counts)}; give a list with a count for each sequence")
    if len(sequences) != len(counts):
        raise ValueError(f"{len(sequences)} sequences and {len(counts)} counts; give one count for each")


class Sequence:
    """A row whose first `length` entries have slots: shared entries first, then private ones.

        entry      0                    shared               length          len(prompt) + outputs
                   ├──── shared path ────┼──── private tail ───┼─── no slots yet ───┤
        held as    segments of the tree   its own

    An entry is a position less the positions that were dropped before it (`release`, `keep`). Entries and
    positions are the same while nothing was dropped. Once something was dropped out of the path, the path has
    two parts:

        position   0       num_sink_tokens         num_sink_tokens + dropped
                   ├─ sink_node ─┤   dropped, no entries   ├─ node ──┼─ private tail ─┤

    row: 1 and up; 0 once closed. prompt: int32 bytes. node: the last segment of the path, or the root. shared:
    entries that are in segments. length: entries that have a slot. num_hit: tokens found in the cache by
    `open`. dropped: positions that the sequence has passed and no longer holds; the next token's position is
    `length + dropped`. num_sink_tokens: the first entries, which stay when others are dropped (`release`).
    session: the one that protects its tokens once it has closed, if any.

    ring: its row is a ring: once `length` is `ring.capacity`, new tokens take the slots of old ones, and
    `dropped` grows instead. ring_end: the highest `position` that a ring ever had, also by steps that were
    undone (`shrink`), which have written to its slots. ring_undone: how many of these tokens were undone and
    not computed again, so that `position + ring_undone == ring_end`.

    cross: the cross sequence that it reads (`TokenLedger.open_cross`). num_readers: None except for a cross
    sequence; how many open sequences read it. reader_namespaces: of a cross sequence; where its readers' tokens
    are cached. is_kept: False for a cross sequence that was closed, and goes when its last reader closes.
    """

    __slots__ = (
        "cross",
        "dropped",
        "is_kept",
        "length",
        "node",
        "num_hit",
        "num_readers",
        "num_sink_tokens",
        "prompt",
        "reader_namespaces",
        "ring",
        "ring_end",
        "ring_undone",
        "root",
        "row",
        "session",
        "shared",
        "sink_node",
    )

    def __init__(self, row: int, prompt: bytes, root: Segment, node: Segment, shared: int) -> None:
        self.row = row
        self.prompt = prompt
        self.root = root
        self.node = node
        # The last segment before the gap, or the root where none is held there; None: the path has no gap.
        self.sink_node: Segment | None = None
        self.shared = shared
        self.length = shared
        self.num_hit = shared
        self.dropped = 0
        self.num_sink_tokens = 0
        self.session: Session | None = None
        self.ring: Ring | None = None
        self.ring_end = 0
        self.ring_undone = 0
        self.cross: Sequence | None = None
        self.num_readers: int | None = None
        self.reader_namespaces: dict[Namespace, None] = {}  # in the order of the first reader of each
        self.is_kept = True

    @property
    def num_private(self) -> int:
        """Tokens of the private tail."""
        return self.length - self.shared

    @property
    def position(self) -> int:
        """The position of its next token."""
        return self.length + self.dropped

    @property
    def was_overwritten(self) -> bool:
        """Whether new tokens of a ring ever took slots of old ones; its tokens are then not cached."""
        return self.ring is not None and self.ring_end > self.ring.capacity

    def path(self) -> Iterator[Segment]:
        """Yields the segments that it holds, the deepest first."""
        row = self.row
        for end in (self.node, self.sink_node):
            node = end
            while node is not None and node.parent is not None and row in node.holders:
                yield node
                node = node.parent

    def __repr__(self) -> str:
        dropped = f", dropped={self.dropped}" if self.dropped else ""
        return f"Sequence(row={self.row}, length={self.length}, shared={self.shared}{dropped})"
