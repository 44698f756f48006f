"""The queue of requests that wait to be admitted, and their order.

Only the head is admitted. If it has no room, it keeps its place, and no other request passes it: so a large
request gets the room that ends leave, however many small ones would fit before. The order is one of two:

first come     by the time of arrival, plus a minute for each unit of priority. Of the requests that come later,
               only those whose priority is lower pass a request, and only those that come within a minute for
               each unit of the difference. Priorities beyond MIN_PRIORITY and MAX_PRIORITY count as these, so
               no request is passed by one that comes more than 70 minutes later.
with patience  by priority, then those in time before those that are late, then by arrival. One in `LATE_EVERY`
               admissions goes to the request that would be the first in the other order, so that no stream of
               requests keeps another one waiting for ever.

Where a model of step times keeps steps short, the first in this order lets requests of no lower priority go
first that have fewer tokens to compute, until they have had as many tokens together as it computes itself. So a
short prompt need not wait for a long one that came just before it, and nobody waits for more than twice the
tokens that came before it and once for its own. A first that is refused for lack of room lets nobody go first,
so that all room that is freed adds up for it.
"""

import heapq
import math
from collections import deque

from lightkv.errors import CheckFailed

from .ledger import Ledger
from .request import Request

SECONDS_PER_PRIORITY = 60.0
MIN_PRIORITY, MAX_PRIORITY = -10, 60  # those that count
LATE_EVERY = 20

_Entry = tuple[float, bool, int, int, Request]
_OtherEntry = tuple[float, int, int, Request]


