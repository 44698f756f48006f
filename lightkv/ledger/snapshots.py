"""The class of states: what a recurrent or convolutional layer knows after exactly so many tokens.

    tokens     0              4,096                     9,000        length
    path       ├── segment 1 ───┼──── segment 2 ──────────┼── private ─┤
    tails                       └ snapshot                └ snapshot
    the row    reads `from`, and writes `to`: a private state that stands for all tokens so far

A state slot of the tree is never written, and nothing is ever copied. A row reads its state at `from` and
writes it at `to`. A snapshot is the row's own state handed over: the next piece reads it there and writes to a
fresh slot. So the two differ in the one piece that follows on a hit, a fork or a snapshot, and are equal in all
others. `from` is 0, the state before any token, where a row has computed none. What a piece reads is held until
a later step is planned, since nothing may write it in the same step.

Where snapshots stand: at the places that `open` is given, or else one token before a prompt's end; where
prompts diverge, at the second use; at some ends of chunks (`State.keeps_chunk_end`); and where a sequence
closes, if the ids of all tokens are known that its state has read. Snapshots take slots of a pool of their own,
and only those that no open sequence needs: `num_owed` sequences have no state of their own yet.

What is evicted first: a superseded snapshot, in whose place another one is expected to be hit. Each on the path
to the one that a sequence hits is, since the sequence will leave one that stands for more; so are those before
one that is expected to be hit, and those of which `StateHold.is_expected` is false; but none at the places that
the sequence was given, nor where prompts diverge. Then comes the one that was used the longest ago, by the
clock of the tree, which counts tokens, and each one as much later as it saves tokens.
"""

from collections.abc import Container, Iterable
from typing import NamedTuple

from lightkv.classes.all import NEVER
from lightkv.classes.state import State as StateRule
from lightkv.edits import AllocStates, FreeRange, MapSegments, ReadStates, StoreSegment
from lightkv.errors import CheckFailed, OutOfStates
from lightkv.holdings import HeldWindow

from .holds import Holder
from .segments import TOKEN_BYTES, Idle, Segment, State, Tail

FROM, TO = 0, 1  # where a row's slots are, in its row of the table of states


