"""Measures a server under loads like life: traces and bursts, sessions with tools, first token and goodput.

    python -m bench.serving.lifelike --url http://127.0.0.1:8000 --traces FOLDER --measure-saturation --out FILE
    python -m bench.serving.lifelike --url URL --traces FOLDER --saturation 20 --seconds 40 --cells poisson-0.6

The saturation is what a closed loop of 256 clients with the lengths of the conversation trace is served in
requests a second, in the last two thirds of its time. Each cell (`lifelike_cells.py`) is an open loop for
--seconds at a share of --saturation, or of the measured one, however many requests are in flight: Poisson and
bursty arrivals (Gamma, with a deviation of three times the mean) of the conversation trace, Poisson arrivals
of the code trace, and sessions of 5 to 8 turns whose prompts grow. In the cells `stated`, each request states
`max_tokens` 4,096, and its answer stops by a token where the trace's answer ends. A session goes on with the
very tokens that were answered. A turn that would begin after --seconds is not sent, so the load of sessions
rises while the first ones run, and then stays. The two closed loops at the end have prompts of 512 and
answers of 128 tokens, and four waves.

The cell then waits for the answers, for --drain seconds at most. What is not answered by then, or fails, is
counted, and is outside of goodput: the answers within 1 s to the first token and 40 ms a token in the mean, per
second of --seconds. Percentiles are over the complete answers; those between tokens are over the gaps between
all pieces. The requests and their times follow from --seed, and are the same for each server.
`lifelike_plot.py` draws the result.
"""

import argparse
import asyncio
import re
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.common.report import parser, print_json, print_machine, print_table, refuse, save_json
from bench.serving.lifelike_cells import CELLS, CLOSED, Session, Source
from bench.serving.load_client import Answer, Endpoint, RequestFailed, closed_loop
from bench.serving.load_options import positive
from bench.serving.stats import Targets, summarise, summary
from bench.serving.workload import Ask
from lightkv.errors import LightKVError

Results = dict[str, Any]

NAME = "lifelike"
LIMITS = Targets(ttft=1.0, tpot=0.04)
SATURATING_CLIENTS = 256
SATURATION_SECONDS = 30.0
WARM_UP_CLIENTS, WARM_UP_REQUESTS, WARM_UP_OUTPUT = 32, 64, 8
SETTLE_SECONDS = 2.0  # in which a server drops the requests whose connections were closed
ANSWER_SECONDS = 600.0  # for one answer
LATE_TURN = 5  # from which turns are also reported together


@dataclass
class Sent:
    """A request that was sent. `turn`: counted from 1. `late`: seconds after it was due, by the client's fault.
    `answer`: None if it failed, or was cut off."""

    turn: int
    late: float
    answer: Answer | None = None
    error: str = ""


class Target:
    """A server and its model."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._model: str = uvloop.run(endpoint.get("/v1/models"))["data"][0]["id"]

    def preemptions(self) -> float:
        """Returns how many preemptions the server has counted since its start. Raises RequestFailed."""
        reply = uvloop.run(self._endpoint.request("GET", "/metrics"))
        found = re.findall(rb"^\w+:num_preemptions(?:_total)?(?:{.*})? (\S+)$", reply.body, re.MULTILINE)
        return sum(map(float, found))

    async def play(
        self, sessions: Sequence[Session], seconds: float, drain: float, stated: int | None = None
    ) -> list[Sent]:
        """Sends the sessions' requests at their times, and waits `drain` seconds for what is then in flight.

        `stated`: the `max_tokens` of all of them, where it is not what their answers have.
        """
        now = time.perf_counter  # a loop's own time does not go on while its tasks run
        start = now()
        sent: list[Sent] = []

        async def run(session: Session) -> None:
            due = start + session.at
            prompt: list[int] = []
            for number, turn in enumerate(session.turns, 1):
                if number > 1 and (due := now() + turn.pause) > start + seconds:
                    return
                await asyncio.sleep(due - now())
                prompt += turn.ids
                sent.append(one := Sent(number, now() - due))
                try:
                    one.answer = await self._endpoint.complete(
                        self._model, Ask(prompt, turn.num_output, stated), with_ids=len(session.turns) > 1
                    )
                except RequestFailed as error:
                    one.error = str(error)
                    return
                prompt += one.answer.ids

        await _within(seconds + drain, [run(session) for session in sessions])
        return sent

    async def saturate(self, asks: Iterator[Ask], clients: int, seconds: float) -> list[Answer]:
        """Runs a closed loop for `seconds`, and cuts off what is then in flight. Raises RequestFailed."""
        answers: list[Answer] = []

        async def client() -> None:
            for ask in asks:  # all clients share this iterator
                answers.append(await self._endpoint.complete(self._model, ask))

        await _within(seconds, [client() for _ in range(clients)])
        return answers

    def closed(self, asks: Sequence[Ask], clients: int) -> list[Answer]:
        """Runs a closed loop to its end. Raises RequestFailed."""
        return uvloop.run(closed_loop(self._endpoint, self._model, asks, clients))


async def _within(seconds: float, works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines together, and cancels what is not done within `seconds`. Raises what one raises."""
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except TimeoutError:
        pass
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


