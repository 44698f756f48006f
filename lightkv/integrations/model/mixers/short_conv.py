"""LFM2's short convolution: a gate before it and one behind it, and a state of the last inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightkv.memory.kv_spec import StateTensor
from lightkv.memory.state_passes import StatePass

from .convolution import convolve, state_of
from .heads import Heads


@dataclass(frozen=True)
class ShortConv:
    """The mixer of a module that has in_proj, conv and out_proj."""

    module: Any
    index: int
    one_input: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        return (state_of(self.module.conv),)

    @property
    def heads(self) -> Heads:
        num_channels = len(self.module.conv.weight)
        return Heads(num_channels, {"in_proj": (num_channels,) * 3, "conv": (num_channels,)})

    def forward(self, x: Tensor, passes: Sequence[StatePass], state: Mapping[str, Tensor]) -> Tensor:
        before, behind, values = self.module.in_proj(x).chunk(3, dim=-1)
        inputs = before * values
        out = torch.zeros_like(inputs)
        for one in passes:
            convolve(self.module.conv, inputs, one, state["convolution"], None, out)
        return cast(Tensor, self.module.out_proj(behind * out))


KINDS = dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), ShortConv)
