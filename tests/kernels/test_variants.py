"""Compares each variant of attention, and all pairs of them that a layer may have, with the variants'
references in every attention kernel, and checks that a variant that only this file knows works everywhere.

The caches are those of `test_decode_attention`: shuffled slots, NaN in all free slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv import KVSpec
from lightkv.attention import Batch as StepBatch
from lightkv.attention import LayerShape, Step, make_backends
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention import variants as known
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.decode.decode_attention import (
    decode_attention,
    decode_attention_reference,
)
from lightkv.triton_kernels.attention.decode.decode_plan import decode_plan
from lightkv.triton_kernels.attention.mixed_attention import mixed_attention, mixed_attention_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.attention.variants import (
    VARIANTS,
    Alibi,
    Chunk,
    SinkLogits,
    Softcap,
    TreeMask,
    ValueMask,
    Variant,
    Window,
    in_order,
)
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from lightkv.triton_kernels.attention.variants.hooks import Hooks
from lightkv.triton_kernels.attention.variants.variant import Scored, limits
from lightkv.triton_kernels.operators import Operator
from tests.support.attention.caches import Cache, assert_close, poisoned_cache, starts
from tests.support.attention.score_features import Batch, tree_bits


def _values(batch: Batch) -> ValueMask:
    """Returns values of each head, some of them -inf, whose columns begin where the request says."""
    values = torch.randn(batch.num_heads, sum(batch.q_lens) + batch.surplus, max(batch.lengths) - 1)
    values.masked_fill_(torch.rand(values.shape) < 0.3, -torch.inf)
    columns = torch.arange(len(batch.lengths), dtype=torch.int32)
    return ValueMask(values.to(batch.device), columns.to(batch.device))


MAKERS: dict[type[Variant], Callable[[Batch], Variant]] = {
    Softcap: lambda _: Softcap(2.0),
    Alibi: lambda batch: Alibi(alibi_slopes(batch.num_heads, device=batch.device)),
    ValueMask: _values,
    Window: lambda _: Window(11),
    Chunk: lambda _: Chunk(12),
    TreeMask: lambda batch: TreeMask(tree_bits(batch.q_lens, batch.surplus, 1, torch.int64).to(batch.device)),
    SinkLogits: lambda batch: SinkLogits(torch.linspace(-3.0, 4.0, batch.num_heads, device=batch.device)),
}
REFUSED = [{Window, Chunk}, {Window, TreeMask}, {Chunk, TreeMask}, {Alibi, TreeMask}]
PAIRS = [pair for pair in combinations(VARIANTS, 2) if set(pair) not in REFUSED]
each_set = pytest.mark.parametrize(
    "kinds",
    [*([kind] for kind in VARIANTS), *(pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS)],
    ids=lambda kinds: "-".join(kind.__name__ for kind in kinds),
)
# Each variant decodes with one or three queries of a request, and a tree with both.
QUICK = [([kind], 3 if place % 2 or kind is TreeMask else 1) for place, kind in enumerate(VARIANTS)]
QUICK.append(([TreeMask], 1))
each_set_with_queries = pytest.mark.parametrize(
    ("kinds", "num_queries"),
    [
        pytest.param(kinds, num, marks=() if (kinds, num) in QUICK else pytest.mark.slow)
        for kinds, num in product([*([kind] for kind in VARIANTS), *PAIRS], (1, 3))
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(kind.__name__ for kind in value),
)


def test_there_is_a_case_of_each_variant() -> None:
    assert tuple(MAKERS) == VARIANTS
    assert len(PAIRS) == 17


# --------------------------------------------------------------------------------
# As operators take them


def all_of(batch: Batch) -> list[Variant]:
    return [make(batch) for make in MAKERS.values()]


def test_operators_are_given_back_what_was_flattened(device: torch.device) -> None:
    batch = Batch([2, 1], [20, 9], 0, 4, device, torch.float32)
    given = (*all_of(batch), ValueMask(torch.zeros(3, 5, dtype=torch.bool, device=device)))
    found: list[tuple[Variant, ...]] = []
    operator = Operator("test_variants", lambda some, out: found.append(some), ("out",), VARIANTS)
    for some in (given, given[3:5], given[2:3], ()):
        flat = operator.flat(some, torch.zeros(1))
        assert len(flat.written) == 1
        assert all(isinstance(one, Tensor) for one in flat.read)
        operator.registered(*flat)
        assert [type(one) for one in found[-1]] == [type(one) for one in some]
        for one, other in zip(found[-1], some, strict=True):
            for field in fields(other):  # type: ignore[arg-type]
                value, expected = getattr(one, field.name), getattr(other, field.name)
                assert type(value) is type(expected)
                assert torch.equal(value, expected) if isinstance(expected, Tensor) else value == expected
    assert limits(found[0]) == (Window(11), Chunk(12))


def test_options_keep_variants_in_order(device: torch.device) -> None:
    sinks, bias = SinkLogits(torch.zeros(4, device=device)), Alibi(torch.zeros(4, device=device))
    options = AttentionOptions(scale=0.5).plus(sinks, Window(3), None, bias).plus(Softcap(2.0))
    assert options.variants == (Softcap(2.0), bias, Window(3), sinks) == in_order(options.variants[::-1])
    assert options.of(Window) == Window(3)
    assert options.of(Chunk) is None
    assert options.most_keys == 3
    assert options.without(Window, SinkLogits) == AttentionOptions(scale=0.5).plus(Softcap(2.0), bias)
    assert options.without(Window).most_keys is None


def test_masks_are_cut_with_the_queries_and_the_requests(device: torch.device) -> None:
    batch = Batch([2, 1, 3], [20, 9, 8], 0, 4, device, torch.float32)
    options = AttentionOptions().plus(_values(batch), Softcap(2.0), MAKERS[TreeMask](batch))
    part = options.of_queries(2, 6).of_requests(1, 3)
    whole, cut = options.of(ValueMask), part.of(ValueMask)
    assert torch.equal(cut.values, whole.values[:, 2:6])
    assert cut.columns.tolist() == [1, 2]
    assert torch.equal(part.of(TreeMask).bits, options.of(TreeMask).bits[2:6])
    assert part.of(Softcap) == Softcap(2.0)


def test_variants_that_do_not_go_together_are_refused(device: torch.device) -> None:
    cache = poisoned_cache([20, 9], device=device, num_kv_heads=1, key_dim=16, value_dim=16)
    q, q_starts = torch.zeros(2, 4, 16, device=device), starts([1, 1], device)
    batch = Batch([1, 1], [20, 9], 0, 4, device, torch.float32)
    wrong: list[tuple[str, list[Variant]]] = [
        (r"in the order of VARIANTS; got \['Window', 'Softcap'\]", [Window(3), Softcap(2.0)]),
        (r"given once each .* got \['Softcap', 'Softcap'\]", [Softcap(2.0), Softcap(3.0)]),
        (r"given once each .* got \['Window', 'Window'\]", [Window(2), Window(2)]),
        (r"Window\(size=3\), Chunk\(size=4\)", [Window(3), Chunk(4)]),
    ]
    for kinds in REFUSED[1:]:
        pair = in_order([MAKERS[kind](batch) for kind in kinds])
        wrong.append(("without a window, chunks or ALiBi", list(pair)))
    for match, some in wrong:
        options = AttentionOptions(variants=tuple(some))
        with pytest.raises(ValueError, match=match):
            decode_attention(q, *cache, options)
        with pytest.raises(ValueError, match=match):
            prefill_attention(q, cache.kv, cache.rows, q_starts, cache.lengths, options)
        with pytest.raises(ValueError, match=match):
            mixed_attention(q, cache.kv, cache.rows, q_starts, cache.lengths, options)
    args = cache.rows, q_starts, cache.lengths, HeadShape.of(q, cache.kv)
    with pytest.raises(ValueError, match="a window, or chunks, or neither"):
        prefill_plan(*args, num_tokens=2, dtype=q.dtype, limits=(Window(3), Chunk(4)))
    with pytest.raises(ValueError, match="a window, or chunks, or neither"):
        decode_plan(
            cache.rows,
            cache.lengths,
            HeadShape.of(q, cache.kv),
            dtype=q.dtype,
            limits=(Window(3), Chunk(4)),
        )


# --------------------------------------------------------------------------------
# In the kernels


class Case(NamedTuple):
    """Queries of some requests, at their last positions, and a layer's options."""

    q: Tensor
    cache: Cache
    q_lens: list[int]
    options: AttentionOptions

    @classmethod
    def make(
        cls, kinds: list[type[Variant]], q_lens: list[int], lengths: list[int], device: torch.device
    ) -> "Case":
        torch.manual_seed(len(q_lens))
        cache = poisoned_cache(lengths, device=device, num_kv_heads=2, key_dim=16, value_dim=16)
        q = torch.randn(sum(q_lens), 4, 16).to(device) * 2  # so that trees are the same on each device
        batch = Batch(q_lens, lengths, 0, 4, device, q.dtype)
        return cls(q, cache, q_lens, AttentionOptions().plus(*(MAKERS[kind](batch) for kind in kinds)))

    @property
    def args(self) -> tuple:
        q_starts = starts(self.q_lens, self.q.device)
        return self.q, self.cache.kv, self.cache.rows, q_starts, self.cache.lengths

    def decoded(self, options: AttentionOptions | None = None) -> Tensor:
        out = torch.full_like(self.q, torch.nan)
        settings = {"num_queries": self.q_lens[0], "out": out}
        return decode_attention(self.q, *self.cache, options or self.options, **settings)

    def prefilled(self, options: AttentionOptions | None = None) -> Tensor:
        options = options or self.options
        plan = prefill_plan(
            *self.args[2:],
            HeadShape.of(self.q, self.cache.kv),
            num_tokens=len(self.q),
            dtype=self.q.dtype,
            limits=limits(options.variants),
            causal=options.causal,
            launch=tuning.Launch(16, 16, 4, 2),
        )
        return prefill_attention(*self.args, options, plan=plan, out=torch.full_like(self.q, torch.nan))


