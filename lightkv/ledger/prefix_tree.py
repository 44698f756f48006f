"""The tree of shared segments: which token ids are cached, which sequences hold them, and what can be evicted.

A segment is a run of tokens that are held together; the path from a root to a segment spells a prefix. Token
ids are int32 bytes throughout, so that a thousand of them are compared by one memcmp.

    root ── "You are a helpful assistant" ──┬── "What is a slot?"      held by sequence A
    (one per namespace)   held by A and B   └── "Who wrote Faust?"     held by sequence B

A sequence that holds a segment holds the segment's ancestors too, so unheld (cached) segments are always at the
leaves. There is one exception: a sequence that has dropped the upper part of its path. As soon as no sequence
holds that part, the segments below it that are still held are taken out of the index.

A segment that was split off a running sequence (a fork) is *unindexed*: the tree does not know its tokens. It
hangs below its parent, but no look-up finds it, and it is freed when no sequence holds it. It is indexed once
its tokens are known.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lightkv.errors import CheckFailed

from .changes import Namespace, SegmentAdded, SegmentCut, SegmentGrew, SegmentSplit, TreeChange
from .segments import TOKEN_BYTES, Idle, Segment

MAX_HITS = 8  # of a segment; further hits do not let it stay any longer


class Match(NamedTuple):
    """What the cache has of a prompt: a path of segments, the deepest first. The first of them matches for
    `tip` tokens, the others whole."""

    path: tuple[Segment, ...]
    tip: int
    num_tokens: int

    @classmethod
    def of(cls, path: list[Segment], matched: int) -> "Match":
        """Returns what `PrefixTree.find` has found."""
        tip = matched // TOKEN_BYTES
        return cls(tuple(path[::-1]), tip, tip + sum([segment.length for segment in path[:-1]]))

    @property
    def held(self) -> "Match":
        """The part of it that sequences hold; the rest may be evicted."""
        unheld = sum([1 for segment in self.path if not segment.holders])  # the last ones
        return self.cut(sum([segment.length for segment in self.path[unheld:]])) if unheld else self

    def cut(self, num_tokens: int) -> "Match":
        """Returns its first `num_tokens`, if it has as many."""
        path, tip, end = self
        gone = 0
        while gone < len(path) and end - tip >= num_tokens:
            end -= tip
            gone += 1
            tip = path[gone].length if gone < len(path) else 0
        return Match(path[gone:], tip - max(end - num_tokens, 0), min(end, num_tokens))


def common_prefix(segment: bytes, tokens: bytes, at: int, end: int) -> int:
    """Returns how many bytes at the start of `segment` equal `tokens[at:end]`, in whole tokens."""
    low, high = 0, min(len(segment), end - at) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        first = low * TOKEN_BYTES
        if tokens.startswith(segment[first : middle * TOKEN_BYTES], at + first):
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES


class PrefixTree:
    """The roots by namespace, and what can be evicted (`idle`), in the order in which it is.

    The order is that of the last use, but each of up to `MAX_HITS` hits counts like a use `hit_worth` later.
    The clock is no time: it counts the tokens that were allocated (`pass_tokens`) and the uses, so that a
    replay evicts the same segments. Segments that a session protects are not in the heap.

    `shared`: the segments that two or more sequences hold. `changes`: what has become of the indexed segments,
    in order; None while they are not noted.
    """

    def __init__(self, hit_worth: int = 1) -> None:
        self.roots: dict[Namespace, Segment] = {}
        self.shared: set[Segment] = set()
        self.changes: list[TreeChange] | None = None
        self._hit_worth = hit_worth
        self._next_id = 1
        self._clock = 0
        self.idle = Idle()

    def root(self, namespace: Namespace) -> Segment:
        """Returns the namespace's root, and makes it if there is none. An unheld root without children is
        removed (`note_unheld`)."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Segment(0, b"", None, namespace)
        return root

    def pass_tokens(self, count: int) -> None:
        """Notes that `count` tokens were allocated."""
        self._clock += count

    def touch(self, path: Iterable[Segment]) -> None:
        """Marks these segments as used now."""
        self._clock += 1
        for segment in path:
            segment.due = self._clock + segment.credit

    def hit(self, path: Iterable[Segment]) -> None:
        """Notes that these segments were hit."""
        worth = self._hit_worth
        most = MAX_HITS * worth
        for segment in path:
            if segment.credit < most:
                segment.credit += worth

    def add_holder(self, path: Iterable[Segment], row: int) -> int:
        """Makes `row` a holder of `path`. Returns how many tokens of it no sequence held before."""
        num_bytes = 0
        for segment in path:
            holders = segment.holders
            if not holders:
                num_bytes += len(segment.tokens)
            elif len(holders) == 1:
                self.shared.add(segment)
            holders.add(row)
        return num_bytes // TOKEN_BYTES

    def remove_holder(self, path: Iterable[Segment], row: int) -> tuple[list[Segment], list[Segment]]:
        """Removes `row` from the holders of `path`, and marks the segments as used now.

        Returns, each in the order of `path`: the segments that no sequence holds any more, and the unindexed
        segments that one sequence alone still holds.
        """
        self._clock = now = self._clock + 1
        unheld: list[Segment] = []
        sole: list[Segment] = []
        for segment in path:
            holders = segment.holders
            holders.remove(row)
            segment.due = now + segment.credit
            if not holders:
                unheld.append(segment)
            elif len(holders) == 1:
                self.shared.discard(segment)
                if not segment.indexed:
                    sole.append(segment)
        return unheld, sole

    def find(self, node: Segment, tokens: bytes, at: int, end: int) -> tuple[list[Segment], int]:
        """Walks from `node` down along `tokens[at:end]` as far as they match. Changes nothing.

        Returns the segments reached below `node`, and how many bytes of *the last one* match: all of them,
        unless the walk ends within it; 0 where no segment is reached.
        """
        path: list[Segment] = []
        matched = 0
        while at < end:
            child = node.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                break
            path.append(child)
            known = child.tokens
            if not tokens.startswith(known, at, end):
                return path, common_prefix(known, tokens, at, end)
            matched = len(known)
            at += matched
            node = child
        return path, matched

    def match(self, namespace: Namespace, tokens: bytes) -> Match:
        """Returns what there is of a prompt, but for its last token."""
        root = self.roots.get(namespace)
        if root is None:
            return Match((), 0, 0)
        return Match.of(*self.find(root, tokens, 0, len(tokens) - TOKEN_BYTES))

    def add(self, parent: Segment, tokens: bytes) -> Segment:
        """Adds an indexed segment without holders under `parent`."""
        child = Segment(self._next_id, tokens, parent)
        self._next_id += 1
        parent.children[tokens[:TOKEN_BYTES]] = child
        if self.changes is not None:
            self.changes.append(_added(child))
        return child

    def grow(self, segment: Segment, tokens: bytes) -> None:
        """Adds `tokens` to the end of an indexed segment without children."""
        segment.tokens += tokens
        if self.changes is not None:
            self.changes.append(SegmentGrew(segment.id, tokens))

    def cut(self, segment: Segment, keep: int) -> None:
        """Removes all but the first `keep` tokens, at least one, of an indexed segment without children."""
        segment.tokens = segment.tokens[: keep * TOKEN_BYTES]
        segment.confirmed = min(segment.confirmed, keep)
        if self.changes is not None:
            self.changes.append(SegmentCut(segment.id, keep))

    def add_unindexed(self, parent: Segment, length: int) -> Segment:
        """Adds an unindexed segment of `length` tokens without holders under `parent`."""
        child = Segment(self._next_id, bytes(length * TOKEN_BYTES), parent)
        self._next_id += 1
        child.indexed = False
        return child

    def index(self, segment: Segment, tokens: bytes) -> bool:
        """Gives an unindexed segment its tokens, by which look-ups find it from now on.

        Returns False, and changes nothing, if the parent is unindexed or already has a child that begins with
        the same token.
        """
        parent, key = segment.parent, tokens[:TOKEN_BYTES]
        assert parent is not None
        if not parent.indexed or key in parent.children:
            return False
        segment.tokens = tokens
        segment.indexed = True
        segment.confirmed = segment.length
        parent.children[key] = segment
        if self.changes is not None:
            self.changes.append(_added(segment))
        return True

    def unindex(self, segment: Segment) -> None:
        """Makes an indexed segment unindexed, so that its ancestors can be removed."""
        assert segment.parent is not None
        del segment.parent.children[segment.tokens[:TOKEN_BYTES]]
        segment.tokens = bytes(len(segment.tokens))
        segment.indexed = False
        if self.changes is not None:
            self.changes.append(SegmentCut(segment.id, 0))

    def split(self, segment: Segment, at: int) -> Segment:
        """Splits `segment` after `at` tokens and returns the new head. `segment` keeps the rest and its
        holders, so a sequence whose path ends with `segment` still ends with it."""
        assert segment.parent is not None
        cut = at * TOKEN_BYTES
        if segment.indexed:
            head = self.add(segment.parent, segment.tokens[:cut])
        else:
            head = self.add_unindexed(segment.parent, at)
        head.holders = segment.holders.copy()
        if len(head.holders) > 1:
            self.shared.add(head)
        head.credit = segment.credit
        head.due = segment.due
        head.protected = 1 if segment.protected else 0
        head.published = segment.published
        head.confirmed = min(segment.confirmed, at)
        segment.confirmed = max(segment.confirmed - at, 0)
        segment.tokens = segment.tokens[cut:]
        segment.parent = head
        if segment.indexed:
            head.children[segment.tokens[:TOKEN_BYTES]] = segment
            if self.changes is not None:  # the last change says that the head was added
                self.changes[-1] = SegmentSplit(segment.id, at, head.id)
        return head

    def merge(self, segment: Segment) -> None:
        """Merges the parent of `segment` into it: `segment` then begins with the parent's tokens, and the
        parent is gone. Both have to be unindexed and to have the same holders."""
        head = segment.parent
        assert head is not None
        segment.tokens = head.tokens + segment.tokens
        segment.parent, head.parent = head.parent, None
        head.holders.clear()
        self.shared.discard(head)

    def remove(self, segment: Segment) -> None:
        """Removes an unheld leaf from the tree; its parent may become an unheld leaf."""
        parent = segment.parent
        assert parent is not None
        assert not segment.holders
        assert not segment.children
        del parent.children[segment.tokens[:TOKEN_BYTES]]
        segment.parent = None
        if self.changes is not None:
            self.changes.append(SegmentCut(segment.id, 0))
        self.note_unheld(parent)

    def note_unheld(self, segment: Segment) -> None:
        """Puts `segment` among the idle ones if it has no holder, no child and no protection. Such a root is
        removed."""
        if segment.holders or segment.children:
            return
        if segment.parent is not None:
            self.idle.add(segment)
        elif self.roots.get(segment.namespace) is segment:
            del self.roots[segment.namespace]

    def __iter__(self) -> Iterator[Segment]:
        """Yields every indexed segment, parents before children."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            segment = stack.pop()
            yield segment
            stack.extend(segment.children.values())

    def note_changes(self) -> None:
        """Notes from now on what comes and goes, for `drain_changes`. What is here already is in `contents`."""
        self.changes = []

    def drain_changes(self) -> list[TreeChange]:
        """Returns the changes since the last call, in order; none unless they are noted."""
        if not self.changes:
            return []
        changes, self.changes = self.changes, []
        return changes

    def contents(self) -> list[SegmentAdded]:
        """Returns the changes that make these indexed segments from nothing."""
        return [_added(segment) for segment in self]

    def check(self) -> None:
        """Recounts the links and the keys. Raises CheckFailed. Holders are recounted with the sequences."""
        for segment in self:
            parent = segment.parent
            if parent is None or parent.children.get(segment.tokens[:TOKEN_BYTES]) is not segment:
                raise CheckFailed(f"{segment} is not its parent's child")
            if not segment.tokens or len(segment.tokens) % TOKEN_BYTES:
                raise CheckFailed(f"{segment} holds {len(segment.tokens)} bytes, not whole tokens")
            if (len(segment.holders) > 1) != (segment in self.shared):
                raise CheckFailed(f"{segment} is {'' if segment in self.shared else 'not '}among the shared")
            if not segment.indexed:
                raise CheckFailed(f"{segment} is found in the tree")
            if not segment.holders and any(child.holders for child in segment.children.values()):
                raise CheckFailed(f"{segment} has no holder, but segments below it have some")
        if any(len(segment.holders) < 2 for segment in self.shared):
            raise CheckFailed("a segment of fewer than two holders is among the shared")


def _added(segment: Segment) -> SegmentAdded:
    parent = segment.parent
    assert parent is not None
    return SegmentAdded(segment.id, parent.id, parent.namespace, segment.tokens)
