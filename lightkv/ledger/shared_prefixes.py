"""Which sequences of a decode batch share a prefix that attention should read once for all of them.

A sequence is in one set at most, and a set reads one length, so where prefixes are nested there is a choice:

    3 sequences   ├──── 1000 ────┤                          as one set of 3:          saves 2 · 1000 tokens
    2 of these    ├──── 1000 ────┼────── 3000 ──────┤       as a set of these 2:      saves 1 · 4000 tokens
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from .ledger import TokenLedger
from .segments import Segment
from .sequence import Sequence


class SharedPrefix(NamedTuple):
    """The sequences in `rows`, ascending, have their first `num_tokens` entries in the same slots."""

    rows: tuple[int, ...]
    num_tokens: int


class PrefixSharing(NamedTuple):
    """Which shared prefixes are worth reading once for a set of sequences.

    max_members: sequences that one read serves; for a larger set the prefix is read several times. 1: no
    prefix is shared. min_tokens: least length of the prefix. min_saved: least number of tokens that a set need
    not read again, per layer and step. min_mean: least number of such tokens of all sets together, divided by
    the batch size, because sharing slows down the sequences outside the sets (by 5 % of 8k tokens on an H200).
    """

    max_members: int
    min_tokens: int = 512
    min_saved: int = 4096
    min_mean: int = 512

    def saved(self, members: int, num_tokens: int) -> int:
        """Returns how many tokens a set of `members` sequences need not read again if its prefix has
        `num_tokens`; 0 if that is not worth it."""
        if members < 2 or num_tokens < self.min_tokens:
            return 0
        saved = (members - -(-members // self.max_members)) * num_tokens
        return saved if saved >= self.min_saved else 0


class _Choice(NamedTuple):
    """Sets of rows, each with its prefix's length; the rows that are in any of them; the tokens they save."""

    saved: int
    sets: list[tuple[int, set[int]]]
    members: set[int]


_NOTHING = _Choice(0, [], set())


def shared_prefixes(
    shared: Iterable[Segment], sequences: Collection[Sequence], sharing: PrefixSharing
) -> list[SharedPrefix]:
    """Returns disjoint sets of `sequences` (open ones) with their shared prefixes, so that few tokens are read
    more than once.

    `shared`: the segments that several of the ledger's sequences hold (`TokenLedger.shared`). The segments are
    visited from the leaves up. At each one, either all its holders read up to its end together, or the better
    of the sets chosen below it stay and the other holders read together.

    A sequence that has dropped tokens is left out, because its entries differ from the others'; so is a
    sequence whose very last token is shared. Within its shared prefix, the query of every other sequence sees
    all tokens.
    """
    if sharing.max_members < 2:
        return []
    rows = {s.row for s in sequences if not s.dropped and s.length > s.shared}
    depths: dict[Segment, int] = {}
    members: dict[Segment, set[int]] = {}
    for segment in shared:
        if _depth(segment, depths) >= sharing.min_tokens:
            holders = segment.holders & rows
            if len(holders) > 1:
                members[segment] = holders
    below: dict[Segment, list[_Choice]] = {}
    chosen: list[_Choice] = []
    for segment in sorted(members, key=depths.__getitem__, reverse=True):  # children before their parents
        choice = _choose(members[segment], depths[segment], below.pop(segment, ()), sharing)
        if choice.saved:
            above = segment.parent
            while above is not None and above not in members:
                above = above.parent
            (chosen if above is None else below.setdefault(above, [])).append(choice)
    if sum([choice.saved for choice in chosen]) < sharing.min_mean * len(sequences):
        return []
    return sorted(
        SharedPrefix(tuple(sorted(rows)), depth) for choice in chosen for depth, rows in choice.sets
    )


def _choose(holders: set[int], depth: int, below: Collection[_Choice], sharing: PrefixSharing) -> _Choice:
    """Returns the best of three: all `holders` in one set; all the choices made below, with the other holders
    in one set; or only those choices below that save more than joining here, with the others in one set."""
    saved, kept, saved_by_rest = 0, below, 0
    better = [choice for choice in below if choice.saved > len(choice.members) * depth]
    for option in ((), better, below) if below else ((),):
        num_rest = len(holders) - sum(len(choice.members) for choice in option)
        save_rest = sharing.saved(num_rest, depth)
        total = save_rest + sum(choice.saved for choice in option)
        if total > saved:
            saved, kept, saved_by_rest = total, option, save_rest
    if not saved:
        return _NOTHING
    sets = [found for choice in kept for found in choice.sets]
    members = set().union(*(choice.members for choice in kept))
    if saved_by_rest:
        sets.append((depth, holders - members))
        members = holders
    return _Choice(saved, sets, members)


def _depth(segment: Segment, known: dict[Segment, int]) -> int:
    """Returns the tokens from the root to the end of `segment`, and adds to `known` what it computes."""
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
    """`shared_prefixes` of a batch, computed again once sequences `join` or `leave` it.

    Its sequences begin by `open` or `fork` and end by `close`; none is truncated or drops tokens while it is in
    the batch. So what two of them share is settled when the later one joins.
    """

    def __init__(self, ledger: TokenLedger, sharing: PrefixSharing) -> None:
        self._ledger = ledger
        self._sharing = sharing
        self._members: set[Sequence] = set()
        self._is_changed = False  # since the last `find`
        self._found: list[SharedPrefix] = []

    def join(self, sequence: Sequence) -> None:
        """Adds an open sequence to the batch."""
        self._members.add(sequence)
        self._is_changed = True

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the batch. It may have closed."""
        self._members.remove(sequence)
        self._is_changed = True

    def find(self) -> list[SharedPrefix]:
        """Returns the sets in the batch: the same list object for as long as they do not change. The newest
        tokens of the batch already have slots."""
        if self._is_changed:
            self._is_changed = False
            found = shared_prefixes(self._ledger.shared, self._members, self._sharing)
            if found != self._found:
                self._found = found
        return self._found
