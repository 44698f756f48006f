"""What is written down while a simulation runs, in bounded memory: means over time, and distributions.

Knows numbers and the simulated clock; knows no scheduler and no request.
"""

import math
from collections.abc import Sequence

from .result import CURVE_QUANTILES, SERIES_POINTS, Curve

_BUCKET = math.log(1.01)  # a bucket's width: what is told of it is within half a per cent
_LEAST = 1e-6  # seconds; what is shorter is told as this


class Distribution:
    """Latencies, counted in buckets of a per cent: their number, sum and quantiles."""

    def __init__(self) -> None:
        self.num = 0
        self._sum = 0.0
        self._low = math.inf
        self.high = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """One more."""
        self.num += 1
        self._sum += seconds
        self._low = min(self._low, seconds)
        self.high = max(self.high, seconds)
        bucket = int(math.log(max(seconds, _LEAST) / _LEAST) / _BUCKET)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        """0 of none."""
        return self._sum / self.num if self.num else 0.0

    def quantiles(self, wanted: Sequence[float]) -> list[float]:
        """The least values that at least these shares do not exceed, `wanted` ascending; 0 of none."""
        if not self.num:
            return [0.0] * len(wanted)
        found: list[float] = []
        counted = 0
        for bucket, count in sorted(self._buckets.items()):
            counted += count
            while len(found) < len(wanted) and counted >= wanted[len(found)] * self.num:
                centre = _LEAST * math.exp((bucket + 0.5) * _BUCKET)
                found.append(min(max(centre, self._low), self.high))
        if wanted and wanted[-1] == 1.0:
            found[-1] = self.high
        return found

    def curve(self) -> Curve:
        """To draw."""
        return Curve(list(CURVE_QUANTILES), self.quantiles(CURVE_QUANTILES))


class Timeline:
    """Several numbers over time, as means over intervals. Where there are too many intervals they double: their
    width is a power of two, so that where they begin is exact."""

    def __init__(self, num: int) -> None:
        self.width = 2.0**-7
        self._num = num
        self._sums: list[list[float]] = []  # of each interval: Σ number · seconds
        self._end = 0.0

    def add(self, start: float, end: float, values: Sequence[float]) -> None:
        """They were `values` from `start` to `end`, which follows on what was added before."""
        self._end = end
        while end >= self.width * SERIES_POINTS:
            pairs = zip(self._sums[::2], [*self._sums[1::2], [0.0] * self._num], strict=False)
            self._sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
            self.width *= 2
        while start < end:
            idx = int(start / self.width)
            until = min((idx + 1) * self.width, end)
            while len(self._sums) <= idx:
                self._sums.append([0.0] * self._num)
            sums = self._sums[idx]
            for i, value in enumerate(values):
                sums[i] += value * (until - start)
            start = until

    def means(self) -> list[list[float]]:
        """Of each number, its mean over every interval."""
        found = []
        for i in range(self._num):
            column = [sums[i] / self.width for sums in self._sums]
            if column:
                last = self._end - (len(column) - 1) * self.width  # the last one is cut short
                column[-1] *= self.width / last if last > 0 else 0.0
            found.append([round(mean, 3) for mean in column])
        return found


class Means:
    """Means over time of several numbers."""

    def __init__(self, num: int) -> None:
        self.seconds = 0.0
        self._sums = [0.0] * num

    def add(self, seconds: float, values: Sequence[float]) -> None:
        """They were `values` for so long."""
        self.seconds += seconds
        for i, value in enumerate(values):
            self._sums[i] += value * seconds

    def of(self, idx: int) -> float:
        """The mean of one; 0 over no time."""
        return self._sums[idx] / self.seconds if self.seconds else 0.0
