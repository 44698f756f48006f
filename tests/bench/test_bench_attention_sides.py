"""The sides of `bench/kernels/attention.py`: each attends to the same keys, and wrong ones are refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from bench.kernels import attention_batches as batches
from bench.kernels import attention_peers as peers
from bench.kernels import attention_rows as rows
from bench.kernels import paged_attention
from tests.support.fake_attention import (
    EVEN,
    FRESH,
    MIXED,
    RAGGED,
    SHARING,
    UNEVEN,
    PagedWrapper,
    PrefillWrapper,
    flashinfer_in_torch,
)


@pytest.fixture
def flashinfer(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peers.FlashInfer:
    return flashinfer_in_torch(device, tmp_path, monkeypatch)


def test_rows_are_as_large_as_they_are_known_to_be() -> None:
    megabytes = [round(row.bytes / 1e6) for row in rows.DECODE]
    assert megabytes == [4, 34, 537, 134, 134, 2147, 1611, 2147, 2147, 811, 549, 1074, 2147, 268]
    assert [sum(row.lengths) for row in rows.DECODE if "skewed" in row.name] == [197_959, 133_966]
    assert RAGGED.flops == 4 * 16 * 4 * (20 * 21 // 2 + (31 + 32 + 33) + 5)
    assert RAGGED.bytes == 2 * 16 * (2 * 58 * 2 + 2 * 24 * 4)
    assert SHARING.bytes == 2 * 16 * 2 * (21 + 9 + 6 + 19) * 2
    assert [round(row.bytes / 1e6) for row in rows.GROUPS] == [201, 143]
    latent = RAGGED._replace(head_dim=24, value_dim=16)
    assert latent.flops == RAGGED.flops // 32 * 40
    assert latent.bytes == RAGGED.bytes // 32 * 40
    assert set(rows.SEVERAL_QUERIES) | set(rows.WRITTEN) <= {row.name for row in rows.DECODE}


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


@pytest.mark.parametrize("shift", [0, 4])
def test_shared_tokens_are_in_the_same_slots(shift: int, device: torch.device) -> None:
    batch = batches.make_batch(SHARING, device)
    paged = batches.scatter(batch, shift)
    whole = 21 >> shift << shift
    assert torch.equal(paged.pool[paged.slots], batch.kv)
    assert len(paged.slots.unique()) == len(batch.kv) - 2 * whole
    first, second, third = paged.slots.split(batch.lengths)
    assert torch.equal(second[:whole], first[:whole])
    assert torch.equal(third[:whole], first[:whole])


@pytest.mark.parametrize("row", [UNEVEN, EVEN], ids=lambda row: row.name)
def test_runs_by_index(row: rows.Row, device: torch.device) -> None:
    batch = batches.make_batch(row, device)
    paged, expected = batches.scatter(batch, batches.CONTIGUOUS), batches.reference(batch)
    for ours in (peers.ours_decode, peers.ours_prefill):
        batches.check(ours(batch, paged).run(), expected)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("row", [UNEVEN, EVEN], ids=lambda row: row.name)
def test_decode_sides_are_right(
    row: rows.Row, shift: int, device: torch.device, flashinfer: peers.FlashInfer
) -> None:
    batch = batches.make_batch(row, device)
    paged, expected = batches.scatter(batch, shift), batches.reference(batch)
    sides = [peers.ours_decode(batch, paged)]
    sides += [flashinfer.decode(batch, paged, tensor_cores) for tensor_cores in (False, True)]
    if shift == 4:
        sides += [peers.classic_decode(batch, paged, form) for form in peers.CLASSIC_FORMS]
    if batch.is_even():
        sides.append(peers.sdpa_decode(batch, SDPBackend.MATH))
    for side in sides:
        batches.check(side.tokens(side.run()), expected)


def test_classic_sides_are_right_with_each_tile(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "TILES", paged_attention.TILES[:1])
    batch = batches.make_batch(UNEVEN, device)
    expected, made = batches.reference(batch), paged_attention.sides(batch, batches.scatter(batch, 4), True)
    assert len(made) == 2 + 2 * len(peers.CLASSIC_FORMS)
    for make, functions in made.values():
        with peers.replaced(functions):
            batches.check(make().run(), expected)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("row", [FRESH, RAGGED], ids=lambda row: row.name)
def test_prefill_sides_are_right(
    row: rows.Row, shift: int, device: torch.device, flashinfer: peers.FlashInfer
) -> None:
    batch = batches.make_batch(row, device)
    paged, expected = batches.scatter(batch, shift), batches.reference(batch)
    sides = [peers.ours_prefill(batch, paged)]
    sides += [flashinfer.prefill(batch, paged, backend) for backend in ("fa2", "fa3")]
    if batch.is_even():
        sides.append(peers.sdpa_prefill(batch, SDPBackend.MATH))
    for side in sides:
        batches.check(side.tokens(side.run()), expected)


def test_mixed_sides_are_right(device: torch.device, flashinfer: peers.FlashInfer) -> None:
    batch = batches.make_batch(MIXED, device)
    assert batch.num_prefills == 2
    paged, expected = batches.scatter(batch, 0), batches.reference(batch)
    sides = [peers.ours_mixed(batch, paged), flashinfer.prefill(batch, paged, "fa2")]
    for side in sides:
        batches.check(side.tokens(side.run()), expected)


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_cascade_is_right(
    backend: str, shift: int, device: torch.device, flashinfer: peers.FlashInfer
) -> None:
    row = SHARING._replace(shared=16)
    batch = batches.make_batch(row, device)
    side = flashinfer.cascade(batch, batches.scatter(batch, shift), backend)
    batches.check(side.run(), batches.reference(batch))


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


def test_rows_are_chosen_by_what_stands_in_their_names() -> None:
    assert rows.chosen(rows.DECODE, []) == list(rows.DECODE)
    assert [row.name for row in rows.chosen(rows.DECODE, ["b1 x 1k", "SKEWED"])] == [
        "B1 × 1k",
        "B64 skewed",
        "B16 skewed",
    ]


def test_the_rows_of_the_parts() -> None:
    for own in rows.ROWS.values():
        assert len({row.name for row in own}) == len(own)
    for part, quick in rows.QUICK.items():
        assert set(quick) <= {row.name for row in rows.ROWS[part]}
    assert [row.q_lens for row in rows.CURVE] == [(2**power,) for power in range(10)]
    assert {row.lengths[0] - row.q_lens[0] for row in rows.CURVE[1:]} == {32768}
    assert [round(row.flops / 1e9) for row in rows.TURNS] == [34, 430, 1108, 9]
    assert {(row.head_dim, row.value_dim) for row in (*rows.DECODE_DIMS, *rows.PREFILL_DIMS)} >= {
        (64, None),
        (80, None),
        (96, None),
        (192, 128),
        (256, None),
    }


def test_rows_are_measured_by_part_name_and_quick() -> None:
    found = rows.rows_to_measure([], [], quick=True)
    assert {part: tuple(row.name for row in own) for part, own in found.items()} == rows.QUICK
    assert list(rows.rows_to_measure([], [], quick=False)) == list(rows.ROWS)
    found = rows.rows_to_measure(["turns", "curve", "groups"], ["64 after 32k"], quick=False)
    assert {part: [row.name for row in own] for part, own in found.items()} == {
        "turns": ["64 after 32k"],
        "curve": ["64 after 32k"],
    }
    assert rows.rows_to_measure(["groups"], [], quick=True) == {}
