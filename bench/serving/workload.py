"""The requests of a load client: prompts of random ids, lengths of prompts and answers, arrival times.

From a published trace it uses the lengths alone (`read_trace`), or the requests in their order and at their
times (`Replayed`). All random numbers come from the generator or the seed that a function is given.
"""

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightkv.router.simulate import arrivals
from lightkv.router.simulate.trace_files import (
    BLOCK,
    IN_MILLISECONDS,
    FileTrace,
    TraceRequest,
    UnreadableTrace,
)
from lightkv.router.simulate.traces import Trace

__all__ = [
    "Ask", "Lengths", "Replayed", "UnreadableTrace",
    "choose", "fill", "gamma", "mixed", "poisson", "read_trace", "scale",
]  # fmt: skip

LOWEST_ID = 100  # many vocabularies keep special tokens below it


class Lengths(NamedTuple):
    """The numbers of tokens of a prompt and of its answer."""

    prompt: int
    output: int


class Ask(NamedTuple):
    """One request: the token ids of its prompt, and the number of tokens to generate. `stated`: the larger
    `max_tokens` that it states, while its answer ends after `num_output`; None: it states `num_output`."""

    prompt_ids: list[int]
    num_output: int
    stated: int | None = None


def read_trace(path: Path) -> list[Lengths]:
    """Reads the lengths of a trace's requests in order, without those whose prompt or answer is empty.

    The file is a CSV, or JSON lines if its name ends in .jsonl. Raises UnreadableTrace, OSError.
    """
    return [Lengths(request.prompt, request.output) for request in FileTrace(path, IN_MILLISECONDS)]


def scale(trace: Sequence[Lengths], max_prompt: int | None, max_output: int | None) -> list[Lengths]:
    """Scales all prompts down so that the longest has `max_prompt` tokens, and all answers for `max_output`.

    None, or a longest one that is shorter, leaves them as they are. No length becomes less than 1.
    """
    prompt, output = (
        1.0 if most is None else min(1.0, most / max(lengths))
        for most, lengths in zip((max_prompt, max_output), zip(*trace, strict=True), strict=True)
    )
    return [Lengths(max(round(a * prompt), 1), max(round(b * output), 1)) for a, b in trace]


def mixed(shortest: int, longest: int, output: int, num: int, rng: random.Random) -> list[Lengths]:
    """Draws prompts of `shortest` to `longest` tokens, with their logarithm uniform; answers have `output`."""
    spread = longest / shortest
    return [Lengths(round(shortest * spread ** rng.random()), output) for _ in range(num)]


def choose(trace: Sequence[Lengths], num: int, rng: random.Random) -> list[Lengths]:
    """Draws `num` requests of a trace. None is drawn twice before each was drawn once."""
    chosen: list[Lengths] = []
    while len(chosen) < num:
        chosen += rng.sample(trace, min(num - len(chosen), len(trace)))
    return chosen


def fill(lengths: Iterable[Lengths], vocab_size: int, rng: random.Random) -> list[Ask]:
    """Makes prompts of random ids, which share a prefix only by chance."""
    ids = range(min(LOWEST_ID, vocab_size - 1), vocab_size)
    return [Ask(rng.choices(ids, k=prompt), output) for prompt, output in lengths]


def gamma(rate: float, cv: float, num: int, rng: random.Random) -> list[float]:
    """Draws arrival times in seconds from the start: `num` requests, `rate` a second.

    The gaps have a Gamma distribution, whose deviation is `cv` times its mean: above 1 requests come in bursts.
    """
    shape = cv**-2
    gaps = (rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(num))
    return list(itertools.accumulate(gaps))


def poisson(rate: float, num: int, rng: random.Random) -> list[float]:
    """Draws arrival times in seconds from the start: `num` requests of a Poisson process, `rate` a second."""
    return gamma(rate, 1.0, num, rng)


class Replayed:
    """A `Trace` of requests in their order, with their times and the blocks that prompts share.

    Scaled lengths have no blocks.
    """

    def __init__(self, name: str, requests: Sequence[TraceRequest]) -> None:
        self.name = name
        self.requests = list(requests)

    @classmethod
    def of(cls, trace: Trace, max_prompt: int | None = None, max_output: int | None = None) -> "Replayed":
        """Reads a whole trace, and scales its lengths as `scale` does."""
        requests = list(trace)
        if max_prompt is None and max_output is None:
            return cls(trace.name, requests)
        lengths = scale([Lengths(r.prompt, r.output) for r in requests], max_prompt, max_output)
        return cls(
            trace.name,
            [TraceRequest(own.arrival, *pair) for own, pair in zip(requests, lengths, strict=True)],
        )

    def fitting(self, longest: int, max_new: int) -> "Replayed":
        """Returns the requests whose prompt and `max_new` new tokens fit into `longest` tokens.

        Cuts answers at `max_new`. Raises UnreadableTrace if no request fits.
        """
        found = [r._replace(output=min(r.output, max_new)) for r in self if r.prompt + max_new <= longest]
        if not found:
            raise UnreadableTrace(f"{self.name}: no prompt leaves room for {max_new} of {longest} tokens")
        return Replayed(self.name, found)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def at_rate(self, rate: float, seed: int) -> "Replayed":
        """Stretches the times to `rate` requests a second. Without times, draws a Poisson process."""
        span = (self.requests[-1].arrival or 0.0) - (first := self.requests[0].arrival or 0.0)
        if not span:
            return Replayed(self.name, list(arrivals.poisson(self, rate, seed)))
        factor = rate * span / len(self.requests)
        return Replayed(
            self.name,
            [r._replace(arrival=(r.arrival - first) / factor) for r in self.requests],  # type: ignore[operator]
        )

    def at_once(self) -> "Replayed":
        """Returns the requests with an arrival time of 0."""
        return Replayed(self.name, list(arrivals.faster(self, math.inf)))

    def write(self, path: Path) -> None:
        """Writes a file in lightkv's format, which `lightkv simulate` reads."""
        with path.open("w") as file:
            for request in self.requests:
                line = {"arrival_seconds": request.arrival or 0.0, "prompt_tokens": request.prompt,
                        "output_tokens": request.output, "hash_ids": request.blocks}  # fmt: skip
                print(json.dumps(line), file=file)

    def prompts(self, vocab_size: int, seed: int) -> list[np.ndarray]:
        """Makes prompts of random int32 ids. Prompts share those blocks that the trace says they share."""
        low = min(LOWEST_ID, vocab_size - 1)

        def ids(num: int, *seeds: int) -> np.ndarray:
            return np.random.default_rng([seed, *seeds]).integers(low, vocab_size, num, np.int32)

        prompts = []
        for idx, request in enumerate(self.requests):
            parts = [ids(BLOCK, 1, block) for block in request.blocks]
            parts.append(ids(max(request.prompt - BLOCK * len(parts), 0), 0, idx))
            prompts.append(np.concatenate(parts)[: request.prompt])
        return prompts
