"""The forecast: the most tokens that the running requests will hold, kept up to date as requests come and go.

It is the same number as `admission.peak_tokens`, its specification, without a pass over all requests for each
question; docs/admission.md explains both. A request that decodes takes one token a step, so two numbers stay as
they are while it does: `end`, the step before which it takes its last token, and `base`, the tokens that it
alone holds less the number of the step. With the n requests that last at least as long as the i-th,

    tokens when the i-th ends = Σ_{end_j ≥ end_i} base_j + n · end_i + the tokens that several of these share

so a step changes nothing, and an arrival or an end moves one entry of an array. The few requests in prefill are
added when a question comes, at each of these ends and at their own.

A forecast counts the sequences that it has been told of, and nothing else. There is one of all sequences, and
one of the exact ones alone (docs/admission.md).

A segment with several holders counts once, until the last of them ends. A segment becomes shared when a second
sequence opens it, and its holder's own again when one holder is left; both are seen on the path of the sequence
that opens or closes. Only the holders that are in the forecast count.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from collections.abc import Set
from typing import NamedTuple

import numpy as np

from lightkv.ledger import Match, Sequence
from lightkv.ledger.prefix_tree import Segment

from .ledger import Ledger
from .prefill_budget import PrefillWindow

NONE = -1  # the last end of no sequence: before any step


class Prefill(NamedTuple):
    """A sequence whose prefill is not computed to its end, and when it will be."""

    sequence: Sequence
    window: PrefillWindow


class Candidate(NamedTuple):
    """A request that would be admitted: what it hits, when the rest of its prefill would be computed, and the
    tokens that it grows to, those that it hits included. `points`: where it would keep the tail of its prompt,
    or of a part of it, in layers that see a window only."""

    match: Match
    window: PrefillWindow
    final: int
    points: tuple[int, ...] = ()

    @property
    def held(self) -> Match:
        """The part of what it hits that a sequence holds; the rest may be evicted while it waits."""
        path, tip, num_tokens = self.match
        for i, segment in enumerate(path):
            if segment.holders:
                return Match(path[i:], tip, num_tokens)
            num_tokens -= tip
            tip = path[i + 1].length if i + 1 < len(path) else 0
        return Match((), 0, 0)


class _Growth(NamedTuple):
    """A request in prefill: the tokens that it alone holds, when it computes the rest of its prefill, and the
    tokens that it takes one by one after that."""

    held: int
    window: PrefillWindow
    decodes: int

    def end(self, step: int) -> int:
        """Returns the step before which it takes its last token, at the latest."""
        return step + self.window.last + 1 + self.decodes


class _Run(NamedTuple):
    """Shared tokens that are held beyond what the decodes hold: while sequences with an end above `after` are
    held, and up to those of the end `until`."""

    num_tokens: int
    after: int
    until: int


class Forecast:
    """Which sequences hold tokens, and until when. A sequence in it is in one of three states:

    admitted   its prefill is being computed; each question says when (`Prefill`)
    decoding   it takes one token in every step, until its end
    resting    it takes no more tokens, and holds those it has until it is dropped

    The forecast follows the ledger's `open`, `extend`, `publish` and `close`; `ledger.step` is the number of
    the next step. `lag`: 1 where a sequence's tokens are freed a step after it has taken its last one, else
    0.
    """

    def __init__(self, ledger: Ledger, lag: int = 0) -> None:
        self._ledger = ledger
        self._lag = lag
        self._end: dict[int, int] = {}  # row → its end, once it decodes or rests
        # Row → the most tokens that its sequence will have, shared ones included.
        self._final: dict[int, int] = {}
        self._sum_final = 0
        # Segment that several open sequences hold → the last end of those holders that decode or rest, where
        # known; NONE where it is not shared in this forecast.
        self._until: dict[Segment, int] = {}
        # Columns of the decoding and resting sequences, in the order of their ends:
        self._ends = array("q")
        self._bases = array("q")
        self._rows = array("q")

    def admit(self, sequence: Sequence, final: int) -> None:
        """Adds an open sequence that computes its prefill. It will have up to `final` tokens, those found in
        the cache included."""
        row = sequence.row
        self._final[row] = final
        self._sum_final += final
        for segment in sequence.node.up():
            holders = self._holders(segment)
            if len(holders) == 2:
                (other,) = holders - {row}
                self._change_own(other, -segment.length)
                self._until.pop(segment, None)

    def decode(self, sequence: Sequence, remaining: int, begin: int | None = None) -> None:
        """Notes that the sequence takes one token in each of `remaining` steps, from step `begin` on, which is
        the next one to plan unless another is given."""
        row, length = sequence.row, sequence.length
        begin = self._ledger.step if begin is None else begin
        end, shared = begin + remaining, 0
        self._remove(row)
        for segment in sequence.node.up():
            if len(self._holders(segment)) > 1:
                shared += segment.length
                known = self._until.get(segment)
                if known is not None and known == self._end.get(row):
                    del self._until[segment]
                elif known is not None and known < end:
                    self._until[segment] = end
        at = bisect_right(self._ends, end)
        self._ends.insert(at, end)
        self._bases.insert(at, length - shared - begin)
        self._rows.insert(at, row)
        self._end[row] = end
        self._final[row] = length + remaining
        self._sum_final += length + remaining

    def rest(self, sequence: Sequence, end: int) -> None:
        """Notes that the sequence takes no more tokens, as if it had taken the last one in step `end - 1`."""
        self.decode(sequence, 0, end)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence that is about to close."""
        row = sequence.row
        for segment in sequence.node.up():
            holders = self._holders(segment)
            if len(holders) == 2:
                (other,) = holders - {row}
                self._change_own(other, segment.length)
            if len(holders) == 2 or self._until.get(segment, NONE) == self._end.get(row):
                self._until.pop(segment, None)
        self._remove(row)
        self._end.pop(row, None)
        del self._final[row]

    def steps_to_end(self) -> int:
        """Returns in how many steps the first of the decoding and resting sequences will have been dropped, at
        least 1."""
        step = self._ledger.step
        first = bisect_left(self._ends, step + 1 - self._lag)
        return self._ends[first] + self._lag - step if first < len(self._ends) else 1

    def ended(self) -> set[int]:
        """Returns the rows of the decoding and resting sequences that take no token in the next step."""
        return set(self._rows[: bisect_right(self._ends, self._ledger.step)])

    @property
    def total(self) -> int:
        """The sum of the most tokens that each sequence will have. Shared tokens count with each holder."""
        return self._sum_final

    @property
    def num_sequences(self) -> int:
        """The sequences that count."""
        return len(self._final)

    def steps_to_wait(self, candidate: Candidate, limit: int, prefills: Seq[Prefill]) -> int:
        """Returns 0 if the peak stays within `limit` with the candidate. Else returns for how many steps it
        cannot fit, unless a sequence is dropped or admitted or a prefill is computed meanwhile: at least 1.

        `prefills`: the admitted sequences, with the windows that they have beside the candidate. What it hits
        may be evicted meanwhile (`steps_to_wait_without`).
        """
        ends, totals, growths = self._totals(prefills, candidate)
        growth, step = growths[-1], self._ledger.step
        excess = totals - limit
        if excess.max() <= 0:
            return 0
        return 1 if prefills else self._steps_over(ends, excess, growth, growth.end(step))

    def steps_to_wait_without(self, candidate: Candidate, evicted: Candidate, limit: int) -> int:
        """Returns for how many steps `candidate`, which does not fit, cannot fit although more and more of what
        it hits is evicted, unless a sequence is dropped or admitted: at least 1. No sequence may be in prefill.

        `evicted`: the same request if it hits only what sequences hold. It computes more, so it decodes later.
        At every step up to the candidate's end it holds no more tokens than after any other eviction.
        """
        step = self._ledger.step
        window = candidate.window
        decodes = candidate.final - candidate.match.num_tokens - window.left
        last = _Growth(0, window, decodes).end(step)
        ends, totals, growths = self._totals([], evicted)
        return self._steps_over(ends, totals - limit, growths[-1], last)

    def _steps_over(self, ends: np.ndarray, excess: np.ndarray, growth: _Growth, last: int) -> int:
        """Returns for how many steps a candidate of this `growth` exceeds the limit at one of `ends` up to
        `last`, at least 1. It holds one token less at a given step for each step that it is admitted later, as
        long as it still decodes then."""
        is_held = (excess > 0) & (ends <= last)
        if not is_held.any():
            return 1
        decoded = ends + (self._lag - 1 - self._ledger.step - growth.window.first)
        return int(np.minimum(excess, np.maximum(decoded, 0) + 1)[is_held].max())

    def peak(self, prefills: Seq[Prefill]) -> int:
        """Returns the most tokens held at any time. `prefills`: the admitted sequences."""
        ends, bases = self._column(self._ends), self._column(self._bases)
        now = int(bases.sum() + np.minimum(ends, self._ledger.step).sum())
        now += sum([one.length for one in self._ledger.shared if len(self._holders(one)) > 1])
        now += sum([self._num_own(sequence) for sequence, _ in prefills])
        _, totals, _ = self._totals(prefills, None)
        return max(now, int(totals.max(initial=0)))

    def _holders(self, segment: Segment) -> Set[int]:
        """Returns the rows of this forecast that hold the segment."""
        holders = segment.holders
        return holders if len(self._final) == self._ledger.num_open else holders & self._final.keys()

    def _num_own(self, sequence: Sequence) -> int:
        """Returns the tokens that the sequence alone holds, among those of this forecast."""
        shared = [one.length for one in sequence.node.up() if len(self._holders(one)) > 1]
        return sequence.length - sum(shared)

    def _remove(self, row: int) -> None:
        """Takes the row out of the sums."""
        self._sum_final -= self._final[row]
        if row in self._end:
            at = self._place(row)
            for column in (self._ends, self._bases, self._rows):
                del column[at]

    def _place(self, row: int) -> int:
        end = self._end[row]
        return self._rows.index(row, bisect_left(self._ends, end), bisect_right(self._ends, end))

    @staticmethod
    def _column(column: array) -> np.ndarray:
        """Returns a view of a column, which has to be gone before the column gets longer."""
        return np.frombuffer(column, np.int64) if column else np.empty(0, np.int64)

    def _change_own(self, row: int, count: int) -> None:
        """Notes that `count` more tokens are the row's alone; a negative count says that they no longer are."""
        if row in self._end:  # those of an admitted sequence are counted when a question comes
            self._bases[self._place(row)] += count

    def _last_end(self, segment: Segment) -> int:
        """Returns the last end of those holders of the segment that decode or rest."""
        known = self._until.get(segment, NONE)
        if known == NONE:  # not known, or the end of its only holder
            holders = self._holders(segment)
            known = max([self._end.get(row, NONE) for row in holders], default=NONE)
            if len(holders) > 1:
                self._until[segment] = known
        return known

    def _last_ends(self, segments: Set[Segment]) -> list[int]:
        """Returns `_last_end` of each of the segments that several open sequences hold, and NONE of those that
        are not shared in this forecast."""
        until = self._until
        if len(until) > 2 * len(segments) + 64:  # it is not told when other sequences leave a segment
            self._until = until = {one: end for one, end in until.items() if one in segments}
        for segment in segments - until.keys():
            until[segment] = self._last_end(segment) if len(self._holders(segment)) > 1 else NONE
        return [until[segment] for segment in segments]

    def _totals(
        self, prefills: Seq[Prefill], candidate: Candidate | None
    ) -> tuple[np.ndarray, np.ndarray, list[_Growth]]:
        """Returns the ends of all sequences that are held in a later step, and for each the most tokens that
        are held just before the sequences of that end are freed, which is when the total may be at its highest.
        Of several equal ends one has the total, and the others no more. Also returns the growths of
        `_prefilling`."""
        step, lag = self._ledger.step, self._lag
        growths, runs = self._prefilling(prefills, candidate)
        first = bisect_left(self._ends, step + 1 - lag)  # those before it are freed before the next step
        ends, tokens = self._column(self._ends)[first:].copy(), self._column(self._bases)[first:].copy()
        num = len(ends)
        points = np.concatenate([ends, np.array([growth.end(step) for growth in growths], np.int64)])
        shared = self._ledger.shared
        if shared:
            # A segment is added at the last of equal ends, so that all of these count it.
            until = np.array(self._last_ends(shared))
            lengths = np.array([segment.length for segment in shared])
            at = np.searchsorted(ends, until, side="right") - 1
            np.add.at(tokens, at[at >= 0], lengths[at >= 0])
        # The tokens, and the number, of the decodes that last at least until each point.
        sums = np.zeros(len(points), np.int64)
        sums[:num] = tokens[::-1].cumsum()[::-1]
        counts = np.arange(num, num - len(points), -1)
        for i, begin in enumerate(np.searchsorted(ends, points[num:], side="left"), start=num):
            sums[i], counts[i] = (sums[begin], num - begin) if begin < num else (0, 0)
        totals = counts * points
        totals += sums
        if lag:
            totals += num - np.searchsorted(ends, points, side="right")
        steps = points + (lag - 1 - step)  # the steps in which these sequences are held for the last time
        for growth in growths:
            held, window, decodes = growth
            taken = np.minimum(np.maximum(steps - window.first, 0), decodes)
            taken += held + window.left
            if window.first:
                taken -= window.left - np.minimum(steps * window.most + window.now, window.left)
            taken[points > growth.end(step)] = 0
            totals += taken
        for num_tokens, after, end in runs:
            totals += num_tokens * ((points > after) & (points <= end))
        return points, totals, growths

    def _prefilling(
        self, prefills: Seq[Prefill], candidate: Candidate | None
    ) -> tuple[list[_Growth], list[_Run]]:
        """Returns the growth of each prefill and, as the last, of the candidate, and the shared tokens that are
        held for longer because of them."""
        step = self._ledger.step
        growths, runs = [], []
        late: dict[Segment, int] = {}  # segment → the last end of its holders in prefill
        for sequence, window in prefills:
            decodes = self._final[sequence.row] - sequence.length - window.left
            growth = _Growth(self._num_own(sequence), window, decodes)
            growths.append(growth)
            end = growth.end(step)
            for segment in sequence.node.up():
                late[segment] = max(end, late.get(segment, NONE))
        for segment, end in late.items():
            if len(self._holders(segment)) > 1 and (last := self._last_end(segment)) < end:
                runs.append(_Run(segment.length, last, end))
        if candidate is not None:
            (path, tip, num_hit), window, final, _ = candidate
            decodes = final - num_hit - window.left
            end = _Growth(0, window, decodes).end(step)
            for segment in path:
                if self._holders(segment):  # these tokens are counted already, until their last holder ends
                    count = tip or segment.length
                    num_hit -= count
                    until = max(late.get(segment, NONE), self._last_end(segment))
                    if until < end:
                        runs.append(_Run(count, until, end))
                tip = 0
            growths.append(_Growth(num_hit, window, decodes))
        return growths, runs
