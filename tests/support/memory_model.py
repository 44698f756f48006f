"""A model of the device memory in plain Python sets: it applies edits and knows what each slot contains.

The tests of the ledger and the scheduler hold them to it. A slot's content is the tuple of token ids up to
and including its own, which is what its K/V depends on: a wrongly shared slot shows at once.
"""

from lightkv.edits import (
    Alloc,
    Edit,
    FreeRange,
    FreeSegment,
    MapSegments,
    SplitSegment,
    StoreSegment,
    decode,
    encode,
)


class MemoryModel:
    """Slots, rows and segments as the device would hold them. Every misuse is an assertion."""

    def __init__(self, capacity: int) -> None:
        self.free = set(range(1, capacity + 1))
        self.rows: dict[int, dict[int, int]] = {}  # row → position → slot
        self.segments: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}

    def apply(self, edits: list[Edit]) -> None:
        for edit in decode(encode(edits)):
            match edit:
                case Alloc(rows, starts, counts):
                    for row, start, count in zip(rows, starts, counts, strict=True):
                        for position in range(start, start + count):
                            self.rows.setdefault(row, {})[position] = self._take()
                case MapSegments(row, segments):
                    slots = [slot for segment in segments for slot in self.segments[segment]]
                    self.rows[row] = dict(enumerate(slots))
                case StoreSegment(row, start, end, segment):
                    slots = [self.rows[row][position] for position in range(start, end)]
                    before = self.segments.get(segment, [])
                    assert slots[: len(before)] == before
                    self.segments[segment] = slots
                case SplitSegment(segment, at, head):
                    slots = self.segments[segment]
                    assert 0 < at < len(slots)
                    self.segments[head], self.segments[segment] = slots[:at], slots[at:]
                case FreeRange(row, start, end):
                    for position in range(start, end):
                        self._give(self.rows[row][position])
                case FreeSegment(segment, start):
                    for slot in self.segments[segment][start:]:
                        self._give(slot)
                    self.segments[segment] = self.segments[segment][:start]
                    if not start:
                        del self.segments[segment]
                case _:
                    raise AssertionError(f"no test of a scheduler leaves a {type(edit).__name__}")

    def write(self, row: int, start: int, tokens: list[int]) -> None:
        """The forward pass: `tokens` is the whole sequence, of which the part from `start` on is computed."""
        for position in range(start, len(tokens)):
            slot = self.rows[row][position]
            assert slot not in self.free
            self.content[slot] = tuple(tokens[: position + 1])

    def read(self, row: int, tokens: list[int]) -> None:
        """Attention: every position of the row has to contain just this sequence's K/V."""
        for position in range(len(tokens)):
            slot = self.rows[row][position]
            assert slot not in self.free, f"row {row} reads slot {slot}, which is free"
            assert self.content[slot] == tuple(tokens[: position + 1])

    def tokens_of(self, row: int, length: int) -> list[int]:
        """The ids of a row's first `length` tokens, as the contents of their slots say."""
        return list(self.content[self.rows[row][length - 1]]) if length else []

    def check_owned(self, private: dict[int, range]) -> None:
        """Every slot is free, in one segment, or private to one row, and only one of these."""
        owners = sorted(self.free)
        owners += [slot for slots in self.segments.values() for slot in slots]
        owners += [self.rows[row][position] for row, span in private.items() for position in span]
        assert sorted(owners) == list(range(1, len(owners) + 1))
        assert len(set(owners)) == len(owners)

    def _take(self) -> int:
        slot = min(self.free)  # raises when the ledger promised what is not there
        self.free.remove(slot)
        self.content.pop(slot, None)
        return slot

    def _give(self, slot: int) -> None:
        assert slot not in self.free, f"slot {slot} given back twice"
        self.free.add(slot)
