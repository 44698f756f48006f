"""A clock and graphs without a device, for tests of the benchmarks of kernels."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from bench.common.report import Spread
from bench.common.steady import Timing


class CountingClock:
    """A clock that only counts replays. Each takes one µs more than the one before."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self, graph: Any) -> Spread:
        graph.replay()
        self.replays += 1
        return Spread(self.replays + 2.0, self.replays + 1.0, self.replays + 3.0)

    def replay_in_turns(self, graphs: Mapping[str, Any], _rule: object = None) -> dict[str, Timing]:
        return {side: Timing(*self.replay(graph), 20, True) for side, graph in graphs.items()}

    def call(self, work: Callable[[], object]) -> float:
        work()
        return 1.0


def replayed(run: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    """Stands in for `captured`: a replay calls `run` again, and copies its result into the first tensor."""
    out = run()
    return SimpleNamespace(replay=lambda: out.copy_(run())), out
