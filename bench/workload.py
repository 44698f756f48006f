"""What a load client asks for: prompts of random ids, lengths of prompts and answers, and when they come.

Of a published trace it takes lengths alone; knows no server and no clock. Everything is
drawn from the generator that it is given.
"""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lightkv.router.traces import FileTrace, UnreadableTrace

__all__ = ["Ask", "Lengths", "UnreadableTrace", "choose", "fill", "mixed", "poisson", "read_trace", "scale"]

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
