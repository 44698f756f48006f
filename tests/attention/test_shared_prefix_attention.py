"""Decodes that read a shared prefix together: the tensors that a step has for the kernels, and the
output."""

import pytest
import torch

from lightkv import KVSpec
from lightkv.attention import (
    AttentionOptions,
    Batch,
    BatchShape,
    LayerShape,
    StaticStep,
    Step,
    make_backends,
    prefix_members,
)
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.attention.variants import Chunk, Window
from tests.support.combinations import each_pair

SHAPE = LayerShape(4, 16, 1)
ENTRIES = 200


@pytest.fixture
def memory(device: torch.device) -> KVMemory:
    """Rows 1 to 7 have random K/V in random slots; rows 1 to 6 have their first 150 entries in the same
    slots."""
    torch.manual_seed(0)
    memory = KVMemory(KVSpec(1, 1, 16, 16, torch.float32), 7 * ENTRIES + 1, 7, ENTRIES, device)
    memory.pool.kv(0).normal_()
    slots = 1 + torch.randperm(7 * ENTRIES, device=device).int().view(7, ENTRIES)
    slots[:6, :150] = slots[0, :150]
    memory.table.req_to_token[1:] = slots
    return memory


def dense(step: Step) -> tuple[list[list[int]], list[int], list[int]]:
    """Returns members without the padding, keys, and place."""
    assert step.shared_prefixes is not None
    members, keys, place = (tensor.tolist() for tensor in step.shared_prefixes)
    assert {tensor.dtype for tensor in step.shared_prefixes} == {torch.int32}
    return [[member for member in some if member >= 0] for some in members], keys, place


def test_prefixes_name_the_decodes_that_share_them(memory: KVMemory) -> None:
    prefixes = [SharedPrefix((2, 4), 90), SharedPrefix((3, 5), 120)]
    batch = Batch.of([7, 4, 3, 6, 5, 2], [0, 150, 150, 160, 120, 91], [9, 1, 1, 1, 1, 1], 1)
    step = Step.of(batch.sharing(prefixes, 3), memory)
    assert dense(step) == ([[4, 0], [1, 3]], [90, 120], [1, 3, -1, 4, 0])
    step = Step.of(Batch.of([7, 4], [150, 150], [1, 1], 0), memory)
    assert step.shared_prefixes is None
    step = Step.of(Batch.of([7, 4], [150, 150], [1, 1], 0).sharing([], 3), memory)
    assert step.shared_prefixes is None
    step = Step.of(Batch.of([2, 4], [99, 99], [1, 1], 0).sharing(prefixes[:1], 1), memory)
    assert step.shared_prefixes is None


