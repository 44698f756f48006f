"""Compares the kernels of mixtures of experts with their references: the choice, the order by expert, copied
rows, the clamped gate and the weighted sum. The products are in test_expert_products.py."""

from itertools import product

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.layers import expert_order as kernels
from lightkv.triton_kernels.layers.clamped_gate import ClampedGate, clamped_gate, clamped_gate_reference
from lightkv.triton_kernels.layers.expert_choice import (
    SCORINGS,
    Choice,
    expert_choice,
    expert_choice_reference,
)
from lightkv.triton_kernels.layers.expert_order import (
    ExpertOrder,
    ExpertRows,
    OrderLaunch,
    expert_order,
    expert_order_reference,
)
from lightkv.triton_kernels.layers.expert_rows import (
    rows_by_expert,
    rows_by_expert_reference,
    weighted_sum,
    weighted_sum_reference,
)
from tests.support.combinations import slow_cases
from tests.support.rounding import TOLERANCE, dtypes


def close(actual: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def softmax(top_k: int, dtype: torch.dtype = torch.float32, normalised: bool = True) -> Choice:
    return Choice(top_k, "softmax", normalised, None, 1.0, dtype)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_expert_choice(scoring: str, device: torch.device) -> None:
    torch.manual_seed(0)
    for dtype, (num_experts, top_k) in zip(
        (dtypes(device) * 2)[:4], [(4, 2), (60, 8), (33, 1), (5, 5)], strict=True
    ):
        for normalised in (False, True):
            logits = (3 * torch.randn(2, num_experts, device=device)).to(dtype)
            bias = torch.randn(num_experts, device=device) if normalised else None
            choice = Choice(top_k, scoring, normalised, bias, 1.0 + normalised, dtype)
            (weights, ids), (wanted, expected) = (
                choose(logits, choice) for choose in (expert_choice, expert_choice_reference)
            )
            assert torch.equal(ids, expected)
            close(weights, wanted)
            assert weights.dtype == dtype


def test_the_lowest_index_wins_among_equal_scores(device: torch.device) -> None:
    """Also of zeros with either sign. Experts whose softmax is 0 are chosen by their logits."""
    logits = torch.full((3, 40), -1.0, device=device)
    logits[0, [7, 3, 39]] = 2.0
    logits[1, [5, 2]] = torch.tensor([0.0, -0.0], device=device)
    logits[2] = torch.arange(40.0) * 200
    for choose in (expert_choice, expert_choice_reference):
        weights, ids = choose(logits, softmax(5))
        assert ids.tolist() == [[3, 7, 39, 0, 1], [2, 5, 0, 1, 3], [39, 38, 37, 36, 35]]
        assert weights[2].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_what_is_no_number_stays_within_the_experts(device: torch.device) -> None:
    """What computes with it reads memory by the ids."""
    logits = torch.tensor(
        [[float("nan")] * 6, [float("-inf")] * 6, [float("inf"), *[0.0] * 5]], device=device
    )
    for scoring in SCORINGS:
        choice = softmax(3)._replace(scoring=scoring, bias=torch.zeros(6, device=device))
        _, ids = expert_choice(logits, choice)
        assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in ids.tolist())


def test_choices_that_do_not_fit_are_refused(device: torch.device) -> None:
    logits = torch.zeros(2, 4, device=device)
    with pytest.raises(ValueError, match="5 of 4 experts"):
        expert_choice(logits, softmax(5))
    with pytest.raises(ValueError, match="softmax, sigmoid"):
        expert_choice(logits, softmax(2)._replace(scoring="relu"))
    with pytest.raises(ValueError, match="contiguous"):
        expert_choice(logits.T, softmax(2))


