"""Streams, compared with attention over the whole text: tokens, positions, and constant memory.

The reference keeps all K and V, undoes the rotation in complex numbers, and attends in float64 to the tokens
that each position should see.
"""

import doctest
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama import modeling_llama

from bench.features.streaming import token_losses
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
)
from lightkv.attention.forms.gaps import with_gaps
from lightkv.attention.forms.rings import RingPrompts, over_rings
from lightkv.errors import UnsupportedModel
from lightkv.integrations import streaming
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.model.attention_call import AttentionCall, compute
from lightkv.integrations.model.fused_rotary import fused_forwards, set_fused_forwards
from lightkv.integrations.streaming import Ring, Stream, stream
from lightkv.memory.capture import Capture
from lightkv.memory.kv_memory import KVMemory
from lightkv.router import EngineConfig
from lightkv.router.model.loader import load_model
from lightkv.router.model_files import resolve
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.triton_kernels.attention import attention_reference
from lightkv.triton_kernels.attention.variants import Softcap
from lightkv.triton_kernels.attention.variants.window import Window as AttentionWindow
from tests.support.combinations import each_value
from tests.support.tiny_models import VOCABULARY, tiny_llama

CONTEXT = 64
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
}
WINDOWS = {
    "sinks": Ring(sinks=4, size=20, stride=8),
    "one-by-one": Ring(sinks=3, size=13, stride=1),
    "all-at-once": Ring(sinks=1, size=16, stride=16),
    "no-sinks": Ring(sinks=0, size=20, stride=7),
}


def make_model(device: torch.device) -> PreTrainedModel:
    return tiny_llama(device, context=CONTEXT, std=0.25)


def streamer(
    model: PreTrainedModel,
    capacity: int,
    max_sequences: int = 1,
    max_entries: int | None = None,
    backend: str | None = None,
) -> CachedModel:
    return CachedModel(model, capacity, max_sequences, max_entries, backend, exact_positions=True)