# --------------------------------------------------------------------------------
# What is measured


def figures(sent: Sequence[Sent], seconds: float) -> Results:
    """Summarises a cell whose requests arrived within `seconds`."""
    answers = [one.answer for one in sent if one.answer is not None]
    errors = [one.error for one in sent if one.error]
    found: Results = summarise(answers, LIMITS) if answers else {"requests": 0, "met_share": 0.0}
    met = found["met_share"] * len(answers)
    found |= {
        "sent": len(sent),
        "completed": found.pop("requests"),
        "failed": len(errors),
        "cut_off": len(sent) - len(answers) - len(errors),
        "errors": sorted(set(errors))[:3],
        "offered_per_s": len(sent) / seconds,
        "goodput_per_s": met / seconds,
        "met_share": met / max(len(sent), 1),
        "late_ms": summary([one.late for one in sent]),
    }
    last = max((one.turn for one in sent), default=1)
    if last > 1:
        turns = {str(turn): (turn, turn) for turn in range(1, last + 1)}
        turns[f"{LATE_TURN} and later"] = (LATE_TURN, last)
        found["turns"] = {
            name: _of_turns([one for one in sent if low <= one.turn <= high])
            for name, (low, high) in turns.items()
        }
    return found


def _of_turns(sent: Sequence[Sent]) -> Results:
    answers = [one.answer for one in sent if one.answer is not None]
    return {
        "sent": len(sent),
        "prompt_tokens": sum(own.num_prompt for own in answers) / max(len(answers), 1),
        "ttft_ms": summary([own.ttft for own in answers]),
    }


def measure_saturation(target: Target, source: Source, seconds: float) -> Results:
    """Finds how many requests a second a full server answers. Raises RequestFailed."""

    def asks() -> Iterator[Ask]:
        rng = source.rng("saturation")
        while True:
            yield from source.asks("conversation", SATURATING_CLIENTS, rng)

    start = time.perf_counter()
    answers = uvloop.run(target.saturate(asks(), SATURATING_CLIENTS, seconds))
    steady = [own for own in answers if start + seconds / 3 <= own.ended <= start + seconds]
    if not steady:
        raise RequestFailed(f"no answer in the last two thirds of {seconds:g} s; give --saturation")
    span = seconds * 2 / 3
    return {
        "clients": SATURATING_CLIENTS,
        "seconds": seconds,
        "requests_per_s": len(steady) / span,
        "output_tokens_per_s": sum(own.num_output for own in steady) / span,
        "ttft_ms": summary([own.ttft for own in steady]),
    }


def warm_up(target: Target, source: Source) -> None:
    """Sends prompts of the conversation trace, and one of the longest, with short answers."""
    rng = source.rng("warm-up")
    asks = source.asks("conversation", WARM_UP_REQUESTS, rng)
    longest = rng.choices(range(100, source.vocab_size), k=source.max_length - WARM_UP_OUTPUT)
    asks = [
        Ask(own.prompt_ids, min(own.num_output, WARM_UP_OUTPUT))
        for own in [*asks, Ask(longest, WARM_UP_OUTPUT)]
    ]
    target.closed(asks, WARM_UP_CLIENTS)


