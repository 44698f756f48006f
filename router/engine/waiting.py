"""The queue of requests that wait to be admitted, and their order.

The head of the queue is admitted first. While it has no room, nothing behind it is admitted either: a large
request then gets the slots that ending requests free, and small requests do not take them first. There are two
orders:

first come     by the time of arrival, plus a minute for each unit of priority. Of the requests that come later,
               only those whose priority is lower pass a request, and only those that come within a minute for
               each unit of the difference. Priorities beyond MIN_PRIORITY and MAX_PRIORITY count as these, so
               no request is passed by one that comes more than 70 minutes later.
with patience  by priority, then those in time before those that are late, then by arrival. One in `LATE_EVERY`
               admissions goes to the request that would be the first in the other order, so that no stream of
               requests keeps another one waiting for ever.

In the first order, and where a model of step times keeps steps short, shorter prompts may pass the head, so
that a short prompt does not wait for a long one that came just before it:
- They are at least as urgent as the head.
- Together they have at most as many tokens to compute as the head has.
- The rows and the pool have room for the head besides them, whenever the running requests end.
Before a request, at most twice the tokens are computed that waited when it came, and as many as it has itself.
Tokens that are cached when a request is queued do not count.
"""

import heapq
import math
from collections import deque

from lightkv.errors import CheckFailed
from lightkv.ledger import TokenLedger

from .request import Request

SECONDS_PER_PRIORITY = 60.0
MIN_PRIORITY, MAX_PRIORITY = -10, 60  # those that count
LATE_EVERY = 20

_Entry = tuple[float, bool, int, int, Request]
_OtherEntry = tuple[float, int, int, Request]


class WaitingQueue:
    """Requests by rank. Those of one rank are ordered by lateness (late ones last), then by arrival.

    `patience`: the seconds after which a request that has never run is late; None: no request is ever late.
    `cache`: the ledger that knows the cached tokens of prompts, if short prompts pass long ones; else None.
    """

    def __init__(self, patience: float | None = None, cache: TokenLedger | None = None) -> None:
        self._patience = patience
        self._cache = cache if patience is None else None
        # Entries of requests that have left the queue, or got another place since, are stale and skipped.
        self._heap: list[_Entry] = []
        # With patience: the requests in the order without it. With a cache: the most urgent ones with the
        # fewest tokens to compute first.
        self._otherwise: list[_OtherEntry] = []
        self._next_ticket = 0
        self._num_popped = 0
        # With patience: requests in their order of arrival, not late yet.
        self._in_time: deque[Request] = deque()
        self._num = 0
        self.num_tokens = 0  # that their prefills have to compute or find in the cache

    def __len__(self) -> int:
        return self._num

    @property
    def head(self) -> Request | None:
        """The request that is admitted next, unless another passes it."""
        if self._patience is not None and self._num_popped % LATE_EVERY == LATE_EVERY - 1:
            return self._first_otherwise()
        while self._heap and not _is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][4] if self._heap else None

    @property
    def nexts(self) -> list[Request]:
        """The requests to be admitted next: one that may pass the head, if there is one, and the head."""
        head = self.head
        if head is None or self._cache is None:
            return [] if head is None else [head]
        other = self._first_otherwise()
        assert other is not None
        is_shorter = other.num_new < head.num_new and other.num_new <= head.lets_pass
        return [other, head] if is_shorter and _priority(other) <= _priority(head) else [head]

    def passed_by(self, request: Request) -> list[Request]:
        """Returns the head, if one of `nexts` would pass it, or nothing."""
        head = self.head
        return [] if head is None or request is head else [head]

    def _first_otherwise(self) -> Request | None:
        entries = self._otherwise
        while entries and entries[0][2] != entries[0][3].ticket:
            heapq.heappop(entries)
        return entries[0][3] if entries else None

    @property
    def late_at(self) -> float:
        """The time at which the next request becomes late; infinity where none will."""
        in_time = self._in_time
        while in_time and (in_time[0].ticket is None or in_time[0].num_preemptions):
            in_time.popleft()
        return in_time[0].queued + self._patience if self._patience is not None and in_time else math.inf

    def push(self, request: Request) -> None:
        """Adds a request, be it new or preempted."""
        priority = _priority(request)
        aged = request.queued + priority * SECONDS_PER_PRIORITY
        request.rank = aged if self._patience is None else request.priority
        request.ticket = ticket = self._next_ticket
        self._next_ticket += 1
        heapq.heappush(self._heap, (*request.order, ticket, request))
        self._num += 1
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
            heapq.heappush(self._otherwise, (priority, request.num_new, ticket, request))

    def pop(self, request: Request | None = None) -> Request:
        """Removes one of `nexts`, or the head, and returns it. Raises IndexError where the queue is empty."""
        head = self.head
        if head is None:
            raise IndexError("no request waits")
        request = request or head
        request.place = head.order
        if request is not head:
            head.lets_pass -= request.num_new
        self._num_popped += 1
        self.forget(request)
        return request

    def forget(self, request: Request) -> None:
        """Removes a waiting request from wherever it is in the queue."""
        request.ticket = None
        self._num -= 1
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
        if self._patience is not None or self._cache is not None:
            others = {id(entry[3]) for entry in self._otherwise if entry[2] == entry[3].ticket}
            if others != {id(request) for request in waiting}:
                raise CheckFailed(f"{len(others)} requests are in the other order, {len(waiting)} wait")
        if least := min([request.lets_pass for request in waiting if request.lets_pass < 0], default=0):
            raise CheckFailed(f"{-least} tokens too many have passed a request")
        tokens = sum(request.num_prefill_tokens for request in waiting)
        if tokens != self.num_tokens:
            raise CheckFailed(f"{self.num_tokens} tokens are counted as waiting, {tokens} are in the queue")


def _priority(request: Request) -> int:
    """Returns the priority that counts."""
    return min(max(request.priority, MIN_PRIORITY), MAX_PRIORITY)


def _is_waiting(entry: _Entry) -> bool:
    """Returns whether the entry's request still waits in this place."""
    return entry[3] == entry[4].ticket and entry[:3] == entry[4].order
