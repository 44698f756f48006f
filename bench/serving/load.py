"""Measures a service under load: time to the first token, time between tokens, tokens per second.

    python -m bench.serving.load --concurrency 8 --in-process --rounds 5 --out bench/results/serving-cpu.json
    python -m bench.serving.load --url http://127.0.0.1:8000 --rate 4 --trace AzureLLMInferenceTrace_conv.csv
    python -m bench.serving.load --arrivals trace --rate 2 --trace FILE --requests 256
    python -m bench.serving.load --model DIRECTORY --concurrency 1 32 256 --replay --transformers --plot FILE
    python -m bench.serving.load --replot bench/results/serving-h200.json --plot serving-h200.svg

Without --url it starts `lightkv serve` and stops it at the end; options after `--` go to that command. With
--url it measures any server that supports OpenAI's completions, `ignore_eos` and `stream_options`. In a
closed loop, each of a number of clients sends its next request when the last one is answered. In an open
loop, requests arrive at random times, or at those of a trace, however many are in flight. Prompts are random
ids; answers are greedy and have a given length. All times are measured at the client, from the moment it
connects: to the first piece (TTFT), between pieces, per token after the first, and to the end. The times
between pieces are also reported apart for those during which another request waited for its first piece,
because its prefill then shared the step. Goodput counts the answers per second that met --ttft-target and, in
the mean, --tpot-target.

For lightkv it also reports the router's own time per step and the processor time of each process, and it
checks that no token is held at the end. With --replay it compares a decode step with the replay of its CUDA
graph. All clients of a closed loop start at once, and the time counts in which all of them decode (see
`stats.py`). After the service has ended, the graph is replayed with the same settings, over as many sequences
of the same mean length (see `replay.py`). The router's own count of steps over the same time is reported too.
Each is done --rounds times.

The peers get the same prompts as the service, as many at once as a closed loop has clients. The service is
measured in this way too:

    --in-process     `LLM.generate`, alternated with the service. On a GPU both have to fit: give
                     --max-total-tokens.
    --transformers   Hugging Face transformers' continuous batching, after the service has ended, so that it
                     has the whole device. It runs in several ways, and the fastest at each size counts
                     (`continuous_batching.py`). Its start and its first batch are not counted.

The file of --out is written as soon as the service's figures are known, and again after each comparison. A
comparison that fails leaves its error in the file, and the exit code is 1.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import uvloop

from bench.common.child import ChildFailed
from bench.common.report import Spread, load_pyplot, print_json, print_machine, refuse, save_json
from bench.serving.figures import plot, print_levels, print_peers, print_steps
from bench.serving.load_client import Answer, Endpoint, RequestFailed, closed_loop, open_loop
from bench.serving.load_options import arguments, engine_config, settings_of
from bench.serving.peers import InProcess, Rounds, run_batches, run_transformers
from bench.serving.replay import Level, replays
from bench.serving.served import Server, ServerFailed, serve_arguments
from bench.serving.stats import NotSteady, Steady, Targets, span, steady, step_rate_ms, summarise
from bench.serving.workload import Ask, Lengths, Replayed, choose, fill, mixed, poisson, read_trace, scale
from lightkv.errors import LightKVError
from lightkv.router import EngineConfig
from lightkv.router.model_files import resolve
from lightkv.router.simulate.trace_files import IN_MILLISECONDS
from lightkv.router.simulate.traces import open_trace

Results = dict[str, Any]

SETTLE_SECONDS = 0.7  # the API process gets the router's counts four times a second
WATCH_SECONDS = 0.05  # between two looks at these counts, where their time matters
WARM_UP_REQUESTS = 4  # at least
REPLAY_SECONDS = 900.0  # to load the model, capture the graphs, and replay them


class Traffic(NamedTuple):
    """A load. `level`: the number of clients, or with `is_open` the requests per second."""

    level: float
    is_open: bool

    @property
    def name(self) -> str:
        return f"{self.level:g} a second" if self.is_open else f"{self.level:g} clients"

    @property
    def num_requests(self) -> int:
        """The number of requests by default: four for each client of a closed loop, at least 24."""
        return 64 if self.is_open else max(24, 4 * int(self.level))


class Target(NamedTuple):
    """A server that is measured. `server`: its processes, if this benchmark started it."""

    endpoint: Endpoint
    model: str
    vocab_size: int
    server: Server | None

    def run(self, traffic: Traffic, asks: Sequence[Ask], arrivals: list[float] | None = None) -> list[Answer]:
        """Sends every request. `arrivals`: seconds from the start, for an open loop. Raises RequestFailed."""
        if traffic.is_open:
            assert arrivals is not None
            return uvloop.run(open_loop(self.endpoint, self.model, asks, arrivals))
        return uvloop.run(closed_loop(self.endpoint, self.model, asks, int(traffic.level)))

    def batch(self, asks: Sequence[Ask]) -> tuple[float, list[str]]:
        """Sends all requests at once. Returns the seconds, and the texts in order."""
        answers = self.run(Traffic(len(asks), False), asks)
        return span(answers), [answer.text for answer in answers]

    def watch(self, asks: Sequence[Ask]) -> tuple[list[Answer], list[tuple[float, int]]]:
        """Sends all requests at once. Returns the answers, and the router's count of steps at several times."""
        counts: list[tuple[float, int]] = []

        async def count() -> None:
            while True:
                load = await self.endpoint.get("/load")
                counts.append((time.perf_counter(), load["num_steps"]))
                await asyncio.sleep(WATCH_SECONDS)

        async def run() -> list[Answer]:
            watching = asyncio.create_task(count())
            try:
                return await closed_loop(self.endpoint, self.model, asks, len(asks))
            finally:
                watching.cancel()

        return uvloop.run(run()), counts

    def counts(self) -> Results | None:
        """Returns lightkv's own counts, after they are up to date; None for another server."""
        time.sleep(SETTLE_SECONDS)
        try:
            found: Results = uvloop.run(self.endpoint.get("/load"))
        except RequestFailed:
            return None
        return found if "router_seconds" in found else None

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the processor time of this process, which is the client, and of the service's processes."""
        return {"client": time.process_time()} | (self.server.cpu_seconds() if self.server else {})


