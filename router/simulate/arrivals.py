"""When the requests of a trace arrive: all at once, at a multiple of its own times, or by a Poisson process;
and the token ids of their prompts. Requests are numbered from 1 in the order of their arrival."""

import math
import random
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


def faster(trace: Trace, factor: float) -> Iterator[TraceRequest]:
    """Yields the requests with the trace's own times divided by `factor`: with infinity all arrive at 0."""
    for request in trace:
        yield request._replace(arrival=(request.arrival or 0.0) / factor)


def poisson(trace: Trace, rate: float, seed: int) -> Iterator[TraceRequest]:
    """Yields the requests with the arrival times of a Poisson process, `rate` a second."""
    rng = random.Random(f"arrivals {seed}")
    at = 0.0
    for request in trace:
        yield request._replace(arrival=at)
        at += rng.expovariate(rate)


class Arrivals:
    """The requests of a trace that are still to arrive, in order. `all_at_start`: none waits for its time."""

    def __init__(self, requests: Iterator[TraceRequest], all_at_start: bool) -> None:
        self._numbered = enumerate(requests, start=1)
        self._next = next(self._numbered, None)
        self.all_at_start = all_at_start

    @property
    def exhausted(self) -> bool:
        """Whether no request is left."""
        return self._next is None

    @property
    def next_time(self) -> float:
        """When the next request arrives; infinity after the last."""
        return math.inf if self._next is None else self._next[1].arrival or 0.0

    def take(self, now: float) -> Numbered | None:
        """Removes the first request that has arrived by `now`, and returns its number and it; None if there is
        none."""
        if self.next_time > now:
            return None
        taken, self._next = self._next, next(self._numbered, None)
        return taken


def arrange(trace: Trace, config: SimulationConfig) -> tuple[Arrivals, float, float]:
    """Returns the arrivals, the requests offered a second, and the rate of saturation."""
    if config.rate == math.inf:
        return Arrivals(faster(trace, math.inf), True), 0.0, config.saturation or 0.0
    summary = summarise(trace)
    rate, saturated = config.rate, config.saturation or 0.0
    if config.load is not None:
        rate = config.load * saturated
    if not summary.span and rate is not None:
        return Arrivals(poisson(trace, rate, config.seed), False), rate, saturated
    if not summary.span:  # all requests arrive at one time
        return Arrivals(faster(trace, math.inf), True), 0.0, saturated
    own = summary.num / summary.span
    factor = 1.0 if rate is None else rate / own
    return Arrivals(faster(trace, factor), False), own * factor, saturated
