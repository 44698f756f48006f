"""The slot kernels and their references, case by case: lowest slots, runs, table entries, long outputs,
misuse."""

import random
from unittest import mock

import pytest
import torch

from lightkv.triton_kernels.slots import alloc_many as alloc_many
from lightkv.triton_kernels.slots import allocate
from lightkv.triton_kernels.slots.allocate import (
    SlotFlag,
    TableEntries,
    alloc_run,
    alloc_run_reference,
    alloc_slots,
    alloc_slots_reference,
    free_slots,
    free_slots_reference,
    lowest_run,
    new_slot_state,
)
from lightkv.triton_kernels.slots.slot_search import CountTiles
from tests.support.combinations import slow
from tests.support.slot_model import Model, Operations, both, in_programs, in_two_kernels, number, poisoned

WINDOWS = [1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 300, 700]


@both
@pytest.mark.parametrize(
    "block_slots", [*(pytest.param(slots, marks=pytest.mark.slow) for slots in (32, 64)), 256]
)
@pytest.mark.parametrize("cases", [range(0, 9, 4), *slow(range(9))], ids=["some", "all"])
def test_a_run_is_found_wherever_it_is(
    device: torch.device, operations: Operations, block_slots: int, cases: range
) -> None:
    """Runs across words, blocks and the parts that programs search, runs at the pool's ends, and no run at
    all."""
    rng = random.Random(block_slots)
    num_slots = 3001
    for case in cases:
        state, model = new_slot_state(num_slots, device, block_slots), Model(num_slots)
        operations.alloc_slots(state, poisoned(num_slots - 1, device))
        model.alloc(num_slots - 1, num_slots - 1)
        start, freed = 1, []
        while start < num_slots:  # free ranges as long as the wanted run, or one slot shorter
            length = rng.choice(WINDOWS[: 4 + case]) - rng.randrange(2)
            freed += range(start, min(start + length, num_slots))
            start += length + rng.choice([1, 1, 2, 31, 150])
        operations.free_slots(state, torch.tensor(freed, device=device))
        model.free_slots(freed)
        for n in rng.sample(WINDOWS, 4):
            out = poisoned(n, device)
            operations.alloc_run(state, out)
            assert out.tolist() == model.alloc_run(n)
            model.check(state)


@both
@pytest.mark.parametrize("with_rows", [True, False], ids=["rows", "flat"])
@pytest.mark.parametrize("one_kernel", [True, False], ids=["one kernel", "two"])
def test_slots_are_written_to_their_entries_too(
    device: torch.device, operations: Operations, with_rows: bool, one_kernel: bool
) -> None:
    state, model = new_slot_state(200, device, block_slots=32), Model(200)
    freed = [*range(3, 180, 7), *range(181, 192)]
    operations.alloc_slots(state, poisoned(199, device))
    operations.free_slots(state, torch.tensor(freed, device=device))
    model.alloc(199, 199)
    model.free_slots(freed)
    table, expected = (torch.full((9, 40), -7, dtype=torch.int32, device=device) for _ in range(2))
    rows = torch.tensor([4, 2, 8, 1, 7, 0, 0, 0], device=device)
    columns = torch.tensor([5, 39, 0, 11, 12, 0, 0, 0], device=device)
    entries = TableEntries(table, columns, rows) if with_rows else TableEntries(table, rows * 40 + columns)
    with mock.patch.object(allocate, "MAX_IN_ONE_KERNEL", 512 if one_kernel else 0):
        for count in (5, 4, 0):  # the rest are padding, which goes to the first entry of row 0
            out = poisoned(8, device)
            operations.alloc_slots(state, out, number(count, device), entries=entries)
            assert out.tolist() == model.alloc(8, count)
            expected[rows, columns] = out
            assert torch.equal(table, expected)
    distinct = torch.arange(320, 309, -1, device=device)
    out = poisoned(11, device)
    operations.alloc_run(state, out, TableEntries(table, distinct))
    assert out.tolist() == model.alloc_run(11) == list(range(181, 192))
    expected.view(-1)[distinct] = out
    assert torch.equal(table, expected)
    model.check(state)


