"""How many tokens the running requests will hold at most: the arithmetic of admission.

Pure functions of integers, and what is known of output lengths; nothing of queues, steps or devices.
`peak_tokens` is the specification of `forecast.Forecast`, which the scheduler asks.

A request that decodes holds `held` tokens of its own now and takes one more a step for `remaining` steps;
then it ends and lets go of all. The total rises by one a request a step and falls only at an end, so it
peaks just before some request ends. With the requests sorted by `remaining` (b), the longest first, when
the i-th ends the i with the largest b are still there, each grown by b_i:

    peak = max_i ( Σ_{j≤i} a_j + i · b_i )

Where what ends is released one step late (`lag`), those with a larger b have taken one token more by then:

    peak = max_i ( Σ_{j≤i} a_j + i · b_i + |{j : b_j > b_i}| )

A request still in prefill starts to grow at a step nobody knows yet, which makes the formula too low; it
counts in full, held plus remaining, at every point. A shared segment is held until its last holder ends, so
it counts once, with its longest-lived holder (a prefill outlives all).
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

ADMISSIONS = ("exact", "quantile")


class SharedSegment(Protocol):
    """What admission needs to know of a shared run of tokens; told apart by identity."""

    @property
    def length(self) -> int: ...


class Demand(NamedTuple):
    """What one request holds and will take, in tokens.

    `held`: of its own, now. `remaining`: still to come. `path`: the shared segments it holds, the deepest
    first; who holds a segment holds the ones after it in every path that names it. `decoding`: it takes one
    token in every step from now on; a prefill does not. `tip`: how many tokens of the deepest segment it holds;
    None is all.
    """

    held: int
    remaining: int
    path: Iterable[SharedSegment]
    decoding: bool
    tip: int | None = None


def peak_tokens(demands: Sequence[Demand], lag: int = 0) -> int:
    """The most tokens that these requests can hold together at any time. Never too low.

    `lag`: 1 where a request's tokens are released a step after it has taken its last; 0 at once. Exact where
    all decode. The last sampled token of a request is never written, so `remaining` is the
    tokens still to be generated less one.
    """
    counted: dict[int, int] = {}  # id of a segment → tokens of it that a longer-lived holder has counted

    def shared(demand: Demand) -> int:
        total, tip = 0, demand.tip
        for segment in demand.path:
            length = segment.length if tip is None else tip
            before = counted.get(id(segment))
            counted[id(segment)] = max(length, before or 0)
            total += max(length - (before or 0), 0)
            if before is not None:
                break  # everything above it is counted, too
            tip = None
        return total

    constant = 0
    decoding = []
    for demand in demands:
        if demand.decoding:
            decoding.append(demand)
        else:
            constant += demand.held + demand.remaining + shared(demand)
    decoding.sort(key=_by_remaining, reverse=True)
    peak = held = outliving = 0
    for count, demand in enumerate(decoding, start=1):
        held += demand.held + shared(demand)
        if count > 1 and demand.remaining < decoding[count - 2].remaining:
            outliving = count - 1
        peak = max(peak, held + count * demand.remaining + lag * outliving)
    return constant + peak


def _by_remaining(demand: Demand) -> int:
    return demand.remaining


class OutputLengths:
    """How long an output will be, by the outputs that ended of late: a quantile of those that were longer.

    An estimate that proves too short may cost a pause, one that is too long leaves slots idle: a lower
    `quantile` fills the pool more, and pauses more. `reserve`: share of the pool that admission leaves alone.
    """

    quantile = 0.3
    reserve = 0.03
    num_recent = 1000
    num_needed = 32  # fewer say nothing: as long as it may be, until then

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted = array("q")

    def observe(self, length: int) -> None:
        """An output of `length` tokens has ended, by itself or at its limit."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self.num_recent:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def estimate(self, generated: int, max_tokens: int) -> int:
        """Tokens of an output that has `generated` so far, and more to come: above that, up to `max_tokens`."""
        shorter = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - shorter
        if len(self._sorted) < self.num_needed or not longer:
            return max_tokens
        return min(self._sorted[shorter + int(self.quantile * longer)], max_tokens)


def output_lengths(admission: str) -> OutputLengths | None:
    """The estimates that an admission of this name goes by; None for "exact": each as long as it may be."""
    return None if admission == "exact" else OutputLengths()
