"""Compares both backends with attention in float64, over shuffled slots in a pool full of NaN."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

from lightkv import KVSpec
from lightkv.attention import (
    AttentionOptions,
    Batch,
    BatchShape,
    LayerShape,
    Rotary,
    StaticStep,
    Step,
    make_backends,
    pick_backend,
    torch_backend,
    torch_plan,
)
from lightkv.attention.forms.gaps import with_gaps
from lightkv.attention.forms.rings import over_rings
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.attention import attention_reference
from lightkv.triton_kernels.attention.variants import Chunk, SinkLogits, TreeMask, Window
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.attention.histories import CASES, MAX_SEQUENCES, TOLERANCE, History, on
from tests.support.combinations import slow

# (rows, counts, number of prefills) of each step: fresh prompts; a later chunk beside a fresh prompt, a chunk
# of one token and decodes; decodes alone, of very unequal lengths; and more of both.
STEPS = [
    ([1, 2, 3], [9, 1, 5], 3),
    ([1, 4, 3, 2], [23, 3, 1, 1], 3),
    ([1, 2, 3, 4], [1, 1, 1, 1], 0),
    ([5, 2, 4, 1], [11, 6, 1, 1], 2),
    ([4, 1, 5, 3, 2], [1, 1, 1, 1, 1], 0),
]


def run_steps(
    name: str, shape: LayerShape, dtype: torch.dtype, device: torch.device, num_steps: int = len(STEPS)
) -> None:
    torch.manual_seed(0)
    shape = on(shape, device)
    history = History(shape, dtype, device)
    backend = make_backends(name, device, [shape, shape])[1]
    for rows, counts, num_prefills in STEPS[:num_steps]:
        total = sum(counts)
        starts = history.place(rows, counts)
        step = Step.of(Batch.of(rows, starts, counts, num_prefills), history.memory)
        q = torch.randn(total, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
        k = torch.randn(total, shape.num_kv_heads, shape.head_dim, device=device, dtype=dtype)
        v = torch.randn(total, shape.num_kv_heads, history.v_dim, device=device, dtype=dtype)
        history.append(rows, counts, k, v)
        out = backend.forward(q.flatten(1), k.flatten(1), v.flatten(1), step)
        assert out.shape == (total, shape.num_heads * history.v_dim)
        expected = torch.cat(
            [history.attend(row, part) for row, part in zip(rows, q.split(counts), strict=True)]
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected.flatten(1), rtol=tolerance, atol=tolerance)
    untouched = history.memory.pool.kv(0)[1:]
    assert untouched.isnan().all(), "another layer's K/V was written"
    assert not history.memory.pool.kv(1)[0].any(), "slot 0 was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_torch_backend(case: str, dtype: torch.dtype, device: torch.device) -> None:
    run_steps("torch", CASES[case], dtype, device)


@pytest.mark.parametrize("case", CASES)
def test_torch_backend_in_several_buckets(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_plan, "PADDING_TOKENS", 1)
    run_steps("torch", CASES[case], torch.float32, device)


@pytest.mark.parametrize("tile", [1, 4], ids=["tile-1", "tile-4"])
@pytest.mark.parametrize("case", CASES)
def test_torch_backend_in_several_tiles(
    case: str, tile: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention_reference, torch_backend):
        monkeypatch.setattr(module, "QUERY_TILE", tile)
    run_steps("torch", CASES[case], torch.float32, device)


@pytest.mark.parametrize(
    ("limit", "keys"),
    [(None, [14, 18, 19]), (Window(6), [9, 9, 6]), (Chunk(8), [6, 10, 3])],
    ids=["all", "window-6", "chunk-8"],
)
def test_prefill_tiles_attend_to_keys_that_are_seen_alone(
    limit: Window | Chunk | None, keys: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1 computes entries 10 to 18 in tiles of 4; rows 2 and 3 are fresh, and need no mask."""
    monkeypatch.setattr(torch_backend, "QUERY_TILE", 4)
    calls = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append((q.shape[-2], k.shape[-2], named["is_causal"], named["attn_mask"] is None))
        return torch.zeros_like(q)

    monkeypatch.setattr(torch_backend, "scaled_dot_product_attention", attend)
    memory = KVMemory(KVSpec(1, 1, 16, 16, torch.float32), 100, MAX_SEQUENCES, 32, device)
    step = Step.of(Batch.of([1, 2, 3], [10, 0, 0], [9, 6, 3], 3), memory)
    (backend,) = make_backends("torch", device, [LayerShape(1, 16, 1, AttentionOptions().plus(limit))])
    backend.forward(*torch.zeros(3, 18, 16, device=device), step)
    tiles = [(num, seen, False, False) for num, seen in zip([4, 4, 1], keys, strict=True)]
    assert calls == [*tiles, (6, 6, True, True), (3, 3, True, True)]


