"""Compares rules of admission by simulation, below and above the rate at which an oracle saturates.

    python -m bench.trace.admission_rules --cells FILE --traces DIRECTORY --processes 2

A cell is one simulation: a workload, a load, a policy and a seed. Its figures are appended to FILE as one line
of JSON, and a run leaves out the cells that FILE has already, so that it can be stopped and go on. The table
has the means over all seeds in FILE:

    in time      share of the requests with the first token within 10 s and at most 100 ms a token after it, and
                 the ratio to the better of `quantile` and `watermark`
    first token  99th percentile in seconds, and the ratio to the shorter of the same two
    preempted    share of the requests that were preempted at least once, and the most times that one was
    again        tokens that were computed again, as a share of the prompt and output tokens that were computed
    guaranteed   share of the running requests that are never preempted, and how many of them were all the same

Without --traces, generated workloads have the lengths of the published traces. Sessions are generated: each
turn continues the prompts and answers before it, as in `bench.serving.lifelike_cells`.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.common.report import parser, print_json, print_machine, print_table
from bench.serving.lifelike_cells import ANSWER, NUM_TURNS, OPENING, PAUSE, TOOL, WORDS
from bench.trace.simulate import FILES, trace_of
from lightkv.router.simulate.config import SIMULATED_ADMISSIONS, SimulationConfig
from lightkv.router.simulate.simulator import saturation, simulate

LOADS = (0.7, 1.0, 1.3)
RIVALS = ("quantile", "watermark")
POLICIES = ("guaranteed", "provisional", "reserved", *RIVALS, "oracle")
SESSIONS = "sessions"
BLOCK = 16  # tokens of a block of the sessions' prompts
TURN_SECONDS_A_TOKEN = 0.03  # of an answer, after which the next turn's pause begins
SESSION_GAP = 1.0  # seconds between the first turns of two sessions, before a load stretches them

Cell = dict[str, Any]


class Workload(NamedTuple):
    """The requests of some cells. `trace`: a generated workload's name, or SESSIONS. `requests`: so many that a
    cell takes some 20 s. `stated`: the share of them that states `max_new`."""

    trace: str
    requests: int
    max_new: int = 4096
    stated: float = 1.0


WORKLOADS = {
    "chat, 4,096 stated": Workload("chat", 1500),
    "chat, 16,384 stated": Workload("chat", 1500, 16_384),
    "chat, half of them state 4,096": Workload("chat", 1500, stated=0.5),
    "Azure conversation": Workload("azure-conv", 1500),
    "sharegpt": Workload("sharegpt", 1500),
    "decode-heavy": Workload("decode-heavy", 500),
    "Mooncake conversation": Workload("mooncake", 1000),
    SESSIONS: Workload(SESSIONS, 1500),
}


def write_sessions(path: Path, seed: int, num: int) -> None:
    """Writes a trace of `num` requests of sessions with tools, in the order of their arrival."""
    rng = random.Random(f"{SESSIONS} {seed}")
    lines: list[tuple[float, int, int, list[int]]] = []
    blocks, begins = 0, 0.0
    while len(lines) < 2 * num:
        begins += rng.expovariate(1 / SESSION_GAP)
        at, prompt, ids = begins, 0, list[int]()
        for turn in range(rng.randint(*NUM_TURNS)):
            prompt += round((TOOL if turn else OPENING).draw(rng)) + round(WORDS.draw(rng))
            new = -(-prompt // BLOCK) - len(ids)
            ids = [*ids, *range(blocks, blocks + new)]
            blocks += new
            output = round(ANSWER.draw(rng))
            lines.append((at, prompt, output, ids))
            at += output * TURN_SECONDS_A_TOKEN + PAUSE.draw(rng)
            prompt += output
            ids = ids[: lines[-1][1] // BLOCK]  # the block in which the answer begins is another one then
    names = ("arrival_seconds", "prompt_tokens", "output_tokens", "hash_ids")
    text = [json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in sorted(lines)[:num]]
    path.write_text("".join(text))


class Runner:
    """Simulates cells, and appends their figures to a file. `folder`: for generated traces."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder

    def run(self, groups: Iterable[tuple[str, int]]) -> None:
        """Simulates the cells of these workloads and seeds that the file lacks."""
        options = self._options
        for name, seed in groups:
            known = read_cells(options.cells)
            wanted = [(load, policy) for load in options.loads for policy in options.policies]
            wanted = [(load, policy) for load, policy in wanted if key(name, load, policy, seed) not in known]
            if not wanted:
                continue
            trace, config = self._config(name, seed)
            like = [cell for cell in known.values() if (cell["workload"], cell["seed"]) == (name, seed)]
            saturated = like[0]["saturation_rate"] if like else saturation(trace, config)
            config = replace(config, saturation=saturated)
            for load, policy in wanted:
                begun = time.process_time()
                found = simulate(trace, replace(config, load=load, admission=policy)).figures
                cell = {"workload": name, "policy": policy, "seed": seed,
                        "cpu_seconds": round(time.process_time() - begun, 1), **vars(found)}  # fmt: skip
                with options.cells.open("a") as file:
                    file.write(json.dumps(cell) + "\n")

    def _config(self, name: str, seed: int) -> tuple[str, SimulationConfig]:
        """Returns the name of a workload's trace, and the settings that all of its cells have."""
        workload, options = WORKLOADS[name], self._options
        config = SimulationConfig(
            capacity=options.capacity,
            requests=options.requests or workload.requests,
            max_new=workload.max_new,
            stated=workload.stated,
            seed=seed,
            skip_too_large=True,
        )
        if workload.trace == SESSIONS:
            path = self._folder / f"{SESSIONS}-{seed}.jsonl"
            write_sessions(path, seed, config.requests or workload.requests)
            return str(path), replace(config, block_tokens=BLOCK)
        if workload.trace not in FILES:
            return workload.trace, config
        if workload.trace == "mooncake" and options.traces is not None:
            config = replace(config, time_unit="ms")
        return trace_of(workload.trace, options.traces), config


