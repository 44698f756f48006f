"""Streams, trees of guesses and beams over quantised pools, against the same over pools that hold in float32
what quantising and dequantising makes of K and V."""

from typing import Any

import pytest
import torch

from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.guess_tree import GuessTree
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.integrations.streaming import Ring, Stream
from lightkv.memory.kv_pool import KVPool
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import apply_hadamard, dequantise, quantise
from tests.support.tiny_models import VOCABULARY, tiny_llama

CPU = torch.device("cpu")
SKIPPED = (1,)
IDS = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1)).tolist()
# On "triton", prefill and decode are the kernels' in the interpreter.
CASES = [
    *((name, "torch") for name in ("int8", "int4")),
    *(pytest.param(name, "triton", marks=pytest.mark.slow) for name in ("int8", "int4")),
]
both = pytest.mark.parametrize(("name", "backend"), CASES)


def round_written(pool: KVPool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a plain pool, and the attention of the step itself, see what a quantised one would hold."""
    write, chosen = pool.write, KVFormat.parse(name, SKIPPED)

    def rounded(layer_idx: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        of_layer = chosen.of_layer(layer_idx)
        elements = of_layer.elements
        for x in (k, v):
            if elements.is_quantised:
                restored = dequantise(*quantise(x, elements, of_layer.scale_dtype), elements)
                x.copy_(apply_hadamard(restored) if elements.has_hadamard else restored)
        write(layer_idx, slots, k, v)

    monkeypatch.setattr(pool, "write", rounded)


def pair(
    name: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    capacity: int = 120,
    device: torch.device = CPU,
    **options: Any,
) -> tuple[CachedModel, CachedModel]:
    """Returns a model over a quantised pool, and one that is to compute the same."""
    format_of = KVFormat.parse(name, SKIPPED)
    ours = CachedModel(tiny_llama(device), capacity, backend=backend, kv_format=format_of, **options)
    other = CachedModel(tiny_llama(device), capacity, backend="torch", **options)
    round_written(other.cache.memory.pool, name, monkeypatch)
    return ours, other


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "sinks", "backend"),
    [
        ("int8", 3, "torch"),
        ("int4", 0, "torch"),
        pytest.param("int8", 3, "triton", marks=pytest.mark.slow),
        pytest.param("int4", 0, "triton", marks=pytest.mark.slow),
    ],
)
def test_streams(
    name: str, sinks: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = Ring(sinks=sinks, size=12, stride=4)
    logits = []
    for lm in pair(name, backend, monkeypatch, window.capacity, device, exact_positions=True):
        flow = Stream(lm, window, IDS[:1])
        steps = []
        for part in (IDS[:1], IDS[1:2], IDS[2:18], *([token] for token in IDS[18:23])):
            steps += flow.feed(part, all_logits=True)
        assert lm.cache.num_held == window.capacity
        flow.close()
        lm.cache.check()
        logits.append(torch.cat(steps))
    assert_close(*logits)


@pytest.mark.parametrize("name", ["int4", "int8-hadamard"])
def test_a_stream_with_sinks_over_hadamard_keys_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _other = pair(name, "torch", monkeypatch, exact_positions=True)
    flow = Stream(ours, Ring(sinks=3, size=12, stride=4), IDS[:1])
    with pytest.raises(ValueError, match=r"with sinks over .*int[48].*store K/V as int8 or int8-gN"):
        list(flow.feed(IDS[:1]))
    flow.close()
    ours.cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "sinks"), [("int8", 3), ("int4", 0), ("int8-hadamard", 0)])
@pytest.mark.parametrize("size", [12, 150])
def test_streams_on_a_gpu(name: str, sinks: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams, one after the other and then in one batch, whose single tokens are replays of graphs."""
    window = Ring(sinks=sinks, size=size, stride=4)
    ids = torch.randint(0, VOCABULARY, (250,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = []
    for lm in pair(
        name, "triton", monkeypatch, 2 * window.capacity, torch.device("cuda"), exact_positions=True
    ):
        first, second = flows = [Stream(lm, window, ids[:1]) for _ in range(2)]
        steps = []
        for flow, count in ((first, 190), (second, 170)):
            for part in (ids[:1], ids[1:2], ids[2:count], *([token] for token in ids[count : count + 9])):
                steps += flow.feed(part, all_logits=True)
        sequences = [flow.sequence for flow in flows]
        for step in range(12):
            steps.append(lm.decode(sequences, [ids[200 + step], ids[180 + step]]))
        assert lm.cache.num_held == 2 * window.capacity
        for flow in flows:
            flow.close()
        lm.cache.check()
        logits.append(torch.cat(steps))
    found, expected = logits
    # Queries are rounded to float16 before they meet quantised keys.
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=1e-2)
    assert (found - expected).abs().mean() < 3e-3


@both
def test_sequences_that_drop_their_first_tokens(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = []
    for lm in pair(name, backend, monkeypatch):
        sequence = lm.cache.open(IDS[:1])
        lm.forward([sequence], [IDS[:40]])
        lm.cache.release(sequence, 8)
        logits.append(lm.forward([sequence], [IDS[40:45]], all_logits=True))
    assert_close(*logits)


@both
def test_trees_of_guesses(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, path = GuessTree.of_lines(7, [[1, 2, 3], [1, 2, 4, 6], [5, 1]]), [0, 1, 2, 4, 5]
    logits = []
    for lm in pair(name, backend, monkeypatch):
        sequence, _ = lm.prefill(IDS[:30])
        start = sequence.length
        found = lm.forward([sequence], [tree.tokens], all_logits=True, tree=tree)
        lm.take(sequence, start, path)
        logits.append(torch.cat((found, lm.forward([sequence], [[8]]))))
        straight, _ = lm.prefill(IDS[:30])  # its first tokens are those of the other
        lm.forward([straight], [[7, 1, 2, 4, 6]])
        for layer_idx in (0, 1):  # what was taken is what would have been computed
            ours, expected = (
                torch.cat(lm.cache.memory.pool.read(layer_idx, lm.cache.slots(one).long()[:35]), -1)
                for one in (sequence, straight)
            )
            assert (ours - expected).abs().mean() < 1e-3
        lm.cache.check()
    assert_close(*logits)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_beams_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = tiny_llama(CPU), []
    for format_of in (KVFormat.parse(name, SKIPPED), KVFormat()):
        cache = LightKVCache(model, 200, kv_format=format_of)
        if not format_of.is_quantised:
            round_written(cache.kv.memory.pool, name, monkeypatch)
        texts.append(
            model.generate(  # type: ignore[operator]
                torch.tensor([IDS[:20], IDS[20:40]]),
                past_key_values=cache,
                num_beams=3,
                num_return_sequences=2,
                max_new_tokens=8,
                min_new_tokens=8,
                do_sample=False,
            )
        )
    assert torch.equal(*texts)
