"""The tree of shared segments: which token sequences are in the cache, who holds them, what can go.

Knows token ids, lengths and who holds what (by row); knows no slots, and counts no free tokens (`ledger.py`
does).
A segment is a run of tokens held together; the path from a root to it spells a prefix. Token ids are bytes
of int32 throughout, so that comparing a thousand of them is one memcmp.

    root ── "You are a helpful assistant" ──┬── "What is a slot?"      held by sequence A
    (one per namespace)   held by A and B   └── "Who wrote Faust?"     held by sequence B

A holder of a segment holds its ancestors too, so a parent has at least its children's holders, and what
nobody holds (what is cached) always hangs at the leaves. The exception is a sequence that has dropped the
upper part of its path: as soon as nobody holds that part, it is cut off from what is still held below.

A segment that was split off a running sequence (a fork) is *anonymous*: which tokens it holds is not known
here, so it hangs below its parent without being found there, and is freed when nobody holds it. Once its
tokens are told it gets its name.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator

from lightkv.errors import CheckFailed

TOKEN_BYTES = 4

Namespace = tuple[object, ...]


class Segment:
    """One node: `tokens` int32 bytes that follow its parent's, `holders` the rows of the sequences on whose
    path it is. `named`: the tree finds it by its tokens; an anonymous one's are zeros."""

    __slots__ = (
        "children",
        "confirmed",
        "holders",
        "id",
        "named",
        "namespace",
        "parent",
        "published",
        "queued",
        "tokens",
        "used",
    )

    def __init__(
        self, segment_id: int, tokens: bytes, parent: "Segment | None", namespace: Namespace = ()
    ) -> None:
        self.id = segment_id
        self.namespace = namespace  # of a root
        self.tokens = tokens
        self.parent = parent
        self.children: dict[bytes, Segment] = {}
        self.holders: set[int] = set()
        self.named = True
        self.used = 0
        self.queued = False  # is it among the idle leaves, perhaps with an older `used`?
        # The first `confirmed` tokens are known to be computed; the rest was published by step `published`.
        self.confirmed = len(tokens) // TOKEN_BYTES
        self.published = -1

    @property
    def length(self) -> int:
        """Tokens in this segment."""
        return len(self.tokens) // TOKEN_BYTES

    def __repr__(self) -> str:
        kind = "" if self.named else ", anonymous"
        return f"Segment({self.id}, length={self.length}, holders={len(self.holders)}{kind})"

    def up(self) -> Iterator["Segment"]:
        """This segment and its ancestors up to the root, the root left out."""
        node: Segment = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> "list[Segment]":
        """Every segment under this one, children before their parents."""
        found: list[Segment] = []
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found[::-1]


