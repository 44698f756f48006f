"""Backends over rings, compared with float64; free slots hold NaN."""

import pytest
import torch

from lightkv import KVCache, KVSpec
from lightkv.attention import (
    AttentionOptions,
    Batch,
    LayerShape,
    Rotary,
    Step,
    make_backends,
)
from lightkv.attention.forms.gaps import with_gaps
from lightkv.attention.forms.rings import over_rings
from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.variants import Alibi, Chunk, Window
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from lightkv.triton_kernels.attention.variants.variant import Scored
from lightkv.triton_kernels.layout.ring import Ring

HEADS, KV_HEADS, DIM = 4, 2, 32
SPEC = KVSpec(1, KV_HEADS, DIM, DIM, torch.float32)


def make_cache(device: torch.device, rows: int = 6, entries: int = 40) -> KVCache:
    cache = KVCache(SPEC, 200, rows, entries, device)
    cache.memory.pool.kv(0)[1:] = torch.nan
    return cache


def tokens(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k and v of some tokens."""
    shapes = (count, HEADS * DIM), (count, KV_HEADS * DIM), (count, KV_HEADS * DIM)
    q, k, v = (torch.randn(shape, device=device) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("window", "ring", "alibi"),
    [
        (0, Ring(3, 14, 5), False),
        (12, Ring(0, 20, 6), False),
        pytest.param(12, Ring(0, 20, 6), True, marks=pytest.mark.slow),
        pytest.param(0, Ring(0, 17, 5), True, marks=pytest.mark.slow),
    ],
    ids=["sinks", "window", "window-alibi", "alibi"],
)
def test_rings_step_by_step(backend: str, window: int, ring: Ring, alibi: bool, device: torch.device) -> None:
    """Chunks, then single tokens of two rings at different positions, against all that was ever written."""
    torch.manual_seed(0)
    bias = Alibi(alibi_slopes(HEADS, device=device)) if alibi else None
    options = AttentionOptions().plus(Window(window) if window else None, bias)
    rotary = Rotary(10.0 ** -torch.arange(8, dtype=torch.float64, device=device))
    (layer,) = make_backends(
        backend, device, [LayerShape(HEADS, DIM, KV_HEADS, options)], rotary if ring.sinks else None
    )
    cache = make_cache(device)
    sequences = [cache.open_ring([1] * 60, ring) for _ in range(2)]
    keys: dict[int, list[torch.Tensor]] = {one.row: [] for one in sequences}
    values: dict[int, list[torch.Tensor]] = {one.row: [] for one in sequences}
    plan = [([0], 17), ([0], 3), ([1], 9), ([0], 1), ([0], 3), *[([0, 1], 1)] * 14, ([0, 1], 1), ([1], 2)]
    for chosen, count in plan:
        batch = [sequences[i] for i in chosen]
        starts = [one.position for one in batch]
        count = min([count, *(ring.room(start) for start in starts)])
        q, k, v = tokens(count * len(batch), device)
        cache.extend(batch, [count] * len(batch))
        num_prefills = len(batch) if count > 1 else 0
        made = Batch.of([one.row for one in batch], starts, [count] * len(batch), num_prefills)
        step = Step.of(over_rings(made, ring), cache.memory)
        out = layer.forward(q, k, v, step).view(-1, HEADS, DIM)
        for i, one in enumerate(batch):
            for token in range(i * count, (i + 1) * count):
                keys[one.row].append(k[token].view(KV_HEADS, DIM))
                values[one.row].append(v[token].view(KV_HEADS, DIM))
                position = len(keys[one.row]) - 1
                first = ring.first_key(position)
                if window:
                    first = max(position - window + 1, 0)
                sinks = [] if window else list(range(min(ring.sinks, position + 1)))
                seen = sinks + list(range(first, position + 1))
                held_k = torch.stack([keys[one.row][p] for p in seen]).double()
                dropped = torch.full((len(sinks),), -ring.dropped(position), device=device)
                held_k[: len(sinks)] = rotary.rotate_back(held_k[: len(sinks)], dropped)
                held_v = torch.stack([values[one.row][p] for p in seen])
                newest = Scored.of_last(slice(0, 1), 0, len(seen), device)
                near = AttentionOptions().plus(bias)
                expected = attend_reference(q[token].view(1, HEADS, DIM), held_k, held_v, near, newest)
                torch.testing.assert_close(out[token : token + 1].double(), expected, atol=2e-5, rtol=2e-5)
    cache.check()


def test_steps_over_rings_that_cannot_be(device: torch.device) -> None:
    cache = make_cache(device)
    ring = Ring(3, 14, 5)
    for match, arguments in [
        ("prefills or decodes only", ([1, 2], [40, 40], [2, 1], 1)),
        ("all have dropped tokens or none", ([1, 2], [40, 2], [2, 2], 2)),
        ("at most", ([1], [40], [9], 1)),
    ]:
        with pytest.raises(ValueError, match=match):
            over_rings(Batch.of(*arguments), ring)
    decode = Batch.of([1], [40], [1], 0)
    with pytest.raises(ValueError, match="gets positions instead of dropped"):
        over_rings(with_gaps(decode, [3]), ring)
    with pytest.raises(ValueError, match="tokens are dropped by sequences whose rows are their own"):
        with_gaps(over_rings(decode, ring), [3])
    step = Step.of(over_rings(decode, ring), cache.memory)
    (layer,) = make_backends("torch", device, [LayerShape(HEADS, DIM, KV_HEADS)])
    with pytest.raises(ValueError, match="3 sinks needs the rotary"):
        layer.forward(*tokens(1, device), step)
    for options in (AttentionOptions().plus(Chunk(8)), AttentionOptions().plus(Window(15))):
        (other,) = make_backends("torch", device, [LayerShape(HEADS, DIM, KV_HEADS, options)])
        with pytest.raises(ValueError, match="make the ring as large as the window, and have no chunks"):
            other.forward(*tokens(1, device), step)
    assert cache.memory.pool.kv(0)[1:].isnan().all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_prefill_over_rings_holds_the_window_of_the_layer(backend: str, device: torch.device) -> None:
    """Its entries begin with what is not dropped, which may be fewer than the ring has."""
    ring = Ring(0, 14, 5)
    cache = make_cache(device)
    for options in (
        AttentionOptions().plus(Window(11)),
        AttentionOptions().plus(Window(20)),
        AttentionOptions().plus(Chunk(8)),
    ):
        (layer,) = make_backends(backend, device, [LayerShape(HEADS, DIM, KV_HEADS, options)])
        step = Step.of(over_rings(Batch.of([1], [14], [5], 1), ring), cache.memory)
        with pytest.raises(ValueError, match="over 10 tokens of Ring"):
            layer.forward(*tokens(5, device), step)
        step = Step.of(over_rings(Batch.of([1], [0], [5], 1), ring), cache.memory)  # nothing is dropped yet
        layer.forward(*tokens(5, device), step)
    step = Step.of(over_rings(Batch.of([1], [14], [5], 1), ring), cache.memory)
    (layer,) = make_backends(
        backend, device, [LayerShape(HEADS, DIM, KV_HEADS, AttentionOptions().plus(Window(10)))]
    )
    layer.forward(*tokens(5, device), step)
