"""Compares attention over rows that are rings, and over rows with a beam table, with float64, in every
attention kernel and its reference.

Every position of a text has K and V of its own; of these, a ring holds what was written last. Slots are
shuffled, and all that no row holds are NaN, as are tensors that a call allocates for itself.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.decode.decode_attention import (
    decode_attention,
    decode_attention_reference,
)
from lightkv.triton_kernels.attention.decode.decode_plan import decode_plan
from lightkv.triton_kernels.attention.lookups import BeamTable, RingRows
from lightkv.triton_kernels.attention.lookups.ring_rows import (
    SinkRotation,
    ring_slots,
    ring_slots_reference,
    rotation_for,
    rotation_reference,
)
from lightkv.triton_kernels.attention.mixed_attention import mixed_attention, mixed_attention_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.variants import Chunk, SinkLogits, Softcap, Window
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.attention.caches import assert_close, poisoned_cache, starts
from tests.support.attention.feature_table import covers
from tests.support.attention.plans import decode_plan_reference
from tests.support.attention.ring_texts import RINGS, beams_of, check_stream, dense, rotation_of, written

LENGTHS = [400, 0, 1, 39, 95, 8000]  # tokens of a text


@pytest.fixture(autouse=True)
def _poison_allocations() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # then torch.empty fills tensors with NaN
    yield
    torch.use_deterministic_algorithms(False)


@covers("ring, its sinks and window", "decode")
@pytest.mark.parametrize(
    ("name", "num_splits"),
    [("sinks", 7), ("one-by-one", 1), *(pytest.param(name, 7, marks=pytest.mark.slow) for name in RINGS)],
    ids=str,
)
def test_a_decode_step_of_a_stream(
    name: str, num_splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_splits)
    check_stream(written(RINGS[name], LENGTHS, device))


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (AttentionOptions(scale=0.4).plus(Softcap(3.0)), {}),
        (DEFAULT_OPTIONS, {"key_dim": 80, "value_dim": 64}),
        (DEFAULT_OPTIONS, {"num_pairs": 0}),
        (DEFAULT_OPTIONS, {"num_pairs": 32, "group": 20}),
        (AttentionOptions().plus(SinkLogits(torch.linspace(1.0, 3.0, 4))), {"dtype": torch.float16}),
    ],
    ids=["soft-cap", "head dims", "no rotation", "group", "sinks"],
)
def test_options_and_shapes(options: AttentionOptions, shape: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(1)
    cache = {name: value for name, value in shape.items() if name not in ("num_pairs", "group")}
    texts = written(RINGS["sinks"], [300, 0, 2, 95], device, **cache)
    learned = options.of(SinkLogits)
    if learned is not None:
        options = options.without(SinkLogits).plus(SinkLogits(learned.logits.to(device)))
    check_stream(texts, options, **{name: value for name, value in shape.items() if name not in cache})


@pytest.mark.parametrize("num_workers", [1, 5, 30])
def test_the_plan_of_rings(num_workers: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_workers)
    ring = Ring(4, 300, 64)
    lengths = torch.tensor([0, 1, 4, 5, 304, 305, 10_000], dtype=torch.int32, device=device)
    rows = torch.arange(7, device=device)
    limits = RingRows(ring).limits(())
    heads = HeadShape(2, 2, 128, 128)
    plan = decode_plan(rows, lengths, heads, dtype=torch.float16, limits=limits)
    expected = decode_plan_reference(
        rows, lengths, num_workers=num_workers, unit=decode_tuning.DECODE_UNIT, limits=limits
    )
    assert plan.parts.tolist() == expected.parts.tolist()
    assert plan.items[: len(expected.items)].tolist() == expected.items.tolist()


SLOW_PAGES = pytest.param(4, marks=pytest.mark.slow)
WINDOWED = Ring(2, 120)  # holds the window of 50 of up to 71 queries of a step


@covers("ring, a layer with a window", "decode", "prefill", "mixed")
def test_a_layer_with_a_window_over_rings(device: torch.device) -> None:
    """Decode with one and three queries, prefill and both in one step, of rings that hold the window of each
    query; the ring's sinks are not seen."""
    torch.manual_seed(2)
    options = AttentionOptions().plus(Window(50))
    lengths = [400, 60, 3, 122, 1000]
    texts = written(WINDOWED, lengths, device)
    cases = [
        (decode_attention, decode_attention_reference, {"num_queries": 1}, [1] * 5, ()),
        (decode_attention, decode_attention_reference, {"num_queries": 3}, [3] * 5, ()),
        (prefill_attention, prefill_attention_reference, {}, [66, 1, 3, 7, 2], (0, 66, 67, 70, 77, 79)),
        (mixed_attention, mixed_attention_reference, {}, [5, 1, 1, 1, 1], (0, 5)),
    ]
    for kernel, reference, arguments, counts, q_starts in cases:
        q = torch.randn(sum(counts), 4, 64, device=device)
        bounds = [torch.tensor(q_starts, dtype=torch.int32, device=device)] if q_starts else []
        step = q, texts.kv, texts.rows, *bounds, texts.lengths, options
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
        kernel(*step, **arguments, out=out, lse=lse)  # type: ignore[operator]
        assert_close(reference(*step, **arguments), out)  # type: ignore[operator]
        token = 0
        for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            for position in range(length - count, length):
                seen = list(range(max(position - 49, 0), position + 1))
                query = q[token].double().cpu()
                keys, values = ([held[request][p] for p in seen] for held in (texts.keys, texts.values))
                expected, expected_lse = dense(query, keys, [query] * len(keys), values, options)
                torch.testing.assert_close(out[token].double().cpu(), expected, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(lse[token].double().cpu(), expected_lse, atol=2e-2, rtol=1e-3)
                token += 1


def test_what_rings_cannot_do_is_refused(device: torch.device) -> None:
    texts = written(RINGS["sinks"], [100], device)
    q, rest = torch.zeros(1, 4, 64, device=device), texts[1:3]
    rotation = rotation_of(RINGS["sinks"], [100], 24, device)

    def turned(rotation: SinkRotation) -> PagedKV:
        return texts.kv._replace(lookup=RingRows(RINGS["sinks"], rotation))

    for match, kv, arguments in [
        ("as large as the window", texts.kv, {"options": AttentionOptions().plus(Window(91))}),
        ("have no chunks", texts.kv, {"options": AttentionOptions().plus(Chunk(10))}),
        ("one query a request", texts.kv, {"num_queries": 2}),
        ("sees no ring's sinks", turned(rotation), {"options": AttentionOptions().plus(Window(9))}),
        ("sees no ring's sinks", texts.kv._replace(lookup=RingRows(Ring(0, 90), rotation)), {}),
        ("33 pairs; a key has 32", turned(rotation_of(RINGS["sinks"], [100], 33, device)), {}),
        (
            "the plan is for",
            texts.kv,
            {"plan": decode_plan(*rest, HeadShape.of(q, texts.kv), dtype=q.dtype)},
        ),
    ]:
        queries = arguments.get("num_queries", 1)
        with pytest.raises(ValueError, match=match):
            decode_attention(q.expand(queries, -1, -1), kv, *rest, **arguments)  # type: ignore[arg-type]
    for wrong in ((-1, 4, 1), (1, 4, 5), (1, 4, 0)):
        with pytest.raises(ValueError, match="the stride from 1 to the window's size"):
            Ring(*wrong)
    with pytest.raises(ValueError, match="add a Window"):
        prefill_attention(q, texts.kv, rest[0], starts([1], device), rest[1])


@covers("positions read from other rows", "decode", "prefill", "mixed")
@pytest.mark.parametrize("shift", [0, SLOW_PAGES], ids="shift{}".format)
@pytest.mark.parametrize("window", [0, pytest.param(30, marks=pytest.mark.slow)], ids="window{}".format)
def test_beams_read_the_slots_of_other_beams(shift: int, window: int, device: torch.device) -> None:
    """Decode with one and two queries, prefill and both in one step are those of rows copied together."""
    torch.manual_seed(3)
    length = 90
    options = AttentionOptions().plus(Window(window) if window else None)
    cache = poisoned_cache([length] * 4, device=device, shift=shift)
    table = beams_of(cache.kv, cache.rows, length)
    kv = cache.kv._replace(lookup=BeamTable(table, shift))
    own = torch.zeros(len(kv.index), length, dtype=torch.int32, device=device)
    for row in cache.rows.tolist():
        for position in range(length):
            other = int(table[row, position])
            own[row, position] = slots_reference(cache.kv, other, torch.tensor([position], device=device))
    copied = PagedKV(kv.k, kv.v, own)
    cases = [
        (decode_attention, decode_attention_reference, {}, 4, ()),
        (decode_attention, decode_attention_reference, {"num_queries": 2}, 8, ()),
        (prefill_attention, prefill_attention_reference, {}, 74, (0, 3, 4, 4, 74)),
        (mixed_attention, mixed_attention_reference, {}, 43, (0, 40, 41)),
    ]
    for kernel, reference, arguments, num_tokens, q_starts in cases:
        q = torch.randn(num_tokens, 4, 64, device=device)
        bounds = [torch.tensor(q_starts, dtype=torch.int32, device=device)] if q_starts else []
        rest = cache.rows, *bounds, cache.lengths, options
        expected = reference(q, copied, *rest, **arguments)  # type: ignore[operator]
        assert not expected.isnan().any()
        assert_close(reference(q, kv, *rest, **arguments), expected)  # type: ignore[operator]
        assert_close(kernel(q, kv, *rest, **arguments), expected)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"indirection must be int32 \[rows, positions\]"):
        decode_attention(q[:4], kv._replace(lookup=BeamTable(own.long())), cache.rows, cache.lengths)


