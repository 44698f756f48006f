"""Tests of products with weights in 8 and 4 bits, by kernels in triton_kernels/layers/ and by the library."""

import pytest
import torch
from torch import Tensor

from lightkv.integrations.weights.experts import QuantisedExperts
from lightkv.integrations.weights.float4 import Float4Weight
from lightkv.integrations.weights.fp8 import Fp8Weight
from lightkv.integrations.weights.int4 import Int4Weight
from lightkv.integrations.weights.quantised import QuantisedWeight
from lightkv.triton_kernels.layers.gated_activation import gated_activation
from lightkv.triton_kernels.layers.linear import tickets_for
from lightkv.triton_kernels.layers.quantised_linear import (
    MAX_TOKENS,
    QuantisedTensors,
    dequantised,
    fp8_rows,
    quantised_linear,
)

KINDS = ("blocks", "rows")


def tensors_of(kind: str, n: int, k: int, device: torch.device, group: int = 128) -> QuantisedTensors:
    """Returns random numbers with scales of which each is another one."""
    numbers = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    if kind == "blocks":
        scales = torch.rand(-(-n // group), k // group, device=device) + 0.5
        return QuantisedTensors(numbers, scales, None, (group, group))
    if kind == "rows":
        return QuantisedTensors(numbers, torch.rand(n, 1, device=device) + 0.5, None, (1, 0))
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    zeros = (
        torch.randint(0, 16, (n, k // group), dtype=torch.uint8, device=device) if "zeros" in kind else None
    )
    return QuantisedTensors(data, torch.rand(n, k // group, device=device) + 0.5, zeros, (1, group))


def dense(tensors: QuantisedTensors) -> Tensor:
    """Returns the weight in float64."""
    (rows, group), n, k = tensors.block, len(tensors.data), tensors.num_columns

    def spread(one: Tensor) -> Tensor:
        return one.double().repeat_interleave(rows, 0)[:n].repeat_interleave(group or k, 1)

    if tensors.data.dtype != torch.uint8:
        return tensors.data.double() * spread(tensors.scales)
    halves = tensors.data.view(n, -1, group // 2)
    numbers = torch.cat([halves & 15, halves >> 4], -1).view(n, k).double()
    zeros = 8.0 if tensors.zeros is None else spread(tensors.zeros)
    return (numbers - zeros) * spread(tensors.scales)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dense_weight(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    group, (n, k) = (128, (1024, 1536)) if device.type == "cuda" else (32, (48, 160))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tolerance = 1e-2 if device.type == "cuda" else 1e-6
    tensors = tensors_of(kind, n, k, device, group)
    weight, tickets = dense(tensors), tickets_for(tensors.data)
    close(dequantised(tensors, dtype), weight, tolerance)
    for num_tokens in (1, 3, 16) if device.type == "cpu" else (1, 2, 16, 33, 64):
        for bias in (None, torch.randn(n, device=device, dtype=dtype)):
            x = torch.randn(1, num_tokens, k, device=device).to(dtype)
            wanted = x.double() @ weight.t() + (0.0 if bias is None else bias.double())
            found = quantised_linear(x, tensors, bias, tickets)
            assert found is not None
            close(found, wanted, tolerance)
            out = torch.empty_like(found)
            assert quantised_linear(x, tensors, bias, tickets, out) is out
            assert torch.equal(out, found)
    assert not tickets.any()


def test_more_tokens_and_odd_sizes_have_no_kernel(device: torch.device) -> None:
    tensors = tensors_of("rows", 64, 128, device)
    x = torch.randn(MAX_TOKENS + 1, 128, device=device)
    assert quantised_linear(x, tensors, None, tickets_for(tensors.data)) is None
    odd = tensors_of("rows", 50, 128, device)
    assert quantised_linear(x[:2], odd, None, tickets_for(odd.data)) is None


@pytest.mark.parametrize("group", [128, 384])
def test_tokens_in_fp8_are_near_the_tokens(device: torch.device, group: int) -> None:
    x = torch.randn(5, 384, device=device)
    x[2] *= 1000
    rows, scales = fp8_rows(x, group)
    assert rows.shape == (16, 384)
    assert scales.shape == (16, 384 // group)
    assert scales.stride(0) == 1
    assert not rows[5:].float().any()
    found = rows[:5].double() * scales[:5].double().repeat_interleave(group, 1)
    share = 0.07 if device.type == "cuda" else 0.51  # the interpreter loses the carry of a rounding
    assert bool(((found - x.double()).abs() <= x.abs() * share + x.abs().amax(1, keepdim=True) * 2e-3).all())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activations_are_rounded_as_tokens_are(device: torch.device, activation: str) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    gate_up = torch.randn(5, 2 * 384, device=device).to(dtype)
    found = fp8_rows(gate_up, 128, activation)
    for one, other in zip(found, fp8_rows(gated_activation(gate_up, activation), 128), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_a_few_tokens_in_fp8_give_the_product_of_the_rounded_ones(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    group, (n, k) = (128, (1024, 1536)) if device.type == "cuda" else (32, (48, 160))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = tensors_of(kind, n, k, device, group)
    bias, tickets = torch.randn(n, device=device, dtype=dtype), tickets_for(tensors.data)
    for num_tokens in (2, 16) if device.type == "cpu" else (2, 16, 33, 64):
        x = torch.randn(num_tokens, k, device=device).to(dtype)
        rows, scales = rounded = fp8_rows(x, group if kind == "blocks" else k)
        of_x = rows.double() * scales.double().repeat_interleave(k // scales.shape[1], 1)
        wanted = of_x[:num_tokens] @ dense(tensors).t() + bias.double()
        found = quantised_linear(x, tensors, bias, tickets, rounded=rounded)
        assert found is not None
        assert found.dtype == dtype
        close(found, wanted, 1e-2 if device.type == "cuda" else 1e-5)
    assert not tickets.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_many_tokens_in_fp8(kind: str) -> None:
    tensors = tensors_of(kind, 1024, 1536, torch.device("cuda"))
    bias = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    weight = Fp8Weight(tensors, bias, torch.bfloat16)
    for num_tokens in (2, 64, 65, 100, 1000):
        x = torch.randn(num_tokens, 1536, device="cuda", dtype=torch.bfloat16)
        wanted = x.double() @ dense(tensors).t() + bias.double()
        found = weight.matmul(x)
        assert found.shape == wanted.shape
        error = float((found.double() - wanted).norm() / wanted.norm())
        assert error < 0.05
        exact = Fp8Weight(tensors, bias, torch.bfloat16)
        exact.rounds_input = False
        close(exact.matmul(x), wanted, 1e-2)
        gate_up = torch.randn(num_tokens, 2 * 1536, device="cuda", dtype=torch.bfloat16)
        gated = weight.gated(gate_up, "silu")
        assert (gated is None) == (kind == "rows")
        if gated is not None:
            assert torch.equal(gated, weight.matmul(gated_activation(gate_up, "silu")))


def float4(kind: str, n: int, k: int, dtype: torch.dtype) -> QuantisedWeight:
    """Returns a random weight in MXFP4 or nvfp4 on the GPU."""
    group, cuda = 32 if kind == "mxfp4" else 16, torch.device("cuda")
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=cuda)
    scales = torch.randint(120, 126, (n, k // group), dtype=torch.uint8, device=cuda)
    scales = scales.view(torch.float8_e8m0fnu) if kind == "mxfp4" else scales.float() / 128
    return Float4Weight(QuantisedTensors(data, scales, None, (1, group)), None, dtype)


def weight_of(kind: str, n: int, k: int, dtype: torch.dtype) -> QuantisedWeight:
    """Returns a random weight of a kind on the GPU."""
    if "fp4" in kind:
        return float4(kind, n, k, dtype)
    make = Fp8Weight if kind in ("blocks", "rows") else Int4Weight
    return make(tensors_of(kind, n, k, torch.device("cuda")), None, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["blocks", "rows", "int4", "int4 with zeros", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_library_multiplies_rows_with_their_experts(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, k, cuda = 192 if kind == "mxfp4" else 256, 384, torch.device("cuda")
    whole, is_transposed = weight_of(kind, 5 * n, k, dtype), kind == "mxfp4"
    weights = (whole.dense() if "fp4" in kind else dense(whole.tensors)).double().view(5, n, k)
    num_bytes = whole.nbytes
    experts = QuantisedExperts(whole, 5, is_transposed)
    assert experts.nbytes < 1.4 * (num_bytes + 5 * 64 * k)  # rows are padded to 128
    seen = experts.dense().transpose(1, 2) if is_transposed else experts.dense()
    close(seen, weights, 1e-2)
    for counts in ((3, 0, 17, 1, 0), (40, 33, 0, 90, 20), (0, 0, 0, 0, 1), (900, 1, 0, 0, 300)):
        offsets = torch.tensor(counts, device=cuda).cumsum(0).int()
        x = torch.randn(sum(counts) + 2, k, device=cuda).to(dtype)  # two rows belong to no expert
        found = experts.matmul(x, offsets)
        pieces = x[:-2].double().split(list(counts))
        wanted = torch.cat([piece @ one.t() for piece, one in zip(pieces, weights, strict=True)])
        close(found[:-2], wanted, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "int4 with zeros", "nvfp4"])
def test_the_library_multiplies_a_weight(kind: str) -> None:
    torch.manual_seed(0)
    weight = weight_of(kind, 320, 512, torch.bfloat16)
    weight.bias = torch.randn(320, device="cuda", dtype=torch.bfloat16)
    plain, num_bytes = weight.dense().double(), weight.nbytes
    assert weight.place()
    assert not weight.place()
    assert weight.nbytes < 1.4 * num_bytes
    close(weight.dense(), plain, 1e-2)
    for num_tokens in (1, 2, 33, 100, 1000):
        x = torch.randn(num_tokens, 512, device="cuda", dtype=torch.bfloat16)
        wanted = x.double() @ plain.t() + weight.bias.double()
        close(weight.matmul(x), wanted, 1e-2)
