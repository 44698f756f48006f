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

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lightkv.errors import CheckFailed
from lightkv.ledger import Match
from lightkv.router.config import TTFT_TARGET

from .estimates import ASSUMED_LENGTH, Estimates, LimitShares, OutputLengths
from .forecast import Candidate, Forecast, Prefill
from .ledger import Ledger
from .prefill_budget import PrefillWindow, StepBudget
from .request import Request
from .step import WaitsFor


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
    """The forecast of all requests that hold tokens, as far as they are expected to grow, and the forecast of
    the guaranteed ones alone, up to their limits. The others become guaranteed in their order.

    `lag`: as in `Forecast`.
    """

    def __init__(self, ledger: Ledger, lag: int) -> None:
        self.all = Forecast(ledger, lag)
        self.guaranteed = Forecast(ledger, lag)
        self._ledger = ledger
        self._lag = lag
        self._estimated: set[int] = set()  # the rows that count in `all` with less than their limit
        self._candidates: list[Request] = []  # provisional ones that can be guaranteed, the eldest first
        self._turn = 0  # the next of them that is asked
        self._interrupted: dict[str, Request] = {}  # preempted ones, running or waiting, without a guarantee
        # A request of as many tokens does not fit beside the guaranteed ones until one of them ends.
        self.too_long: float = math.inf

    @property
    def num_estimated(self) -> int:
        """The requests that hold tokens and count with less than their limit."""
        return len(self._estimated)

    @property
    def num_provisional(self) -> int:
        """The requests that hold tokens and are not guaranteed."""
        return self.all.num_sequences - self.guaranteed.num_sequences

    def may_fit(self, request: Request) -> bool:
        """Returns whether it is worth asking if the guaranteed requests fit with this one: it may become
        guaranteed before all that were preempted and are not, and none as short has been refused."""
        return request.can_be_guaranteed and request.longest < self.too_long and self.is_next(request)

    def is_next(self, request: Request) -> bool:
        """Returns whether no older request was preempted and is not guaranteed."""
        return all(request.seniority <= one.seniority for one in self._interrupted.values())

    def admit(self, request: Request) -> None:
        """Counts a request whose sequence was opened, as a guaranteed one if it is."""
        self._count(request)
        self.all.admit(request.open_sequence, request.final)
        if request.is_guaranteed:
            self._interrupted.pop(request.id, None)
            self.guaranteed.admit(request.open_sequence, request.longest)
        elif request.can_be_guaranteed:
            insort(self._candidates, request, key=lambda one: one.seniority)

    def decode(self, request: Request, begin: int) -> None:
        """Notes that a request takes one token in each step from `begin` on."""
        sequence = request.open_sequence
        self.all.decode(sequence, request.remaining, begin)
        if request.is_guaranteed:
            self.guaranteed.decode(sequence, request.longest - sequence.length, begin)

    def expect(self, request: Request) -> None:
        """Notes that a decoding request is expected to have another length."""
        self._count(request)
        self.all.decode(request.open_sequence, request.remaining)

    def rest(self, request: Request, end: int) -> None:
        """Notes that a request takes no more tokens, as if it had taken the last one in step `end - 1`."""
        self.all.rest(request.open_sequence, end)
        if request.is_guaranteed:
            self.guaranteed.rest(request.open_sequence, end)
            self.too_long = math.inf

    def drop(self, request: Request) -> None:
        """Forgets a request whose sequence is about to close."""
        self._estimated.discard(request.open_sequence.row)
        self.all.drop(request.open_sequence)
        if request.is_guaranteed:
            self.guaranteed.drop(request.open_sequence)
            self.too_long = math.inf

    def leave(self, request: Request) -> None:
        """Notes that a request runs no more: it has ended, or is preempted next."""
        self._interrupted.pop(request.id, None)
        if request.can_be_guaranteed and not request.is_guaranteed and request.sequence is not None:
            self._candidates.remove(request)

    def interrupt(self, request: Request) -> None:
        """Notes that a request was preempted: those behind it are not guaranteed before it is."""
        if request.can_be_guaranteed:
            self._interrupted[request.id] = request

    def guarantee(self, prefills: Sequence[Prefill], limit: Callable[[int, int], int]) -> int:
        """Guarantees requests that fit: the eldest that was preempted, which all behind it wait for, and up to
        four of those before it. A question takes long, so they have turns, which go on in the next step after
        the first that does not fit. Returns how many were guaranteed. `prefills`: before the next step.
        """
        candidates = self._candidates
        num, end = 0, len(candidates)
        if self._interrupted:
            first = min(self._interrupted.values(), key=lambda one: one.seniority)
            if first.sequence is not None and first.longest < self.too_long:
                num += self._ask(first, prefills, limit)
            end = bisect_left(candidates, first.seniority, key=lambda one: one.seniority)
        for _ in range(min(end, 4)):
            self._turn = self._turn % end if end else 0
            if self._turn >= end or candidates[self._turn].longest >= self.too_long:
                self._turn += 1
            elif self._ask(candidates[self._turn], prefills, limit):
                num, end = num + 1, end - 1
            else:
                self._turn += 1
                break
        return num

    def _ask(self, request: Request, prefills: Sequence[Prefill], limit: Callable[[int, int], int]) -> bool:
        """Guarantees a candidate if the guaranteed requests fit with it. Returns whether they do. If not, none
        as long is asked again until a guaranteed one has ended."""
        sure, sequence = self.guaranteed, request.open_sequence
        most = limit(self._ledger.capacity, sure.num_sequences + 1)
        sure.admit(sequence, request.longest)
        if request.num_prefill_left <= 0:
            sure.decode(sequence, request.longest - sequence.length)
        if sure.total > most and sure.peak(prefills) > most:
            sure.drop(sequence)
            self.too_long = request.longest
            return False
        request.is_guaranteed = True
        self._candidates.remove(request)
        self._interrupted.pop(request.id, None)
        return True

    def check(self, prefills: Sequence[Prefill], holding: list[Request], gone: Collection[Request]) -> None:
        """Compares both peaks with a recount, that of the guaranteed requests with the capacity, and recounts
        which ones wait for a guarantee. Raises CheckFailed. `holding`: the requests that hold tokens. `gone`:
        those of them that are in no newer step than the one before the newest step in flight.
        """
        ledger = self._ledger
        demands = [_demand(one, one.final, prefills, gone) for one in holding]
        guaranteed = [_demand(one, one.longest, prefills, gone) for one in holding if one.is_guaranteed]
        for forecast, counted in ((self.all, demands), (self.guaranteed, guaranteed)):
            peak, recount = forecast.peak(prefills), peak_tokens(counted, self._lag)
            if ledger.groups.is_uniform and peak != recount:
                raise CheckFailed(f"a peak of {peak} tokens is forecast, {recount} by recount")
        # A request that was admitted because no other ran is not counted before where layers see a window.
        if peak > ledger.capacity and (ledger.groups.is_uniform or ledger.num_open > 1):
            raise CheckFailed(f"guaranteed requests peak at {peak} of {ledger.capacity} slots")
        open_ones = [one for one in holding if one.can_be_guaranteed and not one.finish_reason]
        waiting = sorted([one for one in open_ones if not one.is_guaranteed], key=lambda one: one.seniority)
        if waiting != self._candidates:
            raise CheckFailed(f"{len(self._candidates)} wait for a guarantee, {len(waiting)} by recount")
        if any(one.is_guaranteed for one in self._interrupted.values()):
            raise CheckFailed("a guaranteed request keeps others from a guarantee")

    def _count(self, request: Request) -> None:
        """Notes whether the request counts with less than its limit."""
        if request.expected < request.max_tokens:
            self._estimated.add(request.open_sequence.row)
        else:
            self._estimated.discard(request.open_sequence.row)