# --------------------------------------------------------------------------------
# What is measured


def measure(
    target: Target,
    traffic: Traffic,
    asks: Sequence[Ask],
    arrivals: list[float] | None = None,
    targets: Targets = Targets(),  # noqa: B008
) -> Results:
    """Measures one load at the client, and for lightkv by its own counts. Exits if tokens are still held."""
    before, cpu_before = target.counts(), target.cpu_seconds()
    results = summarise(target.run(traffic, asks, arrivals), targets)
    cpu_after, after = target.cpu_seconds(), target.counts()
    cpu = {role: cpu_after[role] - used for role, used in cpu_before.items() if role in cpu_after}
    results["cores"] = {role: used / results["seconds"] for role, used in cpu.items()}
    if "router" in cpu and "api" in cpu:
        # The share of a core that serving would take besides the model at 100 tokens per second.
        results["host_core_at_100_tokens_per_s"] = (
            (cpu["router"] + cpu["api"]) / results["output_tokens"] * 100
        )
    if before is not None and after is not None:
        if after["held"] or after["free"] + after["cached"] != after["capacity"]:
            refuse(f"{traffic.name}: {after['held']} tokens are held after the last answer: {after}")
        steps = after["num_steps"] - before["num_steps"]
        results["steps"] = steps
        results["router_us_per_step"] = (after["router_seconds"] - before["router_seconds"]) / steps * 1e6
    return results


# --------------------------------------------------------------------------------
# The requests


def lengths_of(options: argparse.Namespace, num: int, rng: random.Random) -> list[Lengths]:
    """Returns the lengths of `num` requests, from the trace if there is one, else by --prompt and --output."""
    if options.trace is not None:
        return choose(scale(read_trace(options.trace), options.max_prompt, options.max_output), num, rng)
    shortest, longest = options.prompt
    return mixed(shortest, longest, options.output, num, rng)


