"""FlashAttention 3 in `bench/kernels/attention.py`: its arguments, its search for a library and for splits."""

import sys
from hashlib import sha256
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench.common.device_clock import Ceiling, Clock
from bench.kernels import attention as bench
from bench.kernels import attention_batches as batches
from bench.kernels import attention_fa3 as fa3
from bench.kernels import attention_rows as rows
from tests.support.fake_attention import EVEN, FRESH, MIXED, RAGGED, UNEVEN
from tests.support.fake_clock import CountingClock, replayed
from tests.support.fake_fa3 import FAKE_FA3, FORWARD, SCHEDULER, names_of

LATENT = RAGGED._replace(name="192-128", num_heads=2, num_kv_heads=2, head_dim=24, value_dim=16)


@pytest.fixture
def side_of(device: torch.device) -> fa3.FlashAttention3:
    return fa3.FlashAttention3(FAKE_FA3)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("row", [UNEVEN, EVEN, FRESH, RAGGED, MIXED, LATENT], ids=lambda row: row.name)
def test_every_row_is_attended_as_the_library_documents_it(
    row: rows.Row, shift: int, device: torch.device, side_of: fa3.FlashAttention3
) -> None:
    batch = batches.make_batch(row, device)
    side = side_of.attend(batch, batches.scatter(batch, shift), 2)
    out = side.run()
    batches.check(out, batches.reference(batch))
    assert side.run() is out  # a graph writes the same tensor
    assert side.setting == {"num_splits": 2}


def test_the_arguments_are_those_of_the_schema(device: torch.device) -> None:
    batch = batches.make_batch(RAGGED, device)
    paged = batches.scatter(batch, 4)
    forward = fa3.forward_arguments(batch, paged, batch.empty_out(), 3, None)
    assert list(forward) == names_of(FORWARD)
    assert list(fa3.scheduler_arguments(batch, 16, 3)) == names_of(SCHEDULER)
    assert forward["k"].shape == (len(paged.pool) // 16, 16, 2, 16)
    assert forward["k"].stride() == forward["v"].stride() == (16 * 64, 64, 16, 1)
    assert forward["v"].data_ptr() == paged.pool.data_ptr() + 2 * 16 * 2  # K and V share a row of the pool
    assert forward["page_table"].tolist() == (paged.first_slots // 16).tolist()
    assert forward["cu_seqlens_q"].tolist() == [0, 20, 23, 24]
    assert forward["seqused_k"].tolist() == [20, 33, 5]
    assert (forward["max_seqlen_q"], forward["max_seqlen_k"]) == (20, 33)


def test_splits_that_need_too_much_memory_are_not_tried(device: torch.device) -> None:
    def tried(row: rows.Row) -> list[int]:
        heads = batches.HeadShape(row.num_heads, row.num_kv_heads, row.head_dim, row.head_dim)
        q = torch.empty(sum(row.q_lens), row.num_heads, row.head_dim, dtype=row.dtype, device="meta")
        return fa3.splits_to_try(batches.Batch(q, q, list(row.lengths), list(row.q_lens), heads))

    of = {row.name: row for part in rows.ROWS.values() for row in part}
    assert tried(of["64 after 32k"]) == [0, 1, 2, 4, 8, 16, 32, 64]
    assert tried(of["B1 × 1k"]) == [0, 1, 2, 4, 8, 16]
    assert tried(of["1 × 16k fresh"]) == [0, 1, 2]
    assert tried(of["4 × 512 after 32k"])[-1] == 16


def test_the_fastest_number_of_splits_is_taken(
    device: torch.device, side_of: fa3.FlashAttention3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa3, "captured", replayed)
    monkeypatch.setattr(fa3, "splits_to_try", lambda _: [0, 1, 2, 4])
    attend = side_of.attend

    def broken_with_one(batch: batches.Batch, paged: batches.Paged, num_splits: int) -> Any:
        if num_splits == 1:
            raise RuntimeError("no splits")
        return attend(batch, paged, num_splits)

    monkeypatch.setattr(side_of, "attend", broken_with_one)
    times = {"0": 7.0, "2": 5.0, "4": 6.0}

    def replay_in_turns(graphs: dict[str, Any], _: object) -> dict[str, Any]:
        return {name: SimpleNamespace(median=times[name]) for name in graphs}

    clock = cast(Clock, SimpleNamespace(replay_in_turns=replay_in_turns))
    batch = batches.make_batch(EVEN, device)
    side = side_of.best(batch, batches.scatter(batch, 0), clock)
    assert side.setting == {"num_splits": 2, "sweep_us": times}
    monkeypatch.setattr(fa3, "splits_to_try", lambda _: [1])
    with pytest.raises(RuntimeError, match="no splits"):
        side_of.best(batch, batches.scatter(batch, 0), clock)


@pytest.mark.slow
def test_a_row_beside_fa3(
    device: torch.device, side_of: fa3.FlashAttention3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bench, fa3):
        monkeypatch.setattr(module, "captured", replayed)
    monkeypatch.setattr(bench, "DEVICE", device)
    clock, ceiling = cast(Clock, CountingClock()), Ceiling(1.0, 1e4, 1e6)
    tools = bench.Bench(clock, ceiling, ("fa3",), None, side_of, (0, 4), quick=True)
    for row in (EVEN, RAGGED, LATENT):
        found = bench.measure_row(row, bench.sides_of("prefill", tools), tools)
        assert found["failed"] == {}
        assert list(found["sides"]) == ["lightkv p1", "FA3 p1", "lightkv p16", "FA3 p16"]
        took = {name: side["median"] for name, side in found["sides"].items()}
        assert found["over_fa3"] == {
            page: took[f"lightkv {page}"] / took[f"FA3 {page}"] for page in ("p1", "p16")
        }
        assert found["best_peer"] == "FA3 p1"  # the clock runs up
        assert found["sides"]["FA3 p1"]["setting"]["num_splits"] == 0


def test_the_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; take _vllm_fa3_C"):
        fa3.find_library(tmp_path / "nothing.so")
    library = tmp_path / "vllm_flash_attn" / fa3.FILE
    library.parent.mkdir()
    library.touch()
    assert fa3.find_library(library) == library
    assert fa3.find_library(library.parent) == library

    def spec(found: bool) -> ModuleSpec | None:
        made = ModuleSpec("vllm", None, is_package=True)
        made.submodule_search_locations = [str(tmp_path)]
        return made if found else None

    monkeypatch.setattr(fa3, "find_spec", lambda _: spec(True))
    assert fa3.find_library() == library
    assert "vllm" not in sys.modules
    monkeypatch.setattr(fa3, "find_spec", lambda _: spec(False))
    with pytest.raises(FileNotFoundError, match="vLLM is not installed; take"):
        fa3.find_library()


def test_a_library_is_named_by_its_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / fa3.FILE).write_text("a library")
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    found = bench.load_fa3(tmp_path)
    assert found is not None
    assert loaded == [str(tmp_path / fa3.FILE)]
    assert found.version == f"_vllm_fa3_C.abi3.so, sha256 {sha256(b'a library').hexdigest()[:12]}"
    assert found.version in capsys.readouterr().out


def test_a_missing_fa3_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.load_fa3(tmp_path) is None
    assert "FlashAttention 3 is left out: FileNotFoundError: " in capsys.readouterr().out
    broken = tmp_path / fa3.FILE
    broken.write_text("no library")
    assert bench.load_fa3(tmp_path) is None
    assert "FlashAttention 3 is left out: OSError: " in capsys.readouterr().out
