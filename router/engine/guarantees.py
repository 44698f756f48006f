"""The counts of the running requests, of all and of the guaranteed ones, and which one is guaranteed next.

`peak_tokens` is the specification of `forecast.Forecast`, which `Forecasts` uses; docs/admission.md explains
both. (Where layers see a window only, a token takes several slots, some of which are released before its
request ends: `window_slots.py`.)

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
from typing import NamedTuple, Protocol

from lightkv.errors import CheckFailed

from .forecast import Forecast, Prefill
from .ledger import Ledger
from .prefill_budget import PrefillWindow
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
        # Tokens of the last 8 to 16 pools: those that were computed, and again after a preemption.
        self._num_computed: float = ledger.capacity
        self._num_again = 0.0

    @property
    def num_estimated(self) -> int:
        """The requests that hold tokens and count with less than their limit."""
        return len(self._estimated)

    @property
    def share_again(self) -> float:
        """The share of the tokens computed of late that had been computed before a preemption."""
        return self._num_again / self._num_computed

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
        if request.num_preemptions:
            self._num_again += max(request.num_computed - request.open_sequence.num_hit, 0)
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
        self._num_computed += request.open_sequence.length - request.open_sequence.num_hit
        if self._num_computed > 16 * self._ledger.capacity:
            self._num_computed /= 2
            self._num_again /= 2
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

    def guarantee(self, prefills: Callable[[], Sequence[Prefill]], limit: Callable[[int, int], int]) -> int:
        """Guarantees requests that fit: the eldest that was preempted, which all behind it wait for, and up to
        four of those before it. A question takes long, so they have turns, which go on in the next step after
        the first that does not fit. Returns how many were guaranteed. `prefills`: returns those before the
        next step.
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

    def _ask(
        self, request: Request, prefills: Callable[[], Sequence[Prefill]], limit: Callable[[int, int], int]
    ) -> bool:
        """Guarantees a candidate if the guaranteed requests fit with it. Returns whether they do. If not, none
        as long is asked again until a guaranteed one has ended."""
        sure, sequence = self.guaranteed, request.open_sequence
        most = limit(self._ledger.capacity, sure.num_sequences + 1)
        sure.admit(sequence, request.longest)
        if request.num_prefill_left <= 0:
            sure.decode(sequence, request.longest - sequence.length)
        if sure.total > most and sure.peak(prefills()) > most:
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
