"""Packed linear layers against nn.Linear, and what packing does to a model."""

import weakref

import pytest
import torch
from torch import nn

from lightkv.router.packed_linear import PackedLinear, pack_linears

torch.manual_seed(0)


def quiet(line: str) -> None:
    pass


class Tied(nn.Module):
    """An embedding whose weight is the head's too, two layers between, one of them in two places."""

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
def test_computes_what_the_plain_layer_does(shape: tuple[int, int], bias: bool) -> None:
    out_features, in_features = shape
    linear = nn.Linear(in_features, out_features, bias=bias)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        for num_tokens in (0, 1, 8, 33, 512):
            x = torch.randn(1, num_tokens, in_features)
            got = packed(x)
            assert got.shape == (1, num_tokens, out_features)
            torch.testing.assert_close(got, linear(x), rtol=1e-4, atol=2e-6)
    assert torch.equal(packed.weight, linear.weight)


def test_takes_any_strides_and_dimensions() -> None:
    linear = nn.Linear(18, 11)
    packed = PackedLinear(linear)
    with torch.no_grad():
        for x in (
            torch.randn(18),
            torch.randn(2, 3, 5, 18),
            torch.randn(1, 18, 9).transpose(1, 2),
            torch.randn(1, 9, 36)[..., ::2],
            torch.randn(1, 9, 18)[:, -1:],
        ):
            torch.testing.assert_close(packed(x), linear(x), rtol=1e-4, atol=2e-6)


def test_a_model_keeps_its_outputs_and_frees_its_weights() -> None:
    model = Tied().eval()
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        expected = model(ids)
    freed = [weakref.ref(layer.weight) for layer in model.layers]
    tied = model.embedding.weight
    lines: list[str] = []
    assert pack_linears(model, lines.append) == 3
    (line,) = lines
    assert line.startswith("packed 3 linear layers for the CPU in ")
    assert [weight() for weight in freed] == [None, None]
    assert model.embedding.weight is tied
    assert type(model.head) is PackedLinear
    assert model.again is model.layers[0]
    assert not any(module.training for module in model.modules())
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=2e-6)


def test_packing_again_changes_and_reports_nothing() -> None:
    model = Tied()
    pack_linears(model, quiet)
    before = list(model.modules())
    lines: list[str] = []
    assert pack_linears(model, lines.append) == 0
    assert lines == []
    assert list(model.modules()) == before


def test_other_types_and_subclasses_stay() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    half, double, own = nn.Linear(8, 8).half(), nn.Linear(8, 8).double(), Doubling(8, 8)
    elsewhere = nn.Linear(8, 8, device="meta")
    model = nn.Sequential(half, double, own, elsewhere)
    assert pack_linears(model, quiet) == 0
    assert list(model) == [half, double, own, elsewhere]


def test_without_onednn_the_model_stays_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = Tied()
    lines: list[str] = []
    assert pack_linears(model, lines.append) == 0
    assert len(lines) == 1
    assert "no oneDNN" in lines[0]
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
