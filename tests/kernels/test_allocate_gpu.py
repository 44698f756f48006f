"""The slot kernels on a GPU: pools of millions, many threads at one slot, CUDA graphs, and no waiting."""

import random

import pytest
import torch

from lightkv.triton_kernels.slots.allocate import (
    SlotFlag,
    TableEntries,
    alloc_run,
    alloc_run_reference,
    alloc_slots,
    alloc_slots_reference,
    free_slots,
    free_slots_reference,
    new_slot_state,
)
from tests.support.slot_model import Model, number, poisoned


@pytest.mark.gpu
def test_large_pool_of_full_blocks() -> None:
    torch.manual_seed(0)
    num_slots = 3_000_000
    state, expected_state = new_slot_state(num_slots, "cuda"), new_slot_state(num_slots, "cuda")
    held = torch.empty(0, dtype=torch.int32, device="cuda")
    for n in (2_000_000, 5000, 1, 300_000, 700_000):
        out, expected = poisoned(n, "cuda"), poisoned(n, "cuda")
        alloc_slots(state, out, number(n, "cuda"))
        alloc_slots_reference(expected_state, expected, number(n, "cuda"))
        assert torch.equal(out, expected)
        held = torch.cat([held, out])
        held = held[torch.randperm(len(held), device="cuda")]
        freed, held = held[: len(held) // 2], held[len(held) // 2 :]
        free_slots(state, freed)
        free_slots_reference(expected_state, freed)
        for name in ("mem_state", "free_bits", "block_free", "counters"):
            assert torch.equal(getattr(state, name), getattr(expected_state, name)), name
    assert state.counters.tolist() == [num_slots - 1 - len(held), 0]


@pytest.mark.gpu
def test_one_slot_freed_by_many_threads_is_freed_once() -> None:
    state = new_slot_state(5000, "cuda")
    out = poisoned(4999, "cuda")
    alloc_slots(state, out, number(4999, "cuda"))
    free_slots(state, torch.full((100_000,), 1234, device="cuda"))
    assert state.counters.tolist() == [1, SlotFlag.DOUBLE_FREE]
    assert state.block_free.tolist() == [0, 1, 0, 0, 0]


@pytest.mark.gpu
def test_captured_allocations_and_frees_follow_their_count() -> None:
    state, model = new_slot_state(5000, "cuda"), Model(5000)
    out, freed, run = poisoned(64, "cuda"), poisoned(16, "cuda"), poisoned(8, "cuda")
    count = number(1, "cuda")

    def step() -> None:
        alloc_slots(state, out, count)
        free_slots(state, freed)
        alloc_run(state, run)

    freed.copy_(torch.arange(1, 17))
    alloc_slots(state, poisoned(40, "cuda"), number(40, "cuda"))
    model.alloc(40, 40)
    step()  # compiles outside the capture
    assert out.tolist() == model.alloc(64, 1)
    model.free_slots(list(range(1, 17)))
    assert run.tolist() == model.alloc_run(8)
    model.check(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    model.check(state)
    for n in (64, 0, 40):
        returned = sorted(set(range(1, 5000)) - model.free)[-16:]
        count.fill_(n)
        freed.copy_(torch.tensor(returned))
        graph.replay()
        assert out.tolist() == model.alloc(64, n)
        model.free_slots(returned)
        assert run.tolist() == model.alloc_run(8)
        model.check(state)


@pytest.mark.gpu
def test_never_synchronises() -> None:
    state = new_slot_state(5000, "cuda")
    out, count = poisoned(64, "cuda"), number(64, "cuda")
    long, table = poisoned(1000, "cuda"), torch.zeros(2, 64, dtype=torch.int32, device="cuda")
    entries = TableEntries(table, torch.arange(64, device="cuda"), torch.ones_like(out, dtype=torch.int64))

    def step() -> None:
        alloc_slots(state, out, count, entries=entries)
        free_slots(state, out)
        alloc_slots(state, long)
        free_slots(state, long)
        alloc_run(state, out)
        free_slots(state, out)
        alloc_slots_reference(state, out, count)
        free_slots_reference(state, out)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.counters.tolist() == [4999, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [65_536, 1_000_000, 10_000_000])
def test_replays_and_eager_calls_mix(num_slots: int) -> None:
    """Decode steps in a graph, eager steps, prompts and ends at random, compared with the references."""
    rng = random.Random(num_slots)
    generator = torch.Generator("cuda").manual_seed(num_slots)
    state, expected_state = new_slot_state(num_slots, "cuda"), new_slot_state(num_slots, "cuda")
    tables = [torch.zeros(257, 64, dtype=torch.int32, device="cuda") for _ in range(2)]
    rows, positions = torch.arange(1, 257, device="cuda"), torch.zeros(256, dtype=torch.int64, device="cuda")
    out, count = poisoned(256, "cuda"), number(0, "cuda")

    def decode() -> None:
        alloc_slots(state, out, count, entries=TableEntries(tables[0], positions, rows))

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    held = torch.empty(0, dtype=torch.int32, device="cuda")
    for step in range(120):
        kind = rng.choice(["replay", "replay", "eager", "prompt", "many", "end"])
        n = rng.randrange(257) if kind in ("replay", "eager") else rng.choice([1, 33, 512, 1500, 8192])
        if step == 0:
            kind, n = "many", num_slots * 9 // 10
        elif num_slots - 1 - len(held) < n:
            kind = "end"
        if kind in ("replay", "eager"):
            count.fill_(n)
            positions.fill_(step % 64)
            expected = poisoned(256, "cuda")
            graph.replay() if kind == "replay" else decode()
            alloc_slots_reference(
                expected_state, expected, count, entries=TableEntries(tables[1], positions, rows)
            )
            assert torch.equal(out, expected)
            assert torch.equal(*tables)
            held = torch.cat((held, out[:n]))
        elif kind == "end":
            held = held[torch.randperm(len(held), device="cuda", generator=generator)]
            freed, held = held[: len(held) // 20], held[len(held) // 20 :]
            free_slots(state, freed)
            free_slots_reference(expected_state, freed)
        else:
            taken, expected = poisoned(n, "cuda"), poisoned(n, "cuda")
            (alloc_slots if kind == "many" else alloc_run)(state, taken)
            (alloc_slots_reference if kind == "many" else alloc_run_reference)(expected_state, expected)
            assert torch.equal(taken, expected)
            held = torch.cat((held, taken))
        for name in ("mem_state", "free_bits", "block_free", "counters"):
            assert torch.equal(getattr(state, name), getattr(expected_state, name)), (step, kind, n, name)
    assert int(state.counters[0]) == num_slots - 1 - len(held)
    assert int(state.counters[1]) == 0
