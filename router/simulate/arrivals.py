"""When the requests of a trace arrive: all at once, at a multiple of its own times, or by a Poisson process;
and the token ids of their prompts. Requests are numbered from 1 in the order of their arrival."""

import math
import random
from collections import deque
from collections.abc import Iterator

import numpy as np

from .config import SimulationConfig
from .trace_files import TraceRequest
from .traces import Trace, summarise

Numbered = tuple[int, TraceRequest]


def prompt_ids(number: int, asked: TraceRequest) -> bytes:
    """Returns the prompt of request `number` as int32 bytes: each block is filled with its id, and a prompt
    without blocks begins with a token of its own."""
    if asked.blocks:
        repeated = np.repeat(np.array(asked.blocks, np.int32) + 1, asked.block_tokens)
        ids = repeated[: asked.prompt].tobytes()
    else:
        ids = number.to_bytes(4, "little")
    return ids + bytes(4 * asked.prompt - len(ids))


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
        self._num_taken = 0

    @property
    def num_waiting(self) -> int:
        """The number of requests that had arrived by the last `look` and that `take` has not removed. If all
        requests arrive at the start, they are not counted."""
        return len(self._come)

    @property
    def exhausted(self) -> bool:
        """Whether no request is left."""
        return self._next is None and not self._come

    @property
    def next_time(self) -> float:
        """When the next request arrives; infinity after the last, or if all requests arrive at the start."""
        if self._next is None or self._next.arrival is None or self._all_at_start:
            return math.inf
        return self._next.arrival

    def look(self, now: float) -> None:
        """Notes the requests that have arrived by `now`."""
        if self._all_at_start:
            return
        while self._next is not None and self._next.arrival <= now:  # type: ignore[operator]
            self._come.append(self._next)
            self._next = next(self._requests, None)

    def take(self) -> Numbered | None:
        """Removes the first request that has arrived, and returns its number and it; None if there is none."""
        if self._all_at_start:
            taken, self._next = self._next, next(self._requests, None)
        else:
            taken = self._come.popleft() if self._come else None
        if taken is None:
            return None
        self._num_taken += 1
        return self._num_taken, taken


class Inbox:
    """The requests that a router has sent to one replica and that its engine has not taken yet. It stands where
    a single engine has `Arrivals`. `closed`: whether no further request comes."""

    def __init__(self, all_at_start: bool) -> None:
        self._all_at_start = all_at_start
        self._come: deque[Numbered] = deque()
        self.num_tokens = 0  # of the prompts in it
        self.closed = False

    @property
    def num_waiting(self) -> int:
        """The number of requests in it, as `Arrivals.num_waiting` counts."""
        return 0 if self._all_at_start else len(self._come)

    @property
    def exhausted(self) -> bool:
        """Whether no request is left, and none comes."""
        return self.closed and not self._come

    @property
    def next_time(self) -> float:
        """Infinity: the router knows when requests arrive."""
        return math.inf

    def look(self, now: float) -> None:
        """Does nothing: the router brings each request when it arrives."""

    def put(self, number: int, asked: TraceRequest) -> None:
        """Adds a request behind the others."""
        self._come.append((number, asked))
        self.num_tokens += asked.prompt

    def take(self) -> Numbered | None:
        """Removes the first request, and returns its number and it; None if there is none."""
        if not self._come:
            return None
        taken = self._come.popleft()
        self.num_tokens -= taken[1].prompt
        return taken


def arrange(trace: Trace, config: SimulationConfig) -> tuple[Arrivals, float, float]:
    """Returns the arrivals, the requests offered a second, and the rate of saturation."""
    if config.rate == math.inf:
        return Arrivals(at_once(trace), True), 0.0, config.saturation or 0.0
    summary = summarise(trace)
    rate, saturated = config.rate, config.saturation or 0.0
    if config.load is not None:
        rate = config.load * saturated
    if not summary.span and rate is not None:
        return Arrivals(poisson(trace, rate, config.seed), False), rate, saturated
    if not summary.span:  # all requests arrive at one time
        return Arrivals(at_once(trace), True), 0.0, saturated
    own = summary.num / summary.span
    factor = 1.0 if rate is None else rate / own
    return Arrivals(faster(trace, factor), False), own * factor, saturated
