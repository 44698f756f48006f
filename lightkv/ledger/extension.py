"""Extending sequences: the verb of every step, which checks a batch once for as long as it stays the same."""

from collections.abc import Sequence as Seq
from operator import add, attrgetter, index
from typing import cast

from lightkv.edits import Alloc, AllocPart
from lightkv.errors import OutOfTokens, SequenceTooLong

from .sequence import Sequence, require_lists
from .state import LedgerState
from .windows import WindowedBatch, WindowedSequence


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
        # Where layers do not all see everything: what that batch takes, and what the last one of several does.
        self._in_classes = bool(state.tails.lifetimes)
        self._windowed = self._several = WindowedBatch(state.tails.widths)

    def growth(self, sequences: Seq[Sequence], count: int) -> int:
        """Returns how many available slots are enough to extend each of these by `count` tokens."""
        tails, batch = self._state.tails, self._windowed
        if not self._in_classes:
            return count * len(sequences)
        is_known = count == 1 and sequences and sequences == self._batch  # as in most steps
        if is_known and tails.agenda.due.isdisjoint(batch.members):
            return len(sequences) * self._state.width + batch.num_slots(0)
        return tails.growth(cast("Seq[WindowedSequence]", sequences), count)

    def require_batch(self, sequences: Seq[Sequence]) -> None:
        """Raises TypeError, ValueError unless these are open sequences of the ledger, none of them twice."""
        if sequences != self._batch:
            self._set_batch(sequences)

    def check(self) -> None:
        """Raises CheckFailed unless what happens to each sequence is noticed, and what it takes is known."""
        if self._in_classes:
            agenda = self._state.tails.agenda
            agenda.check(self._state.sequences)
            self._several.check(agenda.due)

    def forget(self, sequence: Sequence) -> None:
        """Has the next batch checked, since a sequence is about to close."""
        self._batch = []
        if isinstance(sequence, WindowedSequence):
            self._several.remove(sequence)

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
        if self._in_classes:
            needed = self._bring_up_to_date(counts, needed)
        self.make_room(needed)
        edit = Alloc(self._batch_rows, tuple(starts), tuple(counts))
        self._state.alloc(edit, needed)
        if self._in_classes:
            self._windowed.emit(edit, self._state.emit)
        if is_decode:
            for sequence in sequences:
                sequence.length += 1
        else:
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.length += count
        if self._in_classes:
            agenda = self._state.tails.agenda
            self._windowed.longest = self._batch_end
            if self._windowed is self._several:
                agenda.move_on(self._state.sequences)
            else:  # they have grown, but by an extension that the agenda does not count
                agenda.due |= self._windowed.members
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

    def _bring_up_to_date(self, counts: Seq[int], num_tokens: int) -> int:
        """Frees what has passed of those sequences of the batch to which something happens. Returns how many
        slots the next tokens of the batch take, `num_tokens` in all. There may be too few even then."""
        tails, batch, more = self._state.tails, self._windowed, num_tokens - len(counts)
        if more or tails.agenda.due:
            due = dict.fromkeys(tails.agenda.due & batch.members, 1)
            if more:
                counted = zip(cast("Seq[WindowedSequence]", self._batch), counts, strict=True)
                due.update([(one, count) for one, count in counted if count != 1])
            in_order = sorted(due, key=attrgetter("row"))
            for one in in_order:
                tails.settle(one)
            for one in in_order:
                tails.prepare(one, due[one])
                batch.put(one)
        return num_tokens * self._state.width + batch.num_slots(more)

    def extend_imported(self, sequence: WindowedSequence, length: int, firsts: Seq[int]) -> Alloc:
        """Extends a sequence by tokens of which the classes from 1 on get those from the entries `firsts` on
        (`TokenLedger.extend_imported`)."""
        self.require_batch([sequence])
        state, start = self._state, sequence.length
        if length <= start:
            raise ValueError(f"{sequence} has {start} tokens already; give more than {length}")
        if length > self.max_entries:
            raise SequenceTooLong(length, self.max_entries)
        parts = [
            AllocPart(cls, (sequence.row,), (first,), (length - first,))
            for cls, first in enumerate([max(start, first) for first in firsts], start=1)
        ]
        needed = (length - start) * state.width
        needed += sum([width * part.counts[0] for width, part in zip(state.tails.widths, parts, strict=True)])
        self.make_room(needed)
        edit = Alloc((sequence.row,), (start,), (length - start,))
        state.alloc(edit, needed)
        for part in parts:
            state.emit(part)
        state.tails.leave_before(sequence, firsts)
        sequence.length = length
        sequence.points = [point for point in sequence.points if point >= length]
        self._windowed.longest = self._batch_end = self.max_entries  # so that the next `extend` looks it up
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
        batch = list(sequences)
        try:
            rows = tuple([sequence.row for sequence in batch])
        except AttributeError:
            rows = ()
        members = set(cast("list[WindowedSequence]", batch if rows and self._in_classes else ()))
        if members:
            for one in members - self._several.members:
                self._state.require_open(one)
        elif list(map(self._state.sequences.get, rows)) != batch:
            for sequence in batch:
                self._state.require_open(sequence)
        if len(rows) > 1 and len(members or set(rows)) < len(rows):
            raise ValueError("a sequence occurs twice; give it one count")
        self._slot_per_token = self._in_classes or self.is_even or all(one.slot_per_token for one in batch)
        self._batch = batch
        self._batch_rows = rows
        self._batch_end = self.max_entries  # so that the next `extend` looks it up
        if members:
            self._follow(members)

    def _follow(self, members: set[WindowedSequence]) -> None:
        """Finds out what comes to the batch and what leaves it. A single sequence, such as that of a chunk of a
        prompt, is a batch of its own beside that of the decodes."""
        self._windowed = self._several
        if len(members) == 1 < len(self._several.members):
            self._several.remove(*members)
            self._windowed = WindowedBatch(self._state.tails.widths)
        self._windowed.follow(members, self._state.tails.agenda.due)
        self._batch_end = self._windowed.longest
