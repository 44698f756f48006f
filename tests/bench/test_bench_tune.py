"""What `bench/kernels/tune.py` times: every candidate is launched as it says, and leaves launches as before."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from bench.common.device_clock import Clock
from bench.kernels import tune
from bench.kernels.attention_batches import Batch, Paged
from bench.kernels.attention_peers import Side, ours_decode, ours_prefill
from bench.kernels.attention_rows import DECODE, PREFILL, PREFILL_DIMS, Row
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention import merge_states
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.classic import paged_attention_kernel
from lightkv.triton_kernels.tuning import DeviceClass, Launch
from tests.support.fake_clock import CountingClock, replayed

HOPPER = DeviceClass(num_multiprocessors=132, shared_memory=227 * 1024, major=9)
DECODES = Row("decodes", (1, 40, 16), (1, 1, 1), 4, 2, 16, torch.float16)
CHUNKS = DECODES._replace(name="chunks", lengths=(20, 33, 5), q_lens=(20, 3, 1))
FUNCTIONS = (
    (decode_tuning, "decode_launch"),
    (decode_tuning, "decode_workers"),
    (prefill_tuning, "prefill_launch"),
    (prefill_tuning, "hopper_prefill_launch"),
    (paged_attention_kernel, "paged_attention_launch"),
)


@pytest.fixture
def clock(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(tune, "DEVICE", device)
    monkeypatch.setattr(tune, "captured", replayed)
    monkeypatch.setattr(tune, "WAVES", (2, 6))
    monkeypatch.setattr(tune, "TILES", ((32, 4, 3), (128, 4, 2)))
    monkeypatch.setattr(tune, "CLASSIC_TILES", tune.CLASSIC_TILES[-2:])
    return cast(Clock, CountingClock())


def options(**named: object) -> SimpleNamespace:
    return SimpleNamespace(**({"prefill": False, "v1": False, "queries": 1, "rows": []} | named))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "row", "names"),
    [
        ({}, DECODES, ["decodes"]),
        pytest.param({"prefill": True}, CHUNKS, ["chunks"], marks=pytest.mark.slow),
        pytest.param(
            {"v1": True},
            DECODES,
            ["decodes, one partition", "decodes, partitions"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["decode", "prefill", "v1"],
)
def test_every_candidate_is_measured(
    named: dict[str, object], row: Row, names: list[str], clock: Clock
) -> None:
    before = [getattr(*function) for function in FUNCTIONS]
    kernel = tune.kernel_of(options(**named))
    results = tune.measure(row, kernel, clock)
    assert list(results) == names
    for found in results.values():
        assert list(found["candidates"]) == list(kernel.candidates(row))
        assert len(found["candidates"]) >= 2
        assert found["table"] == max(found["candidates"].values()) + 1  # the clock runs up
    assert [getattr(*function) for function in FUNCTIONS] == before


@pytest.mark.slow
def test_a_kernel_is_launched_as_its_candidate_says(clock: Clock) -> None:
    launches = []

    def side(batch: Batch, paged: Paged) -> Side:
        launches.append(prefill_tuning.prefill_launch(HOPPER, 3, 2, 48, 16, 16, 2))
        return ours_prefill(batch, paged)

    kernel = tune.kernel_of(options(prefill=True))._replace(forms={"": side})
    tune.measure(CHUNKS, kernel, clock)
    assert launches[:-1] == [Launch(*tile) for tile in tune.PREFILL_TILES]


def test_hopper_has_candidates_of_its_own_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "device_class", lambda _: HOPPER)
    for dims, tiles in tune.HOPPER_TILES.items():
        row = PREFILL[0]._replace(head_dim=dims[0], value_dim=dims[1])
        usual = prefill_tuning.hopper_prefill_launch(HOPPER, *dims, 2)
        assert usual is not None
        found = tune.prefill_candidates(row)
        names = [name for name in found if name.startswith("hopper")]
        assert len(names) == len(tiles)
        for name in names:
            with tune.replaced(found[name]):
                launch = prefill_tuning.hopper_prefill_launch(HOPPER, *dims, 2)
                assert prefill_tuning.prefill_launch(HOPPER, 1, 8, 4096, *dims, 2) == launch
            assert launch is not None
            assert launch.block_m == usual.block_m
            elements = launch.block_m * dims[0] + launch.num_stages * launch.block_n * sum(dims)
            assert 2 * elements + 1024 <= HOPPER.shared_memory
        assert f"hopper {tune.text(usual)}" in names
        with tune.replaced(found[next(iter(found))]):
            assert prefill_tuning.hopper_prefill_launch(HOPPER, *dims, 2) is None


def test_every_head_dim_of_hoppers_kernel_is_tuned() -> None:
    assert list(tune.HOPPER_TILES) == list(prefill_tuning._HOPPER_LAUNCHES)
    rows = tune.kernel_of(options(prefill=True)).rows
    assert {(row.head_dim, row.dims - row.head_dim) for row in rows} == set(tune.HOPPER_TILES)


def test_the_table_is_among_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in (1, 4, 128):
        launch = paged_attention_kernel.paged_attention_launch(HOPPER, group, 128, 2)
        assert tune.text(launch[1:]) in tune.classic_candidates(DECODE[0])
    monkeypatch.setattr(prefill_tuning, "hopper_prefill_launch", lambda *_: None)
    monkeypatch.setattr(tuning, "device_class", lambda _: HOPPER)
    for row in (*PREFILL, *PREFILL_DIMS):
        num_rows = sum(row.q_lens) * row.num_heads // row.num_kv_heads
        dims = row.head_dim, row.dims - row.head_dim
        launch = prefill_tuning.prefill_launch(HOPPER, len(row.lengths), row.num_kv_heads, num_rows, *dims, 2)
        assert f"general {tune.text(launch)}" in tune.prefill_candidates(row)


@pytest.mark.slow
def test_what_does_not_fit_or_is_wrong_is_left_out(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> Launch:
        raise RuntimeError("out of resources")

    def side(batch: Batch, paged: Paged) -> Side:
        right = ours_decode(batch, paged)
        return right._replace(run=lambda: right.run() + (merge_states.merge_launch(1, 1) is None))

    functions: dict[str, tune.Functions] = {
        "broken": {(decode_tuning, "decode_launch"): broken},
        "wrong": {(merge_states, "merge_launch"): lambda *_: None},
        "right": {},
    }
    kernel = tune.Kernel([DECODES], 0, lambda _: functions, {"": side})
    assert list(tune.measure(DECODES, kernel, clock)["decodes"]["candidates"]) == ["right"]
    printed = capsys.readouterr().out
    assert "decodes: broken is left out: RuntimeError: out of resources" in printed
    assert "decodes: wrong is left out: ArithmeticError: wrong by" in printed


def test_several_queries_are_more_rows_of_a_tile() -> None:
    kernel = tune.kernel_of(options(queries=8, rows=["B1 x 1k"]))
    (row,) = kernel.rows
    assert (row.name, row.q_lens) == ("B1 × 1k, 8 queries", (8,))
    heights = {name.split("x")[0] for name in kernel.candidates(row)}
    assert heights == {"32", "64"}


def test_a_run(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "Clock", lambda _: clock)
    monkeypatch.setattr(tune, "PREFILL", (CHUNKS,))
    monkeypatch.setattr(tune, "PREFILL_TILES", tune.PREFILL_TILES[-1:])
    monkeypatch.setattr(tune, "PREFILL_DIMS", ())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(tune, "print_machine", lambda: None)
    monkeypatch.setattr("bench.common.report.machine", lambda: {"device": "none"})
    out = tmp_path / "tune.json"
    monkeypatch.setattr(sys, "argv", ["tune", "--prefill", "--out", str(out)])
    tune.main()
    assert "current" in capsys.readouterr().out
    assert list(json.loads(out.read_text())["results"]) == ["chunks"]
