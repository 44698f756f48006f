"""What rows and segments hold by the ledger's account, as plain integers: `KVMemory.check` compares them with
the slots that it has."""

from typing import NamedTuple


class HeldRow(NamedTuple):
    """An open sequence's row of the token table.

    Its first `shared` entries are the slots of `segments`, one after the other; the entries [shared, length)
    are its own. `dropped`: positions before its next token that edits have dropped.
    """

    row: int
    segments: tuple[int, ...]
    shared: int
    length: int
    dropped: int


class Holdings(NamedTuple):
    """All open sequences' rows, and how many tokens each segment has, held or cached."""

    rows: list[HeldRow]
    segments: dict[int, int]

    @property
    def private(self) -> list[tuple[int, int, int]]:
        """The entries that one sequence alone holds, as (row, start, end)."""
        return [(row.row, row.shared, row.length) for row in self.rows]