@each_set_with_queries
def test_decode(
    kinds: list[type[Variant]], num_queries: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: 3)
    case = Case.make(kinds, [num_queries] * 2, [60, 35], device)
    expected = decode_attention_reference(case.q, *case.cache, case.options, num_queries=num_queries)
    assert_close(case.decoded(), expected)
    plain = decode_attention_reference(case.q, *case.cache, num_queries=num_queries)
    changed = not torch.allclose(plain, expected, atol=1e-3)
    assert changed or (num_queries == 1 and kinds == [TreeMask])  # the only guess of a tree sees all keys


@each_set
def test_prefill(kinds: list[type[Variant]], device: torch.device) -> None:
    case = Case.make(kinds, [9, 1], [45, 20], device)
    expected = prefill_attention_reference(*case.args, case.options)
    assert_close(case.prefilled(), expected)
    assert not torch.allclose(prefill_attention_reference(*case.args), expected, atol=1e-3)


# --------------------------------------------------------------------------------
# A variant that nothing else knows


class _Data(NamedTuple):
    factors: Tensor


@triton.jit
def _start(data, rows):
    return (tl.load(data.factors + rows.heads, mask=rows.in_tile, other=0.0),)


@triton.jit
def _score(data, state, loaded, scores, score_scale):
    return scores * state[0][:, None]


