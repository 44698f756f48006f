"""A model of the device memory in plain Python sets: it applies edits and knows what each slot contains.

The tests of the ledger and of the scheduler compare them with it. A slot's content is the tuple of token ids up
to and including its own, which its K/V depends on, so a wrongly shared slot shows at once.
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
    """Slots, rows and segments as on the device. Every misuse fails an assertion."""

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
                            self.rows.setdefault(row, {})[position] = self._alloc()
                case MapSegments(row, start, segments):
                    slots = [slot for segment in segments for slot in self.segments[segment]]
                    self.rows[row] = dict(enumerate(slots, start))
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
                        self._free(self.rows[row][position])
                case FreeSegment(segment, start):
                    for slot in self.segments[segment][start:]:
                        self._free(slot)
                    self.segments[segment] = self.segments[segment][:start]
                    if not start:
                        del self.segments[segment]
                case _:
                    raise AssertionError(f"the model does not apply a {type(edit).__name__}")

    def write(self, row: int, start: int, tokens: list[int]) -> None:
        """The forward pass: computes the part of `tokens`, the whole sequence, from `start` on."""
        for position in range(start, len(tokens)):
            slot = self.rows[row][position]
            assert slot not in self.free
            self.content[slot] = tuple(tokens[: position + 1])

    def read(self, row: int, tokens: list[int]) -> None:
        """Attention: checks that every position of the row contains this sequence's K/V."""
        for position in range(len(tokens)):
            slot = self.rows[row][position]
            assert slot not in self.free, f"row {row} reads slot {slot}, which is free"
            assert self.content[slot] == tuple(tokens[: position + 1])

    def tokens_of(self, row: int, length: int) -> list[int]:
        """Returns the ids of a row's first `length` tokens, from the contents of their slots."""
        return list(self.content[self.rows[row][length - 1]]) if length else []

    def check_owned(self, private: dict[int, range]) -> None:
        """Checks that every slot is either free, or in one segment, or private to one row."""
        owners = sorted(self.free)
        owners += [slot for slots in self.segments.values() for slot in slots]
        owners += [self.rows[row][position] for row, span in private.items() for position in span]
        assert sorted(owners) == list(range(1, len(owners) + 1))
        assert len(set(owners)) == len(owners)

    def _alloc(self) -> int:
        slot = min(self.free)  # raises if the ledger allocates more than is free
        self.free.remove(slot)
        self.content.pop(slot, None)
        return slot

    def _free(self, slot: int) -> None:
        assert slot not in self.free, f"slot {slot} freed twice"
        self.free.add(slot)
