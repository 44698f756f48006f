"""When replays are steady (`bench/common/steady.py`)."""

from collections.abc import Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.common import device_clock
from bench.common.steady import Steadiness, Timing, until_steady


class Sides:
    """Sides whose replays take the given times, in turns; the last time repeats."""

    def __init__(self, **times: Sequence[float]) -> None:
        self.times = times
        self.replays = 0

    def settle(self, count: int) -> None:
        self.replays += count

    def rounds(self, count: int) -> dict[str, list[float]]:
        begin, self.replays = self.replays, self.replays + count
        return {
            side: [own[min(i, len(own) - 1)] for i in range(begin, self.replays)]
            for side, own in self.times.items()
        }

    def measure(self, rule: Steadiness) -> dict[str, Timing]:
        return until_steady(self.settle, self.rounds, rule)


def test_slow_replays_after_large_tensors_do_not_count() -> None:
    """As on the H200: 1 × 128k took 154 µs for 55 replays, then 134."""
    slow_first = [154.0] * 55 + [134.0]
    found = Sides(a=slow_first).measure(Steadiness())
    assert found == {"a": Timing(134.0, 134.0, 134.0, 20, True)}
    assert Sides(a=slow_first).measure(Steadiness(settle=0, limit=20))["a"].median == 154.0


def test_replays_go_on_until_every_side_is_steady() -> None:
    falling = [200.0 - i for i in range(60)] + [140.0]
    sides = Sides(falls=falling, flat=[50.0])
    found = sides.measure(Steadiness(settle=10))
    assert found["falls"].steady
    assert found["falls"].median == 140.0
    assert found["falls"].replays == found["flat"].replays == 70
    assert sides.replays == 10 + 70


def test_a_side_that_never_settles_is_said_not_to_be_steady() -> None:
    growing = [100.0 * 1.01**i for i in range(300)]
    found = Sides(grows=growing, flat=[50.0]).measure(Steadiness(settle=0, limit=45))
    assert (found["grows"].replays, found["grows"].steady) == (40, False)
    assert found["flat"].steady


def test_noise_is_no_drift() -> None:
    rng = Random(0)
    noisy = [100.0 + rng.uniform(-2.0, 2.0) + (50.0 if rng.random() < 0.1 else 0.0) for _ in range(200)]
    found = Sides(a=noisy).measure(Steadiness())["a"]
    assert found.steady
    assert found.median == pytest.approx(100.0, abs=1.0)
    assert found.low < 100.0 < found.high


def test_medians_of_the_last_two_windows_are_compared() -> None:
    rule = Steadiness(window=3, tolerance=0.01)
    assert not rule.is_met([1.0] * 5)
    assert rule.is_met([9.0, 100.0, 100.0, 300.0, 100.9, 100.9, 5.0])
    assert not rule.is_met([100.0, 100.0, 100.0, 101.1, 101.1, 101.1])
    assert not rule.is_met([101.1, 101.1, 101.1, 100.0, 100.0, 100.0])
    assert rule.is_met([5.0, 5.0, 5.0, 5.09, 5.09, 5.09])  # what a clock cannot tell apart
    assert not rule.is_met([5.0, 5.0, 5.0, 5.2, 5.2, 5.2])


def test_no_sides_are_no_measurement() -> None:
    assert Sides().measure(Steadiness()) == {}


class Event:
    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_graphs_are_replayed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = object.__new__(device_clock.Clock)  # without its 256 MiB
    clock.repeats, clock._fill = 4, torch.ones(1)

    def queue(_: device_clock.Clock, graph: Any) -> tuple[Event, Event]:
        graph.replay()
        return Event(0.0), Event(1e-3 * ord(order[-1]))

    monkeypatch.setattr(device_clock.Clock, "_queue", queue)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs: Any = {name: SimpleNamespace(replay=partial(order.append, name)) for name in "ab"}
    found = clock.replay_in_turns(graphs)
    assert order[:120] == ["a", "b"] * 60
    assert order[120:] == ["a", "b", "b", "a"] * 2
    assert found["a"] == Timing(97.0, 97.0, 97.0, 4, True)
    assert found["b"].median == 98.0
    assert clock.replay_in_turns(graphs, Steadiness(settle=0, window=1))["a"].replays == 2


@pytest.mark.gpu
def test_graphs_on_the_device_are_timed() -> None:
    clock = device_clock.Clock(10)
    device_clock.empty_kernel()
    source = torch.ones(2**26, device=device_clock.DEVICE)
    source.sum()
    graphs = {
        "empty": device_clock.CapturedStep(device_clock.empty_kernel),
        "reads": device_clock.CapturedStep(lambda: source.sum()),
    }
    found = clock.replay_in_turns(graphs)
    assert 0.0 < found["empty"].low <= found["empty"].median < found["reads"].median