def _demand(request: Request, final: int, prefills: Sequence[Prefill], gone: Collection[Request]) -> Demand:
    """Returns the demand of a request that grows to `final` tokens; the others as in `Forecasts.check`."""
    sequence = request.open_sequence
    window = next((window for other, window in prefills if other is sequence), None)
    remaining = 0 if request.finish_reason is not None else final - sequence.length
    if not remaining and request in gone:
        remaining = -1
    return Demand(sequence.num_private, remaining, list(sequence.node.up()), window is None, window=window)


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

    @property
    def delayed(self) -> int:
        """The prefills that a request would be admitted in front of, up to the last guaranteed one."""
        behind = self.prefilling[self.idx :]
        return max([i for i, request in enumerate(behind, start=1) if request.is_guaranteed], default=0)


MOST_INTERRUPTIONS = 2  # of a request that can be guaranteed


class Decision(NamedTuple):
    """What is decided about a waiting request: for how many steps it has to wait, at least 1, unless a request
    ends or a prefill is computed; 0 if it is admitted now. `is_guaranteed`: as what it is admitted."""

    wait: float
    is_guaranteed: bool = False


@dataclass(frozen=True)
class Admission:
    """Estimates the lengths of outputs, and decides whether a request fits in addition to the running ones.

    Attributes:
        estimates: estimates the lengths of outputs without a limit; with None each counts with `max_tokens`.
        shares: estimates those of outputs with a limit, which are guaranteed as soon as they can be. With None
            each counts with its limit, so that it is guaranteed when it is admitted, and waits until then.
        guarantees: whether requests with a limit become guaranteed, and without `estimates` the others too. If
            False, `estimates` estimates all of them.
        reserve: the share of the pool that admission leaves free if all requests are estimated; in proportion
            less if only some of them are.
        patience: seconds after which a waiting request lets the requests of its priority that have waited
            less go first; None is the order of arrival (`waiting.py`).
    """

    estimates: Estimates | None = None
    shares: LimitShares | None = None
    guarantees: bool = True
    reserve: float = 0.0
    patience: float | None = None

    def can_guarantee(self, request: Request) -> bool:
        """Returns whether the request becomes guaranteed, at once or later."""
        return self.guarantees and (request.states_length or self.estimates is None)

    def limit(self, num_slots: int, num_requests: int) -> int:
        """Returns what `num_requests` may be counted with, of a number of slots: as much. The simulator's other
        allocations take more slots than are counted."""
        return num_slots

    def observe(self, request: Request) -> None:
        """Notes that the request's output has ended by itself or at its limit."""
        if self.shares is not None and request.states_length:
            self.shares.observe(request)
        elif self.estimates is not None and not request.can_be_guaranteed:
            self.estimates.observe(len(request.output))

    def expected(self, request: Request, generated: int) -> int:
        """Returns the expected length of the request's output, which has `generated` tokens so far.

        Each preemption at least doubles what is expected of a request, so that it is preempted only a few
        times.
        """
        max_tokens = request.max_tokens
        if self.shares is not None and request.states_length:
            expected = self.shares.estimate(request, generated)
        elif self.estimates is None or request.can_be_guaranteed:
            return max_tokens
        else:
            expected = self.estimates.estimate(generated, max_tokens)
        if self.guarantees or self.shares is not None:
            least = 2 * generated if request.num_preemptions else 0
            expected = min(max(expected, least, request.params.min_tokens), max_tokens)
        return expected

    def limit_with(self, running: Running, *requests: Request) -> int:
        """Returns the most slots that the running requests and these may be counted with, less the reserve."""
        ledger = running.ledger
        num = ledger.num_open + len(requests)
        limit = self.limit(ledger.capacity, num)
        num_estimated = running.forecasts.num_estimated
        if num_estimated := num_estimated + sum([one.expected < one.max_tokens for one in requests]):
            limit -= int(ledger.capacity * self.reserve * num_estimated / num)
        return limit

    def has_room(self, running: Running, *requests: Request) -> bool:
        """Returns whether the pool has room for the running requests and these, whenever each of them ends."""
        finals = sum([request.final for request in requests]) * running.ledger.groups.num_groups
        return running.forecasts.all.total + finals <= self.limit_with(running, *requests)

    def decide(self, running: Running, request: Request, is_head: bool) -> Decision:
        """Decides whether a waiting request is admitted, and as what. `is_head`: no other waits before it."""
        ledger, forecasts = running.ledger, running.forecasts
        if not ledger.num_open:
            return Decision(0, request.can_be_guaranteed and (is_head or forecasts.is_next(request)))
        if self.shares is None:  # a guaranteed request counts with its limit among all: it fits if they do
            return Decision(self.steps_to_wait(running, request), request.can_be_guaranteed)
        promise = math.inf
        limit = self.limit(ledger.capacity, forecasts.guaranteed.num_sequences + 1)
        if forecasts.may_fit(request):
            promise = _steps_to_wait(running, forecasts.guaranteed, request, request.longest, limit)
            if not promise and is_head and _has_chunks(running, request):
                return Decision(0, is_guaranteed=True)
        if promise:
            if request.can_be_guaranteed and request.num_preemptions >= MOST_INTERRUPTIONS:
                return Decision(promise)
            if running.delayed and forecasts.guaranteed.total > limit:
                match = ledger.match(request.prefill_ids, request.namespace)
                _, prefills = running.windows(request.num_prefill_tokens - match.num_tokens, match.num_tokens)
                if forecasts.guaranteed.peak(prefills) > limit:
                    return Decision(1)
            is_exact = not forecasts.num_estimated and request.expected == request.max_tokens
            if is_exact and promise < math.inf:
                return Decision(promise)  # the peak of all is no lower
        wait = self.steps_to_wait(running, request)
        return Decision(min(wait, max(promise, 1)) if wait else 0, not promise)

    def waits_for(self, request: Request) -> WaitsFor:
        """Returns what a request that was refused waits for."""
        is_only = self.shares is None or request.num_preemptions >= MOST_INTERRUPTIONS
        return "guarantee" if is_only and request.can_be_guaranteed else "slots"

    def steps_to_wait(self, running: Running, request: Request) -> float:
        """Returns 0 if the pool has room for the peak of the running requests and this one, as far as they are
        expected to grow. Else returns for how many steps it has none, as `Decision.wait`."""
        limit = self.limit_with(running, request)
        return _steps_to_wait(running, running.forecasts.all, request, request.final, limit)