def run(options: argparse.Namespace, save: Callable[[Results], object]) -> Results:
    """Measures the saturation if asked to, then each cell. `save` gets the results after each."""
    source = Source.read(options.traces, options.vocab_size, options.max_length, options.seed)
    target = Target(Endpoint(options.url, None, ANSWER_SECONDS))
    warm_up(target, source)
    results: Results = {"cells": {}}
    saturation = options.saturation
    if options.measure_saturation:
        results["saturation"] = measure_saturation(target, source, options.saturation_seconds)
        print(f"saturation: {results['saturation']['requests_per_s']:.2f} requests/s", flush=True)
        saturation = saturation or results["saturation"]["requests_per_s"]
    results["load"] = {
        "saturation": saturation, "seconds": options.seconds, "drain": options.drain, "seed": options.seed,
        "max_length": options.max_length, "limits": LIMITS._asdict(),
    }  # fmt: skip
    for name in options.cells:
        time.sleep(SETTLE_SECONDS)
        cell = next((own for own in CELLS if own.name == name), None)
        if cell is None:
            begun, cpu = time.perf_counter(), time.process_time()
            answers = target.closed(source.closed(name), CLOSED[name])
            found = figures([Sent(1, 0.0, own) for own in answers], time.perf_counter() - begun)
        else:
            sessions = source.sessions(cell, saturation, options.seconds)
            before = target.preemptions()
            begun, cpu = time.perf_counter(), time.process_time()
            sent = uvloop.run(target.play(sessions, options.seconds, options.drain, cell.stated))
            found = {**cell._asdict(), **figures(sent, options.seconds)}
            found["preemptions"] = target.preemptions() - before
        wall = time.perf_counter() - begun
        found |= {"wall_seconds": wall, "client_cores": (time.process_time() - cpu) / wall}
        results["cells"][name] = found
        print(f"{name}: {found['completed']} of {found['sent']} answered in {wall:.1f} s", flush=True)
        save(results)
    return results


def show(cells: Results) -> None:
    """Prints a line for each cell."""

    def cell(found: Results, key: str) -> str:
        own = found.get(key)
        return (
            ""
            if own is None
            else " / ".join(f"{own[percentile]:.1f}" for percentile in ("p50", "p95", "p99"))
        )

    rows = [
        [
            name, f"{found['offered_per_s']:.2f}", f"{found['goodput_per_s']:.2f}",
            str(found["failed"] + found["cut_off"]), cell(found, "ttft_ms"), cell(found, "between_pieces_ms"),
            f"{found['per_token_ms']['mean']:.1f}" if found.get("per_token_ms") else "",
            f"{found.get('output_tokens_per_s', 0.0):,.0f}", f"{found['client_cores']:.2f}",
        ]
        for name, found in cells.items()
    ]  # fmt: skip
    print("\nmilliseconds as p50 / p95 / p99")
    header = ["cell", "offered/s", "goodput/s", "lost", "first token", "between pieces", "a token, mean",
              "tokens/s", "client's cores"]  # fmt: skip
    print_table(header, rows)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Exits if there is no saturation."""
    known = [*(cell.name for cell in CELLS), *CLOSED]
    made = parser(__doc__)
    made.add_argument("--url", required=True, help="root of a server that runs already")
    made.add_argument("--traces", type=Path, required=True, help="folder with the two files of Azure's trace")
    made.add_argument("--vocab-size", type=int, default=32_000, help="of the model")
    made.add_argument("--max-length", type=int, default=16_384, help="most tokens of a prompt and its answer")
    made.add_argument("--saturation", type=positive, help="requests a second; loads are shares of it")
    made.add_argument(
        "--measure-saturation", action="store_true", help="find it, or report it beside the given"
    )
    made.add_argument("--saturation-seconds", type=positive, default=SATURATION_SECONDS)
    made.add_argument("--seconds", type=positive, default=60.0, help="in which the requests of a cell arrive")
    made.add_argument("--drain", type=positive, default=45.0, help="seconds that a cell may take beyond them")
    made.add_argument(
        "--cells", nargs="+", choices=known, default=known, metavar="CELL", help=", ".join(known)
    )
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args(argv)
    if options.saturation is None and not options.measure_saturation:
        made.error("loads are shares of a saturation; give --saturation, or --measure-saturation")
    return options


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print_machine()
    try:
        results = run(options, lambda found: save_json(NAME, found, options.out))
    except (RequestFailed, LightKVError, ValueError, OSError) as error:
        refuse(str(error))
    show(results["cells"])
    print_json(NAME, results, options.out)


if __name__ == "__main__":
    main()
