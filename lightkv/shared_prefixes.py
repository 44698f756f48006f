"""Which sequences of a decode batch read their first tokens together: those that hold them in the same slots.

Attention can read such a prefix once for a set of sequences. A sequence is in one set at most, and a set has
one length, so where prefixes are nested someone has to choose:

    3 sequences   ├──── 1000 ────┤                          together:            2 · 1000 not read again
    2 of these    ├──── 1000 ────┼────── 3000 ──────┤       these two apart:     1 · 4000

Knows the paths of a ledger's sequences, no slot and no device. No torch.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from .ledger import TokenLedger
from .prefix_tree import Segment
from .sequence import Sequence


class SharedPrefix(NamedTuple):
    """The sequences in `rows`, ascending, have their first `num_tokens` entries in the same slots."""

    rows: tuple[int, ...]
    num_tokens: int


class Grouping(NamedTuple):
    """What is worth reading together.

    `max_members`: as many as one reading serves; for more it is read again. 1: nothing is read together.
    `min_tokens`: of the prefix. `min_saved`: tokens that a set does not read again, in every layer and step.
    """

    max_members: int
    min_tokens: int = 512
    min_saved: int = 4096

    def saved(self, members: int, num_tokens: int) -> int:
        """Tokens that so many sequences do not read again if they read so many together; 0: not worth it."""
        if members < 2 or num_tokens < self.min_tokens:
            return 0
        saved = (members - -(-members // self.max_members)) * num_tokens
        return saved if saved >= self.min_saved else 0


class _Choice(NamedTuple):
    """Sets of rows, each with its number of tokens; who is in one of them; what they save."""

    saved: int
    sets: list[tuple[int, set[int]]]
    taken: set[int]


def shared_prefixes(
    shared: Iterable[Segment], sequences: Iterable[Sequence], grouping: Grouping
) -> list[SharedPrefix]:
    """Disjoint sets of `sequences` (open ones) and the prefix that each shares, so that little is read again.

    `shared`: the segments that several of the ledger's sequences hold (`TokenLedger.shared`). Whatever tokens a
    segment ends at, its holders have the choice: all read up to there together, or each of the segments below
    decides for its own holders, and who is left reads up to there together.

    A sequence that has dropped tokens is left out, for its entries are not the others'; so is one that shares
    its very last token. Within what it shares, every other sequence's query sees all.
    """
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
    below: dict[Segment | None, _Choice] = {}
    for segment in sorted(members, key=depths.__getitem__, reverse=True):  # children before their parents
        holders, depth = members[segment], depths[segment]
        choice = _choose(holders, depth, below.pop(segment, None), grouping)
        if choice.saved:
            above = segment.parent
            while above is not None and above not in members:
                above = above.parent
            beside = below.get(above)
            if beside is not None:
                choice = _Choice(
                    beside.saved + choice.saved, beside.sets + choice.sets, beside.taken | choice.taken
                )
            below[above] = choice
    sets = below[None].sets if None in below else []
    return sorted(SharedPrefix(tuple(sorted(rows)), depth) for depth, rows in sets)


def _choose(holders: set[int], depth: int, below: _Choice | None, grouping: Grouping) -> _Choice:
    together = grouping.saved(len(holders), depth)
    if below is None:
        return _Choice(together, [(depth, holders)], holders)
    rest = holders - below.taken
    of_rest = grouping.saved(len(rest), depth)
    if together >= below.saved + of_rest:
        return _Choice(together, [(depth, holders)], holders)
    if not of_rest:
        return below
    return _Choice(below.saved + of_rest, [*below.sets, (depth, rest)], below.taken | rest)


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


class BatchPrefixes:
    """`shared_prefixes` of a batch that changes little from step to step, found anew only where it may differ.

    For sequences that end by `close`, and begin by `open` or `fork`, alone: none of them drops tokens or is cut
    while it is in the batch. So what two of them share stays as it was when the later one came, and the sets
    can change only when someone comes who shares a prefix, or one of theirs goes.
    """

    def __init__(self, ledger: TokenLedger, grouping: Grouping) -> None:
        self._ledger = ledger
        self._grouping = grouping
        self._batch: list[Sequence] = []
        self._members: set[Sequence] = set()  # of the batch
        self._grouped: set[Sequence] = set()
        self._found: list[SharedPrefix] = []

    def of(self, batch: list[Sequence]) -> list[SharedPrefix]:
        """The sets in this batch, the same list as long as they are the same. Its newest tokens have slots."""
        if self._grouping.max_members > 1 and batch != self._batch:
            members = set(batch)
            gone = self._grouped - members
            if gone or any(map(self._shares, members - self._members)):
                self._find(batch)
            self._batch, self._members = batch, members
        return self._found

    def _find(self, batch: Collection[Sequence]) -> None:
        found = shared_prefixes(self._ledger.shared, batch, self._grouping)
        if found != self._found:
            self._found = found
        rows = {row for prefix in found for row in prefix.rows}
        self._grouped = {sequence for sequence in batch if sequence.row in rows}

    def _shares(self, sequence: Sequence) -> bool:
        """Does anybody else, in the batch or not, hold as long a prefix as is worth reading together?"""
        node, depth = sequence.node, sequence.shared
        while depth >= self._grouping.min_tokens and len(node.holders) < 2:
            assert node.parent is not None
            depth -= node.length
            node = node.parent
        return depth >= self._grouping.min_tokens
