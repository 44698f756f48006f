"""Compares `attention_scores` with softmax, head by head.

Slots are shuffled, every free slot holds NaN, and slot 0 holds large finite garbage: a wrong slot or a missing
mask makes a test fail.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.attention import attention_reference
from lightkv.triton_kernels.attention.attention_scores import attention_scores
from lightkv.triton_kernels.attention.lookups import Pages
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants import Softcap, Window
from tests.support.combinations import each_value


class Case(NamedTuple):
    """The arguments of the operators, in order."""

    q: Tensor
    kv: PagedKV
    rows: Tensor
    q_starts: Tensor
    query_positions: Tensor
    lengths: Tensor


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


def expected_scores(case: Case, window: int, softcap: float, width: int) -> Tensor:
    """Computes what `attention_scores` computes, query by query and head by head, in float64."""
    group, scores = case.q.shape[1] // case.kv.k.shape[1], torch.zeros(len(case.rows), width).double()
    bounds = case.q_starts.tolist()
    for request, (row, length) in enumerate(zip(case.rows.tolist(), case.lengths.tolist(), strict=True)):
        entries = torch.arange(length, device=case.q.device)
        k, _ = case.kv.read(case.kv.lookup.slots_reference(case.kv.index, row, entries))
        for query in range(bounds[request], bounds[request + 1]):
            end = int(case.query_positions[query]) + 1
            begin = max(end - window, 0) if window else 0
            for head in range(case.q.shape[1] if end <= length else 0):
                own = k[begin:end, head // group].double() @ case.q[query, head].double()
                own = own * case.q.shape[2] ** -0.5
                own = softcap * torch.tanh(own / softcap) if softcap else own
                scores[request, begin:end] += own.softmax(0)[: max(width - begin, 0)].cpu()
    return scores.to(case.q.device)


def check(case: Case, *, window: int = 0, softcap: float = 0.0) -> None:
    options = AttentionOptions().plus(
        Window(window) if window else None, Softcap(softcap) if softcap else None
    )
    width = int(case.lengths.max()) + 2
    expected = expected_scores(case, window, softcap, width)
    scores = attention_scores(*case, options, width=width)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-5, atol=2e-5)
    assert torch.equal(attention_scores(*case, options, width=17), scores[:, :17])


@pytest.mark.parametrize("group", [1, 3], ids="group{}".format)
def test_query_heads_per_kv_head(device: torch.device, group: int) -> None:
    torch.manual_seed(group)
    check(make_case([40, 0, 33, 17], [5, 0, 1, 2], device, group=group))


@each_value(dim=[64, 80], dtype=[torch.float32, torch.float16])
def test_head_dims(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    check(make_case([65, 1], [3, 1], device, dtype=dtype, dim=dim))


@each_value(shift=[0, 4], window=[0, 1, 40], softcap=[0.0, 5.0])
def test_index_window_and_softcap(device: torch.device, shift: int, window: int, softcap: float) -> None:
    torch.manual_seed(window)
    case = make_case([70, 34], [4, 2], device, shift=shift, num_kv_heads=1, spread=3.0)
    check(case, window=window, softcap=softcap)


def test_more_queries_than_a_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(attention_reference, "QUERY_TILE", 16)
    check(make_case([90], [40], device, group=2, num_kv_heads=1))


def test_queries_of_no_request_are_left_out(device: torch.device) -> None:
    torch.manual_seed(2)
    case = make_case([20], [4], device)
    check(case._replace(q_starts=torch.tensor([0, 2], dtype=torch.int32, device=device)))


def test_a_request_adds_up_to_its_queries_and_heads(device: torch.device) -> None:
    torch.manual_seed(3)
    case = make_case([50], [3], device, group=1, num_kv_heads=2)
    assert attention_scores(*case, width=50).sum().item() == pytest.approx(6.0)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    case = make_case([5, 6], [1, 1], device)
    for match, bad, settings in [
        ("a multiple of", case._replace(q=case.q[:, :5]), {}),
        ("q_starts must be contiguous int32", case._replace(q_starts=case.q_starts.long()), {}),
        ("query_positions must be contiguous", case._replace(query_positions=case.query_positions[:1]), {}),
        ("scale must be positive", case, {"options": AttentionOptions(scale=0.0)}),
        ("width", case, {"width": -1}),
    ]:
        with pytest.raises(ValueError, match=match):
            attention_scores(*bad, **{"width": 6, **settings})
