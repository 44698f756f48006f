"""The charts of simulations: memory and requests over time, and latencies by quantile."""

from collections.abc import Sequence
from dataclasses import replace

from lightkv.router.simulate.result import Curve, SimulationResult

from .chart import (
    Chart,
    Mark,
    Scale,
    Tick,
    between,
    log_scale,
    nines,
    nines_ticks,
    polyline,
    steps,
    x_scale,
    y_scale,
)


def over_time(result: SimulationResult) -> tuple[Chart, Chart]:
    """Draws memory and requests over time, with a line at the last admission."""
    f, series = result.figures, result.series
    requests = counts(
        "Requests", [("in flight", result, series.running), ("waiting", result, series.waiting)]
    )
    memory = _memory(result)
    if memory.note or not 0 < f.loaded_seconds < f.seconds:
        return memory, requests
    admitted = (Tick(_clock([result])[0].at(f.loaded_seconds), "all admitted"),)
    return replace(memory, moments=admitted), replace(requests, moments=admitted)


def _memory(result: SimulationResult) -> Chart:
    """Draws used, wasted and cached slots, stacked under the capacity."""
    series, f = result.series, result.figures
    title, edges = "Memory", _edges(result)
    unit = "slots" if result.settings.get("layers") else "tokens"
    words = (
        f"{unit.capitalize()} of the pool's {series.capacity:,} over {duration(f.seconds)}. Means while "
        f"loaded: {f.memory_used_share:.1%} used, {f.memory_padding_share:.2%} waste, "
        f"{f.memory_cached_share:.1%} cached; at most {f.peak_held_share:.1%} held."
    )
    if not series.used:
        return _nothing(title)
    x, ticks, label = _clock([result])
    y = y_scale([series.capacity])
    nothing = [0.0] * len(series.used)
    held = [used + empty for used, empty in zip(series.used, series.padding, strict=True)]
    full = [a + b for a, b in zip(held, series.cached, strict=True)]
    areas = [Mark("used", between((x, y), edges, nothing, series.used), 0)]
    if any(series.padding):
        reserved = result.settings["allocation"] == "contiguous"
        waste = "waste: reserved, without a token" if reserved else "waste: ends of pages"
        areas.append(Mark(waste, between((x, y), edges, series.used, held), 1))
    if any(series.cached):
        areas.append(Mark("cached", between((x, y), edges, held, full), 7))
    lines = [Mark("held", steps((x, y), edges, held), 1 if any(series.padding) else 0)]
    capacity = Tick(y.at(series.capacity), f"capacity {_short(series.capacity)}")
    return Chart(
        title, words, label, unit, ticks, y.ticks(_short), areas, lines, (capacity,),
    )  # fmt: skip


def counts(title: str, lines: Sequence[tuple[str, SimulationResult, Sequence[float]]]) -> Chart:
    """Draws numbers of requests over time."""
    drawn = [(name, result, values) for name, result, values in lines if values]
    if not drawn:
        return _nothing(title)
    x, ticks, label = _clock([result for _, result, _ in drawn])
    y = y_scale([max(values) for _, _, values in drawn])
    words = "; ".join(f"{name}: {max(values):,.0f} at most" for name, _, values in drawn)
    marks = [
        Mark(name, steps((x, y), _edges(result), values), colour)
        for colour, (name, result, values) in enumerate(drawn)
    ]
    return Chart(
        title, f"Over time. {words}.", label, "requests", ticks, y.ticks(_short), lines=marks,
    )  # fmt: skip


