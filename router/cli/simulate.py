"""The command `lightkv simulate`, which runs a trace through the engine with a model of the device's step
times.

Figures go to standard output, and its last line is one JSON object with all of them; progress goes to standard
error.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from lightkv.errors import require_packages
from lightkv.router.simulate.config import SimulationConfig
from lightkv.router.terminal import say

from .options import takes_simulations

if TYPE_CHECKING:
    from lightkv.router.simulate.report.tables import Table

EXAMPLES = (
    "lightkv simulate",
    "lightkv simulate sharegpt --load 1.3 --admission quantile",
    "lightkv simulate AzureLLMInferenceTrace_conv.csv --allocation paged:16 --admission watermark",
    "lightkv simulate chat --rate inf --requests 20000 --out chat.json",
    "lightkv simulate chat --load 1.3 --admission timely,watermark --report policies.html",
    "lightkv simulate mine.csv --allocation token,paged:16,paged:48 --seeds 5 --report pages.html",
    "lightkv simulate chat --replicas 4 --routing least-tokens",
    "lightkv simulate mooncake_conversation_trace.jsonl --time-unit ms | tail -1 | jq .goodput",
)
_LEFT_OUT = "left out: what a page costs or saves in attention, so all have the step times of single tokens"


@takes_simulations
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
    from lightkv.router.simulate.report.tables import policies, replica_table, summary
    from lightkv.router.simulate.result import encode_all
    from lightkv.router.simulate.simulator import num_requests
    from lightkv.router.simulate.sweep import sweep

    notes = Console(stderr=True, highlight=False)
    if report is not None:
        require_packages("--report", "report", "matplotlib")
    begun = time.perf_counter()
    try:
        for path in (out, report):
            if path is not None and not path.is_fifo():
                path.open("ab").close()  # a path where no file can be is refused before the work
        with _bar(notes, num_requests(trace, configs[0])) as progress:
            groups = sweep(trace, configs, seeds, progress)
        results = [result for group in groups for result in group.results]
        if out is not None:
            out.write_bytes(encode_all(results))
        if report is not None:
            from lightkv.router.simulate.report.page import render

            report.write_bytes(render(groups).encode())
    except OSError as error:
        say(notes, f"lightkv: {error.filename}: {error.strerror}")
        raise typer.Exit(2) from None
    if len(results) == 1:
        typer.echo("\n".join(f"{name:<14}{words}" for name, words in summary(results[0]).items()))
    else:
        tables = policies(groups)
        typer.echo("\n".join([line for table in tables for line in _lines(table)]))
        if seeds == 1:
            typer.echo("one seed: --seeds 5 shows how far these figures spread")
        typer.echo(_LEFT_OUT)
    for result in results:
        if result.replicas:
            typer.echo("\n".join(_lines(replica_table(result))))
    finished = sum(result.figures.num_finished for result in results)
    say(notes, f"{finished:,} requests in {time.perf_counter() - begun:.1f} s")
    lines = [result.line() for result in results]
    typer.echo(lines[0] if len(lines) == 1 else f'{{"runs":[{",".join(lines)}]}}')


def _lines(table: "Table") -> list[str]:
    """Returns a table as lines: its caption, then aligned columns, with a star before what is best."""
    rows = [[*table.columns]]
    for name, cells in table.rows:
        texts = [f"{'* ' * one.best}{one.text}{f' ({one.spread})' * bool(one.spread)}" for one in cells]
        rows.append([name, *texts])
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        table.caption,
        *("  ".join([name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in rows),
    ]


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