def test_long_outputs_are_allocated_too(device: torch.device) -> None:
    state, expected_state = new_slot_state(9000, device), new_slot_state(9000, device)
    for n in (5000, 513, 512):
        out, expected = poisoned(n, device), poisoned(n, device)
        alloc_slots(state, out)
        alloc_slots_reference(expected_state, expected)
        assert torch.equal(out, expected)
        free_slots(state, out[::3].contiguous())
        free_slots_reference(expected_state, expected[::3])
        for name in ("mem_state", "free_bits", "block_free", "counters"):
            assert torch.equal(getattr(state, name), getattr(expected_state, name)), name


@pytest.mark.slow
def test_a_launch_is_right_for_tensors_of_any_alignment(device: torch.device) -> None:
    """A kernel compiled for one call serves the others, so it must not depend on addresses or values."""
    state, expected_state = new_slot_state(9000, device), new_slot_state(9000, device)
    for offset, width in ((0, 704), (1, 701), (3, 16), (4, 704)):
        for n in (16, 13, 200, 256, 1, 600, 590):
            out, expected = poisoned(n + offset, device)[offset:], poisoned(n, device)
            count = number(n, device).repeat(1 + offset)[offset:]
            places = torch.randperm(40 * width, device=device)[: n + offset]
            places, rows, columns = (part[offset:] for part in (places, places // width, places % width))
            tables = [poisoned(offset + 40 * width, device)[offset:].view(40, width) for _ in range(2)]
            run = n % 2 == 0
            for with_rows in (True, False):
                mine, its = (
                    TableEntries(table, columns, rows) if with_rows else TableEntries(table, places)
                    for table in tables
                )
                if run and not with_rows:
                    alloc_run(state, out, mine)
                    alloc_run_reference(expected_state, expected, its)
                else:
                    alloc_slots(state, out, count, mine)
                    alloc_slots_reference(expected_state, expected, count, its)
                assert torch.equal(out, expected)
                assert torch.equal(*tables)
                freed = out[::2].contiguous() if with_rows else out.long()[1:]
                free_slots(state, freed)
                free_slots_reference(expected_state, freed)
    for name in ("mem_state", "free_bits", "block_free", "counters"):
        assert torch.equal(getattr(state, name), getattr(expected_state, name)), name
    assert int(state.counters[1]) == 0


@both
def test_allocates_the_lowest_ascending_across_blocks(device: torch.device, operations: Operations) -> None:
    state = new_slot_state(40, device, block_slots=8)
    out = poisoned(30, device)
    operations.alloc_slots(state, out, number(30, device))
    assert out.tolist() == list(range(1, 31))
    operations.free_slots(state, torch.tensor([17, 3, 25, 8], device=device))
    operations.alloc_slots(state, out, number(6, device))
    assert out.tolist() == [3, 8, 17, 25, 31, 32] + [0] * 24
    assert state.counters.tolist() == [7, 0]


@both
def test_a_shortage_allocates_what_is_free_and_flags(device: torch.device, operations: Operations) -> None:
    state = new_slot_state(10, device, block_slots=4)
    out = poisoned(12, device)
    operations.alloc_slots(state, out, number(11, device))
    assert out.tolist() == [*range(1, 10), 0, 0, 0]
    assert state.counters.tolist() == [0, SlotFlag.SHORT]
    operations.alloc_slots(state, out, number(1, device))
    assert out.tolist() == [0] * 12
    assert state.counters.tolist() == [0, SlotFlag.SHORT]


@both
def test_run_is_the_lowest_that_fits(device: torch.device, operations: Operations) -> None:
    state = new_slot_state(32, device, block_slots=8)
    operations.alloc_slots(state, poisoned(31, device), number(31, device))
    operations.free_slots(
        state, torch.tensor([2, 3, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25, 26], device=device)
    )
    for n, expected in [(5, range(5, 10)), (6, range(20, 26)), (4, [2, 3, 26, 0])]:
        out = poisoned(n, device)
        operations.alloc_run(state, out)
        assert out.tolist() == list(expected)
    assert state.counters.tolist() == [0, SlotFlag.SHORT]


@both
def test_invalid_frees_are_flagged_and_no_slot_gets_two_owners(
    device: torch.device, operations: Operations
) -> None:
    for freed, num_free, flags in [
        ([2, 2], 6, SlotFlag.DOUBLE_FREE),
        ([9], 5, SlotFlag.DOUBLE_FREE),
        ([0, 1], 6, SlotFlag.OUT_OF_RANGE),
        ([10, -1, 2**31 - 1, -(2**31)], 5, SlotFlag.OUT_OF_RANGE),
        ([3, 10, 3], 6, SlotFlag.DOUBLE_FREE | SlotFlag.OUT_OF_RANGE),
    ]:
        state = new_slot_state(10, device, block_slots=4)
        operations.alloc_slots(state, poisoned(4, device), number(4, device))
        operations.free_slots(state, torch.tensor(freed, dtype=torch.int32, device=device))
        assert state.counters.tolist() == [num_free, flags]
        assert int(state.mem_state.sum()) == num_free
        out = poisoned(9, device)
        operations.alloc_slots(state, out, number(num_free, device))
        taken = out.tolist()[:num_free]
        assert len(set(taken)) == num_free
        assert not set(taken) & ({1, 2, 3, 4} - set(freed))


@both
def test_int64_slots_beyond_int32_are_out_of_range(device: torch.device, operations: Operations) -> None:
    state = new_slot_state(10, device, block_slots=4)
    operations.alloc_slots(state, poisoned(9, device), number(9, device))
    operations.free_slots(state, torch.tensor([2**32 + 3, -(2**40) + 1], device=device))
    assert state.counters.tolist() == [0, SlotFlag.OUT_OF_RANGE]


@both
def test_scan_of_more_blocks_than_one_tile(device: torch.device, operations: Operations) -> None:
    state = new_slot_state(1100, device, block_slots=1)
    out = poisoned(1090, device)
    operations.alloc_slots(state, out, number(1080, device))
    assert out.tolist() == [*range(1, 1081), *[0] * 10]
    assert state.mem_cum_sum[:1081].tolist() == [*range(1081)]
    assert state.counters.tolist() == [19, 0]


@pytest.mark.parametrize("one_kernel", [*slow(True), False], ids=["one kernel", "two"])
def test_blocks_of_many_tiles_are_scanned_in_turn(device: torch.device, one_kernel: bool) -> None:
    """Low free slots and distant blocks: a search passes hundreds of used blocks, in tiles of both sizes."""
    state, model = new_slot_state(1200, device, block_slots=2), Model(1200)
    with (
        in_programs(16, CountTiles(32, 64)),
        mock.patch.object(alloc_many, "many_tiles", return_value=CountTiles(32, 64)),
        mock.patch.object(allocate, "MAX_IN_ONE_KERNEL", 512 if one_kernel else 0),
    ):
        for n in (400, 500):
            out = poisoned(n, device)
            alloc_slots(state, out)
            assert out.tolist() == model.alloc(n, n)
            model.check(state)
        assert int(state.first_block) == 450
        freed = [*range(5, 195, 13), 700]
        free_slots(state, torch.tensor(freed, device=device))
        model.free_slots(freed)
        assert int(state.first_block) == 2
        for count in (45, 3):
            out = poisoned(50, device)
            alloc_slots(state, out, number(count, device))
            assert out.tolist() == model.alloc(50, count)
            model.check(state)


def test_two_kernels_read_no_block_whose_sum_is_out_of_date(device: torch.device) -> None:
    """The last block with ranks to allocate ends a tile: the block beside it still has an older sum."""
    state, model = new_slot_state(64, device, block_slots=1), Model(64)
    with in_two_kernels(CountTiles(8, 8)):
        for n in (40, 17):
            out = poisoned(n, device)
            alloc_slots(state, out)
            assert out.tolist() == model.alloc(n, n)
        freed = list(range(1, 58))
        free_slots(state, torch.tensor(freed, device=device))
        model.free_slots(freed)
        for n in (8, 7, 5):
            out = poisoned(n, device)
            alloc_slots(state, out)
            assert out.tolist() == model.alloc(n, n)
            model.check(state)


def test_lowest_run_counts_the_free_slots_before_it(device: torch.device) -> None:
    state = new_slot_state(16, device, block_slots=4)
    give = torch.tensor([1, 3, 4, 7, 8, 9], device=device)
    alloc_slots(state, poisoned(15, device), number(15, device))
    free_slots(state, give)
    assert [lowest_run(state, n).item() for n in (1, 2, 3, 4, 17)] == [0, 1, 3, 0, 0]


def test_refuses_an_invalid_pool() -> None:
    with pytest.raises(ValueError, match="power of two"):
        new_slot_state(10, "cpu", block_slots=6)
    with pytest.raises(ValueError, match="positive"):
        new_slot_state(0, "cpu")
