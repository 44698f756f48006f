"""The segments of the prefix tree, and their tails: what they have in the classes of layers that do not see
everything.

    segment   ├──────────────── 40 tokens ───────────────┤      in the class that sees everything
    tail                              ├──── 12 tokens ───┤      in a class with a window

A tail is the end of its segment, since what a window needs ends where a prompt or an answer ends, and each such
place is the end of a segment. A row holds a tail for as long as its window reaches it. A tail that no row holds
is cached, whether or not its segment is held, and can be evicted by itself. In the class of states a tail has
no tokens: it is the state after the last token of its segment (`snapshots.py`).
"""

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Protocol

from lightkv.edits import Edit, FreePart
from lightkv.errors import CheckFailed
from lightkv.layer_groups import Rule

from .changes import Namespace

TOKEN_BYTES = 4
NO_TAILS: "dict[int, Tail]" = {}  # of every segment that has none; nothing is ever put into it
_PROTECTED = 1 << 62  # in the order of eviction: what sessions protect, after all that they do not


class Segment:
    """One node of the tree.

    tokens: int32 bytes that follow the parent's; zeros while the segment is unindexed. holders: the rows of the
    sequences on whose path the segment is. indexed: whether look-ups find it by its tokens. credit: for its
    hits since it was stored; 0: there was none. due: its place in the order of eviction, the last use plus the
    credit (`PrefixTree`). protected: how many sessions end here, and how many children are protected
    (`sessions.py`); if not 0, it is evicted last. tails: by class, what it has in those that do not see
    everything (`Tail`).
    """

    __slots__ = (
        "children",
        "confirmed",
        "credit",
        "due",
        "holders",
        "id",
        "indexed",
        "namespace",
        "parent",
        "protected",
        "published",
        "queued",
        "tails",
        "tokens",
    )

    def __init__(
        self, segment_id: int, tokens: bytes, parent: "Segment | None", namespace: Namespace = ()
    ) -> None:
        self.id = segment_id
        self.namespace = namespace  # meaningful for a root
        self.tokens = tokens
        self.parent = parent
        self.children: dict[bytes, Segment] = {}
        self.holders: set[int] = set()
        self.tails: dict[int, Tail] = NO_TAILS
        self.indexed = True
        self.credit = 0
        self.due = 0
        self.protected = 0
        self.queued = False  # whether it is among the idle ones, perhaps with an older `due`
        # The first `confirmed` tokens have been computed for certain; step `published` computes the others.
        self.confirmed = len(tokens) // TOKEN_BYTES
        self.published = -1

    @property
    def length(self) -> int:
        """Tokens in this segment."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_idle(self) -> bool:
        """Whether it is a leaf that can be evicted: nothing holds or protects it."""
        is_used = self.holders or self.children or self.protected or not self.indexed
        return not is_used and self.parent is not None

    @property
    def may_grow(self) -> bool:
        """Whether its only holder can add tokens to it. A segment that was hit or is protected stays as it is,
        since the new tokens were not hit and are not protected, and so does one whose end has tails."""
        alone = self.parent is not None and len(self.holders) == 1 and not self.children and not self.tails
        return alone and not self.credit and not self.protected

    @property
    def is_there(self) -> bool:
        """Whether look-ups find it."""
        return self.parent is not None and self.indexed

    @property
    def is_branching(self) -> bool:
        """Whether several prompts diverge at its end. A child counts once a sequence or another child goes on
        from it, so the rest of an answer whose last tokens the next prompt rewrites does not."""
        used = (one for one in self.children.values() if one.holders or one.credit or one.children)
        return len(list(islice(used, 2))) > 1

    def __repr__(self) -> str:
        kind = "" if self.indexed else ", unindexed"
        return f"Segment({self.id}, length={self.length}, holders={len(self.holders)}{kind})"

    def up(self) -> Iterator["Segment"]:
        """Yields this segment and its ancestors, without the root."""
        node: Segment = self
        while node.parent is not None:
            yield node
            node = node.parent

    def ends_up(self, end: int) -> "Iterator[tuple[Segment, int]]":
        """Yields what `up` does, each with the token at which it ends; this one ends at `end`."""
        for segment in self.up():
            yield segment, end
            end -= segment.length

    def below(self) -> "list[Segment]":
        """Returns every segment under this one, children before their parents."""
        found: list[Segment] = []
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found[::-1]

    # What becomes of its tails when it changes

    def split_tails(self, head: "Segment") -> None:
        """Divides its tails, since its first tokens have become `head`."""
        for tail in list(self.tails.values()):
            if (above := tail.length - self.length) > 0:
                is_confirmed = tail.confirmed == tail.length
                tail.length = self.length
                tail.confirmed = tail.length if is_confirmed else 0
                new = tail.of.store(head, above, None if is_confirmed else tail.published)
                new.holders = tail.holders.copy()
                new.superseded = tail.superseded
                tail.of.state.idle.add(new)

    def cut_tails(self, freed: int) -> int:
        """Takes its last `freed` tokens out of its tails, before they leave the unheld segment. Returns how
        many slots this frees."""
        slots = 0
        for tail in list(self.tails.values()):
            lost = min(tail.length, freed)
            if not tail.length:
                tail.drop()  # a state, which stands for the segment's last token, too
                continue
            slots += lost * tail.of.width
            tail.length -= lost
            tail.confirmed = min(tail.confirmed, tail.length)
            if not tail.length:
                del self.tails[tail.of.cls]
        return slots

    def can_join(self, head: "Segment") -> bool:
        """Returns whether its tails and those of `head`, which is above it, are the ends of both, joined, with
        the same holders."""
        for cls, above in head.tails.items():
            tail = self.tails.get(cls)
            if tail is None or not tail.is_whole or tail.holders != above.holders:
                return False
        return True

    def join_tails(self, head: "Segment") -> None:
        """Joins the tails of `head` to its own, before the tokens are joined."""
        for cls, above in head.tails.items():
            step = None if above.confirmed == above.length else above.published
            above.of.store(self, self.tails[cls].length + above.length, step)
        head.tails = NO_TAILS


class State(Protocol):
    """What tails and holds need of the ledger's state (`LedgerState`), which owns them."""

    unconfirmed: "list[Segment | Tail]"
    idle: "Idle"
    step: int
    confirmed: int
    reused: list[int]

    def emit(self, edit: Edit) -> None: ...

    def count(self, free: int = 0, cached: int = 0) -> None: ...

    def split(self, segment: Segment, at: int) -> Segment: ...