def requests_of(
    options: argparse.Namespace, traffic: Traffic, num: int, vocab_size: int, rng: random.Random
) -> tuple[list[Ask], list[float] | None]:
    """Returns `num` requests, and for an open loop the seconds at which they arrive."""
    if traffic.is_open and options.arrivals == "trace":
        trace = Replayed.of(
            open_trace(str(options.trace), num, reading=IN_MILLISECONDS),
            options.max_prompt,
            options.max_output,
        )
        timed = trace.at_rate(traffic.level, options.seed)
        prompts = timed.prompts(vocab_size, options.seed)
        asks = [Ask(ids.tolist(), own.output) for ids, own in zip(prompts, timed, strict=True)]
        return asks, [request.arrival or 0.0 for request in timed]
    asks = fill(lengths_of(options, num, rng), vocab_size, rng)
    return asks, poisson(traffic.level, num, random.Random(options.seed)) if traffic.is_open else None


def batches(options: argparse.Namespace, vocab_size: int) -> dict[int, list[list[Ask]]]:
    """Returns by size one batch to warm up and one for each round. Prompts are new, so that none is cached."""
    rng = random.Random(options.seed + 1)
    return {
        num: [fill(lengths_of(options, num, rng), vocab_size, rng) for _ in range(1 + options.rounds)]
        for num in options.concurrency
    }


def warm_up(target: Target, options: argparse.Namespace, traffic: Traffic, rng: random.Random) -> None:
    """Sends prompts as long as those that are measured, with short answers: from all clients, at least four."""
    clients = 8 if traffic.is_open else int(traffic.level)
    lengths = lengths_of(options, max(clients, WARM_UP_REQUESTS), rng)
    asks = fill([Lengths(prompt, min(output, 4)) for prompt, output in lengths], target.vocab_size, rng)
    target.run(Traffic(clients, False), asks)


# --------------------------------------------------------------------------------
# A step compared with the replay of its graph


class Steps(NamedTuple):
    """Steady times of a number of clients, one for each round. `router_ms`: a step by the router's count."""

    rounds: list[Steady]
    router_ms: list[float]

    @property
    def context(self) -> float:
        """Mean number of tokens of a sequence."""
        return sum(own.context for own in self.rounds) / len(self.rounds)

    def results(self, replay_ms: float | None) -> Results:
        mean = Spread.of([own.mean_ms for own in self.rounds])
        median = Spread.of([own.median_ms for own in self.rounds])
        found: Results = {
            "rounds": len(self.rounds),
            "context": self.context,
            "step_ms": mean._asdict(),
            "median_step_ms": median._asdict(),
            "router_step_ms": Spread.of(self.router_ms)._asdict() if self.router_ms else None,
        }
        if replay_ms is not None:
            found |= {
                "replay_ms": replay_ms,
                "ratio": mean.median / replay_ms,
                "ratio_of_median": median.median / replay_ms,
            }
        return found


def watch_steps(target: Target, options: argparse.Namespace, num: int, rng: random.Random) -> Steps:
    """Runs `num` clients at once, --rounds times. Raises RequestFailed; NotSteady if no round was steady."""
    steps = Steps([], [])
    for round_idx in range(options.rounds):
        answers, counts = target.watch(fill(lengths_of(options, num, rng), target.vocab_size, rng))
        try:
            steps.rounds.append(steady(answers))
        except NotSteady:
            if round_idx == options.rounds - 1 and not steps.rounds:
                raise
            continue
        rate = step_rate_ms(counts, steps.rounds[-1].begin, steps.rounds[-1].end)
        if rate is not None:
            steps.router_ms.append(rate)
    return steps


def replay_steps(config: EngineConfig, steps: dict[int, Steps | str]) -> tuple[Results, str]:
    """Replays the steps of each number of clients. Returns the results, or an error each, and all failures."""
    watched = {num: own for num, own in steps.items() if isinstance(own, Steps)}
    failures = [f"{num} clients: {own}" for num, own in steps.items() if isinstance(own, str)]
    found: dict[int, float] = {}
    try:
        levels = [Level(num, own.context) for num, own in watched.items()]
        for level, milliseconds in replays(config, levels, REPLAY_SECONDS) if levels else ():
            found[level.batch] = milliseconds
            print(f"{level.batch} clients: replayed", flush=True)
    except ChildFailed as error:
        failures.append(str(error))
    results: Results = {
        str(num): own.results(found.get(num)) if isinstance(own, Steps) else {"error": own}
        for num, own in steps.items()
    }
    return results, "; ".join(failures)


