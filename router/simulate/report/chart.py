"""The geometry of charts: scales, ticks and paths in a box of fixed size, which a template draws as SVG.

It writes no markup: the template escapes every text. Lengths are units of the box, from its upper left corner:

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

_NINES_END = 3.6  # the place of the maximum on the axis of nines, where 0.999 is at 3


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A path, its label in the legend, and the number of its colour."""

    label: str
    path: str
    colour: int


@dataclass(frozen=True)
class Chart:
    """Everything that is drawn. `note`: the text in place of a plot without data."""

    title: str
    description: str
    x_label: str
    y_label: str
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    areas: Sequence[Mark] = ()
    lines: Sequence[Mark] = ()
    levels: Sequence[Tick] = ()  # horizontal lines: targets, the capacity
    moments: Sequence[Tick] = ()  # vertical lines
    note: str = ""


# --------------------------------------------------------------------------------
# Scales


@dataclass(frozen=True)
class Scale:
    """Maps numbers from `low` to `high` to places from `start` to `end`, by their logarithm if `log`.

    Other numbers are clipped.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Returns the place of a number."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, write: Callable[[float], str]) -> list[Tick]:
        """Returns ticks at round numbers."""
        numbers = (
            _round_numbers_by_log(self.low, self.high) if self.log else _round_numbers(self.low, self.high)
        )
        return [Tick(self.at(number), write(number)) for number in numbers]


def x_scale(high: float) -> Scale:
    """Returns a scale from 0 at the left."""
    return Scale(0.0, high if high > 0 else 1.0, LEFT, PLOT_RIGHT)


def y_scale(values: Sequence[float]) -> Scale:
    """Returns a scale from 0 at the bottom, with a little room above the highest value."""
    high = max(values, default=0.0)
    return Scale(0.0, 1.05 * high if high > 0 else 1.0, PLOT_BOTTOM, TOP)


def log_scale(values: Sequence[float]) -> Scale | None:
    """Returns a logarithmic scale with a little room around the positive values; None without any."""
    found = [value for value in values if value > 0]
    if not found:
        return None
    return Scale(min(found) / 1.3, max(found) * 1.3, PLOT_BOTTOM, TOP, log=True)


def nines(quantile: float) -> float:
    """Returns the place of a quantile on an axis on which each nine has the same width; 1 is at the end."""
    place = -math.log10(1 - quantile) if quantile < 1 else _NINES_END
    return x_scale(_NINES_END).at(place)


def nines_ticks() -> list[Tick]:
    """Returns the ticks of the axis of nines, in per cent."""
    labels = {0.0: "0", 0.5: "50", 0.9: "90", 0.99: "99", 0.999: "99.9", 1.0: "max"}
    return [Tick(nines(quantile), label) for quantile, label in labels.items()]


def _round_numbers(low: float, high: float, most: int = 6) -> list[float]:
    """Returns at most `most` multiples of 1, 2 or 5 times a power of ten."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _round_numbers_by_log(low: float, high: float) -> list[float]:
    """Returns powers of ten, with 2 and 5 times these if there are few."""
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
    """Returns a path of steps, with `values[i]` from `edges[i]` to `edges[i + 1]`."""
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
    """Returns the path of the area between two lines of steps."""
    back = steps(scales, edges[::-1], low[::-1])
    return steps(scales, edges, high) + "L" + back[1:] + "Z"


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """Returns a path through places in the box."""
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