class StateCounts(NamedTuple):
    """Slots of the pool of states, of which `num_held` are those of open sequences and the snapshots that these
    read. `num_owed`: open sequences that have none of their own yet, and take one when they grow."""

    capacity: int = 0
    num_free: int = 0
    num_cached: int = 0
    num_owed: int = 0

    @property
    def num_held(self) -> int:
        """Slots that sequences hold."""
        return self.capacity - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Slots that sequences can take: the free ones and, by eviction, the cached ones."""
        return self.num_free + self.num_cached


class StateClass:
    """The states of one ledger: class `cls`, with a pool of `capacity` slots of its own."""

    def __init__(self, state: State, cls: int, capacity: int) -> None:
        self.state = state
        self.cls = cls
        self.bit = self.width = 0  # a token takes no slot
        self.rule = StateRule()
        self.idle = Idle()
        self.capacity = self.num_free = capacity
        self.num_cached = self.num_owed = 0

    @property
    def counts(self) -> StateCounts:
        """The numbers of slots."""
        return StateCounts(self.capacity, self.num_free, self.num_cached, self.num_owed)

    @property
    def hit_before(self) -> int:
        """The step that is being planned: what it computes, later ones can hit."""
        return self.state.step

    def has_spare(self, is_expected: bool) -> bool:
        """Returns whether a snapshot takes no slot that an open sequence needs and, unless it is expected to be
        hit, none of such a snapshot."""
        if self.num_free + self.num_cached <= self.num_owed:
            return False
        return is_expected or self.num_free > self.num_owed or self.has_superseded

    def count(self, free: int = 0, cached: int = 0) -> None:
        """Counts so many slots more as free and as cached."""
        self.num_free += free
        self.num_cached += cached

    @property
    def has_superseded(self) -> bool:
        """Whether a superseded snapshot is the first that would be evicted."""
        oldest = self.idle.oldest()
        return oldest is not None and not oldest.due

    def due(self, tail: Tail) -> int:
        """Returns the place of a snapshot in the order of eviction: that of its segment, and the tokens since
        the snapshot before it on its path, which would be computed again."""
        saved = 0
        for segment in tail.segment.up():
            if saved and self.cls in segment.tails:
                break
            saved += segment.length
        return tail.segment.due + saved

    def store(self, segment: Segment, length: int, step: int | None) -> Tail:
        """Makes a snapshot of `segment`, which has none. `step`: the one that computes it, if it may still
        fail."""
        if not segment.tails:
            segment.tails = {}
        tail = segment.tails[self.cls] = Tail(self, segment)
        if step is not None:
            tail.published = step
            if self.state.confirmed < step:
                self.state.unconfirmed.append(tail)
        return tail

    def hold(self, sequence: Holder, own: int) -> "StateHold":
        """Returns what a sequence holds that has just hit a path."""
        return StateHold(self, sequence)

    def require_room(self, sequences: Iterable[Holder]) -> None:
        """Raises OutOfStates unless those of these sequences that have no state of their own can get one."""
        needed, available = self.needed(sequences), self.num_free + self.num_cached
        if needed > available:
            raise OutOfStates(needed, available, self.capacity)

    def needed(self, sequences: Iterable[Holder]) -> int:
        """Returns how many slots are enough for these sequences to grow."""
        return sum([not hold.may_take_over for hold in self._starting(sequences)])

    def start(self, sequences: Iterable[Holder]) -> None:
        """Gives each of these sequences a state of its own. Where no slot is free or has a superseded snapshot,
        one that alone reads a superseded snapshot takes its slot: it is freed, and then it is the only one that
        is free. Without any, one takes the slot of any snapshot that it alone reads."""
        rows: list[int] = []
        for hold in sorted(self._starting(sequences), key=lambda hold: hold.may_take_over):
            takes = hold.may_take_over and hold.source is not None and hold.source.superseded
            if not self.num_free and (self.has_superseded or not takes) and (oldest := self.idle.oldest()):
                assert isinstance(oldest, Tail)
                oldest.drop()
            if not self.num_free:
                self._allocate(rows)
                hold.take_over()
                self._allocate([hold.sequence.row])
            else:
                rows.append(hold.sequence.row)
            self.num_free -= 1
            hold.begin()
        self._allocate(rows)

    def _starting(self, sequences: Iterable[Holder]) -> "list[StateHold]":
        return [hold for one in sequences for hold in one.holds if hold.of is self and not hold.is_own]

    def _allocate(self, rows: list[int]) -> None:
        if rows:
            self.state.emit(AllocStates(tuple(rows)))
            rows.clear()

    def supersede(self, node: Segment, end: int, spared: Container[int]) -> None:
        """Has the snapshots of the path to `node`, which ends at `end`, evicted first, but for those after as
        many tokens as are `spared`, and those where prompts diverge or other sessions end."""
        for segment, at in node.ends_up(end):
            tail = segment.tails.get(self.cls)
            if tail and at not in spared and segment.protected <= 1 and not segment.is_branching:
                self.idle.supersede(tail)

    def check(self, segments: Iterable[Segment], sequences: Iterable[Holder]) -> None:
        """Recounts the slots. Raises CheckFailed."""
        tails = [tail for segment in segments if (tail := segment.tails.get(self.cls))]
        holds = [hold for one in sequences for hold in one.holds if hold.of is self]
        cached = sum([not tail.holders for tail in tails])
        held = len(tails) - cached + sum([hold.is_own for hold in holds])
        owed = sum([not hold.is_own for hold in holds])
        found = StateCounts(self.capacity, self.capacity - cached - held, cached, owed)
        if found != self.counts or found.num_free < 0:
            raise CheckFailed(f"{self.counts} by the ledger's count, {found} by recount")


class StateHold:
    """The state of `sequence` in the class `of`.

    is_own: whether it has a private one. source: else, the snapshot that its next piece reads; None before any
    token. is_fresh: whether `from` and `to` differ, since its last piece began after `own` tokens with what
    `source` was. read: the snapshots that pieces of the step `step` read, the last one last; there were `start`
    tokens before that step.
    """

    __slots__ = ("is_fresh", "is_own", "last", "of", "own", "read", "sequence", "source", "start", "step")

    def __init__(self, of: StateClass, sequence: Holder) -> None:
        self.of = of
        self.sequence = sequence
        self.is_own = self.is_fresh = False
        self.source: Tail | None = None
        self.read: list[Tail] = []
        self.own = 0
        self.step = self.start = -1
        self.last = 0  # the last place of a snapshot on its path
        self._owe()

    @property
    def may_take_over(self) -> bool:
        """Whether it alone reads the snapshot at its length."""
        return self.source is not None and len(self.source.holders) == 1

    @property
    def kept(self) -> int:
        """The first entry that it keeps: none before its length."""
        return self.sequence.length

    def tails(self) -> list[tuple[Tail, int]]:
        """Returns the snapshots that it holds, each once, with its length."""
        held = [*self.read, self.source] if self.source else self.read
        return [(tail, self.sequence.length) for tail in held]

    def held(self) -> HeldWindow:
        """Returns what its row of the table of states has, for recounts: the last of the segments is that at
        `from`, unless the row begins with `to`."""
        reads = self.source is not None or (self.is_fresh and self.read)
        ids = tuple([tail.segment.id for tail, _ in self.tails()])
        return HeldWindow(ids, FROM if reads else TO, TO, TO + self.is_own)

    # Beginning and ending

    def enter(self) -> None:
        """Reads the snapshot that the sequence has hit. Those of its path are superseded, but at its places."""
        of, sequence = self.of, self.sequence
        found: tuple[int, ...] = ()
        if sequence.length:
            tail = self.source = sequence.node.tails[of.cls]
            tail.hold(sequence.row)
            self.last = sequence.length
            found = (tail.segment.id,)
            of.supersede(sequence.node, sequence.length, sequence.keep_at)
        of.state.emit(MapSegments(sequence.row, FROM, found, of.cls))

    def fork(self, fork: Holder) -> "StateHold":
        """Returns the same hold for a fork of its sequence, which has no private state."""
        hold = StateHold(self.of, fork)
        hold.source, hold.last = self.source, self.last
        if hold.source is not None:
            hold.source.holders.add(fork.row)
        return hold

    def begin(self) -> None:
        """Notes that the next piece reads the source, and writes a private state."""
        self.own = self.sequence.length
        self.is_own = True
        self.is_fresh = self.source is not None or not self.own  # else it has taken over what it reads
        if self.source is not None:
            self.read.append(self.source)
            self.source = None
        self.of.num_owed -= 1

    def take_over(self) -> None:
        """Frees the snapshot that it alone reads, whose slot it gets."""
        assert self.source is not None
        self.source.let_go(self.sequence.row)
        if self.source.is_there:
            self.source.drop()
        self.source = None

    def free_own(self, end: int) -> None:
        """Frees its private state at the end of its sequence."""
        if self.is_own:
            self._free()
        self.of.num_owed -= 1

    def free_after(self, start: int, end: int) -> None:
        """Frees the private state where the sequence goes back to what its last piece has read."""
        if start < end:
            self._free()
            if self.own:
                self.source = self.read.pop()

    def _free(self) -> None:
        self.of.state.emit(FreeRange(self.sequence.row, TO, TO + 1, self.of.cls))
        self.of.count(free=1)
        self._owe()

    def _owe(self) -> None:
        """Notes that the sequence lacks a state of its own, and has the next step look at it."""
        self.is_own = self.is_fresh = False
        self.of.num_owed += 1
        self.sequence.look_at, self.sequence.has_passed = 0, None

    # Growing

    def cost(self, count: int) -> int:
        """Returns how many slots of the pool the next `count` tokens take: none."""
        return 0

    def prepare(self, count: int) -> int:
        """Leaves what earlier steps have read, before the sequence grows. Returns `happens_at`."""
        step = self.of.state.step
        if self.step < step:
            for tail in self.read:
                tail.let_go(self.sequence.row)
            self.read, self.step, self.start = [], step, self.sequence.length
        if self.is_fresh:
            self.of.state.emit(ReadStates((self.sequence.row,)))
            self.is_fresh = False
        return self.happens_at(self.tails())

    def happens_at(self, held: list[tuple[Tail, int]]) -> int:
        """Returns the length from which on a token does more than to change the state. All steps of a prompt
        are looked at, so that `step` is the last one that computes some of it."""
        one = self.sequence
        is_steady = self.is_own and not self.is_fresh and one.length * TOKEN_BYTES >= len(one.prompt)
        return NEVER if is_steady and not held else 0

    def bring(self, start: int, first: int) -> None:
        """Takes a slot for a state that comes from elsewhere."""
        self.of.start([self.sequence])

    @property
    def computed(self) -> int:
        """The tokens that earlier steps than the one that is being planned compute."""
        return self.start if self.step == self.of.state.step else self.sequence.length

    # What others may hit

    def is_expected(self, end: int, closes: bool = False) -> bool:
        """Returns whether a snapshot after `end` tokens is expected to be hit: where prompts diverge, at a
        place that was given, and where the sequence closes, unless it has computed a given one."""
        one = self.sequence
        given = [at for at in one.keep_at if one.num_hit <= at < len(one.prompt) // TOKEN_BYTES]
        return end == one.matched or end in given or (closes and end <= max(given, default=end))

    def keep_chunk_end(self, path: tuple[Segment, int]) -> None:
        """Hands over the state at the end of the chunk that was computed last, which is the end of this path,
        where others of its kind are far."""
        end = path[1]
        if self.is_own and self.of.rule.keeps_chunk_end(end, self.last) and self.may_keep(end):
            self.keep(end, path, self.of.state.step)

    def may_keep(self, end: int) -> bool:
        """Returns whether it may hand over its state, which another one takes the place of."""
        return self.of.cls not in self.sequence.node.tails and self.of.has_spare(self.is_expected(end))

    def keep(self, end: int, path: tuple[Segment, int], step: int | None) -> None:
        """Hands over the state, if it stands for the first `end` tokens, which are the path. With `step` None
        the sequence closes."""
        of, row, (node, at) = self.of, self.sequence.row, path
        tail, closes = node.tails.get(of.cls), step is None
        if not end == at == self.sequence.length or not (self.is_own or (closes and tail)):
            return
        self.last = end
        if tail is None:
            of.state.emit(StoreSegment(row, TO, TO + 1, node.id, of.cls))
            of.count(cached=1)
            tail = of.store(node, 0, None if closes else self.step)
            self._owe()
        elif not closes:
            self._free()  # another sequence has handed over the same
        if closes:
            of.idle.add(tail)
        else:
            tail.hold(row)
            self.source = tail
            of.state.emit(MapSegments(row, FROM, (node.id,), of.cls))
        tail.superseded = False
        if self.is_expected(end, closes):
            of.supersede(node, end, {end, *self.sequence.keep_at})
        elif not self.is_own:  # else another sequence has left this one
            of.idle.supersede(tail)

    keep_branch = keep

    def has(self, point: int, seen: int, there: tuple[int, int]) -> bool:
        """Returns whether the state is that after `point` tokens, and may be handed over."""
        return self.is_own and self.sequence.length == self.computed == point and self.of.has_spare(True)

    def supersede(self, node: Segment, end: int) -> None:
        """Does nothing: a snapshot supersedes others when it is kept or hit (`keep`, `enter`)."""

    # Going back

    def require_back(self, length: int) -> None:
        """Raises ValueError unless its sequence can go back to `length`."""
        if length != self.sequence.length and not (self.is_fresh and length == self.own):
            raise ValueError(
                f"{self.sequence} cannot go back to {length} tokens: its state has read all of them; open a "
                "sequence for these tokens"
            )

    def check(self) -> None:
        """Raises CheckFailed unless its numbers fit its sequence."""
        one = self.sequence
        if self.is_own and self.source is not None:
            raise CheckFailed(f"{one} has a state of its own, and reads {self.source}")
        if not self.is_own and (self.source is not None) != (one.length > 0):
            raise CheckFailed(f"{one} has no state of its own, and reads {self.source}")
        if len({id(tail) for tail, _ in self.tails()}) < len(self.tails()):
            raise CheckFailed(f"{one} holds a snapshot twice")
