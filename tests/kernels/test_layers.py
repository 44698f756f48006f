"""Compares the kernels of a layer's parts, norms, gated activations and products of few tokens, with their
references in float64 and with torch's own modules."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layers.gated_activation import (
    ACTIVATIONS,
    gated_activation,
    gated_activation_reference,
)
from lightkv.triton_kernels.layers.linear import linear, linear_launch, tickets_for
from lightkv.triton_kernels.layers.residual_norm import residual_norm, residual_norm_reference
from lightkv.triton_kernels.norms import Norm
from tests.support.combinations import each_value, slow
from tests.support.rounding import TOLERANCE, close, dtypes


def norms(dim: int, device: torch.device, dtype: torch.dtype) -> list[Norm | None]:
    weight, bias = torch.randn(2, dim, device=device).to(dtype)
    return [
        None,
        Norm(weight, None, 1e-5),
        Norm(weight, None, 1e-6, plus_one=True, rounded_before=False),
        Norm(weight, bias, 1e-5, centred=True, rounded_before=False),
        Norm(None, None, 1e-5, rounded_before=False),
    ]


@each_value(has_residual=[False, True], dim=[16, 100, 576])
def test_residual_norm(device: torch.device, dim: int, has_residual: bool) -> None:
    torch.manual_seed(dim)
    for dtype in dtypes(device):
        x, residual = (torch.randn(2, 3, dim, device=device) * 3).to(dtype).unbind(0)
        for norm in norms(dim, device, dtype):
            for post in norms(dim, device, dtype)[::3]:
                for scale in (1.0, 0.22):
                    before = residual if has_residual else None
                    hidden, normed = residual_norm(x, before, norm, post=post, scale=scale)
                    wanted = residual_norm_reference(x, before, norm, post=post, scale=scale)
                    assert hidden.dtype == normed.dtype == dtype
                    close(hidden, wanted[0])
                    close(normed, wanted[1])
                    if norm is None:
                        assert normed is hidden


def test_a_sum_is_rounded_before_it_is_normalised(device: torch.device) -> None:
    """The hidden row of the next layer and the normalised one must be of the same numbers."""
    x = torch.full((1, 64), 2.0**-12, dtype=torch.float16, device=device)
    residual = torch.ones(1, 64, dtype=torch.float16, device=device)
    residual[0, :32] = 4.0
    hidden, normed = residual_norm(x, residual, Norm(None, None, 0.0))
    assert torch.equal(hidden, residual)  # the addend is below half a unit in the last place
    alone = residual_norm(residual, None, Norm(None, None, 0.0))[1]
    assert torch.equal(normed, alone)


def test_rows_may_have_a_stride(device: torch.device) -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 96, device=device)
    weight = torch.randn(48, device=device)
    hidden, normed = residual_norm(wide[:, :48], wide[:, 48:], Norm(weight, None, 1e-6))
    close(hidden, wide[:, :48] + wide[:, 48:])
    close(normed, functional.rms_norm(hidden, (48,), weight, 1e-6))
    close(gated_activation(wide[:, :64], "silu"), functional.silu(wide[:, :32]) * wide[:, 32:64])


def test_residual_norm_refuses_what_does_not_fit(device: torch.device) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match="alike"):
        residual_norm(x, x[:1], None)
    with pytest.raises(ValueError, match="alike"):
        residual_norm(x, x.half(), None)
    with pytest.raises(ValueError, match="stride"):
        residual_norm(torch.randn(8, 2, device=device).T, None, None)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(device: torch.device, activation: str) -> None:
    torch.manual_seed(1)
    for dtype in dtypes(device):
        gate_up = (torch.randn(3, 2, 2 * 1100, device=device) * 4).to(dtype)
        gate_up[0, 0, :4] = torch.tensor([-60.0, 60.0, 0.0, -0.0])
        out = gated_activation(gate_up, activation)
        assert out.shape == (3, 2, 1100)
        close(out, gated_activation_reference(gate_up.double(), activation))


def test_gated_activation_refuses_what_it_does_not_know(device: torch.device) -> None:
    with pytest.raises(ValueError, match="silu, gelu_tanh, gelu"):
        gated_activation(torch.randn(1, 8, device=device), "relu")
    with pytest.raises(ValueError, match="even"):
        gated_activation(torch.randn(1, 7, device=device), "silu")


def assert_product(x: Tensor, weight: Tensor, bias: Tensor | None, tickets: Tensor | None) -> None:
    actual = linear(x, weight, bias, tickets)
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[x.dtype] / 4, f"{tuple(x.shape)} with {tuple(weight.shape)}: {error}"
    if tickets is not None:
        assert not tickets.any()


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 65, *slow(2, 33, 64)])
def test_products_of_few_tokens(device: torch.device, num_tokens: int) -> None:
    """The interpreter has small tiles, so that here too several programs share rows."""
    torch.manual_seed(num_tokens)
    shapes = [(32, 256), (48, 272), (20, 40)]
    if device.type == "cuda":
        shapes = [(64, 4096), (6144, 4096), (128256, 256), (1000, 72), (576, 576)]
    for num_rows, dim in shapes:
        for dtype in dtypes(device)[-1:]:
            x = torch.randn(num_tokens, dim, device=device).to(dtype)
            weight = (torch.randn(num_rows, dim, device=device) * dim**-0.5).to(dtype)
            bias = torch.randn(num_rows, device=device).to(dtype)
            tickets = tickets_for(weight)
            for _ in range(2):  # the tickets serve again
                assert_product(x, weight, bias, tickets)
            assert_product(x[None], weight, None, None)


def test_rows_shared_by_programs_give_the_same_bits_each_time(device: torch.device) -> None:
    torch.manual_seed(3)
    num_rows, dim = (1024, 4096) if device.type == "cuda" else (16, 256)
    launch = linear_launch(tuning.device_class(device), 8, num_rows, dim, 2)
    assert launch is None or launch.splits > 1
    x = torch.randn(8, dim, device=device).half()
    weight = torch.randn(num_rows, dim, device=device).half()
    tickets = tickets_for(weight)
    first = linear(x, weight, None, tickets)
    for _ in range(20 if device.type == "cuda" else 2):
        assert torch.equal(linear(x, weight, None, tickets), first)


@pytest.mark.gpu
def test_a_chain_of_early_launches_is_right(device: torch.device) -> None:
    """Each kernel begins while the one before still runs, so a missing wait would show as a wrong product."""
    torch.manual_seed(4)
    up = (torch.randn(40, 8192, 1024, device=device) * 0.03).bfloat16()
    down = (torch.randn(40, 1024, 4096, device=device) * 0.015).bfloat16()
    weight = torch.ones(1024, device=device).bfloat16()
    tickets = tickets_for(up[0])
    for num_tokens in (1, 7, 64):
        x = torch.randn(num_tokens, 1024, device=device).bfloat16()

        def run(x: Tensor = x) -> list[Tensor]:
            hidden, steps = x, []
            delta = torch.zeros_like(x)
            for i in range(40):
                hidden, normed = residual_norm(delta, hidden, Norm(weight, None, 1e-5))
                active = gated_activation(linear(normed, up[i], None, tickets), "silu")
                delta = linear(active, down[i], None, tickets)
                steps.append((hidden, normed, active, delta))
            return steps

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps = run()
        for _ in range(5):
            graph.replay()
            torch.cuda.synchronize()
            for i, (hidden, normed, active, delta) in enumerate(steps):
                close(normed, functional.rms_norm(hidden.float(), (1024,), None, 1e-5))
                gate, value = functional.linear(normed.float(), up[i].float()).bfloat16().chunk(2, -1)
                close(active, functional.silu(gate.float()) * value.float())
                close(delta, functional.linear(active.float(), down[i].float()))
