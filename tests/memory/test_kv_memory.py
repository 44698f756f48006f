"""The device memory: what each edit does to the table, the segments and the free slots."""

import io

import msgspec
import numpy as np
import pytest
import torch

from lightkv import KVSpec, OutOfTokens, TokenTable
from lightkv.edits import (
    Alloc,
    Edit,
    FreeRange,
    FreeSegment,
    KeepEntries,
    MapSegments,
    SplitSegment,
    StoreSegment,
    decode,
    encode,
)
from lightkv.errors import CheckFailed
from lightkv.holdings import HeldRow, Holdings
from lightkv.memory.device import require_current
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import packed_size, upload
from lightkv.router.config import EngineConfig, InvalidConfig
from lightkv.router.model import build as build_module
from lightkv.router.model import sizes
from lightkv.router.service.messages import WorkerStart
from lightkv.router.service.worker import Worker

SPEC = KVSpec(num_layers=1, num_kv_heads=1, k_dim=2, v_dim=2, dtype=torch.float32)


@pytest.fixture
def memory(device: torch.device) -> KVMemory:
    return KVMemory(SPEC, num_slots=41, max_sequences=4, max_entries=16, device=device)


def own(*ranges: tuple[int, int], segments: dict[int, int] | None = None, dropped: int = 0) -> Holdings:
    """What the ledger would count if each (row, length) of `ranges` shared nothing, beside these segments."""
    return Holdings([HeldRow(row, (), 0, length, dropped) for row, length in ranges], segments or {})


def row_slots(memory: KVMemory, row: int, end: int) -> list[int]:
    return memory.table.slots(row, 0, end).tolist()


@pytest.mark.parametrize("dtypes", [(np.int64, np.int32, np.bool_), (np.int32,), (np.int64, np.int64)])
@pytest.mark.parametrize("static", [False, True], ids=["fresh", "static"])
def test_upload_keeps_types_and_values(device: torch.device, dtypes: tuple[type, ...], static: bool) -> None:
    arrays = [np.arange(size).astype(dtype) for size, dtype in zip((5, 0, 3), dtypes, strict=False)]
    out = torch.empty(packed_size(arrays) + 7, dtype=torch.uint8, device=device) if static else None
    tensors = upload(arrays, device, out=out)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.device.type == device.type
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))
        assert not tensor.numel() or not tensor.data_ptr() % 16
    if out is not None:
        assert tensors[0].data_ptr() == out.data_ptr()


def test_table_entries_are_packed_ranges(device: torch.device) -> None:
    table = TokenTable(3, 10, device)
    expected = [1 * 10 + p for p in (2, 3, 4)] + [3 * 10 + 9] + [2 * 10 + p for p in (0, 1)]
    assert table.entries([1, 3, 0, 2], [2, 9, 5, 0], [3, 1, 0, 2]).tolist() == expected
    assert table.entries([], [], []).tolist() == []
    assert table.entries([3], [2], [4]).tolist() == [32, 33, 34, 35]
    assert table.entries((2, 1), (9, 0), (1, 1)).tolist() == [29, 10]
    assert table.entries([1, 2, 3], [5, 0, 8], [2, 0, 1]).tolist() == [15, 16, 38]


@pytest.mark.parametrize("where", [(4, 0, 1), (1, 8, 3), (-1, 0, 1), (1, -1, 1)])
def test_table_refuses_places_outside(where: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError, match="4 rows of 10 entries"):
        TokenTable(3, 10, torch.device("cpu")).entries(*([number] for number in where))


def test_table_exports_kv_indices(device: torch.device) -> None:
    table = TokenTable(3, 10, device)
    entries = table.entries([1, 3], [0, 0], [4, 2])
    table.req_to_token.view(-1).index_copy_(
        0,
        torch.from_numpy(entries).to(device),
        torch.tensor([7, 3, 9, 1, 5, 2], dtype=torch.int32, device=device),
    )
    exported = table.kv_indices([3, 2, 1], [2, 0, 3])
    assert exported.kv_indptr.tolist() == [0, 2, 2, 5]
    assert exported.kv_indices.tolist() == [5, 2, 7, 3, 9]
    assert exported.kv_last_page_len.tolist() == [1, 1, 1]
    assert {tensor.dtype for tensor in exported} == {torch.int32}


