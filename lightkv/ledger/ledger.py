"""The ledger: exact counts of who holds how many tokens, what is shared, and what can be evicted.

Pure Python and integers: no torch, no slot, no clock. Each verb changes the counts and the prefix tree at
once and leaves *edits* (`edits.py`) for whoever holds the device memory; `drain` hands them out. A verb that
raises has changed nothing and left no edit.

A sequence is a path of shared segments and a private tail (`sequence.py` draws it). Named segments that nobody
holds are cached and freed by eviction; anonymous ones are there for as long as several sequences hold them: the
last one has them as its own again. A private tail is freed when its sequence closes.

After every verb `num_free + num_cached + num_held == capacity`.
"""

from collections.abc import Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from operator import add
from typing import NamedTuple

from lightkv.counts import checked_count
from lightkv.edits import (
    Alloc,
    CopyRow,
    Edit,
    FreeRange,
    KeepEntries,
    MapSegments,
    MoveEntries,
    SetGap,
    StoreSegment,
)
from lightkv.errors import CheckFailed, OutOfRows, OutOfTokens, SequenceTooLong

from .prefix_tree import TOKEN_BYTES, Namespace, Segment
from .sequence import Sequence
from .state import Paths


class Match(NamedTuple):
    """What the cache has of a prompt: the path of segments, the deepest first, of which the first is matched
    for `tip` tokens and the others whole."""

    path: tuple[Segment, ...]
    tip: int
    num_tokens: int


