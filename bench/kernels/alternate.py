"""Compares the speed of two trees on one GPU, in turns: old, new, new, old, and so on.

    python -m bench.kernels.alternate OLD NEW --out alternate.json
    python -m bench.kernels.alternate OLD NEW --rows "quantised: decode" write --times 9
    python -m bench.kernels.alternate OLD NEW --models              steps of models, and `generate`
    python -m bench.kernels.alternate OLD NEW --device cpu          only tries whether every row can be made

OLD and NEW are folders with a checkout each. A process of each tree makes a row (`alternate_rows.py`,
`alternate_models.py`), captures it as a CUDA graph, and replays it when it is its turn, with an empty L2 cache;
the other process waits then. Each tree makes its rows by its own benches. A tree compiles the kernels of all
rows first, many at a time, into a folder of its own, which a later run finds again (--cache).

The figure of a row is the median, over its turns, of the ratio of the new tree's time to the old one's. A row
is slower if this is above --limit, and so are the ratios of all turns but one. The exit status is 1 if a row is
slower, or failed in one tree. The outputs' mean absolute values are compared, too, and of decode steps of
models the greedy tokens: a row that computes something else is marked.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse

LIMITS = {"kernels": 1.01, "models": 1.03}
SAME = 1e-3  # the largest relative difference of outputs' means

Json = Any


class Failed(Exception):
    """Raised when a worker could not do what it was asked to."""


class Tree:
    """A process that times rows in one tree."""

    def __init__(self, folder: Path, cache: Path, device: str) -> None:
        cache.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"  # both processes are at work at the same time
        # -P: beside the worker's file are others whose names could hide those of packages.
        command = [sys.executable, "-P", str(Path(__file__).with_name("alternate_worker.py")), device]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.folder = folder

    def send(self, verb: str, *arguments: Json) -> None:
        """Sends a request, whose answer `receive` returns."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            refuse(f"the process of {self.folder} has ended with {self._process.wait()}")

    def receive(self) -> Json:
        """Waits for the answer of the oldest request. Raises Failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            refuse(f"the process of {self.folder} has ended with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer["answer"]

    def ask(self, verb: str, *arguments: Json) -> Json:
        """Returns the answer of a request. Raises Failed."""
        self.send(verb, *arguments)
        return self.receive()

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


class Trees(NamedTuple):
    """Both trees, which are asked at the same time where nothing is timed."""

    old: Tree
    new: Tree

    def ask(self, verb: str, *arguments: Json) -> tuple[Json, Json]:
        """Returns the answers of both; a Failed stands for the answer that it prevented."""
        answers: list[Json] = []
        for tree in self:
            tree.send(verb, *arguments)
        for tree in self:
            try:
                answers.append(tree.receive())
            except Failed as error:
                answers.append(error)
        return answers[0], answers[1]


def measure_side(trees: Trees, side: str, times: int) -> dict[str, Any]:
    """Times a side of the row that both trees have open, in turns."""
    turns: dict[str, list[float]] = {"old": [], "new": []}
    sides = {name: partial(getattr(trees, name).ask, "time", side) for name in turns}
    for found in alternate(times, sides):
        for name, took in found.items():
            turns[name].append(statistics.median(took))
    ratios = [new / old for old, new in zip(turns["old"], turns["new"], strict=True)]
    return {
        **{f"{name}_us": Spread.of(own)._asdict() for name, own in turns.items()},
        "ratio": Spread.of(ratios)._asdict(),
        "ratios": ratios,
    }


def is_slower(ratios: list[float], limit: float) -> bool:
    """Returns whether the median is above `limit`, and so are all turns but one."""
    least = max(1, len(ratios) - 1)
    return statistics.median(ratios) > limit and sum(ratio > limit for ratio in ratios) >= least


def differs(outputs: tuple[float | None, float | None]) -> bool:
    """Returns whether two outputs' mean absolute values are not the same up to rounding."""
    old, new = outputs
    if old is None or new is None:
        return old is not new
    return not abs(old - new) <= SAME * max(abs(old), abs(new))