@dataclass(frozen=True, eq=False)
class Weighed(Variant):
    """Scores times a learned number of each query head: `factors`, float32 `[num_heads]`."""

    factors: Tensor

    hooks = Hooks(start=tl.constexpr(_start), score=tl.constexpr(_score))

    def check(self, q: Tensor, num_requests: int) -> None:
        if self.factors.shape != q.shape[1:2]:
            raise ValueError(f"a factor for each of {q.shape[1]} heads, got {tuple(self.factors.shape)}")

    def data(self, scale: float) -> _Data:
        return _Data(self.factors)

    def scores_reference(self, scores: Tensor, scored: Scored) -> Tensor:
        return scores * self.factors.to(scores.dtype)[:, None, None]


@pytest.fixture
def _with_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "VARIANTS", (Weighed, *VARIANTS))


def factors(device: torch.device) -> Tensor:
    return torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)


@pytest.mark.usefixtures("_with_weighed")
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([], marks=pytest.mark.slow),
        [Softcap, ValueMask, Window, SinkLogits],
        pytest.param([Alibi, Chunk], marks=pytest.mark.slow),
    ],
    ids=["alone", "with others", "with ALiBi and chunks"],
)
def test_a_variant_of_this_file_in_all_kernels(kinds: list[type[Variant]], device: torch.device) -> None:
    """A score times a number is the score of a query times that number."""
    for num_queries in (1, 3):
        case = Case.make(kinds, [num_queries] * 2, [90, 35], device)
        options = case.options.plus(Weighed(factors(device)))
        weighed = case._replace(q=case.q * factors(device)[:, None])
        settings = {"num_queries": num_queries}
        expected = decode_attention_reference(weighed.q, *case.cache, case.options, **settings)
        assert_close(decode_attention_reference(case.q, *case.cache, options, **settings), expected)
        assert_close(case.decoded(options), expected)
    case = Case.make(kinds, [9, 1], [45, 20], device)
    options = case.options.plus(Weighed(factors(device)))
    weighed = case._replace(q=case.q * factors(device)[:, None])
    expected = prefill_attention_reference(*weighed.args, case.options)
    assert_close(case.prefilled(options), expected)
    q, kv, rows, q_starts, lengths = case.args
    step = kv, rows, q_starts[:2], lengths  # the second request decodes
    assert_close(mixed_attention(q, *step, options), expected)
    assert_close(mixed_attention_reference(q, *step, options), expected)


