"""`TokenAllocator`: the host's count, refusals that change nothing, and what `check` finds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightkv.errors import CheckFailed, InvalidFree, OutOfTokens
from lightkv.memory.allocator import TokenAllocator, raise_for_flags
from lightkv.triton_kernels.slots.allocate import SlotFlag, TableEntries


def test_allocates_the_lowest_slots_and_counts_them(device: torch.device) -> None:
    allocator = TokenAllocator(3000, device)
    assert (allocator.capacity, allocator.num_free) == (2999, 2999)
    first = allocator.alloc(1500)
    assert first.dtype == torch.int32
    assert first.device == allocator.device
    assert first.tolist() == list(range(1, 1501))
    assert allocator.num_free == 1499
    allocator.free(first[[5, 1000, 7]])
    assert allocator.alloc(4).tolist() == [6, 8, 1001, 1501]
    assert allocator.num_free == 1498
    assert allocator.counters.tolist() == [1498, 0]
    allocator.check()


def test_contiguous_allocates_a_run_or_else_the_lowest(device: torch.device) -> None:
    allocator = TokenAllocator(20, device)
    slots = allocator.alloc(19)
    allocator.free(slots[[0, 2, 3, 9, 10, 11]])  # slots 1, 3, 4, 10, 11, 12
    assert allocator.alloc(3, contiguous=True).tolist() == [10, 11, 12]
    assert allocator.alloc(3, contiguous=True).tolist() == [1, 3, 4]
    allocator.check()


def test_zero_slots_change_nothing(device: torch.device) -> None:
    allocator = TokenAllocator(5, device)
    for contiguous in (False, True):
        empty = allocator.alloc(0, contiguous=contiguous)
        assert (empty.shape, empty.dtype, empty.device) == ((0,), torch.int32, allocator.device)
        allocator.free(empty)
    assert allocator.num_free == 4
    allocator.check()


@pytest.mark.parametrize("contiguous", [False, True], ids=["any", "contiguous"])
def test_refusal_carries_the_numbers_and_changes_nothing(device: torch.device, contiguous: bool) -> None:
    allocator = TokenAllocator(10, device)
    allocator.alloc(4)
    before = allocator.mem_state.clone()
    with pytest.raises(OutOfTokens, match="6 tokens needed, 5 available, of 9") as refusal:
        allocator.alloc(6, contiguous=contiguous)
    assert (refusal.value.needed, refusal.value.free, refusal.value.capacity) == (6, 5, 9)
    assert torch.equal(allocator.mem_state, before)
    allocator.check()
    assert allocator.alloc(5).tolist() == [5, 6, 7, 8, 9]


def test_double_free_is_found_and_no_slot_gets_two_owners(device: torch.device) -> None:
    allocator = TokenAllocator(10, device)
    slots = allocator.alloc(5)
    allocator.free(slots[:1])
    allocator.free(slots[:1])
    assert allocator.counters.tolist() == [5, SlotFlag.DOUBLE_FREE]
    with pytest.raises(InvalidFree, match="free already"):
        allocator.check()
    assert allocator.alloc(5).tolist() == [1, 6, 7, 8, 9]


@pytest.mark.parametrize("slot", [0, -1, 10, 1 << 40])
def test_a_freed_number_that_is_not_a_slot_is_found(device: torch.device, slot: int) -> None:
    allocator = TokenAllocator(10, device)
    allocator.alloc(5)
    allocator.free(torch.tensor([slot], device=device))
    with pytest.raises(InvalidFree, match="not a slot of the pool"):
        allocator.check()
    assert allocator.counters.tolist() == [4, SlotFlag.OUT_OF_RANGE]


def test_freeing_more_than_is_in_use_is_refused_on_the_host(device: torch.device) -> None:
    allocator = TokenAllocator(10, device)
    slots = allocator.alloc(2)
    with pytest.raises(InvalidFree, match="3 slots to free while 2 are in use"):
        allocator.free(torch.cat([slots, slots[:1]]))
    allocator.check()
    assert allocator.num_free == 7


def test_alloc_into_allocates_what_the_device_says(device: torch.device) -> None:
    allocator = TokenAllocator(10, device)
    out = torch.full((6,), -7, dtype=torch.int32, device=device)
    allocator.claim(4)
    allocator.alloc_into(out, torch.tensor([4], dtype=torch.int32, device=device))
    assert out.tolist() == [1, 2, 3, 4, 0, 0]
    assert allocator.num_free == 5
    allocator.check()
    with pytest.raises(OutOfTokens):
        allocator.claim(6)
    assert allocator.num_free == 5


def test_alloc_into_with_too_few_free_slots_is_found(device: torch.device) -> None:
    allocator = TokenAllocator(4, device)
    out = torch.full((6,), -7, dtype=torch.int32, device=device)
    allocator.claim(3)
    allocator.alloc_into(out, torch.tensor([5], dtype=torch.int32, device=device))
    assert out.tolist() == [1, 2, 3, 0, 0, 0]
    with pytest.raises(CheckFailed, match="fewer slots were free than an allocation asked for"):
        allocator.check()


def test_slots_are_written_to_their_entries(device: torch.device) -> None:
    allocator = TokenAllocator(50, device)
    table = torch.zeros(4, 10, dtype=torch.int32, device=device)
    entries = TableEntries(table, torch.arange(21, 29, device=device))
    assert allocator.alloc(8, contiguous=True, entries=entries).tolist() == [*range(1, 9)]
    assert table[2].tolist() == [0, *range(1, 9), 0]
    positions, rows = torch.tensor([3, 9], device=device), torch.tensor([1, 3], device=device)
    allocator.alloc(2, entries=TableEntries(table, positions, rows))
    assert (table[1, 3], table[3, 9]) == (9, 10)
    allocator.claim(1)
    out, count = (
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.ones_like(rows[:1], dtype=torch.int32),
    )
    allocator.alloc_into(out, count, TableEntries(table, positions, rows))
    assert (table[1, 3], table[3, 9]) == (11, 0)
    allocator.free(table[2, 1:9])
    allocator.check()
    assert allocator.num_free == 49 - 3


def test_refuses_entries_of_another_shape(device: torch.device) -> None:
    allocator = TokenAllocator(50, device)
    table = torch.zeros(4, 10, dtype=torch.int32, device=device)
    two, three = torch.arange(2, device=device), torch.arange(3, device=device)
    for entries, match in (
        (TableEntries(table.long(), two), "table must be contiguous int32"),
        (TableEntries(table[:, :5], two), "table must be contiguous int32"),
        (
            TableEntries(table, three),
            r"positions must be contiguous int64 \[n\], with n 2; got torch.int64 \(3,\)",
        ),
        (
            TableEntries(table, two, two.int()),
            r"rows must be contiguous int64 \[n\], with n 2; got torch.int32",
        ),
        (TableEntries(table, two, two.to("meta")), "must be on"),
    ):
        with pytest.raises(ValueError, match=match):
            allocator.alloc(2, entries=entries)
        with pytest.raises(ValueError, match=match):
            allocator.alloc_into(table[0, :2], torch.zeros(1, dtype=torch.int32, device=device), entries)
    assert allocator.num_free == 49
    allocator.check()


def test_check_finds_an_allocation_that_was_not_claimed(device: torch.device) -> None:
    allocator = TokenAllocator(10, device)
    out = torch.zeros(2, dtype=torch.int32, device=device)
    allocator.alloc_into(out, torch.tensor([2], dtype=torch.int32, device=device))
    with pytest.raises(CheckFailed, match="7 slots are free, the device counted 7 and the host 9"):
        allocator.check()


def test_check_finds_stray_writes(device: torch.device) -> None:
    allocator = TokenAllocator(3000, device)
    allocator.mem_state[1500] = 0
    with pytest.raises(CheckFailed, match="2998 slots are free"):
        allocator.check()
    allocator.mem_state[0] = 1  # the sum is right again
    with pytest.raises(CheckFailed, match="slot 0 is free"):
        allocator.check()


def test_check_finds_wrong_bits(device: torch.device) -> None:
    allocator = TokenAllocator(3000, device)
    allocator._state.free_bits[50] ^= 1 << 7
    with pytest.raises(CheckFailed, match="bits of its blocks disagree"):
        allocator.check()


def test_check_finds_a_free_slot_that_searches_would_skip(device: torch.device) -> None:
    allocator = TokenAllocator(3000, device)
    allocator._state.first_block.fill_(1)
    with pytest.raises(CheckFailed, match="before the first block that is searched"):
        allocator.check()


def test_flags_raise_by_kind() -> None:
    raise_for_flags(0)
    with pytest.raises(InvalidFree, match="free already; a number was freed that is not a slot"):
        raise_for_flags(SlotFlag.DOUBLE_FREE | SlotFlag.OUT_OF_RANGE | SlotFlag.SHORT)
    with pytest.raises(CheckFailed, match="alloc_into"):
        raise_for_flags(int(SlotFlag.SHORT))


def test_refuses_bad_arguments(device: torch.device) -> None:
    with pytest.raises(ValueError, match="num_slots must be in"):
        TokenAllocator(1, device)
    allocator = TokenAllocator(10, device)
    slots = allocator.alloc(4)
    with pytest.raises(ValueError, match="0 or more"):
        allocator.alloc(-1)
    for bad in (slots.float(), slots[:, None], slots.to("meta")):
        with pytest.raises(ValueError, match=r"slots must be (int32 or int64|on)"):
            allocator.free(bad)
    count = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="out must be contiguous int32"):
        allocator.alloc_into(slots.long(), count)
    with pytest.raises(ValueError, match=r"count must be contiguous int32 \[1\]"):
        allocator.alloc_into(slots, count.repeat(2))
    with pytest.raises(ValueError, match="contiguous"):
        allocator.alloc_into(slots[::2], count)
    assert allocator.num_free == 5
    allocator.check()


@given(
    num_slots=st.integers(2, 60),
    steps=st.lists(st.tuples(st.sampled_from(["alloc", "run", "free"]), st.integers(0, 30)), max_size=30),
)
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_any_valid_use_matches_a_set(
    device: torch.device, num_slots: int, steps: list[tuple[str, int]]
) -> None:
    allocator = TokenAllocator(num_slots, device)
    free, held = set(range(1, num_slots)), []
    for verb, n in steps:
        if verb == "free":
            # Every third of the first slots held.
            freed, held = held[:n:3], held[n:] + [slot for i, slot in enumerate(held[:n]) if i % 3]
            allocator.free(torch.tensor(freed, dtype=torch.int32, device=device))
            free |= set(freed)
        elif n > len(free):
            with pytest.raises(OutOfTokens):
                allocator.alloc(n, contiguous=verb == "run")
        else:
            slots = allocator.alloc(n, contiguous=verb == "run").tolist()
            runs = (range(s, s + n) for s in range(1, num_slots - n + 1) if verb == "run")
            assert slots == list(next((run for run in runs if free.issuperset(run)), sorted(free)[:n]))
            free -= set(slots)
            held += slots
        assert allocator.num_free == len(free)
        allocator.check()


@pytest.mark.gpu
def test_captured_alloc_follows_its_count() -> None:
    allocator = TokenAllocator(5000, "cuda")
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    allocator.alloc_into(out, count)  # compiles outside the capture, allocates nothing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        allocator.alloc_into(out, count)
    next_slot = 1
    for n in (3, 8, 0, 5):
        allocator.claim(n)
        count.fill_(n)
        graph.replay()
        assert out.tolist() == [*range(next_slot, next_slot + n), *[0] * (8 - n)]
        next_slot += n
        allocator.check()
    assert allocator.num_free == 4999 - 16


@pytest.mark.gpu
def test_never_synchronises() -> None:
    allocator = TokenAllocator(5000, "cuda")
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    count = torch.full((1,), 8, dtype=torch.int32, device="cuda")

    def step() -> None:
        allocator.free(allocator.alloc(100))
        allocator.free(allocator.alloc(100, contiguous=True))
        allocator.claim(8)
        allocator.alloc_into(out, count)
        allocator.free(out)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocator.check()
