"""The report of one simulation, or of several to compare: one HTML page that loads no other file.

The same results give the same bytes. `page.html.jinja` has every tag of the page, and escapes all texts. The
page has no script, and its Content-Security-Policy lets it load nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import jinja2

from lightkv import __version__
from lightkv.router.simulate.result import SimulationResult
from lightkv.router.simulate.sweep import Repeats, is_above, repeats_of

from .chart import HEIGHT, LEFT, PLOT_BOTTOM, PLOT_RIGHT, TOP, WIDTH, Chart
from .charts import counts, duration, in_seconds, latencies, over_time, shares
from .tables import Table, all_figures, in_words, policies, settings, source_of, split, step_times

TEMPLATE_FILE = Path(__file__).with_name("page.html.jinja")

# Results that differ only in these settings are compared.
POLICY = ("allocation", "admission", "patience", "reserve")


@dataclass(frozen=True)
class Part:
    """A section of the page."""

    title: str
    paragraphs: Sequence[str] = ()
    warning: str = ""
    tiles: Sequence[tuple[str, str, str]] = ()  # name, figure, comment
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
    box = {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": PLOT_RIGHT, "top": TOP, "bottom": PLOT_BOTTOM,
    }  # fmt: skip
    return template.render(title=title, parts=list(parts), box=box, version=__version__) + "\n"


def labels(results: Sequence[SimulationResult]) -> list[str]:
    """Names each result: by its policy, then by other settings that differ, then by a number, until all names
    are different."""
    names = [f"{result.settings['allocation']} · {result.settings['admission']}" for result in results]
    for key in _differing(results):
        if key not in POLICY[:2] and len(set(names)) < len(names):
            names = [
                f"{name}, {key} {in_words(result.settings.get(key))}"
                for name, result in zip(names, results, strict=True)
            ]
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    return names


def _differing(results: Sequence[SimulationResult]) -> list[str]:
    """Returns the settings that are not equal in all results."""
    keys = list(dict.fromkeys(key for result in results for key in result.settings))
    return [key for key in keys if any(r.settings.get(key) != results[0].settings.get(key) for r in results)]


# --------------------------------------------------------------------------------
# The parts


def _one(group: Repeats) -> Iterator[Part]:
    result = group.mean
    yield Part("In short", (*_summary(result), *_seeds([group])), tiles=_tiles(result))
    yield Part("Memory and requests over time", _means(result), charts=over_time(result))
    yield Part("Latencies", (_QUANTILES,), charts=latencies([result], [""]))
    yield Part("Policy", tables=policies([group], labels([result]), comparable=False))
    yield from _last_parts([group], ["value"])


def _several(groups: Sequence[Repeats], names: Sequence[str]) -> Iterator[Part]:
    results = [group.mean for group in groups]
    others = [key for key in _differing(results) if key not in POLICY]
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
        (*_comparison(groups, names, comparable=not others), *_seeds(groups)),
        warning,
        tables=_narrow(*policies(groups, names, comparable=not others)),
    )
    yield Part(
        "Memory and requests over time",
        ("Each point is the mean over an interval of the simulated clock." + _uncounted(results),),
        charts=(
            shares(results, names),
            counts(
                "Requests in flight", [(n, r, r.series.running) for n, r in zip(names, results, strict=True)]
            ),
            counts(
                "Requests waiting", [(n, r, r.series.waiting) for n, r in zip(names, results, strict=True)]
            ),
        ),
    )
    yield Part("Latencies", (_QUANTILES,), charts=latencies(results, names))
    for name, result in zip(names, results, strict=True):
        yield Part(name, (*_summary(result), *_means(result)), charts=over_time(result))
    yield from _last_parts(groups, names)


def _last_parts(groups: Sequence[Repeats], columns: Sequence[str]) -> Iterator[Part]:
    results = [group.mean for group in groups]
    yield Part("What is left out", _LEFT_OUT)
    yield Part("Step-time model", _step_time_words(results), tables=_narrow(step_times(results, columns)))
    yield Part("Settings", tables=_narrow(settings(results, columns)))
    words = "As in the JSON line: seconds are of the simulated clock, shares are of 1."
    yield Part("Every figure", (words,), tables=_narrow(all_figures(groups, columns)))


def _narrow(*tables: Table) -> tuple[Table, ...]:
    return tuple(part for table in tables for part in split(table))


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
    "Also left out: the tokenizer, HTTP and the other processes, the second step in flight, and everything "
    "about the device's memory except its counts. Contiguous runs have no gaps here, as real ones do.",
)


def _seeds(groups: Sequence[Repeats]) -> Iterator[str]:
    """Says over which seeds the figures are means, and what charts show."""
    if all(len(group.results) == 1 for group in groups):
        yield (
            "Each figure is of one seed, and close ones may change places under another: --seeds 5 shows how "
            "far they spread."
        )
        return
    seeds = list(dict.fromkeys(seed for group in groups for seed in group.seeds))
    yield (
        f"Figures are means over the seeds {', '.join(map(str, seeds))}, and below them stand the least and "
        "the greatest. Charts and settings are of the first seed."
    )


def _summary(result: SimulationResult) -> Iterator[str]:
    f = result.figures
    came = f"at {f.offered_rate:.2f} a second" if f.offered_rate else "all waiting at the start"
    came = f"{result.settings['trace']}: {_requests(f.num_requests)}, {came}"
    if f.load:
        came += f", {f.load:.2f} times the rate that an oracle serves ({f.saturation_rate:.2f} a second)"
    lost = f" {_requests(f.num_skipped)} more could never fit and were left out." if f.num_skipped else ""
    if f.num_cut:
        lost += f" {_were(f.num_cut, 'answer')} cut at max_new."
    yield (
        f"{came}. The last request ended after {duration(f.seconds)} of the simulated clock. Until the last "
        f"admission {f.served_rate:.2f} requests a second were served; over the whole time "
        f"{f.output_rate:,.0f} tokens a second were generated.{lost}"
    )
    ttft, tpot = _targets(result)
    yield (
        f"Goodput: {f.goodput:.2f} requests a second met both targets ({f.met_share:.1%} of the requests): "
        f"{_goal(result)}. 99% of the requests got their first token within {in_seconds(f.ttft_p99)} "
        f"({_within(f.ttft_p99, ttft)}), and 99% took at most {in_seconds(f.tpot_p99)} per token after it "
        f"({_within(f.tpot_p99, tpot)})."
    )
    memory = (
        f"Until the last admission {f.memory_used_share:.1%} of the memory held tokens of running requests"
    )
    if f.memory_padding_share:
        memory += f", {f.memory_padding_share:.2%} was {_empty(result)}"
    memory += (
        f", and {f.memory_cached_share:.1%} held cached prefixes. At most {f.peak_held_share:.1%} was held at "
        "once."
    )
    if f.hit_tokens:
        memory += (
            f" {f.hit_tokens:,} of {f.prompt_tokens:,} prompt tokens were found in the cache "
            f"({f.hit_tokens / max(f.prompt_tokens, 1):.1%})."
        )
    yield memory
    if not f.num_preemptions:
        yield "No request was preempted."
        return
    yield (
        f"{_were(f.num_preempted, 'request')} preempted ({f.preempted_share:.2%}), {_times(f.num_preemptions)} "
        f"in total; {f.recomputed_tokens:,} tokens had to be computed again."
    )


def _tiles(result: SimulationResult) -> list[tuple[str, str, str]]:
    f = result.figures
    ttft, tpot = _targets(result)
    return [
        ("goodput", f"{f.goodput:.2f} /s", f"{f.met_share:.1%} in time"),
        ("TTFT p99", in_seconds(f.ttft_p99), f"target {in_seconds(ttft)}"),
        ("TPOT p99", in_seconds(f.tpot_p99), f"target {in_seconds(tpot)}"),
        ("memory used", f"{f.memory_used_share:.1%}", f"{f.memory_padding_share:.2%} waste"),
        ("preemptions", f"{f.num_preemptions:,}", f"{f.preempted_share:.2%} of requests"),
    ]


def _comparison(groups: Sequence[Repeats], names: Sequence[str], comparable: bool) -> Iterator[str]:
    if not comparable:
        return
    results = [group.mean for group in groups]
    ordered = sorted(zip(groups, names, strict=True), key=lambda pair: -pair[0].mean.figures.goodput)
    (first, name), (last, last_name) = ordered[0], ordered[-1]
    f, lowest, goal = first.mean.figures, last.mean.figures, _goal(first.mean)
    if f.goodput == lowest.goodput:
        yield f"All have the same goodput: {f.goodput:.2f} requests a second met both targets ({goal})."
    elif not is_above(first, last, attrgetter("goodput")):
        yield (
            f"The order of the goodputs depends on the seed. Their means are from {lowest.goodput:.2f} "
            f"({last_name}) to {f.goodput:.2f} ({name}) requests a second that met both targets ({goal})."
        )
    else:
        yield (
            f"{name} has the highest goodput: {f.goodput:.2f} requests a second met both targets ({goal}). "
            f"{last_name} has the lowest: {lowest.goodput:.2f}, {lowest.goodput / f.goodput:.0%} of that."
        )
    close = [other for group, other in ordered[1:] if not is_above(first, group, attrgetter("goodput"))]
    if close and f.goodput != lowest.goodput and last_name not in close:
        yield f"With some seed it is no higher than that of {' and '.join(close)}."
    calm = [n for r, n in zip(results, names, strict=True) if not r.figures.num_preemptions]
    if len(calm) == len(results):
        yield "None of them preempted a request."
    else:
        worst, worst_name = max(zip(results, names, strict=True), key=lambda p: p[0].figures.num_preemptions)
        yield (
            f"No preemptions: {'; '.join(calm) or 'none of them'}. {worst_name} preempted most often: "
            f"{_times(worst.figures.num_preemptions)}, {worst.figures.preempted_share:.2%} of the requests."
        )
    used = sorted(zip(results, names, strict=True), key=lambda p: -p[0].figures.memory_used_share)
    yield (
        f"On average until the last admission, tokens of running requests filled from "
        f"{used[-1][0].figures.memory_used_share:.1%} of the memory ({used[-1][1]}) to "
        f"{used[0][0].figures.memory_used_share:.1%} ({used[0][1]})."
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


def _step_time_words(results: Sequence[SimulationResult]) -> tuple[str, ...]:
    words = "The time of a step is computed from these parameters; it was not measured in this run."
    if all(set(source_of(result)) == {"given"} for result in results):
        words += " The parameters were given by hand, so how well they fit a device is not known."
    return (words,)


def _targets(result: SimulationResult) -> tuple[float, float]:
    return result.settings["ttft_target"], result.settings["tpot_target"]


def _goal(result: SimulationResult) -> str:
    ttft, tpot = _targets(result)
    return (
        f"the first token within {in_seconds(ttft)}, and then on average at most {in_seconds(tpot)} per token"
    )


def _empty(result: SimulationResult) -> str:
    """Describes the slots that are held without a token."""
    if result.settings["allocation"] == "contiguous":
        return "reserved for tokens to come"
    return "lost at the ends of pages"


def _within(value: float, target: float) -> str:
    return "within the target" if value <= target else f"{value / target:.1f} times the target"


def _requests(num: int) -> str:
    return f"{num:,} request{'s' if num != 1 else ''}"


def _were(num: int, what: str) -> str:
    return f"{num:,} {what} was" if num == 1 else f"{num:,} {what}s were"


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num:,} times"
