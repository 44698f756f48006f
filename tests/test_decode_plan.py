"""`decode_plan` against its twin, and that every key is in one item of one worker."""

import random
from itertools import pairwise

import pytest
import torch

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.decode_plan import DecodePlan, decode_plan, decode_plan_reference

UNIT = tuning.DECODE_UNIT


def assert_complete(plan: DecodePlan, rows: list[int], firsts: list[int], lengths: list[int]) -> None:
    """Every request's keys are cut into its items, which lie side by side; every item is one worker's."""
    items, starts = plan.items.tolist(), plan.shares[:, 0].tolist()
    for request, (first_item, count) in enumerate(plan.parts.tolist()):
        own = items[first_item : first_item + count]
        assert [item[:2] for item in own] == [[request, rows[request]]] * count
        ends = [firsts[request], *(item[3] for item in own)]
        assert [item[2] for item in own] == ends[:-1]
        assert ends[-1] == lengths[request]
        assert count == 1 or all(item[2] < item[3] for item in own)
    num_items = sum(count for _, count in plan.parts.tolist())
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, num_items)
    for begin, end, fields in zip(starts, starts[1:], plan.shares[:, 1:5].tolist(), strict=False):
        assert begin == end or fields == items[begin]
    several = [request for request, (_, count) in enumerate(plan.parts.tolist()) if count > 1]
    assert [request for request in plan.split.tolist() if request >= 0] == several


@pytest.mark.parametrize("seed", range(30))
def test_any_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    num_workers, window = rng.choice([1, 2, 5, 16, 70]), rng.choice([0, 0, 40, 500])
    monkeypatch.setattr(tuning, "decode_workers", lambda *_: num_workers)
    lengths = [rng.choice([0, 1, UNIT, UNIT + 1, rng.randint(0, 3000)]) for _ in range(rng.randint(1, 40))]
    rows = rng.sample(range(100), len(lengths))
    on_device = (
        torch.tensor(rows, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    plan = decode_plan(*on_device, num_kv_heads=1, window=window)
    expected = decode_plan_reference(*on_device, num_workers=num_workers, unit=UNIT, window=window)
    used = len(expected.items)
    assert used <= len(plan.items)
    assert torch.equal(plan.items[:used], expected.items)
    assert torch.equal(plan.shares[:, 0], expected.shares[:, 0])
    assert torch.equal(plan.parts, expected.parts)
    assert torch.equal(plan.split, expected.split)
    firsts = [max(length - window, 0) if window else 0 for length in lengths]
    assert_complete(plan, rows, firsts, lengths)
    assert_complete(expected, rows, firsts, lengths)


def test_workers_have_equal_shares(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "decode_workers", lambda *_: 10)
    lengths = torch.tensor([40 * UNIT, 1, 7 * UNIT, 300 * UNIT, UNIT], dtype=torch.int32, device=device)
    plan = decode_plan(torch.arange(5, device=device), lengths, num_kv_heads=1)
    keys = (plan.items[:, 3] - plan.items[:, 2]).tolist()
    starts = plan.shares[:, 0].tolist()
    shares = [sum(keys[begin:end]) for begin, end in pairwise(starts)]
    assert max(shares) <= 35 * UNIT  # 349 units for 10
    assert sum(shares) == int(lengths.sum())
    assert sum(share > 33 * UNIT for share in shares) >= 9


def test_no_request_is_no_plan(device: torch.device) -> None:
    nobody = torch.zeros(0, dtype=torch.int32, device=device)
    plan = decode_plan(nobody, nobody, num_kv_heads=4)
    assert (len(plan.parts), len(plan.split)) == (0, 0)
