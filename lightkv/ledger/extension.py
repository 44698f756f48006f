"""Extending sequences, the verb of every step, which checks a batch once for as long as it stays the same, and
shortening them. And prompts that diverge from a running sequence, which still has what classes see there, but
keeps it for no other.
"""

from collections.abc import Sequence as Seq
from operator import add, index, itemgetter
from typing import NamedTuple

from lightkv.edits import Alloc, AllocPart, KeepEntries, MapSegments, MoveEntries, SetGap
from lightkv.errors import CheckFailed, OutOfTokens, SequenceTooLong

from .prefix_tree import Match
from .segments import TOKEN_BYTES, Segment, last_reachable, ranges_of
from .sequence import Sequence, require_lists
from .state import LedgerState


class Extension:
    """Extends the sequences of one ledger's state, whose rows have `max_entries` entries."""

    def __init__(self, state: LedgerState, max_entries: int) -> None:
        self._state = state
        self.max_entries = max_entries
        # Whether all sequences that were ever opened have a slot for each token (`Sequence.slot_per_token`).
        self.is_even = True
        # The sequences of the last `extend`, their rows, and an upper bound of where the longest of them ends.
        self._batch: list[Sequence] = []
        self._batch_rows: tuple[int, ...] = ()
        self._batch_end = 0
        self._slot_per_token = True  # whether each new token of that batch takes a slot of its own
        # By row of the batch, what `State.reused` has, and how many slots these are.
        self._reused: tuple[int, ...] = ()
        self._num_reused = 0
        # The classes from 1 on: their bits, and the slots of a token in all of them.
        self._bits = sum([of.bit for of in state.classes])
        self._width = sum([of.width for of in state.classes])

    def growth(self, sequences: Seq[Sequence], count: int) -> int:
        """Returns how many available slots are enough to extend each of these by `count` tokens."""
        state = self._state
        slots = count * len(sequences) * state.width
        if not state.classes:
            return slots
        as_before = [one.row for one in sequences if count == 1 and one.length < one.look_at]
        slots += len(as_before) * self._width - self._slots_reused([state.reused[row] for row in as_before])
        due = [one for one in sequences if count > 1 or one.look_at <= one.length]
        return slots + sum([hold.cost(count) for one in due for hold in one.holds])

    def piece(self, sequence: Sequence, count: int) -> int:
        """Returns how many of the next `count` tokens to compute in one piece (`TokenLedger.piece`)."""
        length, points = sequence.length, sequence.points
        if length > min([hold.computed for hold in sequence.holds]):
            # What windows pass is freed, and what others have computed meanwhile is shared, between steps.
            is_kept = points and points[0] <= length and sequence.shared < length
            if is_kept or len(sequence.holds) > 1:
                return 0
        return min([count, *[point - length for point in points if point > length]])

    def require_batch(self, sequences: Seq[Sequence]) -> None:
        """Raises TypeError, ValueError unless these are open sequences of the ledger, none of them twice."""
        if sequences != self._batch:
            self._set_batch(sequences)

    def check(self) -> None:
        """Raises CheckFailed unless each sequence is looked at before something happens to it."""
        for one in self._state.sequences.values() if self._state.classes else ():
            happens = min([hold.happens_at(hold.tails()) for hold in one.holds] + one.points[:1])
            if one.look_at > happens:
                raise CheckFailed(f"{one} is looked at from {one.look_at} on; something happens at {happens}")

    def forget(self) -> None:
        """Has the next batch checked, since a sequence is about to close."""
        self._batch = []

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Extends `sequences[i]` by `counts[i]` tokens, all or none (`TokenLedger.extend`)."""
        require_lists(sequences, counts)
        if not sequences:
            return Alloc((), (), ())
        if sequences != self._batch:
            self._set_batch(sequences)
        if not self._slot_per_token:
            return self._extend_each(sequences, counts)
        starts = [sequence.length for sequence in sequences]
        is_decode = counts.count(1) == len(starts)  # one token each
        if is_decode:
            needed = len(starts)
            self._batch_end += 1
            if self._batch_end > self.max_entries:  # the bound may be too high
                self._batch_end = max(starts) + 1
        else:
            needed = index(sum(counts))  # raises for numbers that are no integers
            if min(counts) < 1:
                raise ValueError(f"asked for {min(counts)} tokens; ask for at least one of each sequence")
            self._batch_end = max(map(add, starts, counts))
        if self._batch_end > self.max_entries:
            raise SequenceTooLong(self._batch_end, self.max_entries)
        classes = self._state.classes
        if classes:
            due = self._look(counts, is_decode)
            needed = needed * (self._state.width + self._width) - self._num_reused
            for of in classes:
                of.require_room(due)
        self.make_room(needed)
        edit = Alloc(self._batch_rows, tuple(starts), tuple(counts))
        self._state.alloc(edit, needed)
        if classes:
            for of in classes:
                of.start(due)
            if self._bits:
                self._state.emit(AllocPart(self._bits, *edit, self._reused))
        if is_decode:
            for sequence in sequences:
                sequence.length += 1
        else:
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.length += count
        return edit

    def _extend_each(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Extends a batch in which some tokens may take no slot."""
        if min(counts) < 1:
            raise ValueError(f"asked for {min(counts)} tokens; ask for at least one of each sequence")
        needed = [one.slots_needed(index(count)) for one, count in zip(sequences, counts, strict=True)]
        growing = [(one.row, one.length, more) for one, more in zip(sequences, needed, strict=True) if more]
        rows, starts, missing = zip(*growing, strict=True) if growing else ((), (), ())
        edit = Alloc(rows, starts, missing)
        end = max(map(add, starts, missing), default=0)
        if end > self.max_entries:
            raise SequenceTooLong(end, self.max_entries)
        if growing:
            self.make_room(sum(needed))
            self._state.alloc(edit, sum(needed))
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.advance(count)
        return edit

    def _look(self, counts: Seq[int], is_decode: bool) -> list[Sequence]:
        """Looks at the sequences of the batch to which something may happen, frees what has passed, and finds
        which rows reuse slots. Returns these sequences."""
        if is_decode:
            due = [(one, 1) for one in self._batch if one.look_at <= one.length]
        else:
            pairs = zip(self._batch, counts, strict=True)
            due = [(one, count) for one, count in pairs if count > 1 or one.look_at <= one.length]
        for one, count in due:
            self.settle(one)
            happens = min([hold.prepare(count) for hold in one.holds] + one.points[:1])
            one.look_at = happens if count == 1 else 0
        if due or not self._reused:
            # Row 0, which no sequence has, makes it a tuple where the batch has one row.
            self._reused = itemgetter(*self._batch_rows, 0)(self._state.reused)[:-1]
            self._num_reused = self._slots_reused(self._reused)
        return [one for one, _ in due]

    def _slots_reused(self, reused: Seq[int]) -> int:
        """Returns how many slots the tokens of a batch take that others leave to them."""
        slots = 0
        for bits in set(reused) - {0}:
            slots += reused.count(bits) * sum([of.width for of in self._state.classes if of.bit & bits])
        return slots

    def settle(self, sequence: Sequence) -> None:
        """Brings a sequence up to date with the tokens that it has: it shares what the tree has got meanwhile,
        publishes what follows, and keeps tails at the points that it has passed."""
        state, length = self._state, sequence.length
        if sequence.shared < min(length, len(sequence.prompt) // TOKEN_BYTES):
            start = sequence.shared
            # What this step computes is written where its row says, and not to slots of others.
            computed = min([hold.computed for hold in sequence.holds])
            if path := state.adopt(sequence, sequence.prompt, computed):
                state.emit(MapSegments(sequence.row, start, tuple([segment.id for segment in path])))
            end = min(sequence.published, sequence.num_publishable)
            step = sequence.published_in if sequence.published_in > state.confirmed else None
            state.store(sequence, sequence.prompt, end, step)
        while sequence.points and sequence.points[0] <= length:
            self.keep_tails(sequence, sequence.points.pop(0))
        if sequence.shared == length and 0 < length < len(sequence.prompt) // TOKEN_BYTES:
            for hold in sequence.holds:
                hold.keep_chunk_end((sequence.node, length))

    def keep_tails(self, sequence: Sequence, point: int, is_fork: bool = False) -> None:
        """Makes tails of what each class sees at `point`, which the sequence has reached; not where its path
        ends before. A fork needs all of them."""
        if point <= sequence.shared:
            self._state.split_path(sequence, point)
            for hold in [hold for hold in sequence.holds if is_fork or hold.may_keep(point)]:
                hold.keep(point, (sequence.node, sequence.shared), self._state.step - 1)

    def extend_imported(self, sequence: Sequence, length: int, firsts: Seq[int]) -> Alloc:
        """Extends a sequence by tokens of which the classes from 1 on get those from the entries `firsts` on
        (`TokenLedger.extend_imported`)."""
        self.require_batch([sequence])
        state, row, start = self._state, sequence.row, sequence.length
        if length <= start:
            raise ValueError(f"{sequence} has {start} tokens already; give more than {length}")
        if length > self.max_entries:
            raise SequenceTooLong(length, self.max_entries)
        firsts = [max(start, first) for first in firsts]
        firsts += [length] * (len(state.classes) - len(firsts))  # of states, no tokens come
        needed = (length - start) * state.width
        needed += sum([(length - first) * of.width for of, first in zip(state.classes, firsts, strict=True)])
        for of in state.classes:
            of.require_room([sequence])
        self.make_room(needed)
        edit = Alloc((row,), (start,), (length - start,))
        state.alloc(edit, needed)
        for of, first in zip(state.classes, firsts, strict=True):
            if of.bit:
                state.emit(AllocPart(of.bit, (row,), (first,), (length - first,), (0,)))
        for hold, first in zip(sequence.holds, firsts, strict=True):
            hold.bring(start, first)
        sequence.length = length
        sequence.points = [point for point in sequence.points if point >= length]
        self.forget()
        return edit

    def make_room(self, needed: int) -> None:
        """Evicts cached tokens until `needed` are free. Raises OutOfTokens."""
        state = self._state
        if needed > state.num_free:
            if needed > (available := state.num_free + state.num_cached):
                raise OutOfTokens(needed, available, state.capacity)
            state.evict(needed - state.num_free)

    def _set_batch(self, sequences: Seq[Sequence]) -> None:
        """Checks the sequences of a batch, once for as long as the same ones are extended."""
        batch, rows, is_open = list(sequences), tuple[int, ...](), False
        try:
            rows = tuple([sequence.row for sequence in batch])
            is_open = len(rows) > 1 and list(itemgetter(*rows)(self._state.sequences)) == batch
        except (AttributeError, KeyError):
            pass
        if not is_open:
            for sequence in batch:
                self._state.require_open(sequence)
        if len(rows) > 1 and len(set(rows)) < len(rows):
            raise ValueError("a sequence occurs twice; give it one count")
        self._slot_per_token = self.is_even or all(one.slot_per_token for one in batch)
        self._batch, self._batch_rows, self._reused = batch, rows, ()
        self._batch_end = self.max_entries  # so that the next `extend` looks it up


# Shortening. The public verbs have checked that the sequence is open, and of a kind that can lose tokens.


def shrink(state: LedgerState, sequences: Seq[Sequence], counts: Seq[int]) -> None:
    """Undoes the last `counts[i]` tokens of each sequence, all or none (`TokenLedger.shrink`)."""
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.require_shrink(count)
    for sequence, count in zip(sequences, counts, strict=True):
        if num_freed := sequence.shrink(count):
            state.free_range(sequence.row, sequence.length, sequence.length + num_freed)
            if sequence.gap.dropped:
                state.emit(SetGap(sequence.row, sequence.length, sequence.gap.dropped))


def truncate(state: LedgerState, sequence: Sequence, length: int) -> None:
    """Drops all but the first `length` entries of a sequence (`TokenLedger.truncate`)."""
    sequence.require_truncate(length)
    for hold in sequence.holds:
        hold.free_after(length, sequence.length)
    if sequence.holds:
        sequence.points = [point for point in sequence.points if point <= length]
    start = max(length, sequence.shared)
    if start < sequence.length:
        state.free_range(sequence.row, start, sequence.length)
    if length < sequence.shared:
        _leave_range(state, sequence, length, sequence.shared)
    sequence.length = length
    if sequence.gap.dropped:
        sequence.gap = sequence.gap.cut(length)
        state.emit(SetGap(sequence.row, length, sequence.gap.dropped))
    if not sequence.gap.dropped:
        sequence.prompt = sequence.prompt[: length * TOKEN_BYTES]


def release(state: LedgerState, sequence: Sequence, count: int, sink_tokens: int) -> int:
    """Drops the `count` oldest tokens after the first `sink_tokens` (`TokenLedger.release`)."""
    length, shared, end = sequence.length, sequence.shared, sink_tokens + count
    if count < 0 or sink_tokens < 0 or end > length:
        raise ValueError(f"cannot drop {count} tokens after {sink_tokens}, of {length}")
    gap = sequence.gap
    if gap.dropped and (sink_tokens > gap.start or (sink_tokens < gap.start and gap.node is not None)):
        raise ValueError(f"{gap.start} sinks were kept so far; {sink_tokens} cannot be from now on")
    if not count:
        return 0
    before = state.num_free
    if sink_tokens < shared:
        _leave_range(state, sequence, sink_tokens, min(end, shared))
    if end > shared:
        state.free_range(sequence.row, max(sink_tokens, shared), end)
    state.emit(MoveEntries(sequence.row, end, length, sink_tokens))
    sequence.length -= count
    sequence.gap = sequence.gap.widened(sink_tokens, count)
    return state.num_free - before


def keep(state: LedgerState, sequence: Sequence, count: int) -> int:
    """Keeps `count` of the private tokens after the sinks (`TokenLedger.keep`)."""
    start = max(sequence.shared, sequence.gap.start)
    num_freed = sequence.length - start - count
    if count < 0 or num_freed < 0:
        raise ValueError(f"cannot keep {count} of {sequence.length - start} private tokens")
    if num_freed:
        state.emit(KeepEntries(sequence.row, start, sequence.length, count))
        state.count(free=num_freed)
        sequence.length -= num_freed
        sequence.gap = sequence.gap.widened(sequence.gap.start, num_freed)
    return num_freed


def _leave_range(state: LedgerState, sequence: Sequence, start: int, end: int) -> None:
    """Leaves the segments of its shared entries [start, end), which are split at both ends."""
    for at in (end, start):
        state.split_path(sequence, at)
    first, path = sequence.shared, []  # the segments, the deepest first, with their first entries
    for segment in sequence.path():
        first -= segment.length
        path.append((segment, first))
    above = next((segment for segment, first in path if first < start), sequence.root)
    if path[0][1] >= end:  # segments are left below the gap
        sequence.gap = sequence.gap.after(above)
        state.gapped.add(sequence.row)
    else:
        sequence.node = above
        if start <= sequence.gap.start:
            sequence.gap = sequence.gap.after(None)
            state.gapped.discard(sequence.row)
    sequence.shared -= end - start
    state.leave(sequence, [segment for segment, first in path if start <= first < end])


class Branch(NamedTuple):
    """Where a prompt diverges, after `point` tokens, from a sequence that still has what `classes` see there.
    `num_slots`: how many more than else it may hold for a while if that is kept."""

    sequence: Sequence
    point: int
    classes: tuple[int, ...]
    num_slots: int


class Branches:
    """Finds and keeps the branches of one ledger."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        # What was sought last. The sequences that have passed it (`has_passed`) are not asked again.
        self._sought: tuple[Segment | None, int] = (None, 0)

    def find(self, match: Match) -> Branch | None:
        """Returns where a prompt diverges, of which the tree has this, from a sequence that still has, as its
        own, what classes see there for which no tail is there."""
        state, path, point = self._state, match.path, match.num_tokens
        needs: dict[int, tuple[int, tuple[int, int]]] = {}  # by class: what is seen, and the last range there
        for of in state.classes:
            ranges = ranges_of(path[::-1], of.cls)
            if last_reachable(of.rule, ranges, point) < point:
                needs[of.cls] = of.rule.first_seen(point), ranges[-1] if ranges else (0, 0)
        if not needs:
            return None
        if self._sought != (path[0], point):  # a prompt that waits is looked for in every step
            self._sought = path[0], point
        for sequence in map(state.sequences.__getitem__, path[0].holders):
            if sequence.has_passed is self._sought:
                continue
            if min([hold.own for hold in sequence.holds]) >= point:
                sequence.has_passed = self._sought
            holds = [hold for hold in sequence.holds if hold.of.cls in needs]
            if sequence.published >= point and all(hold.has(point, *needs[hold.of.cls]) for hold in holds):
                more = sum([(point - hold.own) * hold.of.width for hold in holds])
                return Branch(sequence, point, tuple(needs), more)
        return None

    def keep(self, branch: Branch) -> None:
        """Makes tails of what is seen where a prompt diverges.

        The step that is being planned may compute and read any of the sequence's own entries. So those before
        become tails, too, which it leaves when it grows, and which are the first to be evicted then."""
        state, (sequence, point, classes, _) = self._state, branch
        state.split_path(sequence, point)
        for hold in [hold for hold in sequence.holds if hold.of.cls in classes]:
            first = hold.of.rule.first_kept(point)
            if hold.own < first:
                state.split_path(sequence, first)
            hold.keep_branch(point, (sequence.node, sequence.shared), sequence.published_in)