class WaitingQueue:
    """Requests by rank. Those of one rank are ordered by lateness (late ones last), then by arrival.

    `patience`: the seconds after which a request that has never run is late; None: no request is ever late.
    `cache`: the ledger that has the cached tokens of prompts, if short prompts pass long ones; else None.
    """

    def __init__(self, patience: float | None = None, cache: Ledger | None = None) -> None:
        self._patience = patience
        self._cache = cache if patience is None else None
        # Entries of requests that have left the queue, or got another place since, are stale and skipped.
        self._heap: list[_Entry] = []
        # With patience: the requests in the order without it. With a cache: by what they compute.
        self._otherwise: list[_OtherEntry] = []
        self._holds = False  # does the first in order let nobody pass?
        self._next_ticket = 0
        self._num_popped = 0
        # With patience: requests in their order of arrival, not late yet.
        self._in_time: deque[Request] = deque()
        self._num = 0
        self.num_estimated = 0  # those of them that are not exact
        self.num_tokens = 0  # that their prefills have to compute or find in the cache

    def __len__(self) -> int:
        return self._num

    @property
    def head(self) -> Request | None:
        """The request that is admitted next."""
        if self._patience is not None and self._num_popped % LATE_EVERY == LATE_EVERY - 1:
            return self._first_otherwise()
        first = self._first()
        if self._cache is None or first is None or self._holds:
            return first
        shortest = self._first_otherwise()
        assert shortest is not None
        may_pass = shortest.num_new <= min(first.num_new - 1, first.lets_pass)
        return shortest if may_pass and shortest.priority <= first.priority else first

    def _first(self) -> Request | None:
        while self._heap and not _is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][4] if self._heap else None

    def _first_otherwise(self) -> Request | None:
        entries = self._otherwise
        while entries and entries[0][2] != entries[0][3].ticket:
            heapq.heappop(entries)
        return entries[0][3] if entries else None

    def hold(self) -> bool:
        """Has the first in order let nobody pass until it is admitted, since room is short. Returns whether it
        was not the head."""
        head = self.head
        self._holds = True
        return self.head is not head

    @property
    def late_at(self) -> float:
        """The time at which the next request becomes late; infinity where none will."""
        in_time = self._in_time
        while in_time and (in_time[0].ticket is None or in_time[0].num_preemptions):
            in_time.popleft()
        if self._patience is None or not in_time:
            return math.inf
        queued = in_time[0].queued
        assert queued is not None
        return queued + self._patience

    def push(self, request: Request) -> None:
        """Adds a request, be it new or preempted."""
        assert request.queued is not None
        priority = min(max(request.priority, MIN_PRIORITY), MAX_PRIORITY)
        aged = request.queued + priority * SECONDS_PER_PRIORITY
        request.rank = aged if self._patience is None else request.priority
        request.ticket = ticket = self._next_ticket
        self._next_ticket += 1
        heapq.heappush(self._heap, (*request.order, ticket, request))
        self._num += 1
        self.num_estimated += not request.is_exact
        self.num_tokens += request.num_prefill_tokens
        if self._patience is not None:
            heapq.heappush(self._otherwise, (aged, request.arrival, ticket, request))
            if not request.num_preemptions:
                self._in_time.append(request)
        if self._cache is not None:
            num_hit = self._cache.match(request.prefill_ids, request.namespace).num_tokens
            request.num_new = request.num_prefill_tokens - num_hit
            if not request.num_preemptions:
                request.lets_pass = request.num_new
            heapq.heappush(self._otherwise, (request.num_new, request.arrival, ticket, request))

    def pop(self) -> Request:
        """Removes the head and returns it. Raises IndexError where the queue is empty."""
        request = self.head
        if request is None:
            raise IndexError("no request waits")
        self._num_popped += 1
        first = self._first()
        self.forget(request)
        if request is not first and first is not None and self._cache is not None:
            first.lets_pass -= request.num_new
            request.rank = math.nextafter(first.rank, -math.inf)  # it keeps the place before the first
        return request

    def forget(self, request: Request) -> None:
        """Removes a waiting request from wherever it is in the queue."""
        if self._holds and request is self._first():
            self._holds = False
        request.ticket = None
        self._num -= 1
        self.num_estimated -= not request.is_exact
        self.num_tokens -= request.num_prefill_tokens
        if len(self._heap) > 2 * self._num + 64:
            self._heap = [entry for entry in self._heap if _is_waiting(entry)]
            heapq.heapify(self._heap)
        if len(self._otherwise) > 2 * self._num + 64:
            self._otherwise = [entry for entry in self._otherwise if entry[2] == entry[3].ticket]
            heapq.heapify(self._otherwise)

    def defer(self, now: float) -> bool:
        """Places the requests that are late by `now` behind the others. Returns whether there were any.

        Their first token comes too late in any case; that of the others may still come in time.
        """
        deferred = False
        while now > self.late_at:
            request = self._in_time.popleft()
            request.is_late = deferred = True
            assert request.ticket is not None
            heapq.heappush(self._heap, (*request.order, request.ticket, request))
        return deferred

    def check(self) -> None:
        """Recounts the queue. Raises CheckFailed."""
        waiting = [entry[4] for entry in self._heap if _is_waiting(entry)]
        if len(waiting) != self._num:
            raise CheckFailed(f"{self._num} requests are counted as waiting, {len(waiting)} are in the queue")
        estimated = sum(not request.is_exact for request in waiting)
        if estimated != self.num_estimated:
            raise CheckFailed(f"{self.num_estimated} are counted as estimated, {estimated} are in the queue")
        if self._patience is not None or self._cache is not None:
            others = {id(entry[3]) for entry in self._otherwise if entry[2] == entry[3].ticket}
            if others != {id(request) for request in waiting}:
                raise CheckFailed(f"{len(others)} requests are in the other order, {len(waiting)} wait")
        if least := min([request.lets_pass for request in waiting if request.lets_pass < 0], default=0):
            raise CheckFailed(f"{-least} tokens too many have passed a request")
        tokens = sum(request.num_prefill_tokens for request in waiting)
        if tokens != self.num_tokens:
            raise CheckFailed(f"{self.num_tokens} tokens are counted as waiting, {tokens} are in the queue")


def _is_waiting(entry: _Entry) -> bool:
    """Returns whether the entry's request still waits in this place."""
    return entry[3] == entry[4].ticket and entry[:3] == entry[4].order
