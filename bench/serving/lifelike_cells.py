"""The cells of a load like life: which prompts arrive when.

All is drawn from a seed, and from nothing that a server does, so that each server gets the same. A request of a
published trace is a session of one turn. In a session with tools, each prompt is all that was said before, then
a tool's result and a user's words.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.serving.workload import Ask, Lengths, choose, fill, gamma, read_trace

TRACES = {"conversation": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}
SESSIONS = "sessions"
STATED = 4096  # what clients of today often state on every call, for answers of some hundreds
BURSTY = 3.0  # the deviation of the time between arrivals, over its mean


class Cell(NamedTuple):
    """An open loop. `workload`: of TRACES, or SESSIONS. `load`: requests offered, as a share of a saturation.
    `cv`: of the time between arrivals; 1 is a Poisson process. `stated`: the `max_tokens` of every request;
    None: what its answer has."""

    name: str
    workload: str
    load: float
    cv: float = 1.0
    stated: int | None = None


# The most important come first, for a run that is cut off.
CELLS = (
    Cell("poisson-0.6", "conversation", 0.6),
    Cell("poisson-0.8", "conversation", 0.8),
    Cell("bursty-0.6", "conversation", 0.6, BURSTY),
    Cell("bursty-0.8", "conversation", 0.8, BURSTY),
    Cell("sessions-0.6", SESSIONS, 0.6),
    Cell("poisson-0.95", "conversation", 0.95),
    Cell("code-0.6", "code", 0.6),
    Cell("poisson-0.3", "conversation", 0.3),
    Cell("stated-0.8", "conversation", 0.8, stated=STATED),
    Cell("stated-0.95", "conversation", 0.95, stated=STATED),
)
CLOSED = {"32-clients": 32, "256-clients": 256}  # closed loops: all clients start at once
CLOSED_LENGTHS = Lengths(512, 128)
CLOSED_WAVES = 4


class Turn(NamedTuple):
    """One request. `ids`: what its prompt has after all that was said before. `pause`: seconds from the end of
    the answer before."""

    ids: list[int]
    num_output: int
    pause: float = 0.0


class Session(NamedTuple):
    """Requests one after the other. `at`: when the first arrives, in seconds from the start."""

    at: float
    turns: list[Turn]


class LogNormal(NamedTuple):
    """A lognormal distribution, cut at both ends."""

    median: float
    sigma: float
    low: float
    high: float

    def draw(self, rng: random.Random) -> float:
        return min(max(self.median * rng.lognormvariate(0.0, self.sigma), self.low), self.high)


NUM_TURNS = (5, 8)
OPENING = LogNormal(600, 0.7, 50, 4000)  # tokens of the first prompt: instructions and a question
TOOL = LogNormal(800, 0.8, 100, 4000)  # of a tool's result
WORDS = LogNormal(40, 0.6, 5, 200)  # of a user
ANSWER = LogNormal(120, 0.6, 16, 500)
PAUSE = LogNormal(2.0, 0.6, 0.3, 10.0)  # seconds that a tool takes


class Source(NamedTuple):
    """What requests are drawn from. `traces`: lengths, by workload. `max_length`: most tokens of a sequence."""

    traces: Mapping[str, Sequence[Lengths]]
    vocab_size: int
    max_length: int
    seed: int

    @classmethod
    def read(cls, folder: Path, vocab_size: int, max_length: int, seed: int) -> "Source":
        """Reads the traces in `folder`, and cuts their prompts at what `max_length` leaves beside the answers.

        Raises UnreadableTrace, OSError.
        """

        def cut(own: Lengths) -> Lengths:
            output = min(own.output, max_length // 2)
            return Lengths(min(own.prompt, max_length - output), output)

        traces = {name: [cut(own) for own in read_trace(folder / file)] for name, file in TRACES.items()}
        return cls(traces, vocab_size, max_length, seed)

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{purpose} {self.seed}")

    def asks(self, workload: str, num: int, rng: random.Random) -> list[Ask]:
        """Draws `num` requests of a trace."""
        return fill(choose(self.traces[workload], num, rng), self.vocab_size, rng)

    def closed(self, name: str) -> list[Ask]:
        """Draws the requests of a closed loop of CLOSED."""
        return fill([CLOSED_LENGTHS] * (CLOSED_WAVES * CLOSED[name]), self.vocab_size, self.rng(name))

    def sessions(self, cell: Cell, saturation: float, seconds: float) -> list[Session]:
        """Draws a cell's sessions, which arrive within `seconds`. `saturation`: in requests a second."""
        rng = self.rng(cell.name)
        rate = cell.load * saturation
        if cell.workload == SESSIONS:
            times = arrivals(rate / (sum(NUM_TURNS) / 2), cell.cv, seconds, rng)
            return [Session(at, self._turns(rng)) for at in times]
        times = arrivals(rate, cell.cv, seconds, rng)
        asks = self.asks(cell.workload, len(times), rng)
        return [
            Session(at, [Turn(ask.prompt_ids, ask.num_output)]) for at, ask in zip(times, asks, strict=True)
        ]

    def _turns(self, rng: random.Random) -> list[Turn]:
        """Draws a session's turns; it ends before a turn that would not fit."""
        turns: list[Turn] = []
        length = 0
        for number in range(rng.randint(*NUM_TURNS)):
            said = round((TOOL if number else OPENING).draw(rng)) + round(WORDS.draw(rng))
            output = min(round(ANSWER.draw(rng)), self.max_length // 2)
            pause = PAUSE.draw(rng) if number else 0.0
            if turns and length + said + output > self.max_length:
                break
            said = min(said, self.max_length - output)
            ((ids, *_),) = fill([Lengths(said, output)], self.vocab_size, rng)
            turns.append(Turn(ids, output, pause))
            length += said + output
        return turns


def arrivals(rate: float, cv: float, seconds: float, rng: random.Random) -> list[float]:
    """Draws the times of `rate * seconds` arrivals within `seconds`.

    Their number is fixed, so that bursts change when requests come and not how many.
    """
    *times, end = gamma(rate, cv, max(round(rate * seconds), 1) + 1, rng)
    return [at * seconds / end for at in times]