class TokenLedger:
    """Counts for a pool of `capacity` tokens and a table of `max_sequences` rows of `max_entries` entries."""

    def __init__(self, capacity: int, max_sequences: int, max_entries: int) -> None:
        self.capacity = checked_count("capacity", capacity)
        self.max_sequences = checked_count("max_sequences", max_sequences)
        self.max_entries = checked_count("max_entries", max_entries)
        self.step = 0  # the step being planned; publications carry it until `confirm`
        self._paths = Paths(self.capacity)
        self._free_rows = list(range(self.max_sequences, 0, -1))
        # Whom `extend` was last called for, their rows, and no less than where the longest ends.
        self._batch: list[Sequence] = []
        self._batch_rows: tuple[int, ...] = ()
        self._batch_end = 0

    @property
    def num_free(self) -> int:
        """Tokens that nobody holds and nothing is cached in."""
        return self._paths.num_free

    @property
    def num_cached(self) -> int:
        """Tokens that nobody holds, kept because they may be hit."""
        return self._paths.num_cached

    @property
    def num_held(self) -> int:
        """Tokens that some open sequence holds, shared ones once."""
        return self.capacity - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Tokens that `extend` could give: the free and, by eviction, the cached."""
        return self.num_free + self.num_cached

    @property
    def num_open(self) -> int:
        """Sequences that are open."""
        return len(self._paths.sequences)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """The open sequences."""
        return self._paths.sequences.values()

    @property
    def shared(self) -> Set[Segment]:
        """The segments that more than one open sequence holds."""
        return self._paths.tree.shared

    def holders(self, segment: Segment) -> Iterator[Sequence]:
        """The open sequences that hold `segment`."""
        return map(self._paths.sequences.__getitem__, segment.holders)

    def sole_segments(self) -> Iterator[tuple[int, Segment]]:
        """The segments that one open sequence alone holds, with its row."""
        for row, sequence in self._paths.sequences.items():
            for segment in sequence.path():
                if len(segment.holders) == 1:
                    yield row, segment

    def private_ranges(self) -> list[tuple[int, int, int]]:
        """What each open sequence alone holds: (row, first entry, end)."""
        return [
            (sequence.row, sequence.shared, sequence.length) for sequence in self._paths.sequences.values()
        ]

    def require_open(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is closed, or another ledger's."""
        if self._paths.sequences.get(sequence.row) is not sequence:
            raise ValueError("the sequence is closed, or another ledger's; open one here")

    def drain(self) -> list[Edit]:
        """The edits since the last call, in order; they are the caller's to have applied."""
        edits, self._paths.edits = self._paths.edits, []
        return edits

    def open(self, token_ids: bytes, namespace: Namespace = ()) -> Sequence:
        """A new sequence that holds the longest cached prefix of its prompt (`match`).

        At least one token is left to compute, so that there are logits to sample from. `token_ids` is int32
        bytes; sequences of different `namespace` share nothing. Raises OutOfRows, SequenceTooLong,
        ValueError.
        """
        length = _num_tokens(token_ids)
        if length > self.max_entries:
            raise SequenceTooLong(length, self.max_entries)
        if not self._free_rows:
            raise OutOfRows(self.max_sequences)

        paths = self._paths
        tree = paths.tree
        root = tree.root(namespace)
        path, matched = tree.find(root, token_ids, 0, len(token_ids) - TOKEN_BYTES)
        row = self._free_rows.pop()
        root.holders.add(row)
        node, shared = root, 0
        if path:
            node = path[-1]
            if matched < len(node.tokens):
                path[-1] = node = paths.split(node, matched // TOKEN_BYTES)
            paths.num_cached -= tree.hold(path, row)
            shared = sum([len(segment.tokens) for segment in path]) // TOKEN_BYTES
            paths.edits.append(MapSegments(row, tuple([segment.id for segment in path])))
        sequence = paths.sequences[row] = Sequence(row, token_ids, root, node, shared)
        return sequence

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """What `open` would hit. Changes nothing. Raises ValueError."""
        _num_tokens(token_ids)
        root = self._paths.tree.roots.get(namespace)
        if root is None:
            return Match((), 0, 0)
        path, matched = self._paths.tree.find(root, token_ids, 0, len(token_ids) - TOKEN_BYTES)
        tip = matched // TOKEN_BYTES
        return Match(tuple(path[::-1]), tip, tip + sum(segment.length for segment in path[:-1]))

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int:
        """Slots that `count` tokens more for each of these take from what is available."""
        return count * len(sequences)

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """`counts[i]` more slots for `sequences[i]`, all or none; evicts cached tokens as needed.

        Raises OutOfTokens only when free and cached tokens together are too few; SequenceTooLong, ValueError.
        """
        if len(sequences) != len(counts):
            raise ValueError(f"{len(sequences)} sequences and {len(counts)} counts")
        if not sequences:
            return
        if sequences != self._batch:
            self._set_batch(sequences)
        starts = [sequence.length for sequence in sequences]
        is_step = counts.count(1) == len(starts)  # a token each
        if is_step:
            needed = len(starts)
            self._batch_end += 1
            if self._batch_end > self.max_entries:  # it may be too high
                self._batch_end = max(starts) + 1
        else:
            needed = sum(counts)
            if min(counts) < 1:
                raise ValueError(f"asked for {min(counts)} tokens; ask for at least one of each sequence")
            self._batch_end = max(map(add, starts, counts))
        if self._batch_end > self.max_entries:
            raise SequenceTooLong(self._batch_end, self.max_entries)
        if needed > self.num_free:
            if needed > self.num_available:
                raise OutOfTokens(needed, self.num_available, self.capacity)
            self.evict(needed - self.num_free)
        self._paths.edits.append(Alloc(self._batch_rows, tuple(starts), tuple(counts)))
        self._paths.num_free -= needed
        if is_step:
            for sequence in sequences:
                sequence.length += 1
        else:
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.length += count

    def _set_batch(self, sequences: Seq[Sequence]) -> None:
        """Check who is to be extended, once for as long as the same ones are. Raises ValueError."""
        rows = tuple([sequence.row for sequence in sequences])
        batch = list(sequences)
        if list(map(self._paths.sequences.get, rows)) != batch:
            for sequence in batch:
                self.require_open(sequence)
        if len(rows) > 1 and len(set(rows)) < len(rows):
            raise ValueError("a sequence is named twice; give it one count")
        self._batch = batch
        self._batch_rows = rows
        self._batch_end = self.max_entries  # so that it is looked up

    def shrink(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Undo an `extend`: the last `counts[i]` slots of `sequences[i]` go back, all or none, for what was
        to be computed was not. Their prompts stay what they are. Raises ValueError for slots that others may
        hold.
        """
        if len(sequences) != len(counts):
            raise ValueError(f"{len(sequences)} sequences and {len(counts)} counts")
        if sequences != self._batch:
            self._set_batch(sequences)
        for sequence, count in zip(sequences, counts, strict=True):
            if not 0 <= count <= sequence.num_private:
                raise ValueError(f"{sequence} cannot give back {count} of {sequence.num_private} own tokens")
        for sequence, count in zip(sequences, counts, strict=True):
            if count:
                end = sequence.length
                sequence.length -= count
                self._paths.num_free += count
                self._paths.edits.append(FreeRange(sequence.row, end - count, end))
                if sequence.dropped:
                    self._paths.edits.append(SetGap(sequence.row, end - count, sequence.dropped))

    def publish(self, sequence: Sequence) -> None:
        """Let what has slots of the sequence's prompt be hit by others, while it still runs.

        It may be published in the step that computes it: every layer writes K/V before it attends. Until
        `confirm`, `retract` takes it back. Where the tree has these tokens from another sequence already,
        this one's copy stays private; so does what a sequence computes after it has dropped something.
        """
        self.require_open(sequence)
        if sequence.dropped:
            return
        if not sequence.node.named:
            for segment in self._paths.name(sequence, sequence.prompt):
                segment.confirmed = 0
                segment.published = self.step
                self._paths.unconfirmed.append(segment)
        end = min(sequence.length, len(sequence.prompt) // TOKEN_BYTES)
        if end <= sequence.shared:
            return
        tokens = sequence.prompt[sequence.shared * TOKEN_BYTES : end * TOKEN_BYTES]
        node = sequence.node
        if not node.named or tokens[:TOKEN_BYTES] in node.children:
            return
        if node.parent is not None and len(node.holders) == 1 and not node.children:
            # Its own newest segment, say of the chunk before, grows: one segment, not a chain of chunks.
            if node.confirmed == node.length:
                self._paths.unconfirmed.append(node)
            node.tokens += tokens
        else:
            node = self._paths.tree.add(node, tokens)
            node.holders.add(sequence.row)
            node.used = self._paths.tree.touch()
            node.confirmed = 0
            sequence.node = node
            self._paths.unconfirmed.append(node)
        node.published = self.step
        sequence.shared = end
        self._paths.edits.append(StoreSegment(sequence.row, end - node.length, end, node.id))

    def confirm(self, step: int) -> None:
        """Every step up to this one has been computed: what it published stays."""
        waiting = []
        for segment in self._paths.unconfirmed:
            if segment.published <= step:
                segment.confirmed = segment.length
            else:
                waiting.append(segment)
        self._paths.unconfirmed = waiting

    def retract(self) -> None:
        """The steps not confirmed have failed: drop what they published.

        Close their sequences first, with `cache=False`. Raises ValueError while one still holds such tokens.
        """
        doubtful = [s for s in self._paths.unconfirmed if s.parent is not None and s.named]
        rows = sorted({row for segment in doubtful for row in segment.holders})
        if rows:
            raise ValueError(
                f"rows {rows} hold what a failed step has published; close their sequences first"
            )
        for segment in doubtful:
            if segment.parent is None:
                continue  # went with a doubtful segment above it
            for below in segment.below():
                self._paths.trim(below, 0)
            self._paths.trim(segment, segment.confirmed)
        self._paths.unconfirmed = []

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """End a sequence. With `cache` its tokens stay to be hit; without, its private tail is freed.

        `output_ids` (int32 bytes) are the generated ids, which make the tail beyond the prompt cacheable;
        what no id is known for is freed, and so is what another sequence has cached already, or what comes
        after tokens that were dropped.
        """
        self.require_open(sequence)
        row, start, end = sequence.row, sequence.shared, sequence.length
        if cache and not sequence.dropped:
            start = self._paths.insert(sequence, sequence.prompt + output_ids)
        if end > start:
            self._paths.edits.append(FreeRange(row, start, end))
            self._paths.num_free += end - start
        self._paths.leave(sequence, sequence.path())
        root = sequence.root
        root.holders.remove(row)
        self._paths.tree.rest(root)
        self._paths.gapped.discard(row)
        if sequence.dropped:
            self._paths.edits.append(SetGap(row, 0, 0))
        del self._paths.sequences[row]
        self._free_rows.append(row)
        self._batch = []
        sequence.row = 0

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence that holds the same tokens: no K/V is copied. Raises OutOfRows, ValueError.

        Each goes its own way from here: what it adds is its own. On closing, each names what it has generated.
        """
        self.require_open(sequence)
        if not self._free_rows:
            raise OutOfRows(self.max_sequences)
        self._paths.share_tail(sequence)
        row = self._free_rows.pop()
        self._paths.tree.hold(sequence.path(), row)
        self._paths.join(sequence)
        sequence.root.holders.add(row)
        twin = Sequence(row, sequence.prompt, sequence.root, sequence.node, sequence.shared)
        twin.num_hit = sequence.num_hit
        twin.sink_node, twin.num_sinks, twin.dropped = (
            sequence.sink_node,
            sequence.num_sinks,
            sequence.dropped,
        )
        if sequence.row in self._paths.gapped:
            self._paths.gapped.add(row)
        self._paths.sequences[row] = twin
        self._paths.edits.append(CopyRow(row, sequence.row, sequence.length))
        return twin

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Let go of all but its first `length` entries: say, of tokens that were guessed wrong.

        What it shared stays with the others, or cached. What is cut off of its prompt is its prompt no more.
        Cut to no more than its sinks it has dropped nothing; else the next token's position is
        `length + dropped`, which is after all that is left. Raises ValueError.
        """
        self.require_open(sequence)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot cut a sequence of {sequence.length} entries to {length}")
        start = max(length, sequence.shared)
        if start < sequence.length:
            self._paths.edits.append(FreeRange(sequence.row, start, sequence.length))
            self._paths.num_free += sequence.length - start
        if length < sequence.shared:
            self._paths.drop(sequence, length, sequence.shared)
        sequence.length = length
        if sequence.dropped:
            if length <= sequence.num_sinks:  # what was dropped came after all that is left
                sequence.dropped = sequence.num_sinks = 0
            self._paths.edits.append(SetGap(sequence.row, length, sequence.dropped))
        if not sequence.dropped:
            sequence.prompt = sequence.prompt[: length * TOKEN_BYTES]

    def release(self, sequence: Sequence, count: int, sinks: int = 0) -> int:
        """Drop the `count` oldest tokens after its first `sinks`: the window has moved on.

        Returns how many slots are free at once: what others hold stays with them, what the tree caches stays
        cached. The entries that remain move down; nothing that the sequence computes is cached from now on.
        Raises ValueError: for more than it has; for more `sinks` than before, once it has dropped something;
        for fewer, too, while it still shares both parts.
        """
        self.require_open(sequence)
        row, length, shared = sequence.row, sequence.length, sequence.shared
        start, end = sinks, sinks + count
        if count < 0 or sinks < 0 or end > length:
            raise ValueError(f"cannot drop {count} tokens after {sinks}, of {length}")
        num_sinks = sequence.num_sinks
        if sequence.dropped and (sinks > num_sinks or (sinks < num_sinks and sequence.sink_node is not None)):
            raise ValueError(f"{num_sinks} sinks were kept so far; {sinks} cannot be from now on")
        if not count:
            return 0
        before = self.num_free
        if start < shared:
            self._paths.drop(sequence, start, min(end, shared))
        start = max(start, shared)
        if start < end:
            self._paths.edits.append(FreeRange(row, start, end))
            self._paths.num_free += end - start
        self._paths.edits.append(MoveEntries(row, end, length, sinks))
        sequence.length -= count
        sequence.dropped += count
        sequence.num_sinks = sinks
        return self.num_free - before

    def keep(self, sequence: Sequence, count: int) -> int:
        """Of its private tokens, its sinks left out, only `count` stay; which, the memory is told.

        Returns how many slots are free at once. The entries that remain move down, in their order; nothing
        that the sequence computes is cached from now on. Raises ValueError.
        """
        self.require_open(sequence)
        start = max(sequence.shared, sequence.num_sinks)
        num_given = sequence.length - start - count
        if count < 0 or num_given < 0:
            raise ValueError(f"cannot keep {count} of {sequence.length - start} private tokens")
        if num_given:
            self._paths.edits.append(KeepEntries(sequence.row, start, sequence.length, count))
            self._paths.num_free += num_given
            sequence.length -= num_given
            sequence.dropped += num_given
        return num_given

    def evict(self, count: int) -> None:
        """Free exactly `count` cached tokens, those used longest ago first. Raises OutOfTokens."""
        if count < 0:
            raise ValueError(f"asked to evict {count} tokens")
        if count > self.num_cached:
            raise OutOfTokens(count, self.num_cached, self.capacity)
        while count:
            segment = self._paths.tree.oldest()
            assert segment is not None  # num_cached counts exactly what `oldest` can reach
            keep = max(segment.length - count, 0)
            count -= segment.length - keep
            self._paths.trim(segment, keep)

    def check(self) -> None:
        """Recount everything from the sequences and the tree. Raises CheckFailed."""
        self._paths.tree.check(self._paths.gapped)
        held: dict[Segment, set[int]] = {}
        private = 0
        for row, sequence in self._paths.sequences.items():
            path = list(sequence.path())
            if sequence.row != row or sequence.shared != sum(segment.length for segment in path):
                raise CheckFailed(f"{sequence} in row {row} has a path of {path}")
            if sequence.length < sequence.shared:
                raise CheckFailed(f"{sequence} is shorter than its path")
            private += sequence.num_private
            for segment in path:
                held.setdefault(segment, set()).add(row)
            has_gap = sequence.sink_node is not None
            if (row in self._paths.gapped) != has_gap or row not in sequence.root.holders:
                raise CheckFailed(f"{sequence} has a path of {path}, and is not booked with it")
        cached = shared = 0
        for segment in {*self._paths.tree, *held}:
            if segment.holders != held.get(segment, set()):
                rows = sorted(held.get(segment, ()))
                raise CheckFailed(f"{segment} lists {sorted(segment.holders)}; it is on the paths of {rows}")
            if segment.holders:
                shared += segment.length
            else:
                cached += segment.length
        counts = {"cached": (self.num_cached, cached), "held": (self.num_held, shared + private)}
        for name, (booked, counted) in counts.items():
            if booked != counted:
                raise CheckFailed(f"{booked} tokens {name} in the books, {counted} by recount")
        if self.num_free < 0:
            raise CheckFailed(f"{self.num_free} tokens free")
        if sorted([*self._free_rows, *self._paths.sequences]) != list(range(1, self.max_sequences + 1)):
            raise CheckFailed(f"rows free {sorted(self._free_rows)}, open {sorted(self._paths.sequences)}")


def _num_tokens(prompt: bytes) -> int:
    length, rest = divmod(len(prompt), TOKEN_BYTES)
    if rest or not length:
        raise ValueError(f"a prompt is int32 token ids, at least one: got {len(prompt)} bytes")
    return length
