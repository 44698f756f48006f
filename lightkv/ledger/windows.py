"""Sequences of models with layers that do not see everything: what each holds in the classes of such layers,
and what a batch of them takes there."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import ClassVar, NamedTuple, Self

from lightkv.edits import Alloc, AllocPart, Edit, Reuse
from lightkv.errors import CheckFailed
from lightkv.holdings import HeldWindow
from lightkv.layer_groups import Lifetime

from .prefix_tree import TOKEN_BYTES, Part, Segment
from .sequence import Sequence
from .sessions import Session


class Need(NamedTuple):
    """What a prompt that turns off lacks in a class: the first token that is `seen` there, and the last range
    of tokens, [first, end), that is there."""

    cls: int
    seen: int
    there: tuple[int, int]


class Agenda:
    """When something happens to the sequences of a ledger (`WindowedSequence.event`), so that they cost nothing
    until then. lifetimes: of the classes from 1 on. due: those to which it may happen when they grow next.

    Each of the others is looked at again after as many extensions as it takes to get there by a token in each.
    """

    def __init__(self, lifetimes: Seq[Lifetime]) -> None:
        self.lifetimes = lifetimes
        self.due: set[WindowedSequence] = set()
        self._now = 0  # extensions
        self._rows: dict[int, set[int]] = {}  # to be looked at then, if there is a sequence in them

    def put(self, sequence: "WindowedSequence") -> None:
        """Notes when something happens to a sequence."""
        left = sequence.event - sequence.length
        if left <= 0:
            self.due.add(sequence)
            return
        self.due.discard(sequence)
        if sequence.event < sys.maxsize:
            self._rows.setdefault(self._now + left, set()).add(sequence.row)

    def move_on(self, sequences: Mapping[int, Sequence]) -> None:
        """Notes that some of the open `sequences`, which are given by row, have grown."""
        self._now += 1
        for row in self._rows.pop(self._now, ()):
            if isinstance(sequence := sequences.get(row), WindowedSequence):
                self.put(sequence)

    def check(self, sequences: Mapping[int, Sequence]) -> None:
        """Raises CheckFailed unless what happens to each open sequence will be noticed."""
        first = {row: now for now, rows in sorted(self._rows.items(), reverse=True) for row in rows}
        for row, one in sequences.items():
            assert isinstance(one, WindowedSequence)
            latest = self._now + one.event - one.length
            if one not in self.due and one.event < sys.maxsize and first.get(row, sys.maxsize) > latest:
                raise CheckFailed(f"{one} is not looked at before something happens to it, at {one.event}")
        if not self.due <= set(sequences.values()):
            raise CheckFailed(f"{self.due} are due, and not all of them are open")


class WindowedSequence(Sequence):
    """A sequence that holds all of its tokens in the class that sees everything, and the last ones in the
    others. Of these, the first come from parts of its path, and the others are its own:

        entry      0           held from        own              length
                   ├─ released ─┼─ held parts ───┼─── its own ────┤

    lifetimes: of the classes from 1 on; the lists have a number for each of them. distances: how far back the
    entry is whose slot its next token takes; 0 while that takes a free one. oldest: where the first part ends
    that it holds; 0 where it holds none. The sequence leaves a part once its window has passed all of it.
    points: the entries ahead, ascending, at which its prompt ends or others may diverge from it. What is seen
    there is kept for others. published: how many tokens of its prompt others may hit. Those that `publish`
    could not store are stored as soon as it shares the ones before them. published_in: the step of the last
    `publish`. event: up to this length each token only takes a slot or reuses one; 0 where the length has to be
    computed.
    """

    __slots__ = (
        "_agenda", "_own", "distances", "event", "lifetimes", "oldest", "points", "published", "published_in",
    )  # fmt: skip

    slot_per_token: ClassVar[bool] = False

    def __init__(self, prompt: bytes, session: Session | None, agenda: Agenda) -> None:
        super().__init__(prompt, session)
        self._agenda = agenda
        self.lifetimes = lifetimes = agenda.lifetimes
        self._own = [0] * len(lifetimes)  # where it reuses no slots
        self.distances = [0] * len(lifetimes)
        self.oldest = [0] * len(lifetimes)
        self.points: list[int] = []
        self.published = 0
        self.published_in = -1
        self.event = 0

    def enter(self, row: int, root: Segment, node: Segment, shared: int) -> None:
        super().enter(row, root, node, shared)
        self._change()

    def leave(self) -> Iterable[Sequence]:
        self._agenda.due.discard(self)
        return super().leave()

    def _change(self) -> None:
        """Has it found out when something happens to it, since that has changed."""
        self.event = 0
        self._agenda.due.add(self)

    def own(self, cls: int) -> int:
        """Returns the first entry that is its own in a class."""
        distance = self.distances[cls - 1]
        return self.length - distance if distance else self._own[cls - 1]

    def set_own(self, cls: int, entry: int) -> None:
        """Sets the first entry that is its own in a class. Its next token takes a free slot."""
        self._own[cls - 1] = entry
        self.distances[cls - 1] = 0
        self._change()

    def reuse(self, cls: int) -> None:
        """Has each of its tokens take the slot of the first that is its own, from the next one on."""
        self.distances[cls - 1] = self.length - self._own[cls - 1]

    def find_event(self) -> None:
        """Finds out at which length something else happens."""
        self.event = self.points[0] if self.points else sys.maxsize
        for i, lifetime in enumerate(self.lifetimes):
            if oldest := self.oldest[i]:
                self.event = min(self.event, lifetime.gone_at(oldest - 1))
            if not self.distances[i]:
                self.event = min(self.event, lifetime.gone_at(self._own[i]))

    def stop_reusing(self) -> None:
        """Has its tokens take free slots, since it goes back."""
        for cls in range(1, len(self.lifetimes) + 1):
            self.set_own(cls, self.own(cls))

    def twin(self) -> Self:
        twin = type(self)(self.prompt, self.session, self._agenda)
        twin.num_hit = self.num_hit
        twin._own, twin.oldest, twin.points = self._own[:], self.oldest[:], self.points[:]
        return twin

    def segments_up(self) -> Iterator[tuple[Segment, int]]:
        """Yields the segments of its path, the deepest first, each with the entry at which it ends."""
        end = self.shared
        for segment in self.path():
            yield segment, end
            end -= segment.length

    def held_parts(self, cls: int) -> list[tuple[Part, int]]:
        """Returns the parts that it holds in a class, the last ones first, each with the entry at which it
        ends."""
        found: list[tuple[Part, int]] = []
        own, end = self.own(cls), self.shared
        for segment in self.path():
            if end <= own:
                part = segment.parts.get(cls)
                if part is None or self.row not in part.holders:
                    break
                found.append((part, end))
            end -= segment.length
        return found

    def held_from(self, cls: int) -> int:
        """Returns the first entry that it holds in a class."""
        return self.own(cls) - sum(part.length for part, _ in self.held_parts(cls))

    def kept_from(self) -> list[int]:
        """Returns, for each class, the first entry that it holds and keeps when it grows."""
        return [max(self.held_from(cls), self.passed(cls)) for cls in range(1, len(self.lifetimes) + 1)]

    def windows(self) -> tuple[HeldWindow, ...]:
        """Returns what it holds in each class."""
        found = []
        for cls in range(1, len(self.lifetimes) + 1):
            ids = tuple([part.segment.id for part, _ in self.held_parts(cls)][::-1])
            found.append(HeldWindow(ids, self.held_from(cls), self.own(cls)))
        return tuple(found)

    def note_oldest(self, cls: int) -> None:
        """Finds anew where the first part that it holds in a class ends."""
        held = self.held_parts(cls)
        self.oldest[cls - 1] = held[-1][1] if held else 0
        self._change()

    def passed(self, cls: int) -> int:
        """Returns before which entry it holds nothing in a class once it grows."""
        return self.lifetimes[cls - 1].first_kept(self.length)

    def still_has(self, point: int, needs: Seq[Need]) -> bool:
        """Returns whether it has as its own what is needed to go on after its first `point` tokens, which
        others may hit."""
        for cls, seen, (first, end) in needs:
            own = self.own(cls)
            if not end <= own < point or seen < (first if end == own else own):
                return False
        return self.published >= point

    def set_points(self, hit: int, matched: int) -> None:
        """Notes where something is to be kept for others, of a sequence that has hit `hit` tokens of the
        `matched` ones that the tree has."""
        end = len(self.prompt) // TOKEN_BYTES
        self.points = [point for point in sorted({matched, end}) if hit < point <= end]
        self._change()

    def require_shrink(self, count: int) -> None:
        super().require_shrink(count)
        self._require_seen(self.length - count)
        own = max([self.own(cls) for cls in range(1, len(self.lifetimes) + 1)])
        if count and self.length - count < own:
            raise ValueError(f"{self} cannot free {count} tokens: others may hold those before {own}")

    def shrink(self, count: int) -> int:
        self.stop_reusing()
        return super().shrink(count)

    def require_truncate(self, length: int) -> None:
        super().require_truncate(length)
        self._require_seen(length)

    def _require_seen(self, length: int) -> None:
        """Raises ValueError where the token after its first `length` ones sees some that are not held."""
        for cls, lifetime in enumerate(self.lifetimes, start=1):
            if (first := self.held_from(cls)) > lifetime.first_seen(length):
                raise ValueError(
                    f"{self} cannot go back to {length} tokens: the next one sees those from "
                    f"{lifetime.first_seen(length)} on in layers with a {lifetime.sees} of {lifetime.size}, "
                    f"and they are held from {first} on; open a sequence for these tokens"
                )

    def check(self, sequences: "Mapping[int, Sequence]") -> None:
        super().check(sequences)
        for cls, lifetime in enumerate(self.lifetimes, start=1):
            own, first, held = self.own(cls), self.held_from(cls), self.held_parts(cls)
            if not 0 <= first <= own <= self.length or first > lifetime.first_seen(self.length):
                raise CheckFailed(f"{self} holds {first} to {own} in parts of class {cls}, then its own")
            if held and held[0][1] != own:
                raise CheckFailed(
                    f"{self} holds parts of class {cls} up to {held[0][1]}; its own begin at {own}"
                )
            if self.distances[cls - 1] not in (0, lifetime.size + lifetime.slack):
                raise CheckFailed(
                    f"{self} reuses slots of class {cls} {self.distances[cls - 1]} entries back"
                )
            if self.oldest[cls - 1] != (held[-1][1] if held else 0):
                raise CheckFailed(
                    f"{self} holds {held} of class {cls}, the first up to {self.oldest[cls - 1]}"
                )


class Branch(NamedTuple):
    """Where a prompt turns off, after `point` tokens, from a sequence that still has what `classes` see there.
    `num_slots`: how many more than else it may hold for a while if that is kept."""

    sequence: WindowedSequence
    point: int
    classes: tuple[int, ...]
    num_slots: int


class Takers:
    """The sequences of a batch that take free slots in a class, and those that reuse theirs, by row."""

    def __init__(self, cls: int, width: int) -> None:
        self.cls = cls
        self.width = width
        self.fresh: dict[int, WindowedSequence] = {}
        self.reusing: dict[int, WindowedSequence] = {}

    def put(self, sequence: WindowedSequence) -> None:
        """Adds a sequence, or puts it where it belongs now."""
        self.remove(sequence.row)
        of_kind = self.reusing if sequence.distances[self.cls - 1] else self.fresh
        of_kind[sequence.row] = sequence

    def remove(self, row: int) -> None:
        """Removes the sequence of a row, if it is there."""
        self.fresh.pop(row, None)
        self.reusing.pop(row, None)

    def edits(self, alloc: Alloc) -> list[Edit]:
        """Returns what the memory has to do for what `alloc` does in the class that sees everything."""
        if not self.reusing:
            return [AllocPart(self.cls, *alloc)]
        distance = next(iter(self.reusing.values())).distances[self.cls - 1]
        if not self.fresh:
            return [Reuse(self.cls, distance, alloc.rows, alloc.starts)]
        counts = (1,) * len(self.fresh)
        if alloc.counts.count(1) < len(alloc.counts):
            counts = tuple(map(dict(zip(alloc.rows, alloc.counts, strict=True)).__getitem__, self.fresh))
        starts = tuple([one.length for one in self.fresh.values()])
        entries = tuple([one.length for one in self.reusing.values()])
        return [
            AllocPart(self.cls, tuple(self.fresh), starts, counts),
            Reuse(self.cls, distance, tuple(self.reusing), entries),
        ]


class WindowedBatch:
    """The sequences of a batch, and what each takes in the classes from 1 on, of which a token takes `widths`
    slots. What stays in the batch as it is costs nothing when others come and go."""

    def __init__(self, widths: Seq[int]) -> None:
        self.members: set[WindowedSequence] = set()
        self.longest = 0  # an upper bound of their lengths
        self._takers = [Takers(cls, width) for cls, width in enumerate(widths, start=1)]

    def follow(self, members: set[WindowedSequence], due: Set[WindowedSequence]) -> None:
        """Makes these the sequences of the batch. Those that are `due` have to be `put` before they grow."""
        come = members - self.members
        if len(members) - len(come) < len(self.members):
            for one in self.members - members:
                self.remove(one)
        self.members |= come
        self.longest = max([self.longest, *[one.length for one in come]])
        for one in sorted(come - due, key=attrgetter("row")):
            self.put(one)

    def put(self, sequence: WindowedSequence) -> None:
        """Finds out what a sequence of the batch takes."""
        for takers in self._takers:
            takers.put(sequence)

    def remove(self, sequence: WindowedSequence) -> None:
        """Removes a sequence, which is still open, if it is there."""
        if sequence in self.members:
            self.members.remove(sequence)
            for takers in self._takers:
                takers.remove(sequence.row)

    def num_slots(self, more: int) -> int:
        """Returns how many free slots these classes take for a token of each sequence, and for `more` tokens of
        some that reuse none."""
        slots = 0
        for takers in self._takers:
            slots += takers.width * (len(takers.fresh) + more)
        return slots

    def emit(self, alloc: Alloc, emit: Callable[[Edit], None]) -> None:
        """Emits what the memory has to do for what `alloc` does in the class that sees everything."""
        for takers in self._takers:
            for edit in takers.edits(alloc):
                emit(edit)

    def check(self, due: Set[WindowedSequence]) -> None:
        """Raises CheckFailed unless those that are not due take what they are said to, and no other does."""
        rows = {one.row for one in self.members}
        for takers in self._takers:
            if (
                takers.fresh.keys() & takers.reusing.keys()
                or not takers.fresh.keys() | takers.reusing.keys() <= rows
            ):
                raise CheckFailed(f"{takers} names rows twice, or others than {sorted(rows)}")
        for one in self.members - due:
            if one.length > self.longest:
                raise CheckFailed(f"{one} is longer than {self.longest}")
            for takers, distance in zip(self._takers, one.distances, strict=True):
                if (takers.reusing if distance else takers.fresh).get(one.row) is not one:
                    raise CheckFailed(f"{one} reuses slots {distance} entries back, and takes others")
