"""Each design of `bench/memory/allocator.py` allocates the right slots, and its trace runs to the end."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from bench.memory import allocator as bench
from bench.memory.allocator_peers import DESIGNS, Design, FreeList, Ours, PinnedStack
from bench.serving.workload import Lengths

SLOTS = 20_000


def make(design: type, cell: bench.Cell, device: torch.device) -> tuple[Design, np.ndarray]:
    free = bench.free_slots(cell, np.random.default_rng(0))
    return design(cell.num_slots, free, torch.zeros(34, 2048, dtype=torch.int32, device=device)), free


@pytest.mark.parametrize("form", bench.FORMS)
@pytest.mark.parametrize("share", [0.1, 0.95])
def test_a_pool_is_filled_to_its_share(form: str, share: float) -> None:
    free = bench.free_slots(bench.Cell(SLOTS, share, form), np.random.default_rng(0))
    assert len(np.unique(free)) == len(free) == round((SLOTS - 1) * (1 - share))
    assert 1 <= free.min() <= free.max() < SLOTS


@pytest.mark.parametrize("form", bench.FORMS)
@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)
def test_every_design_passes_its_check(form: str, design: type, device: torch.device) -> None:
    cell = bench.Cell(SLOTS, 0.5, form)
    made, free = make(design, cell, device)
    bench.check_design(made, cell.text, free, 16, 100)
    if isinstance(made, Ours):
        bench.check_choice(made, cell.text, np.sort(free), 16, 100)


@pytest.mark.parametrize("design", [PinnedStack, FreeList], ids=lambda design: design.name)
def test_a_design_that_allocates_a_slot_twice_is_refused(design: type, device: torch.device) -> None:
    cell = bench.Cell(SLOTS, 0.5, "fresh")
    free = bench.free_slots(cell, np.random.default_rng(0))
    twice = np.repeat(free[: len(free) // 2], 2)
    made = design(SLOTS, twice, torch.zeros(34, 2048, dtype=torch.int32, device=device))
    with pytest.raises(SystemExit, match="two owners"):
        bench.check_design(made, cell.text, free, 16, 100)


def test_a_choice_that_is_not_the_lowest_is_refused(device: torch.device) -> None:
    made, free = make(Ours, bench.Cell(SLOTS, 0.5, "fragmented"), device)
    with pytest.raises(SystemExit, match="not the 16 lowest"):
        bench.check_choice(made, "lightkv", np.sort(free)[1:], 16, 100)


class Counting:
    """A clock that only counts the steps."""

    steps = 0

    def device(self, step: Callable[[], object], undo: Callable[[], object], cold: bool = True) -> float:
        for _ in range(3):
            step()
            undo()
        self.steps += 3
        return 1.0

    host = device


def test_what_is_measured_is_undone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DEVICE", device)
    monkeypatch.setattr(bench, "CapturedStep", lambda step: SimpleNamespace(replay=step))
    monkeypatch.setattr(bench, "measure_prompt_graph", lambda *_: {})  # what it captures counts on the host
    clock = Counting()
    cell = bench.Cell(SLOTS, 0.5, "fragmented")
    found = bench.measure_cell(cell, cast(bench.Clock, clock), 2, [1, 20], [300, SLOTS])
    assert set(found) == {"decode 1", "decode 20", "prompt 300"}
    names = {design.name for design in DESIGNS}
    assert all(set(times) == names for times in found.values())
    assert {"host", "device", "graph_cold_l2", "graph_hot_l2", "graph_host"} == set(
        found["decode 20"]["lightkv"]
    )
    assert clock.steps == 2 * 3 * (2 * (2 * 4 + 3) + 3 * 4)


def test_designs_take_turns_and_a_time_is_the_median_of_the_rounds(device: torch.device) -> None:
    cell = bench.Cell(SLOTS, 0.5, "fresh")
    designs = [make(design, cell, device)[0] for design in (Ours, FreeList)]
    order: list[str] = []
    times = iter([1.0, 10.0, 20.0, 2.0, 9.0, 90.0])

    def measure(design: Design) -> dict[str, float]:
        order.append(design.name)
        return {"host": next(times)}

    found = bench.in_turns(designs, 3, measure)
    assert order == ["lightkv", "free list", "free list", "lightkv", "lightkv", "free list"]
    assert found == {"lightkv": {"host": 2.0}, "free list": {"host": 20.0}}
    assert (
        bench.ratios_of([found | {name: {"host": 4.0} for name in bench.PEERS}])[0] == "0.50 (0.50 to 0.50)"
    )


def test_every_request_of_a_trace_is_run(device: torch.device) -> None:
    trace = [Lengths(10 + i % 50, 5 + i % 7) for i in range(60)]
    roomy = bench.contiguous_share(trace, 6000, device)
    assert (roomy["requests"], roomy["contiguous"], roomy["most_at_once"]) == (60, 1.0, 60)
    tight = bench.contiguous_share(trace, 200, device)
    assert tight["most_at_once"] < 20
    assert tight["steps"] > roomy["steps"]
    assert tight["contiguous"] <= 1.0
    assert bench.contiguous_share([*trace, Lengths(300, 1)], 200, device) == tight  # it can never run
