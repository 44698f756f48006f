"""Compares `prefill_plan` with its reference, tile by tile, and checks the reference's order."""

from itertools import accumulate
from random import Random

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.paged_kv import HeadShape
from lightkv.triton_kernels.attention.prefill_plan import PrefillPlan, prefill_plan, prefill_plan_reference

RAGGED = [(37, 0), (900, 512), (0, 7), (64, 8000), (1200, 128), (333, 3000), (4, 2), (18, 16000), (5, -3)]


def requests(sequences: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns rows, q_starts, lengths and the number of tokens of requests (queries, keys before them)."""
    starts = [0, *accumulate(q_len for q_len, _ in sequences)]
    rows = torch.randperm(len(sequences)) + 5
    lengths = torch.tensor([q_len + prefix for q_len, prefix in sequences], dtype=torch.int32)
    q_starts = torch.tensor(starts, dtype=torch.int32)
    return rows.to(device), q_starts.to(device), lengths.to(device), starts[-1]


def check(
    sequences: list[tuple[int, int]], *, device: torch.device, group: int, block_m: int, window: int = 0
) -> PrefillPlan:
    *args, num_tokens = requests(sequences, device)
    launch = tuning.Launch(block_m, 32, 4, 2)
    plan = prefill_plan(
        *args,
        HeadShape(group, 1, 64, 64),
        num_tokens=num_tokens + 3,
        dtype=torch.float16,
        window=window,
        launch=launch,
    )
    expected = prefill_plan_reference(*args, group=group, block_m=block_m, window=window)
    assert plan.launch == launch
    assert torch.equal(plan.tiles[: len(expected)], expected)
    assert (plan.tiles[len(expected) :, 0] == -1).all()
    assert not plan.taken.any()
    return plan


@pytest.mark.parametrize("window", [0, 1, 300], ids="window{}".format)
@pytest.mark.parametrize(("group", "block_m"), [(1, 64), (4, 128), (3, 32), (7, 16), (16, 16)], ids=str)
def test_ragged_batches(device: torch.device, group: int, block_m: int, window: int) -> None:
    torch.manual_seed(group)
    check(RAGGED, device=device, group=group, block_m=block_m, window=window)


@pytest.mark.slow
def test_more_requests_than_are_compared_at_a_time(device: torch.device) -> None:
    random = Random(1)
    sequences = [(random.choice([0, 1, 7, 40]), random.randrange(-3, 60)) for _ in range(300)]
    check(sequences, device=device, group=2, block_m=16)


def test_equal_requests_and_a_single_request(device: torch.device) -> None:
    check([(64, 0)] * 20, device=device, group=4, block_m=64)
    check([(1000, 5)], device=device, group=1, block_m=16)


def test_the_list_has_room_when_every_last_tile_has_one_row(device: torch.device) -> None:
    plan = check([(17, 3)] * 5, device=device, group=1, block_m=16)
    assert len(plan.tiles) >= 10


def test_requests_without_queries_and_an_empty_batch(device: torch.device) -> None:
    check([(0, 4), (0, 0)], device=device, group=4, block_m=16)
    assert (check([], device=device, group=4, block_m=16).tiles[:, 0] == -1).all()


def test_the_reference_lists_every_row_once_and_tiles_with_more_keys_first(device: torch.device) -> None:
    rows, q_starts, lengths, _ = requests(RAGGED, device)
    tiles = prefill_plan_reference(rows, q_starts, lengths, group=3, block_m=32).tolist()
    keys = []
    covered = []
    for request, row, first_row, num_rows, q_begin, prefix, *_ in tiles:
        end = min(first_row + 32, num_rows)
        keys.append(max(prefix + (end - 1) // 3 + 1, 0))
        covered += [(request, i) for i in range(first_row, end)]
        assert (row, q_begin) == (rows[request], q_starts[request])
    assert keys == sorted(keys, reverse=True)
    assert sorted(covered) == [(r, i) for r, (q_len, _) in enumerate(RAGGED) for i in range(q_len * 3)]
