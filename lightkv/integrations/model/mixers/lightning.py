"""MiniMax's lightning attention: linear attention whose state decays by a number of each head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightkv.memory.kv_spec import StateTensor
from lightkv.memory.state_passes import StatePass

from .decayed_attention import decayed_attention


@dataclass(frozen=True)
class Lightning:
    """The mixer of a module with qkv_proj, of all heads of q, k and v each, output_gate, norm and out_proj."""

    module: Any
    index: int
    one_input: tuple[str, ...] = ()
    heads: None = None  # its norm is of all heads together

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        dim = self.module.head_dim
        return (StateTensor("recurrent", (len(self.module.slope_rate), dim, dim), torch.float32),)

    def forward(self, x: Tensor, passes: Sequence[StatePass], state: Mapping[str, Tensor]) -> Tensor:
        module = self.module
        log_decay = -module.slope_rate.float().view(1, -1).expand(len(x), -1)
        qkv = module.act_fn(module.qkv_proj(x)).unflatten(-1, (log_decay.shape[1], -1))
        q, k, v = qkv.chunk(3, -1)
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
        for one in passes:
            decayed_attention(q, k, v, log_decay, one, state["recurrent"], out)
        return cast(Tensor, module.out_proj(module.output_gate(x).sigmoid() * module.norm(out.flatten(1))))


KINDS = {"MiniMaxLightningAttention": Lightning}
