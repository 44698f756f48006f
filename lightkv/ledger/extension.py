"""Extending sequences: the verb of every step, which checks a batch once for as long as it stays the same."""

from collections.abc import Sequence as Seq
from operator import add, index
from typing import cast

from lightkv.edits import Alloc, AllocPart
from lightkv.errors import OutOfTokens, SequenceTooLong

from .sequence import Sequence, require_lists
from .state import LedgerState
from .windows import Takers, WindowedSequence, columns_of, due_of


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
        # Where layers do not all see everything: what the batch's next tokens take, and for how many steps.
        self._takers: list[Takers] = []
        self._num_needed = self._num_alike = 0

    def growth(self, sequences: Seq[Sequence], count: int) -> int:
        """Returns how many available slots are enough to extend each of these by `count` tokens."""
        if not self._state.tails.lifetimes:
            return count * len(sequences)
        if count == 1 and self._num_alike > 0 and sequences == self._batch:  # as in most steps
            return self._num_needed
        windowed, counts = cast("Seq[WindowedSequence]", sequences), [count] * len(sequences)
        due, columns = due_of(windowed, counts), columns_of(windowed)
        needed, passed = self._state.tails.growth(windowed, counts, due, columns)
        return needed - passed

    def require_batch(self, sequences: Seq[Sequence]) -> None:
        """Raises TypeError, ValueError unless these are open sequences of the ledger, none of them twice."""
        if sequences != self._batch:
            self._set_batch(sequences)

    def forget_batch(self) -> None:
        """Has the next batch checked, since a sequence has closed, forked or gone back."""
        self._batch = []
        self._num_alike = 0

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Extends `sequences[i]` by `counts[i]` tokens, all or none (`TokenLedger.extend`)."""
        require_lists(sequences, counts)
        if not sequences:
            return Alloc((), (), ())
        if sequences != self._batch:
            self._set_batch(sequences)
        if not self._slot_per_token:
            in_classes = self._state.tails.lifetimes
            return (self._extend_in_classes if in_classes else self._extend_each)(sequences, counts)
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
        self.make_room(needed)
        edit = Alloc(self._batch_rows, tuple(starts), tuple(counts))
        self._state.alloc(edit, needed)
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

    def _extend_in_classes(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Extends a batch of a model whose layers do not all see everything. What has passed is freed first,
        also if there is too little room then."""
        state, is_decode = self._state, counts.count(1) == len(counts)
        starts = tuple([one.length for one in sequences])
        if not (is_decode and self._num_alike):
            index(sum(counts))  # raises for numbers that are no integers
            end = max(starts) + 1
            if not is_decode:
                if min(counts) < 1:
                    raise ValueError(f"asked for {min(counts)} tokens; ask for at least one of each sequence")
                end = max(map(add, starts, counts))
            if end > self.max_entries:
                raise SequenceTooLong(end, self.max_entries)
            self._bring_up_to_date(sequences, counts)
            self._num_alike = 1
            if is_decode:
                batch = cast("Seq[WindowedSequence]", sequences)
                longest = self.max_entries - end + 1
                self._num_alike = max(min(min([one.event - one.length for one in batch]), longest), 1)
        self.make_room(self._num_needed)
        edit = Alloc(self._batch_rows, starts, tuple(counts))
        state.alloc(edit, self._num_needed)
        for takers in self._takers:
            for other in takers.edits(starts):
                state.emit(other)
        if is_decode:
            for sequence in sequences:
                sequence.length += 1
        else:
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.length += count
        self._num_alike -= 1
        return edit

    def _bring_up_to_date(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Frees what has passed of those sequences to which something happens, and finds out what their next
        tokens take. Raises OutOfTokens."""
        tails, state = self._state.tails, self._state
        self._num_alike = 0
        batch = cast("Seq[WindowedSequence]", sequences)
        due = due_of(batch, counts)
        for i in due:
            tails.settle(batch[i])
        columns = columns_of(batch)
        needed, passed = tails.growth(batch, counts, due, columns)
        if needed > (available := state.num_free + state.num_cached + passed):
            raise OutOfTokens(needed, available, state.capacity)
        for i in due:
            tails.prepare(batch[i], counts[i])
            batch[i].find_event()
            for column, distance in zip(columns, batch[i].distances, strict=True):
                column[i] = distance
        self._takers = tails.take(self._batch_rows, counts, columns)
        self._num_needed = sum(counts) * state.width + sum([takers.num_slots for takers in self._takers])

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
        self.forget_batch()
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
        if list(map(self._state.sequences.get, rows)) != batch:
            for sequence in batch:
                self._state.require_open(sequence)
        if len(rows) > 1 and len(set(rows)) < len(rows):
            raise ValueError("a sequence occurs twice; give it one count")
        in_classes = self._state.tails.lifetimes
        self._slot_per_token = self.is_even or (
            not in_classes and all(sequence.slot_per_token for sequence in batch)
        )
        self._batch = batch
        self._batch_rows = rows
        self._num_alike = 0
        self._batch_end = self.max_entries  # so that the next `extend` looks it up
