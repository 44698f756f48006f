"""What rows and segments hold by the ledger's account, as plain integers: `KVMemory.check` compares them with
the slots that it has."""

from typing import NamedTuple


class HeldWindow(NamedTuple):
    """What a row holds in a class of layers: its entries [start, own) are the slots of `segments` there, one
    after the other, and [own, end) are its own. In the class of states, entry 0 is the state that its next
    piece reads, that of the last one of `segments`, and entry 1 the one that it writes; with `start` 1 it reads
    this one, too, or none."""

    segments: tuple[int, ...]
    start: int
    own: int
    end: int


class HeldRow(NamedTuple):
    """An open sequence's row of the token table.

    Its first `shared` entries are the slots of `segments`, one after the other; the entries [shared, length)
    are its own. `dropped`: positions before its next token that edits have dropped. `windows`: for each
    class from 1 on.
    """

    row: int
    segments: tuple[int, ...]
    shared: int
    length: int
    dropped: int
    windows: tuple[HeldWindow, ...] = ()

    @property
    def holds(self) -> tuple[HeldWindow, ...]:
        """What it holds in each class, of which class 0 holds all tokens."""
        return (HeldWindow(self.segments, 0, self.shared, self.length), *self.windows)


class Holdings(NamedTuple):
    """All open sequences' rows, and how many tokens each segment has, held or cached; and how many of them its
    part has in each class from 1 on."""

    rows: list[HeldRow]
    segments: dict[int, int]
    parts: tuple[dict[int, int], ...] = ()

    def lengths(self, cls: int) -> dict[int, int]:
        """Returns how many tokens each segment has in a class."""
        if not cls:
            return self.segments
        return self.parts[cls - 1] if self.parts else {}
