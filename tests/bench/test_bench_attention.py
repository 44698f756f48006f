"""What `bench/kernels/attention.py` measures is right:
every side attends to the same keys; wrong ones are left out."""

import json
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench.common import device_clock
from bench.common.device_clock import CapturedStep, captured
from bench.common.report import load_pyplot
from bench.common.steady import Timing
from bench.kernels import attention as bench
from bench.kernels import attention_batches as batches
from bench.kernels import attention_figures as figures
from bench.kernels import attention_peers as peers
from bench.kernels import attention_rows as rows
from bench.kernels import attention_sides as sides_module
from tests.support.fake_attention import EVEN, FRESH, MIXED, RAGGED, SHARING, UNEVEN, flashinfer_in_torch
from tests.support.fake_clock import CountingClock, graphs_without_a_device, replayed

MATH = {"math": SDPBackend.MATH}


@pytest.fixture
def clock(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> device_clock.Clock:
    for module in (bench, device_clock):
        monkeypatch.setattr(module, "DEVICE", device)
        monkeypatch.setattr(module, "captured", replayed)
        monkeypatch.setattr(module, "CapturedStep", lambda step: SimpleNamespace(replay=step))
    monkeypatch.setattr(sides_module, "SDPA", MATH)
    monkeypatch.setattr(bench, "LAYERS", 2)
    monkeypatch.setattr(bench, "gather_us", partial(device_clock.gather_us, grids=(2,)))
    return cast(device_clock.Clock, CountingClock())


@pytest.fixture
def tools(clock: device_clock.Clock) -> bench.Bench:
    return bench.Bench(clock, device_clock.Ceiling(1.0, 1e4, 1e6), sides_module.PEERS, None)


@pytest.fixture
def flashinfer(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peers.FlashInfer:
    return flashinfer_in_torch(device, tmp_path, monkeypatch)


def test_a_missing_flashinfer_is_left_out(
    clock: device_clock.Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert bench.load_flashinfer(None, {"decode"}) is None
    assert "FlashInfer is left out" in capsys.readouterr().out


def test_a_decode_row(tools: bench.Bench, flashinfer: peers.FlashInfer) -> None:
    found = bench.measure_row(EVEN, sides_module.decode_sides, tools._replace(flashinfer=flashinfer))
    assert found["failed"] == {}
    of_pages = [f"{kind} p{page}" for page in (1, 16) for kind in ("lightkv", "FlashInfer", "FlashInfer tc")]
    classic = ["v1 p16 one partition", "v1 p16 partitions"]
    assert list(found["sides"]) == [*of_pages, *classic, "lightkv contiguous", "SDPA math"]
    assert found["best_peer"] == "FlashInfer p1"  # the clock runs up
    assert found["ratio"] == found["ratio_of_best_page"] == 3 / 4
    assert found["floor_us"] == 1.0 + EVEN.bytes / 1e4
    assert found["sides"]["lightkv p1"]["tb_per_s"] == EVEN.bytes / 3 / 1e6
    assert found["sides"]["lightkv p1"]["plan_us"] == 1.0


@pytest.mark.gpu
def test_a_replayed_graph_is_what_is_checked(tools: bench.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "CapturedStep", CapturedStep)
    monkeypatch.setattr(bench, "captured", captured)
    for row, sides in (
        (EVEN, sides_module.decode_sides),
        (FRESH, sides_module.prefill_sides),
        (MIXED, sides_module.mixed_sides),
        (SHARING, sides_module.group_sides),
    ):
        found = bench.measure_row(row, sides, tools)
        assert found["failed"] == {}
        assert list(found["sides"]) == list(sides(batches.make_batch(row, bench.DEVICE), tools))


@pytest.mark.slow
def test_a_prefill_row(tools: bench.Bench, flashinfer: peers.FlashInfer) -> None:
    found = bench.measure_row(RAGGED, sides_module.prefill_sides, tools._replace(flashinfer=flashinfer))
    assert found["failed"] == {}
    kinds = ("lightkv", "FlashInfer fa2", "FlashInfer fa3")
    of_pages = [f"{kind} p{page}" for page in (1, 16) for kind in kinds]
    assert list(found["sides"]) == [*of_pages, "lightkv contiguous"]
    assert found["sides"]["FlashInfer fa2 p1"]["tflop_per_s"] == RAGGED.flops / 4 / 1e6
    fresh = bench.measure_row(FRESH, sides_module.prefill_sides, tools)
    assert list(fresh["sides"]) == ["lightkv p1", "lightkv p16", "lightkv contiguous", "SDPA math"]


@pytest.mark.slow
def test_a_mixed_row(tools: bench.Bench, flashinfer: peers.FlashInfer) -> None:
    found = bench.measure_mixed(MIXED, tools._replace(flashinfer=flashinfer))
    assert found["failed"] == {}
    assert list(found["sides"]) == ["lightkv p1", "FlashInfer fa2 p1", "FlashInfer fa3 p1"]
    assert found["alone_us"] == {"prefills": 3.0, "decodes": 4.0}  # the clock runs up
    assert found["ratio"] == found["ratio_of_best_page"] == 5 / 6
    assert found["floor_us"] == 1.0 + max(MIXED.bytes / 1e4, MIXED.flops / 1e6)


def test_a_row_of_a_group(tools: bench.Bench, flashinfer: peers.FlashInfer) -> None:
    found = bench.measure_groups(SHARING, tools._replace(flashinfer=flashinfer))
    assert found["failed"] == {}
    cascades = ["FlashInfer cascade fa2 p1", "FlashInfer cascade fa3 p1"]
    assert list(found["sides"]) == [bench.UNGROUPED, "lightkv p1", "FlashInfer tc p1", *cascades]
    assert list(found["speedups"].values()) == [1.0, 3 / 4, 3 / 5, 3 / 6, 3 / 7]
    assert found["floor_us"] == 1.0 + SHARING.bytes / 1e4


def test_a_side_that_fails_or_is_wrong_is_left_out(
    tools: bench.Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def sides(batch: batches.Batch, _: bench.Bench) -> dict[str, sides_module.Make]:
        def fails() -> peers.Side:
            raise RuntimeError("no such kernel")

        right = peers.ours_decode(batch, batches.scatter(batch, 0))
        unwritten = torch.zeros_like(batch.q)
        return {
            "fails": fails,
            "wrong": lambda: peers.Side(lambda: right.run() + 0.1),
            "writes nothing": lambda: peers.Side(lambda: unwritten),
            "lightkv p1": lambda: right,
        }

    found = bench.measure_row(UNEVEN, sides, tools)
    assert list(found["sides"]) == ["lightkv p1"]
    assert list(found["failed"]) == ["fails", "wrong", "writes nothing"]
    assert found["failed"]["fails"] == "RuntimeError: no such kernel"
    assert found["failed"]["wrong"].startswith("ArithmeticError: wrong by up to")
    assert "uneven: fails is left out: RuntimeError: no such kernel" in capsys.readouterr().out
    assert "ratio" not in found  # there is no peer


def test_a_row_that_fails_is_left_out(tools: bench.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> bench.Results:
        raise RuntimeError("out of memory")

    assert bench.attempt("a row", fails) == {"failed": "RuntimeError: out of memory"}
    printed = capsys.readouterr()
    assert "a row is left out" in printed.out
    assert printed.err.startswith("Traceback")
    assert "in fails" in printed.err


def test_what_graphs_read_lives_as_long_as_they(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors that only a side holds are not freed before its graph has been timed."""
    graphs_without_a_device(monkeypatch)
    monkeypatch.setattr(bench, "check", lambda *_: None)
    held: list[weakref.ref[torch.Tensor]] = []

    def make() -> peers.Side:
        read, out = torch.ones(3, 2), torch.empty(3, 2)
        held.extend(map(weakref.ref, (read, out)))
        return peers.Side(lambda: out.copy_(read))

    class Watching(CountingClock):
        def replay_in_turns(self, graphs: Any, _rule: object = None) -> dict[str, Timing]:
            assert len(graphs) == 2
            assert all(tensor() is not None for tensor in held)
            return super().replay_in_turns(graphs)

    clock = cast(device_clock.Clock, Watching())
    found = bench.measure_sides(EVEN, {"one": make, "other": make}, torch.empty(3, 2), clock)
    assert found["failed"] == {}
    assert len(held) == 4
    assert all(tensor() is None for tensor in held)


@pytest.mark.gpu
def test_a_graph_is_right_after_memory_was_freed() -> None:
    """The memory of what the graph reads and writes is neither returned to the device nor used again."""

    def make() -> tuple[CapturedStep, torch.Tensor]:
        read = torch.ones(2**24, device=device_clock.DEVICE)
        out = torch.empty_like(read)

        def run() -> torch.Tensor:
            return out.copy_(read)

        run()
        return captured(run)

    graph, out = make()
    torch.cuda.empty_cache()
    others = [torch.full_like(out, float("nan")) for _ in range(4)]
    graph.replay()
    assert bool((out == 1).all())
    assert all(bool(other.isnan().all()) for other in others)


@pytest.mark.slow
def test_what_belongs_to_a_decode_row(tools: bench.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SEVERAL_QUERIES", {"even": 3})
    monkeypatch.setattr(bench, "WRITTEN", ("even",))
    parts = ("reading", "plan", "queries", "write")
    results: bench.Results = {part: {} for part in parts}
    bench.measure_decode_extras(EVEN, tools, results)
    assert all("failed" not in results[part]["even"] for part in parts)
    queries = results["queries"]["even"]
    assert queries["ratio"] == queries["3"]["median"] / queries["1"]["median"]
    write = results["write"]["even"]
    assert write["us_per_layer"] == pytest.approx(-1 / 2)  # the clock runs up
    assert write["pools"] == 2


def test_a_write_that_is_not_seen_is_refused(
    clock: device_clock.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "write_kv", lambda *_: None)
    with pytest.raises(ArithmeticError, match="wrong by up to inf"):
        bench.measure_write(EVEN, clock)


def test_rows_are_read_where_they_are(clock: device_clock.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batches.make_batch(UNEVEN, bench.DEVICE)
    paged = batches.scatter(batch, 0)
    assert device_clock.gather_us(paged.blocks, paged.slots, clock, grids=(2, 3)) == 3.0
    monkeypatch.setattr(device_clock, "_gather_kernel", {(paged.blocks.shape[1], 2): lambda *_, **__: None})
    with pytest.raises(SystemExit, match="did not read them all"):
        device_clock.gather_us(paged.blocks, paged.slots, clock, grids=(2,))


def test_the_ceiling_reads_every_word(clock: device_clock.Clock) -> None:
    ceiling, found = device_clock.measure_ceiling(clock, num_words=2**14, side=16, grids=(1, 3))
    assert ceiling.empty_us == 3.0
    assert len(found["read_us"]) == 10
    assert ceiling.bytes_per_us == 4 * 2**14 / (4.0 - 3.0)
    assert ceiling.flops_per_us == 2 * 16**3 / 11


@pytest.mark.parametrize(
    ("named", "quick", "measured"),
    [
        ((), False, ["decode", "prefill", "mixed", "groups"]),
        (("decode", "prefill"), False, ["decode", "prefill"]),
        (("groups",), False, ["groups"]),
        ((), True, ["decode", "prefill"]),
    ],
    ids=["all", "two_parts", "one_part", "quick"],
)
def test_a_run_measures_the_parts_that_are_named(
    named: tuple[str, ...],
    quick: bool,
    measured: list[str],
    tools: bench.Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_part = {"decode": EVEN, "prefill": FRESH, "mixed": MIXED, "groups": SHARING}
    for module in (bench, rows):
        monkeypatch.setattr(module, "ROWS", {part: (row, RAGGED) for part, row in by_part.items()})
    monkeypatch.setattr(rows, "QUICK", {"decode": ("even",), "prefill": ("fresh",)})
    monkeypatch.setattr(bench, "Clock", lambda _: tools.clock)
    monkeypatch.setattr(bench, "measure_ceiling", lambda _: (tools.ceiling, {}))
    made: list[tuple[str, bench.Bench]] = []

    def measure_part(_: str, row: rows.Row, own: bench.Bench) -> bench.Results:
        made.append((row.name, own))
        return {"row": row.name, "sides": {}}

    monkeypatch.setattr(bench, "measure_part", measure_part)
    needed: list[set[str]] = []
    monkeypatch.setattr(bench, "load_flashinfer", lambda _, kernels: needed.append(kernels))
    monkeypatch.setattr(
        "bench.common.report.machine", lambda: {"device": "", "cores": 1, "threads": 1, "versions": {}}
    )
    monkeypatch.setattr(bench, "print_machine", lambda: None)
    options: dict[str, object] = {part: part in named for part in by_part}
    options |= {"rows": [by_part[part].name for part in measured], "peers": ["fa3", "flashinfer"]}
    options |= {"quick": quick, "flashinfer_cache": None, "repeats": 1, "out": tmp_path / "out.json"}
    results = bench.measure(SimpleNamespace(**options, fa3=tmp_path))
    for part, row in by_part.items():
        assert list(results[part]) == ([row.name] if part in measured else [])
        assert all(found["row"] == row.name for found in results[part].values())
    assert needed == ([] if quick else [{kernel for part in measured for kernel in bench.FLASHINFER[part]}])
    assert all(own.shifts == ((0,) if quick else (0, 4)) for _, own in made)
    assert list(results["reading"]) == ([] if quick or "decode" not in measured else ["even"])
    assert results["fa3"] is None
    printed = capsys.readouterr().out
    assert "FlashAttention 3 is left out" in printed
    assert "; 0 rows failed" in printed
    assert json.loads((tmp_path / "out.json").read_text())["results"] == results


def test_a_run_without_a_row_is_refused(tmp_path: Path) -> None:
    options = dict.fromkeys(rows.ROWS, False) | {"rows": ["no such row"], "quick": False}
    with pytest.raises(SystemExit, match="no row of these parts has one of"):
        bench.measure(SimpleNamespace(**options))


@pytest.mark.slow
def test_a_file_is_drawn_again(
    tools: bench.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sides_module, "SHIFTS", (0,))
    results: bench.Results = {part: {} for part in ("plan", "queries", "write")}
    results["decode"] = {
        "even": bench.measure_row(EVEN, sides_module.decode_sides, tools),
        "broken": {"failed": "so"},
    }
    results["prefill"] = {"ragged": bench.measure_row(RAGGED, sides_module.prefill_sides, tools)}
    results["mixed"] = {
        "mixed": results["prefill"]["ragged"] | {"alone_us": {"prefills": 2.0, "decodes": 1.5}}
    }
    results["groups"] = {"sharing": results["decode"]["even"] | {"speedups": {"FlashInfer p1": 2.0}}}
    few, many = (RAGGED._replace(lengths=(40,), q_lens=(count,)) for count in (2, 4))
    results["curve"] = {
        str(row.q_lens): bench.measure_row(row, sides_module.curve_sides, tools) for row in (many, few)
    }
    results["plan"]["even"] = bench.measure_plan(EVEN, tools.clock)
    source, picture = tmp_path / "attention.json", tmp_path / "attention.png"
    source.write_text(json.dumps({"results": results}))
    monkeypatch.setattr(sys, "argv", ["attention", "--replot", str(source), "--plot", str(picture)])
    bench.main()
    printed = capsys.readouterr().out
    assert "TB/s" in printed
    assert "TFLOP/s" in printed
    assert "mixed: alone prefills 2.0, decodes 1.5, together 3.5 µs; in one call" in printed
    assert "sharing: FlashInfer p1 is 2.00 times as fast as lightkv ungrouped" in printed
    assert "even: the plan of a step takes" in printed
    assert "the curve: 4 queries take " in printed  # the clock runs up, and they were measured first
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert load_pyplot().get_fignums() == []
    assert figures.over_floor(results["prefill"]["ragged"]).keys() == {"lightkv p1", "lightkv contiguous"}


def test_the_curve_is_read_from_its_rows() -> None:
    def found(queries: int, ours: float, fa3: float) -> bench.Results:
        sides = {"lightkv p1": {"median": ours}, "FA3 p1": {"median": fa3}}
        return {"queries": queries, "floor_us": 5.0, "sides": sides}

    curve = {"8": found(8, 10.2, 10.0), "broken": {"failed": "so"}, "1": found(1, 10.0, 10.0)}
    points = figures.curve_points(curve)
    assert points == {
        "lightkv p1": {1: 10.0, 8: 10.2},
        "FA3 p1": {1: 10.0, 8: 10.0},
        "floor": {1: 5.0, 8: 5.0},
    }
    assert figures.curve_faults(points) == []
    for queries, ours in ((16, 10.1), (32, 9.9), (64, 20.0)):
        curve[str(queries)] = found(queries, ours, 15.0)
    assert figures.curve_faults(figures.curve_points(curve)) == [
        "32 queries take 9.9 µs, fewer take up to 10.2 µs",
        "64 queries take 1.33 times as long as FA3",
    ]


def test_all_rows_are_compiled_before(
    tools: bench.Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def made(batch: batches.Batch, own: bench.Bench) -> dict[str, sides_module.Make]:
        assert own.fa3 is own.flashinfer is None
        assert own.peers == ()

        def make() -> peers.Side:
            if len(batch.lengths) == 3:
                raise RuntimeError("no such kernel")
            return peers.Side(lambda: ran.append("ran") or batch.q)  # type: ignore[func-returns-value]

        return {"lightkv p1": make, "lightkv p16": make}

    monkeypatch.setattr(bench, "SIDES", {"decode": made})
    bench.compile_ours({"decode": [EVEN, UNEVEN]}, tools)
    assert ran == ["ran", "ran"]
    assert "1 rows failed" in capsys.readouterr().out
