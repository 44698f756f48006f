"""The report of one simulation, or of several to compare: one HTML page that loads no other file.

The same results give the same bytes. `page.html.jinja` has the tags of the page and escapes all texts, and
matplotlib escapes those of the charts. The page has no script, and its Content-Security-Policy lets it load
nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from lightkv import __version__
from lightkv.router.simulate.result import Series, SimulationResult
from lightkv.router.simulate.sweep import Repeats

from .charts import Chart, Line, counts, duration, latencies, over_time
from .tables import Table, policies, replica_table, settings, summary_table

TEMPLATE_FILE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Part:
    """A section of the page."""

    title: str
    paragraphs: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def render(groups: Sequence[Repeats]) -> str:
    """Renders the page of at least one policy, each with the results of its seeds."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))
    trace = groups[0].mean.settings["trace"]
    title = f"{trace}: {groups[0].name if len(groups) == 1 else f'{len(groups)} policies'}"
    return template.render(title=title, parts=list(_parts(groups)), version=__version__) + "\n"


# --------------------------------------------------------------------------------
# The parts of the page


def _parts(groups: Sequence[Repeats]) -> Iterator[Part]:
    names, results = [group.name for group in groups], [group.mean for group in groups]
    yield Part("In short", (_seeds(groups[0].seeds),), tables=policies(groups))
    if len(groups) > 1:
        yield Part(
            "Memory and requests over time",
            ("Each point is the mean over an interval of the simulated clock." + _uncounted(results[0]),),
            _compared(names, results),
        )
    yield Part("Latencies", (_QUANTILES,), latencies(results, names))
    for name, result in zip(names, results, strict=True):
        yield Part(name, (_means(result),), over_time(result), (summary_table(result),))
        if result.replicas:
            yield _replicas(result)
    yield Part("What is left out", _LEFT_OUT + _of_given_step_times(results[0]))
    yield Part("Settings", tables=(settings(results, names),))


def _compared(names: Sequence[str], results: Sequence[SimulationResult]) -> list[Chart]:
    """Draws the memory and the requests of all policies over time, each in one chart."""

    def lines(values: Callable[[Series], list[float]]) -> list[Line]:
        pairs = zip(names, results, strict=True)
        return [Line(name, r.series.width, r.figures.seconds, values(r.series)) for name, r in pairs]

    return [
        counts("Memory held", lines(_held_shares), most=1.0),
        counts("Requests in flight", lines(lambda series: series.running)),
        counts("Requests waiting", lines(lambda series: series.waiting)),
    ]


def _held_shares(series: Series) -> list[float]:
    return [(a + b) / series.capacity for a, b in zip(series.used, series.padding, strict=True)]


def _replicas(result: SimulationResult) -> Part:
    """Returns the part of a result with several replicas: their table, and the requests that wait for each."""
    waiting = [
        Line(f"replica {number}", series.width, result.figures.seconds, series.waiting)
        for number, series in enumerate(result.each)
    ]
    return Part("Replicas", charts=[counts("Requests waiting", waiting)], tables=(replica_table(result),))


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


def _seeds(seeds: Sequence[int]) -> str:
    """Says over which seeds the figures are means, and what charts show."""
    if len(seeds) == 1:
        return (
            "Each figure is of one seed, and close ones may change places under another: --seeds 5 shows how "
            "far they spread."
        )
    return (
        f"Figures are means over the seeds {', '.join(map(str, seeds))}, and below them stand the least and "
        "the greatest. Charts and settings are of the first seed."
    )


def _means(result: SimulationResult) -> str:
    words = (
        f"Each point is the mean over an interval of the simulated clock ({duration(result.series.width)}). "
        "Shares of memory are means until the last admission."
    )
    return words + _uncounted(result)


def _uncounted(result: SimulationResult) -> str:
    if result.figures.offered_rate:
        return ""
    return " If all requests wait from the start, only the next ones are counted as waiting."


def _of_given_step_times(result: SimulationResult) -> tuple[str, ...]:
    if set(result.step_time.get("source") or ()) == {"given"}:
        return (
            "The parameters of step times were given by hand, so how well they fit a device is not known.",
        )
    return ()
