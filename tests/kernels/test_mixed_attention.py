"""Compares `mixed_attention`, prefills and decodes in one call, with its reference.

The caches are those of `test_decode_attention`: shuffled slots, NaN in all free slots.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.attention import mixed_attention as module
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention_reference
from lightkv.triton_kernels.attention.mixed_attention import (
    MixedPlan,
    mixed_attention,
    mixed_attention_reference,
    mixed_plan,
)
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention_reference
from lightkv.triton_kernels.attention.variants import Softcap, Window
from tests.support.attention.caches import Cache, assert_close, starts
from tests.support.attention.log_sum_exps import assert_lse, lse_reference
from tests.support.attention.mixed_steps import Step, make_step
from tests.support.combinations import each_value, slow

PREFILLS = [(33, 40), (0, 7), (65, 0), (1, 5), (0, 0)]  # queries of a request, and tokens before them
DECODES = [130, 0, 1, 65]  # tokens of a request


def check(
    step: Step,
    *,
    window: int = 0,
    softcap: float = 0.0,
    num_queries: int = 1,
    plan: MixedPlan | None = None,
) -> None:
    """Checks the output and log-sum-exp of every query; those of queries without a request are not written."""
    q, num_prefills = step.q, len(step.q_starts) - 1
    end, begin = int(step.q_starts[-1]), len(q) - (len(step.rows) - num_prefills) * num_queries
    out = torch.full((*q.shape[:2], step.kv.v.shape[2]), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    options = AttentionOptions().plus(
        Window(window) if window else None, Softcap(softcap) if softcap else None
    )
    result = mixed_attention(*step, options, num_queries=num_queries, plan=plan, out=out, lse=lse)
    assert result is out
    expected = mixed_attention_reference(*step, options, num_queries=num_queries)
    assert_close(out[:end], expected[:end])
    assert_close(out[begin:], expected[begin:])
    assert out[end:begin].isnan().all()
    assert lse[end:begin].isnan().all()

    prefills = step._replace(q=q[:end], rows=step.rows[:num_prefills], lengths=step.lengths[:num_prefills])
    assert_close(lse[:end], lse_reference(*prefills, options))
    decodes = Cache(step.kv, step.rows[num_prefills:], step.lengths[num_prefills:])
    assert_lse(lse[begin:], q[begin:], decodes, options, num_queries=num_queries)


@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [(PREFILLS, DECODES), (PREFILLS, []), ([], DECODES), ([(0, 0)], [0]), ([(0, 9)], [70])],
    ids=["both", "only_prefills", "only_decodes", "empty_rows", "prefill_without_queries"],
)
@pytest.mark.parametrize("group", [3, *slow(1, 8)], ids="group{}".format)
def test_parts(device: torch.device, prefills: list[tuple[int, int]], decodes: list[int], group: int) -> None:
    torch.manual_seed(group)
    check(make_step(prefills, decodes, device=device, group=group))


def test_one_kv_head_for_all(device: torch.device) -> None:
    torch.manual_seed(0)
    check(make_step(PREFILLS, DECODES, device=device, group=8, num_kv_heads=1))


@each_value(shift=[31, 0, *slow(4)], window=[40, 0, *slow(1)], softcap=[5.0, 0.0])
def test_index_window_and_softcap(device: torch.device, shift: int, window: int, softcap: float) -> None:
    torch.manual_seed(window)
    step = make_step(PREFILLS, DECODES, device=device, shift=shift)
    check(step, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.float16], ids=["float32", "float16"])
def test_values_of_another_dim(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check(make_step(PREFILLS, DECODES, device=device, dtype=dtype, key_dim=80, value_dim=64))


@pytest.mark.parametrize("surplus", [*slow(0), 5], ids="surplus{}".format)
@pytest.mark.parametrize("num_queries", [*slow(1), 3], ids="queries{}".format)
def test_a_plan_serves_every_layer(device: torch.device, num_queries: int, surplus: int) -> None:
    torch.manual_seed(2)
    step = make_step(PREFILLS, DECODES, device=device, group=3, num_queries=num_queries, surplus=surplus)
    plan = step.plan(AttentionOptions().plus(Window(20)), num_queries=num_queries)
    for _ in range(2):
        check(step, window=20, num_queries=num_queries, plan=plan)


@pytest.mark.parametrize("window", [*slow(0), 20], ids="window{}".format)
def test_decodes_first_with_unused_slots(device: torch.device, window: int) -> None:
    """The slots of a captured step: prefills write over the output of unused decodes, and the padding is the
    queries of a last prefill without tokens, whose output is zeros."""
    torch.manual_seed(5)
    step = make_step([(33, 40), (5, 0), (0, 0)], [130, 65, 0, 0, 0], device=device, group=3)
    begin, end, num_tokens = 2, 40, 48  # of the prefills' queries, and of all
    q = torch.randn(num_tokens, *step.q.shape[1:], device=device)
    q_starts = torch.tensor([begin, 35, end, num_tokens], dtype=torch.int32, device=device)
    step = step._replace(q=q, q_starts=q_starts)
    options = AttentionOptions().plus(Window(window) if window else None)
    plan = mixed_plan(
        *step[2:],
        HeadShape.of(q, step.kv),
        num_tokens=num_tokens,
        dtype=q.dtype,
        options=options,
        decodes_first=True,
    )
    expected = mixed_attention_reference(*step, options, decodes_first=True)
    decoded = decode_attention_reference(q[:begin], step.kv, step.rows[3:5], step.lengths[3:5], options)
    assert_close(expected[:begin], decoded)
    for layer_plan in (plan, plan, None):
        out = torch.full_like(q, torch.nan)
        mixed_attention(*step, options, plan=layer_plan, out=out, decodes_first=True)
        assert_close(out, expected)
        assert not out[end:].any()


def test_without_requests(device: torch.device) -> None:
    step = make_step([(1, 0)], [], device=device)
    empty = Step(step.q[:0], step.kv, step.rows[:0], step.q_starts[:1], step.lengths[:0])
    assert empty.plan() == MixedPlan(None, None)
    assert mixed_attention(*empty).shape == (0, 4, 64)


def test_a_decode_is_a_prefill_of_its_newest_tokens(device: torch.device) -> None:
    torch.manual_seed(3)
    step = make_step([(20, 4)], [50, 9, 30], device=device, num_queries=2)
    all_prefills = step._replace(q_starts=starts([20, 2, 2, 2], device))
    assert_close(
        mixed_attention(*step, num_queries=2),
        prefill_attention_reference(*all_prefills),
    )


def test_refuses_what_does_not_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("half of it was launched")

    monkeypatch.setattr(module, "attend_prefills", launch)
    monkeypatch.setattr(module, "attend_decodes", launch)
    step = make_step([(5, 6), (2, 0)], [7, 8], device=device)
    q_starts = step.q_starts
    lse = torch.empty(len(step.q) + 1, 4, device=device)
    cases: list[tuple[str, Step, dict[str, object]]] = [
        ("lengths must be", step._replace(lengths=step.lengths[:3]), {}),
        ("q_starts must be contiguous int32", step._replace(q_starts=q_starts.long()), {}),
        ("an entry more than there are prefills among 4", step._replace(q_starts=q_starts[:0]), {}),
        (
            "an entry more than there are prefills among 4",
            step._replace(q_starts=starts([1] * 5, device)),
            {},
        ),
        ("5 queries, at least one, for each of 2 decodes", step, {"num_queries": 5}),
        ("0 queries, at least one", step, {"num_queries": 0}),
        ("behind those of 0 prefills; got 9", step._replace(q_starts=q_starts[:1]), {}),
        ("lse must be contiguous float32", step, {"lse": lse}),
        ("out must be", step, {"out": step.q[:-1]}),
    ]
    for match, wrong, options in cases:
        with pytest.raises(ValueError, match=match):
            mixed_attention(*wrong, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("planned", [False, *slow(True)], ids=["plans_itself", "planned"])
def test_a_compiled_caller(device: torch.device, planned: bool) -> None:
    torch.manual_seed(4)
    step = make_step([(10, 20), (3, 0)], [40, 7], device=device)
    plan = step.plan() if planned else None

    def layer(step: Step, plan: MixedPlan | None) -> Tensor:
        return mixed_attention(step.q * 2, *step[1:], plan=plan) + 1

    out = torch.compile(layer, fullgraph=True, backend="aot_eager")(step, plan)
    assert_close(out, mixed_attention_reference(step.q * 2, *step[1:]) + 1)


def bfloat16_step(num_queries: int = 1) -> Step:
    return make_step(
        [(900, 0), (37, 512), (1, 127), (333, 1300)],
        [4000, 17, 1, 900, 0, 2500],
        device="cuda",
        dtype=torch.bfloat16,
        group=4,
        num_kv_heads=4,
        key_dim=128,
        value_dim=128,
        num_queries=num_queries,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_queries", [1, 5], ids="queries{}".format)
def test_bfloat16(num_queries: int) -> None:
    torch.manual_seed(5)
    step = bfloat16_step(num_queries)
    check(step, num_queries=num_queries)
    check(step, num_queries=num_queries, window=100, softcap=20.0)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_graph_follows_its_tensors(compiled: bool) -> None:
    torch.manual_seed(6)
    step, out = bfloat16_step(), torch.empty(0)

    def layers() -> Tensor:
        plan = step.plan()
        return mixed_attention(*step, plan=plan) + mixed_attention(*step, plan=plan)

    run: Callable[[], Tensor] = torch.compile(layers) if compiled else layers
    run()  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    step.q_starts.copy_(starts([100, 700, 371, 100], "cuda"))
    step.rows[:4] = step.rows[:4].roll(1)
    step.rows[4:] = step.rows[4:].flip(0)
    lengths = [1500, 900, 512, 128, 2500, 0, 900, 1, 17, 3000]
    step.lengths.copy_(torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    out.fill_(torch.nan)
    graph.replay()
    assert_close(out / 2, mixed_attention_reference(*step))


@pytest.mark.gpu
def test_never_synchronises() -> None:
    step = bfloat16_step()
    mixed_attention(*step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixed_attention(*step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
