"""What a sequence holds in a class of layers that do not see everything.

    entry      0           first            own              length
               ├─ released ──┼─ held tails ───┼─── private ────┤

The tails are those of the path's segments (`segments.py`), and the sequence leaves one once its window has
passed all of it. It keeps what its next tokens see, and `slack` entries more, since it may go back by so many.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, Protocol

from lightkv.classes.all import NEVER
from lightkv.edits import FreeRange, MapSegments, StoreSegment
from lightkv.errors import CheckFailed
from lightkv.holdings import HeldWindow
from lightkv.layer_groups import LayerClass

from .segments import Segment, State, Tail


class Holder(Protocol):
    """What holds need of their sequence (`Sequence`)."""

    row: int
    prompt: bytes
    keep_at: Seq[int]
    matched: int
    num_hit: int
    node: Segment
    length: int
    shared: int
    points: list[int]
    look_at: int
    has_passed: object
    holds: Seq[Any]


class TailClass:
    """A class of layers that do not see everything, in one ledger: class `cls`, whose tokens take `width`
    slots. `bit`: what stands for it in `State.reused`."""

    hit_before: ClassVar[int] = NEVER

    def __init__(self, state: State, cls: int, layers: LayerClass) -> None:
        self.state = state
        self.cls = cls
        self.bit = 1 << cls
        self.distance = layers.lifetime.distance
        self.lifetime = layers.lifetime
        self.rule = layers.lifetime.rule
        self.width = layers.num_groups
        self.idle = state.idle
        self.count = state.count

    def hold(self, sequence: "Holder", own: int) -> "Hold":
        """Returns what a sequence holds that has just hit a path of `own` tokens."""
        return Hold(self, sequence, own)

    def due(self, tail: Tail) -> int:
        """Returns the place of a tail in the order of eviction: that of its segment."""
        return tail.segment.due

    def require_room(self, sequences: Iterable["Holder"]) -> None:
        """Does nothing, since its slots are those of the pool, which `extend` counts; nor does `start`."""

    def start(self, sequences: Iterable["Holder"]) -> None:
        """Does nothing (`require_room`)."""

    def store(self, segment: Segment, length: int, step: int | None) -> Tail:
        """Makes the last `length` tokens of `segment` its tail, or lengthens the one that it has. `step`: the
        last one that computes some of them, if it may still fail."""
        if not segment.tails:
            segment.tails = {}
        tail = segment.tails.get(self.cls)
        if tail is None:
            tail = segment.tails[self.cls] = Tail(self, segment)
        is_confirmed = tail.confirmed == tail.length
        tail.length = length
        if step is not None:
            tail.published = max(tail.published, step)
            if is_confirmed:
                self.state.unconfirmed.append(tail)
        elif is_confirmed:
            tail.confirmed = length
        return tail


class Hold:
    """The tails that `sequence` holds in the class `of`, and its private entries from `own` on."""

    __slots__ = ("_own", "of", "sequence")

    def __init__(self, of: TailClass, sequence: Holder, own: int) -> None:
        self.of = of
        self.sequence = sequence
        self.own = own

    @property
    def own(self) -> int:
        """The first private entry."""
        of, sequence = self.of, self.sequence
        if of.state.reused[sequence.row] & of.bit:
            return sequence.length - of.distance
        return self._own

    @own.setter
    def own(self, entry: int) -> None:
        """Sets it. The next token takes a free slot, and the next step looks at the sequence."""
        self._own = entry
        self.of.state.reused[self.sequence.row] &= ~self.of.bit
        self.sequence.look_at = 0
        self.sequence.has_passed = None

    @property
    def computed(self) -> int:
        """The tokens that are computed: a step has one piece of a sequence."""
        return self.sequence.length

    @property
    def passed(self) -> int:
        """The entry before which nothing is kept once the sequence grows."""
        return self.of.rule.first_kept(self.sequence.length)

    @property
    def first(self) -> int:
        """The first entry that it holds."""
        return self.own - sum([tail.length for tail, _ in self.tails()])

    @property
    def kept(self) -> int:
        """The first entry that it holds and keeps when it grows."""
        return max(self.first, self.passed)

    def tails(self) -> list[tuple[Tail, int]]:
        """Returns the tails that it holds, the last ones first, each with the entry at which it ends."""
        found: list[tuple[Tail, int]] = []
        own, row, cls = self.own, self.sequence.row, self.of.cls
        segment, end = self.sequence.node, self.sequence.shared
        while segment.parent is not None:
            if end <= own:
                tail = segment.tails.get(cls)
                if tail is None or row not in tail.holders:
                    break
                found.append((tail, end))
            end -= segment.length
            segment = segment.parent
        return found

    def held(self) -> HeldWindow:
        """Returns what it holds, for recounts."""
        return HeldWindow(
            tuple([tail.segment.id for tail, _ in reversed(self.tails())]),
            self.first,
            self.own,
            self.sequence.length,
        )

    # Beginning and ending

    def enter(self) -> None:
        """Holds the tails that the next tokens see of a path that the sequence has hit."""
        sequence, kept, start = self.sequence, self.passed, self.sequence.length
        held: list[int] = []
        for segment, end in sequence.node.ends_up(start):
            tail = segment.tails.get(self.of.cls)
            if end <= kept or tail is None:
                break
            tail.hold(sequence.row)
            held.append(segment.id)
            start = end - tail.length
            if not tail.is_whole:
                break
        if held:
            self.of.state.emit(MapSegments(sequence.row, start, tuple(held[::-1]), self.of.cls))

    def fork(self, fork: Holder) -> "Hold":
        """Returns the same hold for a fork of its sequence, which has no private entries."""
        for tail, _ in self.tails():
            tail.holders.add(fork.row)
        return Hold(self.of, fork, self.own)

    # What passes

    def leave_passed(self, passed: int) -> list[tuple[Tail, int]]:
        """Leaves the tails that end before entry `passed`. Returns the others, as `tails` does."""
        held = self.tails()
        while held and held[-1][1] <= passed:
            held.pop()[0].let_go(self.sequence.row)
        return held

    def free_own(self, end: int) -> None:
        """Frees the private entries before `end`."""
        if (own := self.own) < end:
            self._free(own, end)
            self.own = end

    def free_after(self, start: int, end: int) -> None:
        """Frees the private entries of [start, end), which the sequence gives up at its end."""
        own = self.own
        if max(own, start) < end:
            self._free(max(own, start), end)
        self.own = min(own, start)

    def _free(self, start: int, end: int) -> None:
        self.of.state.emit(FreeRange(self.sequence.row, start, end, self.of.cls))
        self.of.state.count(free=(end - start) * self.of.width)

    def gone(self) -> int:
        """Returns how many private entries have passed, and are not to be kept for others."""
        length, points = self.sequence.length, self.sequence.points
        passed = self.of.rule.first_kept(points[0] if points and points[0] < length else length)
        return max(passed - self.own, 0)

    def cost(self, count: int) -> int:
        """Returns how many slots the next `count` tokens take, less what is given back for them."""
        gone = self.gone()
        return 0 if self._reuses(gone, count) else (count - gone) * self.of.width

    def prepare(self, count: int) -> int:
        """Gives up what has passed before the sequence grows by `count` tokens, or has it used again. Returns
        `happens_at`."""
        held = self.leave_passed(self.passed)
        gone = self.gone()
        if self._reuses(gone, count):
            self.of.state.reused[self.sequence.row] |= self.of.bit
        else:
            self.own += gone  # no slot is used again
            if gone:
                self._free(self.own - gone, self.own)
        return self.happens_at(held)

    def bring(self, start: int, first: int) -> None:
        """Makes room for entries from `first` on that come from elsewhere, after `start` ones."""
        if first > start:  # what it has there does not reach so far
            self.leave_passed(start)
            self.free_own(start)
            self.own = first
        self.own = self.own  # no slot is used again

    def happens_at(self, held: list[tuple[Tail, int]]) -> int:
        """Returns the length from which on a token does not only take a slot, or reuse one. `held`: its
        `tails`."""
        of = self.of
        passes = of.rule.gone_at(held[-1][1] - 1) if held else NEVER
        if of.state.reused[self.sequence.row] & of.bit:
            return passes
        return min(passes, of.rule.gone_at(self._own))

    def _reuses(self, gone: int, count: int) -> bool:
        return gone == count == 1 and self.of.rule.reuses

    # What others may hit

    def keep(self, end: int, path: tuple[Segment, int], step: int | None) -> None:
        """Makes tails of what is seen after the first `end` tokens; what comes before is given up (`share`)."""
        first = self.of.rule.first_kept(end)
        self.leave_passed(first)
        if self.own < end:
            self.free_own(first)
            self.share(end, path, step)

    def share(self, end: int, path: tuple[Segment, int], step: int | None) -> None:
        """Moves the private entries up to `end` into tails of the segments of a path.

        `path`: the last segment and the entry where it ends; a segment ends at `end`. `step`: the last step
        that may compute some of the entries. With a step, the sequence holds the tails; with None it closes,
        and does not hold them.

        Where a segment has a tail already, the private entries are freed. No row holds more entries afterwards
        than before. So a segment is split in two cases: a tail that rows hold would become longer, or the tail
        is longer than what the sequence itself had.
        """
        own, (segment, at), hold = self.own, path, step is not None
        while at > own and segment.parent is not None:
            if at <= end:
                first = max(at - segment.length, own)
                tail, count = segment.tails.get(self.of.cls), at - first
                if tail and tail.length != count and (hold if tail.length > count else tail.holders):
                    self.of.state.split(segment, segment.length - min(tail.length, count))
                    first = max(at - segment.length, own)
                tail = self._share(segment, first, at, step)
                tail.superseded = False
                if hold:
                    tail.hold(self.sequence.row)
                else:
                    self.of.state.idle.add(tail)
            at -= segment.length
            segment = segment.parent
        self.own = max(own, end)

    def _share(self, segment: Segment, first: int, end: int, step: int | None) -> Tail:
        """Makes the private entries [first, end), which are the last of a segment, its tail, or frees those
        that its tail has. If no row holds it, it counts as cached. `step`: as in `share`."""
        row, of, count = self.sequence.row, self.of, end - first
        tail = segment.tails.get(of.cls)
        there = min(tail.length, count) if tail else 0
        if tail and there:
            self._free(end - there, end)
            of.state.emit(MapSegments(row, end - tail.length, (segment.id,), of.cls))
        if tail is None or there < count:
            may_fail = step is not None and of.state.confirmed < step
            tail = of.store(segment, count, step if may_fail else None)
            of.state.emit(StoreSegment(row, first, end, segment.id, of.cls))
            of.state.count(cached=(count - there) * of.width)  # a tail that rows hold has its length already
        return tail

    def supersede(self, node: Segment, end: int) -> None:
        """Has the tails of the path to `node`, which ends at `end`, evicted first as far as they end where that
        of `node` begins, but for those where prompts diverge or other sessions end."""
        cls, first = self.of.cls, self.of.rule.first_kept(end)
        for segment, at in node.ends_up(end) if cls in node.tails else ():
            tail = segment.tails.get(cls)
            if tail is None or at - tail.length >= first or segment.protected > 1 or segment.is_branching:
                continue
            if at > first:
                segment = self.of.state.split(segment, segment.length - (at - first))
            self.of.state.idle.supersede(segment.tails[cls])

    def has(self, point: int, seen: int, there: tuple[int, int]) -> bool:
        """Returns whether what is `seen` after the first `point` tokens is private, or in the range `there` of
        tokens that the path has just before."""
        own, (first, end) = self.own, there
        return end <= own < point and seen >= (first if end == own else own)

    def keep_branch(self, point: int, path: tuple[Segment, int], step: int) -> None:
        """Makes tails of what is seen at `point`, where a prompt diverges (`Branches.keep`)."""
        state, own, first = self.of.state, self.own, self.of.rule.first_kept(point)
        self.share(point, path, step)
        node, shared = path
        for segment, end in node.ends_up(shared):
            if own < end <= first:
                state.idle.supersede(segment.tails[self.of.cls])

    def may_keep(self, end: int) -> bool:
        """Returns whether it may keep tails, for which it holds no more than before."""
        return True

    def keep_chunk_end(self, path: tuple[Segment, int]) -> None:
        """Does nothing: what is seen at the end of a chunk is kept at `points` alone."""

    # Going back

    def require_back(self, length: int) -> None:
        """Raises ValueError where its sequence cannot go back to `length`: where the next token sees some that
        are not held."""
        lifetime, first = self.of.lifetime, self.first
        if first > lifetime.rule.first_seen(length):
            raise ValueError(
                f"{self.sequence} cannot go back to {length} tokens: the next one sees those from "
                f"{lifetime.rule.first_seen(length)} on in layers with a {lifetime.sees} of {lifetime.size}, "
                f"and they are held from {first} on; open a sequence for these tokens"
            )

    def check(self) -> None:
        """Raises CheckFailed unless its numbers fit its sequence."""
        of, one = self.of, self.sequence
        own, first, held = self.own, self.first, self.tails()
        if not 0 <= first <= own <= one.length or first > of.lifetime.rule.first_seen(one.length):
            raise CheckFailed(f"{one} holds {first} to {own} in tails of class {of.cls}, then its own")
        if held and held[0][1] != own:
            raise CheckFailed(
                f"{one} holds tails of class {of.cls} up to {held[0][1]}; its own begin at {own}"
            )
        if of.state.reused[one.row] & of.bit and not of.rule.reuses:
            raise CheckFailed(f"{one} reuses slots of class {of.cls}")
