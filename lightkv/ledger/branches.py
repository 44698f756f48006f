"""Prompts that diverge from a running sequence, which still has what classes see there, but keeps it for no
other."""

from typing import NamedTuple

from .prefix_tree import Match
from .segments import Segment, last_reachable, ranges_of
from .sequence import Sequence
from .state import LedgerState


class Branch(NamedTuple):
    """Where a prompt diverges, after `point` tokens, from a sequence that still has what `classes` see there.
    `num_slots`: how many more than else it may hold for a while if that is kept."""

    sequence: Sequence
    point: int
    classes: tuple[int, ...]
    num_slots: int


class Branches:
    """Finds and keeps the branches of one ledger."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        # What was sought last. The sequences that have passed it (`has_passed`) are not asked again.
        self._sought: tuple[Segment | None, int] = (None, 0)

    def find(self, match: Match) -> Branch | None:
        """Returns where a prompt diverges, of which the tree has this, from a sequence that still has, as its
        own, what classes see there for which no tail is there."""
        state, path, point = self._state, match.path, match.num_tokens
        needs: dict[int, tuple[int, tuple[int, int]]] = {}  # by class: what is seen, and the last range there
        for of in state.classes:
            ranges = ranges_of(path[::-1], of.cls)
            if last_reachable(of.rule, ranges, point) < point:
                needs[of.cls] = of.rule.first_seen(point), ranges[-1] if ranges else (0, 0)
        if not needs:
            return None
        if self._sought != (path[0], point):  # a prompt that waits is looked for in every step
            self._sought = path[0], point
        for sequence in map(state.sequences.__getitem__, path[0].holders):
            if sequence.has_passed is self._sought:
                continue
            if min([hold.own for hold in sequence.holds]) >= point:
                sequence.has_passed = self._sought
            holds = [hold for hold in sequence.holds if hold.of.cls in needs]
            if sequence.published >= point and all(hold.has(point, *needs[hold.of.cls]) for hold in holds):
                more = sum([(point - hold.own) * hold.of.width for hold in holds])
                return Branch(sequence, point, tuple(needs), more)
        return None

    def keep(self, branch: Branch) -> None:
        """Makes tails of what is seen where a prompt diverges.

        The step that is being planned may compute and read any of the sequence's own entries. So those before
        become tails, too, which it leaves when it grows, and which are the first to be evicted then."""
        state, (sequence, point, classes, _) = self._state, branch
        state.split_path(sequence, point)
        for hold in [hold for hold in sequence.holds if hold.of.cls in classes]:
            own, first = hold.own, hold.of.rule.first_kept(point)
            if own < first:
                state.split_path(sequence, first)
            hold.share(point, (sequence.node, sequence.shared), sequence.published_in)
            for segment, end in sequence.node.ends_up(sequence.shared):
                if own < end <= first:
                    state.idle.supersede(segment.tails[hold.of.cls])
