"""Compares the service of two trees on one machine, in turns: HTTP, loads like life, start, the router's step.

    python -m bench.serving.alternate OLD NEW --out bench/results/NAME.json
    python -m bench.serving.alternate OLD NEW --model DIRECTORY --concurrency 1 32 256 -- --max-total-tokens N
    python -m bench.serving.alternate OLD NEW --rounds 0 --cells poisson-0.8 --traces FOLDER --saturation 20

OLD and NEW are folders with a checkout each. A service of each tree runs with the same options (those after
`--`), and the one whose turn it is not waits: on a GPU both have to fit, so give --max-total-tokens. In a round
each service gets the same requests, which all clients send at once: new prompts of random ids, greedy answers.
The client is the same for both. With --cells they serve these cells of `lifelike.py` likewise, each round with
new requests. Afterwards services are started in turns, their kernels being compiled already, and with
--router-rounds the steps of `router_step.py` of each tree are taken in turns, a hundred at a time.

A ratio is the new tree's time over the old one's of the same round. Its median counts, since what else runs on
the machine slows rounds of both. Texts are compared, too: how many answers of each number of clients are the
same in both trees. The last bits of bf16 depend on how many sequences share a step, so with many clients some
differ even between two runs of one tree.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import uvloop

from bench.common.report import (
    Spread,
    alternate,
    parser,
    print_json,
    print_machine,
    print_table,
    refuse,
    save_json,
)
from bench.serving.lifelike import ANSWER_SECONDS, SETTLE_SECONDS, Sent, Target, figures, warm_up
from bench.serving.lifelike_cells import CELLS, Source
from bench.serving.load_client import Answer, Endpoint, RequestFailed, closed_loop
from bench.serving.served import Server, ServerFailed, parse_with_serve
from bench.serving.stats import span
from bench.serving.workload import Ask, Lengths, fill
from lightkv.router.model.model_config import load_config
from lightkv.router.model_files import DEFAULT_MODEL, resolve

Results = dict[str, Any]
Save = Callable[[Results], None]

LEAST_REQUESTS = 4  # of a round
WARM_UP_ROUNDS = 1
POLL_SECONDS, CAPTURE_SECONDS = 0.1, 300.0
DRAIN_SECONDS = 45.0  # that a cell may take beyond its time
ROUTER_STEPS = 100  # of a turn


class Tree:
    """A checkout, and what its programs are started with."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder.resolve()
        path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
        code = "import lightkv; print(lightkv.__file__)"
        found = self.run(["-c", code]).strip()
        if self.folder not in Path(found).resolve().parents:
            refuse(f"lightkv of {self.folder} is that of {found}; give a folder with a checkout")

    def run(self, arguments: Sequence[str]) -> str:
        """Runs Python to its end, and returns what it prints. Exits if it fails."""
        command = [sys.executable, *arguments]
        environment = os.environ | self.environment
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            refuse(
                f"{self.folder}: {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}"
            )
        return done.stdout

    def server(self, arguments: Sequence[str]) -> Server:
        return Server(arguments, self.folder, self.environment)

    def start_seconds(self, arguments: Sequence[str]) -> float:
        """Starts a service, ends it, and returns the seconds until it was ready. Raises ServerFailed."""
        begin = time.perf_counter()
        with self.server(arguments):
            return time.perf_counter() - begin

    def router(self) -> "RouterProcess":
        return RouterProcess(self)


class RouterProcess:
    """A process that takes the router's steps in a tree (`router_turns.py`)."""

    def __init__(self, tree: Tree) -> None:
        # -P: beside the file are others whose names could hide those of packages.
        command = [sys.executable, "-P", str(Path(__file__).with_name("router_turns.py"))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree.folder,
            env=os.environ | tree.environment,
        )
        self._folder = tree.folder

    def ask(self, **request: int) -> Any:
        """Returns the answer to a request. Exits if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            refuse(f"the router's process of {self._folder} has ended with {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def settle(endpoint: Endpoint) -> None:
    """Waits until a service has captured all its CUDA graphs, which it does while it has no requests. Raises
    RequestFailed where it does not come to that."""
    end = time.monotonic() + CAPTURE_SECONDS
    while (load := uvloop.run(endpoint.get("/load")))["num_missing_graphs"]:
        if load["state"] != "ready" or time.monotonic() > end:
            raise RequestFailed(
                f"a service is {load['state']} with {load['num_missing_graphs']} graphs to capture"
            )
        time.sleep(POLL_SECONDS)


def ask_all(endpoint: Endpoint, model: str, asks: Sequence[Ask], clients: int) -> list[Answer]:
    """Sends all requests. Raises RequestFailed."""
    return uvloop.run(closed_loop(endpoint, model, asks, clients))


def figures_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Returns times of a round in milliseconds; lower is better in all."""
    return {
        "whole": span(answers) * 1e3,
        "first token, median": statistics.median(answer.ttft for answer in answers) * 1e3,
        "per token, median": statistics.median(s for answer in answers for s in answer.per_token) * 1e3,
        "between tokens, median": statistics.median(gap for answer in answers for gap in answer.gaps) * 1e3,
    }


