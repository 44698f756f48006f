"""Which sequences of a decode batch read their first tokens together: those that hold them in the same slots.

Attention can read such a prefix once for a set of sequences. A sequence is in one set at most, and a set has
one length, so where prefixes are nested someone has to choose:

    3 sequences   ├──── 1000 ────┤                          together:            2 · 1000 not read again
    2 of these    ├──── 1000 ────┼────── 3000 ──────┤       these two apart:     1 · 4000

Knows the paths of a ledger's sequences, no slot and no device. No torch.
"""

from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

from .ledger import TokenLedger
from .prefix_tree import Segment
from .sequence import Sequence


class SharedPrefix(NamedTuple):
    """The sequences in `rows`, ascending, have their first `num_tokens` entries in the same slots."""

    rows: tuple[int, ...]
    num_tokens: int


class PrefixSharing(NamedTuple):
    """What is worth reading together.

    `max_members`: as many as one reading serves; for more it is read again. 1: nothing is read together.
    `min_tokens`: of the prefix. `min_saved`: tokens that a set does not read again, in every layer and step.
    `min_mean`: these of all sets over all sequences of the batch, for who reads alone is the slower for it (by
    5 % of 8k tokens on an H200).
    """

    max_members: int
    min_tokens: int = 512
    min_saved: int = 4096
    min_mean: int = 512

    def saved(self, members: int, num_tokens: int) -> int:
        """Tokens that so many sequences do not read again if they read so many together; 0: not worth it."""
        if members < 2 or num_tokens < self.min_tokens:
            return 0
        saved = (members - -(-members // self.max_members)) * num_tokens
        return saved if saved >= self.min_saved else 0

    def worthwhile(self, prefixes: list[SharedPrefix], batch_size: int) -> list[SharedPrefix]:
        """All of them, or none."""
        saved = sum(self.saved(len(prefix.rows), prefix.num_tokens) for prefix in prefixes)
        return prefixes if saved >= self.min_mean * batch_size else []


class _Choice(NamedTuple):
    """Sets of rows, each with its number of tokens; who is in one of them; what they save."""

    saved: int
    sets: list[tuple[int, set[int]]]
    taken: set[int]


_NOTHING = _Choice(0, [], set())


def shared_prefixes(
    shared: Iterable[Segment], sequences: Collection[Sequence], grouping: PrefixSharing
) -> list[SharedPrefix]:
    """Disjoint sets of `sequences` (open ones) and the prefix that each shares, so that little is read again.

    `shared`: the segments that several of the ledger's sequences hold (`TokenLedger.shared`). From the leaves
    up, a segment's holders read up to its end together, all of them or those for whom the segments below it
    have nothing better.

    A sequence that has dropped tokens is left out, for its entries are not the others'; so is one that shares
    its very last token. Within what it shares, every other sequence's query sees all.
    """
    return grouping.worthwhile(_sets(shared, sequences, grouping), len(sequences))


def _sets(
    shared: Iterable[Segment], sequences: Collection[Sequence], grouping: PrefixSharing
) -> list[SharedPrefix]:
    if grouping.max_members < 2:
        return []
    rows = {s.row for s in sequences if not s.dropped and s.length > s.shared}
    depths: dict[Segment, int] = {}
    members: dict[Segment, set[int]] = {}
    for segment in shared:
        if _depth(segment, depths) >= grouping.min_tokens:
            holders = segment.holders & rows
            if len(holders) > 1:
                members[segment] = holders
    below: dict[Segment, list[_Choice]] = {}
    chosen: list[_Choice] = []
    for segment in sorted(members, key=depths.__getitem__, reverse=True):  # children before their parents
        choice = _choose(members[segment], depths[segment], below.pop(segment, ()), grouping)
        if choice.saved:
            above = segment.parent
            while above is not None and above not in members:
                above = above.parent
            (chosen if above is None else below.setdefault(above, [])).append(choice)
    return sorted(
        SharedPrefix(tuple(sorted(rows)), depth) for choice in chosen for depth, rows in choice.sets
    )


def _choose(holders: set[int], depth: int, below: Collection[_Choice], grouping: PrefixSharing) -> _Choice:
    """All `holders` together; or what was chosen below, all of it or where that saves more than to join here,
    and the rest together."""
    saved, kept, of_rest = 0, below, 0
    better = [choice for choice in below if choice.saved > len(choice.taken) * depth]
    for option in ((), better, below) if below else ((),):
        num_rest = len(holders) - sum(len(choice.taken) for choice in option)
        save_rest = grouping.saved(num_rest, depth)
        total = save_rest + sum(choice.saved for choice in option)
        if total > saved:
            saved, kept, of_rest = total, option, save_rest
    if not saved:
        return _NOTHING
    sets = [found for choice in kept for found in choice.sets]
    taken = set().union(*(choice.taken for choice in kept))
    if of_rest:
        sets.append((depth, holders - taken))
        taken = holders
    return _Choice(saved, sets, taken)


def _depth(segment: Segment, known: dict[Segment, int]) -> int:
    """The tokens from the root to the end of `segment`; `known` is added to."""
    path = []
    node = segment
    while node not in known and node.parent is not None:
        path.append(node)
        node = node.parent
    depth = known.get(node, 0)
    for node in reversed(path):
        depth += node.length
        known[node] = depth
    return depth


def _first_row(prefix: SharedPrefix) -> int:
    return prefix.rows[0]


class _Family:
    """Those of a batch who share a prefix long enough, each with each, and what was chosen for them."""

    def __init__(self, members: set[Sequence], prefixes: list[SharedPrefix]) -> None:
        self.members = members
        self.prefixes = prefixes


class BatchPrefixes:
    """`shared_prefixes` of a batch that changes little from step to step: found anew for the families of those
    who come and go, and for nobody in a step where nobody does.

    For sequences that begin by `open` or `fork` and end by `close`: none drops tokens or is cut while it is in
    the batch. So what two of them share is what they shared when the later one came.
    """

    def __init__(self, ledger: TokenLedger, grouping: PrefixSharing) -> None:
        self._ledger = ledger
        self._grouping = grouping
        self._batch: list[Sequence] = []
        self._members: set[Sequence] = set()  # of the batch
        self._family: dict[Sequence, _Family] = {}  # of who has one
        self._families: set[_Family] = set()
        self._sets: list[SharedPrefix] = []  # of all families
        self._found: list[SharedPrefix] = []

    def of(self, batch: list[Sequence]) -> list[SharedPrefix]:
        """The sets in this batch, the same list as long as they are the same. Its newest tokens have slots."""
        if self._grouping.max_members < 2 or batch == self._batch:
            return self._found
        members = set(batch)
        gone = self._members - members
        changed = {sequence for sequence in members - self._members if self._top(sequence) is not None}
        left = {self._family.pop(sequence) for sequence in gone & self._family.keys()}
        self._families -= left
        for family in left:
            changed.update(islice(family.members - gone, 1))  # one of those who stay speaks for all
        self._batch, self._members = batch, members
        if changed or left:
            self._renew(changed)
            prefixes = [prefix for family in self._families for prefix in family.prefixes]
            self._sets = sorted(
                prefixes, key=_first_row
            )  # so that the same batch is summed in the same order
        found = self._grouping.worthwhile(self._sets, len(batch))
        if found != self._found:
            self._found = found
        return self._found

    def _renew(self, changed: set[Sequence]) -> None:
        """Choose for the families of these."""
        while changed:
            sequence = changed.pop()
            top = self._top(sequence)
            if top is None:
                self._family.pop(sequence, None)  # nobody is left who shares with it
                continue
            members = self._members.intersection(self._ledger.holders(top))
            changed -= members
            self._families.difference_update(map(self._family.get, members))
            prefixes = _sets(self._segments(members), members, self._grouping)
            family = _Family(members, prefixes)
            self._families.add(family)
            self._family.update(dict.fromkeys(members, family))

    def _top(self, sequence: Sequence) -> Segment | None:
        """The first segment at whose end the prefix is long enough, if others hold it, too."""
        node, depth, top = sequence.node, sequence.shared, None
        while node.parent is not None and depth >= self._grouping.min_tokens and not sequence.dropped:
            if len(node.holders) > 1:
                top = node
            depth -= node.length
            node = node.parent
        return top

    def _segments(self, family: set[Sequence]) -> Collection[Segment]:
        """Those that several hold, on their paths at least."""
        if len(family) > len(self._ledger.shared):
            return self._ledger.shared
        found: set[Segment] = set()
        for sequence in family:
            node = sequence.node
            while node.parent is not None and node not in found:
                if len(node.holders) > 1:
                    found.add(node)
                node = node.parent
        return found
