"""The forecast: the most tokens that what runs will hold, kept up as that changes.

The same number as `admission.peak_tokens`, which is its specification, without going through every request
again for each question. A request that decodes takes one token a step, so two numbers of it stay as they are
while it does: `end`, the step before which it takes its last, and `base`, its length less the number of the
step. With the n requests that last at least as long as the i-th,

    tokens when the i-th ends = Σ_{end_j ≥ end_i} base_j + n · end_i

so a step changes nothing, and an arrival or an end moves one entry of an array. Each request counts here with
its whole length. What several hold is thus counted several times, and at the time of asking is taken off
again: from each of its holders but the longest-lived.

Knows a ledger's sequences, steps and segments; knows no queue, and decides nothing.
"""

from array import array
from bisect import bisect_left, bisect_right

import numpy as np

from lightkv.ledger import Match, Sequence, TokenLedger

NEVER = 2**62  # the end of a prefill: it outlives whatever decodes


class Forecast:
    """Who holds tokens, and until when. An open sequence is in one of three states:

    admitted   its prompt is being computed: counts with all that it may come to hold
    decoding   takes one token in every step, until its end
    resting    takes none any more, and is held until it is dropped; so is a decoding one after its end

    `ledger.step` is the number of the next step. `lag`: 1 where tokens are released a step after the last was
    taken; 0 at once.
    """

    def __init__(self, ledger: TokenLedger, lag: int = 0) -> None:
        self._ledger = ledger
        self._lag = lag
        self._end: dict[int, int] = {}  # row → its end; NEVER while admitted
        self._final: dict[int, int] = {}  # row → the most tokens that it will have
        self._sum_admitted = 0  # Σ final of the admitted
        self._sum_final = 0
        # Columns of the decoding and the resting, those that end soonest first:
        self._ends = array("q")
        self._bases = array("q")
        self._rows = array("q")
        # The peak in step `_step`, and what it is once the last to be asked about is admitted; None: unknown.
        self._step = 0
        self._peak: int | None = None
        self._peak_then: int | None = None

    def admit(self, sequence: Sequence, final: int) -> None:
        """Its prefill begins; it will have up to `final` tokens, those that it found included. `fits` was the
        question before."""
        self._end[sequence.row] = NEVER
        self._final[sequence.row] = final
        self._sum_admitted += final
        self._sum_final += final
        self._peak, self._peak_then = self._peak_then, None

    def decode(self, sequence: Sequence, remaining: int) -> None:
        """From the next step on it takes a token a step, `remaining` of them."""
        row, length, step = sequence.row, sequence.length, self._ledger.step
        self.drop(row)
        end = self._end[row] = step + remaining
        at = bisect_right(self._ends, end)
        self._ends.insert(at, end)
        self._bases.insert(at, length - step)
        self._rows.insert(at, row)
        self._final[row] = length + remaining
        self._sum_final += length + remaining

    def rest(self, sequence: Sequence) -> None:
        """It takes none any more."""
        self.decode(sequence, 0)

    def drop(self, row: int) -> None:
        """It has closed, or is about to."""
        self._peak = self._peak_then = None
        final, end = self._final.pop(row), self._end.pop(row)
        self._sum_final -= final
        if end == NEVER:
            self._sum_admitted -= final
            return
        at = self._rows.index(row, bisect_left(self._ends, end), bisect_right(self._ends, end))
        for column in (self._ends, self._bases, self._rows):
            del column[at]

    def fits(self, final: int, match: Match, limit: int) -> bool:
        """Would all stay within `limit` at all times if a prompt that hits `match` were admitted, to grow to
        `final` tokens?"""
        self._peak_then = None
        if self._sum_final + final <= limit:
            return True  # even if nothing were shared, and all ended together
        if (
            self._step == self._ledger.step
            and self._peak is not None
            and self._peak + final - match.num_tokens > limit
        ):
            return False  # even if all that it hits were held for as long
        self._step, self._peak_then = self._ledger.step, self._evaluate(final, match)
        return self._peak_then <= limit

    def peak(self) -> int:
        """The most tokens held at any time."""
        if self._peak is None or self._step != self._ledger.step:
            self._step, self._peak = self._ledger.step, self._evaluate(0, None)
        return self._peak

    def _evaluate(self, final: int, match: Match | None) -> int:
        constant = self._sum_admitted + final
        # Tokens counted by a holder, and by a longer-lived one, too: how many, until when.
        twice: list[int] = []
        until: list[int] = []
        end_of = self._end.__getitem__
        for segment in self._ledger.shared:
            begin = len(until)
            until += map(end_of, segment.holders)
            twice += [segment.length] * len(segment.holders)
            until.append(max(until[begin:]))
            twice.append(-segment.length)
        if match is not None:
            count = match.tip
            for segment in match.path:
                if segment.holders:
                    until.append(max(map(end_of, segment.holders)))
                    twice.append(count or segment.length)
                count = 0
        num = len(self._ends)
        if not num:
            return constant - sum(twice)

        ends = np.frombuffer(self._ends, np.int64)
        tokens = np.array(self._bases, np.int64)
        num_resting = bisect_right(self._ends, self._ledger.step)
        tokens[:num_resting] += ends[:num_resting]
        if twice:
            # At the last of equal ends: then each of these counts it, and the first of them, the largest, is
            # right. NEVER falls on the very last, which is part of every sum.
            np.subtract.at(tokens, np.searchsorted(ends, np.array(until), side="right") - 1, np.array(twice))
        sums = tokens[::-1].cumsum()[::-1]
        num_decoding = num - num_resting
        peak = 0
        if num_resting:  # now, when they are about to go
            peak = int(sums[0]) + num_decoding * (self._ledger.step + self._lag)
        if num_decoding:
            ends, sums = ends[num_resting:], sums[num_resting:]
            totals = sums + ends * np.arange(num_decoding, 0, -1)
            if self._lag:
                totals += self._lag * (num_decoding - np.searchsorted(ends, ends, side="right"))
            peak = max(peak, int(totals.max()))
        return constant + peak
