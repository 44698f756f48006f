"""A model of the memory with states: beside the slots of tokens, those of states, whose values are hashes of
all tokens that a state has read. So a state that is hit, handed over or taken back wrongly shows at the next
piece."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightkv.edits import (
    AllocStates,
    CopyRow,
    Edit,
    FreePart,
    FreeRange,
    MapSegments,
    ReadStates,
    StoreSegment,
    decode,
    encode,
)
from lightkv.holdings import Holdings
from lightkv.layer_groups import LayerGroups
from lightkv.ledger.snapshots import StateCounts
from tests.support.grouped_memory import GroupedMemory


class Piece(NamedTuple):
    """Tokens [start, end) of a text, which a row computes; `names` has a name for each token of the text, which
    depends on all up to it. It reads the state in slot `reads`, and leaves its own in slot `writes`."""

    row: int
    start: int
    end: int
    names: Sequence[int]
    reads: int
    writes: int


class StateMemory:
    """The slots of tokens (`tokens`), those of states, and the slots that each row reads and writes."""

    def __init__(
        self, groups: LayerGroups, capacity: int, num_states: int, num_rows: int, num_entries: int
    ) -> None:
        self.tokens = GroupedMemory(groups, capacity, num_rows, num_entries)
        self.cls = len(groups.classes)
        self.free = set(range(1, num_states + 1))
        self.num_states = num_states
        self.rows = [
            [0, 0] for _ in range(num_rows + 1)
        ]  # by row: the slot that it reads, and that it writes
        self.snapshots: dict[int, int] = {}  # by segment
        self.values: dict[int, object] = {0: 0}  # by slot; slot 0 is the state before any token

    def apply(self, edits: Iterable[Edit]) -> None:
        for edit in decode(encode(edits)):
            if not self._apply(edit):
                self.tokens.apply([edit])

    def _apply(self, edit: Edit) -> bool:
        """Applies an edit of states. Returns whether it is of nothing else."""
        match edit:
            case AllocStates(rows):
                for row in rows:
                    slot = self.rows[row][1] = min(self.free)
                    self.free.remove(slot)
            case ReadStates(rows):
                for row in rows:
                    self.rows[row][0] = self.rows[row][1]
            case MapSegments(row, start, segments, self.cls):
                assert (start, len(segments) <= 1) == (0, True)
                self.rows[row][0] = self.snapshots[segments[0]] if segments else 0
            case StoreSegment(row, 1, 2, segment, self.cls):
                assert segment not in self.snapshots
                self.snapshots[segment] = self.rows[row][1]
            case FreeRange(row, 1, 2, self.cls):
                self._free(self.rows[row][1])
            case FreePart(self.cls, segment):
                self._free(self.snapshots.pop(segment))
            case CopyRow(row, source, _):
                self.rows[row] = [self.rows[source][0], 0]
                return False
            case _:
                return False
        return True

    def _free(self, slot: int) -> None:
        assert slot not in self.free | {0}, f"state slot {slot} is freed twice"
        self.free.add(slot)

    def piece(self, row: int, start: int, end: int, names: Sequence[int]) -> Piece:
        reads, writes = self.rows[row]
        assert writes not in self.snapshots.values(), f"{writes} is written, and is a snapshot"
        return Piece(row, start, end, names, reads, writes)

    def compute(self, rounds: Sequence[Sequence[Piece]]) -> None:
        """Computes a step: of each row, a piece in each round. Every layer writes the K/V of all pieces before
        it attends."""
        for one in [one for pieces in rounds for one in pieces]:
            self.tokens.write(one.row, one.start, one.names[one.start : one.end])
        for pieces in rounds:
            self._compute(pieces)

    def _compute(self, pieces: Sequence[Piece]) -> None:
        """Computes pieces side by side: no state is written that another piece reads."""
        for one in pieces:
            assert one.writes not in self.free | {0}, f"{one.writes} is written, and is free"
            assert one.reads not in self.free, f"{one.reads} is read, and is free"
            others = [other for other in pieces if other is not one]
            assert one.writes not in [slot for other in others for slot in (other.reads, other.writes)]
        for one in pieces:
            expected = one.names[one.start - 1] if one.start else 0
            found = self.values.get(one.reads)
            assert found == expected, f"{one} has a state of {found}"
            self.tokens.check_reads(one.row, one.start, one.names)
        for one in pieces:
            self.values[one.writes] = one.names[one.end - 1]

    def check(self, holdings: Holdings, counts: StateCounts, num_free: int) -> None:
        """Asserts that rows and snapshots are those of the ledger's account, and each slot has one owner."""
        windows = [row._replace(windows=row.windows[:-1]) for row in holdings.rows]
        self.tokens.check(Holdings(windows, holdings.segments, holdings.parts[:-1]), num_free)
        assert holdings.parts[-1] == dict.fromkeys(self.snapshots, 1)
        owners = [*self.free, *self.snapshots.values()]
        for row in holdings.rows:
            segments, start, own, end = row.windows[-1]
            reads, writes = self.rows[row.row]
            if end > own:
                owners.append(writes)
            if start == 0:
                assert reads == self.snapshots[segments[-1]]
        assert sorted(owners) == list(range(1, self.num_states + 1))
        assert len(self.free) == counts.num_free


def names_after(before: int, ids: Iterable[int]) -> list[int]:
    """Returns a name for each token of `ids`, after a token of the name `before` (0: none)."""
    names = []
    for token in ids:
        before = hash((before, token)) or 1
        names.append(before)
    return names
