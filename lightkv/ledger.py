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

from .edits import Copy, Cut, Drop, Edit, Give, Join, Keep, Map, Shift, Split, Stash, Take, Unstash
from .errors import CheckFailed, OutOfRows, OutOfTokens, SequenceTooLong
from .prefix_tree import TOKEN_BYTES, Namespace, PrefixTree, Segment
from .sequence import Sequence


class Match(NamedTuple):
    """What the cache has of a prompt: the path of segments, the deepest first, of which the first is matched
    for `tip` tokens and the others whole."""

    path: tuple[Segment, ...]
    tip: int
    num_tokens: int


class TokenLedger:
    """Counts for a pool of `capacity` tokens and a table of `max_sequences` rows of `max_entries` entries."""

    def __init__(self, capacity: int, max_sequences: int, max_entries: int) -> None:
        for name, value in (
            ("capacity", capacity),
            ("max_sequences", max_sequences),
            ("max_entries", max_entries),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it has to be at least 1")
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.max_entries = max_entries
        self.num_free = capacity
        self.num_cached = 0
        self.step = 0  # the step being planned; publications carry it until `confirm`
        self._tree = PrefixTree()
        self._free_rows = list(range(max_sequences, 0, -1))
        self._open: dict[int, Sequence] = {}
        self._gapped: set[int] = set()  # rows that have dropped the upper part of a path they still hold
        self._unconfirmed: list[Segment] = []
        self._edits: list[Edit] = []
        # Whom `extend` was last called for, their rows, and no less than where the longest ends.
        self._batch: list[Sequence] = []
        self._batch_rows: tuple[int, ...] = ()
        self._batch_end = 0

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
        return len(self._open)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """The open sequences."""
        return self._open.values()

    @property
    def shared(self) -> Set[Segment]:
        """The segments that more than one open sequence holds."""
        return self._tree.shared

    def sole_segments(self) -> Iterator[tuple[int, Segment]]:
        """The segments that one open sequence alone holds, with its row."""
        for row, sequence in self._open.items():
            for segment in sequence.path():
                if len(segment.holders) == 1:
                    yield row, segment

    def private_ranges(self) -> list[tuple[int, int, int]]:
        """What each open sequence alone holds: (row, first entry, end)."""
        return [(sequence.row, sequence.shared, sequence.length) for sequence in self._open.values()]

    def require_open(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is closed, or another ledger's."""
        if self._open.get(sequence.row) is not sequence:
            raise ValueError("the sequence is closed, or another ledger's; open one here")

    def drain(self) -> list[Edit]:
        """The edits since the last call, in order; they are the caller's to have applied."""
        edits, self._edits = self._edits, []
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

        tree = self._tree
        root = tree.root(namespace)
        path, matched = tree.find(root, token_ids, 0, len(token_ids) - TOKEN_BYTES)
        row = self._free_rows.pop()
        root.holders.add(row)
        node, shared = root, 0
        if path:
            node = path[-1]
            if matched < len(node.tokens):
                path[-1] = node = self._split(node, matched // TOKEN_BYTES)
            self.num_cached -= tree.hold(path, row)
            shared = sum([len(segment.tokens) for segment in path]) // TOKEN_BYTES
            self._edits.append(Map(row, tuple([segment.id for segment in path])))
        sequence = self._open[row] = Sequence(row, token_ids, root, node, shared)
        return sequence

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """What `open` would hit. Changes nothing. Raises ValueError."""
        _num_tokens(token_ids)
        root = self._tree.roots.get(namespace)
        if root is None:
            return Match((), 0, 0)
        path, matched = self._tree.find(root, token_ids, 0, len(token_ids) - TOKEN_BYTES)
        tip = matched // TOKEN_BYTES
        return Match(tuple(path[::-1]), tip, tip + sum(segment.length for segment in path[:-1]))

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
        self._edits.append(Take(self._batch_rows, tuple(starts), tuple(counts)))
        self.num_free -= needed
        if is_step:
            for sequence in sequences:
                sequence.length += 1
        else:
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.length += count

    def _set_batch(self, sequences: Seq[Sequence]) -> None:
        """Check who is to be extended, once for as long as the same ones are. Raises ValueError."""
        rows = tuple([sequence.row for sequence in sequences])
        for sequence in sequences:
            self.require_open(sequence)
        if len(rows) > 1 and len(set(rows)) < len(rows):
            raise ValueError("a sequence is named twice; give it one count")
        self._batch = list(sequences)
        self._batch_rows = rows
        self._batch_end = self.max_entries  # so that it is looked up

    def shrink(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Undo an `extend`: the last `counts[i]` slots of `sequences[i]` go back, all or none, for what was
        to be computed was not. Their prompts stay what they are. Raises ValueError for slots that are not its own.
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
                self.num_free += count
                self._edits.append(Give(sequence.row, end - count, end))
                if sequence.dropped:
                    self._edits.append(Cut(sequence.row, end - count, sequence.dropped))

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
            for segment in self._name_path(sequence, sequence.prompt):
                segment.confirmed = 0
                segment.published = self.step
                self._unconfirmed.append(segment)
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
                self._unconfirmed.append(node)
            node.tokens += tokens
        else:
            node = self._tree.add(node, tokens)
            node.holders.add(sequence.row)
            node.used = self._tree.touch()
            node.confirmed = 0
            sequence.node = node
            self._unconfirmed.append(node)
        node.published = self.step
        sequence.shared = end
        self._edits.append(Stash(sequence.row, end - node.length, end, node.id))

    def confirm(self, step: int) -> None:
        """Every step up to this one has been computed: what it published stays."""
        waiting = []
        for segment in self._unconfirmed:
            if segment.published <= step:
                segment.confirmed = segment.length
            else:
                waiting.append(segment)
        self._unconfirmed = waiting

    def retract(self) -> None:
        """The steps not confirmed have failed: drop what they published.

        Close their sequences first, with `cache=False`. Raises ValueError while one still holds such tokens.
        """
        doubtful = [s for s in self._unconfirmed if s.parent is not None and s.named]
        rows = sorted({row for segment in doubtful for row in segment.holders})
        if rows:
            raise ValueError(
                f"rows {rows} hold what a failed step has published; close their sequences first"
            )
        for segment in doubtful:
            if segment.parent is None:
                continue  # went with a doubtful segment above it
            for below in segment.below():
                self._trim(below, 0)
            self._trim(segment, segment.confirmed)
        self._unconfirmed = []

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """End a sequence. With `cache` its tokens stay to be hit; without, its private tail is freed.

        `output_ids` (int32 bytes) are the generated ids, which make the tail beyond the prompt cacheable;
        what no id is known for is freed, and so is what another sequence has cached already, or what comes
        after tokens that were dropped.
        """
        self.require_open(sequence)
        row, start, end = sequence.row, sequence.shared, sequence.length
        if cache and not sequence.dropped:
            start = self._insert(sequence, sequence.prompt + output_ids)
        if end > start:
            self._edits.append(Give(row, start, end))
            self.num_free += end - start
        self._leave(sequence, sequence.path())
        root = sequence.root
        root.holders.remove(row)
        self._tree.rest(root)
        self._gapped.discard(row)
        if sequence.dropped:
            self._edits.append(Cut(row, 0, 0))
        del self._open[row]
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
        self._share_tail(sequence)
        row = self._free_rows.pop()
        self._tree.hold(sequence.path(), row)
        self._join_path(sequence)
        sequence.root.holders.add(row)
        twin = Sequence(row, sequence.prompt, sequence.root, sequence.node, sequence.shared)
        twin.num_hit = sequence.num_hit
        twin.sink_node, twin.num_sinks, twin.dropped = (
            sequence.sink_node,
            sequence.num_sinks,
            sequence.dropped,
        )
        if sequence.row in self._gapped:
            self._gapped.add(row)
        self._open[row] = twin
        self._edits.append(Copy(row, sequence.row, sequence.length))
        return twin

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Let go of all but its first `length` entries: say, of tokens that were guessed wrong.

        What it shared stays with the others, or cached. What is cut off of its prompt is its prompt no more.
        Cut to no more than its sinks it has dropped nothing; else the next token's position is `length + dropped`,
        which is after all that is left. Raises ValueError.
        """
        self.require_open(sequence)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot cut a sequence of {sequence.length} entries to {length}")
        start = max(length, sequence.shared)
        if start < sequence.length:
            self._edits.append(Give(sequence.row, start, sequence.length))
            self.num_free += sequence.length - start
        if length < sequence.shared:
            self._drop_path(sequence, length, sequence.shared)
        sequence.length = length
        if sequence.dropped:
            if length <= sequence.num_sinks:  # what was dropped came after all that is left
                sequence.dropped = sequence.num_sinks = 0
            self._edits.append(Cut(sequence.row, length, sequence.dropped))
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
            self._drop_path(sequence, start, min(end, shared))
        start = max(start, shared)
        if start < end:
            self._edits.append(Give(row, start, end))
            self.num_free += end - start
        self._edits.append(Shift(row, end, length, sinks))
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
            self._edits.append(Keep(sequence.row, start, sequence.length, count))
            self.num_free += num_given
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
            segment = self._tree.oldest()
            assert segment is not None  # num_cached counts exactly what `oldest` can reach
            keep = max(segment.length - count, 0)
            count -= segment.length - keep
            self._trim(segment, keep)

    def check(self) -> None:
        """Recount everything from the sequences and the tree. Raises CheckFailed."""
        self._tree.check(self._gapped)
        held: dict[Segment, set[int]] = {}
        private = 0
        for row, sequence in self._open.items():
            path = list(sequence.path())
            if sequence.row != row or sequence.shared != sum(segment.length for segment in path):
                raise CheckFailed(f"{sequence} in row {row} has a path of {path}")
            if sequence.length < sequence.shared:
                raise CheckFailed(f"{sequence} is shorter than its path")
            private += sequence.num_private
            for segment in path:
                held.setdefault(segment, set()).add(row)
            if (row in self._gapped) != (sequence.sink_node is not None) or row not in sequence.root.holders:
                raise CheckFailed(f"{sequence} has a path of {path}, and is not booked with it")
        cached = shared = 0
        for segment in {*self._tree, *held}:
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
        if sorted([*self._free_rows, *self._open]) != list(range(1, self.max_sequences + 1)):
            raise CheckFailed(f"rows free {sorted(self._free_rows)}, open {sorted(self._open)}")

    def _insert(self, sequence: Sequence, tokens: bytes) -> int:
        """Put a closing sequence's tail into the tree. Returns the position up to which it is cached."""
        tree, row = self._tree, sequence.row
        end = min(sequence.length, len(tokens) // TOKEN_BYTES)
        start = sequence.shared
        if not sequence.node.named:
            self._name_path(sequence, tokens[: end * TOKEN_BYTES])
        if end <= start or not sequence.node.named:
            return start
        path, matched = tree.find(sequence.node, tokens, start * TOKEN_BYTES, end * TOKEN_BYTES)
        if path and matched < len(path[-1].tokens):
            if not matched:  # `find` only descends where the first token agrees
                raise CheckFailed(f"{path[-1]} is filed under a token it does not begin with")
            path[-1] = self._split(path[-1], matched // TOKEN_BYTES)
        node = path[-1] if path else sequence.node
        found = start
        if path:
            found += sum(segment.length for segment in path)
            self._edits.append(Give(row, start, found))
            self.num_free += found - start
            now = tree.touch()
            for segment in path:  # those above it are left, and so used, in a moment
                segment.used = now
            if not node.holders:
                tree.rest(node)
        if end > found:
            fresh = tokens[found * TOKEN_BYTES : end * TOKEN_BYTES]
            own = node is sequence.node and node.parent is not None and len(node.holders) == 1
            if own and not node.children:
                if node.confirmed == node.length:
                    node.confirmed += end - found
                node.tokens += fresh
            else:
                node = tree.add(node, fresh)
                node.used = tree.touch()
                self.num_cached += node.length
                tree.rest(node)
            self._edits.append(Stash(row, end - node.length, end, node.id))
        return max(end, found)

    def _name_path(self, sequence: Sequence, tokens: bytes) -> list[Segment]:
        """Name the anonymous segments of its path, as far as `tokens` go. Returns those that were."""
        named: list[Segment] = []
        begin = 0
        for segment in reversed(list(sequence.path())):
            end = begin + len(segment.tokens)
            if not segment.named:
                if end > len(tokens) or not self._tree.name(segment, tokens[begin:end]):
                    break
                named.append(segment)
            begin = end
        return named

    def _share_tail(self, sequence: Sequence) -> None:
        """Make a segment of its private tail, so that others may hold it too."""
        length, tail = sequence.length, sequence.num_private
        if not tail:
            return
        node = sequence.node = self._tree.attach(sequence.node, tail)
        node.holders.add(sequence.row)
        self._edits.append(Stash(sequence.row, sequence.shared, length, node.id))
        sequence.shared = length

    def _join_path(self, sequence: Sequence) -> None:
        """One anonymous segment for each part of its path that the same sequences hold: where many forks have
        come and gone, the path stays as short as there are sequences."""
        segment = sequence.node
        while sequence.row in segment.holders and not segment.named:
            head = segment.parent
            assert head is not None
            if not head.named and head.holders == segment.holders:
                self._tree.join(segment)
                self._edits.append(Join(segment.id, head.id))
            else:
                segment = head

    def _reclaim(self, sequence: Sequence) -> None:
        """What it alone holds at the end of its path, and no token id is known of, is its own again."""
        node = sequence.node
        while not node.named and node.holders == {sequence.row}:
            assert node.parent is not None
            self._edits.append(Unstash(node.id))
            sequence.shared -= node.length
            node.holders.clear()
            node = node.parent
        if sequence.sink_node is not None and sequence.row not in node.holders:
            node, sequence.sink_node = sequence.sink_node, None
            self._gapped.discard(sequence.row)
        sequence.node = node

    def _drop_path(self, sequence: Sequence, start: int, end: int) -> None:
        """Leave its segments between entries `start` and `end`, which are cut there."""
        for at in (end, start):
            last = sequence.shared
            for segment in sequence.path():
                first = last - segment.length
                if first < at < last:
                    self._split(segment, at - first)
                    break
                last = first
        path = list(sequence.path())
        firsts = []  # of each, its first entry
        last = sequence.shared
        for segment in path:
            last -= segment.length
            firsts.append(last)
        num_below = sum(first >= end for first in firsts)
        num_kept_or_left = num_below + sum(start <= first < end for first in firsts)
        above = path[num_kept_or_left] if num_kept_or_left < len(path) else sequence.root
        if num_below:
            sequence.sink_node = above
            self._gapped.add(sequence.row)
        else:
            sequence.node = above
            if (
                sequence.sink_node is not None and start <= sequence.num_sinks
            ):  # nothing is left below the gap
                sequence.sink_node = None
                self._gapped.discard(sequence.row)
        sequence.shared -= end - start
        self._leave(sequence, path[num_below:num_kept_or_left])

    def _leave(self, sequence: Sequence, path: Iterable[Segment]) -> None:
        """It holds these no more, the deepest first. What nobody holds is cached if it is named, else freed."""
        unheld, sole = self._tree.leave(path, sequence.row)
        for segment in unheld:
            length = len(segment.tokens) // TOKEN_BYTES
            if not segment.named:
                self._edits.append(Drop(segment.id, 0))
                self.num_free += length
                continue
            self.num_cached += length
            if self._gapped:
                for child in [child for child in segment.children.values() if child.holders]:
                    self._cut_off(child)
            if not segment.children:
                self._tree.rest(segment)
        for row in dict.fromkeys(row for segment in sole for row in segment.holders):
            self._reclaim(self._open[row])

    def _cut_off(self, segment: Segment) -> None:
        """What is above a held segment may go: nobody can hit it, or anything below it, any more."""
        for below in [*segment.below(), segment]:
            if below.holders:
                self._tree.cut_off(below)
            else:
                self._trim(below, 0)

    def _split(self, segment: Segment, at: int) -> Segment:
        head = self._tree.split(segment, at)
        if head.named and head.confirmed < head.length:
            self._unconfirmed.append(head)
        self._edits.append(Split(segment.id, at, head.id))
        return head

    def _trim(self, segment: Segment, keep: int) -> None:
        """Free all but the first `keep` tokens of an unheld leaf."""
        freed = segment.length - keep
        if not freed:
            return
        self._edits.append(Drop(segment.id, keep))
        self.num_cached -= freed
        self.num_free += freed
        if keep:
            segment.tokens = segment.tokens[: keep * TOKEN_BYTES]
            segment.confirmed = min(segment.confirmed, keep)
        else:
            self._tree.remove(segment)


def _num_tokens(prompt: bytes) -> int:
    length, rest = divmod(len(prompt), TOKEN_BYTES)
    if rest or not length:
        raise ValueError(f"a prompt is int32 token ids, at least one: got {len(prompt)} bytes")
    return length