@pytest.mark.parametrize("name", RINGS)
def test_slots_and_angles_of_a_step(name: str, device: torch.device) -> None:
    torch.manual_seed(5)
    ring = RINGS[name]
    index = torch.randint(1, 10**6, (5, ring.capacity + 3), dtype=torch.int32, device=device)
    positions = torch.tensor([0, 3, ring.capacity - 1, ring.capacity, 123_456_789], device=device)
    rows = torch.tensor([4, 1, 0, 3, 2], device=device)
    slots = torch.zeros(5, dtype=torch.int64, device=device)
    ring_slots(index, rows, positions, ring, slots)
    kv = PagedKV(index.view(5, -1, 1), index.view(5, -1, 1), index, RingRows(ring))
    expected = [int(slots_reference(kv, int(row), at[None])) for row, at in zip(rows, positions, strict=True)]
    assert slots.tolist() == expected
    ring_slots_reference(index, rows, positions, ring, slots.zero_())
    assert slots.tolist() == expected
    inverse = 10.0 ** -torch.arange(24, dtype=torch.float64, device=device)
    lengths = torch.tensor([0, 1, ring.capacity, ring.capacity + 1, 100_000_007], device=device).int()
    found = rotation_for(lengths, ring, inverse)
    for request, length in enumerate(lengths.tolist()):
        angles = ring.dropped(length - 1) * inverse
        for angle, function in zip(found, (torch.cos, torch.sin), strict=True):
            torch.testing.assert_close(angle[request], function(angles).float(), atol=1e-6, rtol=0)
    for angle, other in zip(found, rotation_reference(lengths, ring, inverse), strict=True):
        torch.testing.assert_close(angle, other, atol=1e-6, rtol=0)
