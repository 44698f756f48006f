"""The command `lightkv simulate`: a trace through the engine's loop, with a step-time model for a device.

Knows typer and the terminal. Standard output has the figures, of which the last line is one JSON object with
all; progress goes to standard error.
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

from .simulation_config import SimulationConfig
from .terminal import say

if TYPE_CHECKING:
    from .simulation_result import SimulationResult

Takes = Callable[[Callable[..., None]], Callable[..., None]]

_EXAMPLES = (
    "lightkv simulate",
    "lightkv simulate sharegpt --load 1.3 --admission quantile",
    "lightkv simulate AzureLLMInferenceTrace_conv.csv --allocation paged:16 --admission watermark",
    "lightkv simulate chat --rate inf --requests 20000 --out chat.json",
    "lightkv simulate mooncake_conversation_trace.jsonl --capacity 1000000 | tail -1 | jq .goodput",
)


def add_simulate_command(app: typer.Typer, takes_simulation: Takes) -> None:
    """Add it to `app`. `takes_simulation` turns settings into options (`cli.py`)."""
    app.command(epilog="\n\n".join(("[bold]Examples[/]", *_EXAMPLES)))(takes_simulation(simulate))


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            help="A trace: a file as Azure, Mooncake (.jsonl) or sarathi-serve (ShareGPT's lengths) publish "
            "them; or a workload that is generated: azure-conv, azure-code, sharegpt, mooncake, decode-heavy, "
            "prefill-heavy, chat.",
        ),
    ] = "azure-conv",
    *,
    out: Annotated[
        Path | None, typer.Option(help="Write all of the result to this file: figures, series, curves.")
    ] = None,
    config: SimulationConfig,
) -> None:
    """Replay a trace through the real scheduler, admission and ledger, on a simulated device.

    Nothing is downloaded and no GPU is needed. How long a step takes is a model fitted to measurements
    (--step-time). The last line printed is one JSON object with every figure.
    """
    from .simulator import num_requests
    from .simulator import simulate as run

    notes = Console(stderr=True, highlight=False)
    begun = time.perf_counter()
    try:
        with _bar(notes, num_requests(trace, config)) as progress:
            result = run(trace, config, progress)
        if out is not None:
            out.write_bytes(result.to_json())
    except OSError as error:
        say(notes, f"lightkv: {error.filename}: {error.strerror}")
        raise typer.Exit(2) from None
    for line in summary(result):
        typer.echo(line)
    say(notes, f"{result.figures.num_finished:,} requests in {time.perf_counter() - begun:.1f} s")
    typer.echo(result.line())


def summary(result: "SimulationResult") -> Iterator[str]:
    """The figures that people look at first, a line each."""
    f = result.figures
    settings = result.settings
    arriving = "all at the start" if not f.offered_rate else f"{f.offered_rate:.2f} a second"
    load = f", {f.load:.2f} of saturation ({f.saturation_rate:.2f})" if f.load else ""
    targets = f"first token in {settings['ttft_target']:g} s, then {settings['tpot_target'] * 1e3:g} ms each"
    padding = f", {f.memory_padding_share:.2%} padding" if f.memory_padding_share else ""
    waste = f"; of a request's slots {f.last_page_waste_share:.2%} empty" if f.last_page_waste_share else ""
    rows = {
        "policy": f"{settings['allocation']}, {settings['admission']}; {settings['capacity']:,} tokens",
        "requests": f"{f.num_requests:,}, {arriving}{load}"
        + (f"; {f.num_skipped:,} too large" if f.num_skipped else ""),
        "served": f"{f.served_rate:.2f} requests a second while loaded, {f.output_rate:,.0f} tokens a second",
        "goodput": f"{f.goodput:.2f} requests a second, {f.met_share:.1%} of them ({targets})",
        "first token": f"p50 {f.ttft_p50:.2f} s, p90 {f.ttft_p90:.2f} s, p99 {f.ttft_p99:.2f} s",
        "per token": f"p50 {f.tpot_p50 * 1e3:.1f} ms, p90 {f.tpot_p90 * 1e3:.1f} ms, "
        f"p99 {f.tpot_p99 * 1e3:.1f} ms",
        "memory": f"{f.memory_used_share:.1%} used{padding}, {f.memory_cached_share:.1%} cached{waste}",
        "preempted": f"{f.num_preemptions:,} times, {f.preempted_share:.2%} of requests; "
        f"{f.recomputed_tokens:,} tokens computed again",
        "running": f"{f.mean_running:.0f} at once in the mean, {f.max_running} at most",
    }  # fmt: skip
    for name, value in rows.items():
        yield f"{name:<14}{value}"
    if result.step_time["source"].get("preliminary"):
        yield "              (the step-time model is preliminary: not yet fitted to a measurement of its own)"


@contextmanager
def _bar(notes: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on standard error; nothing where that is no terminal."""
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