@dataclass
class Dense:
    """The reference, an AttentionHandler: each token attends to what `window` leaves it, in float64."""

    window: Ring
    inverse: torch.Tensor

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert call.rotary is None
        q, k, v = call.q, call.k, call.v
        length, half = q.shape[2], q.shape[3] // 2
        position = torch.arange(length, device=q.device)
        window = self.window
        dropped = torch.tensor([window.dropped(t) for t in range(length)], device=q.device)
        group = q.shape[1] // k.shape[1]
        q, k, v = (x[0].double() for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        rotation = torch.polar(
            torch.ones(length, half, dtype=torch.float64), -dropped[:, None] * self.inverse
        )
        earlier = torch.complex(q[..., :half], q[..., half:]) * rotation
        earlier = torch.cat((earlier.real, earlier.imag), -1)
        is_sink = position < window.sinks
        scores = torch.where(is_sink, earlier @ k.mT, q @ k.mT) * q.shape[-1] ** -0.5
        gone = ~is_sink & (position < window.sinks + dropped[:, None])
        scores.masked_fill_(gone | (position > position[:, None]), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1)[None].to(torch.float32)


def dense_logits(
    model: PreTrainedModel, ids: torch.Tensor, window: Ring, inverse: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits `[len(ids), vocabulary]` of a bound model, whose own modules apply the positions."""
    if inverse is None:
        inverse = 1e4 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    forwards = fused_forwards(model)
    set_fused_forwards(model, {})
    with torch.no_grad():
        logits = compute(model, ids, torch.arange(len(ids)), Dense(window, inverse), None)
    set_fused_forwards(model, forwards)
    return logits


def fed(lm: CachedModel, ids: torch.Tensor, window: Ring, counts: list[int]) -> torch.Tensor:
    """Feeds `ids` to a stream, `counts` at a time, checks the memory, and returns the logits."""
    flow = Stream(lm, window, ids[:1].tolist())
    outputs = []
    for part in ids.split(counts):
        for logits in flow.feed(part.tolist(), all_logits=True):
            outputs.append(logits)
            assert lm.cache.num_held == flow.sequence.length == min(flow.position, window.capacity)
    lm.cache.check()
    flow.close()
    assert lm.cache.num_free == lm.cache.capacity
    return torch.cat(outputs)


FEEDINGS = ["token-by-token", "at-once", "in-chunks"]
QUICK = [("sinks", "token-by-token"), ("one-by-one", "in-chunks"), ("no-sinks", "at-once")]


@pytest.mark.parametrize(
    ("name", "feeding"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(WINDOWS, FEEDINGS)
    ],
    ids=str,
)
def test_logits_equal_those_of_the_reference(name: str, feeding: str) -> None:
    window, length = WINDOWS[name], 130  # more than twice the model's context
    lm = streamer(make_model(torch.device("cpu")), capacity=window.capacity)
    ids = torch.randint(0, VOCABULARY, (length,))
    rng = random.Random(1)
    counts = {"token-by-token": [1] * length, "at-once": [length], "in-chunks": []}[feeding]
    while sum(counts) < length:
        counts.append(min(rng.randint(1, 30), length - sum(counts)))
    logits = fed(lm, ids, window, counts)
    torch.testing.assert_close(logits, dense_logits(lm.model, ids, window), rtol=1e-4, atol=1e-4)


def test_sinks_are_attended_from_positions_within_the_cache() -> None:
    """The reference would notice if sinks were attended at their true distance: the logits differ."""
    lm = streamer(make_model(torch.device("cpu")), capacity=24)
    ids = torch.randint(0, VOCABULARY, (80,))
    right = fed(lm, ids, WINDOWS["sinks"], [80])
    far = dense_logits(lm.model, ids, WINDOWS["sinks"])
    zeros = torch.zeros(8, dtype=torch.float64)
    not_rotated = dense_logits(lm.model, ids, WINDOWS["sinks"], zeros)
    assert (right - far).abs().max() < 1e-3
    assert (right - not_rotated)[30:].abs().max() > 0.1


def test_a_window_over_everything_is_the_plain_model(device: torch.device) -> None:
    model = make_model(device)
    ids = torch.randint(0, VOCABULARY, (60,), device=device)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
        generated = model.generate(
            ids[None, :20],
            attention_mask=torch.ones_like(ids[None, :20]),  # a token of the text may have the id of padding
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    lm = streamer(model, capacity=64, backend="torch")
    window = Ring(sinks=4, size=60, stride=10)
    torch.testing.assert_close(fed(lm, ids, window, [7, 40, 13]), expected, rtol=1e-4, atol=1e-4)
    assert list(stream(lm, ids[:20].tolist(), window, 30)) == generated[0, 20:].tolist()
    losses = torch.nn.functional.cross_entropy(expected[:-1], ids[1:])
    assert token_losses(lm, ids.tolist(), window).mean().item() == pytest.approx(losses.item(), rel=1e-4)


@pytest.mark.parametrize("count", [60, pytest.param(350, marks=pytest.mark.slow)])
def test_generation_far_past_the_context_in_constant_memory(count: int) -> None:
    window = Ring(sinks=4, size=28, stride=7)
    lm = streamer(make_model(torch.device("cpu")), capacity=window.capacity)
    held = []
    prompt = list(range(5, 90))
    generated = []
    for token in stream(lm, prompt, window, count):
        held.append(lm.cache.num_held)
        generated.append(token)
    assert set(held) == {window.capacity}
    ids = torch.tensor(prompt + generated)
    again = dense_logits(lm.model, ids, window)[len(prompt) - 1 : -1]
    best = again.max(1).values
    assert (
        best - again.gather(1, ids[len(prompt) :, None])[:, 0]
    ).max() < 1e-3  # each was a token of the highest logit
    assert lm.cache.num_free == lm.cache.capacity


def test_streams_share_published_sinks_and_steps() -> None:
    window = Ring(sinks=4, size=12, stride=3)
    lm = streamer(make_model(torch.device("cpu")), capacity=60, max_sequences=3, max_entries=20)
    ids = torch.randint(0, VOCABULARY, (60,)).tolist()
    first = Stream(lm, window, ids)
    *_, _ = first.feed(ids[:10])
    lm.cache.publish(first.sequence)
    lm.cache.confirm()
    second = Stream(lm, window, ids)
    assert second.position == 4
    *_, _ = second.feed(ids[4:30])
    *_, _ = first.feed(ids[10:40])
    assert lm.cache.num_held == 4 + 12 + 12
    logits = lm.decode([first.sequence, second.sequence], [ids[40], ids[30]])  # at different positions
    expected = dense_logits(lm.model, torch.tensor(ids[:41]), window)
    torch.testing.assert_close(logits, expected[[40, 30]], rtol=1e-4, atol=1e-4)
    plain, _ = lm.prefill(ids[:5])
    with pytest.raises(ValueError, match="run each kind in a step of its own"):
        lm.decode([first.sequence, plain], [1, 1])
    with pytest.raises(ValueError, match="which takes"):
        lm.forward([first.sequence], [ids[:13]])
    lm.cache.check()


def test_on_triton(device: torch.device) -> None:
    window = Ring(sinks=1, size=4, stride=2)
    model = make_model(device)
    ids = torch.randint(0, VOCABULARY, (8,), device=device)
    reference = fed(streamer(model, window.capacity, backend="torch"), ids, window, [8])
    logits = fed(streamer(model, window.capacity, backend="triton"), ids, window, [5, 1, 2])
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_backends_agree_in_16_bits(dtype: torch.dtype) -> None:
    window = Ring(sinks=4, size=300, stride=64)
    model = (
        LlamaForCausalLM(LlamaConfig(**{**CONFIG, "max_position_embeddings": 512})).to("cuda", dtype).eval()
    )
    ids = torch.randint(0, VOCABULARY, (1000,), device="cuda")
    logits = [
        fed(streamer(model, window.capacity, backend=name), ids, window, [1000])
        for name in ("torch", "triton")
    ]
    torch.testing.assert_close(logits[0], logits[1], rtol=3e-2, atol=3e-2)


class Replays:
    """Stands in for a CUDA graph, and for what captures it: a replay computes the step again and writes to the
    same logits."""

    def rehearsal(self) -> nullcontext[None]:
        return nullcontext()

    def graph(self, compute: Callable[[], torch.Tensor]) -> tuple["Replays", torch.Tensor]:
        self._compute = compute
        self._logits = compute().clone()  # of padding alone
        self.count = 1
        return self, self._logits

    def replay(self) -> None:
        self._logits.copy_(self._compute())
        self.count += 1


@pytest.mark.slow
def test_steps_of_streams_move_on_by_themselves(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph would capture is run step by step: lengths, positions and slots are those on the device."""

    monkeypatch.setattr(Capture, "new", Replays)
    monkeypatch.setattr(CachedModel, "_captures_rings", True)
    window = Ring(sinks=2, size=6, stride=3)
    model = make_model(device)
    ids = torch.randint(0, VOCABULARY, (13,), device=device)
    expected = fed(streamer(model, window.capacity, backend="torch"), ids, window, [3, 10])
    lm = streamer(model, 2 * window.capacity, max_sequences=2, max_entries=8, backend="triton")
    uploads: list[int] = []
    load = StaticStep.load

    def counted(static: StaticStep, batch: Batch) -> Step:
        uploads.append(1)
        return load(static, batch)

    first, second = (Stream(lm, window, ids[:1].tolist()) for _ in range(2))
    torch.testing.assert_close(next(first.feed(ids[:7].tolist())), expected[6:7], rtol=1e-4, atol=1e-4)
    *_, _ = second.feed(ids[:9].tolist())
    for step in range(2):  # a token each, of both, at different positions
        logits = lm.decode([first.sequence, second.sequence], [int(ids[7 + step]), int(ids[9 + step])])
        torch.testing.assert_close(logits, expected[[7 + step, 9 + step]], rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(StaticStep, "load", counted)
    (graph,) = (graph for key, graph in lm._ring_graphs.items() if key == (window, 2))
    logits = lm.decode([first.sequence, second.sequence], [int(ids[9]), int(ids[11])])
    torch.testing.assert_close(logits, expected[[9, 11]], rtol=1e-4, atol=1e-4)
    assert not uploads  # the step follows the one before
    assert graph._graph.count == 1 + 3  # type: ignore[attr-defined]
    logits = lm.decode([second.sequence, first.sequence], [int(ids[12]), int(ids[10])])
    torch.testing.assert_close(logits, expected[[12, 10]], rtol=1e-4, atol=1e-4)
    assert len(uploads) == 1
    lm.cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sinks", "one-by-one", "no-sinks"])
def test_steps_of_a_stream_are_replays_of_one_graph(name: str) -> None:
    """Two streams, one after the other and in one batch, on CUDA graphs, against the float64 reference."""
    window = WINDOWS[name]
    model = make_model(torch.device("cuda"))
    lm = streamer(model, 3 * window.capacity, max_sequences=3, max_entries=window.capacity, backend="triton")
    ids = torch.randint(0, VOCABULARY, (130,), device="cuda")
    eager = fed(streamer(model, window.capacity, backend="torch"), ids, window, [130])
    assert not lm._ring_graphs
    logits = fed(lm, ids, window, [1] * 70 + [9, 1, 1, 8] + [1] * 41)
    torch.testing.assert_close(logits, eager, rtol=1e-4, atol=1e-4)
    assert list(lm._ring_graphs) == [(window, 1)]
    flows = [Stream(lm, window, [1]) for _ in range(2)]
    for flow, count in zip(flows, (90, 55), strict=True):
        *_, _ = flow.feed(ids[:count].tolist())
    sequences = [flow.sequence for flow in flows]
    for step in range(30):
        logits = lm.decode(sequences, [int(ids[90 + step]), int(ids[55 + step])])
        expected = torch.stack((eager[90 + step], eager[55 + step]))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (window, 2) in lm._ring_graphs
    lm.cache.check()


def test_a_failed_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Ring(sinks=4, size=20, stride=8)
    lm = streamer(make_model(torch.device("cpu")), capacity=window.capacity)
    ids = torch.randint(0, VOCABULARY, (60,))
    flow = Stream(lm, window, ids[:1].tolist())
    *_, _ = flow.feed(ids[:40].tolist())

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lm.backends[1], "_write", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(flow.feed(ids[40:41].tolist()))
    assert flow.position == 40
    assert lm.cache.num_held == flow.sequence.length == 24
    lm.cache.check()
    monkeypatch.undo()
    (logits,) = flow.feed(ids[40:41].tolist())
    torch.testing.assert_close(logits, dense_logits(lm.model, ids[:41], window)[40:], rtol=1e-4, atol=1e-4)


def test_wrong_windows_and_models_are_refused() -> None:
    for arguments in (
        {"sinks": 4, "size": 4, "stride": 5},
        {"sinks": 4, "size": 4, "stride": 0},
        {"size": 4, "stride": 1, "sinks": -1},
    ):
        with pytest.raises(ValueError, match="the stride from 1 to the window's size"):
            Ring(**arguments)
    lm = streamer(make_model(torch.device("cpu")), capacity=100)
    with pytest.raises(ValueError, match="the model's context is 64"):
        Stream(lm, Ring(sinks=4, size=61, stride=8), [1])
    plain = CachedModel(make_model(torch.device("cpu")), capacity=40)
    with pytest.raises(ValueError, match="exact_positions=True"):
        Stream(plain, WINDOWS["sinks"], [1])
    windowed = MistralForCausalLM(MistralConfig(**{**CONFIG, "sliding_window": 16}))
    with pytest.raises(UnsupportedModel, match="windows or chunks of their own"):
        streamer(windowed, capacity=10)
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(UnsupportedModel, match="0 rotary embeddings"):
        streamer(learned, capacity=10)


def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """GPT-J's layout: neighbouring dimensions are a pair."""
    half = cos.shape[-1] // 2
    rotation = torch.complex(cos[..., :half], sin[..., :half])[:, None]
    pairs = [torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k)]
    return tuple(torch.view_as_real(pair * rotation).flatten(-2) for pair in pairs)


def test_a_rotation_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
        with pytest.raises(UnsupportedModel, match="layers \\[0, 1\\] do not rotate q and k"):
            streamer(model, capacity=10)
    assert not model.model.rotary_emb._forward_hooks
    streamer(model, capacity=10)
    streamer(model, capacity=10)
    assert len(model.model.rotary_emb._forward_hooks) == 1


def test_batches_and_backends_refuse_inconsistent_sinks(device: torch.device) -> None:
    shape = LayerShape(2, 16, 1)
    memory = KVMemory(KVSpec(1, 1, 16, 16, torch.float32), 40, 2, 20, device)
    for match, dropped in [("one number a sequence", [1]), ("0 or more", [1, -1])]:
        with pytest.raises(ValueError, match=match):
            with_gaps(Batch.of([1, 2], [4, 4], [1, 1], 2), dropped)
    static = StaticStep(BatchShape.of_decodes(2), memory)
    with pytest.raises(ValueError, match="a CUDA graph takes entries for positions"):
        static.load(with_gaps(Batch.of([1], [4], [1], 0), [2]))
    step = Step.of(over_rings(Batch.of([1, 2], [7, 9], [2, 1], 2), Ring(2, 5, 3)), memory)
    assert step.position_ids.tolist() == [7, 8, 9]
    assert isinstance(step.form, RingPrompts)
    assert step.form.dropped == (3, 3)
    q, k = torch.zeros(3, 32, device=device), torch.zeros(3, 16, device=device)
    rotary = Rotary(torch.ones(8, dtype=torch.float64, device=device))
    (plain,) = make_backends("torch", device, [shape])
    (windowed,) = make_backends(
        "torch", device, [LayerShape(2, 16, 1, AttentionOptions().plus(AttentionWindow(3)))], rotary
    )
    for backend in (plain, windowed):
        with pytest.raises(ValueError, match="a step with 2 sinks needs"):
            backend.forward(q, k, k, step)


@each_value(name=["torch", "torch-tiles", "triton"], softcap=[3.0, 0.0])
def test_sequences_with_different_gaps_in_one_step(
    name: str, softcap: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares backends with the definition in float64: slots shuffled, free ones NaN, V narrower than K."""
    torch.manual_seed(0)
    monkeypatch.setattr(attention_reference, "QUERY_TILE", 3 if name == "torch-tiles" else 512)
    heads, kv_heads, dim, v_dim, ring = 6, 2, 24, 16, Ring(3, 18, 12)
    shape = LayerShape(
        heads, dim, kv_heads, AttentionOptions(scale=0.5).plus(Softcap(softcap) if softcap else None), v_dim
    )
    memory = KVMemory(KVSpec(1, kv_heads, dim, v_dim, torch.float32), 60, 3, 30, device)
    memory.pool.kv(0)[1:] = torch.nan
    rotary = Rotary(
        10.0 ** -torch.arange(8, dtype=torch.float64, device=device)
    )  # 8 dimensions are not rotated
    rows, starts, counts = [3, 1], [60, 28], [5, 1]
    slots = (1 + torch.randperm(59)).to(device, torch.int32).split([21, 38])
    k, v = torch.randn(60, kv_heads, dim, device=device), torch.randn(60, kv_heads, v_dim, device=device)
    q = torch.randn(6, heads, dim, device=device)
    new_k, new_v, expected = [], [], []
    for row, position, count, own, queries in zip(rows, starts, counts, slots, q.split(counts), strict=True):
        gap = ring.dropped(position)
        memory.table.slots(row, 0, ring.capacity).copy_(own[: ring.capacity])
        held = torch.tensor([0, 1, 2, *range(3 + gap, position + count)], device=device)
        own, start = own[ring.entries(held)], len(held) - count
        old = own[:start].long()
        memory.pool.k(0)[old], memory.pool.v(0)[old] = k[old], v[old]
        new = own[start:].long()
        new_k.append(k[new])
        new_v.append(v[new])
        by = torch.full((count,), gap, device=device)
        rotated = rotary.rotate_back(queries.double(), by)
        keys = k[own.long()].double().repeat_interleave(3, 1)
        values = v[own.long()].double().repeat_interleave(3, 1)
        entry = torch.arange(start + count, device=device)
        scores = [torch.einsum("qhd,khd->hqk", one, keys) * 0.5 for one in (rotated, queries.double())]
        score = torch.where(entry < ring.sinks, *scores)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        score.masked_fill_(entry > entry[start:, None], float("-inf"))
        expected.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), values))
    step = Step.of(over_rings(Batch.of(rows, starts, counts, 2), ring), memory)
    (backend,) = make_backends(name.split("-")[0], device, [shape], rotary)
    out = backend.forward(q, torch.cat(new_k), torch.cat(new_v), step)
    torch.testing.assert_close(out.double(), torch.cat(expected).flatten(1), rtol=2e-5, atol=2e-5)


def test_angles_far_out_keep_their_digits() -> None:
    rotary = Rotary(torch.tensor([1.0, 0.1234567], dtype=torch.float64))
    far = 10_000_000
    x = torch.randn(1, 1, 4)
    rotated = rotary.rotate_back(x, torch.tensor([far]))
    pair = torch.complex(x[0, 0, :2].double(), x[0, 0, 2:].double())
    expected = pair * torch.polar(torch.ones(2, dtype=torch.float64), -far * rotary.inverse)
    torch.testing.assert_close(
        rotated[0, 0].double(), torch.cat((expected.real, expected.imag)), rtol=1e-6, atol=1e-6
    )


def test_the_docstring_runs() -> None:
    failed, attempted = doctest.testmod(streaming)
    assert attempted > 5
    assert not failed


@pytest.mark.slow
def test_sinks_keep_a_real_model_fluent_past_its_window() -> None:
    """SmolLM2 on Python's documentation: without the first tokens its loss is much higher."""
    directory = resolve(EngineConfig.model, print)
    lm = streamer(load_model(directory, torch.device("cpu"), torch.float32, print), capacity=100)
    ids = Tokenizer(directory).encode(topics["typesseq"])[:400].tolist()
    with_sinks = token_losses(lm, ids, Ring(sinks=4, size=96, stride=32))[150:].mean()
    without = token_losses(lm, ids, Ring(sinks=0, size=100, stride=32))[150:].mean()
    assert with_sinks + 1.0 < without
