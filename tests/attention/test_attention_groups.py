"""Generations that read their first tokens together: from prefixes to the kernels' tensors, and the outcome."""

import pytest
import torch

from lightkv import KVSpec
from lightkv.attention import AttentionMetadata, AttentionOptions, LayerShape, make_backends, prefix_members
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory.kv_memory import KVMemory

SHAPE = LayerShape(4, 16, 1)
ENTRIES = 200


@pytest.fixture
def memory(device: torch.device) -> KVMemory:
    """Rows 1 to 7 hold random K/V in random slots; all but 7 have their first 150 entries in row 1's slots."""
    torch.manual_seed(0)
    memory = KVMemory(KVSpec(1, 1, 16, 16, torch.float32), 7 * ENTRIES + 1, 7, ENTRIES, device)
    memory.pool.kv(0).normal_()
    slots = 1 + torch.randperm(7 * ENTRIES, device=device).int().view(7, ENTRIES)
    slots[:6, :150] = slots[0, :150]
    memory.table.req_to_token[1:] = slots
    return memory


def dense(metadata: AttentionMetadata) -> tuple[list[list[int]], list[int], list[int]]:
    """Members without the padding, keys, place."""
    assert metadata.shared_prefixes is not None
    members, keys, place = (tensor.tolist() for tensor in metadata.shared_prefixes)
    assert {tensor.dtype for tensor in metadata.shared_prefixes} == {torch.int32}
    return [[member for member in group if member >= 0] for group in members], keys, place


def test_prefixes_become_groups_of_the_generations(memory: KVMemory) -> None:
    metadata = AttentionMetadata(7, 64, memory, prefix_members=3)
    prefixes = [SharedPrefix((2, 4), 90), SharedPrefix((3, 5), 120)]
    metadata.prepare(
        [7, 4, 3, 6, 5, 2], [0, 150, 150, 160, 120, 91], [9, 1, 1, 1, 1, 1], 1, prefixes=prefixes
    )
    assert dense(metadata) == ([[4, 0], [1, 3]], [90, 120], [1, 3, -1, 4, 0])
    metadata.prepare([7, 4], [150, 150], [1, 1], 0)
    assert metadata.shared_prefixes is None
    metadata.prepare([7, 4], [150, 150], [1, 1], 0, prefixes=[])
    assert metadata.shared_prefixes is None
    AttentionMetadata(7, 64, memory).prepare([2, 4], [99, 99], [1, 1], 0, prefixes=prefixes[:1])


