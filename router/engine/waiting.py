"""The queue of requests that wait to be admitted, and their order."""

import heapq
import math
from collections import deque

from lightkv.errors import CheckFailed

from .request import Request

_Entry = tuple[float, bool, int, Request]


class WaitingQueue:
    """Requests by rank. Those of one rank are ordered by lateness (late ones last), then by arrival.

    `patience`: the seconds after which a request that has never run is late; None: no request is ever late.
    """

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        # Entries of requests that have ended, or that got another place since, are stale and skipped.
        self._heap: list[_Entry] = []
        # With patience: requests in their order of arrival, not late yet.
        self._in_time: deque[Request] = deque()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    @property
    def head(self) -> Request | None:
        """The request that is admitted next."""
        while self._heap and not _is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    @property
    def late_at(self) -> float:
        """The time at which the next request becomes late; infinity where none will."""
        in_time = self._in_time
        while in_time and (in_time[0].sequence or in_time[0].finish_reason or in_time[0].num_preemptions):
            in_time.popleft()
        if self._patience is None or not in_time:
            return math.inf
        queued = in_time[0].queued
        assert queued is not None
        return queued + self._patience

    def push(self, request: Request) -> None:
        """Adds a request, be it new or preempted."""
        heapq.heappush(self._heap, (*request.order, request))
        self._num += 1
        if self._patience is not None and not request.num_preemptions:
            self._in_time.append(request)

    def pop(self) -> Request:
        """Removes the head and returns it. Raises IndexError where the queue is empty."""
        request = self.head
        if request is None:
            raise IndexError("no request waits")
        heapq.heappop(self._heap)
        self._num -= 1
        return request

    def forget(self) -> None:
        """Notes that one of the waiting requests has ended."""
        self._num -= 1
        if len(self._heap) > 2 * self._num + 64:
            self._heap = [entry for entry in self._heap if _is_waiting(entry)]
            heapq.heapify(self._heap)

    def defer(self, now: float) -> bool:
        """Places the requests that are late by `now` behind the others. Returns whether there were any.

        Their first token comes too late in any case; that of the others may still come in time.
        """
        deferred = False
        while now > self.late_at:
            request = self._in_time.popleft()
            request.is_late = deferred = True
            heapq.heappush(self._heap, (*request.order, request))
        return deferred

    def check(self) -> None:
        """Recounts the queue. Raises CheckFailed."""
        waiting = sum(_is_waiting(entry) for entry in self._heap)
        if waiting != self._num:
            raise CheckFailed(f"{self._num} requests are counted as waiting, {waiting} are in the queue")


def _is_waiting(entry: _Entry) -> bool:
    """Returns whether the entry's request has not ended and still has this place."""
    return entry[3].finish_reason is None and entry[:3] == entry[3].order
