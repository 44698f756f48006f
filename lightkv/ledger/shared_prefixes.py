"""Which sequences of a decode batch share a prefix that attention should read once for all of them.

A sequence is in one set at most, and a set reads one length, so where prefixes are nested there is a choice:

    3 sequences   ├──── 1000 ────┤                          as one set of 3:          saves 2 · 1000 tokens
    2 of these    ├──── 1000 ────┼────── 3000 ──────┤       as a set of these 2:      saves 1 · 4000 tokens
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
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

    def saved_by(self, prefixes: Iterable[SharedPrefix]) -> int:
        """Returns how many tokens need not be read again because of all these prefixes."""
        return sum([self.saved(len(prefix.rows), prefix.num_tokens) for prefix in prefixes])

    def is_worth_it(self, saved: int, batch_size: int) -> bool:
        """Returns whether sets that save so many tokens save enough for a batch of this size."""
        return saved >= self.min_mean * batch_size


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
    found = _sets(shared, sequences, sharing)
    return found if sharing.is_worth_it(sharing.saved_by(found), len(sequences)) else []


def _sets(
    shared: Iterable[Segment], sequences: Collection[Sequence], sharing: PrefixSharing
) -> list[SharedPrefix]:
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


@dataclass(eq=False)
class _Family:
    """The sequences of a batch that hold one segment whose prefix is long enough, the sets chosen for them, and
    the tokens that these save."""

    members: set[Sequence]
    prefixes: list[SharedPrefix]
    saved: int


class BatchPrefixes:
    """`shared_prefixes` of a batch that changes little from step to step.

    Only the families of sequences that `join` or `leave` it are computed again, by the next `find`.

    Its sequences begin by `open` or `fork` and end by `close`; none is truncated or drops tokens while it is in
    the batch. So what two of them share is settled when the later one joins.
    """

    def __init__(self, ledger: TokenLedger, sharing: PrefixSharing) -> None:
        self._ledger = ledger
        self._sharing = sharing
        self._members: set[Sequence] = set()  # the batch's sequences, as of the last `find`
        self._joined: set[Sequence] = set()  # those that have come and gone since
        self._left: set[Sequence] = set()
        self._family: dict[Sequence, _Family] = {}  # the family of each sequence that has one
        self._families: set[_Family] = set()
        self._sets: list[SharedPrefix] = []  # those of all families
        self._found: list[SharedPrefix] = []

    def join(self, sequence: Sequence) -> None:
        """Adds an open sequence to the batch."""
        self._joined.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the batch. It may have closed."""
        if sequence in self._joined:
            self._joined.remove(sequence)
        else:
            self._left.add(sequence)

    def find(self) -> list[SharedPrefix]:
        """Returns the sets in the batch: the same list object for as long as they do not change. The newest
        tokens of the batch already have slots."""
        joined, gone = self._joined, self._left
        if self._sharing.max_members < 2 or not (joined or gone):
            return self._found
        self._joined, self._left = set(), set()
        changed = {sequence for sequence in joined if self._top(sequence) is not None}
        left = {self._family.pop(sequence) for sequence in gone & self._family.keys()}
        self._families -= left
        for family in left:
            changed.update(islice(family.members - gone, 1))  # one remaining member leads to all the others
        self._members |= joined
        self._members -= gone
        if changed or left:
            self._renew(changed)
            prefixes = [prefix for family in self._families for prefix in family.prefixes]
            # Sums over the batch keep their order. No two sets have a row in common.
            self._sets = sorted(prefixes, key=lambda prefix: prefix.rows[0])
        saved = sum([family.saved for family in self._families])
        found = self._sets if self._sharing.is_worth_it(saved, len(self._members)) else []
        if found != self._found:
            self._found = found
        return self._found

    def _renew(self, changed: set[Sequence]) -> None:
        """Computes the families of these sequences again."""
        while changed:
            sequence = changed.pop()
            top = self._top(sequence)
            if top is None:
                self._family.pop(sequence, None)  # no sequence is left that shares with it
                continue
            members = self._members.intersection(self._ledger.holders(top))
            changed -= members
            self._families.difference_update(map(self._family.get, members))
            prefixes = _sets(self._segments(members), members, self._sharing)
            family = _Family(members, prefixes, self._sharing.saved_by(prefixes))
            self._families.add(family)
            self._family.update(dict.fromkeys(members, family))

    def _top(self, sequence: Sequence) -> Segment | None:
        """Returns the first segment of its path at whose end the prefix is long enough and which other
        sequences hold too, or None."""
        node, depth, top = sequence.node, sequence.shared, None
        while node.parent is not None and depth >= self._sharing.min_tokens and not sequence.dropped:
            if len(node.holders) > 1:
                top = node
            depth -= node.length
            node = node.parent
        return top

    def _segments(self, family: set[Sequence]) -> Collection[Segment]:
        """Returns the shared segments on the family's paths, and perhaps others."""
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
