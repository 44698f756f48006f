"""The command `lightkv simulate`, which runs a trace through the engine with a model of the device's step
times, and `lightkv simulate-report`, which draws the results.

Figures go to standard output, and its last line is one JSON object with all of them; progress goes to standard
error.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from lightkv.errors import LightKVError, require_packages
from lightkv.router.simulate.config import SimulationConfig
from lightkv.router.terminal import say

from .options import examples, takes_simulations
from .output_file import UnwritableFile, check_writable

if TYPE_CHECKING:
    from lightkv.router.simulate.result import SimulationResult

_EXAMPLES = (
    "lightkv simulate",
    "lightkv simulate sharegpt --load 1.3 --admission quantile",
    "lightkv simulate AzureLLMInferenceTrace_conv.csv --allocation paged:16 --admission watermark",
    "lightkv simulate chat --rate inf --requests 20000 --out chat.json",
    "lightkv simulate chat --load 1.3 --admission timely --report timely.html",
    "lightkv simulate mine.csv --allocation token,paged:16,paged:48 --seeds 5 --report pages.html",
    "lightkv simulate chat --replicas 4 --routing least-tokens",
    "lightkv simulate mooncake_conversation_trace.jsonl --time-unit ms | tail -1 | jq .goodput",
)
_REPORT_EXAMPLES = (
    "lightkv simulate chat --load 1.3 --admission timely --out timely.json",
    "lightkv simulate chat --load 1.3 --admission watermark --out watermark.json",
    "lightkv simulate-report timely.json watermark.json --report policies.html",
)


class UnreadableResult(LightKVError, ValueError):
    """The file does not hold the result of a simulation."""


def add_simulate_commands(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command(epilog=examples(*_EXAMPLES))(takes_simulations(simulate))
    app.command(epilog=examples(*_REPORT_EXAMPLES))(simulate_report)


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A trace file: a CSV with arrival_seconds, prompt_tokens and output_tokens "
            "(docs/simulator.md), or as published by Azure, Mooncake (.jsonl) or sarathi-serve (ShareGPT's "
            "lengths). Or the name of a generated workload: azure-conv, azure-code, sharegpt, mooncake, "
            "decode-heavy, prefill-heavy, chat.",
        ),
    ] = "azure-conv",
    *,
    out: Annotated[
        Path | None, typer.Option(help="Write the whole result to this file: figures, series, curves.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a report to this file: one self-contained HTML page with charts."),
    ] = None,
    series: Annotated[
        Path | None,
        typer.Option(help="Write memory and requests over time to this file, as CSV."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="Simulate with so many seeds, from --seed on, and show the spread.", min=1)
    ] = 1,
    configs: tuple[SimulationConfig, ...],
) -> None:
    """Run a trace through the real scheduler, admission and ledger, on a simulated device.

    Nothing is downloaded and no GPU is needed. The time of a step comes from a model fitted to measurements
    (--step-time), for single tokens: what a page costs or saves in attention is left out. The last line printed
    is one JSON object with every figure; of several simulations it has a list of these, as "runs".
    """
    from lightkv.router.simulate.report.tables import summary
    from lightkv.router.simulate.result import encode_all, series_csv
    from lightkv.router.simulate.simulator import num_requests
    from lightkv.router.simulate.sweep import sweep

    notes = Console(stderr=True, highlight=False)
    files = {"--out": out, "--report": report, "--series": series}
    _check_files({option: path for option, path in files.items() if path is not None})
    if report is not None:
        require_packages("--report", "report", "matplotlib")
    begun = time.perf_counter()
    try:
        with _bar(notes, num_requests(trace, configs[0])) as progress:
            results = sweep(trace, configs, seeds, progress)
        if out is not None:
            out.write_bytes(encode_all(results))
        if report is not None:
            _write_report(report, results)
        if series is not None:
            series.write_bytes(series_csv(results).encode())
    except OSError as error:
        say(notes, f"lightkv: {error.filename}: {error.strerror}")
        raise typer.Exit(2) from None
    rows = (f"{name:<14}{words}" for name, words in summary(results[0]).items())
    for line in rows if len(results) == 1 else comparison(results):
        typer.echo(line)
    for line in per_replica(results):
        typer.echo(line)
    finished = sum(result.figures.num_finished for result in results)
    say(notes, f"{finished:,} requests in {time.perf_counter() - begun:.1f} s")
    lines = [result.line() for result in results]
    typer.echo(lines[0] if len(lines) == 1 else f'{{"runs":[{",".join(lines)}]}}')


def _check_files(files: dict[str, Path]) -> None:
    """Raises UnwritableFile for a file that cannot be written, and for one that two options name."""
    options: dict[str, str] = {}
    for option, path in files.items():
        other = options.setdefault(realpath(path), option)
        if other != option:
            raise UnwritableFile(f"{other} and {option} are both {path}; give two files")
    for option, path in files.items():
        check_writable(path, option)


def simulate_report(
    results: Annotated[
        list[Path],
        typer.Argument(help="Files written by lightkv simulate --out.", metavar="RESULT", show_default=False),
    ],
    report: Annotated[
        Path,
        typer.Option(help="Write the report to this file: one self-contained HTML page with charts."),
    ],
) -> None:
    """Draw a report of earlier simulations: of one, or of several to compare their policies."""
    notes = Console(stderr=True, highlight=False)
    check_writable(report, "--report")
    require_packages("--report", "report", "matplotlib")
    if realpath(report) in map(realpath, results):
        raise UnwritableFile(f"--report {report} is one of the results; give another file")
    try:
        loaded = [result for path in results for result in _load(path)]
        _write_report(report, loaded)
    except OSError as error:
        say(notes, f"lightkv: {error.filename}: {error.strerror}")
        raise typer.Exit(2) from None
    say(notes, f"{len(loaded)} result{'s' if len(loaded) != 1 else ''} drawn in {report}")


def _load(path: Path) -> "list[SimulationResult]":
    from lightkv.router.simulate.result import load_all

    try:
        return load_all(path)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableResult(f"{path}: {error}; give a file that lightkv simulate --out wrote") from None


def _write_report(path: Path, results: "Sequence[SimulationResult]") -> None:
    from lightkv.router.simulate.report.page import render

    path.write_bytes(render(results).encode())


# The columns of a comparison: heading, field of `Figures`, factor, format.
_COLUMNS = (
    ("goodput/s", "goodput", 1.0, ".2f"),
    ("served/s", "served_rate", 1.0, ".2f"),
    ("first p99 s", "ttft_p99", 1.0, ".2f"),
    ("token p99 ms", "tpot_p99", 1e3, ".1f"),
    ("used %", "memory_used_share", 100.0, ".1f"),
    ("padding %", "memory_padding_share", 100.0, ".2f"),
    ("preempted %", "preempted_share", 100.0, ".2f"),
)
_LEFT_OUT = "left out: what a page costs or saves in attention, so all have the step times of single tokens"


def comparison(results: "Sequence[SimulationResult]") -> Iterator[str]:
    """Yields a table with a row for each policy: means over the seeds, and below them the extremes."""
    from lightkv.router.simulate.report.tables import labels
    from lightkv.router.simulate.sweep import repeats_of

    groups = repeats_of(results)
    rows = [["policy", *(heading for heading, *_ in _COLUMNS)]]
    for group, name in zip(groups, labels([group.mean for group in groups]), strict=True):
        mean, spread = [name], [f"  seeds {group.seeds[0]} to {group.seeds[-1]}"]
        for _, field, factor, form in _COLUMNS:
            value = attrgetter(field)
            mean.append(format(factor * value(group.mean.figures), form))
            low, high = group.spread(value)
            spread.append(f"{factor * low:{form}}-{factor * high:{form}}")
        rows += [mean, spread] if len(group.results) > 1 else [mean]
    yield from _aligned(rows)
    if len(groups) == len(results):
        yield "one seed: --seeds 5 shows how far these figures spread"
    yield _LEFT_OUT


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """Yields the rows of a table as lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        yield "  ".join(
            [name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]
        )


def per_replica(results: "Sequence[SimulationResult]") -> Iterator[str]:
    """Yields a table of each result with several replicas: a row for each of them, and one for all."""
    from lightkv.router.simulate.report.tables import replica_table

    for result in results:
        if result.replicas:
            table = replica_table(result)
            yield from _aligned([
                [table.caption, *table.columns[1:]],
                *([name, *(cell.text for cell in cells)] for name, cells in table.rows),
            ])  # fmt: skip


@contextmanager
def _bar(notes: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """Shows a progress bar on standard error, if that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bars:
        task = bars.add_task("simulating", total=total)

        def report(what: str, done: int) -> None:
            bars.update(task, description=what, completed=done)

        yield report
    sys.stderr.flush()