@pytest.mark.parametrize(("num_rows", "sizes"), [(2, [2]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (6, [3, 3])])
def test_prefixes_with_too_many_members_are_divided(
    memory: KVMemory, num_rows: int, sizes: list[int]
) -> None:
    rows = list(range(1, num_rows + 1))
    batch = Batch.of(rows, [150] * num_rows, [1] * num_rows, 0)
    step = Step.of(batch.sharing([SharedPrefix(tuple(rows), 140)], 3), memory)
    members, keys, place = dense(step)
    assert [len(some) for some in members if some] == sizes
    assert len(members) == num_rows // 2
    assert keys == [140] * len(sizes) + [0] * (len(members) - len(sizes))
    assert [member for some in members for member in some] == list(range(num_rows))
    assert [members[at // 3][at % 3] for at in place] == list(range(num_rows))


def test_a_member_that_is_left_over_reads_alone(memory: KVMemory) -> None:
    batch = Batch.of([1, 2, 3], [150] * 3, [1] * 3, 0)
    step = Step.of(batch.sharing([SharedPrefix((1, 2, 3), 140)], 2), memory)
    assert dense(step) == ([[0, 1]], [140], [0, 1, -1])


def test_a_static_step_has_room_for_prefixes_and_never_moves(memory: KVMemory) -> None:
    static = StaticStep(BatchShape.of_decodes(5), memory, prefix_members=3)
    assert static.load(Batch.empty()).shared_prefixes is None
    step = static.load(Batch.empty().sharing([], 3))
    assert dense(step) == ([[], []], [0, 0], [-1] * 5)
    assert step.shared_prefixes is not None
    before = [tensor.data_ptr() for tensor in step.shared_prefixes]
    batch = Batch.of([6, 2, 3], [151, 150, 160], [1] * 3, 0)
    step = static.load(batch.sharing([SharedPrefix((3, 6), 150)], 3))
    assert step.shared_prefixes is not None
    assert dense(step) == ([[2, 0], []], [150, 0], [1, -1, 0, -1, -1])
    assert [tensor.data_ptr() for tensor in step.shared_prefixes] == before
    assert static.load(Batch.of([6, 2, 3], [152, 151, 161], [1] * 3, 0)).shared_prefixes is None
    alone = StaticStep(BatchShape.of_decodes(1), memory, prefix_members=3)
    assert alone.load(Batch.of([1], [5], [1], 0).sharing([], 3)).shared_prefixes is None


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
    ids=["not in the batch", "no row", "a prefill", "too long", "twice", "in two"],
)
def test_prefixes_that_break_the_rules_are_refused(prefixes: list[SharedPrefix]) -> None:
    batch = Batch.of([3, 1, 2, 6], [120, 150, 150, 150], [4, 1, 1, 1], 1)
    with pytest.raises(ValueError, match=r"rows \(.*\) are to read .* entries together"):
        batch.sharing(prefixes, 3)


def test_members_are_as_many_as_every_layer_takes() -> None:
    cpu = torch.device("cpu")

    def members(name: str, *shapes: LayerShape) -> int:
        return prefix_members(make_backends(name, cpu, shapes))

    windowed = LayerShape(8, 64, 1, AttentionOptions().plus(Window(9)))
    assert members("torch", SHAPE) == 1
    assert members("triton", SHAPE) == 16
    assert members("triton", SHAPE, windowed) == 16
    assert members("triton", windowed) == 1
    assert members("triton", LayerShape(8, 64, 1, AttentionOptions().plus(Chunk(9)))) == 8
    assert members("triton", SHAPE, LayerShape(8, 64, 1)) == 8
    assert members("triton", LayerShape(64, 64, 1)) == 1


BATCHES = {
    "two prefixes, and one alone": (
        [3, 1, 7, 4, 2],
        [160, 150, 190, 150, 155],
        [((1, 2), 150), ((3, 4), 100)],
    ),
    "all in one": ([1, 2, 3, 4, 5, 6], [150, 151, 152, 170, 199, 150], [((1, 2, 3, 4, 5, 6), 150)]),
    "a short one": ([1, 2, 4], [1, 9, 40], [((1, 2), 1)]),
    "none": ([1, 2, 4], [30, 9, 40], []),
}


@each_pair(name=["torch", "triton"], batch=list(BATCHES), limits=[(0, 0), (40, 0), (0, 60)])
def test_reading_together_gives_what_reading_alone_does(
    memory: KVMemory, name: str, batch: str, limits: tuple[int, int]
) -> None:
    """Also with a prefill before the decodes; layers with a window read nothing together."""
    window, chunk = limits
    rows, starts, found = BATCHES[batch]
    shape = LayerShape(
        4, 16, 1, AttentionOptions().plus(Window(window) if window else None, Chunk(chunk) if chunk else None)
    )
    (backend,) = make_backends(name, memory.device, [shape])
    (reference,) = make_backends("torch", memory.device, [shape])
    for num_prefills in (0, 1):
        counts = [1] * len(rows)
        prefill = [7] if num_prefills and 7 not in rows else []
        batch_rows, batch_starts = prefill + rows, [0] * len(prefill) + starts
        batch_counts = [3] * len(prefill) + counts
        q, k, v = (torch.randn(sum(batch_counts), heads * 16, device=memory.device) for heads in (4, 1, 1))
        prefixes = [SharedPrefix(*prefix) for prefix in found]
        made = Batch.of(batch_rows, batch_starts, batch_counts, len(prefill))
        expected = reference.forward(q, k, v, Step.of(made, memory))
        step = Step.of(made.sharing(prefixes, 4), memory)
        assert (step.shared_prefixes is not None) == bool(found)
        torch.testing.assert_close(backend.forward(q, k, v, step), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_decode_graph_with_shared_prefixes_follows_its_static_step(memory: KVMemory) -> None:
    (backend,) = make_backends("triton", memory.device, [SHAPE])
    (reference,) = make_backends("torch", memory.device, [SHAPE])
    static = StaticStep(BatchShape.of_decodes(7), memory, prefix_members=4)
    qkv = [torch.randn(7, heads * 16, device=memory.device) for heads in (4, 1, 1)]
    step = static.load(Batch.empty().sharing([], 4))
    backend.forward(*qkv, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(*qkv, step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in [*BATCHES, *reversed(BATCHES)]:
            rows, starts, found = BATCHES[batch]
            prefixes = [SharedPrefix(*prefix) for prefix in found]
            loaded = static.load(Batch.of(rows, starts, [1] * len(rows), 0).sharing(prefixes, 4))
            graph.replay()
            got = out[: len(rows)].clone()
            expected = reference.forward(*qkv, loaded)[: len(rows)]
            torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
