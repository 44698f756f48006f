"""Records latencies, and means over time in bounded memory, while a simulation runs."""

import math
from array import array
from collections.abc import Sequence

import numpy as np

from .result import CURVE_QUANTILES, SERIES_POINTS, Curve


class Distribution:
    """Keeps latencies, each in eight bytes: their number, mean and quantiles."""

    def __init__(self) -> None:
        self.seconds = array("d")

    def add(self, seconds: float) -> None:
        """Adds a latency."""
        self.seconds.append(seconds)

    def quantiles(self, wanted: Sequence[float]) -> list[float]:
        """Returns the quantiles for the shares `wanted`: each one of the latencies; 0 without latencies."""
        return np.quantile(self.seconds or [0.0], wanted, method="inverted_cdf").tolist()

    def summary(self, name: str) -> dict[str, float]:
        """Returns the fields of `Figures` whose names begin with `name`."""
        p50, p90, p99, most = self.quantiles((0.5, 0.9, 0.99, 1.0))
        mean = math.fsum(self.seconds) / max(len(self.seconds), 1)
        found = {"mean": mean, "p50": p50, "p90": p90, "p99": p99, "max": most}
        return {f"{name}_{key}": value for key, value in found.items()}

    def curve(self) -> Curve:
        """Returns the curve that the report draws."""
        return Curve(list(CURVE_QUANTILES), self.quantiles(CURVE_QUANTILES))


class Timeline:
    """Means of several numbers over intervals of time.

    When there are too many intervals, their width doubles. It is a power of two, so their starts are exact.
    """

    def __init__(self, num: int) -> None:
        self.width = 2.0**-7
        self._num = num
        self._sums: list[list[float]] = []  # for each interval: Σ number · seconds
        self._end = 0.0

    def add(self, start: float, end: float, values: Sequence[float]) -> None:
        """Adds that the numbers were `values` from `start`, which is the last end, to `end`."""
        self._end = end
        while end >= self.width * SERIES_POINTS:
            self._widen()
        while start < end:
            idx = int(start / self.width)
            until = min((idx + 1) * self.width, end)
            while len(self._sums) <= idx:
                self._sums.append([0.0] * self._num)
            sums = self._sums[idx]
            for i, value in enumerate(values):
                sums[i] += value * (until - start)
            start = until

    def merge(self, other: "Timeline") -> None:
        """Adds the numbers of `other`, over the same time: afterwards they are sums of both."""
        self._end = max(self._end, other._end)
        while self.width < other.width:
            self._widen()
        length = math.ceil(self._end / self.width)
        self._sums += [[0.0] * self._num for _ in range(len(self._sums), length)]
        for idx, sums in enumerate(other._sums):
            own = self._sums[int(idx * other.width / self.width)]
            for i, value in enumerate(sums):
                own[i] += value

    def _widen(self) -> None:
        """Doubles the width of the intervals."""
        pairs = zip(self._sums[::2], [*self._sums[1::2], [0.0] * self._num], strict=False)
        self._sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        self.width *= 2

    def means(self) -> list[list[float]]:
        """Returns for each number its mean over every interval."""
        found = []
        for i in range(self._num):
            column = [sums[i] / self.width for sums in self._sums]
            if column:
                last = self._end - (len(column) - 1) * self.width  # the last interval may be shorter
                column[-1] *= self.width / last if last > 0 else 0.0
            found.append([round(mean, 3) for mean in column])
        return found


class Means:
    """Means over time of several numbers."""

    def __init__(self, num: int) -> None:
        self.seconds = 0.0
        self._sums = [0.0] * num

    def add(self, seconds: float, values: Sequence[float]) -> None:
        """Adds that the numbers were `values` for `seconds`."""
        self.seconds += seconds
        for i, value in enumerate(values):
            self._sums[i] += value * seconds

    def of(self, idx: int) -> float:
        """Returns the mean of one number; 0 over no time."""
        return self._sums[idx] / self.seconds if self.seconds else 0.0
