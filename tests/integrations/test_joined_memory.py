"""Joined layers keep their weights when they move, and leave no memory unused behind them."""

import pytest
import torch
from torch import nn

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
    move_by_cpu(layer)
    for parameter, kept in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)
    layer.k.weight.zero_()
    assert torch.equal(joined.dense()[:64], before[0])
    assert not joined.dense()[64:128].any()


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
