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
    MapSegments,
    MergeSegments,
    SetGap,
    SplitSegment,
    StoreSegment,
)
from lightkv.layer_groups import LayerGroups

from .holds import TailClass
from .prefix_tree import Match, Namespace, PrefixTree
from .segments import TOKEN_BYTES, Segment, Tail, reachable
from .sequence import Sequence, require_sequence
from .sessions import Sessions
from .snapshots import StateClass

HITS_A_TURNOVER = 32  # hits that let a segment stay for as long as it takes to allocate the whole pool once


class LedgerState:
    """Counts for a pool of `capacity` slots, of which sessions protect up to `max_protected`, and a table of
    `max_sequences` rows, for a model of these layer `groups`. `num_states`: the slots of states, if its layers
    have some.

    Other files may read num_free, num_cached (slots), sequences (the open ones, by row), tree and sessions.
    `step` is the step that is being planned, and `confirmed` the last one that is known to have been computed.
    `width` is the number of slots of a token in the class that sees everything, whose tokens are the tree's
    segments; `classes` has the others, of which `states` is the last one, if there are any.

    unconfirmed: segments and tails with tokens that steps compute which may still fail. reused: by row, the
    bits of the classes in which its next token takes the slot of the entry that passes (`AllocPart`).
    """

    def __init__(
        self, capacity: int, max_sequences: int, max_protected: int, groups: LayerGroups, num_states: int
    ) -> None:
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.num_free = capacity
        self.num_cached = 0
        self.step = 0
        self.confirmed = -1
        self.tree = PrefixTree(max(capacity // HITS_A_TURNOVER, 1))
        self.width = groups.classes[0].num_groups
        self.sessions = Sessions(self.tree, max_protected // self.width)
        self.idle = self.tree.idle
        self.classes: list[TailClass | StateClass] = [
            TailClass(self, cls, one) for cls, one in enumerate(groups.classes) if cls
        ]
        self.states = StateClass(self, len(groups.classes), num_states) if num_states else None
        self.classes += [self.states] if self.states else []
        self.sequences: dict[int, Sequence] = {}
        self.free_rows = list(range(max_sequences, 0, -1))
        self.gapped: set[int] = set()  # rows whose path has a gap: what was dropped lies above what is held
        self.unconfirmed: list[Segment | Tail] = []
        self.reused = [0] * (max_sequences + 1)
        self._edits: list[Edit] = []

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
        root = node = tree.root(namespace)
        path, matched = tree.find(root, tokens, 0, len(tokens) - TOKEN_BYTES)
        shared = 0
        if self.classes:
            in_tree = Match.of(path, matched)
            hit = reachable(self.classes, path, in_tree.num_tokens)
            if hit < in_tree.num_tokens:
                above, tip, _ = in_tree.cut(hit)
                path, matched = list(above[::-1]), tip * TOKEN_BYTES
        row = self.free_rows.pop()
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
        if self.classes:
            sequence.holds = [of.hold(sequence, shared) for of in self.classes]
            for hold in sequence.holds:
                hold.enter()
            self.begin(sequence, in_tree.num_tokens)

    def begin(self, sequence: Sequence, matched: int) -> None:
        """Notes where what classes see is to be kept for others, of a sequence whose prompt was published by no
        step yet. `matched`: the tokens of it that the tree has."""
        sequence.published, sequence.published_in, sequence.matched = 0, -1, matched
        end, places = len(sequence.prompt) // TOKEN_BYTES, {matched, *sequence.keep_at}
        if self.states is None:
            places.add(end)
        elif not sequence.keep_at:
            places.add(end - 1)  # a look-up leaves one token to compute, and a state cannot go back
        sequence.points = [one for one in sorted(places) if sequence.length < one <= end]
        sequence.look_at = 0

    def fork(self, sequence: Sequence) -> Sequence:
        """Opens a sequence in a free row that holds the same path as `sequence`, which has no private tail
        (`share_tail`)."""
        row = self.free_rows.pop()
        self.tree.add_holder(sequence.path(), row)
        self._merge_unindexed(sequence)
        sequence.root.holders.add(row)
        fork = self.sequences[row] = sequence.twin()
        fork.enter(row, sequence.root, sequence.node, sequence.shared)
        if sequence.holds:
            fork.holds = [hold.fork(fork) for hold in sequence.holds]
            fork.points, fork.published, fork.published_in = sequence.points[:], 0, -1
            fork.matched = sequence.matched
        if sequence.row in self.gapped:
            self.gapped.add(row)
        self._edits.append(CopyRow(row, sequence.row, sequence.length))
        return fork

    def close(self, sequence: Sequence) -> None:
        """Closes a sequence whose private tail is cached or freed, and those that it alone has kept open: it
        leaves its path, its row is free, and what nothing can hit any more is freed."""
        row, root = sequence.row, sequence.root
        self.leave(sequence, sequence.path())
        root.holders.remove(row)
        self.tree.note_unheld(root)
        self.gapped.discard(row)
        if sequence.gap.dropped:
            self._edits.append(SetGap(row, 0, 0))
        del self.sequences[row]
        self.free_rows.append(row)
        for namespace in sequence.namespaces:
            cleared = self.tree.roots.get(namespace)
            for segment in cleared.below() if cleared is not None else ():
                self._trim(segment, 0)
        for other in sequence.leave():
            self.free_range(other.row, other.shared, other.length)
            self.close(other)

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

    # Private tails that become segments

    def publish_path(self, sequence: Sequence) -> None:
        """Indexes the unindexed segments of its path, as far as its prompt goes; this step computes them."""
        for segment in self._index_path(sequence, sequence.prompt):
            segment.confirmed, segment.published = 0, self.step
            self.unconfirmed.append(segment)

    def store(self, sequence: Sequence, tokens: bytes, end: int, step: int | None) -> None:
        """Stores the private entries before `end` as a segment that others can hit. `step`: the one that
        computes them, None if they have been computed.

        They stay private if another segment that begins with the same token is in their place.
        """
        node, fresh = sequence.node, tokens[sequence.shared * TOKEN_BYTES : end * TOKEN_BYTES]
        if not fresh or not node.indexed or fresh[:TOKEN_BYTES] in node.children:
            return
        num_confirmed, is_confirmed = node.confirmed, node.confirmed == node.length
        if node.may_grow:
            # The sequence's own newest segment (that of the chunk before) grows, so that there is one segment
            # and not a chain of chunks.
            self.tree.grow(node, fresh)
        else:
            node = sequence.node = self.tree.add(node, fresh)
            node.holders.add(sequence.row)
            self.tree.touch([node])
            num_confirmed, is_confirmed = 0, True
        if step is not None:
            node.confirmed, node.published = num_confirmed, step
            if is_confirmed:
                self.unconfirmed.append(node)
        elif is_confirmed:
            node.confirmed = node.length
        sequence.shared = end
        self._edits.append(StoreSegment(sequence.row, end - node.length, end, node.id))

    def adopt(self, sequence: Sequence, tokens: bytes, end: int) -> list[Segment]:
        """Shares entries before `end` that another sequence has put into the tree meanwhile, and frees its
        own. `tokens`: their ids. Returns the segments, whose slots its row does not have yet."""
        if not sequence.node.indexed:
            return []
        start = sequence.shared
        path, matched = self.tree.find(sequence.node, tokens, start * TOKEN_BYTES, end * TOKEN_BYTES)
        if path:
            if matched < len(path[-1].tokens):
                path[-1] = self.split(path[-1], matched // TOKEN_BYTES)
            sequence.shared += sum([segment.length for segment in path])
            sequence.node = path[-1]
            self.free_range(sequence.row, start, sequence.shared)
            self.tree.hit(path)
            self.num_cached -= self.tree.add_holder(path, sequence.row) * self.width
        return path

    def cache_tail(self, sequence: Sequence, tokens: bytes) -> None:
        """Puts the private entries of a sequence that is about to close into the tree, as far as its ids are
        known; its session protects the whole path. `tokens`: all these ids."""
        end = min(sequence.length, len(tokens) // TOKEN_BYTES)
        if not sequence.node.indexed:
            self._index_path(sequence, tokens[: end * TOKEN_BYTES])
        self.adopt(sequence, tokens, end)
        self.store(sequence, tokens, end, None)
        node, end = sequence.node, sequence.shared
        if node.indexed:
            for hold in sequence.holds:
                hold.keep(end, (node, end), None)
                hold.supersede(node, end)
            if sequence.session is not None:
                self.sessions.protect(sequence.session, node, end)

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

    def split_path(self, sequence: Sequence, at: int) -> None:
        """Has a segment of its path end at entry `at`."""
        end = sequence.shared
        for segment in sequence.path():
            first = end - segment.length
            if first < at < end:
                self.split(segment, at - first)
            if first <= at:
                break
            end = first

    def leave(self, sequence: Sequence, path: Iterable[Segment]) -> None:
        """Removes `sequence` from the holders of `path` (the deepest first). A segment without holders becomes
        cached if it is indexed, and is freed if not."""
        if sequence.holds:
            path = list(path)
            for tail in [tail for segment in path for tail in segment.tails.values()]:
                if sequence.row in tail.holders:
                    tail.let_go(sequence.row)
        unheld, sole = self.tree.remove_holder(path, sequence.row)
        for segment in unheld:
            length = len(segment.tokens) // TOKEN_BYTES * self.width
            if not segment.indexed:
                self._edits.append(FreeSegment(segment.id, 0))
                self.num_free += length
                continue
            self.num_cached += length
            if self.gapped:
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
            if node.tails and not all(tail.length for tail in node.tails.values()):
                break  # a row reads the state at its end, which stays a snapshot
            assert node.parent is not None
            self._edits.append(ForgetSegment(node.id))
            for hold in sequence.holds:  # its tails are the sequence's own again
                if tail := node.tails.get(hold.of.cls):
                    hold.own -= tail.length
            sequence.shared -= node.length
            node.holders.clear()
            node = node.parent
        above = sequence.gap.node
        if above is not None and sequence.row not in node.holders:
            node, sequence.gap = above, sequence.gap.after(None)
            self.gapped.discard(sequence.row)
        sequence.node = node

    def _merge_unindexed(self, sequence: Sequence) -> None:
        """Merges neighbouring unindexed segments of its path that have the same holders. So a path stays short
        where many forks have come and gone."""
        segment = sequence.node
        while sequence.row in segment.holders and not segment.indexed:
            head = segment.parent
            assert head is not None
            alike = not head.indexed and head.holders == segment.holders
            if alike and segment.can_join(head):
                segment.join_tails(head)
                self.tree.merge(segment)
                self._edits.append(MergeSegments(segment.id, head.id))
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
            self.unconfirmed.append(head)
        self._edits.append(SplitSegment(segment.id, at, head.id))
        if segment.tails:
            segment.split_tails(head)
            for tail in head.tails.values():  # which ends where none ended before, and passes earlier
                for row in tail.holders:
                    self.sequences[row].look_at = 0
        return head

    def evict(self, count: int) -> None:
        """Frees `count` of the cached slots, in the tree's order, and those that sessions protect last; more
        where a token has several, or a tail is larger."""
        while count > 0:
            oldest = self.idle.oldest()
            if isinstance(oldest, Tail):
                count -= oldest.drop()
                continue
            is_protected = oldest is None
            segment = oldest or self.sessions.oldest()
            assert segment is not None  # num_cached counts exactly what can be reached so
            if segment.tails:  # of use only with its end
                count -= sum([tail.drop() for tail in list(segment.tails.values())])
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
        slots = freed * self.width + segment.cut_tails(freed)
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
        for one in self.unconfirmed:
            if one.published <= step:
                one.confirmed = one.length
            else:
                waiting.append(one)
        self.unconfirmed = waiting
        self.confirmed = max(self.confirmed, step)

    def unconfirmed_rows(self) -> list[int]:
        """Returns the rows, ascending, that hold a segment or a tail with unconfirmed tokens."""
        return sorted({row for one in self.unconfirmed if one.is_there for row in one.holders})

    def retract(self) -> None:
        """Frees the tokens that are not confirmed. No sequence holds them (`unconfirmed_rows`)."""
        for one in self.unconfirmed:
            if not one.is_there:
                continue  # was removed with an unconfirmed segment above it
            if isinstance(one, Tail):
                one.drop()
                continue
            for below in one.below():
                self._trim(below, 0)
            self._trim(one, one.confirmed)
        self.unconfirmed = []
        self.confirmed = max(self.confirmed, self.step - 1)  # no step is in flight any more