def _steps_to_wait(running: Running, forecast: Forecast, request: Request, final: int, limit: int) -> float:
    """Returns 0 if the peak of a forecast stays within `limit` with the request, which grows to `final` tokens.
    Else returns for how many steps it does not, unless a request ends or a prefill is computed: at least 1, or
    infinity."""
    ledger = running.ledger
    num_groups = ledger.groups.num_groups
    if forecast.total + final * num_groups <= limit:
        return 0  # the peak is at most the sum of all
    match = ledger.match(request.prefill_ids, request.namespace)
    window, prefills = running.windows(request.num_prefill_tokens - match.num_tokens, match.num_tokens)
    if window.now * num_groups > running.room:  # as until something is freed
        return running.forecasts.all.steps_to_end()
    candidate = Candidate(match, window, final)
    if num_groups > 1:
        candidate = candidate._replace(points=_points(ledger, request, match))
    wait = forecast.steps_to_wait(candidate, limit, prefills)
    if wait and forecast is running.forecasts.guaranteed:
        running.forecasts.too_long = final
    kept = candidate.held  # the rest may be evicted while it waits
    if wait > 1 and kept.num_tokens < match.num_tokens:
        window, _ = running.windows(request.num_prefill_tokens - kept.num_tokens, kept.num_tokens)
        evicted = Candidate(kept, window, final)
        wait = min(wait, forecast.steps_to_wait_without(candidate, evicted, limit))
    return wait


