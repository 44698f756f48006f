"""The benchmarks of kernels measure a small row each on any device, by a clock that only counts. On a GPU whole
programs run."""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from bench.common import device_clock
from bench.common.steady import Timing
from bench.kernels import attention, attention_sides, experts, states, tune
from bench.kernels.attention_rows import DECODE, PREFILL, PREFILL_DIMS, Row
from bench.memory import allocator
from bench.memory.allocator_peers import DESIGNS
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from tests.support.eager_models import SMALL
from tests.support.fake_clock import CountingClock, replayed

EVEN = Row("even", (20, 20), (1, 1), 2, 1, 16, torch.float16)


@pytest.fixture
def clock(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> device_clock.Clock:
    for module in (attention, device_clock, tune):
        monkeypatch.setattr(module, "DEVICE", device)
        monkeypatch.setattr(module, "captured", replayed)
    for module in (attention, device_clock):
        monkeypatch.setattr(module, "CapturedStep", lambda step: SimpleNamespace(replay=step))
    monkeypatch.setattr(attention, "gather_us", partial(device_clock.gather_us, grids=(2,)))
    monkeypatch.setattr(attention_sides, "SDPA", {"math": torch.nn.attention.SDPBackend.MATH})
    return cast(device_clock.Clock, CountingClock())


def test_attention_measures_all_sides_of_a_row(clock: device_clock.Clock) -> None:
    """Each side is compared with a reference before it is timed."""
    tools = attention.Bench(clock, device_clock.Ceiling(1.0, 1e4, 1e6), attention_sides.PEERS, None)
    found = attention.measure_row(EVEN, attention_sides.decode_sides, tools)
    assert found["failed"] == {}
    assert {"lightkv p1", "lightkv p16", "lightkv contiguous", "SDPA math"} <= found["sides"].keys()
    assert found["floor_us"] == 1.0 + EVEN.bytes / 1e4


def test_tune_has_the_table_among_its_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = tune.tuning.DeviceClass(num_multiprocessors=132, shared_memory=227 * 1024, major=9)
    monkeypatch.setattr(prefill_tuning, "hopper_prefill_launch", lambda *_: None)
    monkeypatch.setattr(tune.tuning, "device_class", lambda _: hopper)
    for row in (*PREFILL, *PREFILL_DIMS):
        num_rows = sum(row.q_lens) * row.num_heads // row.num_kv_heads
        dims = row.head_dim, row.dims - row.head_dim
        launch = prefill_tuning.prefill_launch(hopper, len(row.lengths), row.num_kv_heads, num_rows, *dims, 2)
        assert f"general {tune.text(launch)}" in tune.prefill_candidates(row)
    assert list(tune.HOPPER_TILES) == list(prefill_tuning._HOPPER_LAUNCHES)


class RowClock:
    """Runs each side once, and says that it took as many microseconds as its output has rows."""

    def replay_in_turns(self, sides: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, Timing]:
        return {
            name: Timing(*[float(len(side().flatten(0, -2)))] * 3, 1, True) for name, side in sides.items()
        }


def test_experts_computes_all_tokens_on_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(experts, "CapturedStep", lambda step: step)
    clock: Any = RowClock()
    config = Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16)
    expected = {"grouped_mm": 3, "transformers": 1, "lightkv": 1, "kernels": 3}
    ceiling = device_clock.Ceiling(1.0, 1e4, 1e6)
    for num, us in experts.measure(config, [1, 64], clock, ceiling).items():
        assert us.pop("floor") > 1.0
        assert us == {side: count * num for side, count in expected.items()}


def test_states_measures_each_row_and_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side is compared with a reference before it is timed. The clock counts the rows of its output."""
    monkeypatch.setattr(states, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(states, "CapturedStep", lambda step: step)
    monkeypatch.setattr(states, "normal", partial(torch.randn, dtype=torch.float16))
    shape, ceiling, clock = states.Shape(1, 2, 8, 8, 4), device_clock.Ceiling(1.0, 1e4, 1e6), RowClock()
    rows = [states.decode_row(shape, 3, False), states.conv_row(shape, 1, 5), states.norm_row(shape, 7)]
    for row, num_rows in zip(rows, (6, 5, 14), strict=True):
        found = states.measure(row, cast(device_clock.Clock, clock), ceiling, True)
        assert found.pop("floor") == 1.0 + row.num_bytes / 1e4
        assert found == dict.fromkeys(["lightkv", *row.tiles], num_rows)


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)
def test_every_design_of_an_allocator_passes_its_check(design: type, device: torch.device) -> None:
    cell = allocator.Cell(20_000, 0.5, "fragmented")
    free = allocator.free_slots(cell, np.random.default_rng(0))
    table = torch.zeros(34, 2048, dtype=torch.int32, device=device)
    allocator.check_design(design(cell.num_slots, free, table), cell.text, free, 16, 100)


PROGRAMS = {
    "bench.kernels.attention": ["--decode", "--rows", DECODE[0].name, "--peers"],
    "bench.kernels.experts": ["--tokens", "1"],
    "bench.kernels.states": ["--batches", "2", "--prompts", "70"],
    "bench.memory.allocator": ["--slots", "65536", "--shares", "0.5", "--batches", "1", "--rounds", "1"],
    "bench.serving.prompt_step": ["--layers", "1", "--rounds", "1", "--steps", "2", "--cases", "20"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_on_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [name, *PROGRAMS[name], "--out", str(out)])
    import_module(name).main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(out.read_text())
