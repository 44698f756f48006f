"""The ledger: exact counts of which sequence holds how many tokens, what is shared, and what can be evicted.

It is pure Python arithmetic without torch, slots or a clock. Each verb changes the counts and the prefix tree
at once and emits *edits* (`lightkv/edits.py`), which the device memory's owner applies; `drain` returns
them. A verb that raises has changed nothing and emitted no edit.

After every verb `num_free + num_cached + num_held == capacity`.
"""

from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from operator import add, index
from typing import TypeVar

from lightkv.counts import checked_count
from lightkv.edits import Alloc, Edit
from lightkv.errors import OutOfRows, OutOfTokens, SequenceTooLong
from lightkv.holdings import HeldRow, Holdings
from lightkv.triton_kernels.layout.ring import Ring

from .crosses import CrossSequence, ReaderSequence
from .prefix_tree import TOKEN_BYTES, Match, Namespace, PrefixTree, Segment
from .rings import RingSequence
from .sequence import Sequence, require_lists, require_sequence
from .sessions import Session, SessionCounts
from .state import LedgerState

S = TypeVar("S", bound=Sequence)


class TokenLedger:
    """Counts for a pool of `capacity` tokens and a table of `max_sequences` rows of `max_entries` entries.

    `max_protected`: the most tokens that sessions protect, which are evicted last.
    """

    def __init__(self, capacity: int, max_sequences: int, max_entries: int, max_protected: int = 0) -> None:
        self.max_sequences = checked_count("max_sequences", max_sequences)
        self.max_entries = checked_count("max_entries", max_entries)
        self.step = 0  # the step being planned; publications carry it until `confirm`
        max_protected = checked_count("max_protected", max_protected, least=0)
        self._state = LedgerState(checked_count("capacity", capacity), self.max_sequences, max_protected)
        # The sequences of the last `extend`, their rows, and an upper bound of where the longest of them ends.
        self._batch: list[Sequence] = []
        self._batch_rows: tuple[int, ...] = ()
        self._batch_end = 0
        self._slot_per_token = True  # whether each new token of that batch takes a slot of its own

    @property
    def capacity(self) -> int:
        """Tokens of the pool."""
        return self._state.capacity

    @property
    def num_free(self) -> int:
        """Tokens that no sequence holds and the cache does not keep."""
        return self._state.num_free

    @property
    def num_cached(self) -> int:
        """Tokens that no sequence holds, kept because a prompt may hit them."""
        return self._state.num_cached

    @property
    def num_held(self) -> int:
        """Tokens that open sequences hold; shared tokens count once."""
        state = self._state
        return state.capacity - state.num_free - state.num_cached

    @property
    def num_available(self) -> int:
        """Tokens that `extend` can allocate: the free ones and, by eviction, the cached ones."""
        return self._state.num_free + self._state.num_cached

    @property
    def num_open(self) -> int:
        """Open sequences."""
        return len(self._state.sequences)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """The open sequences."""
        return self._state.sequences.values()

    @property
    def shared(self) -> Set[Segment]:
        """The segments that more than one open sequence holds."""
        return self._state.tree.shared

    def __repr__(self) -> str:
        return (
            f"TokenLedger({self.num_free} free, {self.num_cached} cached, {self.num_held} held of "
            f"{self.capacity} tokens; {self.num_open} of {self.max_sequences} sequences open)"
        )

    def indexed_segments(self) -> Iterator[Segment]:
        """Yields every segment that look-ups can find, parents before children."""
        return iter(self._state.tree)

    def holders(self, segment: Segment) -> Iterator[Sequence]:
        """Yields the open sequences that hold `segment`."""
        return map(self._state.sequences.__getitem__, segment.holders)

    def sole_segments(self) -> Iterator[tuple[int, Segment]]:
        """Yields (row, segment) for each segment that exactly one open sequence holds."""
        for row, sequence in self._state.sequences.items():
            for segment in sequence.path():
                if len(segment.holders) == 1:
                    yield row, segment

    def private_ranges(self) -> list[tuple[int, int, int]]:
        """Returns the private tail of each open sequence as (row, first entry, end)."""
        return [(one.row, one.shared, one.length) for one in self._state.sequences.values()]

    def holdings(self) -> Holdings:
        """Returns what each open sequence's row and each segment holds, once the edits so far are applied."""
        segments = {segment.id: segment.length for segment in self._state.tree}
        rows = []
        for row, sequence in self._state.sequences.items():
            path = list(sequence.path())[::-1]
            segments.update((segment.id, segment.length) for segment in path)
            ids = tuple(segment.id for segment in path)
            rows.append(HeldRow(row, ids, sequence.shared, sequence.length, sequence.gap.dropped))
        return Holdings(rows, segments)

    def require_open(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is closed or belongs to another ledger."""
        self._state.require_open(sequence)

    def drain(self) -> list[Edit]:
        """Returns the edits since the last call, in order. The caller has to have them applied."""
        return self._state.drain()

    @property
    def tree(self) -> PrefixTree:
        """The prefix tree, which can note what comes and goes in it; only verbs of the ledger change it."""
        return self._state.tree

    def open(self, token_ids: bytes, namespace: Namespace = (), session: Session | None = None) -> Sequence:
        """Opens a sequence that holds the longest cached prefix of its prompt (`match`).

        At least one token is left to compute, so that there are logits to sample from. `token_ids` is int32
        bytes; sequences of different `namespace` share nothing. `session`: protects the tokens that are cached
        when the sequence closes (`open_session`). Raises OutOfRows, SequenceTooLong, ValueError.
        """
        return self._open(Sequence(token_ids, session), _num_tokens(token_ids), namespace)

    def open_ring(
        self, token_ids: bytes, ring: Ring, namespace: Namespace = (), session: Session | None = None
    ) -> RingSequence:
        """Opens a sequence in a row of `ring.capacity` entries, which get their slots as it fills and are then
        written again; a prompt of any length may follow. At most its sinks are shared. Raises what `open`
        does."""
        sequence = RingSequence(token_ids, session, ring)
        _num_tokens(token_ids)
        return self._open(sequence, ring.capacity, namespace)

    def open_reader(
        self,
        token_ids: bytes,
        cross: CrossSequence,
        namespace: Namespace = (),
        session: Session | None = None,
    ) -> ReaderSequence:
        """Opens a sequence that reads a cross sequence (`open_cross`) and keeps it open, as its forks do. It
        shares tokens only with other readers. Raises what `open` does, and ValueError for any other `cross`."""
        self.require_open(cross)
        reader = ReaderSequence(token_ids, session, cross)
        return self._open(reader, _num_tokens(token_ids), namespace, cross.root.namespace)

    def open_cross(self, length: int) -> CrossSequence:
        """Opens a cross sequence: `length` tokens of an encoder, say, whose K/V is written once and read by the
        sequences that are opened with it (`open_reader`), and allocates all its slots. `close` ends the
        caller's hold; the slots are freed once the last reader has closed, too, with all that its readers have
        left cached. Raises OutOfTokens, OutOfRows, SequenceTooLong, ValueError.
        """
        if length < 1:
            raise ValueError(f"a cross sequence of {length} tokens; give at least one")
        self._require_row(length)
        self._make_room(length)
        sequence = CrossSequence()
        # An object of its own, so that no namespace of a caller's is that of its readers.
        self._state.open(sequence, (object(),))
        self._state.alloc(Alloc((sequence.row,), (0,), (length,)), length)
        sequence.length = length
        return sequence

    def _open(self, sequence: S, num_entries: int, namespace: Namespace, within: Namespace = ()) -> S:
        if not isinstance(namespace, tuple):
            raise TypeError(f"namespace is {namespace!r} ({type(namespace).__name__}); give a tuple")
        self._require_row(num_entries)
        self._state.open(sequence, namespace + within)
        return sequence

    def _require_row(self, num_entries: int) -> None:
        """Raises SequenceTooLong, OutOfRows unless there is a free row of so many entries."""
        if num_entries > self.max_entries:
            raise SequenceTooLong(num_entries, self.max_entries)
        if not self._state.has_free_row:
            raise OutOfRows(self.max_sequences)

    def open_session(self, name: str) -> Session:
        """Returns the session `name`, which is opened if it is not open.

        What its sequences leave in the cache is protected: it is evicted after all that no session protects,
        that of the session that was used the longest ago first. If all sessions together exceed
        `max_protected`, they lose their protection in the same order. Every call counts as a use.
        """
        return self._state.sessions.open(name)

    def release_session(self, name: str) -> bool:
        """Ends a session, whose tokens stay cached and are protected no more. Sequences of it that are open
        protect nothing when they close. Returns False where no such session is open."""
        return self._state.sessions.release(name)

    @property
    def session_counts(self) -> SessionCounts:
        """The sessions that protect tokens, and how many tokens they protect and have lost."""
        return self._state.sessions.counts

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """Returns what `open` would hit. Changes nothing. Raises ValueError."""
        _num_tokens(token_ids)
        return self._state.tree.match(namespace, token_ids)

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int:
        """Returns how many available slots are enough to extend each of these by `count` tokens."""
        return count * len(sequences)

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Allocates `counts[i]` more slots for `sequences[i]`, all or none; evicts cached tokens as needed.

        Returns the edit of the allocation, which `drain` hands out, too, unless it allocates nothing: some
        kinds of sequence are extended with fewer slots than tokens (`Sequence.slots_needed`).

        Raises OutOfTokens only when free and cached tokens together are too few; SequenceTooLong, ValueError.
        """
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
        self._make_room(needed)
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
            self._make_room(sum(needed))
            self._state.alloc(edit, sum(needed))
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.advance(count)
        return edit

    def _make_room(self, needed: int) -> None:
        """Evicts cached tokens until `needed` are free. Raises OutOfTokens."""
        state = self._state
        if needed > state.num_free:
            if needed > self.num_available:
                raise OutOfTokens(needed, self.num_available, self.capacity)
            state.evict(needed - state.num_free)

    def _set_batch(self, sequences: Seq[Sequence]) -> None:
        """Checks the sequences of a batch, once for as long as the same ones are extended."""
        slot_per_token = True
        for sequence in sequences:
            if not isinstance(sequence, Sequence):  # the call alone would take longer, for each of a batch
                require_sequence(sequence)
            slot_per_token = slot_per_token and sequence.slot_per_token
        rows = tuple([sequence.row for sequence in sequences])
        batch = list(sequences)
        if list(map(self._state.sequences.get, rows)) != batch:
            for sequence in batch:
                self.require_open(sequence)
        if len(rows) > 1 and len(set(rows)) < len(rows):
            raise ValueError("a sequence occurs twice; give it one count")
        self._slot_per_token = slot_per_token
        self._batch = batch
        self._batch_rows = rows
        self._batch_end = self.max_entries  # so that the next `extend` looks it up

    def shrink(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Undoes an `extend` whose tokens were not computed: frees the last `counts[i]` slots of
        `sequences[i]`, all or none. Raises ValueError for slots that other sequences may hold."""
        require_lists(sequences, counts)
        if sequences != self._batch:
            self._set_batch(sequences)
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.require_shrink(count)
        for sequence, count in zip(sequences, counts, strict=True):
            if num_freed := sequence.shrink(count):
                self._state.free_range(sequence.row, sequence.length, sequence.length + num_freed)
                if sequence.gap.dropped:
                    self._state.set_gap(sequence.row, sequence.length, sequence.gap.dropped)

    def set_prompt(self, sequence: Sequence, token_ids: bytes) -> None:
        """Replaces the sequence's prompt (int32 bytes), which `publish` and `close` store its tokens under.

        What it shares has to begin both prompts; that is not checked. Raises ValueError.
        """
        self.require_open(sequence)
        sequence.prompt = token_ids

    def publish(self, sequence: Sequence) -> None:
        """Lets other sequences hit those tokens of the sequence's prompt that have slots, while it runs.

        It may be called in the step that computes them: every layer writes K/V before it attends. Until
        `confirm`, `retract` undoes it. Tokens that the tree has from another sequence stay private, and so do
        all that a sequence computes after it has dropped some.
        """
        state = self._state
        state.require_open(sequence)
        start, end = sequence.shared, sequence.num_publishable
        if not end:
            return
        if not sequence.node.indexed:
            state.publish_path(sequence, self.step)
        if end > start and sequence.node.indexed:
            tokens = sequence.prompt[start * TOKEN_BYTES : end * TOKEN_BYTES]
            state.publish_tail(sequence, tokens, self.step)

    def confirm(self, step: int) -> None:
        """Keeps what was published up to and including `step`, all of which has been computed."""
        self._state.confirm(step)

    def retract(self) -> None:
        """Drops what the unconfirmed steps have published, because they failed.

        Close their sequences first, with `cache=False`. Raises ValueError while one still holds such tokens.
        """
        if rows := self._state.unconfirmed_rows():
            raise ValueError(
                f"rows {rows} hold what a failed step has published; close their sequences first"
            )
        self._state.retract()

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """Closes a sequence. With `cache` its tokens stay to be hit; without, its private tail is freed.

        `output_ids` (int32 bytes) are the generated ids, with which the tail beyond the prompt can be cached.
        Freed in any case are tokens whose id is not known, tokens that the cache has from another sequence, and
        tokens after a gap.
        """
        state = self._state
        state.require_open(sequence)
        if not sequence.let_go():
            return
        start, end = sequence.shared, sequence.length
        if cache and sequence.is_cacheable:
            start = state.cache_tail(sequence, sequence.prompt + output_ids)
        if end > start:
            state.free_range(sequence.row, start, end)
        state.close(sequence)
        self._batch = []

    def fork(self, sequence: Sequence) -> Sequence:
        """Opens another sequence that holds the same tokens; no K/V is copied. Raises OutOfRows, ValueError.

        Tokens that either of them adds from now on are its own. When it closes, it caches its own output.
        """
        state = self._state
        self._require_branching(sequence)
        if not state.has_free_row:
            raise OutOfRows(self.max_sequences)
        state.share_tail(sequence)
        return state.fork(sequence)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drops all but the first `length` entries of a sequence, such as after tokens that were guessed wrong.

        Shared tokens stay with the other holders, or cached. The prompt is cut to `length` too. A sequence that
        is cut to no more than its sinks has dropped nothing any more; otherwise its next token's position is
        `length + dropped`, after all that is left. Raises ValueError.
        """
        state = self._state
        self._require_branching(sequence)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot cut a sequence of {sequence.length} entries to {length}")
        start = max(length, sequence.shared)
        if start < sequence.length:
            state.free_range(sequence.row, start, sequence.length)
        if length < sequence.shared:
            state.leave_range(sequence, length, sequence.shared)
        sequence.length = length
        if sequence.gap.dropped:
            sequence.gap = sequence.gap.cut(length)
            state.set_gap(sequence.row, length, sequence.gap.dropped)
        if not sequence.gap.dropped:
            sequence.prompt = sequence.prompt[: length * TOKEN_BYTES]

    def release(self, sequence: Sequence, count: int, sink_tokens: int = 0) -> int:
        """Drops the `count` oldest tokens after the first `sink_tokens`, as a sliding window does.

        Returns how many slots this frees at once: tokens that others hold stay with them, and tokens that the
        tree has indexed stay cached. The remaining entries move down; nothing that the sequence computes is
        cached from now on. Raises ValueError: for more tokens than it has; once it has dropped some, for more
        `sink_tokens` than before, and for fewer while it still shares segments on both sides of the gap.
        """
        state = self._state
        self._require_branching(sequence)
        length, shared, end = sequence.length, sequence.shared, sink_tokens + count
        if count < 0 or sink_tokens < 0 or end > length:
            raise ValueError(f"cannot drop {count} tokens after {sink_tokens}, of {length}")
        sequence.gap.require_start(sink_tokens)
        if not count:
            return 0
        before = state.num_free
        if sink_tokens < shared:
            state.leave_range(sequence, sink_tokens, min(end, shared))
        if end > shared:
            state.free_range(sequence.row, max(sink_tokens, shared), end)
        state.move_entries(sequence.row, end, length, sink_tokens)
        sequence.length -= count
        sequence.gap = sequence.gap.widened(sink_tokens, count)
        return state.num_free - before

    def keep(self, sequence: Sequence, count: int) -> int:
        """Keeps only `count` of the private tokens after its sinks. Which ones stay is passed to the device
        memory.

        Returns how many slots this frees at once. The remaining entries move down in their order; nothing that
        the sequence computes is cached from now on. Raises ValueError.
        """
        self._require_branching(sequence)
        start = max(sequence.shared, sequence.gap.start)
        num_freed = sequence.length - start - count
        if count < 0 or num_freed < 0:
            raise ValueError(f"cannot keep {count} of {sequence.length - start} private tokens")
        if num_freed:
            self._state.keep_entries(sequence.row, start, sequence.length, count)
            sequence.length -= num_freed
            sequence.gap = sequence.gap.widened(sequence.gap.start, num_freed)
        return num_freed

    def _require_branching(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is not open, or cannot be forked or lose tokens."""
        self._state.require_open(sequence)
        sequence.require_branching()

    def evict(self, count: int) -> None:
        """Frees exactly `count` cached tokens: first those that were used the longest ago and were hardly hit,
        last those that sessions protect. Raises OutOfTokens, ValueError."""
        if count < 0:
            raise ValueError(f"asked to evict {count} tokens")
        if count > self.num_cached:
            raise OutOfTokens(count, self.num_cached, self.capacity)
        self._state.evict(count)

    def check(self) -> None:
        """Recounts everything from the sequences and the tree. Raises CheckFailed."""
        self._state.check()


def _num_tokens(prompt: bytes) -> int:
    if not isinstance(prompt, bytes):
        raise TypeError(
            f"a prompt is int32 bytes, not a {type(prompt).__name__}: lightkv.token_ids.int32_bytes"
        )
    length, rest = divmod(len(prompt), TOKEN_BYTES)
    if rest or not length:
        raise ValueError(f"a prompt is int32 token ids, at least one: got {len(prompt)} bytes")
    return length