def figures_of_cell(sent: Sequence[Sent]) -> dict[str, float]:
    """Returns times of a cell in milliseconds; lower is better in all. Raises RequestFailed where the answers
    are too few for them."""
    found = figures(sent, 1.0)
    if not found.get("between_pieces_ms"):
        raise RequestFailed(f"{found['completed']} of {len(sent)} requests answered; give more --seconds")
    return {
        "first token, p50": found["ttft_ms"]["p50"],
        "first token, p99": found["ttft_ms"]["p99"],
        "between tokens, p95": found["between_pieces_ms"]["p95"],
        "between tokens, p99": found["between_pieces_ms"]["p99"],
        "per token, mean": found["per_token_ms"]["mean"],
    }


def compared(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> Results:
    """Returns each figure of both trees and their ratios. A round has both trees' figures by name."""
    found: Results = {}
    for name in rounds[0]["old"]:
        sides = {side: [own[side][name] for own in rounds] for side in ("old", "new")}
        ratios = [new / old for old, new in zip(sides["old"], sides["new"], strict=True)]
        found[name] = {side: Spread.of(values)._asdict() for side, values in sides.items()}
        found[name] |= {
            "ratio": Spread.of(ratios)._asdict(),
            "ratio_of_lowest": min(sides["new"]) / min(sides["old"]),
            "ratios": ratios,
        }
    return found


def measure_http(endpoints: Mapping[str, Endpoint], options: argparse.Namespace, save: Save) -> None:
    """Measures all numbers of clients. `save` gets the figures after each number. Raises RequestFailed."""
    vocab_size, rng = _vocab_size(options.model), random.Random(0)
    results: Results = {}
    model = uvloop.run(endpoints["old"].get("/v1/models"))["data"][0]["id"]
    for clients in options.concurrency:
        rounds: list[dict[str, dict[str, float]]] = []
        num, same = max(clients, LEAST_REQUESTS), 0
        # `alternate` asks both trees in a round, so a round's requests are drawn once for both.
        drawn = [
            fill([Lengths(options.prompt, options.output)] * num, vocab_size, rng)
            for _ in range(WARM_UP_ROUNDS + options.rounds)
        ]
        asks = {side: iter(drawn) for side in endpoints}

        def run(side: str, asks: Any = asks, clients: int = clients) -> list[Answer]:
            return ask_all(endpoints[side], model, next(asks[side]), clients)

        sides = {side: partial(run, side) for side in endpoints}
        for idx, answers in enumerate(alternate(WARM_UP_ROUNDS + options.rounds, sides)):
            if idx < WARM_UP_ROUNDS:
                continue
            rounds.append({side: figures_of(own) for side, own in answers.items()})
            pairs = zip(answers["old"], answers["new"], strict=True)
            same += sum(old.text == new.text for old, new in pairs)
        results[str(clients)] = {"times_ms": compared(rounds), "answers": num * len(rounds), "same": same}
        save(results)
        print(f"{clients} clients: {same} of {num * len(rounds)} texts are the same", flush=True)


def measure_cells(endpoints: Mapping[str, Endpoint], options: argparse.Namespace, save: Save) -> None:
    """Measures cells of loads like life. `save` gets the figures after each cell. Raises RequestFailed."""
    source = Source.read(options.traces, _vocab_size(options.model), options.max_length, seed=0)
    targets = {side: Target(endpoint) for side, endpoint in endpoints.items()}
    for target in targets.values():
        warm_up(target, source)
    results: Results = {}
    for cell in (own for own in CELLS if own.name in options.cells):
        seeds = {side: iter(range(1, 1 + options.cell_rounds)) for side in targets}

        def play(side: str, seeds: Any = seeds, cell: Any = cell) -> list[Sent]:
            drawn = source._replace(seed=next(seeds[side])).sessions(
                cell, options.saturation, options.seconds
            )
            time.sleep(SETTLE_SECONDS)  # the other service may still have requests that were cut off
            return uvloop.run(targets[side].play(drawn, options.seconds, DRAIN_SECONDS, cell.stated))

        rounds, lost = [], dict.fromkeys(targets, 0)
        for sent in alternate(options.cell_rounds, {side: partial(play, side) for side in targets}):
            rounds.append({side: figures_of_cell(own) for side, own in sent.items()})
            lost = {side: lost[side] + sum(one.answer is None for one in own) for side, own in sent.items()}
        results[cell.name] = {"times_ms": compared(rounds), "lost": lost}
        save(results)
        print(f"{cell.name}: {lost['old']} and {lost['new']} requests without an answer", flush=True)


def _vocab_size(model: str) -> int:
    return int(load_config(resolve(model, print)).get_text_config().vocab_size)


def measure_starts(
    trees: Mapping[str, Tree], arguments: Sequence[str], options: argparse.Namespace, save: Save
) -> None:
    """Starts services in turns. `save` gets the figures after each pair. Raises ServerFailed."""
    rounds = []
    sides = {side: partial(tree.start_seconds, arguments) for side, tree in trees.items()}
    for seconds in alternate(options.starts, sides):
        rounds.append({side: {"seconds": one} for side, one in seconds.items()})
        save(compared(rounds))


def measure_router(trees: Mapping[str, Tree], options: argparse.Namespace, save: Save) -> None:
    """Takes the router's steps in turns. `save` gets the figures after each load."""
    results: Results = {}
    routers = {side: tree.router() for side, tree in trees.items()}
    sides = {side: partial(router.ask, steps=ROUTER_STEPS) for side, router in routers.items()}
    try:
        for (shared, grouped), churn, depth in product(((0, 0), (1, 0), (1, 1)), (0, 1), (1, 2)):
            load = {"shared": shared, "grouped": grouped, "churn": churn, "depth": depth}
            names = {router.ask(**load) for router in routers.values()}
            turns = alternate(options.router_rounds, sides)
            rounds = [{side: {"µs": one} for side, one in found.items()} for found in turns]
            results |= {name: compared(rounds)["µs"] for name in names}
            save(results)
    finally:
        for router in routers.values():
            router.end()


def print_compared(results: Results) -> None:
    """Prints a table of all figures."""
    tables = {f"{num} clients": own["times_ms"] for num, own in results.get("http", {}).items()}
    tables |= {name: own["times_ms"] for name, own in results.get("cells", {}).items()}
    tables |= {name: results[name] for name in ("start", "router_step") if name in results}
    rows = [
        [f"{table}: {name}", *(Spread(**own[side]).text(".3f") for side in ("old", "new", "ratio"))]
        for table, figures in tables.items()
        for name, own in figures.items()
    ]
    print_table(["", "old", "new", "new / old"], rows)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("old", type=Path)
    made.add_argument("new", type=Path)
    made.add_argument("--model", default=DEFAULT_MODEL)
    made.add_argument("--concurrency", type=int, nargs="+", default=[1], help="numbers of clients")
    made.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    made.add_argument("--output", type=int, default=128, help="tokens of each answer")
    made.add_argument("--rounds", type=int, default=7, help="of each number of clients; 0: no HTTP")
    made.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], default=[], metavar="CELL")
    made.add_argument("--cell-rounds", type=int, default=3, help="of each cell")
    made.add_argument("--traces", type=Path, help="folder with the two files of Azure's trace, for --cells")
    made.add_argument(
        "--saturation", type=float, default=20.0, help="requests a second, of which cells have a share"
    )
    made.add_argument("--seconds", type=float, default=20.0, help="in which the requests of a cell arrive")
    made.add_argument("--max-length", type=int, default=16_384, help="most tokens of a cell's requests")
    made.add_argument("--starts", type=int, default=3, help="of each tree")
    made.add_argument("--router-rounds", type=int, default=0, help="turns of each load of the router's step")
    made.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "lightkv-alternate",
        help="folder of the compiled kernels, which kernels/alternate.py has too",
    )
    options = parse_with_serve(made, None)
    if options.cells and options.traces is None:
        refuse("cells have the lengths of Azure's trace; give its folder by --traces")
    print_machine()
    cache = options.cache.resolve()
    trees = {side: Tree(getattr(options, side), cache / side) for side in ("old", "new")}
    arguments = [options.model, *options.serve]
    names = (
        "concurrency",
        "prompt",
        "output",
        "rounds",
        "cells",
        "cell_rounds",
        "saturation",
        "seconds",
        "max_length",
        "serve",
    )
    settings: Results = {name: getattr(options, name) for name in names}
    settings |= {side: tree.folder.name for side, tree in trees.items()} | {"model": Path(options.model).name}
    results: Results = {"settings": settings}

    def save(part: str, figures: Results) -> None:
        results[part] = figures
        save_json("alternate_service", results, options.out)

    try:
        if options.rounds or options.cells:
            with ExitStack() as stack:
                servers = {side: stack.enter_context(tree.server(arguments)) for side, tree in trees.items()}
                endpoints = {side: Endpoint(own.url, None, ANSWER_SECONDS) for side, own in servers.items()}
                for endpoint in endpoints.values():
                    settle(endpoint)
                if options.rounds:
                    measure_http(endpoints, options, partial(save, "http"))
                if options.cells:
                    measure_cells(endpoints, options, partial(save, "cells"))
        if options.starts:
            measure_starts(trees, arguments, options, partial(save, "start"))
        if options.router_rounds:
            measure_router(trees, options, partial(save, "router_step"))
    except (ServerFailed, RequestFailed) as error:
        refuse(str(error))
    print_compared(results)
    print_json("alternate_service", results, options.out)


if __name__ == "__main__":
    main()
