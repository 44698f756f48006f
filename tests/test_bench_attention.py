"""What `bench/attention.py` measures is right: every side attends to the same keys; wrong ones are left out."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_clock import CountingClock, replayed
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench import attention as bench
from bench import attention_batches as batches
from bench import attention_figures as figures
from bench import attention_peers as peers
from bench import device_clock
from bench.allocator import capture
from bench.device_clock import captured
from bench.serving_figures import load_pyplot

UNEVEN = batches.Row("uneven", (1, 40, 16), (1, 1, 1), 4, 2, 16, torch.float16)
EVEN = UNEVEN._replace(name="even", lengths=(20, 20), q_lens=(1, 1), num_heads=2, num_kv_heads=1)
FRESH = UNEVEN._replace(name="fresh", lengths=(20, 20), q_lens=(20, 20))
RAGGED = UNEVEN._replace(name="ragged", lengths=(20, 33, 5), q_lens=(20, 3, 1))
MATH = {"math": SDPBackend.MATH}


@pytest.fixture
def clock(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> device_clock.Clock:
    monkeypatch.setattr("bench.allocator.DEVICE", device)
    for module in (bench, device_clock):
        monkeypatch.setattr(module, "DEVICE", device)
        monkeypatch.setattr(module, "captured", replayed)
        monkeypatch.setattr(module, "capture", lambda step: SimpleNamespace(replay=step))
    monkeypatch.setattr(bench, "SDPA", MATH)
    monkeypatch.setattr(bench, "LAYERS", 2)
    return cast(device_clock.Clock, CountingClock())


@pytest.fixture
def tools(clock: device_clock.Clock) -> bench.Bench:
    return bench.Bench(clock, device_clock.Ceiling(1.0, 1e4, 1e6), bench.PEERS, None)


class PagedWrapper:
    """FlashInfer's paged wrappers, in plain torch: the arguments of theirs, and what they document of them."""

    causal = False

    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.options = options

    def _plan(self, q_starts: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
              num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *, sm_scale: float,
              q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:  # fmt: skip
        for numbers in (q_starts, indptr, indices, last_page_len):
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
        assert len(indptr) == len(q_starts) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        assert 1 <= last_page_len.min() <= last_page_len.max() <= page_size
        self.planned = q_starts, indptr, indices, last_page_len, page_size, sm_scale
        self.heads, self.dtypes = (num_heads, num_kv_heads, head_dim), (q_data_type, kv_data_type)

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        q_starts, indptr, indices, last_page_len, page_size, sm_scale = self.planned
        assert self.heads == (q.shape[1], pages[0].shape[2], q.shape[2])
        assert self.dtypes == (q.dtype, pages[0].dtype)
        assert pages[0].shape[1] == page_size
        assert pages[0].stride() == pages[1].stride()
        for request in range(len(last_page_len)):
            own = indices[indptr[request] : indptr[request + 1]].long()
            length = (len(own) - 1) * page_size + int(last_page_len[request])
            k, v = (half[own].flatten(0, 1)[:length] for half in pages)
            queries = slice(int(q_starts[request]), int(q_starts[request + 1]))
            first = length - (queries.stop - queries.start) if self.causal else length - 1
            positions = torch.arange(first, length, device=q.device)
            out[queries] = batches.attend_reference(
                q[queries], k, v, positions, scale=sm_scale, window=0, softcap=0.0
            ).to(out.dtype)
        return out


class DecodeWrapper(PagedWrapper):
    def plan(self, indptr: Tensor, *lists_and_sizes: Any, **options: Any) -> None:
        assert self.options["use_cuda_graph"]
        buffers = [self.options[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
        for given, buffer in zip((indptr, *lists_and_sizes[:2]), buffers, strict=True):
            buffer.copy_(given)
        self._plan(torch.arange(len(indptr), dtype=torch.int32), indptr, *lists_and_sizes, **options)


class PrefillWrapper(PagedWrapper):
    causal = True

    def plan(self, *lists_and_sizes: Any, causal: bool, **options: Any) -> None:
        assert causal
        assert self.options["backend"] in ("fa2", "fa3")
        self._plan(*lists_and_sizes, **options)


@pytest.fixture
def flashinfer(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peers.FlashInfer:
    module = SimpleNamespace(
        __version__="0",
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
        BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", cast(Any, module))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "")  # so that it is set back
    monkeypatch.setattr(peers.FlashInfer, "WORKSPACE", 1024)
    return peers.FlashInfer(device, tmp_path)


def test_rows_are_as_large_as_they_are_known_to_be() -> None:
    megabytes = [round(row.bytes / 1e6) for row in batches.DECODE]
    assert megabytes == [4, 34, 537, 134, 134, 2147, 2147, 811, 549, 1074, 2147, 268]
    assert [sum(row.lengths) for row in batches.DECODE if "skewed" in row.name] == [197_959, 133_966]
    assert RAGGED.flops == 4 * 16 * 4 * (20 * 21 // 2 + (31 + 32 + 33) + 5)
    assert RAGGED.bytes == 2 * 16 * (2 * 58 * 2 + 2 * 24 * 4)
    assert set(batches.SEVERAL_QUERIES) | set(batches.WRITTEN) <= {row.name for row in batches.DECODE}


@pytest.mark.parametrize("shift", [0, 4, batches.CONTIGUOUS], ids="shift{}".format)
def test_every_token_has_its_slot(shift: int, device: torch.device) -> None:
    batch = batches.make_batch(UNEVEN, device)
    paged = batches.scatter(batch, shift)
    assert len(paged.slots.unique()) == len(batch.kv)
    assert torch.equal(paged.pool[paged.slots], batch.kv)
    assert int(paged.slots.min()) >= (1 << shift if shift < batches.CONTIGUOUS else 1)
    others = torch.ones(len(paged.pool), dtype=torch.bool, device=device)
    others[paged.slots] = False
    assert bool((paged.pool[others] == batches.GARBAGE).all())
    assert not torch.equal(paged.slots, paged.slots.sort().values)


@pytest.mark.parametrize("row", [UNEVEN, EVEN], ids=lambda row: row.name)
def test_runs_by_index(row: batches.Row, device: torch.device) -> None:
    batch = batches.make_batch(row, device)
    paged, expected = batches.scatter(batch, batches.CONTIGUOUS), batches.reference(batch)
    for ours in (peers.ours_decode, peers.ours_prefill):
        batches.check(ours(batch, paged).run(), expected)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("row", [UNEVEN, EVEN], ids=lambda row: row.name)
def test_decode_sides_are_right(
    row: batches.Row, shift: int, device: torch.device, flashinfer: peers.FlashInfer
) -> None:
    batch = batches.make_batch(row, device)
    paged, expected = batches.scatter(batch, shift), batches.reference(batch)
    sides = [peers.ours_decode(batch, paged)]
    sides += [flashinfer.decode(batch, paged, tensor_cores) for tensor_cores in (False, True)]
    if shift == 4:
        sides += [peers.classic_decode(batch, paged, size) for size in (0, 16)]
    if batch.is_even():
        sides.append(peers.sdpa_decode(batch, SDPBackend.MATH))
    for side in sides:
        batches.check(side.tokens(side.run()), expected)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("row", [FRESH, RAGGED], ids=lambda row: row.name)
def test_prefill_sides_are_right(
    row: batches.Row, shift: int, device: torch.device, flashinfer: peers.FlashInfer
) -> None:
    batch = batches.make_batch(row, device)
    paged, expected = batches.scatter(batch, shift), batches.reference(batch)
    sides = [peers.ours_prefill(batch, paged)]
    sides += [flashinfer.prefill(batch, paged, backend) for backend in ("fa2", "fa3")]
    if batch.is_even():
        sides.append(peers.sdpa_prefill(batch, SDPBackend.MATH))
    for side in sides:
        batches.check(side.tokens(side.run()), expected)


def test_the_reference_is_the_same_in_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batches.make_batch(RAGGED, device)
    whole = batches.reference(batch)
    monkeypatch.setattr(batches, "REFERENCE_SCORES", 300)  # two or three queries
    torch.testing.assert_close(batches.reference(batch), whole)


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("error", [0.03, -0.03, float("nan")])
def test_one_wrong_element_is_refused_however_small_the_values(size: float, error: float) -> None:
    expected = size * torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    batches.check(expected.bfloat16(), expected)
    got = expected.clone()
    got[3, 2, 7] += error * (expected[3, 2, 7].abs() + expected[3, 2].square().mean().sqrt())
    with pytest.raises(ArithmeticError, match="wrong by up to"):
        batches.check(got, expected)


def test_flashinfer_compiles_where_it_is_told_to(flashinfer: peers.FlashInfer, tmp_path: Path) -> None:
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(tmp_path.resolve())


def test_kernels_that_do_not_compile_are_tried_once(
    flashinfer: peers.FlashInfer, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def plan(wrapper: PagedWrapper, *_: Any, **__: Any) -> None:
        tried.append(wrapper.options["backend"])
        if tried[-1] == "fa3":
            raise RuntimeError("nvcc: no such file")

    monkeypatch.setattr(PrefillWrapper, "plan", plan)
    batch = batches.make_batch(EVEN, device)
    paged = batches.scatter(batch, 0)
    assert flashinfer.compile(["decode", "fa2", "fa3"], batch) == {"fa3": "nvcc: no such file"}
    assert sorted(tried) == ["fa2", "fa3"]
    with pytest.raises(RuntimeError, match="its kernel fa3 did not compile"):
        flashinfer.prefill(batch, paged, "fa3")
    assert len(tried) == 2
    flashinfer.prefill(batch, paged, "fa2")
    flashinfer.decode(batch, paged, tensor_cores=True)


def test_a_missing_flashinfer_is_left_out(
    clock: device_clock.Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert bench.load_flashinfer(None, True, True) is None
    assert "FlashInfer is left out" in capsys.readouterr().out


def test_a_decode_row(tools: bench.Bench, flashinfer: peers.FlashInfer) -> None:
    found = bench.measure_row(EVEN, bench.decode_sides, tools._replace(flashinfer=flashinfer))
    assert found["failed"] == {}
    of_pages = [f"{kind} p{page}" for page in (1, 16) for kind in ("lightkv", "FlashInfer", "FlashInfer tc")]
    classic = ["v1 p16 one pass", "v1 p16 partitions"]
    assert list(found["sides"]) == [*of_pages, *classic, "lightkv contiguous", "SDPA math"]
    assert found["best_peer"] == "FlashInfer p1"  # the clock runs up
    assert found["ratio"] == found["ratio_of_best_page"] == 3 / 4
    assert found["floor_us"] == 1.0 + EVEN.bytes / 1e4
    assert found["sides"]["lightkv p1"]["tb_per_s"] == EVEN.bytes / 3 / 1e6
    assert found["sides"]["lightkv p1"]["plan_us"] == 1.0


@pytest.mark.gpu
def test_a_replayed_graph_is_what_is_checked(tools: bench.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "capture", capture)
    monkeypatch.setattr(bench, "captured", captured)
    for row, sides in ((EVEN, bench.decode_sides), (FRESH, bench.prefill_sides)):
        found = bench.measure_row(row, sides, tools)
        assert found["failed"] == {}
        ours = [name for name in found["sides"] if not name.startswith("v1")]
        assert ours == ["lightkv p1", "lightkv p16", "lightkv contiguous", "SDPA math"]


def test_a_prefill_row(tools: bench.Bench, flashinfer: peers.FlashInfer) -> None:
    found = bench.measure_row(RAGGED, bench.prefill_sides, tools._replace(flashinfer=flashinfer))
    assert found["failed"] == {}
    kinds = ("lightkv", "FlashInfer fa2", "FlashInfer fa3")
    of_pages = [f"{kind} p{page}" for page in (1, 16) for kind in kinds]
    assert list(found["sides"]) == [*of_pages, "lightkv contiguous"]
    assert found["sides"]["FlashInfer fa2 p1"]["tflop_per_s"] == RAGGED.flops / 4 / 1e6
    fresh = bench.measure_row(FRESH, bench.prefill_sides, tools)
    assert list(fresh["sides"]) == ["lightkv p1", "lightkv p16", "lightkv contiguous", "SDPA math"]


def test_a_side_that_fails_or_is_wrong_is_left_out(
    tools: bench.Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def sides(batch: batches.Batch, _: bench.Bench) -> dict[str, bench.Make]:
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
    assert "a row is left out" in capsys.readouterr().out


def test_what_belongs_to_a_decode_row(tools: bench.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SEVERAL_QUERIES", {"even": 3})
    monkeypatch.setattr(bench, "WRITTEN", ("even",))
    parts = ("decode", "plan", "queries", "write")
    results: bench.Results = {part: {} for part in parts}
    bench.measure_decode(EVEN, tools, results)
    assert all("failed" not in results[part]["even"] for part in parts[1:])
    assert results["decode"]["even"]["failed"] == {}
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


def test_the_ceiling_reads_every_word(clock: device_clock.Clock) -> None:
    ceiling, found = device_clock.measure_ceiling(clock, num_words=2**14, side=16, grids=(1, 3))
    assert ceiling.empty_us == 3.0
    assert len(found["read_us"]) == 10
    assert ceiling.bytes_per_us == 4 * 2**14 / (4.0 - 3.0)
    assert ceiling.flops_per_us == 2 * 16**3 / 11


def test_rows_are_chosen_by_what_stands_in_their_names() -> None:
    assert batches.chosen(batches.DECODE, []) == list(batches.DECODE)
    assert [row.name for row in batches.chosen(batches.DECODE, ["b1 x 1k", "SKEWED"])] == [
        "B1 × 1k",
        "B64 skewed",
        "B16 skewed",
    ]


def test_a_file_is_drawn_again(
    tools: bench.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SHIFTS", (0,))
    results: bench.Results = {part: {} for part in ("plan", "queries", "write")}
    results["decode"] = {
        "even": bench.measure_row(EVEN, bench.decode_sides, tools),
        "broken": {"failed": "so"},
    }
    results["prefill"] = {"ragged": bench.measure_row(RAGGED, bench.prefill_sides, tools)}
    results["plan"]["even"] = bench.measure_plan(EVEN, tools.clock)
    source, picture = tmp_path / "attention.json", tmp_path / "attention.png"
    source.write_text(json.dumps({"results": results}))
    monkeypatch.setattr(sys, "argv", ["attention", "--replot", str(source), "--plot", str(picture)])
    bench.main()
    printed = capsys.readouterr().out
    assert "TB/s" in printed
    assert "TFLOP/s" in printed
    assert "even: the plan of a step takes" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert load_pyplot().get_fignums() == []
    assert figures.over_floor(results["prefill"]["ragged"]).keys() == {"lightkv p1", "lightkv contiguous"}
