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

from .convolution import convolve, state_of
from .decayed_attention import decayed_attention
from .heads import Heads


@dataclass(frozen=True)
class Mamba2:
    """The mixer of a module with in_proj, whose output is the gate, x, B, C and dt, with conv1d and out_proj.

    dt is limited in decodes too, which transformers' own decodes omit: so a token's state is the same whether
    it was generated or read.
    """

    module: Any
    index: int
    one_input: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        module = self.module
        matrix = len(module.A_log), module.ssm_state_size, module.head_dim
        return StateTensor("recurrent", matrix, torch.float32), state_of(module.conv1d)

    @property
    def heads(self) -> Heads:
        """Heads of one group share B, C and, as a rule, the norm of their outputs, so they stay together."""
        module = self.module
        inner, of_heads = module.intermediate_size, (module.num_heads,)
        convolved = (inner, *2 * (module.n_groups * module.ssm_state_size,))
        projected = (inner, *convolved, *of_heads)
        sections = {"in_proj": projected, "conv1d": convolved, "norm": (inner,)}
        sections |= dict.fromkeys(("A_log", "dt_bias", "D"), of_heads)
        if hasattr(module, "mup_vector"):
            sections["mup_vector"] = projected
        return Heads(module.n_groups, sections, ("num_heads", "n_groups", "intermediate_size", "conv_dim"))

    def forward(self, x: Tensor, passes: Sequence[StatePass], state: Mapping[str, Tensor]) -> Tensor:
        module, num_heads, head_dim = self.module, len(self.module.A_log), self.module.head_dim
        sizes = num_heads * head_dim, len(module.conv1d.weight), num_heads
        gate, before, dt = self._project(x).split(sizes, -1)
        mixed = torch.zeros_like(before)
        for one in passes:
            convolve(module.conv1d, before, one, state["convolution"], module.activation, mixed)
        of_groups = (sizes[1] - sizes[0]) // 2
        inputs, b, c = mixed.split((sizes[0], of_groups, of_groups), -1)
        inputs = inputs.unflatten(-1, (num_heads, head_dim))
        b, c = (part.unflatten(-1, (-1, module.ssm_state_size)) for part in (b, c))
        dt = functional.softplus(dt.float() + module.dt_bias.float()).clamp(*module.time_step_limit)
        log_decay, v = -module.A_log.float().exp() * dt, (inputs * dt[..., None]).to(x.dtype)
        out = torch.zeros_like(v)
        for one in passes:
            decayed_attention(c, b, v, log_decay, one, state["recurrent"], out)
        y = (out + module.D[:, None] * inputs).flatten(1)
        # Some models of Falcon-H1 have a gate and no norm.
        gated = y * functional.silu(gate) if isinstance(module.norm, nn.Identity) else module.norm(y, gate)
        return cast(Tensor, module.out_proj(gated))

    def _project(self, x: Tensor) -> Tensor:
        module = self.module
        if not hasattr(module, "mup_vector"):
            return cast(Tensor, module.in_proj(x))
        return cast(Tensor, module.in_proj(x * module.ssm_in_multiplier) * module.mup_vector[0])


KINDS = dict.fromkeys(
    ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "Zamba2MambaMixer"),
    Mamba2,
)
