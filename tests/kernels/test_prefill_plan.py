"""Compares `prefill_plan` with its reference, item by item, and checks what the reference lists."""

from itertools import accumulate, pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.paged_kv import HeadShape
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.prefill_plan import ALL_KEYS, PrefillPlan, prefill_plan
from lightkv.triton_kernels.attention.variants import Window
from tests.support.attention.plans import (
    prefill_plan_reference,
    prefill_tiles_reference,
    share_reference,
)
from tests.support.combinations import each_value

RAGGED = [(37, 0), (900, 512), (0, 7), (64, 8000), (1200, 128), (333, 3000), (4, 2), (18, 16000), (5, -3)]
H200 = tuning.DeviceClass(num_multiprocessors=132, shared_memory=232448, major=9)
ALWAYS = -(2**30)  # as the least gain
OF_H200 = prefill_tuning.prefill_shares(H200, tuning.Launch(128, 128, 12, 3), 8)


def requests(
    sequences: list[tuple[int, int]], device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns rows, q_starts, lengths and the number of tokens of requests (queries, keys before them)."""
    starts = [0, *accumulate(q_len for q_len, _ in sequences)]
    rows = torch.randperm(len(sequences)) + 5
    lengths = torch.tensor([q_len + prefix for q_len, prefix in sequences], dtype=torch.int32)
    q_starts = torch.tensor(starts, dtype=torch.int32)
    return rows.to(device), q_starts.to(device), lengths.to(device), starts[-1]


def check(
    sequences: list[tuple[int, int]],
    *,
    device: torch.device,
    group: int,
    block_m: int,
    window: int = 0,
    causal: bool = True,
    num_kv_heads: int = 1,
    shares: prefill_tuning.PrefillShares = prefill_tuning.NO_SHARES,
) -> PrefillPlan:
    *args, num_tokens = requests(sequences, device)
    launch = tuning.Launch(block_m, 32, 4, 2)
    plan = prefill_plan(
        *args,
        HeadShape(group * num_kv_heads, num_kv_heads, 64, 64),
        num_tokens=num_tokens + 3,
        dtype=torch.float16,
        limits=(Window(window),) if window else (),
        causal=causal,
        launch=launch,
        shares=shares,
    )
    expected, counters = prefill_plan_reference(
        *args, plan, shares, num_kv_heads=num_kv_heads, group=group, key_bytes=2 * 64 * 2
    )
    assert plan.launch == launch
    assert torch.equal(plan.items, expected)
    assert plan.counters.tolist() == counters
    return plan


@each_value(rows=[(16, 16), (1, 64), (4, 128), (7, 16), (3, 32)], window=[0, 1, 300])
def test_ragged_batches(device: torch.device, rows: tuple[int, int], window: int) -> None:
    group, block_m = rows
    torch.manual_seed(group)
    check(RAGGED, device=device, group=group, block_m=block_m, window=window)


@pytest.mark.parametrize("window", [0, 300], ids="window{}".format)
def test_layers_that_are_not_causal(device: torch.device, window: int) -> None:
    """The tiles of a request that sees all keys are equally long, and come before those of shorter requests."""
    torch.manual_seed(window)
    shares = prefill_tuning.PrefillShares(9, 12, 32, 1, ALWAYS)
    for chosen in (shares, prefill_tuning.NO_SHARES):
        sizes = {"group": 3, "block_m": 64, "window": window, "causal": False, "shares": chosen}
        plan = check([(37, 0), (90, 512), (0, 7), (120, 128), (4, 2), (9, -4)], device=device, **sizes)
    if not window:
        lengths = (plan.items[:, 5] + plan.items[:, 3] // 3)[plan.items[:, 0] >= 0].tolist()
        assert lengths == sorted(lengths, reverse=True)


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
    assert len(plan.items) >= 10


def test_requests_without_queries_and_an_empty_batch(device: torch.device) -> None:
    check([(0, 4), (0, 0)], device=device, group=4, block_m=16)
    assert (check([], device=device, group=4, block_m=16).items[:, 0] == -1).all()


@pytest.mark.parametrize(("section_bytes", "num_heads"), [(1, 1), (256 * 1400, 3), (2**25, 8)])
def test_a_section_has_the_heads_whose_keys_fit(
    section_bytes: int, num_heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_tuning, "SECTION_BYTES", section_bytes)
    plan = check([(100, 200), (30, 70)], device=device, group=2, block_m=16, num_kv_heads=8)
    assert plan.counters.tolist() == [0, 0, 13 + 4, num_heads]


def test_the_reference_lists_every_row_once_and_tiles_with_more_keys_first() -> None:
    rows, q_starts, lengths, _ = requests(RAGGED, "cpu")
    tiles = prefill_tiles_reference(rows, q_starts, lengths, group=3, block_m=32)
    keys = []
    covered = []
    for request, row, first_row, num_rows, q_begin, prefix, *_ in tiles:
        end = min(first_row + 32, num_rows)
        keys.append(max(prefix + (end - 1) // 3 + 1, 0))
        covered += [(request, i) for i in range(first_row, end)]
        assert (row, q_begin) == (rows[request], q_starts[request])
    assert keys == sorted(keys, reverse=True)
    assert sorted(covered) == [(r, i) for r, (q_len, _) in enumerate(RAGGED) for i in range(q_len * 3)]


# --------------------------------------------------------------------------------
# Shares of the keys


def check_shares(plan: PrefillPlan) -> list[int]:
    """Checks that the items cover every tile's keys once, in items that some share has, and that the parts of a
    tile are found from its second piece. Returns the numbers of parts of the tiles that are cut."""
    items, pieces, seen = plan.items.tolist(), {}, []
    for begin in range(plan.num_shares):
        while begin >= 0 and items[begin][0] >= 0:
            seen.append(begin)
            pieces.setdefault((items[begin][0], items[begin][2]), []).append(items[begin])
            begin = items[begin][9]
    assert sorted(seen) == [number for number, item in enumerate(items) if item[0] >= 0]
    parts, cut = [], []
    for found in pieces.values():
        found.sort(key=lambda item: item[6])
        assert found[0][6] == 0 or plan.limits
        assert found[-1][7] == ALL_KEYS
        assert all(one[7] == other[6] for one, other in pairwise(found))
        if len(found) > 1:
            number = items.index(found[1])
            assert found[1][10:] == [len(found), found[0][8]]
            assert [item[8] for item in found[1:]] == list(range(number, number + len(found) - 1))
            parts += [item[8] for item in found]
            cut.append(len(found))
        else:
            assert found[0][8] == -1
        assert all(item[10] < 0 for item in [found[0], *found[2:]])
    assert len(set(parts)) == len(parts)
    assert all(0 <= part < 2 * plan.num_workers for part in parts)
    return cut


@each_value(window=[0, 1, 300], given=[(2, 1), (7, 3), (60, 1), (300, 1)])
def test_ragged_batches_in_shares(device: torch.device, window: int, given: tuple[int, int]) -> None:
    num_workers, least_units = given
    torch.manual_seed(window)
    shares = prefill_tuning.PrefillShares(num_workers, num_workers, 32, least_units, ALWAYS)
    plan = check(RAGGED, device=device, group=3, block_m=128, window=window, shares=shares)
    assert check_shares(plan)


def test_random_batches(device: torch.device) -> None:
    random, cut = Random(2), 0
    for _ in range(25):
        sequences = [
            (random.choice([0, 1, 7, 40, 200]), random.choice([-3, 0, 5, 64, 700, 3000]))
            for _ in range(random.randrange(1, 7))
        ]
        num_kv_heads = random.choice([1, 2, 3, 8])
        num_programs = random.choice([4, 8, 30])
        least = random.choice([(1, 1), (2, 3)])
        shares = prefill_tuning.PrefillShares(
            max(num_programs * random.choice([1, 2]) // num_kv_heads, 1), num_programs, 32, *least
        )
        sizes = {"group": random.choice([1, 4]), "block_m": 32, "window": random.choice([0, 0, 100])}
        plan = check(sequences, device=device, num_kv_heads=num_kv_heads, shares=shares, **sizes)
        cut += bool(check_shares(plan))
    assert 3 < cut < 22


def tiles_of(*sequences: tuple[int, int]) -> list[int]:
    """Returns the units of the tiles of an H200, for four query heads to a K/V head."""
    rows, q_starts, lengths, _ = requests(list(sequences), "cpu")
    tiles = prefill_tiles_reference(rows, q_starts, lengths, group=4, block_m=128)
    keys = [tile[5] + min(tile[2] + 128, tile[3]) // 4 for tile in tiles]
    return [max(-(-num // 128), 1) for num in keys]


def test_whole_tiles_where_there_are_enough() -> None:
    for sequences in (
        [(4096, 0)] * 4,
        [(16384, 0)],
        [(1024, 0)] * 16,
        [(2048, 30 * 1024)],
        [(512, 4096)] * 8,
        [(512, 32 * 1024)] * 4,
        [(37, 0), (900, 512), (2500, 0), (64, 8000), (1200, 128), (333, 3000), (4096, 0), (18, 16000)],
        *([(n, 0)] for n in range(64, 4096, 64)),
    ):
        assert share_reference(tiles_of(*sequences), 8, OF_H200)[0] == 0, sequences


def test_equal_shares_for_a_few_queries_after_many_keys() -> None:
    for num_queries, prefix in ((64, 32768), (256, 100_000), (1, 32768), (300, 32768), (544, 32768)):
        units = tiles_of((num_queries, prefix))
        assert share_reference(units, 8, OF_H200)[0] == -(-sum(units) // 16)
    # A long request beside short ones, and padding of a static batch, whose tiles have no keys.
    units = tiles_of((64, 100_000), *[(64, 0)] * 31, (512, -512))
    assert share_reference(units, 8, OF_H200)[0] == -(-sum(units) // 16)


def test_no_number_of_queries_is_a_cliff() -> None:
    """The longest share grows with the tiles, and is never much longer than an equal one."""
    before = 0
    for num_queries in range(1, 1025):
        units = tiles_of((num_queries, 32768))
        share, _ = share_reference(units, 8, OF_H200)
        equal = -(-sum(units) * 8 // 132)
        # Whole tiles: the programs take them in turns.
        longest = share or sum(units[:: 132 // 8])
        assert before * 0.98 <= longest <= 1.1 * equal + 2 or len(units) <= 2, num_queries
        before = longest


def test_programs_of_an_h200() -> None:
    for num_kv_heads in (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96):
        num_workers, num_programs, *_ = prefill_tuning.prefill_shares(
            H200, tuning.Launch(128, 128, 8, 3), num_kv_heads
        )
        turns = -(-num_workers * num_kv_heads // num_programs)
        assert num_workers * num_kv_heads >= 0.94 * turns * num_programs
    assert prefill_tuning.prefill_shares(H200, tuning.Launch(64, 64, 4, 3), 8).num_workers == 33
    assert prefill_tuning.prefill_shares(H200, tuning.Launch(128, 128, 8, 3), 128) == prefill_tuning.NO_SHARES


def test_tiles_of_one_request_are_cut_at_the_same_keys() -> None:
    """Programs that read the same keys do so at the same time, the second time from the cache."""
    share, aligned = share_reference([257, 257], 8, OF_H200)
    assert (share, aligned) == (33, True)
    # Aligned, three tiles would take shares longer by a sixteenth at most, and seven would take more.
    assert share_reference([257] * 3, 8, OF_H200) == (52, True)
    assert share_reference([257] * 7, 8, OF_H200) == (-(-257 * 7 // 16), False)


def test_short_shares_are_not_lengthened() -> None:
    """A unit more of a share of a few would be much more than a sixteenth."""
    share, aligned = share_reference([5] * 12, 8, prefill_tuning.PrefillShares(16, 132, 128, 2, -(2**30)))
    assert (share, aligned) == (-(-60 // 16), False)