def chosen_by(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> Tensor:
    """Returns the experts of tokens, int64 `[T, top_k]`. One in `num_experts` + 1 is of another rank."""
    return torch.randn(num_tokens, num_experts + 1, device=device).topk(top_k).indices


def check_order(found: ExpertOrder, wanted: ExpertOrder, num_experts: int) -> None:
    """Asserts that two orders are the same, but for tiles that no expert has."""
    for name, ours, expected in zip(ExpertOrder._fields, found, wanted, strict=True):
        if ours is None or expected is None:
            assert ours is expected, name
            continue
        assert ours.dtype == expected.dtype
        assert ours.shape == expected.shape
        if name == "tiles":
            assert torch.equal(ours[:, 0], expected[:, 0])
            has_expert = expected[:, 0] < num_experts
            ours, expected = ours[has_expert, :3], expected[has_expert, :3]
        assert torch.equal(ours, expected), name


@pytest.mark.parametrize(
    ("sizes", "is_counted"),
    [
        ((1, 4, 2, 8), False),
        ((6, 2, 3, 1030), True),
        ((40, 20, 4, 24), False),
        ((150, 33, 2, 8), True),
        *slow_cases(((1, 4, 2, 8), True), ((6, 2, 3, 1030), False)),
        *slow_cases(((40, 20, 4, 24), True), ((150, 33, 2, 8), False)),
    ],
    ids=str,
)
def test_rows_come_by_expert_and_go_back_to_their_tokens(
    sizes: tuple[int, int, int, int],
    is_counted: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_counted:  # in chunks of three turns
        monkeypatch.setattr(kernels, "order_launch", lambda num_pairs: OrderLaunch(False, 64, 32, 4))
        monkeypatch.setattr(kernels, "_MOST_CHUNKS", 4)
    torch.manual_seed(sum(sizes))
    num_tokens, num_experts, top_k, dim = sizes
    ids = chosen_by(num_tokens, num_experts, top_k, device)
    for block in (None, 4):
        order = expert_order(ids, num_experts, block)
        check_order(order, expert_order_reference(ids, num_experts, block), num_experts)
    assert int(order.offsets[-1]) == int((ids < num_experts).sum())
    rows, places = ExpertRows(ids, num_experts, order), order.places.long()
    for dtype in dtypes(device)[-1:]:
        x = torch.randn(num_tokens, 2 * dim, device=device).to(dtype)[:, :dim]
        assert torch.equal(rows_by_expert(x, order), rows_by_expert_reference(x, order))
        y = torch.randn(num_tokens * top_k, dim, device=device).to(dtype)
        y[int(order.offsets[-1]) :] = float("nan")  # what products do not write
        weights = torch.rand(num_tokens, top_k, device=device)
        bias = torch.randn(num_experts, dim, device=device).to(dtype)
        for weight, added in ((weights, bias), (weights.to(dtype), None)):
            found = weighted_sum(y, rows, weight, added)
            close(found, weighted_sum_reference(y, rows, weight, added))
            assert torch.equal(weighted_sum(y[places], rows, weight, added), found)
            direct = y[places].double()
            direct = direct if added is None else direct + added.double()[ids.clamp(max=num_experts - 1)]
            direct = torch.where((ids < num_experts)[..., None], direct * weight.double()[..., None], 0.0)
            torch.testing.assert_close(found.double(), direct.sum(1), rtol=2e-2, atol=2e-2)


def test_a_step_without_tokens_has_no_rows(device: torch.device) -> None:
    x, ids = torch.zeros(0, 8, device=device), torch.zeros(0, 2, dtype=torch.int64, device=device)
    order = expert_order(ids, 4)
    assert rows_by_expert(x, order).shape == (0, 8)
    assert not order.offsets.any()
    assert weighted_sum(x, ExpertRows(ids, 4, order), x[:, :2], None).shape == (0, 8)
    assert expert_choice(x, softmax(2))[1].shape == (0, 2)


def test_rows_that_do_not_fit_are_refused(device: torch.device) -> None:
    x, ids = torch.zeros(3, 8, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="contiguous rows"):
        expert_order(ids.T, 4)
    order = expert_order(ids, 4)
    with pytest.raises(ValueError, match="row for each token"):
        rows_by_expert(x[:2], order)
    rows, y = ExpertRows(ids, 4, order), rows_by_expert(x, order)
    with pytest.raises(ValueError, match="float32 weights"):
        weighted_sum(y, rows, torch.zeros(3, 2, dtype=torch.float64, device=device), None)
    with pytest.raises(ValueError, match="one even length"):
        clamped_gate(y[:, :7], ClampedGate(1.0, 1.0, 1.0, True), order.experts, None)


def test_clamped_gate(device: torch.device) -> None:
    torch.manual_seed(0)
    experts = torch.tensor([0, 2, 1], dtype=torch.int32, device=device)
    for dtype, interleaved in product(dtypes(device), (True, False)):
        gate = ClampedGate(1.702, 7.0, float(interleaved), interleaved)
        gate_up, bias = ((8 * torch.randn(3, 2 * 1040, device=device)).to(dtype) for _ in range(2))
        gate_up[0, :4] = torch.tensor([-60.0, 60.0, 0.0, -0.0])
        for added in (bias, None):
            found = clamped_gate(gate_up, gate, experts, added)
            assert found.shape == (3, 1040)
            wanted = clamped_gate_reference(gate_up, gate, experts, added)
            torch.testing.assert_close(found, wanted, rtol=4 * torch.finfo(dtype).eps, atol=TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 2048, 8192])
def test_a_graph_follows_the_experts_of_each_replay(num_tokens: int, device: torch.device) -> None:
    """Of Qwen3-30B-A3B's shape, in bfloat16: choice, order, rows, and their sum."""
    torch.manual_seed(0)
    logits = torch.randn(num_tokens, 128, device=device).bfloat16()
    x = torch.randn(num_tokens, 2048, device=device).bfloat16()

    def run() -> tuple[Tensor, Tensor, ExpertOrder, Tensor, Tensor]:
        weights, ids = expert_choice(logits, softmax(8, torch.bfloat16))
        order = expert_order(ids, 128, 64)
        y = rows_by_expert(x, order)
        return weights, ids, order, y, weighted_sum(y, ExpertRows(ids, 128, order), weights, None)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids, order, y, summed = run()
    for _ in range(3):
        logits.normal_()
        x.normal_()
        graph.replay()
        wanted_weights, wanted_ids = expert_choice_reference(logits, softmax(8, torch.bfloat16))
        assert torch.equal(ids, wanted_ids)
        close(weights, wanted_weights)
        check_order(order, expert_order_reference(ids, 128, 64), 128)
        assert torch.equal(y, rows_by_expert_reference(x, order))
        close(summed, weighted_sum_reference(y, ExpertRows(ids, 128, order), weights, None))
