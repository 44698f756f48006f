"""The ledger's state: the prefix tree, the open sequences, the counts of free and cached tokens, and the edits.

A verb here changes tree, counts and edits together, and trusts its arguments: the public verbs (`ledger.py`)
check what a caller asks for before they call it. No other file writes the counts or the edits.
"""

from collections.abc import Iterable

from lightkv.edits import (
    Alloc,
    CopyRow,
    Edit,
    ForgetSegment,
    FreeRange,
    FreeSegment,
    KeepEntries,
    MapSegments,
    MergeSegments,
    SetGap,
    SplitSegment,
    StoreSegment,
)
from lightkv.errors import CheckFailed
from lightkv.layer_groups import LayerGroups

from .parts import reachable
from .prefix_tree import TOKEN_BYTES, Namespace, PrefixTree, Segment
from .sequence import Sequence, require_sequence
from .sessions import Sessions
from .tails import Tails
from .windows import WindowedSequence

HITS_A_TURNOVER = 32  # hits that let a segment stay for as long as it takes to allocate the whole pool once


class LedgerState:
    """Counts for a pool of `capacity` slots, of which sessions protect up to `max_protected`, and a table of
    `max_sequences` rows, for a model of these layer `groups`.

    Other files may read num_free, num_cached (slots), sequences (the open ones, by row), tree and sessions.
    `step` is the step that is being planned, and `confirmed` the last one that is known to have been computed.
    `width` is the number of slots of a token in the class that sees everything, whose tokens are the tree's
    segments; `tails` has the other classes.
    """

    def __init__(self, capacity: int, max_sequences: int, max_protected: int, groups: LayerGroups) -> None:
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.num_free = capacity
        self.num_cached = 0
        self.step = 0
        self.confirmed = -1
        self.tree = PrefixTree(max(capacity // HITS_A_TURNOVER, 1))
        self.width = groups.classes[0].num_groups
        self.sessions = Sessions(self.tree, max_protected // self.width)
        self.tails = Tails(self, groups.classes[1:])
        self.sequences: dict[int, Sequence] = {}
        self._free_rows = list(range(max_sequences, 0, -1))
        self._gapped: set[int] = set()  # rows whose path has a gap: what was dropped lies above what is held
        self._unconfirmed: list[Segment] = []  # segments that steps have published and that may still fail
        self._edits: list[Edit] = []

    @property
    def has_free_row(self) -> bool:
        """Whether another sequence can be opened."""
        return bool(self._free_rows)

    def require_open(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is closed or belongs to another ledger."""
        require_sequence(sequence)
        if self.sequences.get(sequence.row) is not sequence:
            raise ValueError("the sequence is closed, or another ledger's; open one here")

    def drain(self) -> list[Edit]:
        """Returns the edits since the last call, in order, and forgets them."""
        edits, self._edits = self._edits, []
        return edits

    def emit(self, edit: Edit) -> None:
        """Has the memory do this after all edits so far."""
        self._edits.append(edit)

    def count(self, free: int = 0, cached: int = 0) -> None:
        """Counts so many slots more as free and as cached."""
        self.num_free += free
        self.num_cached += cached

    # Sequences

    def open(self, sequence: Sequence, namespace: Namespace) -> None:
        """Gives a sequence a free row and the longest cached prefix that it may share."""
        tree, tokens = self.tree, sequence.lookup_key
        root = tree.root(namespace)
        path, matched = tree.find(root, tokens, 0, len(tokens) - TOKEN_BYTES)
        node, shared, in_tree = root, 0, 0
        if path and self.tails.lifetimes:
            path, matched, in_tree = reachable(self.tails.lifetimes, path, matched)
        row = self._free_rows.pop()
        root.holders.add(row)
        if path:
            node = path[-1]
            if matched < len(node.tokens):
                path[-1] = node = self.split(node, matched // TOKEN_BYTES)
            self.num_cached -= tree.add_holder(path, row) * self.width
            tree.hit(path)
            shared = sum([len(segment.tokens) for segment in path]) // TOKEN_BYTES
            self._edits.append(MapSegments(row, 0, tuple([segment.id for segment in path])))
        self.sequences[row] = sequence
        sequence.enter(row, root, node, shared)
        sequence.num_hit = shared
        if isinstance(sequence, WindowedSequence):
            self.tails.enter(sequence, in_tree)

    def fork(self, sequence: Sequence) -> Sequence:
        """Opens a sequence in a free row that holds the same path as `sequence`, which has no private tail
        (`share_tail`)."""
        row = self._free_rows.pop()
        self.tree.add_holder(sequence.path(), row)
        self._merge_unindexed(sequence)
        sequence.root.holders.add(row)
        fork = self.sequences[row] = sequence.twin()
        fork.enter(row, sequence.root, sequence.node, sequence.shared)
        if isinstance(sequence, WindowedSequence):
            self.tails.hold_same(sequence, row)
        if sequence.row in self._gapped:
            self._gapped.add(row)
        self._edits.append(CopyRow(row, sequence.row, sequence.length))
        return fork

    def close(self, sequence: Sequence) -> None:
        """Closes a sequence whose private tail is cached or freed, and those that it alone has kept open: it
        leaves its path, its row is free, and what nothing can hit any more is freed."""
        row, root = sequence.row, sequence.root
        self.leave(sequence, sequence.path())
        root.holders.remove(row)
        self.tree.note_unheld(root)
        self._gapped.discard(row)
        if sequence.gap.dropped:
            self._edits.append(SetGap(row, 0, 0))
        del self.sequences[row]
        self._free_rows.append(row)
        for namespace in sequence.namespaces:
            self._clear(namespace)
        for other in sequence.leave():
            self.free_range(other.row, other.shared, other.length)
            self.close(other)

    def _clear(self, namespace: Namespace) -> None:
        """Frees what is cached in a namespace, in which no sequence is open."""
        root = self.tree.roots.get(namespace)
        for segment in root.below() if root is not None else ():
            self._trim(segment, 0)

    # Entries of rows

    def alloc(self, edit: Alloc, count: int) -> None:
        """Allocates `count` free slots, as `edit` spreads them over rows."""
        self._edits.append(edit)
        self.num_free -= count
        self.tree.pass_tokens(count)

    def free_range(self, row: int, start: int, end: int) -> None:
        """Frees the slots of the private entries [start, end) of `row`; there is at least one."""
        self._edits.append(FreeRange(row, start, end))
        self.num_free += (end - start) * self.width

    def keep_entries(self, row: int, start: int, end: int, count: int) -> None:
        """Keeps `count` of the private entries [start, end) of `row`, and frees the slots of the others."""
        self._edits.append(KeepEntries(row, start, end, count))
        self.num_free += end - start - count

    # Private tails that become segments

    def publish_path(self, sequence: Sequence) -> None:
        """Indexes the unindexed segments of its path, as far as its prompt goes; this step computes them."""
        for segment in self._index_path(sequence, sequence.prompt):
            segment.confirmed = 0
            segment.published = self.step
            self._unconfirmed.append(segment)

    def publish_tail(self, sequence: Sequence, tokens: bytes) -> None:
        """Stores the first tokens of its private tail as a segment that others can hit; this step computes
        them.

        They stay private if another segment that begins with the same token is in their place.
        """
        node = sequence.node
        if tokens[:TOKEN_BYTES] in node.children:
            return
        if node.may_grow:
            # The sequence's own newest segment (that of the chunk before) grows, so that there is one segment
            # and not a chain of chunks.
            if node.confirmed == node.length:
                self._unconfirmed.append(node)
            self.tree.grow(node, tokens)
        else:
            node = self.tree.add(node, tokens)
            node.holders.add(sequence.row)
            self.tree.touch([node])
            node.confirmed = 0
            sequence.node = node
            self._unconfirmed.append(node)
        node.published = self.step
        end = sequence.shared = sequence.shared + len(tokens) // TOKEN_BYTES
        self._edits.append(StoreSegment(sequence.row, end - node.length, end, node.id))

    def cache_tail(self, sequence: Sequence, tokens: bytes) -> int:
        """Caches the private tail of a sequence that is about to close; its session protects the whole path.
        `tokens`: all its known token ids.

        Returns the entry up to which its tokens are in the tree; the caller frees the rest. Slots of tokens
        that the tree has from another sequence are freed here.
        """
        node, end = self._cache_tail(sequence, tokens)
        if isinstance(sequence, WindowedSequence):
            self.tails.cache_tail(sequence, node, end)
        if sequence.session is not None and node.indexed:
            self.sessions.protect(sequence.session, node, end)
        return end

    def _cache_tail(self, sequence: Sequence, tokens: bytes) -> tuple[Segment, int]:
        """Returns the last segment of the path of what is cached, and the entry up to which that is."""
        tree, row = self.tree, sequence.row
        end = min(sequence.length, len(tokens) // TOKEN_BYTES)
        start = sequence.shared
        if not sequence.node.indexed:
            self._index_path(sequence, tokens[: end * TOKEN_BYTES])
        if end <= start or not sequence.node.indexed:
            return sequence.node, start
        path, matched = tree.find(sequence.node, tokens, start * TOKEN_BYTES, end * TOKEN_BYTES)
        if path and matched < len(path[-1].tokens):
            if not matched:  # `find` only descends where the first token agrees
                raise CheckFailed(f"{path[-1]} is filed under a token it does not begin with")
            path[-1] = self.split(path[-1], matched // TOKEN_BYTES)
        node = path[-1] if path else sequence.node
        found = start
        if path:
            found += sum(segment.length for segment in path)
            self.free_range(row, start, found)
            tree.hit(path)
            tree.touch(path)  # those above are marked as used when the sequence leaves them
            if not node.holders:
                tree.note_unheld(node)
        if end > found:
            fresh = tokens[found * TOKEN_BYTES : end * TOKEN_BYTES]
            if node is sequence.node and node.may_grow:
                if node.confirmed == node.length:
                    node.confirmed += end - found
                tree.grow(node, fresh)
            else:
                node = tree.add(node, fresh)
                tree.touch([node])
                self.num_cached += node.length * self.width
                tree.note_unheld(node)
            self._edits.append(StoreSegment(row, end - node.length, end, node.id))
        return node, max(end, found)

    def share_tail(self, sequence: Sequence) -> None:
        """Makes an unindexed segment of its private tail, so that other sequences can hold it too."""
        length, tail = sequence.length, sequence.num_private
        if not tail:
            return
        node = sequence.node = self.tree.add_unindexed(sequence.node, tail)
        node.holders.add(sequence.row)
        self._edits.append(StoreSegment(sequence.row, sequence.shared, length, node.id))
        sequence.shared = length

    def _index_path(self, sequence: Sequence, tokens: bytes) -> list[Segment]:
        """Indexes the unindexed segments of its path as far as `tokens` go. Returns these segments."""
        found: list[Segment] = []
        begin = 0
        for segment in reversed(list(sequence.path())):
            end = begin + len(segment.tokens)
            if not segment.indexed:
                if end > len(tokens) or not self.tree.index(segment, tokens[begin:end]):
                    break
                found.append(segment)
            begin = end
        return found

    # Segments

    def leave_range(self, sequence: Sequence, start: int, end: int) -> None:
        """Leaves the segments of its shared entries [start, end), which are split at both ends."""
        for at in (end, start):
            last = sequence.shared
            for segment in sequence.path():
                first = last - segment.length
                if first < at < last:
                    self.split(segment, at - first)
                    break
                last = first
        path = list(sequence.path())
        firsts = []  # the first entry of each segment
        last = sequence.shared
        for segment in path:
            last -= segment.length
            firsts.append(last)
        num_below = sum(first >= end for first in firsts)
        num_kept_or_left = num_below + sum(start <= first < end for first in firsts)
        above = path[num_kept_or_left] if num_kept_or_left < len(path) else sequence.root
        if num_below:
            sequence.gap = sequence.gap.after(above)
            self._gapped.add(sequence.row)
        else:
            sequence.node = above
            if start <= sequence.gap.start:  # no segment is left below the gap
                sequence.gap = sequence.gap.after(None)
                self._gapped.discard(sequence.row)
        sequence.shared -= end - start
        self.leave(sequence, path[num_below:num_kept_or_left])
        if isinstance(sequence, WindowedSequence):
            self.tails.note_cut(sequence)

    def leave(self, sequence: Sequence, path: Iterable[Segment]) -> None:
        """Removes `sequence` from the holders of `path` (the deepest first). A segment without holders becomes
        cached if it is indexed, and is freed if not."""
        if isinstance(sequence, WindowedSequence):
            path = list(path)
            self.tails.leave(path, sequence.row)
        unheld, sole = self.tree.remove_holder(path, sequence.row)
        for segment in unheld:
            length = len(segment.tokens) // TOKEN_BYTES * self.width
            if not segment.indexed:
                self._edits.append(FreeSegment(segment.id, 0))
                self.num_free += length
                continue
            self.num_cached += length
            if self._gapped:
                for child in [child for child in segment.children.values() if child.holders]:
                    self._unindex_below(child)
            if not segment.children:
                self.tree.note_unheld(segment)
        for row in dict.fromkeys(row for segment in sole for row in segment.holders):
            self._make_private(self.sequences[row])

    def _make_private(self, sequence: Sequence) -> None:
        """Makes private again the unindexed segments at the end of its path that no other sequence holds."""
        node = sequence.node
        while not node.indexed and node.holders == {sequence.row}:
            assert node.parent is not None
            self._edits.append(ForgetSegment(node.id))
            if isinstance(sequence, WindowedSequence):
                self.tails.forget(sequence, node)
            sequence.shared -= node.length
            node.holders.clear()
            node = node.parent
        above = sequence.gap.node
        if above is not None and sequence.row not in node.holders:
            node, sequence.gap = above, sequence.gap.after(None)
            self._gapped.discard(sequence.row)
        sequence.node = node
        if isinstance(sequence, WindowedSequence):
            self.tails.note_cut(sequence)

    def _merge_unindexed(self, sequence: Sequence) -> None:
        """Merges neighbouring unindexed segments of its path that have the same holders. So a path stays short
        where many forks have come and gone."""
        segment = sequence.node
        while sequence.row in segment.holders and not segment.indexed:
            head = segment.parent
            assert head is not None
            alike = not head.indexed and head.holders == segment.holders
            if alike and self.tails.can_join(head, segment):
                self.tails.join(head, segment)
                self.tree.merge(segment)
                self._edits.append(MergeSegments(segment.id, head.id))
                if segment.parts:
                    self.tails.note_ends(segment)
            else:
                segment = head

    def _unindex_below(self, segment: Segment) -> None:
        """Takes `segment` and what is below it out of the index, since its unheld ancestors may be evicted and
        no look-up would reach it then. What has no holder is freed."""
        for below in [*segment.below(), segment]:
            if below.holders:
                self.sessions.lift(below)
                self.tree.unindex(below)
            else:
                self._trim(below, 0)

    def split(self, segment: Segment, at: int) -> Segment:
        """Splits `segment` after `at` tokens. Returns the new head."""
        head = self.tree.split(segment, at)
        if head.indexed and head.confirmed < head.length:
            self._unconfirmed.append(head)
        self._edits.append(SplitSegment(segment.id, at, head.id))
        if segment.parts:
            self.tails.split(segment, head)
        return head

    def evict(self, count: int) -> None:
        """Frees `count` of the cached slots, in the tree's order, and those that sessions protect last; a few
        more, where a token has several."""
        tree, tails = self.tree, self.tails
        while count > 0:
            segment = tree.oldest()
            if freed := tails.evict(segment) or (segment is None and tails.evict_protected()):
                count -= freed
                continue
            is_protected = segment is None
            if segment is None:
                segment = self.sessions.oldest()
            assert segment is not None  # num_cached counts exactly what can be reached so
            count -= tails.drop_parts(segment)  # nothing could go on from what is left of it
            if count > 0:
                keep = max(segment.length + -count // self.width, 0)
                if is_protected:
                    self.sessions.evict(segment.length - keep)
                count -= (segment.length - keep) * self.width
                self._trim(segment, keep)

    def _trim(self, segment: Segment, keep: int) -> None:
        """Frees all but the first `keep` tokens of an unheld leaf."""
        freed = segment.length - keep
        if not freed:
            return
        self._edits.append(FreeSegment(segment.id, keep))
        slots = freed * self.width + self.tails.cut(segment, freed)
        self.num_cached -= slots
        self.num_free += slots
        if keep:
            self.sessions.trim(segment, freed)
            self.tree.cut(segment, keep)
        else:
            self.sessions.lift(segment)
            self.tree.remove(segment)

    # Steps

    def confirm(self, step: int) -> None:
        """Marks as computed what was published up to and including `step`."""
        waiting = []
        for segment in self._unconfirmed:
            if segment.published <= step:
                segment.confirmed = segment.length
            else:
                waiting.append(segment)
        self._unconfirmed = waiting
        self.confirmed = max(self.confirmed, step)
        self.tails.confirm(step)

    def unconfirmed_rows(self) -> list[int]:
        """Returns the rows, ascending, that hold a segment or a part with unconfirmed tokens."""
        rows = {row for segment in self._unconfirmed_segments() for row in segment.holders}
        return sorted(rows | self.tails.unconfirmed_rows())

    def retract(self) -> None:
        """Frees the tokens that are not confirmed. No sequence holds them (`unconfirmed_rows`)."""
        self.tails.retract()
        for segment in self._unconfirmed_segments():
            if segment.parent is None:
                continue  # was removed with an unconfirmed segment above it
            for below in segment.below():
                self._trim(below, 0)
            self._trim(segment, segment.confirmed)
        self._unconfirmed = []

    def _unconfirmed_segments(self) -> list[Segment]:
        return [segment for segment in self._unconfirmed if segment.parent is not None and segment.indexed]

    def check(self) -> None:
        """Recounts everything from the sequences and the tree. Raises CheckFailed."""
        self.tree.check(self._gapped)
        self.sessions.check()
        holders: dict[Segment, set[int]] = {}
        private = 0
        for row, sequence in self.sequences.items():
            sequence.check(self.sequences)
            private += sequence.num_private
            path = list(sequence.path())
            for segment in path:
                holders.setdefault(segment, set()).add(row)
            has_gap = sequence.gap.node is not None
            if (row in self._gapped) != has_gap or row not in sequence.root.holders:
                raise CheckFailed(f"{sequence} has a path of {path}, and its gap or its root does not say so")
        cached = shared = 0
        for segment in {*self.tree, *holders}:
            if segment.holders != holders.get(segment, set()):
                rows = sorted(holders.get(segment, ()))
                raise CheckFailed(f"{segment} lists {sorted(segment.holders)}; it is on the paths of {rows}")
            if segment.holders:
                shared += segment.length
            else:
                cached += segment.length
        cached_in_parts, held_in_parts = self.tails.check({*self.tree, *holders})
        cached = cached * self.width + cached_in_parts
        shared, private = shared * self.width + held_in_parts, private * self.width
        held = self.capacity - self.num_free - self.num_cached
        for name, (counted, recounted) in {
            "cached": (self.num_cached, cached),
            "held": (held, shared + private),
        }.items():
            if counted != recounted:
                raise CheckFailed(f"{counted} slots {name} by the ledger's count, {recounted} by recount")
        if self.num_free < 0:
            raise CheckFailed(f"{self.num_free} slots free")
        if sorted([*self._free_rows, *self.sequences]) != list(range(1, self.max_sequences + 1)):
            raise CheckFailed(f"rows free {sorted(self._free_rows)}, open {sorted(self.sequences)}")