@pytest.mark.parametrize(("num_rows", "sizes"), [(2, [2]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (6, [3, 3])])
def test_what_a_group_cannot_hold_is_cut(memory: KVMemory, num_rows: int, sizes: list[int]) -> None:
    metadata = AttentionMetadata(7, 64, memory, prefix_members=3)
    rows = list(range(1, num_rows + 1))
    metadata.prepare(rows, [150] * num_rows, [1] * num_rows, 0, prefixes=[SharedPrefix(tuple(rows), 140)])
    groups, keys, place = dense(metadata)
    assert [len(group) for group in groups if group] == sizes
    assert len(groups) == num_rows // 2
    assert keys == [140] * len(sizes) + [0] * (len(groups) - len(sizes))
    assert [member for group in groups for member in group] == list(range(num_rows))
    assert [groups[at // 3][at % 3] for at in place] == list(range(num_rows))


def test_one_that_is_left_over_reads_alone(memory: KVMemory) -> None:
    metadata = AttentionMetadata(7, 64, memory, prefix_members=2)
    metadata.prepare([1, 2, 3], [150] * 3, [1] * 3, 0, prefixes=[SharedPrefix((1, 2, 3), 140)])
    assert dense(metadata) == ([[0, 1]], [140], [0, 1, -1])


def test_graph_metadata_has_room_for_groups_and_never_moves(memory: KVMemory) -> None:
    metadata = AttentionMetadata(7, 64, memory, prefix_members=3).create_cuda_graph_metadata(5)
    assert metadata.shared_prefixes is None
    metadata.prepare([], [], [], 0, prefixes=[])
    assert dense(metadata) == ([[], []], [0, 0], [-1] * 5)
    assert metadata.shared_prefixes is not None
    before = [tensor.data_ptr() for tensor in metadata.shared_prefixes]
    metadata.prepare([6, 2, 3], [151, 150, 160], [1] * 3, 0, prefixes=[SharedPrefix((3, 6), 150)])
    assert dense(metadata) == ([[2, 0], []], [150, 0], [1, -1, 0, -1, -1])
    assert [tensor.data_ptr() for tensor in metadata.shared_prefixes] == before
    metadata.prepare([6, 2, 3], [152, 151, 161], [1] * 3, 0)
    assert metadata.shared_prefixes is None
    alone = metadata.create_cuda_graph_metadata(1)
    alone.prepare([1], [5], [1], 0, prefixes=[])
    assert alone.shared_prefixes is None


@pytest.mark.parametrize(
    "prefixes",
    [
        [SharedPrefix((1, 4), 100)],
        [SharedPrefix((1, 9), 100)],
        [SharedPrefix((2, 3), 100)],
        [SharedPrefix((1, 2), 151)],
        [SharedPrefix((1, 1), 100)],
        [SharedPrefix((1, 2), 100), SharedPrefix((2, 6), 90)],
    ],
    ids=["not in the batch", "no row", "a context", "too long", "twice", "in two"],
)
def test_prefixes_that_break_the_rules_are_refused(memory: KVMemory, prefixes: list[SharedPrefix]) -> None:
    metadata = AttentionMetadata(7, 64, memory, prefix_members=3)
    metadata.prepare([5], [9], [1], 0)
    step, rows = metadata.step, metadata.rows
    with pytest.raises(ValueError, match=r"rows \(.*\) are to read .* entries together"):
        metadata.prepare([3, 1, 2, 6], [120, 150, 150, 150], [4, 1, 1, 1], 1, prefixes=prefixes)
    assert (metadata.step, metadata.rows) == (step, rows)


def test_members_are_as_many_as_every_layer_takes() -> None:
    cpu = torch.device("cpu")

    def members(name: str, *shapes: LayerShape) -> int:
        return prefix_members(make_backends(name, cpu, shapes))

    windowed = LayerShape(8, 64, 1, AttentionOptions(window=9))
    assert members("torch", SHAPE) == 1
    assert members("triton", SHAPE) == 16
    assert members("triton", SHAPE, windowed) == 16
    assert members("triton", windowed) == 1
    assert members("triton", SHAPE, LayerShape(8, 64, 1)) == 8
    assert members("triton", LayerShape(64, 64, 1)) == 1


BATCHES = {
    "groups, and one alone": ([3, 1, 7, 4, 2], [160, 150, 190, 150, 155], [((1, 2), 150), ((3, 4), 100)]),
    "all in one": ([1, 2, 3, 4, 5, 6], [150, 151, 152, 170, 199, 150], [((1, 2, 3, 4, 5, 6), 150)]),
    "a short one": ([1, 2, 4], [1, 9, 40], [((1, 2), 1)]),
    "none": ([1, 2, 4], [30, 9, 40], []),
}


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [0, 40])
def test_what_is_read_together_is_what_each_would_read(
    memory: KVMemory, name: str, batch: str, window: int
) -> None:
    """With a context in front, too; layers with a window have no groups."""
    rows, starts, found = BATCHES[batch]
    shape = LayerShape(4, 16, 1, AttentionOptions(window=window))
    (backend,) = make_backends(name, memory.device, [shape])
    (reference,) = make_backends("torch", memory.device, [shape])
    metadata = AttentionMetadata(7, 64, memory, prefix_members=4)
    for num_prefills in (0, 1):
        counts = [1] * len(rows)
        context = [7] if num_prefills and 7 not in rows else []
        batch_rows, batch_starts = context + rows, [0] * len(context) + starts
        batch_counts = [3] * len(context) + counts
        q, k, v = (torch.randn(sum(batch_counts), heads * 16, device=memory.device) for heads in (4, 1, 1))
        prefixes = [SharedPrefix(*prefix) for prefix in found]
        metadata.prepare(batch_rows, batch_starts, batch_counts, len(context))
        expected = reference.forward(q, k, v, metadata)
        metadata.prepare(batch_rows, batch_starts, batch_counts, len(context), prefixes=prefixes)
        assert (metadata.shared_prefixes is not None) == bool(found)
        torch.testing.assert_close(backend.forward(q, k, v, metadata), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_grouped_decode_graph_follows_its_metadata(memory: KVMemory) -> None:
    (backend,) = make_backends("triton", memory.device, [SHAPE])
    (reference,) = make_backends("torch", memory.device, [SHAPE])
    metadata = AttentionMetadata(7, 64, memory, prefix_members=4).create_cuda_graph_metadata(7)
    qkv = [torch.randn(7, heads * 16, device=memory.device) for heads in (4, 1, 1)]
    metadata.prepare([], [], [], 0, prefixes=[])
    backend.forward(*qkv, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(*qkv, metadata)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in [*BATCHES, *reversed(BATCHES)]:
            rows, starts, found = BATCHES[batch]
            prefixes = [SharedPrefix(*prefix) for prefix in found]
            metadata.prepare(rows, starts, [1] * len(rows), 0, prefixes=prefixes)
            graph.replay()
            got = out[: len(rows)].clone()
            expected = reference.forward(*qkv, metadata)[: len(rows)]
            torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
