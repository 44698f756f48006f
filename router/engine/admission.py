"""Admission: computes the most tokens that running requests will hold, and decides which request may join them.

`peak_tokens` is the specification of `forecast.Forecast`, which the scheduler uses, and docs/admission.md
explains both. (Where layers see a window only, a token takes several slots, some of which are released before
its request ends: `window_slots.py`.) An `Admission` estimates how long outputs will be, and decides whether a
waiting request fits in addition to the running ones.

A request in decode holds `held` tokens (a) alone now and one more after each of `remaining` steps (b); then it
ends and frees them all. The total rises in every step and falls only at an end, so that it peaks just before
some request ends. Where all requests decode, and are sorted by b, the longest first, the i requests with the
largest b still run when the i-th ends, and each has grown by b_i:

    peak = max_i ( Σ_{j≤i} a_j + i · b_i )

If an ended request is freed one step late (`lag`), the requests with a larger b have grown by one more token.
A request in prefill grows by the chunks that the steps' budget gives it, at most, and then by one token a step,
as early as that may begin; it is held until it ends, as late as that may be (`PrefillWindow`). A shared segment
is held until its last holder ends, so it counts once.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lightkv.errors import CheckFailed
from lightkv.ledger import Match
from lightkv.router.config import TTFT_TARGET

from .forecast import Candidate, Forecast, Prefill
from .ledger import Ledger
from .prefill_budget import PrefillWindow, StepBudget
from .request import Request


class SharedSegment(Protocol):
    """A run of tokens that several requests hold. Segments are compared by identity."""

    @property
    def length(self) -> int: ...


class Demand(NamedTuple):
    """What one request holds now and will hold later, in tokens.

    Attributes:
        held: tokens that the request alone holds now.
        remaining: tokens that it will still take. -1 says that its tokens are freed before the next step is
            planned, as those of a request that took its last one a step before the newest step in flight.
        path: the shared segments that it holds, the deepest first. A request that holds a segment also holds
            the segments after it in every path that contains it.
        decoding: whether it takes one token in every step from now on; a prefill does not.
        tip: how many tokens of the deepest segment it holds; None is all.
        window: when its prefill is computed. A prefill without a window counts in full at all times.
    """

    held: int
    remaining: int
    path: Iterable[SharedSegment]
    decoding: bool
    tip: int | None = None
    window: PrefillWindow | None = None

    def last(self, lag: int) -> int | None:
        """Returns the last step in which its tokens are held, where 0 is the next one; None: in all of them."""
        if self.decoding:
            return self.remaining - 1 + lag
        return None if self.window is None else self.window.last + self.remaining - self.window.left + lag

    def held_in(self, step: int) -> int:
        """Returns the most tokens that it alone holds once `step` has its slots, where -1 is now."""
        taken, window = self.remaining, self.window
        if self.decoding:
            taken = max(min(step + 1, taken), 0)
        elif window is not None:
            computed = min(window.now + step * window.most, window.left) if step >= 0 else 0
            taken = computed + min(max(step - window.first, 0), taken - window.left)
        return self.held + taken


def peak_tokens(demands: Sequence[Demand], lag: int = 0) -> int:
    """Returns the most tokens that these requests can hold together, now and later: exactly, where it is known
    when each prefill is computed, and else never too few.

    `lag`: 1 where a request's tokens are freed a step after it has taken its last one, 0 where they are freed
    at once. The K/V of a request's last token is never written, so `remaining` is one less than the tokens
    that are still to be generated.
    """
    holding = [(demand, list(demand.path), demand.last(lag)) for demand in demands]
    # What is held rises until something is freed.
    steps = {last for _, _, last in holding if last is not None and last >= 0} | {-1}
    peak = 0
    for step in steps:
        total = 0
        shared: dict[int, int] = {}  # id of a segment → the most tokens of it that a request holds
        for demand, path, last in holding:
            if step == -1 or last is None or last >= step:
                total += demand.held_in(step)
                for i, segment in enumerate(path):
                    length = segment.length if i or demand.tip is None else demand.tip
                    shared[id(segment)] = max(length, shared.get(id(segment), 0))
        peak = max(peak, total + sum(shared.values()))
    return peak


class Forecasts:
    """The forecast of all requests that hold tokens, and the forecast of the exact ones alone.

    Each verb is that of `Forecast`, and changes those of the two that count the request. `lag`: as there.
    """

    def __init__(self, ledger: Ledger, lag: int) -> None:
        self.all = Forecast(ledger, lag)
        self.exact = Forecast(ledger, lag)
        self._ledger = ledger
        self._lag = lag

    @property
    def num_estimated(self) -> int:
        """The estimated requests that hold tokens."""
        return self.all.num_sequences - self.exact.num_sequences

    def of(self, request: Request) -> list[Forecast]:
        """Returns the forecasts that count the request."""
        return [self.all, self.exact] if request.is_exact else [self.all]

    def admit(self, request: Request) -> None:
        for forecast in self.of(request):
            forecast.admit(request.open_sequence, request.final)

    def decode(self, request: Request, begin: int | None = None) -> None:
        for forecast in self.of(request):
            forecast.decode(request.open_sequence, request.remaining, begin)

    def rest(self, request: Request, end: int) -> None:
        for forecast in self.of(request):
            forecast.rest(request.open_sequence, end)

    def drop(self, request: Request) -> None:
        for forecast in self.of(request):
            forecast.drop(request.open_sequence)

    def check(self, prefills: Sequence[Prefill], holding: Sequence[tuple[Request, Demand]]) -> None:
        """Compares both peaks with a recount, and that of the exact requests with the capacity. Raises
        CheckFailed.

        `prefills`: of all requests. `holding`: those that hold tokens.
        """
        ledger, rows = self._ledger, {one.open_sequence.row for one, _ in holding if one.is_exact}
        for forecast in (self.all, self.exact):
            if forecast is self.exact:
                prefills = [one for one in prefills if one.sequence.row in rows]
                holding = [(one, demand) for one, demand in holding if one.is_exact]
            peak = forecast.peak(prefills)
            recount = peak_tokens([demand for _, demand in holding], self._lag)
            if ledger.groups.is_uniform and peak != recount:
                raise CheckFailed(f"a peak of {peak} tokens is forecast, {recount} by recount")
        # A request that was admitted because no other ran is not counted before where layers see a window.
        if peak > ledger.capacity and (ledger.groups.is_uniform or ledger.num_open > 1):
            raise CheckFailed(f"exact requests peak at {peak} of {ledger.capacity} slots")


class Estimates(Protocol):
    """Estimates the length of an output from the lengths of earlier ones."""

    def observe(self, length: int) -> None:
        """Notes that an output has ended with `length` tokens, by itself or at its limit."""

    def estimate(self, generated: int, max_tokens: int) -> int:
        """Returns the expected final length of an output: more than `generated`, at most `max_tokens`."""


class OutputLengths:
    """Estimates by a quantile of the recent outputs that were longer than this one is so far.

    `assumed`: where nothing is known, an output is estimated to have so many tokens, or twice as many as it has
    already; None: `max_tokens`. Nothing is known until 32 outputs have ended, and of an output that is longer
    than all of them.

    An estimate that is too short may cost a preemption, and one that is too long leaves slots idle: a lower
    `quantile` fills the pool more and preempts more.
    """

    num_recent = 1000
    num_needed = 32

    def __init__(self, quantile: float = 0.3, assumed: int | None = None) -> None:
        self.quantile = quantile
        self.assumed = assumed
        self._recent: deque[int] = deque()
        self._sorted = array("q")

    def observe(self, length: int) -> None:
        """Notes that an output has ended with `length` tokens, by itself or at its limit."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > self.num_recent:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def estimate(self, generated: int, max_tokens: int) -> int:
        """Returns the expected final length of an output: more than `generated`, at most `max_tokens`."""
        if not self.knows_longer(generated):
            return max_tokens if self.assumed is None else min(max(self.assumed, 2 * generated), max_tokens)
        shorter = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - shorter
        return min(self._sorted[shorter + int(self.quantile * longer)], max_tokens)

    def knows_longer(self, generated: int) -> bool:
        """Returns whether enough outputs have ended, one of them longer than `generated` tokens."""
        return len(self._sorted) >= self.num_needed and self._sorted[-1] > generated


