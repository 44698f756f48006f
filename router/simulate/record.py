"""Records means over time and distributions while a simulation runs, in bounded memory."""

import math
from bisect import bisect, insort
from collections.abc import Sequence

from .result import CURVE_QUANTILES, SERIES_POINTS, Curve

_BUCKET = math.log(1.01)  # the width of a bucket, so that a quantile is within half a per cent
_LEAST = 1e-6  # seconds; shorter latencies count as this


class Distribution:
    """Counts latencies in buckets of one per cent: their number, mean and quantiles."""

    def __init__(self) -> None:
        self.num = 0
        self._sum = 0.0
        self._low = math.inf
        self.high = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Adds a latency."""
        self.num += 1
        self._sum += seconds
        self._low = min(self._low, seconds)
        self.high = max(self.high, seconds)
        bucket = int(math.log(max(seconds, _LEAST) / _LEAST) / _BUCKET)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def merge(self, other: "Distribution") -> None:
        """Adds all latencies of `other`."""
        self.num += other.num
        self._sum += other._sum
        self._low = min(self._low, other._low)
        self.high = max(self.high, other.high)
        for bucket, count in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + count

    @property
    def mean(self) -> float:
        """The mean; 0 without latencies."""
        return self._sum / self.num if self.num else 0.0

    def quantiles(self, wanted: Sequence[float]) -> list[float]:
        """Returns the quantiles for the shares `wanted`, which are ascending; 0 without latencies."""
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

    def summary(self, name: str) -> dict[str, float]:
        """Returns the fields of `Figures` whose names begin with `name`."""
        p50, p90, p99 = self.quantiles((0.5, 0.9, 0.99))
        found = {"mean": self.mean, "p50": p50, "p90": p90, "p99": p99, "max": self.high}
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


class Overtaking:
    """Counts how many of the later requests begin before a request does. Requests are numbered from 1 in the
    order of their arrival."""

    def __init__(self) -> None:
        self.most = 0  # of any request so far
        self._next = 1  # the first request that has not begun
        self._begun: list[int] = []  # the requests after it that have, ascending

    def begin(self, number: int) -> None:
        """Notes that a request begins."""
        self.most = max(self.most, len(self._begun) - bisect(self._begun, number))
        insort(self._begun, number)
        num = 0
        while num < len(self._begun) and self._begun[num] == self._next:
            num += 1
            self._next += 1
        del self._begun[:num]


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
