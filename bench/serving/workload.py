"""What a load client asks for: prompts of random ids, lengths of prompts and answers, and when they come.

Of a published trace it takes lengths alone (`read_trace`), or its requests in their order and at their times
(`Replayed`). Knows no server and no clock. Everything is drawn from the generator that it is given.
"""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightkv.router.simulate import traces
from lightkv.router.simulate.traces import BLOCK, FileTrace, Trace, TraceRequest, UnreadableTrace

__all__ = [
    "Ask", "Lengths", "Replayed", "UnreadableTrace",
    "choose", "fill", "mixed", "poisson", "read_trace", "scale",
]  # fmt: skip

LOWEST_ID = 100  # below it many vocabularies keep special tokens


class Lengths(NamedTuple):
    """Tokens of one request: of its prompt and of its answer."""

    prompt: int
    output: int


class Ask(NamedTuple):
    """One request: its token ids, and how many tokens are to come back."""

    prompt_ids: list[int]
    num_output: int


def read_trace(path: Path) -> list[Lengths]:
    """The lengths of every request of a trace, in its order; those with an empty prompt or answer left out.

    A CSV or, where the name ends in .jsonl, JSON lines. Raises UnreadableTrace, OSError.
    """
    return [Lengths(request.prompt, request.output) for request in FileTrace(path)]


def scale(trace: Sequence[Lengths], max_prompt: int | None, max_output: int | None) -> list[Lengths]:
    """The trace with its prompts shrunk alike until the longest has `max_prompt` tokens, and its answers so for
    `max_output`. None, or a longest that is shorter, leaves them. No length falls below 1."""
    prompt, output = (
        1.0 if most is None else min(1.0, most / max(lengths))
        for most, lengths in zip((max_prompt, max_output), zip(*trace, strict=True), strict=True)
    )
    return [Lengths(max(round(a * prompt), 1), max(round(b * output), 1)) for a, b in trace]


def mixed(shortest: int, longest: int, output: int, num: int, rng: random.Random) -> list[Lengths]:
    """Prompts from `shortest` to `longest` tokens, each octave alike likely; answers of `output` tokens."""
    spread = longest / shortest
    return [Lengths(round(shortest * spread ** rng.random()), output) for _ in range(num)]


def choose(trace: Sequence[Lengths], num: int, rng: random.Random) -> list[Lengths]:
    """`num` requests of a trace: none twice until each was there once."""
    chosen: list[Lengths] = []
    while len(chosen) < num:
        chosen += rng.sample(trace, min(num - len(chosen), len(trace)))
    return chosen


def fill(lengths: Iterable[Lengths], vocab_size: int, rng: random.Random) -> list[Ask]:
    """Prompts of random ids: two share a prefix by chance alone."""
    ids = range(min(LOWEST_ID, vocab_size - 1), vocab_size)
    return [Ask(rng.choices(ids, k=prompt), output) for prompt, output in lengths]


def poisson(rate: float, num: int, rng: random.Random) -> list[float]:
    """When `num` requests arrive, in seconds from the start, at `rate` a second: independent of one another."""
    at = 0.0
    arrivals = []
    for _ in range(num):
        at += rng.expovariate(rate)
        arrivals.append(at)
    return arrivals


class Replayed:
    """Requests of a trace in their order, with what it says of times and which prompts begin alike; a `Trace`.

    Where lengths were scaled nothing is known of blocks any more.
    """

    def __init__(self, name: str, requests: Sequence[TraceRequest]) -> None:
        self.name = name
        self.requests = list(requests)

    @classmethod
    def of(cls, trace: Trace, max_prompt: int | None = None, max_output: int | None = None) -> "Replayed":
        """All of a trace, its lengths scaled so far (`scale`)."""
        requests = list(trace)
        if max_prompt is None and max_output is None:
            return cls(trace.name, requests)
        lengths = scale([Lengths(r.prompt, r.output) for r in requests], max_prompt, max_output)
        return cls(
            trace.name,
            [TraceRequest(own.arrival, *pair) for own, pair in zip(requests, lengths, strict=True)],
        )

    def fitting(self, longest: int, max_new: int) -> "Replayed":
        """Those that fit into a context of `longest` tokens with `max_new` new ones, where answers are cut.
        Raises UnreadableTrace where there is none."""
        found = [r._replace(output=min(r.output, max_new)) for r in self if r.prompt + max_new <= longest]
        if not found:
            raise UnreadableTrace(f"{self.name}: no prompt leaves room for {max_new} of {longest} tokens")
        return Replayed(self.name, found)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def at_rate(self, rate: float, seed: int) -> "Replayed":
        """These at `rate` a second: their own times, stretched; Poisson arrivals where there are none."""
        span = (self.requests[-1].arrival or 0.0) - (first := self.requests[0].arrival or 0.0)
        if not span:
            return Replayed(self.name, list(traces.poisson(self, rate, seed)))
        factor = rate * span / len(self.requests)
        return Replayed(
            self.name,
            [r._replace(arrival=(r.arrival - first) / factor) for r in self.requests],  # type: ignore[operator]
        )

    def at_once(self) -> "Replayed":
        """All of them there at the start."""
        return Replayed(self.name, list(traces.at_once(self)))

    def write(self, path: Path) -> None:
        """A file that `lightkv simulate` reads, in Mooncake's format."""
        with path.open("w") as file:
            for request in self.requests:
                line = {"timestamp": (request.arrival or 0.0) * 1e3, "input_length": request.prompt,
                        "output_length": request.output, "hash_ids": request.blocks}  # fmt: skip
                print(json.dumps(line), file=file)

    def prompts(self, vocab_size: int, seed: int) -> list[np.ndarray]:
        """Random ids, int32; the same where the trace says that prompts begin alike."""
        low = min(LOWEST_ID, vocab_size - 1)

        def ids(num: int, *seeds: int) -> np.ndarray:
            return np.random.default_rng([seed, *seeds]).integers(low, vocab_size, num, np.int32)

        prompts = []
        for idx, request in enumerate(self.requests):
            parts = [ids(BLOCK, 1, block) for block in request.blocks]
            parts.append(ids(max(request.prompt - BLOCK * len(parts), 0), 0, idx))
            prompts.append(np.concatenate(parts)[: request.prompt])
        return prompts
