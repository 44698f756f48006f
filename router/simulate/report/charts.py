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

from lightkv.router.simulate.result import Curve, SimulationResult

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


class Line(NamedTuple):
    """Means over intervals of `width` seconds, of which the last one ends after `seconds`."""

    name: str
    width: float
    seconds: float
    values: Sequence[float] | np.ndarray

    def stairs(self, axes: Axes, unit: float, **looks: Any) -> None:
        """Draws the line, with a step at each interval. `unit`: the seconds of a unit of the axis."""
        ends = self.width * np.arange(len(self.values) + 1)
        ends[-1] = min(max(self.seconds, ends[-2]), ends[-1])
        axes.stairs(self.values, ends / unit, **{"label": self.name, "baseline": None, **looks})


def over_time(result: SimulationResult) -> list[Chart]:
    """Draws memory and requests over time."""
    series, seconds = result.series, result.figures.seconds
    numbers = (("in flight", series.running), ("waiting", series.waiting))
    lines = [Line(name, series.width, seconds, values) for name, values in numbers]
    return [memory(result), counts("Requests", lines)]


def memory(result: SimulationResult) -> Chart:
    """Draws the slots that are used, wasted and cached, below what is promised and the capacity."""
    f, series = result.figures, result.series
    unit = "slots" if result.settings.get("layers") else "tokens"
    words = (
        f"{unit.capitalize()} of the pool's {series.capacity:,} over {duration(f.seconds)}. Means while "
        f"loaded: {f.memory_used_share:.1%} used, {f.memory_padding_share:.2%} waste, "
        f"{f.memory_cached_share:.1%} cached; at most {f.peak_held_share:.1%} held."
    )
    is_reserved = result.settings["allocation"] == "contiguous"
    waste = "waste: reserved, without a token" if is_reserved else "waste: ends of pages"

    def draw(axes: Axes) -> None:
        clock, below = _clock(axes, f.seconds), np.zeros(len(series.used))

        def line(name: str, values: Sequence[float] | np.ndarray, **looks: Any) -> None:
            Line(name, series.width, f.seconds, values).stairs(axes, clock, **looks)

        parts = (
            ("used", series.used, "C0"),
            (waste, series.padding, "C1"),
            ("cached", series.cached, "0.75"),
        )
        for name, values, colour in parts:
            if any(values):
                line(name, below + values, baseline=below, fill=True, color=colour, alpha=0.6)
                below = below + values
        line("held", np.add(series.used, series.padding), color="C0")
        if any(series.promised):
            line("promised to guaranteed requests", series.promised, color="C3")
        _level(axes, series.capacity, "capacity")
        axes.set(ylim=(0, 1.05 * series.capacity), ylabel=unit)
        axes.yaxis.set_major_formatter(EngFormatter())

    return _chart("Memory", words, draw if series.used else None)


def counts(title: str, lines: Sequence[Line], most: float | None = None) -> Chart:
    """Draws numbers of requests over time. `most`: 1 for shares of the capacity instead."""
    drawn = [line for line in lines if len(line.values)]
    form, unit = (",.0f", "requests") if most is None else (".1%", "of the capacity")
    words = "; ".join(f"{line.name}: {max(line.values):{form}} at most" for line in drawn)

    def draw(axes: Axes) -> None:
        clock = _clock(axes, max(line.seconds for line in drawn))
        for number, line in enumerate(drawn):
            line.stairs(axes, clock, **_look(number))
        if most is not None:
            _level(axes, most, "capacity")
        axes.set(ylim=(0, most and 1.05 * most), ylabel=unit)
        axes.yaxis.set_major_formatter(EngFormatter() if most is None else PercentFormatter(most))

    return _chart(title, f"Over time, {unit}. {words}.", draw if drawn else None)


def latencies(results: Sequence[SimulationResult], names: Sequence[str]) -> list[Chart]:
    """Draws the quantiles of TTFT and of TPOT, with their targets."""
    targets = results[0].settings
    return [
        _quantiles(
            "Time to the first token (TTFT)", names, [r.ttft for r in results], targets["ttft_target"]
        ),
        _quantiles(
            "Time per token after it (TPOT)", names, [r.tpot for r in results], targets["tpot_target"]
        ),
    ]


def _quantiles(title: str, names: Sequence[str], curves: Sequence[Curve], target: float) -> Chart:
    drawn = [(name, curve) for name, curve in zip(names, curves, strict=True) if any(curve.seconds)]

    def draw(axes: Axes) -> None:
        for number, (name, curve) in enumerate(drawn):
            axes.plot(list(map(_nines, curve.quantiles)), curve.seconds, **_look(number), label=name)
        _level(axes, target, f"target {in_seconds(target)}")
        axes.set_xticks(list(map(_nines, _QUANTILES.values())), list(_QUANTILES))
        axes.set(yscale="log", xlim=(0, _MOST_NINES), xlabel="per cent of requests")
        axes.yaxis.set_major_formatter(EngFormatter("s"))

    words = f"Seconds by quantile; target {in_seconds(target)}."
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


def _level(axes: Axes, value: float, name: str) -> None:
    axes.axhline(value, color="black", linestyle="--", linewidth=1, label=name)


def _clock(axes: Axes, longest: float) -> float:
    """Names the axis of time for the longest of some times. Returns the seconds of its unit."""
    size, unit = next((size, unit) for least, size, unit in _UNITS if longest >= least)
    axes.set(xlim=(0, longest / size or None), xlabel=f"{unit} of the simulated clock")
    return size


def in_seconds(value: float) -> str:
    """Formats a latency in a suitable unit."""
    return EngFormatter("s")(float(f"{value:.3g}"))


def duration(value: float) -> str:
    """Formats a span of time in a suitable unit."""
    if value < 1:
        return in_seconds(value)
    size, unit = next((size, unit) for least, size, unit in _UNITS if value >= least)
    return f"{value / size:.1f} {unit}"