class Running(NamedTuple):
    """What admission reads of the running requests: the ledger, the forecasts, the requests in prefill and in
    decode, and what the step that is being planned can still compute, in a number of slots. It has planned the
    prefills before `idx`, and a request that is admitted gets that place among them."""

    ledger: Ledger
    forecasts: Forecasts
    prefilling: Sequence[Request]
    decoding: Collection[Request]
    budget: StepBudget
    room: int
    idx: int

    def windows(self, num_left: int, start: int) -> tuple[PrefillWindow, list[Prefill]]:
        """Returns when the prefill of another request would be computed, which has `num_left` tokens to compute
        from position `start` on, and when those of the running ones would be then."""
        ahead = [r for r in self.prefilling[: self.idx] if r.num_prefill_left]
        behind = self.prefilling[self.idx :]
        lefts = [r.num_prefill_left for r in ahead] + [num_left] + [r.num_prefill_left for r in behind]
        windows = self.budget.windows(lefts, len(ahead), start)
        own = windows.pop(len(ahead))
        sequences = [request.sequence for request in [*ahead, *behind]]
        return own, list(map(Prefill, sequences, windows))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Admission:
    """Estimates the lengths of outputs, and decides whether a request fits in addition to the running ones.

    Attributes:
        estimates: estimates the lengths of outputs; with None each counts with its `max_tokens`.
        trusts_limits: whether a request that states its `max_tokens` is *exact*: counted with it, and never
            preempted. All others are *estimated* then, or also exact if there are no `estimates`. If False, all
            requests are estimated.
        reserve: the share of the pool that admission leaves free if all requests are estimated; in proportion
            less if only some of them are.
        patience: seconds after which a waiting request lets the requests of its priority that have waited
            less go first; None is the order of arrival (`waiting.py`).
    """

    estimates: Estimates | None = None
    trusts_limits: bool = True
    reserve: float = 0.0
    patience: float | None = None

    def is_exact(self, request: Request) -> bool:
        """Returns whether the request is counted with its `max_tokens` and never preempted."""
        return self.trusts_limits and (request.states_length or self.estimates is None)

    def limit(self, num_slots: int, num_requests: int) -> int:
        """Returns what `num_requests` may be counted with, of a number of slots: as much. The simulator's other
        allocations take more slots than are counted."""
        return num_slots

    def observe(self, request: Request) -> None:
        """Notes that the request's output has ended by itself or at its limit."""
        if self.estimates is not None and not request.is_exact:
            self.estimates.observe(len(request.output))

    def expected(self, request: Request, generated: int) -> int:
        """Returns the expected length of the request's output, which has `generated` tokens so far.

        If the request states no limit, each preemption at least doubles what is expected of it, so that it is
        preempted only a few times.
        """
        max_tokens = request.max_tokens
        if self.estimates is None or request.is_exact:
            return max_tokens
        expected = self.estimates.estimate(generated, max_tokens)
        if self.trusts_limits:
            least = 2 * generated if request.num_preemptions else 0
            expected = min(max(expected, least, request.params.min_tokens), max_tokens)
        return expected

    def limit_with(self, running: Running, *requests: Request) -> int:
        """Returns the most slots that the running requests and these may be counted with, less the reserve."""
        ledger = running.ledger
        num = ledger.num_open + len(requests)
        limit = self.limit(ledger.capacity, num)
        num_estimated = running.forecasts.num_estimated
        if num_estimated := num_estimated + sum([not one.is_exact for one in requests]):
            limit -= int(ledger.capacity * self.reserve * num_estimated / num)
        return limit

    def has_room(self, running: Running, *requests: Request) -> bool:
        """Returns whether the pool has room for the running requests and these, whenever each of them ends."""
        finals = sum([request.final for request in requests]) * running.ledger.groups.num_groups
        return running.forecasts.all.total + finals <= self.limit_with(running, *requests)

    def steps_to_wait(self, running: Running, request: Request) -> float:
        """Returns 0 if the pool has room for the peak of the running requests and this one. Else returns for
        how many steps it has none, unless a request ends or a prefill is computed: at least 1, or infinity."""
        ledger, forecast = running.ledger, running.forecasts.all
        limit = self.limit_with(running, request)
        num_groups = ledger.groups.num_groups
        if forecast.total + request.final * num_groups <= limit:
            return 0  # the peak is at most the sum of all
        match = ledger.match(request.prefill_ids, request.namespace)
        window, prefills = running.windows(request.num_prefill_tokens - match.num_tokens, match.num_tokens)
        if window.now * num_groups > running.room:  # as until something is freed
            return forecast.steps_to_end()
        candidate = Candidate(match, window, request.final)
        if num_groups > 1:
            candidate = candidate._replace(points=_points(ledger, request, match))
        wait = forecast.steps_to_wait(candidate, limit, prefills)
        kept = candidate.held  # the rest may be evicted while it waits
        if wait > 1 and kept.num_tokens < match.num_tokens:
            window, _ = running.windows(request.num_prefill_tokens - kept.num_tokens, kept.num_tokens)
            evicted = Candidate(kept, window, request.final)
            wait = min(wait, forecast.steps_to_wait_without(candidate, evicted, limit))
        return wait


