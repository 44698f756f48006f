"""Compares `attention_scores` and `attention_lse` with their reference in float64, and the reference with
softmax.

Slots are shuffled, every free slot holds NaN, and slot 0 holds large finite garbage: a wrong slot or a missing
mask makes a test fail.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_scores import (
    ScoredBatch,
    _attention_scores,
    attention_scores,
    attention_scores_reference,
)
from lightkv.triton_kernels.attention.lookups import Pages
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants import SinkLogits, Softcap, Window
from tests.support.combinations import each_value, slow
from tests.support.scored import attention_lse


class Case(NamedTuple):
    """The arguments of the operators, in order."""

    q: Tensor
    kv: PagedKV
    rows: Tensor
    q_starts: Tensor
    query_positions: Tensor
    lengths: Tensor

    def double(self) -> "Case":
        k = self.kv.k.double()
        return self._replace(q=self.q.double(), kv=self.kv._replace(k=k, v=k))


def make_case(
    lengths: list[int],
    counts: list[int],
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    group: int = 3,
    num_kv_heads: int = 2,
    dim: int = 64,
    shift: int = 0,
    spread: float = 1.0,
) -> Case:
    """Makes rows of `lengths` in shuffled slots, and `counts` queries of each, at random entries."""
    page = 1 << shift
    width = -(-(max(lengths) + 3) // page)
    places = 1 + torch.randperm(len(lengths) * width).view(-1, width)
    k_cache = torch.full((page * (places.numel() + 2), num_kv_heads, dim), torch.nan)
    for place, length in zip(places, lengths, strict=True):
        slots = (place[:, None] * page + torch.arange(page)).flatten()[:length]
        k_cache[slots] = torch.randn(length, num_kv_heads, dim)
    k_cache[0] = 1e4
    rows = 1 + torch.randperm(len(lengths))
    index = torch.zeros(len(lengths) + 1, width, dtype=torch.int32)
    index[rows] = (places * page).int()
    ends = [torch.randint(0, max(length, 1), (n,)) for length, n in zip(lengths, counts, strict=True)]
    q_starts = torch.tensor([0, *counts]).cumsum(0)
    q = (torch.randn(sum(counts), group * num_kv_heads, dim) * spread).to(device, dtype)
    k_cache = k_cache.to(device, dtype)
    numbers = rows, q_starts.int(), torch.cat(ends).int(), torch.tensor(lengths, dtype=torch.int32)
    kv = PagedKV(k_cache, k_cache, index.to(device), Pages(shift))
    return Case(q, kv, *(tensor.to(device) for tensor in numbers))


def check(case: Case, *, window: int = 0, softcap: float = 0.0, width: int = 0) -> None:
    options = AttentionOptions().plus(
        Window(window) if window else None, Softcap(softcap) if softcap else None
    )
    width = width or int(case.lengths.max()) + 2
    most = int(case.q_starts.diff().max())
    expected, expected_lse = attention_scores_reference(*case.double(), options, width=width)
    scores = attention_scores(*case, options, max_q_len=most, width=width)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-5, atol=2e-5)
    lse = attention_lse(*case, options, max_q_len=most)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)
    assert torch.equal(scores, attention_scores(*case, options, max_q_len=most, width=width))


@pytest.mark.parametrize("length", [1, *slow(63), 64, 65], ids="len{}".format)
def test_lengths_around_a_tile(device: torch.device, length: int) -> None:
    torch.manual_seed(length)
    check(make_case([length], [2], device))


@pytest.mark.parametrize("group", [1, 3, *slow(4, 8)], ids="group{}".format)
def test_query_heads_per_kv_head(device: torch.device, group: int) -> None:
    torch.manual_seed(group)
    check(make_case([40, 0, 33, 0], [5, 0, 1, 2], device, group=group))


@each_value(dim=[64, 80, *slow(96, 128)], dtype=[torch.float32, torch.float16])
def test_head_dims(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    check(make_case([65, 1], [3, 1], device, dtype=dtype, dim=dim))


@each_value(shift=[0, 4], window=[0, 1, 40], softcap=[0.0, 5.0])
def test_index_window_and_softcap(device: torch.device, shift: int, window: int, softcap: float) -> None:
    torch.manual_seed(window)
    case = make_case([70, 34], [4, 2], device, shift=shift, num_kv_heads=1, spread=3.0)
    check(case, window=window, softcap=softcap)


def test_more_queries_than_a_tile_and_fewer_entries_than_a_row(device: torch.device) -> None:
    torch.manual_seed(1)
    case = make_case([90], [30], device, group=2, num_kv_heads=1)
    check(case)
    check(case, width=17)


def test_queries_of_no_request_are_left_out(device: torch.device) -> None:
    torch.manual_seed(2)
    case = make_case([20], [4], device)
    shorter = case._replace(q_starts=torch.tensor([0, 2], dtype=torch.int32, device=device))
    check(shorter)
    lse = attention_lse(*shorter, max_q_len=4)
    assert (lse[2:] == float("-inf")).all()


def test_the_reference_is_softmax() -> None:
    torch.manual_seed(3)
    case = make_case([50], [3], "cpu", group=1, num_kv_heads=2)._replace(
        query_positions=torch.tensor([49, 20, 0], dtype=torch.int32)
    )
    scores, lse = attention_scores_reference(*case.double(), width=50)
    slots = case.kv.index[case.rows[0], :50].long()
    k = case.kv.k[slots].double()
    expected = torch.zeros(50, dtype=torch.float64)
    for query, end in enumerate([49, 20, 0]):
        for head in range(2):
            own = k[: end + 1, head] @ case.q[query, head].double() * 0.125
            expected[: end + 1] += own.softmax(0)
            torch.testing.assert_close(lse[query, head].exp2(), own.exp().sum())
    torch.testing.assert_close(scores[0], expected)
    assert scores.sum().item() == pytest.approx(6.0)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    case = make_case([5, 6], [1, 1], device)
    for match, bad, settings in [
        ("a multiple of", case._replace(q=case.q[:, :5]), {}),
        ("q_starts must be contiguous int32", case._replace(q_starts=case.q_starts.long()), {}),
        ("query_positions must be contiguous", case._replace(query_positions=case.query_positions[:1]), {}),
        ("scale must be positive", case, {"options": AttentionOptions(scale=0.0)}),
        ("max_q_len", case, {"max_q_len": -1}),
        ("width", case, {"width": -1}),
    ]:
        with pytest.raises(ValueError, match=match):
            attention_scores(*bad, **{"max_q_len": 1, "width": 6, **settings})


def test_stay_operators_under_torch_compile(device: torch.device) -> None:
    torch.manual_seed(4)
    case = make_case([20, 5], [2, 1], device)
    lse, out = torch.full((3, 6), float("-inf"), device=device), torch.zeros(2, 20, device=device)
    variants = Softcap(3.0), SinkLogits(torch.zeros(6, device=device))
    given = case.q, case.kv, ScoredBatch(*case[2:])
    options = AttentionOptions(0.125).plus(*variants)
    for written in (torch.zeros(2, 0, device=device), out):
        operator = torch.ops.lightkv.attention_scores.default
        torch.library.opcheck(operator, _attention_scores.flat(*given, lse, written, 2, options))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 3, 4, 8], ids="group{}".format)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256], ids="dim{}".format)
def test_bfloat16(group: int, dim: int) -> None:
    torch.manual_seed(group)
    case = make_case([1000, 1, 64, 333], [200, 1, 7, 64], "cuda", dtype=torch.bfloat16, group=group, dim=dim)
    check(case)
    check(case, window=100, softcap=20.0)


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = make_case([100, 7], [10, 3], "cuda", dtype=torch.bfloat16)
    attention_scores(*case, max_q_len=10, width=100)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_scores(*case, max_q_len=10, width=100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