def key(workload: str, load: float, policy: str, seed: int) -> str:
    return f"{workload} / {load} / {policy} / {seed}"


def read_cells(path: Path) -> dict[str, Cell]:
    """Returns the cells of a file by their `key`; none where there is no file."""
    cells = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {key(cell["workload"], cell["load"], cell["policy"], cell["seed"]): cell for cell in cells}


def means(cells: Sequence[Cell]) -> Cell:
    """Returns the figures of the table: the means of cells that differ in their seeds alone."""

    def mean(name: str) -> float:
        return fmean(cell[name] for cell in cells)

    computed = mean("prompt_tokens") - mean("hit_tokens") + mean("output_tokens")
    return {
        "in_time": mean("met_share"),
        "first_token_p99": mean("ttft_p99"),
        "preempted": mean("preempted_share"),
        "most_preemptions": max(cell["most_preemptions"] for cell in cells),
        "again": mean("recomputed_tokens") / computed,
        "guaranteed": mean("mean_guaranteed") / max(mean("mean_running"), 1e-9),
        "guaranteed_preempted": sum(cell["num_preempted_guaranteed"] for cell in cells),
        "seeds": len(cells),
    }


Table = dict[tuple[str, float], dict[str, Cell]]


def table_of(cells: Iterable[Cell], policies: Sequence[str]) -> Table:
    """Returns the means by workload and load, and there by policy."""
    found: dict[tuple[str, float], dict[str, list[Cell]]] = {}
    for cell in cells:
        if cell["policy"] in policies:
            by = found.setdefault((cell["workload"], cell["load"]), {})
            by.setdefault(cell["policy"], []).append(cell)
    order = list(WORKLOADS)
    return {
        place: {policy: means(by[policy]) for policy in policies if policy in by}
        for place, by in sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    }


def rows_of(table: Table) -> list[list[str]]:
    """Returns the rows of the printed table."""
    rows = []
    for (workload, load), by in table.items():
        rivals = [by[name] for name in RIVALS if name in by]
        in_time = max((rival["in_time"] for rival in rivals), default=0.0)
        first = min((rival["first_token_p99"] for rival in rivals), default=0.0)
        for policy, own in by.items():
            rows.append([
                f"{workload}, {load}", policy,
                f"{own['in_time']:.1%}", f"{own['in_time'] / in_time:.3f}" if in_time else "-",
                f"{own['first_token_p99']:.2f}",
                f"{own['first_token_p99'] / first:.2f}" if first else "-",
                f"{own['preempted']:.2%}", f"{own['most_preemptions']}", f"{own['again']:.2%}",
                f"{own['guaranteed']:.0%}", f"{own['guaranteed_preempted']}", f"{own['seeds']}",
            ])  # fmt: skip
    return rows


HEADER = ("workload, load", "policy", "in time", "of the best", "first token p99 s", "of the best", "preempted",
          "most", "again", "guaranteed", "preempted", "seeds")  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--cells", type=Path, required=True, help="the file of cells, which the run adds to")
    made.add_argument("--traces", type=Path, help=f"where these are: {', '.join(FILES.values())}")
    made.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS, metavar="NAME")
    made.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="NAME",
                      choices=SIMULATED_ADMISSIONS)  # fmt: skip
    made.add_argument("--loads", nargs="+", type=float, default=list(LOADS), metavar="LOAD")
    made.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    made.add_argument("--capacity", type=int, default=120_000)
    made.add_argument("--requests", type=int, help="of each cell; default: those of its workload")
    made.add_argument("--processes", type=int, default=1)
    return made.parse_args(argv)


def main() -> None:
    options = arguments()
    print_machine()
    options.cells.parent.mkdir(parents=True, exist_ok=True)
    groups = [(name, seed) for seed in options.seeds for name in options.workloads]
    with TemporaryDirectory() as folder:
        runner = Runner(options, Path(folder))
        shares = [groups[i :: options.processes] for i in range(options.processes)]
        others = [get_context("fork").Process(target=runner.run, args=(share,)) for share in shares[1:]]
        for process in others:
            process.start()
        runner.run(shares[0])
        for process in others:
            process.join()
    cells = read_cells(options.cells).values()
    table = table_of(cells, options.policies)
    print_table(HEADER, rows_of(table))
    found = [{"workload": workload, "load": load, "policies": by} for (workload, load), by in table.items()]
    print_json("admission_rules", found, options.out)


if __name__ == "__main__":
    main()
