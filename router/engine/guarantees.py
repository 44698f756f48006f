"""The counts of the running requests, of all and of the guaranteed ones, and which one is guaranteed next;
docs/admission.md has the rules."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from lightkv.errors import CheckFailed
from lightkv.ledger import TokenLedger

from .forecast import Forecast, Prefill
from .request import Request


class Forecasts:
    """The forecast of all requests that hold tokens, as far as they are expected to grow, and the forecast of
    the guaranteed ones alone, up to their limits. The others become guaranteed in their order.

    `lag`: as in `Forecast`.
    """

    def __init__(self, ledger: TokenLedger, lag: int) -> None:
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

    def guarantee(self, prefills: Callable[[], Sequence[Prefill]]) -> int:
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
                num += self._ask(first, prefills)
            end = bisect_left(candidates, first.seniority, key=lambda one: one.seniority)
        for _ in range(min(end, 4)):
            self._turn = self._turn % end if end else 0
            if self._turn >= end or candidates[self._turn].longest >= self.too_long:
                self._turn += 1
            elif self._ask(candidates[self._turn], prefills):
                num, end = num + 1, end - 1
            else:
                self._turn += 1
                break
        return num

    def _ask(self, request: Request, prefills: Callable[[], Sequence[Prefill]]) -> bool:
        """Guarantees a candidate if the guaranteed requests fit with it. Returns whether they do. If not, none
        as long is asked again until a guaranteed one has ended."""
        sure, sequence, capacity = self.guaranteed, request.open_sequence, self._ledger.capacity
        sure.admit(sequence, request.longest)
        if request.num_prefill_left <= 0:
            sure.decode(sequence, request.longest - sequence.length)
        if sure.total > capacity and sure.peak(prefills()) > capacity:
            sure.drop(sequence)
            self.too_long = request.longest
            return False
        request.is_guaranteed = True
        self._candidates.remove(request)
        self._interrupted.pop(request.id, None)
        return True

    def check(self, prefills: Sequence[Prefill], holding: Sequence[Request]) -> None:
        """Compares the counts with those of forecasts that are made anew of `holding`, the requests that hold
        tokens, and the peak of the guaranteed ones with the capacity. Raises CheckFailed."""
        ledger, anew = self._ledger, Forecasts(self._ledger, self._lag)
        for request in holding:
            anew.admit(request)
            if request.finish_reason is not None:
                anew.rest(request, request.newest_step + 1)
            elif request.num_prefill_left <= 0:
                anew.decode(request, request.newest_step + 1)
        for kept, counted in ((self.all, anew.all), (self.guaranteed, anew.guaranteed)):
            peak, recount = kept.peak(prefills), counted.peak(prefills)
            if ledger.groups.is_uniform and peak != recount:
                raise CheckFailed(f"a peak of {peak} tokens is forecast, {recount} by recount")
        # A request that was admitted because no other ran is not counted before where layers see a window.
        if peak > ledger.capacity and (ledger.groups.is_uniform or ledger.num_open > 1):
            raise CheckFailed(f"guaranteed requests peak at {peak} of {ledger.capacity} slots")
        waiting = [one for one in anew._candidates if one.finish_reason is None]
        if waiting != self._candidates:
            raise CheckFailed(f"{len(self._candidates)} wait for a guarantee, {len(waiting)} by recount")
        if anew._estimated != self._estimated:
            raise CheckFailed(f"{self.num_estimated} lengths are estimated, {anew.num_estimated} by recount")
        if any(one.is_guaranteed for one in self._interrupted.values()):
            raise CheckFailed("a guaranteed request keeps others from a guarantee")

    def _count(self, request: Request) -> None:
        """Notes whether the request counts with less than its limit."""
        if request.expected < request.max_tokens:
            self._estimated.add(request.open_sequence.row)
        else:
            self._estimated.discard(request.open_sequence.row)
