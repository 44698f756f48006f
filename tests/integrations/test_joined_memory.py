"""Joined layers keep their weights when they move, and leave no memory unused behind them."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from lightkv.integrations.model import linears
from lightkv.integrations.model.linears import join, move_by_cpu, prepare_linears

SIZE = 2048  # inputs and outputs of a layer


class Projections(nn.Module):
    """Layers of one input, and one more."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        made = {"device": device, "dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False, **made) for _ in range(4))
        self.requires_grad_(False)


def test_weights_and_their_views_move_together(device: torch.device) -> None:
    layer = Projections(64, device)
    joined = join(layer, ("q", "k", "v"), set())
    assert joined is not None
    before = [parameter.clone() for parameter in layer.parameters()]
    move_by_cpu(layer.parameters())
    for parameter, kept in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)
    layer.k.weight.zero_()
    assert torch.equal(joined.dense()[:64], before[0])
    assert not joined.dense()[64:128].any()


def test_the_first_layer_moves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on a CPU stands for one on a GPU. A model that was prepared before keeps its memory: CUDA graphs
    of another engine may read it."""
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    moved: list[list[torch.Tensor]] = []

    def noted(parameters: Iterable[torch.Tensor]) -> None:
        moved.append(list(parameters))
        move_by_cpu(moved[-1])

    monkeypatch.setattr(linears, "move_by_cpu", noted)
    model = nn.ModuleList(Projections(64, torch.device("cpu")) for _ in range(3))
    layers = {layer: {layer: ("q", "k", "v")} for layer in model}
    before = [parameter.clone() for parameter in model.parameters()]
    prepare_linears(model, layers)
    assert [id(one) for one in moved.pop()] == [id(one) for one in model[0].parameters()]
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(prepare_linears(model, layers).joined) == 3
    assert not moved
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.gpu
def test_joined_layers_leave_no_layer_of_memory_unused() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    block = torch.empty(4 * 4 * SIZE * SIZE, dtype=torch.bfloat16, device=device)
    del block  # transformers loads weights into such a block
    model = nn.ModuleList(Projections(SIZE, device) for _ in range(4))
    layers = {layer: {layer: ("q", "k", "v")} for layer in model}
    assert len(prepare_linears(model, layers, few_tokens=True).joined) == 4
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - before
    assert unused < 4 * SIZE * SIZE  # half of a layer
