"""When a repeated measurement is steady: the rule that says how often to replay before the median counts.

After large tensors are made, the first 50 to 60 replays of some kernels take 15 % longer than all later ones.
So a fixed number of replays after a short warm-up may measure the wrong thing.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .report import Spread

# Replays every side so many times, in turns, and returns the times in µs in their order.
Rounds = Callable[[int], Mapping[str, Sequence[float]]]


class Steadiness(NamedTuple):
    """When to stop: the medians of the last two windows of replays differ by at most `tolerance`, relative to
    the smaller, or by `resolution`, in µs. `settle` replays come before, which are not timed; at most `limit`
    follow."""

    settle: int = 60
    window: int = 10
    tolerance: float = 0.01
    resolution: float = 0.1
    limit: int = 120

    def is_met(self, times: Sequence[float]) -> bool:
        """Returns whether the last two windows of `times` agree."""
        if len(times) < 2 * self.window:
            return False
        before = statistics.median(times[-2 * self.window : -self.window])
        last = statistics.median(times[-self.window :])
        return abs(last - before) <= max(self.resolution, self.tolerance * min(last, before))


SWEEP = Steadiness(settle=20, window=3, tolerance=0.03, limit=9)  # to choose among settings


class Timing(NamedTuple):
    """The median, lowest and highest of the last replays, in µs; how many replays were timed, and whether the
    last ones agreed."""

    median: float
    low: float
    high: float
    replays: int
    steady: bool


def until_steady(settle: Callable[[int], object], rounds: Rounds, rule: Steadiness) -> dict[str, Timing]:
    """Measures all sides until each is steady by `rule`, or its limit is reached. `settle(n)` replays all sides
    n times and measures nothing. The last two windows count."""
    settle(rule.settle)
    times: dict[str, list[float]] = {}
    while True:
        for side, found in rounds(rule.window).items():
            times.setdefault(side, []).extend(found)
        count = max((len(own) for own in times.values()), default=rule.limit)
        steady = {side: rule.is_met(own) for side, own in times.items()}
        if all(steady.values()) or count + rule.window > rule.limit:
            break
    return {
        side: Timing(*Spread.of(own[-2 * rule.window :]), len(own), steady[side])
        for side, own in times.items()
    }
