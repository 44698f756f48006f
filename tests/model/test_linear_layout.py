"""Tests of choosing, by measuring, whether linear layers on a CPU are packed or plain."""

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightkv.integrations.model import cpu_linear, linears
from lightkv.integrations.model.cpu_linear import (
    Layout,
    PackedLinear,
    PlainLinear,
    Times,
    choose,
    measure,
    measured_sizes,
)
from lightkv.integrations.model.linears import JoinedPart, Linears, prepare_linears

torch.manual_seed(0)

Product = Callable[[Tensor, Tensor | None, Tensor], Tensor]

WIDTH = 256  # layers of this size are measured
PLAIN = Layout(False, (False, True, True), 1.5)


def pack(model: nn.Module) -> Linears:
    return prepare_linears(model, packed=True)


class Model(nn.Module):
    """A tied embedding and head, and square layers, one with a bias and one that occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(300, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=idx == 1) for idx in range(5))
        self.again = self.layers[0]
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in (*self.layers, self.again):
            x = x + layer(x).tanh()
        y: Tensor = self.head(x)
        return y


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], Layout()),
        # Packed is kept at equal times, and where plain is a little faster.
        ([Times(1, 1, 1)] * 3, Layout(True, (False, True, True), 1)),
        ([Times(1, 0.86, 0.86)] * 3, Layout(True, (False, True, True), 1 / 0.86)),
        ([Times(1, 0.84, 0.84)] * 3, Layout(False, (False, True, True), 1 / 0.84)),
        # Sizes count alike, relative to packed, however long they take.
        ([Times(1, 0.5, 1), Times(8, 8, 8), Times(90, 90, 90)], Layout(False, (False, True, True), 6 / 5)),
        ([Times(1, 1, 1), Times(8, 8, 8), Times(90, 80, 80)], Layout(True, (False, True, True), 27 / 26)),
        # Of plain, the other way than the usual one has to be clearly faster.
        ([Times(2, 1, 0.9), Times(2, 0.9, 1), Times(2, 0.9, 1)], Layout(False, (False, True, True), 2)),
        ([Times(2, 1, 0.8), Times(2, 0.8, 1), Times(2, 0.8, 1)], Layout(False, (True, False, False), 2.5)),
        # Large layers are not measured at every size.
        ([Times(2, 1, 9)], Layout(False, (False, True, True), 2)),
        ([Times(2, 1, 9), Times(2, 0.5, 1)], Layout(False, (False, False, False), 8 / 3)),
    ],
)
def test_the_layout_follows_from_the_times(times: list[Times], expected: Layout) -> None:
    found = choose(times)
    assert found[:2] == expected[:2]
    assert found.speedup == pytest.approx(expected.speedup)


def test_large_layers_are_measured_with_fewer_tokens() -> None:
    assert measured_sizes(576 * 576) == [1, 8, 256]
    assert measured_sizes(3072 * 576) == [1, 8, 128]
    assert measured_sizes(4096 * 4096) == [1, 8, 16]
    assert measured_sizes(49152 * 576) == [1, 8]
    assert measured_sizes(128_000 * 4096) == [1]
    assert measured_sizes(1) == [1, 8, 256]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_plain_layer_computes_the_same_and_shares_its_weight(bias: bool, transposed: bool) -> None:
    linear = nn.Linear(18, 11, bias=bias)
    plain = PlainLinear(linear.weight, linear.bias, (transposed, transposed, transposed))
    assert plain.weight is linear.weight
    assert plain.bias is linear.bias
    assert (plain.in_features, plain.out_features) == (18, 11)
    with torch.no_grad():
        for x in (
            torch.randn(18),
            torch.randn(1, 0, 18),
            torch.randn(1, 1, 18),
            torch.randn(2, 3, 5, 18),
            torch.randn(1, 18, 40).transpose(1, 2),
            torch.randn(1, 9, 36)[..., ::2],
            torch.randn(1, 9, 18)[:, -1:],
        ):
            got = plain(x)
            assert got.is_contiguous()
            torch.testing.assert_close(got, linear(x), rtol=1e-4, atol=2e-6)


def test_the_number_of_tokens_picks_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def watched(name: str, product: Product) -> Product:
        def compute(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
            taken.append(name)
            return product(weight, bias, x)

        return compute

    for name in ("direct_product", "transposed_product"):
        monkeypatch.setattr(cpu_linear, name, watched(name, getattr(cpu_linear, name)))
    for way, others in ((True, False), (False, True)):
        for idx, sizes in enumerate(([1], [2, 8, 32], [33, 256, 1000])):
            plain = PlainLinear(
                nn.Parameter(torch.randn(3, 4)), None, tuple(way if i == idx else others for i in range(3))
            )
            for num_tokens in sizes:
                plain(torch.randn(1, num_tokens, 4))
            assert taken == ["transposed_product" if way else "direct_product"] * len(sizes)
            taken.clear()


def test_measuring_gives_times_and_leaves_the_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_waited", lambda: 0.0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True)]
    before = torch.get_rng_state()
    times = measure([PackedLinear(layers[0])], layers[1:])
    assert torch.equal(torch.get_rng_state(), before)
    assert len(times) == 3
    assert all(0 < seconds < 10 for one in times for seconds in one)


def test_times_measured_beside_busy_processes_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    began = time.perf_counter()
    # The threads wait for a tenth of the time, in all tries; then in the first three of the first size.
    monkeypatch.setattr(cpu_linear, "_waited", lambda: (time.perf_counter() - began) / 10)
    assert measure([PackedLinear(layers[0])], layers[1:]) == []
    waited = iter([0.0, 9.0, 9.0, 18.0, 18.0, 27.0] + [27.0] * 99)
    monkeypatch.setattr(cpu_linear, "_waited", lambda: next(waited))
    assert len(measure([PackedLinear(layers[0])], layers[1:])) == 3


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux counts it")
def test_waiting_for_a_core_is_counted() -> None:
    """This thread and another process want the same core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            try:
                before, end = cpu_linear._waited(), time.monotonic() + 60.0
                while cpu_linear._waited() - before < 0.02:
                    assert time.monotonic() < end
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("layout", [Layout(), PLAIN], ids=["packed", "plain"])
def test_every_weight_is_held_once(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model().eval()
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        expected = model(ids)
    weights = [layer.weight.detach().clone() for layer in model.layers]
    refs = [weakref.ref(layer.weight) for layer in model.layers]
    held: list[tuple[int, int]] = []

    def watch(packed: Sequence[nn.Module], plain: Sequence[nn.Linear]) -> list[Times]:
        held.append(
            (sum(type(one) is PackedLinear for one in model.layers), sum(r() is not None for r in refs))
        )
        assert {type(one) for one in packed} == {PackedLinear}
        assert {type(one) for one in plain} == {nn.Linear}
        return [Times(1, 1, 1)]

    monkeypatch.setattr(linears, "measure", watch)
    monkeypatch.setattr(linears, "choose", lambda times: layout)
    made = pack(model)
    assert made.num_placed == 6
    # The square layers come first: 2 are packed, 3 plain. The head is measured after them.
    assert held == [(2, 3), (0, 3) if layout is PLAIN else (5, 0)]
    (line,) = made.lines
    assert line.startswith("packed 0" if layout is PLAIN else "packed 6 linear layers for the CPU in ")
    wanted = "; plain where that is faster here: 5 of 256 x 256 (1.5 x), 1 of 300 x 256 (1.5 x)"
    assert line.endswith(wanted) == (layout is PLAIN)
    assert {type(layer) for layer in model.layers} == {PlainLinear if layout is PLAIN else PackedLinear}
    assert model.again is model.layers[0]
    assert (model.head.weight is model.embedding.weight) == (layout is PLAIN)
    assert not any(module.training for module in model.modules())
    for layer, weight in zip(model.layers, weights, strict=True):
        assert torch.equal(layer.weight, weight)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=2e-5)
    assert pack(model).lines == []