class Class(Protocol):
    """What tails need of their class (`holds.TailClass`, `snapshots.StateClass`): class `cls`, whose tokens
    take `width` slots of the pool. Tails of step `hit_before` and later are not hit yet."""

    cls: int
    width: int

    @property
    def state(self) -> State: ...

    @property
    def rule(self) -> Rule: ...

    @property
    def idle(self) -> "Idle": ...

    @property
    def hit_before(self) -> int: ...

    def count(self, free: int = 0, cached: int = 0) -> None: ...

    def due(self, tail: "Tail") -> int: ...

    def store(self, segment: Segment, length: int, step: int | None) -> "Tail": ...


class Tail:
    """The last `length` tokens of `segment` in the class `of`.

    holders: the rows that hold it. superseded: whether what this one could serve is expected of a later
    tail of its path, so that it is evicted before all others. confirmed: `length`, once no step that may fail
    computes any of it (`published` is the last such step). queued: whether it is among the idle ones.
    """

    __slots__ = ("confirmed", "holders", "length", "of", "published", "queued", "segment", "superseded")

    def __init__(self, of: Class, segment: Segment) -> None:
        self.of = of
        self.segment = segment
        self.length = self.confirmed = 0
        self.published = -1
        self.holders: set[int] = set()
        self.superseded = self.queued = False

    @property
    def num_slots(self) -> int:
        """Slots of the tail, in the pool of its class: one of a state, which has no tokens."""
        return self.length * self.of.width or 1

    @property
    def is_whole(self) -> bool:
        """Whether it has all tokens of its segment."""
        return self.length == self.segment.length

    @property
    def is_there(self) -> bool:
        """Whether its segment still has it."""
        return self.segment.tails.get(self.of.cls) is self

    @property
    def is_idle(self) -> bool:
        """Whether it can be evicted: no row holds it."""
        return not self.holders and self.is_there

    @property
    def due(self) -> int:
        """Its place in the order of eviction, among those of segments."""
        return 0 if self.superseded else self.of.due(self) + (_PROTECTED if self.segment.protected else 0)

    def hold(self, row: int) -> None:
        """Makes a row one of its holders."""
        if not self.holders:
            self.of.count(cached=-self.num_slots)
            self.superseded = False
        self.holders.add(row)

    def let_go(self, row: int) -> None:
        """Removes a row from its holders. Without any it is cached, or freed where no look-up finds it."""
        self.holders.discard(row)
        if not self.holders:
            self.of.count(cached=self.num_slots)
            if self.segment.indexed:
                self.of.idle.add(self)
            else:
                self.drop()

    def drop(self) -> int:
        """Frees a cached tail. Returns how many slots of the pool that frees."""
        of = self.of
        of.state.emit(FreePart(of.cls, self.segment.id))
        of.count(free=self.num_slots, cached=-self.num_slots)
        del self.segment.tails[of.cls]
        return self.length * of.width

    def __repr__(self) -> str:
        cls, holders = self.of.cls, len(self.holders)
        return f"Tail({self.length} tokens of {self.segment}, class {cls}, holders={holders})"


