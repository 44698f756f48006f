"""The charts of simulations, which matplotlib draws as SVG: memory and requests over time, and latencies by
quantile."""

import html
import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from lightkv.router.simulate.result import Curve, Series, SimulationResult

# Texts stay texts, which are never read as formulas, and the same chart is the same bytes.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lightkv",
    "text.parse_math": False,
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SIZE = (5.6, 2.9)  # inches
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_MOST_NINES = 3.6  # the place of the maximum on the axis of quantiles, where 0.999 is at 3
_QUANTILES = {"0": 0.0, "50": 0.5, "90": 0.9, "99": 0.99, "99.9": 0.999, "max": 1.0}


class Chart(NamedTuple):
    """A chart: its title, what it shows in words, and its SVG, which is empty if there is nothing to draw."""

    title: str
    words: str
    svg: str = ""


def over_time(result: SimulationResult) -> list[Chart]:
    """Draws memory and requests over time."""
    series = result.series
    lines = [("in flight", series, series.running), ("waiting", series, series.waiting)]
    return [memory("Memory", result, series), counts("Requests", "requests", lines)]


def memory(title: str, result: SimulationResult, series: Series) -> Chart:
    """Draws the slots that are used, wasted and cached, below what is promised and the capacity."""
    f = result.figures
    unit = "slots" if result.settings.get("layers") else "tokens"
    words = (
        f"{unit.capitalize()} of the pool's {series.capacity:,} over {duration(f.seconds)}. Means while "
        f"loaded: {f.memory_used_share:.1%} used, {f.memory_padding_share:.2%} waste, "
        f"{f.memory_cached_share:.1%} cached; at most {f.peak_held_share:.1%} held."
    )
    is_reserved = result.settings["allocation"] == "contiguous"
    waste = "waste: reserved, without a token" if is_reserved else "waste: ends of pages"

    def draw(axes: Axes) -> None:
        places = _edges(series, f.seconds) / _clock(axes, [f.seconds])
        below = [0.0] * len(series.used)
        for label, values, colour in (
            ("used", series.used, "C0"),
            (waste, series.padding, "C1"),
            ("cached", series.cached, "0.75"),
        ):
            if not any(values):
                continue
            above = [low + value for low, value in zip(below, values, strict=True)]
            axes.stairs(above, places, baseline=below, fill=True, color=colour, alpha=0.6, label=label)
            below = above
        held = [used + empty for used, empty in zip(series.used, series.padding, strict=True)]
        axes.stairs(held, places, baseline=None, color="C0", label="held")
        if any(series.promised):
            axes.stairs(
                series.promised, places, baseline=None, color="C3", label="promised to guaranteed requests"
            )
        axes.axhline(series.capacity, color="black", linestyle="--", linewidth=1, label="capacity")
        axes.set(ylim=(0, 1.05 * series.capacity), ylabel=unit)
        axes.yaxis.set_major_formatter(EngFormatter())

    return _chart(title, words, draw if series.used else None)


def counts(title: str, unit: str, lines: Sequence[tuple[str, Series, Sequence[float]]]) -> Chart:
    """Draws numbers over time, each of a series by its name."""
    drawn = [line for line in lines if line[2]]
    words = "; ".join(f"{name}: {max(values):,.0f} at most" for name, _, values in drawn)

    def draw(axes: Axes) -> None:
        seconds = _clock(axes, [len(values) * series.width for _, series, values in drawn])
        for number, (name, series, values) in enumerate(drawn):
            places = _edges(series, len(values) * series.width) / seconds
            axes.stairs(values, places, baseline=None, **_look(number), label=name)
        axes.set(ylim=(0, None), ylabel=unit)
        axes.yaxis.set_major_formatter(EngFormatter())

    return _chart(title, f"Over time. {words}.", draw if drawn else None)