def test_alloc_fills_each_row_from_its_start(memory: KVMemory) -> None:
    memory.apply([Alloc((1, 2), (0, 0), (3, 2))])
    memory.apply([Alloc((2, 1), (2, 3), (1, 1))])
    assert row_slots(memory, 1, 4) == [1, 2, 3, 7]
    assert row_slots(memory, 2, 3) == [4, 5, 6]
    assert not memory.table.req_to_token[0].any()
    assert memory.num_free == memory.capacity - 7 == int(memory.allocator.counters[0])
    memory.check(own((1, 4), (2, 3)))


def test_a_prompt_gets_a_run_and_a_decode_step_the_lowest(memory: KVMemory) -> None:
    memory.apply([Alloc((1,), (0,), (4,)), Alloc((2,), (0,), (2,)), FreeRange(1, 1, 3)])
    memory.apply([Alloc((3,), (0,), (3,))])  # 2 and 3 are free, but the lowest run of three begins at 7
    assert row_slots(memory, 3, 3) == [7, 8, 9]
    memory.apply([Alloc((1, 2, 3), (1, 2, 3), (1, 1, 1))])
    assert [row_slots(memory, row, end)[-1] for row, end in ((1, 2), (2, 3), (3, 4))] == [2, 3, 10]


def test_a_step_that_follows_another_uploads_nothing(
    memory: KVMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[int] = []

    def counted(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        uploads.append(len(arrays))
        return upload(arrays, device)

    monkeypatch.setattr("lightkv.memory.kv_memory.upload", counted)
    lengths = {1: 0, 2: 0, 3: 0}

    def step(*rows: int) -> int:
        before = len(uploads)
        starts = tuple(lengths[row] for row in rows)
        taken = memory.apply([Alloc(rows, starts, (1,) * len(rows))])
        assert [row_slots(memory, row, lengths[row] + 1)[-1] for row in rows] == taken.tolist()
        for row in rows:
            lengths[row] += 1
        return len(uploads) - before

    assert [step(1, 2) for _ in range(4)] == [1, 0, 0, 0]
    memory.apply([FreeRange(2, 3, 4)])
    lengths[2] = 3
    assert [step(1, 2), step(1, 2), step(2, 1), step(2, 1), step(1, 2, 3), step(1, 2, 3)] == [
        1,
        0,
        1,
        0,
        1,
        0,
    ]
    slots = [slot for row, length in lengths.items() for slot in row_slots(memory, row, length)]
    assert sorted(slots) == list(range(1, 1 + sum(lengths.values())))
    memory.apply([Alloc((1,), (15,), (1,))])
    with pytest.raises(IndexError, match="position 16"):
        memory.apply([Alloc((1,), (16,), (1,))])
    memory.check()


def test_store_map_split_and_free_segments(memory: KVMemory) -> None:
    memory.apply([Alloc((1,), (0,), (6,)), StoreSegment(1, 0, 4, segment=9)])
    memory.apply([MapSegments(2, 0, (9,)), Alloc((2,), (4,), (2,))])
    assert row_slots(memory, 2, 6) == [1, 2, 3, 4, 7, 8]
    memory.check(Holdings([HeldRow(1, (9,), 4, 6, 0), HeldRow(2, (9,), 4, 6, 0)], {9: 4}))
    memory.apply([SplitSegment(9, 1, head=10), MapSegments(3, 0, (10, 9))])
    assert row_slots(memory, 3, 4) == [1, 2, 3, 4]
    memory.apply([FreeSegment(9, 1)])
    assert memory.num_free == memory.capacity - 6
    memory.check()
    memory.apply([FreeSegment(9, 0), FreeSegment(10, 0), FreeRange(1, 4, 6), FreeRange(2, 4, 6)])
    memory.check(own())
    assert memory.num_free == memory.capacity


def test_which_slots_are_taken_depends_on_no_other_alloc_of_the_same_call(
    memory: KVMemory, device: torch.device
) -> None:
    other = KVMemory(SPEC, num_slots=41, max_sequences=4, max_entries=16, device=device)
    edits = [
        Alloc((1, 2), (0, 0), (4, 4)),
        FreeRange(1, 0, 4),
        Alloc((3,), (0,), (4,)),
        Alloc((4,), (0,), (4,)),
    ]
    edits += [Alloc((3,), (4,), (1,)), Alloc((3, 4), (5, 4), (1, 1))]
    memory.apply(edits)
    assert (row_slots(memory, 3, 6), row_slots(memory, 4, 5)) == ([1, 2, 3, 4, 13, 14], [9, 10, 11, 12, 15])
    for edit in edits:
        other.apply([edit])
    assert memory.digest() == other.digest()


def test_store_segment_may_grow_a_segment(memory: KVMemory) -> None:
    memory.apply(
        [
            Alloc((1,), (0,), (5,)),
            StoreSegment(1, 0, 2, 1),
            StoreSegment(1, 0, 5, 1),
            FreeRange(1, 5, 5),
            MapSegments(2, 0, (1,)),
        ]
    )
    assert row_slots(memory, 2, 5) == [1, 2, 3, 4, 5]
    memory.check(Holdings([HeldRow(row, (1,), 5, 5, 0) for row in (1, 2)], {1: 5}))


def test_freed_slots_are_read_before_the_row_is_mapped_again(memory: KVMemory) -> None:
    """A row is closed and opened again within one list of edits: the slots that it held first are freed."""
    memory.apply([Alloc((1,), (0,), (3,)), Alloc((2,), (0,), (3,)), StoreSegment(2, 0, 3, 5)])
    memory.apply([FreeRange(1, 0, 3), MapSegments(1, 0, (5,))])
    assert row_slots(memory, 1, 3) == [4, 5, 6]
    memory.check(Holdings([HeldRow(row, (5,), 3, 3, 0) for row in (1, 2)], {5: 3}))
    assert memory.num_free == memory.capacity - 3


def test_apply_returns_the_slots_of_the_last_alloc(memory: KVMemory) -> None:
    assert memory.apply([]) is None
    slots = memory.apply([Alloc((1,), (0,), (3,)), Alloc((2, 1), (0, 3), (2, 1)), FreeRange(1, 0, 1)])
    assert slots is not None
    assert slots.dtype == torch.int32
    assert slots.tolist() == row_slots(memory, 2, 2) + row_slots(memory, 1, 4)[3:]
    assert memory.apply([FreeRange(2, 0, 2)]) is None


def test_each_keep_has_its_entries(memory: KVMemory) -> None:
    memory.apply([Alloc((1, 2), (0, 0), (6, 4))])
    first, second = row_slots(memory, 1, 6), row_slots(memory, 2, 4)
    kept = [torch.tensor(entries, device=memory.device) for entries in ([1, 4], [5, 0, 2])]
    memory.apply([KeepEntries(2, 1, 4, 2), KeepEntries(1, 0, 6, 3)], [kept[0], kept[1]])
    assert row_slots(memory, 1, 3) == [first[0], first[2], first[5]]
    # 4 is out of range: the first entry that was not listed is freed.
    assert row_slots(memory, 2, 3) == [second[0], second[1], second[3]]
    memory.check(Holdings([HeldRow(1, (), 0, 3, 3), HeldRow(2, (), 0, 3, 1)], {}))


@pytest.mark.parametrize("num_entries", [0, 2])
def test_a_keep_without_its_entries_is_refused_before_anything_is_done(
    memory: KVMemory, num_entries: int
) -> None:
    memory.apply([Alloc((1,), (0,), (4,))])
    before = memory.table.req_to_token.clone()
    entries = [torch.tensor([1], device=memory.device)] * num_entries
    with pytest.raises(ValueError, match=f"1 KeepEntries edits and entries for {num_entries}"):
        memory.apply([Alloc((2,), (0,), (3,)), KeepEntries(1, 0, 4, 1)], entries)
    assert torch.equal(memory.table.req_to_token, before)
    memory.check(own((1, 4)))


def test_a_shortage_raises_and_allocates_nothing(memory: KVMemory) -> None:
    memory.apply([Alloc((1,), (0,), (16,)), Alloc((2,), (0,), (16,))])
    with pytest.raises(OutOfTokens, match="9 tokens needed, 8"):
        memory.apply([Alloc((3,), (0,), (9,))])
    memory.check(own((1, 16), (2, 16)))


def test_check_finds_a_slot_with_two_owners(memory: KVMemory) -> None:
    memory.apply([Alloc((1,), (0,), (3,)), StoreSegment(1, 0, 3, 1)])
    with pytest.raises(CheckFailed, match="slot 1 has 2 owners"):
        memory.check(own((1, 2), segments={1: 3}))
    memory.apply([FreeRange(1, 0, 1)])
    with pytest.raises(CheckFailed, match="slot 1 has 2 owners"):
        memory.check()


def test_check_finds_a_lost_slot(memory: KVMemory) -> None:
    memory.apply([Alloc((1,), (0,), (3,))])
    memory.check()
    with pytest.raises(CheckFailed, match="slot 3 is lost"):
        memory.check(own((1, 2)))


def test_the_same_edits_make_the_same_memory(memory: KVMemory, device: torch.device) -> None:
    edits: list[Edit] = [
        Alloc((1, 2, 3), (0, 0, 0), (5, 1, 7)),
        StoreSegment(1, 0, 4, 1),
        SplitSegment(1, 2, 2),
        FreeRange(3, 2, 7),
        MapSegments(4, 0, (2,)),
        Alloc((4, 2), (2, 1), (1, 1)),
        FreeSegment(1, 1),
    ]
    memory.apply(edits)
    other = KVMemory(SPEC, num_slots=41, max_sequences=4, max_entries=16, device=device)
    for edit in decode(encode(edits)):
        other.apply([edit])
    assert torch.equal(memory.table.req_to_token, other.table.req_to_token)
    assert torch.equal(memory.allocator.mem_state, other.allocator.mem_state)
    memory.check()


def test_memory_on_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    with pytest.raises(ValueError, match=r"on cuda:1 while cuda:2 .* torch.cuda.set_device\(1\) first"):
        KVMemory(SPEC, 41, max_sequences=4, max_entries=16, device=torch.device("cuda:1"))
    for device in ("cuda", "cuda:2"):
        require_current(torch.device(device), 2)


@pytest.mark.parametrize(("device", "made_current"), [("cuda:1", ["cuda:1"]), ("cpu", [])])
def test_the_workers_gpu_is_its_current_one_before_anything_is_built(
    device: str, made_current: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def build(config: EngineConfig, report: object, ranks: object) -> None:
        calls.append("build")
        raise InvalidConfig("that is enough")

    monkeypatch.setattr(sizes, "pick_device", torch.device)
    monkeypatch.setattr(build_module, "build_runner", build)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    start = msgspec.msgpack.encode(WorkerStart(EngineConfig(device=device)))
    assert b"that is enough" in Worker(io.StringIO()).exposed_start(start)
    assert calls == [*made_current, "build"]


@pytest.mark.gpu
def test_apply_never_synchronises(memory: KVMemory) -> None:
    def edits(segment: int) -> list[Edit]:
        alloc = Alloc((1, 2), (0, 0), (5, 3))
        return [
            alloc,
            StoreSegment(1, 0, 4, segment),
            MapSegments(3, 0, (segment,)),
            FreeRange(1, 4, 5),
            FreeRange(2, 0, 3),
            FreeSegment(segment, 0),
        ]

    memory.apply(edits(1))  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        memory.apply(edits(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    memory.check(own())
