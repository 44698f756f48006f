"""Compares prefill whose keys are shared out among programs with the reference, element by element: in the
general kernel everywhere, and in that of compute capability 9 on a GPU that has it.

The caches are those of `test_decode_attention`: shuffled slots, NaN in all free slots. Tensors that a call
allocates for itself, partial outputs above all, hold NaN, too.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.mixed_attention import mixed_attention, mixed_plan
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.prefill import prefill_attention as prefill_module
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.prefill.prefill_combine import (
    combine_tiles,
    combine_tiles_reference,
    empty_partials,
    most_partial_bytes,
)
from lightkv.triton_kernels.attention.prefill.prefill_plan import PrefillPlan, prefill_plan
from lightkv.triton_kernels.attention.variants import SinkLogits, Softcap, Window
from lightkv.triton_kernels.attention.variants.variant import limits
from tests.support.attention.caches import Cache, assert_close, poisoned_cache, starts
from tests.support.attention.log_sum_exps import lse_reference
from tests.support.combinations import slow_cases

ALWAYS = -(2**30)  # as the least gain: keys are shared out in every batch
SMALL = tuning.Launch(32, 32, 4, 2)
META = torch.device("meta")
HOPPER = tuning.DeviceClass(num_multiprocessors=132, shared_memory=232448, major=9)

# (queries, tokens before them) of each request
FEW_AFTER_MANY = [(5, 120), (0, 9), (20, 40), (1, 70), (9, 0)]
LONG = [(64, 5000), (1, 3000), (0, 9), (200, 700), (37, 0), (8, 129), (130, -20)]


@pytest.fixture(autouse=True)
def _poison_allocations() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # then torch.empty fills tensors with NaN
    yield
    torch.use_deterministic_algorithms(False)


def always(num_workers: int, unit: int = 32) -> prefill_tuning.PrefillShares:
    return prefill_tuning.PrefillShares(num_workers, 8, unit, 1, ALWAYS)


class Case(NamedTuple):
    """Queries of some requests over a cache; three queries after the last request belong to none."""

    q: Tensor
    cache: Cache
    q_starts: Tensor
    options: AttentionOptions
    num_queries: int

    @classmethod
    def make(
        cls,
        sequences: list[tuple[int, int]],
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.float32,
        group: int = 4,
        num_kv_heads: int = 2,
        key_dim: int = 64,
        value_dim: int | None = None,
        shift: int = 0,
        options: AttentionOptions | None = None,
    ) -> "Case":
        cache = poisoned_cache(
            [max(q_len + prefix, 0) for q_len, prefix in sequences],
            device=device,
            dtype=dtype,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim or key_dim,
            shift=shift,
        )
        q_lens = [q_len for q_len, _ in sequences]
        q = torch.randn(sum(q_lens) + 3, group * num_kv_heads, key_dim).to(device, dtype)
        return cls(q, cache, starts(q_lens, device), options or AttentionOptions(), sum(q_lens))

    def plan(
        self, shares: prefill_tuning.PrefillShares | None, launch: tuning.Launch | None = None
    ) -> PrefillPlan:
        return prefill_plan(
            self.cache.rows,
            self.q_starts,
            self.cache.lengths,
            HeadShape.of(self.q, self.cache.kv),
            num_tokens=len(self.q),
            dtype=self.q.dtype,
            limits=limits(self.options.variants),
            launch=launch,
            shares=shares,
        )

    @property
    def args(self) -> tuple:
        return self.q, self.cache.kv, self.cache.rows, self.q_starts, self.cache.lengths, self.options

    def check(self, plan: PrefillPlan, *, lse: bool = True) -> Tensor:
        """Compares what the plan computes with the reference, and returns it."""
        n, device = self.num_queries, self.q.device
        shape = (*self.q.shape[:2], self.cache.kv.v.shape[2])
        out = torch.full(shape, torch.nan, dtype=self.q.dtype, device=device)
        found = torch.full(shape[:2], torch.nan, device=device) if lse else None
        prefill_attention(*self.args, plan=plan, out=out, lse=found)
        assert_close(out[:n], prefill_attention_reference(*self.args)[:n])
        assert out[n:].isnan().all()
        if found is not None:
            assert_close(found[:n], lse_reference(*self.args)[:n])
            assert found[n:].isnan().all()
        assert not plan.counters[:2].any()
        return out[:n].clone()


def num_parts(plan: PrefillPlan) -> int:
    return int((plan.items[:, 8] >= 0).sum())


@pytest.mark.parametrize(("group", "num_workers"), [*slow_cases((1, 2), (4, 5)), (3, 40), (16, 7)], ids=str)
def test_query_heads_per_kv_head(device: torch.device, group: int, num_workers: int) -> None:
    torch.manual_seed(group)
    case = Case.make(FEW_AFTER_MANY, device, group=group, num_kv_heads=1 if group == 16 else 2)
    plan = case.plan(always(num_workers), SMALL)
    assert num_parts(plan) > 1
    case.check(plan, lse=num_workers != 5)


@pytest.mark.parametrize(
    ("shift", "window", "softcap"),
    [
        (0, 40, 5.0),
        (4, 0, 0.0),
        (31, 40, 0.0),
        *slow_cases((4, 100, 5.0), (0, 33, 0.0), (0, 100, 0.0), (0, 0, 5.0)),
    ],
    ids=str,
)
def test_index_window_and_softcap(device: torch.device, shift: int, window: int, softcap: float) -> None:
    torch.manual_seed(window)
    options = AttentionOptions().plus(
        Window(window) if window else None, Softcap(softcap) if softcap else None
    )
    case = Case.make(FEW_AFTER_MANY, device, group=2, num_kv_heads=1, shift=shift, options=options)
    plan = case.plan(always(30), SMALL)
    assert num_parts(plan) > 1
    case.check(plan)


@pytest.mark.parametrize(("key_dim", "value_dim", "unit"), [(80, 80, 32), (128, 64, 48)], ids=str)
def test_float16_head_dims_and_units_that_are_no_tiles(
    device: torch.device, key_dim: int, value_dim: int, unit: int
) -> None:
    torch.manual_seed(key_dim)
    sizes = {"key_dim": key_dim, "value_dim": value_dim, "num_kv_heads": 1}
    case = Case.make(FEW_AFTER_MANY, device, dtype=torch.float16, **sizes)
    case.check(case.plan(always(12, unit), SMALL._replace(block_n=64)))


def test_more_queries_than_tokens(device: torch.device) -> None:
    torch.manual_seed(1)
    case = Case.make([(60, -40), (10, 150)], device, group=1)
    out = case.check(case.plan(always(9), SMALL))
    assert not out[:40].any()


def test_one_plan_shares_out_keys_or_not_by_what_is_on_the_device(device: torch.device) -> None:
    torch.manual_seed(2)
    shares = prefill_tuning.PrefillShares(4, 4, 32, 1, 1)
    case = Case.make([(40, 0), (40, 0), (40, 0)], device, num_kv_heads=1)
    whole = case.plan(shares, SMALL)
    assert num_parts(whole) == 0
    case.check(whole)
    longer = Case.make([(8, 300), (0, 0), (0, 0)], device, num_kv_heads=1)
    plan = longer.plan(shares, SMALL)
    assert num_parts(plan) == 4
    longer.check(plan)


def test_mixed_attention_after_a_long_prefix(device: torch.device) -> None:
    torch.manual_seed(3)
    cache = poisoned_cache([210, 20, 9], device=device, num_kv_heads=1)
    q, q_starts = torch.randn(10 + 20 + 1, 4, 64, device=device), starts([10, 20], device)
    args = cache.rows, q_starts, cache.lengths
    plan = mixed_plan(*args, HeadShape.of(q, cache.kv), num_tokens=len(q), dtype=q.dtype)
    assert plan.prefill is not None
    assert device.type == "cuda" or num_parts(plan.prefill) > 1
    out = mixed_attention(q, cache.kv, *args, plan=plan, out=torch.full_like(q, torch.nan))
    prefills = prefill_attention_reference(q, cache.kv, cache.rows[:2], q_starts, cache.lengths[:2])
    assert_close(out[:30], prefills[:30])
    assert_close(out, mixed_attention(q, cache.kv, *args))


def test_combining_alone(device: torch.device) -> None:
    """Parts of random numbers, in which rows see no key of some part, and of no part."""
    torch.manual_seed(4)
    case = Case.make(FEW_AFTER_MANY, device)
    num_workers, group = 10, 4
    plan = case.plan(always(num_workers), SMALL)
    partial_out = torch.randn(2 * num_workers, 2, 32, 64, device=device)
    partial_lse = torch.randn(2 * num_workers, 2, 32, device=device) * 9
    partial_lse[torch.rand_like(partial_lse) < 0.2] = -torch.inf
    partial_lse[:, 1, 3] = -torch.inf
    partial_out[partial_lse == -torch.inf] = 0.0
    out = torch.full_like(case.q, torch.nan)
    lse = torch.full(out.shape[:2], torch.nan, device=device)
    combine_tiles(partial_out, partial_lse, plan.items, out, lse)
    expected = combine_tiles_reference(partial_out, partial_lse, plan.items)
    assert len(expected) >= 2
    written = torch.zeros_like(lse, dtype=torch.bool)
    q_starts = case.q_starts.tolist()
    for (request, first_row), (tile_out, tile_lse) in expected.items():
        num_rows = (q_starts[request + 1] - q_starts[request]) * group
        for row in range(first_row, min(first_row + 32, num_rows)):
            token, heads = q_starts[request] + row // group, [row % group, group + row % group]
            assert_close(out[token, heads], tile_out[:, row - first_row].float())
            assert_close(lse[token, heads], tile_lse[:, row - first_row].float())
            written[token, heads] = True
    assert out[~written].isnan().all()
    assert lse[~written].isnan().all()
    assert not out[written].isnan().any()


# --------------------------------------------------------------------------------
# On a GPU: what the device shares out by itself, in both kernels


def launches(head_dim: int) -> list[tuning.Launch]:
    """Returns tiles of the general kernel, and those that `prefill_hopper` takes where it runs."""
    return [tuning.Launch(64, 64 if head_dim <= 128 else 32, 4, 2), tuning.Launch(128, 64, 8, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "group", "window"),
    [(128, 4, 0), (128, 7, 1000), (64, 1, 0), (64, 8, 1000), (256, 4, 0), (80, 16, 0)],
    ids=str,
)
def test_bfloat16(head_dim: int, group: int, window: int) -> None:
    torch.manual_seed(group)
    options = AttentionOptions().plus(*((Window(window), Softcap(20.0)) if window else ()))
    sizes = {"group": group, "key_dim": head_dim, "dtype": torch.bfloat16, "options": options}
    case = Case.make(LONG, "cuda", **sizes)
    for launch in launches(head_dim):
        for num_workers in (3, 66, 1000):
            plan = case.plan(always(num_workers, 128), launch)
            assert num_parts(plan) > 1
            first = case.check(plan)
            assert torch.equal(first, case.check(plan))  # the order of sums is the plan's


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "group"), [(80, 80, 4), (96, 96, 1), (96, 96, 16), (192, 128, 4)], ids=str
)
def test_head_dims_that_are_no_powers_of_two(
    key_dim: int, value_dim: int, group: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(key_dim)
    options = AttentionOptions().plus(SinkLogits(torch.linspace(-2.0, 5.0, 2 * group, device="cuda")))
    sizes = {"group": group, "key_dim": key_dim, "value_dim": value_dim, "dtype": dtype, "options": options}
    case = Case.make(LONG, "cuda", **sizes)
    for num_workers in (3, 66, 1000):
        plan = case.plan(always(num_workers, 128), launches(128)[1])  # of `prefill_hopper`, where it runs
        assert num_parts(plan) > 1
        assert torch.equal(case.check(plan), case.check(plan))


@pytest.mark.gpu
def test_float16_without_log_sum_exp() -> None:
    torch.manual_seed(6)
    case = Case.make(LONG, "cuda", key_dim=128, dtype=torch.float16)
    for launch in launches(128):
        case.check(case.plan(always(20, 128), launch), lse=False)


@pytest.mark.gpu
@pytest.mark.parametrize("num_queries", [1, 2, 8, 16, 17, 33, 64, 100, 256, 300])
def test_any_number_of_queries_after_a_long_prefix(num_queries: int) -> None:
    torch.manual_seed(num_queries)
    case = Case.make([(num_queries, 20_000)], "cuda", key_dim=128, num_kv_heads=8, dtype=torch.bfloat16)
    plan = case.plan(None)
    assert num_parts(plan) > 1
    case.check(plan)
    shifted = Case.make([(num_queries, 9000)], "cuda", key_dim=128, shift=4, dtype=torch.bfloat16)
    shifted.check(shifted.plan(None))


@pytest.mark.gpu
@pytest.mark.parametrize("hopper", [False, True], ids=["general", "hopper"])
def test_one_graph_serves_fresh_prompts_and_a_few_tokens_after_many(hopper: bool) -> None:
    torch.manual_seed(5)
    launch = launches(128)[hopper]
    sequences = [(400, 1), (80, 30_000), (100, 20_000)]
    case = Case.make(sequences, "cuda", key_dim=128, num_kv_heads=8, dtype=torch.bfloat16)
    out = torch.full_like(case.q, torch.nan)
    lse = torch.full(out.shape[:2], torch.nan, device="cuda")

    def step() -> None:
        prefill_attention(*case.args, plan=case.plan(None, launch), out=out, lse=lse)

    step()  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for q_lens, lengths in (
        ([400, 0, 180], [400, 0, 180]),
        ([0, 64, 516], [0, 30_064, 0]),  # padding is a request of length 0
        ([300, 1, 279], [300, 30_000, 20_000]),
        ([580, 0, 0], [401, 0, 0]),
    ):
        case.q_starts.copy_(starts(q_lens, "cuda"))
        case.cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        assert_close(out[:580], prefill_attention_reference(*case.args)[:580])
        assert_close(lse[:580], lse_reference(*case.args)[:580])
        assert out[580:].isnan().all()


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = Case.make([(20, 9000), (64, 7)], "cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(False)
    prefill_attention(*case.args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefill_attention(*case.args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_most_partial_outputs_are_known_before_any_call() -> None:
    """Up to a number of queries no call has larger parts, whatever its requests are, and some call as large."""
    small = tuning.DeviceClass(num_multiprocessors=20, shared_memory=101376, major=8)
    for device in (HOPPER, small):
        for num_heads, num_kv_heads, dim in (
            (32, 8, 128),
            (8, 1, 64),
            (16, 16, 256),
            (71, 1, 80),
            (20, 20, 96),
        ):
            heads, group = HeadShape(num_heads, num_kv_heads, dim, dim), num_heads // num_kv_heads
            sizes = []
            for num_tokens in (1, 8, 100, 600, 2304):
                for num_requests in (1, 8, 256):
                    rows = num_tokens * group
                    launch = prefill_tuning.prefill_launch(
                        device, num_requests, num_kv_heads, rows, dim, dim, 2
                    )
                    shares = prefill_tuning.prefill_shares(device, launch, num_kv_heads)
                    parts = empty_partials(shares.num_workers, num_kv_heads, launch.block_m, dim, META)
                    sizes.append(sum(part.nbytes for part in parts))
                assert max(sizes) == most_partial_bytes(device, heads, num_tokens, 2)
            assert 0 < max(sizes) <= 34 << 20


def test_a_call_makes_as_many_partial_outputs_as_are_known_before(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes them anew, so a plan, which a graph keeps, holds its work list alone."""
    made: list[tuple[Tensor, Tensor]] = []

    def noted(*sizes: Any) -> tuple[Tensor, Tensor]:
        made.append(empty_partials(*sizes))
        return made[-1]

    monkeypatch.setattr(prefill_module, "empty_partials", noted)
    case = Case.make([(37, 30)], device, dtype=torch.float16)
    prefill_attention(*case.args)
    (parts,), heads = made, HeadShape.of(case.q, case.cache.kv)
    assert sum(part.nbytes for part in parts) == most_partial_bytes(
        tuning.device_class(device), heads, len(case.q), case.q.element_size()
    )
    held = [value for value in case.plan(None) if isinstance(value, Tensor)]
    assert {tensor.dtype for tensor in held} == {torch.int32}


@pytest.mark.gpu
def test_graphs_share_the_memory_of_partial_outputs() -> None:
    """Graphs with one memory pool, as those of an engine, use one set of parts."""
    cases = [
        Case.make([(count, 3000)], "cuda", key_dim=128, num_kv_heads=8, dtype=torch.bfloat16)
        for count in (64, 80, 100, 128)
    ]
    outs = [torch.empty_like(case.q) for case in cases]
    pool, stream, graphs, reserved = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), [], []
    for case, out in zip(cases, outs, strict=True):
        prefill_attention(*case.args, plan=case.plan(None), out=out)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool, stream=stream):
            prefill_attention(*case.args, plan=case.plan(None), out=out)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    heads = HeadShape.of(cases[0].q, cases[0].cache.kv)
    parts = most_partial_bytes(tuning.device_class(cases[0].q.device), heads, 128, 2)
    assert reserved[-1] - reserved[0] < parts
    for case, out, graph in zip(cases, outs, graphs, strict=True):
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out[: case.num_queries], prefill_attention_reference(*case.args)[: case.num_queries])