@pytest.mark.parametrize("num_steps", [3, *slow(len(STEPS))], ids="steps{}".format)
@pytest.mark.parametrize(
    "case", ["v-narrower", "softcap-window", "chunk-5", "sinks-window", "alibi", "full", *slow("gqa-3")]
)
def test_triton_backend(case: str, num_steps: int, device: torch.device) -> None:
    """The first three steps have fresh prompts, later chunks beside decodes, and decodes alone. The case
    "alibi" has the heads of "gqa-3"."""
    run_steps("triton", CASES[case], torch.float32, device, num_steps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_backends_on_gpu(name: str, case: str, dtype: torch.dtype, device: torch.device) -> None:
    run_steps(name, CASES[case], dtype, device)


@pytest.fixture
def memory(device: torch.device) -> KVMemory:
    return KVMemory(KVSpec(1, 1, 16, 16, torch.float32), 100, MAX_SEQUENCES, 32, device)


def test_a_narrower_pool_is_read_back_by_prefill_too(device: torch.device) -> None:
    """With K/V in float16 and a float32 model, a fresh prompt attends to what later steps will read."""
    memory = KVMemory(KVSpec(1, 1, 16, 16, torch.float16), 100, MAX_SEQUENCES, 32, device)
    (backend,) = make_backends("torch", device, [LayerShape(1, 16, 1)])
    slots = torch.arange(5, 10, dtype=torch.int32, device=device)
    memory.table.req_to_token.view(-1).index_copy_(0, torch.arange(32, 37, device=device), slots)
    q, k, v = (torch.randn(5, 16, device=device) for _ in range(3))
    step = Step.of(Batch.of([1], [0], [5], 1), memory)
    fresh = backend.forward(q, k, v, step)
    step = Step.of(Batch.of([1], [4], [1], 0), memory)
    decoded = backend.forward(q[4:], k[4:], v[4:], step)
    assert fresh.dtype == torch.float32
    torch.testing.assert_close(fresh[4:], decoded, rtol=1e-6, atol=1e-6)


def test_what_a_step_says_of_a_mixed_batch(memory: KVMemory) -> None:
    slots = torch.arange(1, 1 + 32 * 3, dtype=torch.int32, device=memory.device)
    # Row 1: 1.., row 2: 33..
    memory.table.req_to_token.view(-1).index_copy_(0, torch.arange(32, 32 * 4, device=memory.device), slots)
    step = Step.of(Batch.of([2, 1, 3], [4, 0, 9], [3, 2, 1], 2), memory)
    assert (step.host.num_prefills, step.host.num_decodes) == (2, 1)
    assert (step.num_tokens, step.host.first_decode_token) == (6, 5)
    assert step.q_lens.tolist() == step.host.counts.tolist() == [3, 2, 1]
    assert step.position_ids.tolist() == [4, 5, 6, 0, 1, 9]
    assert step.rows.tolist() == [2, 1, 3]
    assert step.kv_lens.tolist() == [7, 2, 10]
    assert step.q_starts.tolist() == [0, 3, 5, 6]
    assert step.slot_mapping.tolist() == [37, 38, 39, 1, 2, 74]
    assert step.host.rows.tolist() == [2, 1, 3]
    assert step.host.kv_lens.tolist() == [7, 2, 10]
    dtypes = [step.rows.dtype, step.position_ids.dtype, step.slot_mapping.dtype]
    assert dtypes == [torch.int64] * 3
    assert {t.dtype for t in (step.kv_lens, step.q_starts, step.q_lens)} == {torch.int32}


def test_a_static_step_pads_and_never_moves(memory: KVMemory) -> None:
    memory.table.req_to_token.view(-1).index_copy_(
        0,
        torch.tensor([32 + 4, 96 + 9], device=memory.device),
        torch.tensor([11, 12], dtype=torch.int32, device=memory.device),
    )

    static = StaticStep(BatchShape.of_decodes(4), memory)

    def addresses(step: Step) -> list[int]:
        names = ("rows", "kv_lens", "position_ids", "slot_mapping")
        return [getattr(step, name).data_ptr() for name in names]

    step = static.load(Batch.empty())
    before = addresses(step)
    assert (step.num_tokens, step.host.num_decodes) == (4, 4)
    assert not step.rows.any()
    step = static.load(Batch.of([1, 3], [4, 9], [1, 1], 0))
    assert step.rows.tolist() == [1, 3, 0, 0]
    assert step.kv_lens.tolist() == [5, 10, 0, 0]
    assert step.position_ids.tolist() == [4, 9, 0, 0]
    assert step.slot_mapping.tolist() == [11, 12, 0, 0]
    assert step.host.kv_lens.tolist() == [5, 10, 0, 0]
    assert addresses(step) == before
    step = static.load(Batch.of([3], [9], [1], 0))
    assert step.rows.tolist() == [3, 0, 0, 0]
    assert step.slot_mapping.tolist() == [12, 0, 0, 0]
    assert addresses(step) == before


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (([1, 2], [0], [1, 1], 0), "one each a sequence"),
        (([1], [0], [2], 0), "exactly one"),
        (([1], [0], [0], 1), "at least one"),
        (([1], [0], [1], 2), "2 prefills"),
    ],
)
def test_a_batch_that_breaks_the_rules_is_refused(
    batch: tuple[list[int], list[int], list[int], int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Batch.of(*batch)


def test_positions_outside_the_table_are_refused(memory: KVMemory) -> None:
    with pytest.raises(IndexError, match="32 entries"):
        Step.of(Batch.of([1], [30], [3], 1), memory)


def test_a_refused_load_changes_nothing(memory: KVMemory) -> None:
    static = StaticStep(BatchShape.of_decodes(4), memory, prefix_members=3)
    step = static.load(Batch.of([2], [5], [1], 0))
    assert static._packed is not None
    before = static._packed.clone(), step.slot_mapping.clone()
    decodes = Batch.of([1, 2], [4, 4], [1, 1], 0)
    prompts = Batch.of([1], [4], [1], 1)
    for batch, message in (
        (
            prompts,
            "1 prefills and 0 decodes; there are places for 4 tokens, 0 prefills and 4 decodes",
        ),
        (
            Batch.of([1] * 5, [0] * 5, [1] * 5, 0),
            "5 tokens, 0 prefills and 5 decodes; there are places for 4",
        ),
        (with_gaps(decodes, [3, 0]), "a CUDA graph takes entries for positions"),
        (decodes.sharing([SharedPrefix((1, 2), 3)], 5), "up to 5 decodes, where a read here serves 3"),
        (over_rings(decodes, Ring(0, 33)), "32 entries"),
        (Batch.of([1], [32], [1], 0), "32 entries"),
    ):
        with pytest.raises((ValueError, IndexError), match=message):
            static.load(batch)
    mask = TreeMask(torch.ones(2, 1, dtype=torch.int32, device=memory.device))
    with pytest.raises(ValueError, match="a mask in a step over Ring"):
        static.load(over_rings(decodes, Ring(0, 8)), mask=mask)
    assert torch.equal(static._packed, before[0])
    assert torch.equal(step.slot_mapping, before[1])


def test_a_step_and_its_batch_are_immutable(memory: KVMemory) -> None:
    batch = Batch.of([1], [0], [3], 1)
    step = Step.of(batch, memory)
    with pytest.raises(FrozenInstanceError):
        batch.num_prefills = 0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        step.mask = None  # type: ignore[misc]
    with pytest.raises(ValueError, match="2 positions of 3 tokens"):
        batch.at_positions([0, 1])
    assert Step.of(batch.at_positions([4, 5, 5]), memory).position_ids.tolist() == [4, 5, 5]


@pytest.mark.parametrize("numbers", [[0.7], [[0]], 0, ["a"], [2**63], np.array([0.7]), np.array([[0]])])
def test_a_batch_takes_integers_in_one_dimension(numbers: Any) -> None:
    for arguments in ((numbers, [0], [1]), ([1], numbers, [1]), ([1], [0], numbers)):
        with pytest.raises(ValueError, match=r"give .*integers"):
            Batch.of(*arguments, 0)
    with pytest.raises(ValueError, match=r"give .*integers"):
        Batch.of([1], [0], [1], 1).at_positions(numbers)


def test_default_backends_and_an_unknown_name(device: torch.device) -> None:
    assert pick_backend(None, torch.device("cpu")).__name__ == "TorchAttention"
    assert pick_backend(None, torch.device("cuda")).__name__ == "TritonAttention"
    with pytest.raises(ValueError, match="'cuda'; there are torch, triton"):
        pick_backend("cuda", device)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_learned_sinks_join_a_step_with_sink_tokens_once(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    sink_logits = torch.tensor([1.0, -2.0], device=device)
    shape = LayerShape(2, 16, 1, AttentionOptions().plus(SinkLogits(sink_logits)))
    rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64, device=device))
    history = History(shape, torch.float32, device)
    (backend,) = make_backends(name, device, [shape], rotary)
    entries, dropped = 9, 5
    history.place([1], [entries])
    step = Step.of(Batch.of([1], [0], [entries], 1), history.memory)
    k, v = torch.randn(2, entries, 1, 16, device=device)
    backend.forward(torch.randn(entries, 2, 16, device=device), k, v, step)
    history.append([1], [entries], k, v)
    step = Step.of(
        over_rings(Batch.of([1], [entries], [1], 1), Ring(2, entries - 2, dropped)), history.memory
    )
    q, (k, v) = torch.randn(1, 2, 16, device=device), torch.randn(2, 1, 1, 16, device=device)
    out = backend.forward(q, k, v, step)
    history.append([1], [1], k, v)
    keys, values = (torch.cat((one[1][:2], one[1][2 + dropped :])) for one in (history.k, history.v))
    back = rotary.rotate_back(q, torch.tensor([dropped], device=device))
    of_sinks, of_rest = (torch.einsum("qhd,kgd->hk", one, keys).double() / 4 for one in (back, q))
    scores = torch.cat((of_sinks[:, :2], of_rest[:, 2:], sink_logits.double()[:, None]), 1)
    expected = scores.softmax(1)[:, :-1] @ values[:, 0].double()
    torch.testing.assert_close(out.view(2, 16).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 16, 3), "4 heads do not share 3"),
        ((4, 16, 0), "4 heads of 16 dims and 0 K/V heads"),
        ((4, 0, 2), "4 heads of 0 dims"),
        ((0, 16, 2), "must be positive; got 0 heads"),
    ],
)
def test_layer_shape_refuses(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerShape(*sizes)


def random_lengths() -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    yield np.array([1])
    yield np.full(7, 50)
    for size in (2, 9, 40):
        yield rng.integers(1, 4000, size)
        yield np.maximum(rng.lognormal(5, 2, size).astype(np.int64), 1)


@pytest.mark.parametrize(
    "lengths", list(random_lengths()), ids=lambda lengths: f"{len(lengths)}-{lengths.max()}"
)
def test_buckets_bound_the_padding(lengths: np.ndarray) -> None:
    buckets = torch_plan.bucket_lengths(lengths)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(len(lengths)))
    for members in buckets:
        total = lengths[members].sum()
        padding = len(members) * lengths[members].max() - total
        assert padding <= max(torch_plan.PADDING_FRACTION * total, torch_plan.PADDING_TOKENS)