def _has_chunks(running: Running, request: Request) -> bool:
    """Returns whether the step has room for the first chunk of the request, and for those of the prefills that
    it is put in front of, up to the last guaranteed one. What it hits is not available any more."""
    ledger = running.ledger
    match = ledger.match(request.prefill_ids, request.namespace)
    window, prefills = running.windows(request.num_prefill_tokens - match.num_tokens, match.num_tokens)
    behind = prefills[len(prefills) - len(running.prefilling) + running.idx :][: running.delayed]
    chunks = window.now + sum([one.window.now for one in behind])
    hit = match.num_tokens - Candidate(match, window, 0).held.num_tokens
    return (min(chunks, running.budget.left) + hit) * ledger.groups.num_groups <= running.room


def keep_branch(running: Running, request: Request) -> None:
    """Has the tail kept where a request turns off from a running one that still holds it, so that it hits as
    many tokens as if all layers saw everything: where the pool has room for the running requests then, too."""
    ledger = running.ledger
    branch = ledger.find_branch(request.prefill_ids, request.namespace)
    if branch is None:
        return
    _, prefills = running.windows(0, 0)
    # The guaranteed ones count with their limits, so that their peak may be the higher one.
    forecasts = running.forecasts.all, running.forecasts.guaranteed
    if all(one.peak(prefills) + branch.num_slots <= ledger.capacity for one in forecasts):
        ledger.keep_branch(branch)
        for one in forecasts:
            one.note_kept(branch.sequence)


def _points(ledger: Ledger, request: Request, match: Match) -> tuple[int, ...]:
    """Returns where a request that hits `match` would keep tails for others: at the end of its prompt, and at
    the end of the tokens that it could hit if every layer had them."""
    in_tree = ledger.tree.match(request.namespace, request.prefill_ids).num_tokens
    points = sorted({in_tree, request.num_prefill_tokens})
    return tuple([point for point in points if point > match.num_tokens])


_PATIENT_SHARE = 0.8  # of the target; the rest is for computing the prompt, and the prompts before it


def make_admission(name: str, ttft_target: float = TTFT_TARGET) -> Admission:
    """Returns the admission of this name (`config.ADMISSIONS`), which has seen no outputs yet.

    `ttft_target`: the seconds to a first token that "timely" aims at.
    """
    shares = None if name == "reserved" else LimitShares()
    patience = ttft_target * _PATIENT_SHARE if name == "timely" else None
    return Admission(OutputLengths(assumed=ASSUMED_LENGTH), shares, reserve=0.025, patience=patience)
