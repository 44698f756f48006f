"""The forecast: the most tokens that the running requests will hold, kept up to date as requests come and go.

It is the same number as `admission.peak_tokens`, its specification, without a pass over all requests for each
question. A request that decodes takes one token a step, so two numbers stay as they are while it does: `end`,
the step before which it takes its last token, and `base`, the tokens that it alone holds less the number of
the step. With the n requests that last at least as long as the i-th,

    tokens when the i-th ends = Σ_{end_j ≥ end_i} base_j + n · end_i + the tokens that several of these share

so a step changes nothing, and an arrival or an end moves one entry of an array. A segment with several holders
counts once, until the last of them ends. A segment becomes shared when a second sequence opens it, and its
holder's own again when one holder is left; both are seen on the path of the sequence that opens or closes.
"""

from array import array
from bisect import bisect_left, bisect_right

import numpy as np

from lightkv.ledger import Match, Sequence
from lightkv.ledger.prefix_tree import Segment

from .ledger import Ledger

NEVER = 2**62  # the end of a prefill, which outlives all decodes


class Forecast:
    """Which sequences hold tokens, and until when. An open sequence is in one of three states:

    admitted   its prefill is being computed: it counts with all the tokens that it may come to hold
    decoding   it takes one token in every step, until its end
    resting    it takes no more tokens, and holds those it has until it is dropped (also after its end)

    The forecast follows the ledger's `open`, `extend`, `publish` and `close`; `ledger.step` is the number of
    the next step. `lag`: 1 where a sequence's tokens are freed a step after it has taken its last one, else
    0.
    """

    def __init__(self, ledger: Ledger, lag: int = 0) -> None:
        self._ledger = ledger
        self._lag = lag
        self._end: dict[int, int] = {}  # row → its end; NEVER while admitted
        # Row → the most tokens that its sequence will have, shared ones included.
        self._final: dict[int, int] = {}
        self._sum_final = 0
        self._sum_admitted = 0  # Σ of the tokens that each admitted sequence will hold alone
        self._until: dict[Segment, int] = {}  # shared segment → the last end of its holders, where known
        # Columns of the decoding and resting sequences, in the order of their ends:
        self._ends = array("q")
        self._bases = array("q")
        self._rows = array("q")

    def admit(self, sequence: Sequence, final: int) -> None:
        """Notes that a sequence was opened. It will have up to `final` tokens, those found in the cache
        included."""
        row = sequence.row
        own = final
        for segment in sequence.node.up():
            num_holders = len(segment.holders)
            if num_holders > 1:
                own -= segment.length
                self._until[segment] = NEVER
                if num_holders == 2:
                    (other,) = segment.holders - {row}
                    self._change_own(other, -segment.length)
        self._end[row] = NEVER
        self._final[row] = final
        self._sum_final += final
        self._sum_admitted += own

    def decode(self, sequence: Sequence, remaining: int) -> None:
        """Notes that the sequence takes one token in each of the next `remaining` steps."""
        row, length, step = sequence.row, sequence.length, self._ledger.step
        shared = sum(segment.length for segment in sequence.node.up() if len(segment.holders) > 1)
        self._remove(row, shared)
        end = step + remaining
        for segment in sequence.node.up():
            known = self._until.get(segment)
            if known == self._end[row]:
                del self._until[segment]
            elif known is not None and known < end:
                self._until[segment] = end
        at = bisect_right(self._ends, end)
        self._ends.insert(at, end)
        self._bases.insert(at, length - shared - step)
        self._rows.insert(at, row)
        self._end[row] = end
        self._final[row] = length + remaining
        self._sum_final += length + remaining

    def rest(self, sequence: Sequence) -> None:
        """Notes that the sequence takes no more tokens."""
        self.decode(sequence, 0)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence that is about to close."""
        row, shared = sequence.row, 0
        for segment in sequence.node.up():
            num_holders = len(segment.holders)
            if num_holders == 1:
                continue
            shared += segment.length
            if num_holders == 2:
                (other,) = segment.holders - {row}
                self._change_own(other, segment.length)
            if num_holders == 2 or self._until.get(segment) == self._end[row]:
                self._until.pop(segment, None)
        self._remove(row, shared)
        del self._end[row]
        del self._final[row]

    @property
    def total(self) -> int:
        """The sum of the most tokens that each sequence will have. Shared tokens count with each holder."""
        return self._sum_final

    def fits(self, final: int, match: Match, limit: int) -> bool:
        """Returns whether the peak stays within `limit` if a prompt that hits `match` is admitted and grows to
        `final` tokens."""
        if self._sum_final + final <= limit:
            return True  # the peak is at most the sum of all
        return self._evaluate(final, match) <= limit

    def peak(self) -> int:
        """Returns the most tokens held at any time."""
        return self._evaluate(0, None)

    def _remove(self, row: int, shared: int) -> None:
        """Takes the row out of the sums. `shared`: the tokens of it that other sequences hold, too."""
        final, end = self._final[row], self._end[row]
        self._sum_final -= final
        if end == NEVER:
            self._sum_admitted -= final - shared
            return
        at = self._place(row)
        for column in (self._ends, self._bases, self._rows):
            del column[at]

    def _place(self, row: int) -> int:
        end = self._end[row]
        return self._rows.index(row, bisect_left(self._ends, end), bisect_right(self._ends, end))

    def _change_own(self, row: int, count: int) -> None:
        """Notes that `count` more tokens are the row's alone; a negative count says that they no longer are."""
        if self._end[row] == NEVER:
            self._sum_admitted += count
        else:
            self._bases[self._place(row)] += count

    def _last_end(self, segment: Segment) -> int:
        """Returns the last end of the segment's holders."""
        known = self._until.get(segment)
        if known is None:
            known = max(map(self._end.__getitem__, segment.holders))
            if len(segment.holders) > 1:
                self._until[segment] = known
        return known

    def _evaluate(self, final: int, match: Match | None) -> int:
        constant = self._sum_admitted + final
        shared = self._ledger.shared
        counts = [segment.length for segment in shared]
        for segment in shared - self._until.keys():
            self._last_end(segment)
        until = [self._until[segment] for segment in shared]
        if match is not None:  # the tokens that the prompt hits count with it, so with no other holder
            tip = match.tip
            for segment in match.path:
                if segment.holders:
                    until.append(self._last_end(segment))
                    counts.append(-(tip or segment.length))
                tip = 0
        num = len(self._ends)
        if not num:
            return constant + sum(counts)

        ends = np.frombuffer(self._ends, np.int64)
        tokens = np.array(self._bases, np.int64)
        num_resting = bisect_right(self._ends, self._ledger.step)
        tokens[:num_resting] += ends[:num_resting]
        if counts:
            # A segment is added at the last of equal ends, so that all of these count it. One that ends at
            # NEVER is added at the very last entry, which is part of every sum.
            np.add.at(tokens, np.searchsorted(ends, np.array(until), side="right") - 1, np.array(counts))
        sums = tokens[::-1].cumsum()[::-1]
        num_decoding = num - num_resting
        peak = 0
        if num_resting:  # the total now, before they are freed
            peak = int(sums[0]) + num_decoding * (self._ledger.step + self._lag)
        if num_decoding:
            ends, sums = ends[num_resting:], sums[num_resting:]
            totals = sums + ends * np.arange(num_decoding, 0, -1)
            if self._lag:
                last = np.append(np.flatnonzero(ends[1:] != ends[:-1]), num_decoding - 1)  # of equal ends
                num_later = np.repeat(num_decoding - 1 - last, np.diff(last, prepend=-1))
                totals += self._lag * num_later
            peak = max(peak, int(totals.max()))
        return constant + peak
