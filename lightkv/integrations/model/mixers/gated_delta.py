"""The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid: a convolution over q, k and v, and a state of a
matrix for each head, which decays and is corrected by each token:

    S ← exp(g)·S;   S ← S + k·(beta·(v − Sᵀk))ᵀ;   out = Sᵀq

A decode takes one token of each sequence. A prompt is computed in chunks (`delta_chunks.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightkv.integrations.weights.weight import Weight
from lightkv.memory.kv_spec import StateTensor
from lightkv.memory.state_passes import StatePass
from lightkv.triton_kernels.states.gated_delta_decode import (
    DeltaGates,
    gated_delta_decode,
    gated_delta_decode_reference,
)
from lightkv.triton_kernels.states.gated_norm import gated_norm, gated_norm_reference

from .convolution import convolve, state_of
from .delta_chunks import delta_chunks
from .heads import Heads


class DeltaPlan(NamedTuple):
    """The names of a module's projections, in the order q, k, v, the gate of the output; b, a. One projection
    of several is of all heads of the first, then of the second, or `is_by_head`. `beta_scale`: whether the
    module's `allow_neg_eigval` doubles beta."""

    qkvz: tuple[str, ...]
    ba: tuple[str, ...]
    norm: str = "norm"
    output: str = "out_proj"
    is_by_head: bool = False


@dataclass(frozen=True)
class GatedDelta:
    """The mixer of a module with a gated delta rule, whose projections `plan` names. `joined`: all of them as
    one product."""

    plan: DeltaPlan
    module: Any
    index: int
    joined: Weight | None = None

    @property
    def one_input(self) -> tuple[str, ...]:
        return self.plan.qkvz + self.plan.ba

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        module = self.module
        matrix = module.num_v_heads, module.head_k_dim, module.head_v_dim
        return StateTensor("recurrent", matrix, torch.float32), state_of(module.conv1d)

    @property
    def heads(self) -> Heads:
        module, plan = self.module, self.plan
        qkv, of_heads = (module.key_dim, module.key_dim, module.value_dim), (module.num_v_heads,)
        projections: dict[str, tuple[int, ...]]
        if plan.is_by_head:
            projections = {name: (getattr(module, name).out_features,) for name in self.one_input}
        else:
            *before, gate = plan.qkvz
            of_each = [qkv] if len(before) == 1 else [(size,) for size in qkv]
            projections = dict(zip(before, of_each, strict=True))
            projections |= {gate: (module.value_dim,), **dict.fromkeys(plan.ba, of_heads)}
        sections = projections | {"conv1d": qkv, "A_log": of_heads, "dt_bias": of_heads}
        sizes = "num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"
        return Heads(module.num_k_heads, sections, sizes, plan.output)

    def forward(self, x: Tensor, passes: Sequence[StatePass], state: Mapping[str, Tensor]) -> Tensor:
        module = self.module
        qkv, gate, b, a = self.project(x)
        mixed = x.new_empty(qkv.shape)
        out = x.new_empty(len(x), module.num_v_heads, module.head_v_dim)
        for one in passes:
            convolve(module.conv1d, qkv, one, state["convolution"], "silu", mixed)
            self._recur(mixed, a, b, one, state["recurrent"], out)
        norm, function = getattr(module, self.plan.norm), gated_norm if x.is_cuda else gated_norm_reference
        normed = function(out, gate.unflatten(-1, out.shape[1:]), norm.weight, norm.variance_epsilon)
        return cast(Tensor, getattr(module, self.plan.output)(normed.flatten(1)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns q, k and v together, the gate, b and a of x `[T, C]`."""
        module, num_v = self.module, self.module.num_v_heads
        sizes = 2 * module.key_dim + module.value_dim, module.value_dim, num_v, num_v
        if self.joined is not None:
            product = self.joined.matmul(x)
        else:
            product = torch.cat([getattr(module, name)(x) for name in self.one_input], -1)
        if not self.plan.is_by_head:
            qkv, gate, b, a = product.split(sizes, -1)
            return qkv, gate, b, a
        num = module.num_k_heads
        of_head = [
            size // num for size in (module.key_dim, module.key_dim, module.value_dim, module.value_dim)
        ]
        qkvz, ba = (part.unflatten(-1, (num, -1)) for part in product.split((sum(sizes[:2]), 2 * num_v), -1))
        *qkv, gate = (part.flatten(1) for part in qkvz.split(of_head, -1))
        b, a = (part.flatten(1) for part in ba.chunk(2, -1))
        return torch.cat(qkv, -1), gate, b, a

    def _recur(self, qkv: Tensor, a: Tensor, b: Tensor, one: StatePass, state: Tensor, out: Tensor) -> None:
        """Writes the output of a pass to its places in `out`, `[T, v heads, v dim]`, from q, k and v behind the
        convolution."""
        module, tokens = self.module, one.tokens
        beta_scale = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        gates = DeltaGates(module.A_log, module.dt_bias, beta_scale)
        if not one.most_chunks:
            function = gated_delta_decode if qkv.is_cuda else gated_delta_decode_reference
            qkv, a, b, out = one.own(qkv, a, b, out)
            function(qkv, a, b, gates, state, one.recurrent_rows, out)
            return
        q, k, v = qkv[tokens].split((module.key_dim, module.key_dim, module.value_dim), -1)
        q, k = (part.unflatten(-1, (-1, module.head_k_dim)) for part in (q, k))
        v = v.unflatten(-1, (-1, module.head_v_dim))
        out[tokens] = delta_chunks(q, k, v, a[tokens], b[tokens], gates, one, state)


_QWEN3_5 = DeltaPlan(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
_QWEN3_NEXT = DeltaPlan(("in_proj_qkvz",), ("in_proj_ba",), is_by_head=True)
_OLMO = DeltaPlan(("q_proj", "k_proj", "v_proj", "g_proj"), ("b_proj", "a_proj"), "o_norm", "o_proj")

KINDS = {
    "Qwen3_5GatedDeltaNet": partial(GatedDelta, _QWEN3_5),
    "Qwen3_5MoeGatedDeltaNet": partial(GatedDelta, _QWEN3_5),
    "Qwen3NextGatedDeltaNet": partial(GatedDelta, _QWEN3_NEXT),
    "OlmoHybridGatedDeltaNet": partial(GatedDelta, _OLMO),
}
