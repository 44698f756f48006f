"""The queue of requests that wait to be admitted, and their order.

Only the head is admitted. If it has no room, it keeps its place, and no other request passes it: so a large
request gets the room that ends leave, however many small ones would fit before. The order is one of two:

first come     by the time of arrival, plus a minute for each unit of priority, plus twice the seconds that the
               prefill takes, as far as these are known. Of the requests that come later, only those pass a
               request whose priority is lower, within a minute for each unit of the difference, or whose
               prefill is shorter, within twice the difference. So a short prompt need not wait for a long one
               that came just before it, and a long one waits for short ones for a time that it takes itself.
               Priorities beyond MIN_PRIORITY and MAX_PRIORITY count as these, so that no request is passed for
               more than 70 minutes besides.
with patience  by priority, then those in time before those that are late, then by arrival. One in `LATE_EVERY`
               admissions goes to the request that would be the first in the other order, so that no stream of
               requests keeps another one waiting for ever.
"""

import heapq
import math
from collections import deque

from lightkv.errors import CheckFailed

from .request import Request

SECONDS_PER_PRIORITY = 60.0
MIN_PRIORITY, MAX_PRIORITY = -10, 60  # those that count
PREFILL_TIMES = 2.0  # the seconds of its prefill count so often in a request's place
LATE_EVERY = 20

_Entry = tuple[float, bool, int, int, Request]
_AgedEntry = tuple[float, int, int, Request]


class WaitingQueue:
    """Requests by rank. Those of one rank are ordered by lateness (late ones last), then by arrival.

    `patience`: the seconds after which a request that has never run is late; None: no request is ever late.
    """

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        # Entries of requests that have left the queue, or got another place since, are stale and skipped.
        self._heap: list[_Entry] = []
        self._by_age: list[_AgedEntry] = []  # with patience: the requests in the order without it
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
            while self._by_age and self._by_age[0][2] != self._by_age[0][3].ticket:
                heapq.heappop(self._by_age)
            return self._by_age[0][3] if self._by_age else None
        while self._heap and not _is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][4] if self._heap else None

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
        aged = request.queued + priority * SECONDS_PER_PRIORITY + PREFILL_TIMES * request.prefill_seconds
        request.rank = aged if self._patience is None else request.priority
        request.ticket = ticket = self._next_ticket
        self._next_ticket += 1
        heapq.heappush(self._heap, (*request.order, ticket, request))
        self._num += 1
        self.num_estimated += not request.is_exact
        self.num_tokens += request.num_prefill_tokens
        if self._patience is not None:
            heapq.heappush(self._by_age, (aged, request.arrival, ticket, request))
            if not request.num_preemptions:
                self._in_time.append(request)

    def pop(self) -> Request:
        """Removes the head and returns it. Raises IndexError where the queue is empty."""
        request = self.head
        if request is None:
            raise IndexError("no request waits")
        self._num_popped += 1
        self.forget(request)
        return request

    def forget(self, request: Request) -> None:
        """Removes a waiting request from wherever it is in the queue."""
        request.ticket = None
        self._num -= 1
        self.num_estimated -= not request.is_exact
        self.num_tokens -= request.num_prefill_tokens
        if len(self._heap) > 2 * self._num + 64:
            self._heap = [entry for entry in self._heap if _is_waiting(entry)]
            heapq.heapify(self._heap)
        if len(self._by_age) > 2 * self._num + 64:
            self._by_age = [entry for entry in self._by_age if entry[2] == entry[3].ticket]
            heapq.heapify(self._by_age)

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
        tokens = sum(request.num_prefill_tokens for request in waiting)
        if tokens != self.num_tokens:
            raise CheckFailed(f"{self.num_tokens} tokens are counted as waiting, {tokens} are in the queue")


def _is_waiting(entry: _Entry) -> bool:
    """Returns whether the entry's request still waits in this place."""
    return entry[3] == entry[4].ticket and entry[:3] == entry[4].order
