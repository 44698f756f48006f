"""How many tokens the running requests will hold at most: the arithmetic of admission.

Pure functions of integers, and what is known of output lengths; nothing of queues, steps or devices.
`peak_tokens` is the specification of `forecast.Forecast`, which the scheduler asks. An `Admission` is a way to
estimate what is still to come, and to count it.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import NamedTuple, Protocol

from lightkv.router.config import TTFT_TARGET


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


class Estimates(Protocol):
    """What is known of output lengths, and so expected of an output that goes on."""

    def observe(self, length: int) -> None:
        """An output of `length` tokens has ended, by itself or at its limit."""

    def estimate(self, generated: int, max_tokens: int) -> int:
        """Tokens of an output that has `generated` so far, and more to come: above that, up to `max_tokens`."""


class OutputLengths:
    """Of the outputs that ended of late, those that were longer: an estimate is a quantile of them.

    An estimate that proves too short may cost a pause, one that is too long leaves slots idle: a lower
    `quantile` fills the pool more, and pauses more. None draws one at random for each estimate: a sample of
    the length, given what was generated. The Past-Future scheduler (ASPLOS '25) draws all of them anew for
    every admission; a sample that stands until it is outlived is as good, for as long as the output has not
    passed it, it is distributed like a new one.
    """

    num_recent = 1000
    num_needed = 32  # fewer say nothing: as long as it may be, until then

    def __init__(self, quantile: float | None = 0.3, seed: int = 0) -> None:
        self.quantile = quantile
        self._rng = Random(seed)
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
        quantile = self._rng.random() if self.quantile is None else self.quantile
        return min(self._sorted[shorter + int(quantile * longer)], max_tokens)


class AverageLength:
    """The mean of the outputs that ended of late; of one that has outlived it, a tenth more than it has. So
    LightLLM counts, with an exponential mean."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sum = 0

    def observe(self, length: int) -> None:
        """An output of `length` tokens has ended, by itself or at its limit."""
        self._recent.append(length)
        self._sum += length
        if len(self._recent) > OutputLengths.num_recent:
            self._sum -= self._recent.popleft()

    def estimate(self, generated: int, max_tokens: int) -> int:
        """Tokens of an output that has `generated` so far, and more to come: above that, up to `max_tokens`."""
        if len(self._recent) < OutputLengths.num_needed:
            return max_tokens
        mean = self._sum // len(self._recent)
        return min(max(mean, generated * 11 // 10, generated + 1), max_tokens)


class Counting(Enum):
    """Of running requests, and one that would join them, what has to fit."""

    PEAK = "peak"  # the most that they hold together at any time
    SUM = "sum"  # the most that each ever holds, all added up
    CONTEXT = "context"  # what they hold once their prompts are computed: nothing of what they generate


@dataclass(frozen=True)
class Admission:
    """By what a request is admitted: how long its output is expected to be, and what is counted of that.

    `estimates`: None expects all that a request may have. `reserve`: share of the pool that admission leaves
    alone. `slack`: tokens a request that an allocator may take beyond those counted: 0, or, where memory goes
    by pages, a page less one. `patience`: seconds after which one that waits lets those of its priority go
    first that have waited less; None: first come, first served, however late.
    """

    estimates: Estimates | None = None
    counting: Counting = Counting.PEAK
    reserve: float = 0.0
    slack: int = 0
    patience: float | None = None

    @property
    def may_run_short(self) -> bool:
        """Can what was admitted outgrow the pool, so that some of it has to be paused?"""
        return self.estimates is not None or self.counting is Counting.CONTEXT

    def limit(self, capacity: int, num_requests: int) -> int:
        """Tokens that `num_requests` may be counted with."""
        return capacity - int(capacity * self.reserve) - self.slack * num_requests

    def expected(self, generated: int, max_tokens: int) -> int:
        """Tokens of an output that has `generated` so far."""
        return self.estimates.estimate(generated, max_tokens) if self.estimates else max_tokens


_PATIENT_SHARE = 0.8  # of the target; the rest is for its prompt, and the prompts before it


def make_admission(name: str, seed: int = 0, slack: int = 0, ttft_target: float = TTFT_TARGET) -> Admission:
    """The admission of this name, which knows nothing of outputs yet. `seed`: of what it draws, if it does.
    `ttft_target`: seconds until a first token that "timely" works for."""
    made = replace(_ADMISSIONS[name](seed), slack=slack)
    return replace(made, patience=ttft_target * _PATIENT_SHARE) if name == "timely" else made


_ADMISSIONS: dict[str, Callable[[int], Admission]] = {
    "exact": lambda seed: Admission(),
    "quantile": lambda seed: Admission(OutputLengths(), reserve=0.03),
    "timely": lambda seed: Admission(OutputLengths(), reserve=0.03),
    "past-future": lambda seed: Admission(OutputLengths(quantile=None, seed=seed)),
    "moving-average": lambda seed: Admission(AverageLength()),
    "watermark": lambda seed: Admission(counting=Counting.CONTEXT, reserve=0.01),
    "sum": lambda seed: Admission(counting=Counting.SUM),
    # All it takes to know the truth is that max_tokens is it; the simulator sees to that.
    "oracle": lambda seed: Admission(),
}
