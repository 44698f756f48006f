"""Plays the loads of `lifelike.py` on the service's own scheduler, on a clock that a model of step times moves,
and compares the latencies with measured ones.

    python -m bench.serving.lifelike_simulated bench/results/lifelike-h100.json --traces FOLDER \\
        --step-time bench/results/step-time-lifelike-h100.json --out bench/results/lifelike-simulated.json

The requests and their times are those of the measured cells, and all are answered. Admission, scheduler and
ledger are the service's, and the simulator's engine (`router/simulate/timed_engine.py`) plans when the service
does. What HTTP and the processes take is --overhead. No GPU is needed, so another rule for prompts can be tried
on all cells in seconds. The model's parameters are fitted to steps (`bench.trace.step_time`) or to latencies;
`source` in its file says which.
"""

import argparse
import heapq
import itertools
import json
import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from bench.serving.lifelike import Sent, figures
from bench.serving.lifelike_cells import CELLS, CLOSED, Session, Source
from bench.serving.load_client import Answer
from lightkv.errors import LightKVError
from lightkv.router.engine.loop import make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import Limits, RunnerInfo, TokenEvent
from lightkv.router.engine.step_time import StepTime
from lightkv.router.model.token_buckets import token_buckets
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.simulate.timed_engine import END, MORE, TimedEngine

NAME = "lifelike_simulated"
COMPARED = (("first token", "ttft_ms"), ("per token", "per_token_ms"), ("between", "between_pieces_ms"))
PERCENTILES = ("p50", "p95", "p99")

Results = dict[str, Any]


class Waiting(NamedTuple):
    """A request that is not answered. `then`: takes the answer."""

    sent: float
    num_prompt: int
    arrivals: list[float]
    then: Callable[[Answer], None]


class SimulatedServer:
    """An engine whose steps take what a model says. `overhead`: seconds of HTTP and of processes, one half of
    which a request takes, and the other its answer."""

    def __init__(self, info: RunnerInfo, overhead: float) -> None:
        assert info.step_time is not None
        self.now = 0.0
        self._engine = TimedEngine(make_scheduler(info), info.step_time, host_seconds=0.0)
        self._half = overhead / 2
        self._waiting: dict[str, Waiting] = {}
        self._calls: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._number = itertools.count()

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Makes a call at a time."""
        heapq.heappush(self._calls, (seconds, next(self._number), call))

    def complete(self, ids: Sequence[int], num_output: int, then: Callable[[Answer], None]) -> None:
        """Sends a request now, and gives its answer to `then` when that has arrived."""
        sent = self.now

        def arrive() -> None:
            seed = next(self._number)
            params = SamplingParams(temperature=0.0, max_tokens=num_output)
            self._engine.left[seed] = [num_output]
            self._waiting[str(seed)] = Waiting(sent, len(ids), [], then)
            request = Request(str(seed), array("i", ids).tobytes(), params, seed, frozenset({END}))
            self._engine.add(request)

        self.at(sent + self._half, arrive)

    def run(self) -> None:
        """Runs until nothing is to be done."""
        while True:
            next_call = self._calls[0][0] if self._calls else math.inf
            if (at := min(self._engine.plan_due(self.now), next_call)) == math.inf:
                break
            self.now = max(at, self.now)
            self._take(self._engine.complete_due(self.now))
            while self._calls and self._calls[0][0] <= self.now:
                heapq.heappop(self._calls)[2]()
        self._engine.check()

    def _take(self, events: Sequence[TokenEvent]) -> None:
        """Takes the events of steps that have ended now."""
        at = self.now + self._half
        for event in events:
            waiting = self._waiting[event.request_id]
            waiting.arrivals.append(at)
            if event.finish_reason is not None:
                del self._waiting[event.request_id], self._engine.left[int(event.request_id)]
                sent, num_prompt, arrivals, then = waiting
                num = len(arrivals)
                answer = Answer(sent, arrivals, at, num_prompt, num, "", [MORE] * num)
                self.at(at, lambda answer=answer, then=then: then(answer))  # type: ignore[misc]


def play(server: SimulatedServer, sessions: Sequence[Session], seconds: float) -> list[Sent]:
    """Sends the sessions' requests at their times, as `lifelike.Target.play` does, and returns all of them."""
    sent: list[Sent] = []

    def begin(session: Session) -> None:
        prompt: list[int] = []

        def ask(number: int) -> None:
            turn = session.turns[number]
            prompt.extend(turn.ids)
            sent.append(one := Sent(number + 1, 0.0))

            def take(answer: Answer) -> None:
                one.answer = answer
                prompt.extend(answer.ids)
                if number + 1 < len(session.turns):
                    due = server.now + session.turns[number + 1].pause
                    if due <= seconds:
                        server.at(due, lambda: ask(number + 1))

            server.complete(list(prompt), turn.num_output, take)

        server.at(session.at, lambda: ask(0))

    for session in sessions:
        begin(session)
    server.run()
    return sent


