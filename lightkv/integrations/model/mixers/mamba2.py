"""Mamba-2: a convolution over x, B and C, and a state of a matrix for each head, which decays by what the token
says (state space duality, arXiv 2405.21060):

    S ← exp(dt·A)·S + B·(dt·x)ᵀ;   out = SᵀC + D·x
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightkv.memory.kv_spec import StateTensor
from lightkv.memory.state_passes import StatePass

from .convolution import convolve
from .decayed_attention import decayed_attention


@dataclass(frozen=True)
class Mamba2:
    """The mixer of a module with in_proj, whose output is the gate, x, B, C and dt, with conv1d and out_proj.

    dt is limited in decodes too, which transformers' own decodes omit: so a token's state is the same whether
    it was generated or read.
    """

    module: Any
    index: int

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        module, weight = self.module, self.module.conv1d.weight
        matrix = len(module.A_log), module.ssm_state_size, module.head_dim
        return (
            StateTensor("recurrent", matrix, torch.float32),
            StateTensor("convolution", (weight.shape[-1] - 1, weight.shape[0]), weight.dtype),
        )

    def forward(self, x: Tensor, passes: Sequence[StatePass], state: Mapping[str, Tensor]) -> Tensor:
        module, num_heads = self.module, len(self.module.A_log)
        gate, mixed, dt = self._project(x).split(
            (num_heads * module.head_dim, len(module.conv1d.weight), num_heads), -1
        )
        dt = functional.softplus(dt.float() + module.dt_bias.float()).clamp(*module.time_step_limit)
        out = x.new_zeros(len(x), num_heads, module.head_dim)
        for one in passes:
            inputs = convolve(module.conv1d, mixed[one.tokens], one, state["convolution"], module.activation)
            out[one.tokens] = self._recur(inputs, dt[one.tokens], one, state["recurrent"])
        y = out.flatten(1)
        # Some models of Falcon-H1 have a gate and no norm.
        gated = y * functional.silu(gate) if isinstance(module.norm, nn.Identity) else module.norm(y, gate)
        return cast(Tensor, module.out_proj(gated))

    def _project(self, x: Tensor) -> Tensor:
        module = self.module
        if not hasattr(module, "mup_vector"):
            return cast(Tensor, module.in_proj(x))
        return cast(Tensor, module.in_proj(x * module.ssm_in_multiplier) * module.mup_vector[0])

    def _recur(self, inputs: Tensor, dt: Tensor, one: StatePass, state: Tensor) -> Tensor:
        """Returns the output of a pass `[T, heads, head dim]`, from x, B and C behind the convolution."""
        module, (_, num_heads, state_dim, head_dim) = self.module, state.shape
        rest = (inputs.shape[1] - num_heads * head_dim) // 2
        x, b, c = inputs.split((num_heads * head_dim, rest, rest), -1)
        x, (b, c) = x.unflatten(1, (num_heads, -1)), (part.unflatten(1, (-1, state_dim)) for part in (b, c))
        v = (x * dt[..., None]).to(x.dtype)
        return (
            decayed_attention(c, b, v, -module.A_log.float().exp() * dt, one, state) + module.D[:, None] * x
        )


KINDS = dict.fromkeys(
    ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"),
    Mamba2,
)
