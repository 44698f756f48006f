"""When the requests of a trace arrive: all at once, at a multiple of its own times, or by a Poisson process."""

import random
from collections import deque
from collections.abc import Iterator

from .trace_files import TraceRequest
from .traces import Trace


def at_once(trace: Trace) -> Iterator[TraceRequest]:
    """Yields the requests with an arrival time of 0."""
    for request in trace:
        yield request._replace(arrival=0.0)


def faster(trace: Trace, factor: float) -> Iterator[TraceRequest]:
    """Yields the requests with the trace's own times divided by `factor`."""
    for request in trace:
        assert request.arrival is not None
        yield request._replace(arrival=request.arrival / factor)


def poisson(trace: Trace, rate: float, seed: int) -> Iterator[TraceRequest]:
    """Yields the requests with the arrival times of a Poisson process, `rate` a second."""
    rng = random.Random(f"arrivals {seed}")
    at = 0.0
    for request in trace:
        yield request._replace(arrival=at)
        at += rng.expovariate(rate)


class Arrivals:
    """The requests of a trace in order, divided into arrived and future ones."""

    def __init__(self, requests: Iterator[TraceRequest], all_at_start: bool) -> None:
        self._requests = requests
        self._all_at_start = all_at_start
        self._come: deque[TraceRequest] = deque()
        self._next = next(requests, None)

    @property
    def num_waiting(self) -> int:
        """The number of requests that had arrived by the last `look` and that `take` has not removed. If all
        requests arrive at the start, they are not counted."""
        return len(self._come)

    @property
    def exhausted(self) -> bool:
        return self._next is None and not self._come

    @property
    def next_time(self) -> float | None:
        """When the next request arrives; None after the last."""
        return None if self._next is None else self._next.arrival

    def look(self, now: float) -> None:
        """Notes the requests that have arrived by `now`."""
        if self._all_at_start:
            return
        while self._next is not None and self._next.arrival <= now:  # type: ignore[operator]
            self._come.append(self._next)
            self._next = next(self._requests, None)

    def take(self) -> TraceRequest | None:
        """Removes the first request that has arrived and returns it; None if there is none."""
        if self._all_at_start:
            taken, self._next = self._next, next(self._requests, None)
            return taken
        return self._come.popleft() if self._come else None