def keep_branch(running: Running, request: Request) -> None:
    """Has the tail kept where a request turns off from a running one that still holds it, so that it hits as
    many tokens as if all layers saw everything: where the pool has room for the running requests then, too."""
    ledger, forecast = running.ledger, running.forecasts.all
    branch = ledger.find_branch(request.prefill_ids, request.namespace)
    if branch is None:
        return
    _, prefills = running.windows(0, 0)
    if forecast.peak(prefills) + branch.num_slots <= ledger.capacity:
        ledger.keep_branch(branch)
        for one in (forecast, running.forecasts.exact):
            one.note_kept(branch.sequence)


def _points(ledger: Ledger, request: Request, match: Match) -> tuple[int, ...]:
    """Returns where a request that hits `match` would keep tails for others: at the end of its prompt, and at
    the end of the tokens that it could hit if every layer had them."""
    in_tree = ledger.tree.match(request.namespace, request.prefill_ids).num_tokens
    points = sorted({in_tree, request.num_prefill_tokens})
    return tuple([point for point in points if point > match.num_tokens])


ASSUMED_LENGTH = 256  # of an answer whose length nothing is known about
_PATIENT_SHARE = 0.8  # of the target; the rest is for computing the prompt, and the prompts before it


def make_admission(name: str, ttft_target: float = TTFT_TARGET) -> Admission:
    """Returns the admission of this name (`config.ADMISSIONS`), which has seen no outputs yet.

    `ttft_target`: the seconds to a first token that "timely" aims at.
    """
    if name == "exact":
        return Admission(OutputLengths(assumed=ASSUMED_LENGTH), reserve=0.025)
    patience = ttft_target * _PATIENT_SHARE if name == "timely" else None
    return Admission(OutputLengths(), trusts_limits=False, reserve=0.03, patience=patience)
