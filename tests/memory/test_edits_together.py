"""Edits that are applied together leave the same as one by one, and the requests of a step share launches."""

import random
from collections import Counter

import pytest
import torch

from lightkv import KVSpec, StateTensor
from lightkv.edits import Alloc, AllocPart, AllocStates, Edit, FreeRange, MapSegments, StoreSegment
from lightkv.layer_groups import FULL, Lifetime
from lightkv.memory import kv_memory, state_memory
from lightkv.memory.kv_memory import KVMemory
from tests.support.combinations import each_value, slow
from tests.support.state_life import ENTRIES, ROWS, Life, live, random_life

SPEC = KVSpec(2, 1, 2, 2, torch.float32, states=[[StateTensor("window", (2,), torch.float32)]])


GROUPS = KVSpec(2, 1, 2, 2, torch.float32, lifetimes=[FULL, Lifetime("window", 6)])


def segments(memory: KVMemory) -> list[dict[int, list[int]]]:
    return [{one: slots.tolist() for one, slots in found.items()} for found in memory.segments.of_class]


@each_value(seed=[0, 1, 3, *slow(2, 4, 5)])
def test_random_lives_in_steps_of_many_edits(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which slots are taken depends on no other edit of the step. A piece in the middle of it finds the states
    that its row has by then."""
    rng, choices = random.Random(seed), random.Random(seed)
    life = random_life("all", rng)
    ledger, step = life.ledger, list[Edit]()
    size = ledger.capacity + 1, ROWS, ENTRIES, device, ledger.states.capacity
    together, one_by_one = (KVMemory(SPEC, *size) for _ in range(2))
    assert one_by_one.states is not None

    def apply(one: Life, share: float = 0.15) -> None:
        edits = ledger.drain()
        one.memory.apply(edits)
        step.extend(edits)
        if choices.random() < share:
            places = range(len(step) + 1)
            pieces = {i: (choices.choice(places), choices.randrange(ROWS) + 1) for i in range(3)}
            found = together.apply_step(step, pieces)
            for done in places:
                rows = {i: row for i, (end, row) in pieces.items() if end == done}
                assert {i: found[i] for i in rows} == {i: one_by_one.states.of_rows[rows[i]] for i in rows}
                one_by_one.apply(step[done : done + 1])
            step.clear()
            assert together.digest() == one_by_one.digest()
            assert segments(together) == segments(one_by_one)
            together.check(ledger.holdings())

    monkeypatch.setattr(Life, "apply", apply)
    live(life, rng, 300)
    apply(life, 1.0)
    assert together.num_free == together.capacity


@pytest.mark.parametrize(
    ("spec", "edits"),
    [
        (SPEC, [StoreSegment(1, 0, 6, 5), StoreSegment(1, 0, 2, 6), Alloc((1,), (4,), (1,))]),
        (SPEC, [MapSegments(2, 0, (9,)), FreeRange(2, 0, 4)]),
        (GROUPS, [StoreSegment(1, 0, 6, 5, 1), AllocPart(2, (1,), (3,), (1,), (0,))]),
        (GROUPS, [Alloc((2,), (0,), (2,)), StoreSegment(1, 0, 2, 7), AllocPart(2, (2,), (0,), (2,), (0,))]),
    ],
    ids=["stored, then allocated", "mapped, then freed", "stored, then a part", "apart from its part"],
)
def test_an_edit_that_changes_what_another_reads_comes_after_it(
    spec: KVSpec, edits: list[Edit], device: torch.device
) -> None:
    memories = [KVMemory(spec, 60, 4, 20, device, num_states=3) for _ in range(2)]
    for memory in memories:
        memory.apply([Alloc((2,), (0,), (3,)), Alloc((1,), (0,), (6,)), StoreSegment(1, 0, 4, 9)])
        memory.apply([FreeRange(2, 0, 3)])  # where two slots beside one another are free, but not four
    memories[0].apply(edits)
    for edit in edits:
        memories[1].apply([edit])
    assert segments(memories[0]) == segments(memories[1])
    assert memories[0].digest() == memories[1].digest()


def test_a_row_that_is_mapped_twice_has_the_slots_of_the_second_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = KVMemory(SPEC, 60, 4, 20, device, num_states=3)
    for row, segment in ((1, 8), (2, 9)):
        memory.apply([Alloc((row,), (0,), (4,)), StoreSegment(row, 0, 4, segment)])

    def in_any_order(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in list(zip(targets, sources, strict=True))[::-1]:
            target.copy_(source)

    monkeypatch.setattr(torch, "_foreach_copy_", in_any_order)
    memory.apply([MapSegments(3, 0, (8,)), MapSegments(3, 0, (9,))])
    assert torch.equal(memory.table.slots(3, 0, 4), memory.segments.of_class[0][9])


def memory_and_step(device: torch.device | str) -> tuple[KVMemory, list[Edit]]:
    """Returns a memory with a segment of six tokens, and the edits of 30 requests that hit it in one step."""
    memory = KVMemory(SPEC, 100, 40, 20, device, num_states=50)
    memory.apply([MapSegments(40, 0, (), 1), AllocStates((40,)), StoreSegment(40, 1, 2, 1, 1)])
    memory.apply([Alloc((40,), (0,), (6,)), StoreSegment(40, 0, 6, 1)])
    step: list[Edit] = []
    for row in range(1, 31):
        step += [MapSegments(row, 0, (1,)), MapSegments(row, 0, (1,), 1), AllocStates((row,))]
        step += [Alloc((row,), (6,), (1,)), StoreSegment(row, 6, 7, 10 + row)]
    return memory, step


def test_the_requests_of_a_step_share_their_launches(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, step = memory_and_step(device)
    counts = Counter[str]()

    def count(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def counted(*given: object, **named: object) -> object:
            counts[name] += 1
            return call(*given, **named)

        monkeypatch.setattr(owner, name, counted)

    for module in (kv_memory, state_memory):
        count(module, "upload")
    for name in ("alloc", "free"):
        count(memory.allocator, name)
    count(torch, "_foreach_copy_")
    memory.apply(step)
    # Slots to rows, an allocation and its entries, slots to segments, and the rows of the table of states.
    assert counts == {"upload": 2, "alloc": 1, "_foreach_copy_": 2}
    assert memory.table.req_to_token[1:31, :7].tolist() == [[*range(1, 7), 6 + row] for row in range(1, 31)]
    assert segments(memory)[0][12] == [8]
    assert memory.states is not None
    assert memory.states.table[1:31].tolist() == [[1, 1 + row] for row in range(1, 31)]


@pytest.mark.gpu
def test_a_step_with_states_never_waits_for_the_gpu() -> None:
    ends: list[Edit] = [FreeRange(row, 6, 7) for row in range(1, 31)]
    ends += [FreeRange(row, 1, 2, 1) for row in range(1, 31)]
    memory, step = memory_and_step("cuda")
    memory.apply_step([*step, *ends], {})  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert memory.apply_step([*step, *ends], {0: (10, 2)}) == {0: (1, 3)}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert memory.num_free == memory.capacity - 6