def play_closed(server: SimulatedServer, source: Source, name: str) -> list[Sent]:
    """Runs a closed loop to its end: each client sends its next request when its last one is answered."""
    asks, sent = iter(source.closed(name)), list[Sent]()

    def next_request() -> None:
        if (ask := next(asks, None)) is not None:
            server.complete(ask.prompt_ids, ask.num_output, take)

    def take(answer: Answer) -> None:
        sent.append(Sent(1, 0.0, answer))
        next_request()

    for _ in range(CLOSED[name]):
        server.at(0.0, next_request)
    server.run()
    return sent


def describe(step_time: StepTime, options: argparse.Namespace) -> RunnerInfo:
    """Returns what a service of these sizes, with its other settings at their defaults, knows of its runner."""
    limits = Limits(
        options.max_num_seqs,
        options.max_length,
        options.prefill_chunk,
        options.vocab_size,
        itl_target=options.itl_target,
    )
    buckets = token_buckets(limits.max_step_tokens, limits.prefill_budget)
    return RunnerInfo(
        "", "simulated", "", "", True, options.capacity, 1, options.capacity, "given", limits,
        step_time=step_time, graph_tokens=tuple(buckets),
    )  # fmt: skip


def simulate(measured: Results, step_time: StepTime, options: argparse.Namespace) -> Results:
    """Returns each measured cell's figures as simulated, and the simulated over the measured percentiles."""
    load, found = measured["load"], Results()
    source = Source.read(options.traces, options.vocab_size, options.max_length, load["seed"])
    cells = {cell.name: cell for cell in CELLS}
    for name, own in measured["cells"].items():
        server = SimulatedServer(describe(step_time, options), options.overhead)
        if name in CLOSED:
            sent = play_closed(server, source, name)
        else:
            sessions = source.sessions(cells[name], load["saturation"], load["seconds"])
            sent = play(server, sessions, load["seconds"])
        simulated = figures(sent, server.now if name in CLOSED else load["seconds"])
        ratios = {
            f"{what}, {at}": simulated[key][at] / own[key][at] for what, key in COMPARED for at in PERCENTILES
        }
        found[name] = {"simulated": simulated, "over_measured": ratios}
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("measured", type=Path, help="a file with lightkv's cells, of vllm_peer --lifelike")
    made.add_argument("--traces", type=Path, required=True, help="folder with the two files of Azure's trace")
    made.add_argument("--step-time", required=True, help="a file of parameters, or they themselves")
    made.add_argument("--overhead", type=float, default=0.004, help="seconds of HTTP and processes a request")
    made.add_argument("--capacity", type=int, default=420_000, help="tokens of the pool")
    made.add_argument("--max-num-seqs", type=int, default=256)
    made.add_argument("--prefill-chunk", type=int, default=4096)
    made.add_argument(
        "--itl-target", type=float, help="seconds of a step beside decodes; default: the service's"
    )
    made.add_argument("--vocab-size", type=int, default=32_000, help="of the model")
    made.add_argument("--max-length", type=int, default=16_384, help="most tokens of a prompt and its answer")
    return made.parse_args(argv)


def main() -> None:
    options = arguments()
    print_machine()
    try:
        measurements = json.loads(options.measured.read_text())["results"]["measurements"]
        measured = next((own for own in measurements if own["engine"] == "lightkv" and "cells" in own), None)
        if measured is None:
            refuse(f"{options.measured} has no cells of lightkv")
        step_time = StepTime.parse(options.step_time)
        found = simulate(measured, step_time, options)
    except (LightKVError, KeyError, ValueError, OSError) as error:
        refuse(str(error))
    columns = list(next(iter(found.values()))["over_measured"])
    print("\nsimulated over measured")
    rows = [
        [name, *(f"{own['over_measured'][column]:.2f}" for column in columns)] for name, own in found.items()
    ]
    print_table(["cell", *columns], rows)
    off = np.abs([list(own["over_measured"].values()) for own in found.values()] - np.ones(1))
    median, p90, most = np.percentile(off, (50, 90, 100)).tolist()
    print(f"\noff by {median:.1%} in the median, {p90:.1%} at p90, {most:.1%} at most")
    results = {
        "step_time": step_time.as_dict(),
        "overhead": options.overhead,
        "cells": found,
        "off_by": {"median": median, "p90": p90, "most": most},
    }
    print_json(NAME, results, options.out)


if __name__ == "__main__":
    main()
