"""The queue: who waits to be admitted, and in what order.

Knows requests and when they came; knows no ledger, and admits nobody.
"""

import heapq
import math
from collections import deque

from lightkv.errors import CheckFailed

from .request import Request

_Entry = tuple[float, bool, int, Request]


class WaitingQueue:
    """Requests by rank; of one rank first those in time, then the late; of these as they came.

    `patience`: seconds after which one that has never run is late; None: nobody ever is.
    """

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._heap: list[
            _Entry
        ] = []  # stale entries, of the ended and of those that are late now, are skipped
        self._in_time: deque[Request] = deque()  # where there is patience: as they came, not looked at since
        self._num = 0

    def __len__(self) -> int:
        return self._num

    @property
    def head(self) -> Request | None:
        """Who is to be admitted next."""
        while self._heap and not _is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    @property
    def late_at(self) -> float:
        """After when another one is late; infinity where nobody will be."""
        in_time = self._in_time
        while in_time and (in_time[0].sequence or in_time[0].finish_reason or in_time[0].num_preemptions):
            in_time.popleft()
        if self._patience is None or not in_time:
            return math.inf
        queued = in_time[0].queued
        assert queued is not None
        return queued + self._patience

    def push(self, request: Request) -> None:
        """It waits, for the first time or again."""
        heapq.heappush(self._heap, (*request.order, request))
        self._num += 1
        if self._patience is not None and not request.num_preemptions:
            self._in_time.append(request)

    def pop(self) -> Request:
        """The head waits no more. Raises IndexError where nobody waits."""
        request = self.head
        if request is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        self._num -= 1
        return request

    def forget(self) -> None:
        """One of them has ended."""
        self._num -= 1
        if len(self._heap) > 2 * self._num + 64:
            self._heap = [entry for entry in self._heap if _is_waiting(entry)]
            heapq.heapify(self._heap)

    def defer(self, now: float) -> bool:
        """Those that are late by now let the others go first. Is anybody?

        Their first token would be late in any case; those who have waited less may still have theirs in time.
        """
        deferred = False
        while now > self.late_at:
            request = self._in_time.popleft()
            request.is_late = deferred = True
            heapq.heappush(self._heap, (*request.order, request))
        return deferred

    def check(self) -> None:
        """Recount. Raises CheckFailed."""
        waiting = sum(_is_waiting(entry) for entry in self._heap)
        if waiting != self._num:
            raise CheckFailed(f"{self._num} requests wait in the books, {waiting} by recount")


def _is_waiting(entry: _Entry) -> bool:
    """Or has it ended, or got another place since?"""
    return entry[3].finish_reason is None and entry[:3] == entry[3].order