def shares(results: Sequence[SimulationResult], names: Sequence[str]) -> Chart:
    """Draws the share of the capacity that each simulation holds."""
    title = "Memory held"
    drawn = [(number, r) for number, r in enumerate(results) if r.series.used]
    if not drawn:
        return _nothing(title)
    x, ticks, label = _clock([result for _, result in drawn])
    y = y_scale([1.0])
    marks = []
    for number, result in drawn:
        series = result.series
        held = [(a + b) / series.capacity for a, b in zip(series.used, series.padding, strict=True)]
        marks.append(Mark(names[number], steps((x, y), _edges(result), held), number))
    words = "; ".join(
        f"{names[i]}: {r.figures.memory_held_share:.1%} on average while loaded" for i, r in drawn
    )
    return Chart(
        title, f"Share of the capacity over time. {words}.", label, "of the capacity",
        ticks, y.ticks(lambda value: f"{value:.0%}"), lines=marks,
        levels=(Tick(y.at(1.0), "capacity"),),
    )  # fmt: skip


def latencies(results: Sequence[SimulationResult], names: Sequence[str]) -> tuple[Chart, Chart]:
    """Draws the quantiles of TTFT and of TPOT, with their targets."""
    ttft = [
        (r.ttft, r.figures.ttft_p50, r.figures.ttft_p99, float(r.settings["ttft_target"])) for r in results
    ]
    tpot = [
        (r.tpot, r.figures.tpot_p50, r.figures.tpot_p99, float(r.settings["tpot_target"])) for r in results
    ]
    return (
        _quantiles("Time to the first token (TTFT)", ttft, names),
        _quantiles("Time per token after it (TPOT)", tpot, names),
    )


def _quantiles(
    title: str, curves: Sequence[tuple[Curve, float, float, float]], names: Sequence[str]
) -> Chart:
    targets = sorted({target for _, _, _, target in curves})
    y = log_scale([seconds for curve, *_ in curves for seconds in curve.seconds])
    if y is None:
        return _nothing(title)
    y = log_scale([y.low * 1.3, y.high / 1.3, *targets])
    assert y is not None
    marks = [
        Mark(
            name, polyline([(nines(q), y.at(s)) for q, s in zip(c.quantiles, c.seconds, strict=True)]), number
        )
        for number, ((c, *_), name) in enumerate(zip(curves, names, strict=True))
        if any(c.seconds)
    ]
    words = "; ".join(
        f"{name + ': ' if name else ''}median {in_seconds(p50)}, p99 {in_seconds(p99)}"
        for (_, p50, p99, _), name in zip(curves, names, strict=True)
    )
    levels = tuple(Tick(y.at(target), f"target {in_seconds(target)}") for target in targets)
    goals = " and ".join(in_seconds(target) for target in targets)
    return Chart(
        title, f"Quantiles, logarithmic. {words}; target {goals}.", "per cent of requests", "logarithmic",
        nines_ticks(), y.ticks(in_seconds), lines=marks, levels=levels,
    )  # fmt: skip


def _nothing(title: str) -> Chart:
    return Chart(title, "There is nothing to draw.", "", "", note="nothing to draw: no request got that far")


def _edges(result: SimulationResult) -> list[float]:
    """Returns the starts of the intervals of a series, and the end of the last one, which may be shorter."""
    width, num = result.series.width, len(result.series.used)
    last = min(max(result.figures.seconds, (num - 1) * width), num * width)
    return [*(i * width for i in range(num)), last]


_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def _clock(results: Sequence[SimulationResult]) -> tuple[Scale, list[Tick], str]:
    """Returns the axis of time for the longest of the results: its scale, its ticks and its label."""
    longest = max(_edges(result)[-1] for result in results)
    seconds, unit = next((seconds, name) for least, seconds, name in _UNITS if longest >= least)
    ticks = x_scale(longest / seconds).ticks(lambda value: f"{value:g}")
    return x_scale(longest), ticks, f"{unit} of the simulated clock"


def in_seconds(value: float) -> str:
    """Formats a latency in a suitable unit."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def duration(value: float) -> str:
    """Formats a span of time in a suitable unit."""
    if value >= 7200:
        return f"{value / 3600:.1f} h"
    if value >= 300:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:g}"