def reach(options: argparse.Namespace, config: EngineConfig, stack: ExitStack) -> Target:
    """Returns the server at --url, or starts one that stops when `stack` is closed."""
    server = None
    vocab_size = options.vocab_size or 32_000
    if options.url is None:
        from lightkv.router.model.model_config import load_config

        vocab_size = load_config(resolve(config.model, print)).get_text_config().vocab_size
        server = stack.enter_context(Server(serve_arguments(config, options.serve)))
    endpoint = Endpoint(options.url or server.url, options.api_key, options.timeout)  # type: ignore[union-attr]
    model = uvloop.run(endpoint.get("/v1/models"))["data"][0]["id"]
    return Target(endpoint, model, vocab_size, server)


def run(options: argparse.Namespace, save: Callable[[Results], object]) -> Results:
    """Measures every load, then runs the comparisons. `save` gets the results after the service has ended, and
    again after each comparison.

    Their "failures" say which comparisons have no figures, by the option that asked for them.
    """
    config = engine_config(options)
    levels: dict[str, Results] = {}
    rounds: dict[int, Rounds] = {}
    steps: dict[int, Steps | str] = {}
    asked: dict[int, list[list[Ask]]] = {}
    with ExitStack() as stack:
        target = reach(options, config, stack)
        traffics = [Traffic(num, False) for num in options.concurrency]
        traffics += [Traffic(rate, True) for rate in options.rate]
        rng = random.Random(options.seed)
        targets = Targets(config.ttft_target, options.tpot_target)
        numbers = options.requests or [traffic.num_requests for traffic in traffics]
        for traffic, num in zip(traffics, numbers, strict=True):
            warm_up(target, options, traffic, rng)
            asks, arrivals = requests_of(options, traffic, num, target.vocab_size, rng)
            found = measure(target, traffic, asks, arrivals, targets)
            levels[traffic.name] = {"level": traffic.level, "is_open": traffic.is_open, **found}
            print(f"{traffic.name}: {num} requests in {found['seconds']:.1f} s", flush=True)
        for num in options.concurrency if options.replay else []:
            try:
                steps[num] = watch_steps(target, options, num, rng)
            except NotSteady as error:
                steps[num] = str(error)
        if options.in_process or options.transformers:
            asked = batches(options, target.vocab_size)
            in_process = InProcess(config) if options.in_process else None
            for num, own in asked.items():
                rounds[num] = run_batches(target.batch, in_process, own)
                print(f"{num} at once: {len(own) - 1} rounds", flush=True)
            if in_process is not None:
                in_process.close()
    results: Results = {"loads": levels}
    failures: dict[str, str] = {}

    def save_all(**more: Results) -> None:
        results.update(more)
        if rounds:
            results["at_once"] = {num: found.results() for num, found in rounds.items()}
        save(results)

    save_all()
    if options.replay:
        results["steps"], failures["replay"] = replay_steps(config, steps)
        save_all()
    if options.transformers:
        failures["transformers"] = run_transformers(
            config, asked, rounds, options.transformers, options.way_seconds,
            lambda found: save_all(transformers=found),
        )  # fmt: skip
    return results | {"failures": {name: reason for name, reason in failures.items() if reason}}


def show(results: Results) -> None:
    """Prints the tables."""
    print_levels(results["loads"])
    if "steps" in results:
        print_steps(results["steps"])
    if "at_once" in results:
        print_peers(results["at_once"])


def main() -> None:
    options = arguments(__doc__)
    pyplot = load_pyplot() if options.plot else None
    if options.replot is not None:
        results = json.loads(options.replot.read_text())["results"]
        show(results)
        if pyplot is not None:
            plot(pyplot, results, options.plot)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server stops with this process
    print_machine()
    settings = settings_of(options)
    try:
        results = run(
            options, lambda found: save_json("serving", {"settings": settings, **found}, options.out)
        )
    except (RequestFailed, ServerFailed, LightKVError, ValueError, OSError) as error:
        refuse(str(error))
    results = {"settings": settings, **results}
    show(results)
    print_json("serving", results, options.out)
    if pyplot is not None:
        plot(pyplot, results, options.plot)
    if results["failures"]:
        sys.exit("\n".join(f"--{name} failed: {reason}" for name, reason in results["failures"].items()))


if __name__ == "__main__":
    main()
