"""The forecast: the most tokens that the running requests will hold, kept up to date as requests come and go.

It needs no pass over all requests for a question; docs/admission.md says what the number is. A request that
decodes takes one token a step, so two numbers stay as they are while it does: `end`, the step before which it
takes its last token, and `base`, the tokens that it alone holds less the number of the step. With the n
requests that last at least as long as the i-th,

    tokens when the i-th ends = Σ_{end_j ≥ end_i} base_j + n · end_i + the tokens that several of these share

so a step changes nothing, and an arrival or an end moves one entry of an array. The few requests in prefill are
added when a question comes, at each of these ends and at their own.

Where layers see a window only, a token takes several slots. A request then has further entries for the slots
that it releases before its end. Each entry has a slope: the slots that it takes in a step (`window_slots.py`).

A forecast counts the sequences that it has been told of, and nothing else. There is one of all sequences, and
one of the guaranteed ones alone (docs/admission.md).

A segment with several holders counts once, until the last of them ends. A segment becomes shared when a second
sequence opens it, and its holder's own again when one holder is left; both are seen on the path of the sequence
that opens or closes. Only the holders that are in the forecast count.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Set
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from lightkv.ledger import Match, Sequence, TokenLedger
from lightkv.ledger.prefix_tree import Segment

from .prefill_budget import PrefillWindow
from .window_slots import Entry, Held, Pace, Rise, decoding, held_by, hit_by, prefilling

NONE = -1  # the last end of no sequence: before any step
NO_ROW = 0  # of an entry that is not the last one of its row


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


class _Growth(NamedTuple):
    """A request in prefill: the tokens that it alone holds, when it computes the rest of its prefill, and the
    tokens that it takes one by one after that. `shared`: the other tokens that it has. `rises`: what it holds
    in layers that see a window only."""

    held: int
    window: PrefillWindow
    decodes: int
    shared: int = 0
    rises: Seq[Rise] = ()

    def end(self, step: int) -> int:
        """Returns the step before which it takes its last token, at the latest."""
        return step + self.window.last + 1 + self.decodes


class _Run(NamedTuple):
    """Shared slots that are held beyond what the decodes hold: while sequences with an end above `after` are
    held, and up to those of the end `until`."""

    num_slots: int
    after: int
    until: int


class Forecast:
    """Which sequences hold tokens, and until when. A sequence in it is in one of three states:

    admitted   its prefill is being computed; each question says when (`Prefill`)
    decoding   it takes one token in every step, until its end
    resting    it takes no more tokens, and holds those it has until it is dropped

    The forecast follows the ledger's `open`, `extend`, `publish` and `close`; `ledger.step` is the number of
    the next step. `lag`: 1 where a sequence's tokens are freed a step after it has taken its last one, else 0.
    """

    def __init__(self, ledger: TokenLedger, lag: int = 0) -> None:
        self._ledger = ledger
        self._lag = lag
        self._end: dict[int, int] = {}  # row → its end, once it decodes or rests
        # Row → the most tokens that its sequence will have, shared ones included.
        self._final: dict[int, int] = {}
        self._sum_final = 0
        self._groups = ledger.groups
        self._width = ledger.groups.widths[0]  # slots of a token in the layers that see everything
        # Where layers have states, a sequence may come to share what another has computed. So each is counted
        # as if it shared nothing, and what several hold is subtracted, as where layers see a window only.
        self._has_states = ledger.states.capacity > 0
        self._is_uniform = ledger.groups.is_uniform and not self._has_states
        # Segment that several open sequences hold → the last end of those holders that decode or rest, where
        # known; NONE where it is not shared in this forecast.
        self._until: dict[Segment, int] = {}
        # Columns of what the decoding and resting sequences hold, in the order of their ends. A row has one
        # entry and, where layers see a window only, others for what it will release before: these have no row.
        self._ends = array("q")
        self._bases = array("q")
        self._slopes = array("q")
        self._rows = array("q")
        self._passing: dict[int, list[Entry]] = {}  # row → its other entries
        self._paces: dict[int, Pace] = {}  # where layers see a window only: row → when it takes tokens

    def admit(self, sequence: Sequence, final: int) -> None:
        """Adds an open sequence that computes its prefill. It will have up to `final` tokens, those found in
        the cache included."""
        row = sequence.row
        self._final[row] = final
        self._sum_final += final
        for segment in self._path(sequence):
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
        for segment in self._path(sequence):
            if len(self._holders(segment)) > 1:
                shared += segment.length
                known = self._until.get(segment)
                if known is not None and known == self._end.get(row):
                    del self._until[segment]
                elif known is not None and known < end:
                    self._until[segment] = end
        if self._is_uniform:
            self._insert(Entry(end, length - shared - begin, 1), row)
        else:
            self._paces[row] = pace = Pace(begin, length, end)
            last, *passing = decoding(self._groups.classes, sequence, pace)
            self._insert(last, row)
            for entry in passing:
                self._insert(entry, NO_ROW)
            self._passing[row] = passing
        self._end[row] = end
        self._final[row] = length + remaining
        self._sum_final += length + remaining

    def rest(self, sequence: Sequence, end: int) -> None:
        """Notes that the sequence takes no more tokens, as if it had taken the last one in step `end - 1`."""
        self.decode(sequence, 0, end)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence that is about to close."""
        row = sequence.row
        for segment in self._path(sequence):
            holders = self._holders(segment)
            if len(holders) == 2:
                (other,) = holders - {row}
                self._change_own(other, segment.length)
            if len(holders) == 2 or self._until.get(segment, NONE) == self._end.get(row):
                self._until.pop(segment, None)
        self._remove(row)
        self._end.pop(row, None)
        self._paces.pop(row, None)
        del self._final[row]

    def note_kept(self, sequence: Sequence) -> None:
        """Notes that a sequence keeps a tail that it would not have kept (`TokenLedger.keep_branch`)."""
        if pace := self._paces.get(sequence.row):
            remaining = self._final[sequence.row] - sequence.length
            self.decode(sequence, remaining, pace.end - remaining)

    def steps_to_end(self) -> int:
        """Returns in how many steps the first of the decoding and resting sequences will have been dropped, at
        least 1; 1 where layers see a window only, since slots may be released before."""
        if not self._is_uniform:
            return 1
        step = self._ledger.step
        first = bisect_left(self._ends, step + 1 - self._lag)
        return self._ends[first] + self._lag - step if first < len(self._ends) else 1

    def ended(self) -> set[int]:
        """Returns the rows of the decoding and resting sequences that take no token in the next step."""
        return set(self._rows[: bisect_right(self._ends, self._ledger.step)]) - {NO_ROW}

    @property
    def total(self) -> int:
        """The slots of the most tokens that each sequence will have, if none were shared or released before."""
        return self._sum_final * self._groups.num_groups

    @property
    def num_sequences(self) -> int:
        """The sequences that count."""
        return len(self._final)

    def steps_to_wait(self, candidate: Candidate, limit: int, prefills: Seq[Prefill]) -> int:
        """Returns 0 if the peak stays within `limit` with the candidate. Else returns for how many steps it
        cannot fit, unless a sequence is dropped or admitted or a prefill is computed meanwhile: at least 1.

        `prefills`: the admitted sequences, with the windows that they have beside the candidate; others among
        them do not count. What it hits must not be evicted meanwhile.
        """
        ends, totals, growths = self._totals(prefills, candidate)
        growth, step = growths[-1], self._ledger.step
        excess = totals - limit
        if excess.max() <= 0:
            return 0
        is_held = (excess > 0) & (ends <= growth.end(step))
        if prefills or not self._is_uniform or not is_held.any():
            return 1
        # It holds one token less at a given step for each step that it is admitted later, as long as it still
        # decodes then.
        decoded = ends + (self._lag - 1 - step - growth.window.first)
        return int(np.minimum(excess, np.maximum(decoded, 0) + 1)[is_held].max())

    def peak(self, prefills: Seq[Prefill]) -> int:
        """Returns the most tokens held at any time. `prefills`: as in `steps_to_wait`."""
        _, totals, _ = self._totals(prefills, None)
        return max(self._now(prefills), int(totals.max(initial=0)))

    def _now(self, prefills: Seq[Prefill]) -> int:
        """Returns the slots that are held now. Where layers see a window only, it is not known for a part of
        the open sequences, and 0."""
        if not self._is_uniform:
            return self._ledger.num_held if self.num_sequences == self._ledger.num_open else 0
        ends, bases = self._column(self._ends), self._column(self._bases)
        now = int(bases.sum() + np.minimum(ends, self._ledger.step).sum())
        now += sum([one.length for one in self._ledger.shared if len(self._holders(one)) > 1])
        return now + sum([self._num_own(sequence) for sequence, _ in prefills if sequence.row in self._final])

    def _path(self, sequence: Sequence) -> Iterable[Segment]:
        """Returns the segments that a sequence may share, the deepest first; none where layers see a window
        only. Each sequence is counted there as if it shared nothing, and a question subtracts what it does."""
        return sequence.node.up() if self._is_uniform else ()

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
            self._delete(self._place(row))
            for end, *line in self._passing.pop(row, ()):
                at = bisect_left(self._ends, end)
                while [self._bases[at], self._slopes[at]] != line or self._rows[at] != NO_ROW:
                    at += 1
                self._delete(at)

    def _insert(self, entry: Entry, row: int) -> None:
        at = bisect_right(self._ends, entry.end)
        self._ends.insert(at, entry.end)
        self._bases.insert(at, entry.base)
        self._slopes.insert(at, entry.slope)
        self._rows.insert(at, row)

    def _delete(self, at: int) -> None:
        for column in (self._ends, self._bases, self._slopes, self._rows):
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
        if (known := self._until.get(segment, NONE)) == NONE:  # not known, or the end of its only holder
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
        find = self._prefilling if self._is_uniform else self._prefilling_in_windows
        growths, runs, repeated = find(prefills, candidate)
        first = bisect_left(self._ends, step + 1 - lag)  # those before it are freed before the next step
        ends, bases, slopes = [
            self._column(column)[first:].copy() for column in (self._ends, self._bases, self._slopes)
        ]
        shared = self._ledger.shared
        if shared and self._is_uniform:
            # A segment is added at the last of equal ends, so that all of these count it.
            until = np.array(self._last_ends(shared))
            lengths = np.array([segment.length for segment in shared])
            at = np.searchsorted(ends, until, side="right") - 1
            np.add.at(bases, at[at >= 0], lengths[at >= 0])
        if repeated:
            columns = np.concatenate([np.array([ends, bases, slopes]), np.array(repeated).T], axis=1)
            ends, bases, slopes = columns[:, columns[0].argsort(kind="stable")]
        num = len(ends)
        drops = [growth.end(step) for growth in growths]
        drops += [end for growth in growths for rise in growth.rises for end in rise.ends]
        drops += [run.until for run in runs if not self._is_uniform]
        points = np.concatenate([ends, np.array(drops, np.int64)])
        # The base and the slope of all that is held at least until each point.
        sums, rates = np.zeros((2, num + 1), np.int64)
        sums[:num] = bases[::-1].cumsum()[::-1]
        rates[:num] = slopes[::-1].cumsum()[::-1]
        own = 0 if repeated else num  # what is below zero counts at each of equal ends; else one has it all
        at = np.concatenate([np.arange(own), np.searchsorted(ends, points[own:])])
        totals = rates[at] * points
        totals += sums[at]
        if lag:
            totals += rates[np.searchsorted(ends, points, side="right")]
        steps = points + (lag - 1 - step)  # the steps in which these sequences are held for the last time
        for growth in growths:
            held, window, decodes, others, rises = growth
            taken = np.minimum(np.maximum(steps - window.first, 0), decodes)
            taken += held + window.left
            if window.first:
                taken -= window.left - np.minimum(steps * window.most + window.now, window.left)
            slots = sum([rise.slots(points, taken + others) for rise in rises], taken * self._width)
            slots[points > growth.end(step)] = 0
            totals += slots
        for num_slots, after, end in runs:
            totals += num_slots * ((points > after) & (points <= end))
        return points, totals, growths

    def _prefilling(
        self, prefills: Seq[Prefill], candidate: Candidate | None
    ) -> tuple[list[_Growth], list[_Run], list[Entry]]:
        """Returns the growth of each prefill and, as the last, of the candidate; the shared tokens that are
        held for longer because of them; and nothing that is counted with more than one row."""
        step = self._ledger.step
        growths, runs = [], []
        late: dict[Segment, int] = {}  # segment → the last end of its holders in prefill
        for sequence, window in prefills:
            if sequence.row not in self._final:
                continue
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
        return growths, runs, []

    def _with_waits(self, window: PrefillWindow, points: Seq[int]) -> PrefillWindow:
        """Returns when a prefill is computed that may wait a step at each of these points ahead, where its
        state is kept (`TokenLedger.piece`)."""
        return window._replace(last=window.last + len(points)) if self._has_states else window

    def _prefilling_in_windows(
        self, prefills: Seq[Prefill], candidate: Candidate | None
    ) -> tuple[list[_Growth], list[_Run], list[Entry]]:
        """Returns what `_prefilling` does where layers see a window only, all that is held already as runs; and
        what is counted with more than one row, below zero."""
        step, classes, paces = self._ledger.step, self._groups.classes, self._paces.copy()
        rising: list[tuple[PrefillWindow, int, Pace, list[Held], Seq[int]]] = []
        for sequence, window in prefills:
            if sequence.row not in self._final:
                continue
            row, length = sequence.row, sequence.length
            window = self._with_waits(window, [one for one in sequence.points if one > length])
            pace = paces[row] = Pace.latest(step, window, length, self._final[row])
            rising.append((window, length, pace, held_by(sequence), sequence.points))
        if candidate is not None:
            match, window, final, _ = candidate
            window = self._with_waits(window, candidate.points)
            pace = Pace.latest(step, window, match.num_tokens, final)
            rising.append((window, match.num_tokens, pace, hit_by(classes, match), candidate.points))
        growths, runs, repeated = list[_Growth](), list[_Run](), list[Entry]()
        for window, length, pace, held, points in rising:
            rises = prefilling(classes[1:], held[1:], points, window.most, pace)
            growths.append(_Growth(0, window, pace.remaining, length, rises))
            for one, (passing, _) in zip(classes, held, strict=True):
                for run in passing:
                    # What a candidate hits is counted already, up to the last end of its holders.
                    ends = [paces[row].passes(one.lifetime, run.end) for row in run.holders if row in paces]
                    slots = one.num_groups * (run.end - run.first)
                    runs.append(_Run(slots, max(ends, default=NONE), pace.passes(one.lifetime, run.end)))
        depth = dict[Segment | None, int]()  # tokens up to the end of each segment and of those above it
        for segment in self._ledger.shared:
            for above in [*takewhile(lambda one: one not in depth, segment.up())][::-1]:
                depth[above] = depth.get(above.parent, 0) + above.length
            tails = [(cls, tail.length, tail.holders) for cls, tail in segment.tails.items() if tail.length]
            for cls, length, holders in [(0, segment.length, segment.holders), *tails]:
                one, rows = classes[cls], holders & paces.keys()
                ends = sorted([paces[row].passes(one.lifetime, depth[segment]) for row in rows])
                slots = one.num_groups * length
                repeated += [Entry(end, -slots, 0) for end in ends[:-1] if end > step - self._lag]
        return growths, runs, repeated
