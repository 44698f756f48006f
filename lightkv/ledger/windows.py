"""Sequences of models with layers that do not see everything: what each holds in the classes of such layers."""

import sys
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import compress
from operator import itemgetter
from typing import ClassVar, NamedTuple, Self

from lightkv.edits import AllocPart, Edit, Reuse
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


class WindowedSequence(Sequence):
    """A sequence that holds all of its tokens in the class that sees everything, and the last ones in the
    others. Of these, the first come from parts of its path, and the others are its own:

        entry      0           held from        own              length
                   ├─ released ─┼─ held parts ───┼─── its own ────┤

    lifetimes: of the classes from 1 on; the lists have a number for each of them. distances: how far back the
    entry is whose slot its next token takes; 0 while that takes a free one. oldest: where the first of the
    parts that it holds ends, which it leaves once all of it has passed; 0 where it holds none. points:
    ascending, where its prompt ends and where others may turn off from it, as far as it has not passed them:
    what is seen there is kept for others. published: how many tokens of its prompt others may hit; those that
    `publish` could not store are stored as soon as it shares the ones before them. published_in: the step of
    the last `publish`. event: the length at which something else happens than that each of its tokens
    takes a slot, or reuses one; 0 if that is to be found out.
    """

    __slots__ = ("_own", "distances", "event", "lifetimes", "oldest", "points", "published", "published_in")

    slot_per_token: ClassVar[bool] = False

    def __init__(self, prompt: bytes, session: Session | None, lifetimes: Seq[Lifetime]) -> None:
        super().__init__(prompt, session)
        self.lifetimes = lifetimes
        self._own = [0] * len(lifetimes)  # where it reuses no slots
        self.distances = [0] * len(lifetimes)
        self.oldest = [0] * len(lifetimes)
        self.points: list[int] = []
        self.published = 0
        self.published_in = -1
        self.event = 0

    def own(self, cls: int) -> int:
        """Returns the first entry that is its own in a class."""
        distance = self.distances[cls - 1]
        return self.length - distance if distance else self._own[cls - 1]

    def set_own(self, cls: int, entry: int) -> None:
        """Sets the first entry that is its own in a class. Its next token takes a free slot."""
        self._own[cls - 1] = entry
        self.distances[cls - 1] = 0
        self.event = 0

    def reuse(self, cls: int) -> None:
        """Has each of its tokens take the slot of the first that is its own, from the next one on."""
        self.distances[cls - 1] = self.length - self._own[cls - 1]

    def find_event(self) -> None:
        """Finds out at which length something else happens."""
        events = self.points[:1]
        for own, distance, oldest, lifetime in zip(
            self._own, self.distances, self.oldest, self.lifetimes, strict=True
        ):
            if oldest:
                events.append(lifetime.gone_at(oldest - 1))
            if not distance:
                events.append(lifetime.gone_at(own))
        self.event = min(events, default=sys.maxsize)

    def stop_reusing(self) -> None:
        """Has its tokens take free slots, since it goes back."""
        for cls in range(1, len(self.lifetimes) + 1):
            self.set_own(cls, self.own(cls))

    def twin(self) -> Self:
        twin = type(self)(self.prompt, self.session, self.lifetimes)
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
        own = self.own(cls)
        for segment, end in self.segments_up():
            if end > own:
                continue
            part = segment.parts.get(cls)
            if part is None or self.row not in part.holders:
                break
            found.append((part, end))
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
        self.event = 0

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
        self.event = 0

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


class Growth(NamedTuple):
    """What the next tokens of some sequences take and give back, in slots: `needed` to allocate, once `passed`
    private ones are freed."""

    needed: int
    passed: int


def due_of(sequences: Seq[WindowedSequence], counts: Seq[int]) -> list[int]:
    """Returns the indices of those sequences to which something happens in their next tokens, `counts` of them.
    The next token of each other one takes what its last one took."""
    if counts.count(1) == len(counts):
        return [i for i, one in enumerate(sequences) if one.event <= one.length]
    return [
        i
        for i, (one, count) in enumerate(zip(sequences, counts, strict=True))
        if one.event <= one.length or count != 1
    ]


def columns_of(sequences: Seq[WindowedSequence]) -> list[list[int]]:
    """Returns the `distances` of these sequences, a list for each class; none where there is no sequence."""
    distances = [one.distances for one in sequences]
    return [list(map(itemgetter(i), distances)) for i in range(len(distances[0]))] if distances else []


class Branch(NamedTuple):
    """Where a prompt turns off, after `point` tokens, from a sequence that still has what `classes` see there.
    `num_slots`: how many more than else it may hold for a while if that is kept."""

    sequence: WindowedSequence
    point: int
    classes: tuple[int, ...]
    num_slots: int


class Takers(NamedTuple):
    """The rows of a batch that take free slots in a class, `counts` of them each, and those that reuse theirs.
    `distances`: of the whole batch, how far back the entry is whose slot is taken; 0 where that is a free one.
    """

    cls: int
    width: int
    distances: list[int]
    fresh_rows: tuple[int, ...]
    counts: tuple[int, ...]
    reusing_rows: tuple[int, ...]

    @classmethod
    def of(
        cls, of_class: int, width: int, rows: tuple[int, ...], counts: Seq[int], distances: list[int]
    ) -> "Takers":
        """Makes one of the rows of a batch, of how many tokens each takes, and of the distances."""
        num_fresh = distances.count(0)
        if not num_fresh:
            return cls(of_class, width, distances, (), (), rows)
        if num_fresh == len(rows):
            return cls(of_class, width, distances, rows, tuple(counts), ())
        is_fresh = [not distance for distance in distances]
        fresh, fresh_counts = tuple(compress(rows, is_fresh)), tuple(compress(counts, is_fresh))
        return cls(of_class, width, distances, fresh, fresh_counts, tuple(compress(rows, distances)))

    @property
    def num_slots(self) -> int:
        """Free slots that are taken."""
        return self.width * sum(self.counts)

    def edits(self, starts: tuple[int, ...]) -> list[Edit]:
        """Returns what the memory has to do for the next tokens. `starts`: the lengths of the whole batch."""
        edits: list[Edit] = []
        if self.fresh_rows:
            entries = starts
            if self.reusing_rows:
                entries = tuple(compress(starts, [not distance for distance in self.distances]))
            edits.append(AllocPart(self.cls, self.fresh_rows, entries, self.counts))
        if self.reusing_rows:
            entries = tuple(compress(starts, self.distances)) if self.fresh_rows else starts
            edits.append(Reuse(self.cls, max(self.distances), self.reusing_rows, entries))
        return edits
