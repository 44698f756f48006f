"""Compares the products of experts with their reference: both layouts of weights, gates, biases, experts
without rows, rows of no expert, one token and many."""

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layers.clamped_gate import ClampedGate
from lightkv.triton_kernels.layers.expert_products import (
    ExpertWeights,
    Gate,
    Load,
    down_product,
    expert_launch,
    order_rows,
    product_reference,
    up_product,
)
from tests.support.rounding import TOLERANCE, dtypes

CLAMPED = ClampedGate(1.702, 7.0, 1.0, interleaved=True)
HALVES = ClampedGate(1.702, 1.0, 1.0, interleaved=False)
HOPPER = tuning.DeviceClass(132, 227 * 1024, 9)


def weights(
    shape: tuple[int, int, int], is_transposed: bool, like: Tensor, gate: Gate = None, has_bias: bool = True
) -> ExpertWeights:
    """Returns random weights `[E, N, K]`, which lie in memory as `[E, K, N]` if `is_transposed`."""
    num_experts, num_outputs, dim = shape
    weight = torch.randn(shape, device=like.device) * dim**-0.5
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if is_transposed else weight
    bias = torch.randn(num_experts, num_outputs, device=like.device).to(like.dtype) if has_bias else None
    return ExpertWeights(weight.to(like.dtype), bias, gate)


def check(x: Tensor, ids: Tensor, up: ExpertWeights, down: ExpertWeights) -> None:
    """Compares both products with the reference in float32, whose gate is that of the rounded outputs."""
    num_experts = len(up.weight)
    load = Load(ids.numel(), num_experts, x.dtype, up.weight.stride(-1) != 1)
    launch = expert_launch(tuning.device_class(x.device), load)
    rows = order_rows(ids, num_experts, launch)
    inner = up_product(x, up, rows, launch)
    found = down_product(inner, down, rows, launch)
    places = torch.arange(ids.numel(), device=x.device) if rows.order is None else rows.order.places
    inner = inner[places.view(ids.shape)]
    is_ours = ids < num_experts
    tolerance = 4 * TOLERANCE[x.dtype]
    for y, wanted in (
        (inner, product_reference(x, up, rows)),
        (found, product_reference(inner.masked_fill(~is_ours[..., None], 0.0), down, rows)),
    ):
        assert y.dtype == x.dtype
        torch.testing.assert_close(y[is_ours], wanted[is_ours], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("gate", [None, "silu", CLAMPED, HALVES], ids=["none", "silu", "clamped", "halves"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["", "transposed"])
def test_products(is_transposed: bool, gate: Gate, device: torch.device) -> None:
    """One token, as many as make tails of tiles, and more experts than rows; the sizes are no whole blocks."""
    torch.manual_seed(0)
    dtype = dtypes(device)[-1]
    for num_tokens, num_experts in ((1, 8), (3, 20), (19, 4)):
        x = torch.randn(num_tokens, 2 * 40, device=device).to(dtype)[:, :40]
        ids = torch.randn(num_tokens, num_experts + 1, device=device).topk(2).indices
        up = weights((num_experts, 48, 40), is_transposed, x, gate, has_bias=num_tokens > 1)
        check(x, ids, up, weights((num_experts, 40, 48 if gate is None else 24), is_transposed, x))


def test_products_in_float32(device: torch.device) -> None:
    """They are exact to its rounding, and not to that of TF32."""
    torch.manual_seed(0)
    for num_tokens in (1, 20):
        x = torch.randn(num_tokens, 64, device=device)
        ids = torch.randint(0, 4, (num_tokens, 1), device=device)
        check(x, ids, weights((4, 64, 64), False, x, "silu"), weights((4, 32, 32), False, x))


def test_all_rows_of_one_expert_and_of_none(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 32, device=device).to(dtypes(device)[-1])
    up, down = weights((3, 32, 32), False, x, "silu"), weights((3, 32, 16), False, x)
    check(x, torch.full((40, 1), 1, device=device), up, down)
    check(x, torch.full((40, 1), 3, device=device), up, down)


def test_products_that_do_not_fit_are_refused(device: torch.device) -> None:
    x, ids = torch.zeros(3, 32, device=device), torch.zeros(3, 1, dtype=torch.int64, device=device)
    up = weights((4, 32, 32), False, x)
    launch = expert_launch(tuning.device_class(device), Load(3, 4, x.dtype, False))
    rows = order_rows(ids, 4, launch)
    with pytest.raises(ValueError, match="one for each token"):
        up_product(x[:2], up, rows, launch)
    with pytest.raises(ValueError, match="a row for each"):
        down_product(x[:2], up, rows, launch)
    with pytest.raises(ValueError, match="the weights' dtype"):
        up_product(x.half(), up, rows, launch)
    ordered = launch._replace(block_t=16, is_ordered=True)
    many = ids.new_zeros(40, 1)
    for wrong in (order_rows(many, 4, ordered._replace(block_t=32)), order_rows(many, 5, ordered)):
        with pytest.raises(ValueError, match="in tiles of 16; give rows that order_rows made"):
            up_product(x.new_zeros(40, 32), up, wrong, ordered)


def test_a_launch_fits_the_device() -> None:
    many = Load(8192, 128, torch.bfloat16, is_transposed=False)
    for device in (HOPPER, HOPPER._replace(major=8, shared_memory=99 * 1024)):
        for num_pairs in (8, 16, 256, 1024, 2048, 4096, 8192):
            launch = expert_launch(device, many._replace(num_pairs=num_pairs))
            for one in (launch.up, launch.down):
                stage = 2 * (one.block_n + launch.block_t) * one.block_k
                assert launch.block_t == 1 or stage * one.num_stages <= device.shared_memory


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 32, 100, 256, 1024])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_products_of_published_shapes(name: str, num_tokens: int, device: torch.device) -> None:
    torch.manual_seed(0)
    is_qwen = name == "qwen3-30b-a3b"
    num_experts, top_k, dim, inner = (128, 8, 2048, 768) if is_qwen else (32, 4, 2880, 2880)
    x = torch.randn(num_tokens, dim, device=device).bfloat16()
    up = weights((num_experts, 2 * inner, dim), not is_qwen, x, "silu" if is_qwen else CLAMPED, not is_qwen)
    down = weights((num_experts, dim, inner), not is_qwen, x, None, not is_qwen)
    check(x, torch.randn(num_tokens, num_experts, device=device).topk(top_k).indices, up, down)
