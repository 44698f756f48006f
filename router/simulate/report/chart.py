"""Charts as geometry: scales, ticks and paths in a box of fixed size, for a template to draw as SVG.

Knows numbers, and texts that it carries as they are; knows no simulation and writes no markup, so that whoever
draws it escapes everything. Lengths are units of the box, from its left upper corner:

    (0, 0) ┬ y label
           │ TOP
           ├──────────────┐
      LEFT │     plot     │ RIGHT
           └──────────────┴ BOTTOM: x ticks, x label      (WIDTH, HEIGHT)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 68, 20, 28, 46
PLOT_RIGHT, PLOT_BOTTOM = WIDTH - RIGHT, HEIGHT - BOTTOM

_NINES_END = 3.6  # where the nines' axis has its maximum: beyond 0.999, which is at 3


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and what is written there."""

    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A path, what the legend calls it, and the number of its colour."""

    label: str
    path: str
    colour: int


@dataclass(frozen=True)
class Chart:
    """All that is drawn. `note`: what stands in the plot's place where there is nothing to draw."""

    title: str
    description: str
    x_label: str
    y_label: str
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    areas: Sequence[Mark] = ()
    lines: Sequence[Mark] = ()
    levels: Sequence[Tick] = ()  # across the plot: targets, the capacity
    moments: Sequence[Tick] = ()  # from its top to its bottom
    note: str = ""


# --------------------------------------------------------------------------------
# Scales


@dataclass(frozen=True)
class Scale:
    """Numbers from `low` to `high`, between two places; by their logarithm where `log`. Others are drawn at
    the nearer end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a number is."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, write: Callable[[float], str]) -> list[Tick]:
        """At round numbers."""
        numbers = (
            _round_numbers_by_log(self.low, self.high) if self.log else _round_numbers(self.low, self.high)
        )
        return [Tick(self.at(number), write(number)) for number in numbers]


def x_scale(high: float) -> Scale:
    """From 0 at the left."""
    return Scale(0.0, high if high > 0 else 1.0, LEFT, PLOT_RIGHT)


def y_scale(values: Sequence[float]) -> Scale:
    """From 0 at the bottom, with a little room above the highest."""
    high = max(values, default=0.0)
    return Scale(0.0, 1.05 * high if high > 0 else 1.0, PLOT_BOTTOM, TOP)


def log_scale(values: Sequence[float]) -> Scale | None:
    """By logarithm, with a little room around those of the values that are more than 0; None: none is."""
    found = [value for value in values if value > 0]
    if not found:
        return None
    return Scale(min(found) / 1.3, max(found) * 1.3, PLOT_BOTTOM, TOP, log=True)


def nines(quantile: float) -> float:
    """Where a quantile is on an axis on which every nine of it takes the same room; 1 is at its end."""
    place = -math.log10(1 - quantile) if quantile < 1 else _NINES_END
    return x_scale(_NINES_END).at(place)


def nines_ticks() -> list[Tick]:
    """In per cent."""
    labels = {0.0: "0", 0.5: "50", 0.9: "90", 0.99: "99", 0.999: "99.9", 1.0: "max"}
    return [Tick(nines(quantile), label) for quantile, label in labels.items()]


def _round_numbers(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most so many."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _round_numbers_by_log(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times these where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors: tuple[int, ...] = (1, 2, 5) if high / low < 1e3 else (1,)
    if high / low >= 1e6:
        decades = decades[:: max(1, len(decades) // 6)]
    found = [factor * 10.0**decade for decade in decades for factor in factors]
    found = [number for number in found if low <= number <= high]
    return found if len(found) > 1 else _round_numbers(low, high, 4)


# --------------------------------------------------------------------------------
# Paths


def steps(scales: tuple[Scale, Scale], edges: Sequence[float], values: Sequence[float]) -> str:
    """`values[i]` from `edges[i]` to `edges[i + 1]`: means over intervals, drawn as such."""
    x, y = scales
    parts = [f"M{_n(x.at(edges[0]))} {_n(y.at(values[0]))}"]
    for edge, value in zip(edges[1:], [*values[1:], None], strict=True):
        parts.append(f"H{_n(x.at(edge))}")
        if value is not None:
            parts.append(f"V{_n(y.at(value))}")
    return "".join(parts)


def between(
    scales: tuple[Scale, Scale], edges: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> str:
    """The area between two of these."""
    back = steps(scales, edges[::-1], low[::-1])
    return steps(scales, edges, high) + "L" + back[1:] + "Z"


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """Through places in the box."""
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