def test_small_layers_and_those_beyond_the_time_are_packed_unmeasured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[torch.Size] = []

    def note(packed: Sequence[nn.Module], plain: Sequence[nn.Linear]) -> list[Times]:
        shapes.append(plain[0].weight.shape)
        return []

    monkeypatch.setattr(linears, "measure", note)
    small = nn.Sequential(*(nn.Linear(WIDTH, WIDTH - 1) for _ in range(9)))
    assert pack(small).num_placed == 9
    assert shapes == []
    monkeypatch.setattr(linears, "MEASURING_SECONDS", 1e-12)
    model = Model()
    assert pack(model).num_placed == 6
    assert shapes == [(WIDTH, WIDTH)]
    assert type(model.head) is PackedLinear


def test_shapes_whose_measuring_was_disturbed_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "measure", lambda packed, plain: [])
    model = Model()
    made = pack(model)
    assert made.num_placed == 6
    assert {type(layer) for layer in (*model.layers, model.head)} == {PackedLinear}
    assert made.lines[0].endswith(" s; shapes packed unmeasured, since other processes took the cores: 2")


def test_a_joined_product_may_be_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "choose", lambda times: PLAIN)
    model = nn.ModuleDict({"q": nn.Linear(WIDTH, WIDTH), "k": nn.Linear(WIDTH, 64, bias=False)})
    x = torch.randn(1, 3, WIDTH)
    q, k = model["q"], model["k"]
    with torch.no_grad():
        expected = torch.cat([q(x), k(x)], -1)
    weight, whole = k.weight.detach().clone(), q.bias.detach().clone()
    made = prepare_linears(model, {model: {model: ("q", "k")}}, packed=True)
    joined = made.joined[model]
    assert made.num_placed == 1
    assert type(joined.linear) is PlainLinear
    part = model["k"]
    assert isinstance(part, JoinedPart)
    assert torch.equal(part.weight, weight)
    assert torch.equal(model["q"].bias, whole)
    with torch.no_grad():
        torch.testing.assert_close(joined(x), expected, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(part(x), expected[..., WIDTH:], rtol=1e-4, atol=2e-6)
