"""Tests of packed linear layers against nn.Linear, and of packing a whole model."""

import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightkv.integrations.model.linears import Linears, linear_forward, prepare_linears
from lightkv.integrations.weights import onednn
from lightkv.integrations.weights.onednn import LONG_PIECES, MAX_TOKENS, padded_size, piece_sizes
from lightkv.integrations.weights.plain import PlainWeight
from lightkv.integrations.weights.weight_part import WeightPart

torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "LEAST_NUMBERS", 1)


def packed_layer(linear: nn.Linear) -> WeightPart:
    weight = PlainWeight.load(linear)
    weight.pack()
    return WeightPart(weight, 0, linear.out_features)


def pack(model: nn.Module) -> Linears:
    return prepare_linears(model, packed=True)


class Tied(nn.Module):
    """An embedding tied to the head, and two layers in between, one of which occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24, bias=False)])
        self.again = self.layers[0]
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in (*self.layers, self.again):
            x = x + layer(x).tanh()
        y: torch.Tensor = self.head(x)
        return y


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", [(64, 64), (37, 129), (1, 7), (1000, 33)], ids=str)
def test_computes_the_same_as_the_plain_layer(shape: tuple[int, int], bias: bool) -> None:
    out_features, in_features = shape
    linear = nn.Linear(in_features, out_features, bias=bias)
    packed = packed_layer(linear)
    with torch.inference_mode():
        for num_tokens in (0, 1, 8, 17, 33, 512, 513, 1100, 2048, 3601):
            x = torch.randn(1, num_tokens, in_features)
            got = packed(x)
            assert got.shape == (1, num_tokens, out_features)
            torch.testing.assert_close(got, linear(x), rtol=1e-4, atol=2e-6)
    assert torch.equal(packed.weight, linear.weight)


def test_takes_any_strides_and_dimensions() -> None:
    linear = nn.Linear(18, 11)
    packed = packed_layer(linear)
    with torch.no_grad():
        for x in (
            torch.randn(18),
            torch.randn(2, 3, 5, 18),
            torch.randn(1, 18, 9).transpose(1, 2),
            torch.randn(1, 9, 36)[..., ::2],
            torch.randn(1, 9, 18)[:, -1:],
        ):
            torch.testing.assert_close(packed(x), linear(x), rtol=1e-4, atol=2e-6)


def test_at_most_an_eighth_is_padding() -> None:
    for num_tokens in range(1, MAX_TOKENS + 1):
        assert num_tokens <= padded_size(num_tokens) <= min(num_tokens * 9 / 8, MAX_TOKENS)
    assert [padded_size(num_tokens) for num_tokens in range(17)] == list(range(17))
    for num_tokens in range(5000):
        sizes = piece_sizes(num_tokens)
        assert sum(sizes) == num_tokens
        assert sizes == sorted(sizes, reverse=True)
        assert all(size in LONG_PIECES or size <= MAX_TOKENS for size in sizes)
        assert all(padded_size(size) == size for size in sizes[:-1])


class Products(TorchDispatchMode):
    """Records the numbers of tokens that oneDNN computes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.sizes.add(args[0].numel() // args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def test_onednn_computes_few_different_numbers_of_tokens() -> None:
    packed = packed_layer(nn.Linear(4, 3))
    with Products() as products, torch.no_grad():
        for num_tokens in (*range(1, 70), *range(70, 1100, 23), 2048, 3601):
            packed(torch.randn(1, num_tokens, 4))
    expected = {padded_size(num_tokens) for num_tokens in range(1, MAX_TOKENS + 1)}
    assert len(expected) == 56
    assert {1, 16, 18, 64, MAX_TOKENS, *LONG_PIECES} <= products.sizes <= {*expected, *LONG_PIECES}


GROWTH = """
from pathlib import Path

import torch

from lightkv.integrations.weights.plain import PlainWeight


def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


torch.set_num_threads(1)
weight = PlainWeight(torch.randn(64, 64), None)
weight.pack()
x = torch.randn(600, 64)
with torch.inference_mode():
    weight.matmul(x)
    before = anonymous()
    for num_tokens in range(1, 601):
        weight.matmul(x[:num_tokens])
print(anonymous() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_every_number_of_tokens() -> None:
    child = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert float(child.stdout) < 100  # MiB; without padding it was 331


def test_a_model_keeps_its_outputs_and_frees_its_weights() -> None:
    model = Tied().eval()
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        expected = model(ids)
    freed = [weakref.ref(layer.weight) for layer in model.layers]
    tied = model.embedding.weight
    linears = pack(model)
    assert linears.num_placed == 3
    (line,) = linears.lines
    assert line.startswith("packed 3 linear layers of 0.0 MiB for the CPU in ")
    assert [weight() for weight in freed] == [None, None]
    assert model.embedding.weight is tied
    assert type(model.head) is WeightPart
    assert model.again is model.layers[0]
    assert not any(module.training for module in model.modules())
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=2e-6)


def test_packing_again_changes_and_reports_nothing() -> None:
    model = Tied()
    pack(model)
    before = list(model.modules())
    again = pack(model)
    assert (again.num_placed, again.lines) == (0, [])
    assert list(model.modules()) == before


def test_other_types_and_subclasses_are_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    half, double, own = nn.Linear(8, 8).half(), nn.Linear(8, 8).double(), Doubling(8, 8)
    elsewhere = nn.Linear(8, 8, device="meta")
    model = nn.Sequential(half, double, own, elsewhere)
    assert pack(model).num_placed == 0
    assert list(model) == [half, double, own, elsewhere]


def test_a_layer_with_a_hook_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    calls: list[nn.Module] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(module))
    assert pack(model).num_placed == 1
    with torch.no_grad():
        model(torch.ones(1, 8))
    assert calls == [model[0]]


def test_without_onednn_the_model_stays_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = Tied()
    linears = pack(model)
    assert linears.num_placed == 0
    (line,) = linears.lines
    assert "no oneDNN" in line
    assert not any(isinstance(module, WeightPart) for module in model.modules())


def test_smaller_weights_stay_plain_and_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "LEAST_NUMBERS", 24 * 24 + 1)
    model = Tied().eval()
    weights = [layer.weight for layer in model.layers]
    ids = [torch.arange(num_tokens)[None] % 50 for num_tokens in (0, 1, 64, 65)]
    with torch.inference_mode():
        expected = [model(one) for one in ids]
    assert pack(model).num_placed == 1
    assert type(model.head) is WeightPart
    assert all(layer.weight is weight for layer, weight in zip(model.layers, weights, strict=True))
    assert all(layer.forward.func is linear_forward for layer in model.layers)
    with torch.inference_mode():
        for one, own in zip(ids, expected, strict=True):
            torch.testing.assert_close(model(one), own, rtol=1e-4, atol=2e-6)


def test_a_part_of_the_outputs_is_a_weight_of_its_own() -> None:
    layer = nn.Linear(5, 7)
    part = PlainWeight.load(layer).shard(2, 3)
    assert torch.equal(part.dense(), layer.weight[2:5])
    assert torch.equal(part.bias, layer.bias[2:5])
    assert part.nbytes == 4 * (3 * 5 + 3)
    assert part.dense().data_ptr() != layer.weight[2:5].data_ptr()