def shares(results: Sequence[SimulationResult], names: Sequence[str]) -> Chart:
    """Draws the share of the capacity that each simulation holds."""
    drawn = [(name, result) for name, result in zip(names, results, strict=True) if result.series.used]
    words = "; ".join(
        f"{name}: {r.figures.memory_held_share:.1%} on average while loaded" for name, r in drawn
    )

    def draw(axes: Axes) -> None:
        seconds = _clock(axes, [result.figures.seconds for _, result in drawn])
        for number, (name, result) in enumerate(drawn):
            series, places = result.series, _edges(result.series, result.figures.seconds) / seconds
            held = [(a + b) / series.capacity for a, b in zip(series.used, series.padding, strict=True)]
            axes.stairs(held, places, baseline=None, **_look(number), label=name)
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1, label="capacity")
        axes.set(ylim=(0, 1.05), ylabel="of the capacity")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    return _chart("Memory held", f"Share of the capacity over time. {words}.", draw if drawn else None)


def latencies(results: Sequence[SimulationResult], names: Sequence[str]) -> list[Chart]:
    """Draws the quantiles of TTFT and of TPOT, with their targets."""
    ttft = [(name, r.ttft, float(r.settings["ttft_target"])) for name, r in zip(names, results, strict=True)]
    tpot = [(name, r.tpot, float(r.settings["tpot_target"])) for name, r in zip(names, results, strict=True)]
    return [
        _quantiles("Time to the first token (TTFT)", ttft),
        _quantiles("Time per token after it (TPOT)", tpot),
    ]


def _quantiles(title: str, curves: Sequence[tuple[str, Curve, float]]) -> Chart:
    drawn = [one for one in curves if any(one[1].seconds)]
    targets = sorted({target for *_, target in curves})
    words = f"Seconds by quantile; target {' and '.join(map(in_seconds, targets))}."

    def draw(axes: Axes) -> None:
        for number, (name, curve, _) in enumerate(drawn):
            places = [_nines(quantile) for quantile in curve.quantiles]
            axes.plot(places, curve.seconds, **_look(number), label=name)
        for target in targets:
            label = f"target {in_seconds(target)}"
            axes.axhline(target, color="black", linestyle="--", linewidth=1, label=label)
        axes.set_xticks([_nines(quantile) for quantile in _QUANTILES.values()], list(_QUANTILES))
        axes.set(yscale="log", xlim=(0, _MOST_NINES), xlabel="per cent of requests")
        axes.yaxis.set_major_formatter(EngFormatter("s"))

    return _chart(title, words, draw if drawn else None)


def _nines(quantile: float) -> float:
    """Returns the place of a quantile on an axis on which each nine has the same width."""
    return -math.log10(1 - quantile) if quantile < 1 else _MOST_NINES


def _chart(title: str, words: str, draw: Callable[[Axes], None] | None) -> Chart:
    """Returns a chart that `draw` draws, or without it a chart that says that there is nothing to draw."""
    if draw is None:
        return Chart(title, "nothing to draw: no request got that far")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE)
        axes = figure.add_subplot()
        draw(axes)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
        out = io.StringIO()
        figure.savefig(out, format="svg", bbox_inches="tight", transparent=True, metadata=_NO_METADATA)
    svg = out.getvalue()
    begin = f'<svg role="img" aria-label="{html.escape(title)}"'
    return Chart(title, words, begin + svg[svg.index("<svg") + len("<svg") :])


def _look(number: int) -> dict[str, Any]:
    """Returns the colour and the dashes of a line by its number."""
    return {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}


def _clock(axes: Axes, seconds: Sequence[float]) -> float:
    """Names the axis of time for the longest of some times. Returns the seconds of its unit."""
    longest = max(seconds)
    size, unit = next((size, unit) for least, size, unit in _UNITS if longest >= least)
    axes.set(xlim=(0, longest / size or None), xlabel=f"{unit} of the simulated clock")
    return size


def _edges(series: Series, seconds: float) -> np.ndarray:
    """Returns the seconds at which the intervals of a series begin, and the end of the last one, which may be
    shorter: float [n + 1]."""
    starts = series.width * np.arange(len(series.used) + 1)
    starts[-1] = min(max(seconds, starts[-2]), starts[-1])
    return starts


def in_seconds(value: float) -> str:
    """Formats a latency in a suitable unit."""
    return EngFormatter("s")(float(f"{value:.3g}"))


def duration(value: float) -> str:
    """Formats a span of time in a suitable unit."""
    if value < 1:
        return in_seconds(value)
    size, unit = next((size, unit) for least, size, unit in _UNITS if value >= least)
    return f"{value / size:.1f} {unit}"