def measure_row(trees: Trees, name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Measures every side of a row, and prints a line for each. Returns the figures by `row, side`."""
    outputs = trees.ask("open", name)
    failed = [
        f"{which}: {one}"
        for which, one in zip(("old", "new"), outputs, strict=True)
        if isinstance(one, Failed)
    ]
    found: dict[str, Any] = {}
    if failed or set(outputs[0]) != set(outputs[1]):
        found[name] = {"failed": "; ".join(failed) or f"sides {list(outputs[0])} and {list(outputs[1])}"}
        print(f"{name}: failed: {found[name]['failed']}", flush=True)
        return found
    for side in outputs[0]:
        both = outputs[0][side], outputs[1][side]
        label = f"{name}, {side}" if side else name
        if options.device == "cpu":
            found[label] = {}
            print(f"{label}: made", flush=True)
            continue
        try:
            found[label] = own = measure_side(trees, side, options.times)
        except Failed as error:
            found[label] = {"failed": str(error)}
            print(f"{label}: failed: {error}", flush=True)
            continue
        own |= {"outputs": both, "slower": is_slower(own["ratios"], limit), "differs": differs(both)}
        marks = "".join(f", {mark.upper()}" for mark in ("slower", "differs") if own[mark])
        texts = [Spread(**own[key]).text(".1f") for key in ("old_us", "new_us")]
        print(f"{label}: {texts[0]} → {texts[1]} µs, {Spread(**own['ratio']).text('.3f')}{marks}", flush=True)
    trees.ask("close")
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("old", type=Path)
    arguments.add_argument("new", type=Path)
    arguments.add_argument("--rows", nargs="+", default=[], help="only rows whose names contain one of these")
    arguments.add_argument("--models", action="store_true", help="rows of models, not of kernels")
    arguments.add_argument("--times", type=int, default=5, help="turns of each tree for a row")
    arguments.add_argument("--limit", type=float, help="the largest ratio; 1.01, and 1.03 with --models")
    arguments.add_argument("--compile", action="store_true", help="compile the kernels, and measure nothing")
    arguments.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "lightkv-alternate",
        help="folder of the compiled kernels",
    )
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = arguments.parse_args()
    kind = "models" if options.models else "kernels"
    print_machine()
    folders = options.old.resolve(), options.new.resolve()
    trees = Trees(
        *(
            Tree(folder, options.cache.resolve() / name, options.device)
            for folder, name in zip(folders, ("old", "new"), strict=True)
        )
    )
    try:
        results = measure(trees, kind, options)
    finally:
        for tree in trees:
            tree.end()
    print_json("alternate", results, options.out)
    rows = results["rows"].values()
    sys.exit(1 if any(own.get("slower") or "failed" in own for own in rows) else 0)


def measure(trees: Trees, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compiles and measures the rows that the options name."""
    known = trees.ask("names")
    for tree, names in zip(trees, known, strict=True):
        if isinstance(names, Failed):
            refuse(f"{tree.folder} has no rows: {names}")
    names = [
        name
        for name in known[0]
        if name.startswith("models:") == options.models
        and (not options.rows or any(text in name for text in options.rows))
    ]
    if not names:
        refuse(f"no row has one of {options.rows} in its name; there are {known[0]}")
    limit = options.limit or LIMITS[kind]
    settings = {"old": trees.old.folder.name, "new": trees.new.folder.name, "times": options.times}
    results: dict[str, Any] = {"settings": settings | {"limit": limit}, "rows": {}}
    begin = time.perf_counter()
    if kind == "kernels" and options.device == "cuda":
        for which, failed in zip(("old", "new"), trees.ask("compile", names), strict=True):
            results[f"not_compiled_{which}"] = failed if isinstance(failed, dict) else str(failed)
            print(f"{which}: not compiled ahead: {failed or 'nothing'}", flush=True)
        results["compile_seconds"] = time.perf_counter() - begin
        print(f"compiled in {results['compile_seconds']:.0f} s", flush=True)
    if options.compile:
        return results
    for name in names:
        results["rows"] |= measure_row(trees, name, options, limit)
    results["seconds"] = time.perf_counter() - begin
    print_summary(results["rows"], limit)
    return results


def print_summary(rows: dict[str, Any], limit: float) -> None:
    """Prints the rows that are slower, that failed and that compute something else, and how many are not."""
    table = []
    for name, own in rows.items():
        if "failed" in own:
            table.append([name, "failed", ""])
        elif own.get("slower") or own.get("differs"):
            marks = [mark for mark in ("slower", "differs") if own[mark]]
            table.append([name, ", ".join(marks), Spread(**own["ratio"]).text(".3f")])
    if table:
        print_table(["row", "what", "new / old"], table)
    print(f"{len(rows)} rows, {len(table)} of them slower than {limit:g}, different or failed", flush=True)


if __name__ == "__main__":
    main()
