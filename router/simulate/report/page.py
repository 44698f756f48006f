"""The report of one simulation, or of several to compare: one HTML page that loads no other file.

The same results give the same bytes. `page.html.jinja` has the tags of the page and escapes all texts, and
matplotlib escapes those of the charts. The page has no script, and its Content-Security-Policy lets it load
nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from lightkv import __version__
from lightkv.router.simulate.result import Series, SimulationResult
from lightkv.router.simulate.sweep import Repeats, repeats_of

from .charts import Chart, Line, counts, duration, latencies, memory, over_time
from .tables import (
    POLICY,
    Table,
    all_figures,
    differing,
    labels,
    policies,
    replica_table,
    settings,
    summary_table,
)

TEMPLATE_FILE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Part:
    """A section of the page."""

    title: str
    paragraphs: Sequence[str] = ()
    warning: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def render(results: Sequence[SimulationResult]) -> str:
    """Renders the page, with the results of several seeds as one policy. Raises ValueError without a result."""
    if not results:
        raise ValueError("no result; give at least one")
    groups = repeats_of(results)
    results = [group.mean for group in groups]
    names = labels(results)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))
    if len(results) == 1:
        title = f"{results[0].settings['trace']}: {names[0]}"
        parts = _one(groups[0])
    else:
        traces = sorted({str(result.settings["trace"]) for result in results})
        title = f"{', '.join(traces)}: {len(results)} simulations"
        parts = _several(groups, names)
    return template.render(title=title, parts=list(parts), version=__version__) + "\n"


# --------------------------------------------------------------------------------
# The parts of the page


def _one(group: Repeats) -> Iterator[Part]:
    result = group.mean
    yield Part("In short", (_seeds([group]),), tables=(summary_table(result),))
    yield Part("Memory and requests over time", _means(result), charts=over_time(result))
    yield Part("Latencies", (_QUANTILES,), charts=latencies([result], [""]))
    yield from _replicas(result)
    yield Part("Policy", tables=policies([group], labels([result]), comparable=False))
    yield from _last_parts([group], ["value"])


def _several(groups: Sequence[Repeats], names: Sequence[str]) -> Iterator[Part]:
    results = [group.mean for group in groups]
    others = [key for key in differing(results) if key not in POLICY]
    if any(result.step_time != results[0].step_time for result in results) and "step_time" not in others:
        others.append("step_time")
    warning = ""
    if others:
        warning = (
            f"These results differ in more than the policy: {', '.join(others)}. The best one is not marked, "
            "because these settings may cause the differences."
        )
    yield Part(
        "In short",
        (_seeds(groups),),
        warning,
        tables=policies(groups, names, comparable=not others),
    )

    def lines(values: Callable[[Series], list[float]]) -> list[Line]:
        pairs = zip(names, results, strict=True)
        return [Line(name, r.series.width, r.figures.seconds, values(r.series)) for name, r in pairs]

    yield Part(
        "Memory and requests over time",
        ("Each point is the mean over an interval of the simulated clock." + _uncounted(results),),
        charts=(
            counts("Memory held", lines(_held_shares), most=1.0),
            counts("Requests in flight", lines(lambda series: series.running)),
            counts("Requests waiting", lines(lambda series: series.waiting)),
        ),
    )
    yield Part("Latencies", (_QUANTILES,), charts=latencies(results, names))
    for name, result in zip(names, results, strict=True):
        yield Part(name, _means(result), charts=over_time(result), tables=(summary_table(result),))
        yield from _replicas(result)
    yield from _last_parts(groups, names)


def _held_shares(series: Series) -> list[float]:
    return [(a + b) / series.capacity for a, b in zip(series.used, series.padding, strict=True)]


def _replicas(result: SimulationResult) -> Iterator[Part]:
    """Yields the part of a result with several replicas: their table, and the memory of each over time."""
    if not result.replicas:
        return
    names = [f"replica {number}" for number in range(len(result.replicas))]
    waiting = [
        Line(name, series.width, result.figures.seconds, series.waiting)
        for name, series in zip(names, result.each, strict=False)
    ]
    charts = [
        counts("Requests waiting", waiting),
        *(
            memory(f"Memory of {name}", replace(result, figures=figures), series)
            for name, figures, series in zip(names, result.replicas, result.each, strict=False)
        ),
    ]
    yield Part("Replicas", charts=charts if result.each else (), tables=(replica_table(result),))


def _last_parts(groups: Sequence[Repeats], columns: Sequence[str]) -> Iterator[Part]:
    results = [group.mean for group in groups]
    yield Part("What is left out", _LEFT_OUT + _of_given_step_times(results))
    yield Part("Settings", tables=(settings(results, columns),))
    words = "As in the JSON line: seconds are of the simulated clock, shares are of 1."
    yield Part("Every figure", (words,), tables=(all_figures(groups, columns),))


# --------------------------------------------------------------------------------
# Words

_QUANTILES = (
    "A point gives the per cent of the requests that took at most this time. The horizontal axis gives each "
    "nine (90, 99, 99.9) the same width, to show the slowest requests. The target is dashed."
)


_LEFT_OUT = (
    "What a page costs or saves in attention: every allocation has the times of one step-time model, whose "
    "default was fitted to attention over single tokens. Kernels over pages may take less or more time; "
    "docs/measured.md compares some. So a difference between allocations comes from memory alone.",
    "Also left out: the tokenizer, HTTP and the other processes, and everything "
    "about the device's memory except its counts. Contiguous runs have no gaps here, as real ones do.",
)


def _seeds(groups: Sequence[Repeats]) -> str:
    """Says over which seeds the figures are means, and what charts show."""
    if all(len(group.results) == 1 for group in groups):
        return (
            "Each figure is of one seed, and close ones may change places under another: --seeds 5 shows how "
            "far they spread."
        )
    seeds = list(dict.fromkeys(seed for group in groups for seed in group.seeds))
    return (
        f"Figures are means over the seeds {', '.join(map(str, seeds))}, and below them stand the least and "
        "the greatest. Charts and settings are of the first seed."
    )


def _means(result: SimulationResult) -> tuple[str]:
    words = (
        f"Each point is the mean over an interval of the simulated clock ({duration(result.series.width)}). "
        "Shares of memory are means until the last admission."
    )
    return (words + _uncounted([result]),)


def _uncounted(results: Sequence[SimulationResult]) -> str:
    if all(result.figures.offered_rate for result in results):
        return ""
    return " If all requests wait from the start, only the next ones are counted as waiting."


def _of_given_step_times(results: Sequence[SimulationResult]) -> tuple[str, ...]:
    if all(set(result.step_time.get("source") or ()) == {"given"} for result in results):
        return (
            "The parameters of step times were given by hand, so how well they fit a device is not known.",
        )
    return ()
