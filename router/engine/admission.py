"""Admission: decides which waiting request may join the running ones.

An `Admission` estimates how long outputs will be, and asks the forecasts (`guarantees.py`) whether a waiting
request fits in addition to the running ones. docs/admission.md has the rules.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightkv.ledger import Match, TokenLedger
from lightkv.router.config import TTFT_TARGET

from .estimates import ASSUMED_LENGTH, LimitShares, OutputLengths
from .forecast import Candidate, Forecast, Prefill
from .guarantees import Forecasts
from .prefill_budget import PrefillWindow, StepBudget
from .request import Request
from .step import WaitsFor


class Running(NamedTuple):
    """What admission reads of the running requests: the ledger, the forecasts, the requests in prefill and in
    decode, and what the step that is being planned can still compute, in a number of slots. It has planned the
    prefills before `idx`, and a request that is admitted gets that place among them."""

    ledger: TokenLedger
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
        return own, list(map(Prefill, [request.open_sequence for request in [*ahead, *behind]], windows))

    @property
    def delayed(self) -> int:
        """The prefills that a request would be admitted in front of, up to the last guaranteed one."""
        behind = self.prefilling[self.idx :]
        return max([i for i, request in enumerate(behind, start=1) if request.is_guaranteed], default=0)


MOST_INTERRUPTIONS = 2  # of a request that can be guaranteed
MOST_RESERVE = 0.1  # of the pool
MOST_HELD = 0.99  # of the pool, once the prompts of the running requests are computed


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
        reserve: the share of the pool that admission leaves free if all requests are estimated; in proportion
            less if only some of them are. With `shares`, twice the share of tokens that are computed again
            is added, up to MOST_RESERVE.
        patience: seconds after which a waiting request lets the requests of its priority that have waited
            less go first; None is the order of arrival (`waiting.py`).
    """

    estimates: OutputLengths | None = None
    shares: LimitShares | None = None
    reserve: float = 0.0
    patience: float | None = None

    def can_guarantee(self, request: Request) -> bool:
        """Returns whether the request becomes guaranteed, at once or later."""
        return request.states_length or self.estimates is None

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
        least = 2 * generated if request.num_preemptions else 0
        return min(max(expected, least, request.params.min_tokens), max_tokens)

    def limit_with(self, running: Running, *requests: Request) -> int:
        """Returns the most slots that the running requests and these may be counted with, less the reserve."""
        capacity, num = running.ledger.capacity, running.ledger.num_open + len(requests)
        num_estimated = running.forecasts.num_estimated
        num_estimated += sum([one.expected < one.max_tokens for one in requests])
        reserve = self.reserve
        if self.shares is not None:
            reserve = max(reserve, min(reserve + 2 * running.forecasts.share_again, MOST_RESERVE))
        return capacity - int(capacity * reserve * num_estimated / num)

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
        promise, capacity = math.inf, ledger.capacity
        # F can let the others in. To let them in by E alone would only fill the pool that F keeps free.
        is_first = is_head and (request.num_preemptions or request.final > self.limit_with(running, request))
        if forecasts.may_fit(request):
            promise = _steps_to_wait(running, forecasts.guaranteed, request, request.longest, capacity)
            if not promise and is_first and _has_chunks(running, request):
                return Decision(0, is_guaranteed=True)
        is_exact = not forecasts.num_estimated and request.expected == request.max_tokens
        if promise:
            if request.can_be_guaranteed and request.num_preemptions >= MOST_INTERRUPTIONS:
                return Decision(promise)
            if running.delayed and forecasts.guaranteed.total > capacity:
                match = ledger.match(request.prefill_ids, request.namespace)
                _, prefills = running.windows(request.num_prefill_tokens - match.num_tokens, match.num_tokens)
                if forecasts.guaranteed.peak(prefills) > capacity:
                    return Decision(1)
            if is_exact and promise < math.inf:
                return Decision(promise)  # the peak of all is no lower
        if ledger.groups.is_uniform and not is_exact:  # ends may be late, and what is held falls at ends only
            held = held_after_prefills(running, request) + len(running.decoding)
            if held > MOST_HELD * capacity:
                return Decision(max(promise, 1))
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
    if num_groups > 1 or ledger.states.capacity:
        candidate = candidate._replace(points=_points(ledger, request, match))
    wait = forecast.steps_to_wait(candidate, limit, prefills)
    if wait and forecast is running.forecasts.guaranteed:
        running.forecasts.too_long = final
    # What no sequence holds of its hit may be evicted while it waits, and then it begins to decode later.
    return wait if match.held.num_tokens == match.num_tokens else min(wait, 1)