def common_prefix(segment: bytes, tokens: bytes, at: int, end: int) -> int:
    """How many bytes of `segment` equal `tokens[at:end]` from their starts on, in whole tokens."""
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
    """Roots by namespace, and the unheld leaves in the order of their last use.

    `shared`: the segments that two sequences or more hold.
    """

    def __init__(self) -> None:
        self.roots: dict[Namespace, Segment] = {}
        self.shared: set[Segment] = set()
        self._next_id = 1
        self._use = 0
        self._idle: list[tuple[int, int, Segment]] = []  # a heap; see `oldest`

    def root(self, namespace: Namespace) -> Segment:
        """The namespace's root, made when it is new. Held like any segment; gone when unheld and empty."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Segment(0, b"", None, namespace)
        return root

    def touch(self) -> int:
        """The next number in the order of use: by event, never by clock, so that a replay evicts alike."""
        self._use += 1
        return self._use

    def hold(self, path: Iterable[Segment], row: int) -> int:
        """`row` holds `path` too. Returns how many tokens nobody held before."""
        taken = 0
        for segment in path:
            holders = segment.holders
            if not holders:
                taken += len(segment.tokens)
            elif len(holders) == 1:
                self.shared.add(segment)
            holders.add(row)
        return taken // TOKEN_BYTES

    def leave(self, path: Iterable[Segment], row: int) -> tuple[list[Segment], list[Segment]]:
        """`row` holds `path` no more. Returns, in its order, what of it nobody does, and what of the anonymous
        one sequence alone does."""
        self._use = now = self._use + 1
        unheld: list[Segment] = []
        sole: list[Segment] = []
        for segment in path:
            holders = segment.holders
            holders.remove(row)
            segment.used = now
            if not holders:
                unheld.append(segment)
            elif len(holders) == 1:
                self.shared.discard(segment)
                if not segment.named:
                    sole.append(segment)
        return unheld, sole

    def find(self, node: Segment, tokens: bytes, at: int, end: int) -> tuple[list[Segment], int]:
        """Walk from `node` as far as `tokens[at:end]` goes. Changes nothing.

        Returns the segments reached, from `node` (left out) on, and how many bytes of *the last* match (all of
        it but at the end; 0 where none is reached).
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

    def add(self, parent: Segment, tokens: bytes) -> Segment:
        """A new segment under `parent`, held by nobody yet."""
        child = Segment(self._next_id, tokens, parent)
        self._next_id += 1
        parent.children[tokens[:TOKEN_BYTES]] = child
        return child

    def attach(self, parent: Segment, length: int) -> Segment:
        """A new anonymous segment of `length` tokens under `parent`, held by nobody yet."""
        child = Segment(self._next_id, bytes(length * TOKEN_BYTES), parent)
        self._next_id += 1
        child.named = False
        return child

    def name(self, segment: Segment, tokens: bytes) -> bool:
        """Have an anonymous segment found by its tokens, now that they are known. False, and nothing is
        changed, where its parent is not found itself or has another child that begins alike."""
        parent, key = segment.parent, tokens[:TOKEN_BYTES]
        assert parent is not None
        if not parent.named or key in parent.children:
            return False
        segment.tokens = tokens
        segment.named = True
        segment.confirmed = segment.length
        parent.children[key] = segment
        return True

    def cut_off(self, segment: Segment) -> None:
        """A named segment becomes anonymous: what is above it may go."""
        assert segment.parent is not None
        del segment.parent.children[segment.tokens[:TOKEN_BYTES]]
        segment.tokens = bytes(len(segment.tokens))
        segment.named = False

    def split(self, segment: Segment, at: int) -> Segment:
        """Cut `segment` after `at` tokens. Returns the new head; `segment` keeps the rest and its holders.

        Whoever points at `segment` still points at the end of its path.
        """
        assert segment.parent is not None
        cut = at * TOKEN_BYTES
        if segment.named:
            head = self.add(segment.parent, segment.tokens[:cut])
        else:
            head = self.attach(segment.parent, at)
        head.holders = segment.holders.copy()
        if len(head.holders) > 1:
            self.shared.add(head)
        head.used = segment.used
        head.published = segment.published
        head.confirmed = min(segment.confirmed, at)
        segment.confirmed = max(segment.confirmed - at, 0)
        segment.tokens = segment.tokens[cut:]
        segment.parent = head
        if segment.named:
            head.children[segment.tokens[:TOKEN_BYTES]] = segment
        return head

    def join(self, segment: Segment) -> None:
        """`segment` begins with the tokens of its parent, which is no more: both are anonymous, and the same
        rows hold them."""
        head = segment.parent
        assert head is not None
        segment.tokens = head.tokens + segment.tokens
        segment.parent, head.parent = head.parent, None
        head.holders.clear()
        self.shared.discard(head)

    def remove(self, segment: Segment) -> None:
        """Take an unheld leaf out of the tree; its parent may have become one."""
        parent = segment.parent
        assert parent is not None
        assert not segment.holders
        assert not segment.children
        del parent.children[segment.tokens[:TOKEN_BYTES]]
        segment.parent = None
        self.rest(parent)

    def rest(self, segment: Segment) -> None:
        """Note a segment that may now be evictable; drop a root that nothing hangs from."""
        if segment.holders or segment.children or not segment.named:
            return
        if segment.parent is not None:
            if not segment.queued:
                segment.queued = True
                heapq.heappush(self._idle, (segment.used, segment.id, segment))
        elif self.roots.get(segment.namespace) is segment:
            del self.roots[segment.namespace]

    def oldest(self) -> Segment | None:
        """The unheld leaf that was used longest ago, or None when everything is held."""
        idle = self._idle
        while idle:
            used, _, segment = idle[0]
            if segment.holders or segment.children or segment.parent is None or not segment.named:
                heapq.heappop(idle)
                segment.queued = False
            elif used != segment.used:
                heapq.heapreplace(idle, (segment.used, segment.id, segment))
            else:
                return segment
        return None

    def __iter__(self) -> Iterator[Segment]:
        """Every named segment, parents before children."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            segment = stack.pop()
            yield segment
            stack.extend(segment.children.values())

    def check(self, gapped: Collection[int] = ()) -> None:
        """Recount the links, the keys and the idle leaves. `gapped`: the rows that have dropped a part of their
        path, which alone may hold a segment and not its parent. Raises CheckFailed."""
        idle = {segment.id for _, _, segment in self._idle}
        for segment in self:
            parent = segment.parent
            if parent is None or parent.children.get(segment.tokens[:TOKEN_BYTES]) is not segment:
                raise CheckFailed(f"{segment} is not its parent's child")
            if not segment.tokens or len(segment.tokens) % TOKEN_BYTES:
                raise CheckFailed(f"{segment} holds {len(segment.tokens)} bytes, not whole tokens")
            below = [row for child in segment.children.values() for row in child.holders]
            if len(set(below)) < len(below) or not segment.holders.issuperset(set(below).difference(gapped)):
                raise CheckFailed(f"{segment} is held by {segment.holders}, its children by {below}")
            if (len(segment.holders) > 1) != (segment in self.shared):
                raise CheckFailed(f"{segment} is {'' if segment in self.shared else 'not '}among the shared")
            if not segment.named:
                raise CheckFailed(f"{segment} is found in the tree")
            if not segment.holders and below:
                raise CheckFailed(f"{segment} is held by nobody, and what is below it by {below}")
            if not segment.holders and not segment.children and segment.id not in idle:
                raise CheckFailed(f"{segment} is held by nobody and cannot be evicted")
        if any(len(segment.holders) < 2 for segment in self.shared):
            raise CheckFailed("a segment of fewer than two holders is among the shared")
