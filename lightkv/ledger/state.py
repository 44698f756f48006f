"""The paths of the open sequences through the tree: how they are shared, cut, named and left.

Keeps the counts that this changes, and leaves the edits. Checks nothing that a caller asks for: the ledger's
verbs do (`ledger.py`).
"""

from collections.abc import Iterable

from lightkv.edits import (
    Edit,
    ForgetSegment,
    FreeRange,
    FreeSegment,
    MergeSegments,
    SplitSegment,
    StoreSegment,
)
from lightkv.errors import CheckFailed

from .prefix_tree import TOKEN_BYTES, PrefixTree, Segment
from .sequence import Sequence


class Paths:
    """The tree, who is on which path of it, and how many of the pool's tokens are free and cached.

    sequences: the open ones, by row. gapped: the rows that have dropped the upper part of a path they still
    hold. unconfirmed: what steps have published that may yet fail. edits: those not drained.
    """

    def __init__(self, capacity: int) -> None:
        self.num_free = capacity
        self.num_cached = 0
        self.tree = PrefixTree()
        self.sequences: dict[int, Sequence] = {}
        self.gapped: set[int] = set()
        self.unconfirmed: list[Segment] = []
        self.edits: list[Edit] = []

    def insert(self, sequence: Sequence, tokens: bytes) -> int:
        """Put a closing sequence's tail into the tree. Returns the position up to which it is cached."""
        tree, row = self.tree, sequence.row
        end = min(sequence.length, len(tokens) // TOKEN_BYTES)
        start = sequence.shared
        if not sequence.node.named:
            self.name(sequence, tokens[: end * TOKEN_BYTES])
        if end <= start or not sequence.node.named:
            return start
        path, matched = tree.find(sequence.node, tokens, start * TOKEN_BYTES, end * TOKEN_BYTES)
        if path and matched < len(path[-1].tokens):
            if not matched:  # `find` only descends where the first token agrees
                raise CheckFailed(f"{path[-1]} is filed under a token it does not begin with")
            path[-1] = self.split(path[-1], matched // TOKEN_BYTES)
        node = path[-1] if path else sequence.node
        found = start
        if path:
            found += sum(segment.length for segment in path)
            self.edits.append(FreeRange(row, start, found))
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
            self.edits.append(StoreSegment(row, end - node.length, end, node.id))
        return max(end, found)

    def name(self, sequence: Sequence, tokens: bytes) -> list[Segment]:
        """Name the anonymous segments of its path, as far as `tokens` go. Returns those that were."""
        named: list[Segment] = []
        begin = 0
        for segment in reversed(list(sequence.path())):
            end = begin + len(segment.tokens)
            if not segment.named:
                if end > len(tokens) or not self.tree.name(segment, tokens[begin:end]):
                    break
                named.append(segment)
            begin = end
        return named

    def share_tail(self, sequence: Sequence) -> None:
        """Make a segment of its private tail, so that others may hold it too."""
        length, tail = sequence.length, sequence.num_private
        if not tail:
            return
        node = sequence.node = self.tree.attach(sequence.node, tail)
        node.holders.add(sequence.row)
        self.edits.append(StoreSegment(sequence.row, sequence.shared, length, node.id))
        sequence.shared = length

    def join(self, sequence: Sequence) -> None:
        """One anonymous segment for each part of its path that the same sequences hold: where many forks have
        come and gone, the path stays as short as there are sequences."""
        segment = sequence.node
        while sequence.row in segment.holders and not segment.named:
            head = segment.parent
            assert head is not None
            if not head.named and head.holders == segment.holders:
                self.tree.join(segment)
                self.edits.append(MergeSegments(segment.id, head.id))
            else:
                segment = head

    def _reclaim(self, sequence: Sequence) -> None:
        """What it alone holds at the end of its path, and no token id is known of, is its own again."""
        node = sequence.node
        while not node.named and node.holders == {sequence.row}:
            assert node.parent is not None
            self.edits.append(ForgetSegment(node.id))
            sequence.shared -= node.length
            node.holders.clear()
            node = node.parent
        if sequence.sink_node is not None and sequence.row not in node.holders:
            node, sequence.sink_node = sequence.sink_node, None
            self.gapped.discard(sequence.row)
        sequence.node = node

    def drop(self, sequence: Sequence, start: int, end: int) -> None:
        """Leave its segments between entries `start` and `end`, which are cut there."""
        for at in (end, start):
            last = sequence.shared
            for segment in sequence.path():
                first = last - segment.length
                if first < at < last:
                    self.split(segment, at - first)
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
            self.gapped.add(sequence.row)
        else:
            sequence.node = above
            if sequence.sink_node is not None and start <= sequence.num_sinks:
                # nothing is left below the gap
                sequence.sink_node = None
                self.gapped.discard(sequence.row)
        sequence.shared -= end - start
        self.leave(sequence, path[num_below:num_kept_or_left])

    def leave(self, sequence: Sequence, path: Iterable[Segment]) -> None:
        """It holds these no more, the deepest first. What nobody holds is cached if it is named, else freed."""
        unheld, sole = self.tree.leave(path, sequence.row)
        for segment in unheld:
            length = len(segment.tokens) // TOKEN_BYTES
            if not segment.named:
                self.edits.append(FreeSegment(segment.id, 0))
                self.num_free += length
                continue
            self.num_cached += length
            if self.gapped:
                for child in [child for child in segment.children.values() if child.holders]:
                    self._cut_off(child)
            if not segment.children:
                self.tree.rest(segment)
        for row in dict.fromkeys(row for segment in sole for row in segment.holders):
            self._reclaim(self.sequences[row])

    def _cut_off(self, segment: Segment) -> None:
        """What is above a held segment may go: nobody can hit it, or anything below it, any more."""
        for below in [*segment.below(), segment]:
            if below.holders:
                self.tree.cut_off(below)
            else:
                self.trim(below, 0)

    def split(self, segment: Segment, at: int) -> Segment:
        head = self.tree.split(segment, at)
        if head.named and head.confirmed < head.length:
            self.unconfirmed.append(head)
        self.edits.append(SplitSegment(segment.id, at, head.id))
        return head

    def trim(self, segment: Segment, keep: int) -> None:
        """Free all but the first `keep` tokens of an unheld leaf."""
        freed = segment.length - keep
        if not freed:
            return
        self.edits.append(FreeSegment(segment.id, keep))
        self.num_cached -= freed
        self.num_free += freed
        if keep:
            segment.tokens = segment.tokens[: keep * TOKEN_BYTES]
            segment.confirmed = min(segment.confirmed, keep)
        else:
            self.tree.remove(segment)
