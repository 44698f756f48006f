"""For tests of the benchmarks of kernels: a clock and graphs that need no device."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from bench.common.report import Spread


class CountingClock:
    """A clock that only replays: each takes one µs more than the one before."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self, graph: Any) -> Spread:
        graph.replay()
        self.replays += 1
        return Spread(self.replays + 2.0, self.replays + 1.0, self.replays + 3.0)

    def call(self, work: Callable[[], object]) -> float:
        work()
        return 1.0


def replayed(run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """Instead of a graph: a replay runs `run` again, into the tensor it wrote first."""
    out = run()
    return SimpleNamespace(replay=lambda: out.copy_(run())), out