class Idle:
    """What can be evicted, in the order in which it is: the unheld leaves of the tree that no session protects,
    and the tails that no row holds. Of equals, tails come first."""

    def __init__(self) -> None:
        # What is out of date here leaves, or moves, when it reaches the top.
        self._heap: list[tuple[int, bool, int, Segment | Tail]] = []
        self._num_added = 0

    def add(self, one: Segment | Tail) -> None:
        """Adds what can be evicted, unless it is here."""
        if not one.queued and one.is_idle:
            one.queued = True
            self._num_added += 1
            heapq.heappush(self._heap, (one.due, isinstance(one, Segment), self._num_added, one))

    def supersede(self, tail: Tail) -> None:
        """Has a tail evicted before all that are not superseded."""
        if not tail.superseded:
            tail.superseded, tail.queued = True, False  # it may be here twice
            self.add(tail)

    def oldest(self) -> Segment | Tail | None:
        """Returns what is evicted first, and last the tails that sessions protect; None for nothing."""
        heap = self._heap
        while heap:
            due, is_segment, number, one = heap[0]
            if not one.is_idle:
                heapq.heappop(heap)
                one.queued = False
            elif due != one.due:
                heapq.heapreplace(heap, (one.due, is_segment, number, one))
            else:
                return one
        return None

    def check(self, segments: Iterable[Segment], *others: "Idle") -> None:
        """Raises CheckFailed unless the tails of these segments fit them, and all that can be evicted is here,
        or in `others`."""
        here = {one for idle in (self, *others) for *_, one in idle._heap}
        for segment in segments:
            for cls, tail in segment.tails.items():
                if tail.segment is not segment or tail.of.cls != cls:
                    raise CheckFailed(f"{tail} is filed as class {cls} of {segment}")
                if (tail.of.width and not tail.length) or tail.length > segment.length:
                    raise CheckFailed(f"{tail} has {tail.length} tokens of {segment.length}")
                if not (tail.holders or segment.indexed):
                    raise CheckFailed(f"{tail} has no holder, and no look-up finds it")
            parts: list[Segment | Tail] = [segment, *segment.tails.values()]
            for one in parts:
                if one.is_idle and one not in here:
                    raise CheckFailed(f"{one} has no holder and cannot be evicted")


def reachable(classes: Seq[Class], path: Seq[Segment], limit: int) -> int:
    """Returns the most tokens of `path`, at most `limit`, after which every class has what the next one sees.
    `path`: from the root on."""
    of_class = [(one.rule, ranges_of(path, one.cls)) for one in classes]
    found, before = limit, -1
    while found != before:
        before = found
        for rule, ranges in of_class:
            found = last_reachable(rule, ranges, found)
    return found


def ranges_of(path: Seq[Segment], cls: int) -> list[tuple[int, int]]:
    """Returns the ranges of tokens that a class has of a path, which is given from the root on; ascending."""
    ranges: list[tuple[int, int]] = []
    end = 0
    for segment in path:
        start, end = end, end + segment.length
        tail = segment.tails.get(cls)
        if tail is None or tail.published >= tail.of.hit_before:
            continue
        first = end - tail.length
        if ranges and ranges[-1][1] == first == start:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((first, end))
    return ranges


def last_reachable(rule: Rule, ranges: Seq[tuple[int, int]], limit: int) -> int:
    """Returns the highest number of tokens, at most `limit`, after which a token sees only what the `ranges`
    have."""
    best = rule.boundary(limit)
    for first, end in reversed(ranges):
        at = min(end, limit)
        if at <= best:
            break
        if rule.first_seen(at) >= first:
            return at
    return best
