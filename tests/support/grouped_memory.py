"""A model of the memory of several layer groups, in lists: it applies a ledger's edits, and knows of each slot
which token of which text was written to it."""

from collections import Counter
from collections.abc import Iterable, Sequence

from lightkv.edits import (
    Alloc,
    AllocPart,
    CopyRow,
    Edit,
    ForgetSegment,
    FreePart,
    FreeRange,
    FreeSegment,
    MapSegments,
    MergeSegments,
    SplitSegment,
    StoreSegment,
)
from lightkv.holdings import Holdings
from lightkv.layer_groups import FULL, LayerClass, LayerGroups, Lifetime


def groups_of(*classes: tuple[str, int, int]) -> LayerGroups:
    """Returns groups of one lane, from what the layers of each class see, its size and its number of groups."""
    found, layer = [], 0
    for sees, size, count in classes:
        lifetime = Lifetime(sees, size) if size else FULL
        found.append(LayerClass(lifetime, tuple(((layer + i,),) for i in range(count))))
        layer += count
    return LayerGroups(tuple(found), 1)


class GroupedMemory:
    """Slots 1 to `capacity`, and for each group a table of `num_rows` rows of `num_entries` entries.

    `written`: what each slot has, as the caller names it. Class c has the groups `of_class[c]`.
    """

    def __init__(self, groups: LayerGroups, capacity: int, num_rows: int, num_entries: int) -> None:
        self.groups = groups
        self.free = set(range(1, capacity + 1))
        self.table = [[[0] * num_entries for _ in range(num_rows + 1)] for _ in range(groups.num_groups)]
        self.written: dict[int, object] = {}
        self.of_class: list[list[int]] = []
        for one in groups.classes:
            first = sum(map(len, self.of_class))
            self.of_class.append(list(range(first, first + one.num_groups)))
        # By class and segment: the slots of each group, in the order of the tokens.
        self._segments: list[dict[int, list[list[int]]]] = [{} for _ in groups.classes]
        self._lengths: dict[int, int] = {}

    def apply(self, edits: Iterable[Edit]) -> None:
        for edit in edits:
            self._apply(edit)

    def _apply(self, edit: Edit) -> None:
        full = self._segments[0]
        match edit:
            case Alloc(rows, starts, counts):
                self._alloc(0, rows, starts, counts)
            case AllocPart(classes, rows, starts, counts, reused):
                for cls in [cls for cls in range(len(self.of_class)) if classes >> cls & 1]:
                    self._alloc_part(cls, rows, starts, counts, [bits >> cls & 1 for bits in reused])
            case FreeRange(row, start, end, cls):
                self._free_entries(cls, row, start, end)
            case MapSegments(row, start, segments, cls):
                for segment in segments:
                    slots = self._segments[cls][segment]
                    self._put(cls, row, start, slots)
                    start += len(slots[0])
            case StoreSegment(row, start, end, segment, 0):
                full[segment] = self._get(0, row, start, end)
                self._lengths[segment] = end - start
            case StoreSegment(row, start, end, segment, cls):
                old = self._segments[cls].get(segment)
                new = self._segments[cls][segment] = self._get(cls, row, start, end)
                assert old is None or all(set(a) <= set(b) for a, b in zip(old, new, strict=True))
            case SplitSegment(segment, at, head):
                length = self._lengths[segment]
                self._lengths[head], self._lengths[segment] = at, length - at
                for of_class in self._segments:
                    if segment not in of_class:
                        continue
                    slots = of_class.pop(segment)
                    rest = min(len(slots[0]), length - at)
                    of_class[segment] = [one[len(one) - rest :] for one in slots]
                    if len(slots[0]) > rest:
                        of_class[head] = [one[: len(one) - rest] for one in slots]
            case MergeSegments(segment, head):
                for of_class in self._segments:
                    above, below = of_class.pop(head, None), of_class.get(segment)
                    if above is not None:
                        assert (
                            below is not None and len(below[0]) == self._lengths[segment]
                        ) or of_class is full
                        of_class[segment] = [a + b for a, b in zip(above, below, strict=True)]
                self._lengths[segment] += self._lengths.pop(head)
            case ForgetSegment(segment):
                for of_class in self._segments:
                    of_class.pop(segment, None)
                del self._lengths[segment]
            case FreeSegment(segment, start):
                freed = self._lengths[segment] - start
                for of_class in self._segments:
                    if segment not in of_class:
                        continue
                    slots = of_class.pop(segment)
                    keep = max(len(slots[0]) - freed, 0)
                    self._free(slot for one in slots for slot in one[keep:])
                    if keep:
                        of_class[segment] = [one[:keep] for one in slots]
                self._lengths[segment] = start
                if not start:
                    del self._lengths[segment]
            case FreePart(cls, segment):
                self._free(slot for one in self._segments[cls].pop(segment) for slot in one)
            case CopyRow(row, source, end):
                for group in self.table:
                    group[row][:end] = group[source][:end]
            case _:
                raise AssertionError(f"{edit} in a memory of several groups")

    def _alloc_part(
        self,
        cls: int,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        reused: Sequence[int],
    ) -> None:
        lifetime = self.groups.classes[cls].lifetime
        distance = lifetime.size + lifetime.slack
        for row, start, count, is_reused in zip(rows, starts, counts, reused, strict=True):
            if not is_reused:
                self._alloc(cls, [row], [start], [count])
                continue
            assert (lifetime.sees, count) == ("window", 1)
            for group in self.of_class[cls]:
                self.table[group][row][start] = self.table[group][row][start - distance]

    def _alloc(self, cls: int, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        for group in self.of_class[cls]:
            for row, start, count in zip(rows, starts, counts, strict=True):
                for entry in range(start, start + count):
                    slot = min(self.free)
                    self.free.remove(slot)
                    self.written.pop(slot, None)
                    self.table[group][row][entry] = slot

    def _free_entries(self, cls: int, row: int, start: int, end: int) -> None:
        assert start < end
        self._free(slot for one in self._get(cls, row, start, end) for slot in one)

    def _free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            assert slot not in self.free | {0}, f"slot {slot} is freed twice"
            self.free.add(slot)

    def _get(self, cls: int, row: int, start: int, end: int) -> list[list[int]]:
        return [self.table[group][row][start:end] for group in self.of_class[cls]]

    def _put(self, cls: int, row: int, start: int, slots: list[list[int]]) -> None:
        for group, one in zip(self.of_class[cls], slots, strict=True):
            self.table[group][row][start : start + len(one)] = one

    def write(self, row: int, start: int, names: Sequence[object]) -> None:
        """Writes the tokens from entry `start` on in every group."""
        for cls in range(len(self.of_class)):
            self.write_class(cls, row, start, names)

    def write_class(self, cls: int, row: int, start: int, names: Sequence[object]) -> None:
        """Writes the tokens from entry `start` on in the groups of a class."""
        for group in self.of_class[cls]:
            for entry, name in enumerate(names, start=start):
                self.written[self.table[group][row][entry]] = name

    def check_reads(self, row: int, length: int, names: Sequence[object]) -> None:
        """Asserts that the token after the first `length` ones finds all that it sees."""
        for one, groups in zip(self.groups.classes, self.of_class, strict=True):
            for entry in range(one.lifetime.rule.first_seen(length), length):
                for group in groups:
                    slot = self.table[group][row][entry]
                    assert slot not in self.free, f"row {row} reads slot {slot}, which is free"
                    assert self.written.get(slot) == names[entry], (
                        f"entry {entry} of row {row}, group {group}, slot {slot} is {self.written.get(slot)}, "
                        f"not {names[entry]}"
                    )

    def check(self, holdings: Holdings, num_free: int) -> None:
        """Asserts that segments, parts and rows are those of the ledger's account, and that each slot has one
        owner."""
        assert len(self.free) == num_free
        assert self._lengths == holdings.segments
        for cls, parts in enumerate(holdings.parts, start=1):
            assert {one: len(slots[0]) for one, slots in self._segments[cls].items()} == parts
        owners = Counter(self.free)
        for of_class in self._segments:
            owners.update(slot for slots in of_class.values() for one in slots for slot in one)
        for row in holdings.rows:
            self._check_row(0, row.row, 0, row.shared, row.segments)
            owners.update(slot for one in self._get(0, row.row, row.shared, row.length) for slot in one)
            for cls, window in enumerate(row.windows, start=1):
                self._check_row(cls, row.row, window.start, window.own, window.segments)
                own = self._get(cls, row.row, window.own, row.length)
                owners.update(slot for one in own for slot in one)
        capacity = len(owners)
        assert set(owners.values()) <= {1}, {slot: n for slot, n in owners.items() if n != 1}
        assert capacity == max(owners), f"{capacity} slots have owners"

    def _check_row(self, cls: int, row: int, start: int, end: int, segments: Iterable[int]) -> None:
        expected: list[list[int]] = [[] for _ in self.of_class[cls]]
        for segment in segments:
            for into, slots in zip(expected, self._segments[cls][segment], strict=True):
                into += slots
        assert self._get(cls, row, start, end) == expected
