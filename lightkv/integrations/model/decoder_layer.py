"""A decoder layer as it runs fused, from its first norm to its last addition.

    norm ─► q, k, v ─► K/V written, attention ─► o ─► add, norm ─► gate, up ─► activation ─► down ─► add, norm
            one product  positions on the way          one pass      one product  one pass            one pass

On a GPU, the passes are `residual_norm` (over ranks `summed_residual_norm`) and `gated_activation`, and the
products `linear`, all in `triton_kernels/layers/`. In between, `PackedStep.attend` calls the layer's backend,
which runs `write_kv` and `mixed_attention`.

The last norm is that of the next layer, or of the model: its output waits in a `Carry` (`fused_norm.py`)
until that module calls its norm. `fused_layers.py` makes a `DecoderLayer` of a layer's plan
(`plans/layer_plans.py`) and compares it with the model's own forward pass, and `linears.py` joins q, k and v,
and gate and up, into one product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from lightkv.integrations.model.mixers.mixer import is_bound_mixer
from lightkv.integrations.ranks.sharded import SummedLinear
from lightkv.integrations.ranks.term_room import TermPlace
from lightkv.integrations.weights.weight_part import WeightPart
from lightkv.triton_kernels.layers.gated_activation import gated_activation, gated_activation_reference
from lightkv.triton_kernels.norms import Norm

from .attention_call import ATTENTION, AttentionHandler
from .context import given_cache
from .fused_norm import Carry, add_and_norm
from .fused_rotary import layout_of
from .hf_model import PackedStep
from .linears import forward_of, has_registered_hooks

# The activations of `gated_activation`, by the classes of the modules that compute the same.
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}


@dataclass(frozen=True)
class Attention:
    """The attention of a decoder layer.

    `arguments`: the keyword arguments of the layer that the module gets. `is_inlined`: whether the layer
    computes by the layout that `bind` has found for the module. Another module computes more than that, or has
    hooks, and is called as it is; so is one whose forward pass `bind` is comparing.
    """

    module: nn.Module
    arguments: tuple[str, ...]
    is_inlined: bool = False

    def forward(
        self, x: Tensor, step: AttentionHandler, given: Mapping[str, Any], turn: int | None
    ) -> "Output":
        """Returns the attention output of x `[1, T, C]`. `given`: the layer's keyword arguments; `turn`: as in
        `Output.of`."""
        layout = layout_of(self.module) if self.is_inlined else None
        if layout is None:
            out = self.module(x, lightkv=step, **{name: given[name] for name in self.arguments})
            return Output(_first(out))
        # The handler writes K/V and applies positions on the way, then attends.
        heads = layout.attend(self.module, x, given["position_embeddings"], step)
        return Output.of(getattr(self.module, layout.plan.output), heads, turn)


class Output(NamedTuple):
    """What attention or the MLP returns, `[1, T, C]`; where it has a place, a rank's term of that, `[T, C]`."""

    x: Tensor
    place: TermPlace | None = None

    @classmethod
    def of(cls, linear: nn.Module, x: Tensor, turn: int | None) -> "Output":
        """Computes their last product. `turn`: 0 behind attention, 1 behind the MLP, None for a layer
        whose sums over ranks do not take turns."""
        place = linear.place(turn, x) if turn is not None and isinstance(linear, SummedLinear) else None
        return cls(linear(x)) if place is None else cls(cast(SummedLinear, linear).term(x, place), place)

    def add_and_norm(
        self, residual: Tensor, norm: Norm | None, post: Norm | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns what `residual_norm` returns."""
        function = add_and_norm if self.place is None else self.place.add_and_norm
        return function(self.x, residual, norm, post=post, scale=scale)


class NextNorm(NamedTuple):
    """The norm of what a layer returns, and the module that it belongs to: the next layer's, or the model's."""

    module: nn.Module
    norm: Norm


@dataclass(frozen=True)
class DecoderLayer:
    """The parts of a decoder layer.

    `before_mlp` and `after_mlp` are None where the layer has no norm there. They are also None where it has one
    whose formula is not known; then this norm is one of the modules in `mlp`, and is called as it is.
    """

    input_norm: nn.Module | None
    attention: Attention
    after_attention: Norm | None  # of what attention returns, before it is added
    before_mlp: Norm | None  # of the sum
    mlp: tuple[nn.Module, ...]  # one after the other; a gated MLP among them runs as `GatedMLP`
    after_mlp: Norm | None  # of what the MLP returns, before it is added
    scale: float  # the factor of what is added
    next_norm: NextNorm | None = None
    is_last: bool = False  # no layer comes after it, so only the tokens whose logits are wanted need its MLP
    takes_turns: bool = False  # its attention and its MLP both end with a sum over ranks

    def forward(
        self, hidden: Tensor, step: AttentionHandler, given: Mapping[str, Any], carry: Carry
    ) -> Tensor:
        """Returns the residual stream after the layer of `hidden`, the one before it; both `[1, T, C]`.

        `given`: the keyword arguments with which the model calls the layer. The next norm's output is put into
        `carry`, from which that norm takes it.
        """
        all_tokens, kept, next_norm = hidden, self._sampled(step, hidden), self.next_norm
        x = hidden if self.input_norm is None else self.input_norm(hidden)  # as a rule it is in the carry
        has_places = self.takes_turns and kept is None  # a term in its place has all tokens
        out = self.attention.forward(x, step, given, 0 if has_places else None)
        if kept is not None:
            out, hidden, next_norm = Output(out.x.index_select(1, kept)), hidden.index_select(1, kept), None
        hidden, x = out.add_and_norm(hidden, self.before_mlp, self.after_attention, self.scale)
        *others, last = self.mlp
        for module in others:
            x = module(x)
        gated = gated_mlp(last) if has_places else None
        # Some experts return [T, C].
        out = Output(_first(last(x)).view_as(hidden)) if gated is None else gated.output(x, 1)
        norm = None if next_norm is None else next_norm.norm
        hidden, x = out.add_and_norm(hidden, norm, self.after_mlp, self.scale)
        if next_norm is not None:
            carry.put(next_norm.module, hidden, x)
        # The tokens that are not sampled keep what they had before the layer, which is not read any more.
        return hidden if kept is None else all_tokens.index_copy_(1, kept, hidden)

    def _sampled(self, step: AttentionHandler, hidden: Tensor) -> Tensor | None:
        """Returns the tokens whose logits are wanted, int64 `[n]`, where the others need no MLP; else None."""
        if not self.is_last or not isinstance(step, PackedStep) or step.logits_index is None:
            return None
        return step.logits_index if len(step.logits_index) < hidden.shape[1] else None


def _first(output: Any) -> Tensor:
    """Returns the output of a module that may return more, such as the weights of its experts."""
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)


@dataclass(frozen=True)
class GatedMLP:
    """The parts of a gated MLP. `gate_up` computes gate and up as one product, the gate first."""

    gate_up: Callable[[Tensor], Tensor]
    activation: str  # "silu", "gelu_tanh" or "gelu"
    down: nn.Module

    def output(self, x: Tensor, turn: int | None = None) -> Output:
        """Computes the MLP of x, `[..., C]`. `turn`: as in `Output.of`."""
        gate_up = self.gate_up(x)
        if isinstance(self.down, WeightPart) and not has_registered_hooks(self.down):
            # A rank's part of a sum is no WeightPart, and is rounded in a launch of its own.
            product = self.down.gated(gate_up, self.activation)
            if product is not None:
                return Output(product)
        return Output.of(self.down, activate(gate_up, self.activation), turn)


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """Returns what `gated_activation` returns, on any device."""
    function = gated_activation if gate_up.is_cuda else gated_activation_reference
    return function(gate_up, activation)


def activation_of(module: nn.Module) -> str | None:
    """Returns the activation of a gated MLP, or of experts, by the class of the part that computes it; None for
    one that `gated_activation` does not have."""
    return next(
        (_ACTIVATIONS[name] for part in module.children() if (name := type(part).__name__) in _ACTIVATIONS),
        None,
    )


# --------------------------------------------------------------------------------
# The forward passes that a model's modules get


def layer_forward(module: nn.Module, layer: DecoderLayer, carry: Carry, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a decoder layer: fused if lightkv calls the model
    (`attention_call.compute`); else the module's own."""
    mixer: Any = layer.attention.module
    is_bound = is_bound_mixer(mixer) or mixer.config._attn_implementation == ATTENTION
    if "lightkv" not in kwargs or not is_bound or len(args) != 1 or given_cache(kwargs) is not None:
        return type(module).forward(module, *args, **kwargs)
    return layer.forward(args[0], kwargs["lightkv"], kwargs, carry)


def mlp_forward(module: nn.Module, mlp: GatedMLP, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a gated MLP, which may also stand in a layer that is not fused."""
    if len(args) != 1 or kwargs:
        return type(module).forward(module, *args, **kwargs)
    return mlp.output(args[0]).x


def gated_mlp(module: nn.Module) -> GatedMLP | None:
    """Returns the gated MLP that the forward pass of `module` computes; None where it is another one."""
    forward = forward_of(module, mlp_forward)
    return None if forward is None else cast(GatedMLP, forward.args[1])