@pytest.mark.gpu
def test_a_decode_graph_follows_its_static_step(memory: KVMemory) -> None:
    for row in (1, 2, 3):
        slots = 1 + torch.randperm(32, device=memory.device) + 32 * (row - 1)
        memory.table.req_to_token.view(-1).index_copy_(
            0, torch.arange(32, device=memory.device) + 32 * row, slots.int()
        )
    memory.pool.kv(0).normal_()
    (backend,) = make_backends("triton", memory.device, [LayerShape(4, 16, 1)])
    qkv = [torch.randn(4, heads * 16, device=memory.device) for heads in (4, 1, 1)]
    static = StaticStep(BatchShape.of_decodes(4), memory)
    step = static.load(Batch.empty())
    backend.forward(*qkv, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(*qkv, step)
    for rows, starts in (([1, 2, 3], [3, 20, 7]), ([2], [21]), ([3, 1, 2], [8, 4, 31])):
        step = static.load(Batch.of(rows, starts, [1] * len(rows), 0))
        graph.replay()
        got = out.clone()
        torch.testing.assert_close(got, backend.forward(*qkv, step))
        (reference,) = make_backends("torch", memory.device, [LayerShape(4, 16, 1)])
        expected = reference.forward(*qkv, step)
        torch.testing.assert_close(got[: len(rows)], expected[: len(rows)], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_step_never_synchronises(memory: KVMemory, name: str) -> None:
    (backend,) = make_backends(name, memory.device, [LayerShape(4, 16, 1)])
    static = StaticStep(BatchShape.of_decodes(4), memory)
    q, k, v = (torch.randn(6, heads * 16, device=memory.device) for heads in (4, 1, 1))

    def run() -> None:
        step = Step.of(Batch.of([1, 2, 3], [3, 0, 20], [3, 2, 1], 2), memory)
        backend.forward(q, k, v, step)
        static.load(Batch.of([3], [21], [1], 0))

    memory.pool.kv(0).zero_()
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_table_of_one_entry_and_a_step_without_tokens(name: str, device: torch.device) -> None:
    memory = KVMemory(KVSpec(1, 1, 16, 16, torch.float32), 3, 1, 1, device)
    memory.table.req_to_token[1, 0] = 2
    (layer,) = make_backends(name, device, [LayerShape(2, 16, 1)])
    q, k, v = (torch.randn(1, heads * 16, device=device) for heads in (2, 1, 1))
    for num_prefills in (1, 0):
        step = Step.of(Batch.of([1], [0], [1], num_prefills), memory)
        # A single token attends to itself alone.
        torch.testing.assert_close(layer.forward(q.clone(), k, v, step), v.repeat(1, 2))
    step = Step.of(Batch.empty(), memory)
    assert layer.forward(q[:0], k[:0], v[:0], step).shape == (0, 32)