def held_after_prefills(running: Running, request: Request) -> int:
    """Returns the slots that are held once the prefills of the running requests and of this one are computed,
    without what decodes take meanwhile, if no request ends. All layers see everything."""
    hit = running.ledger.match(request.prefill_ids, request.namespace).held
    prefills = sum([other.num_prefill_left for other in running.prefilling])
    return running.ledger.num_held + prefills + request.num_prefill_tokens - hit.num_tokens


def _has_chunks(running: Running, request: Request) -> bool:
    """Returns whether the step has room for the first chunk of the request, and for those of the prefills that
    it is put in front of, up to the last guaranteed one. What it hits is not available any more."""
    ledger = running.ledger
    match = ledger.match(request.prefill_ids, request.namespace)
    window, prefills = running.windows(request.num_prefill_tokens - match.num_tokens, match.num_tokens)
    behind = prefills[len(prefills) - len(running.prefilling) + running.idx :][: running.delayed]
    chunks = window.now + sum([one.window.now for one in behind])
    hit = match.num_tokens - match.held.num_tokens
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


def state_wait(ledger: TokenLedger, request: Request, num_before: int) -> WaitsFor:
    """Returns what a waiting request lacks where layers have states: a state, or the snapshot that the step
    being planned makes; "" for nothing. `num_before`: the requests that it passes."""
    if not _has_state(ledger, request, num_before):
        return "states"
    return "prefill" if _finds_more_later(ledger, request) else ""


def _has_state(ledger: TokenLedger, request: Request, num_before: int) -> bool:
    """Returns whether a state is there for a waiting request, beside those that running requests take and the
    `num_before` that it passes. Each holds one from then on, so that none is ever short of one; a snapshot that
    running requests read takes its own, once, for as long as they do."""
    num_owed = ledger.states.num_owed + num_before
    spare = ledger.states.num_available - num_owed
    if spare != 1:
        return spare > 0
    match = ledger.match(request.prefill_ids, request.namespace)
    if not match.path or match.path[0].tails[len(ledger.groups.classes)].holders:
        return True
    # The last slot has the snapshot that the request hits. It may take that over, unless others will hit it.
    is_shared = match.path[0].is_branching and 2 * match.num_tokens >= request.num_prefill_tokens
    return not num_owed and not (is_shared and ledger.num_open)


def _finds_more_later(ledger: TokenLedger, request: Request) -> bool:
    """Returns whether the step that is being planned makes a snapshot with which a request would compute no
    more than half as much if it began in the next one."""
    in_tree = ledger.tree.match(request.namespace, request.prefill_ids)
    hit, end = ledger.match(request.prefill_ids, request.namespace).num_tokens, in_tree.num_tokens
    for i, segment in enumerate(in_tree.path):
        tail = segment.tails.get(len(ledger.groups.classes))
        if tail is not None and tail.published == ledger.step and (i or in_tree.tip == segment.length):
            return 2 * (request.num_prefill_tokens - end) <= request.num_prefill_tokens - hit
        end -= segment.length if i else in_tree.tip
    return False


def _points(ledger: TokenLedger, request: Request, match: Match) -> tuple[int, ...]:
    """Returns where a request that hits `match` would keep tails for others: at its boundary, or the end of its
    prompt, and at the end of the tokens that it could hit if every layer had them."""
    places = {ledger.tree.match(request.namespace, request.prefill_ids).num_tokens, *request.keep_at}
    if not ledger.states.capacity:
        places.add(request.num_prefill_tokens)
    elif not request.keep_at:
        places.add(request.num_prefill_tokens - 1)
    return tuple(sorted([one for one in places if match.num_tokens < one <= request.num_prefill_tokens]))


_PATIENT_SHARE = 0.8  # of the target; the rest is for computing the prompt, and the prompts before it


def make_admission(name: str, ttft_target: float = TTFT_TARGET) -> Admission:
    """Returns the admission of this name (`config.ADMISSIONS`), which has seen no outputs yet.

    `ttft_target`: the seconds to a first token that "timely" aims at.
    """
    shares = None if name == "reserved" else LimitShares()
    patience = ttft_target * _PATIENT_SHARE if name == "timely" else None
    reserve = 0.025 if shares is None else 0.01
    return Admission(OutputLengths(assumed=ASSUMED_LENGTH), shares, reserve=reserve, patience=patience)
