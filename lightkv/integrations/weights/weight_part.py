"""What stands in a model for a linear layer whose weight is packed or quantised."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from .fp8 import Fp8Weight
from .plain import PlainWeight
from .weight import Weight


class WeightPart(nn.Module):
    """Stands in a model for a linear layer whose weight is packed or quantised: the outputs of `of` from
    `begin` on."""

    def __init__(self, of: Any, begin: int, size: int) -> None:
        super().__init__()
        self.of: Any = of  # a Weight; until the model is loaded, one that is in its files
        self.begin = begin
        self.in_features, self.out_features = of.shape[1], size
        self.eval()

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weight, `[out_features, in_features]`, for models that read it directly."""
        dense: Tensor = self.of.dense()
        return dense.narrow(0, self.begin, self.out_features)

    @property
    def bias(self) -> Tensor | None:
        return None if self.of.bias is None else self.of.bias.narrow(0, self.begin, self.out_features)

    def keep(self, dim: int, spans: Sequence[tuple[int, int]]) -> None:
        """Keeps some of the outputs (`dim` 0) or inputs (1) of a weight that is this layer's alone."""
        self.of = self.of.part(dim, spans)
        self.out_features, self.in_features = self.of.shape

    def forward(self, x: Tensor) -> Tensor:
        """Computes the whole product, and returns the outputs of the part."""
        y: Tensor = self.of.matmul(x)
        return y if self.out_features == self.of.shape[0] else y.narrow(-1, self.begin, self.out_features)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor | None:
        """Returns what `Fp8Weight.gated` returns; None for other weights, and for a part of one."""
        if not isinstance(self.of, Fp8Weight) or self.out_features != self.of.shape[0]:
            return None
        return self.of.gated(gate_up, activation)


def weight_of(layer: nn.Module) -> Weight:
    """Returns the weight of a linear layer."""
    if isinstance(layer, WeightPart):
        return cast(Weight, layer.of)
    return PlainWeight.load(cast(nn.Linear, layer))
