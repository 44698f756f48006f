"""Work that clients cause takes turns, so that none of them keeps the event loop from the others."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable

FIRST_ARRIVALS = 8  # of one network, that need not wait in a turn of the event loop


class Turns:
    """Work that waits for a later turn of the event loop, which does `most` pieces of it, and begins none once
    `seconds` have passed. The networks of the clients take turns, piece by piece. Of one network the oldest is
    first, or the newest, where the clients of old work may have given up."""

    def __init__(self, most: int = 2**63, seconds: float = math.inf, newest_first: bool = False) -> None:
        self._most, self._seconds = most, seconds
        self._newest_first = newest_first
        self._waiting: dict[str, deque[Callable[[], None]]] = {}  # by network, the next first
        self._arrived = Counter[str]()  # in this turn of the event loop
        self._is_scheduled = False

    def may_go_first(self, network: str) -> bool:
        """Counts something that arrived from `network`. Returns whether it need not wait."""
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._arrived.clear)
        self._arrived[network] += 1
        return self._arrived[network] <= FIRST_ARRIVALS

    def add(self, network: str, work: Callable[[], None]) -> None:
        """Has `work` called in a later turn of the event loop."""
        self._waiting.setdefault(network, deque()).append(work)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        end = time.monotonic() + self._seconds
        try:
            for _ in range(min(sum(map(len, self._waiting.values())), self._most)):
                network = next(iter(self._waiting))
                waiting = self._waiting.pop(network)
                work = waiting.pop() if self._newest_first else waiting.popleft()
                if waiting:
                    self._waiting[network] = waiting  # behind the other networks
                work()
                if time.monotonic() >= end:
                    break
        finally:
            self._is_scheduled = False
            self._schedule()