@pytest.mark.usefixtures("_with_weighed")
@pytest.mark.parametrize(
    "kinds",
    [pytest.param([], marks=pytest.mark.slow), [Softcap, Window, SinkLogits]],
    ids=["alone", "with others"],
)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_variant_of_this_file_in_both_backends(
    name: str, kinds: list[type[Variant]], device: torch.device
) -> None:
    """A prompt beside decodes, whose keys are those of the prompts before."""
    torch.manual_seed(1)
    batch = Batch([], [], 0, 4, device, torch.float32)
    others = AttentionOptions().plus(*(MAKERS[kind](batch) for kind in kinds))
    shapes = [LayerShape(4, 16, 2, options) for options in (others.plus(Weighed(factors(device))), others)]
    outs: list[list[Tensor]] = []
    steps = [([1, 2], [0, 0], [17, 7], 2), ([3, 1, 2], [0, 17, 7], [5, 1, 1], 1)]
    tensors = [torch.randn(sum(counts), 8, 16, device=device) for _, _, counts, _ in steps]
    for shape in shapes:
        memory = KVMemory(KVSpec(1, 2, 16, 16, torch.float32), 200, 6, 64, device)
        slots = torch.arange(1, 193, dtype=torch.int32, device=device)
        memory.table.req_to_token[1:4] = slots.view(3, 64)
        (backend,) = make_backends(name, device, [shape])
        outs.append([])
        for (rows, begins, counts, num_prefills), heads in zip(steps, tensors, strict=True):
            q, k, v = heads.split([4, 2, 2], 1)
            if shape is shapes[1]:
                q = q * factors(device)[:, None]
            step = Step.of(StepBatch.of(rows, begins, counts, num_prefills), memory)
            q, k, v = (part.contiguous() for part in (q, k, v))
            outs[-1].append(backend.forward(q, k, v, step))
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
