"""Fuses the decoder layers of a model that the engine loaded, where they compute what their plans say.

`fuse_layers` looks up the plans (plans/layer_plans.py), has linear layers joined (linears.py), gives the
layers the forward pass of decoder_layer.py, and compares each with the model's own. What differs, or has no
plan, keeps transformers' code.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightkv.integrations.model.experts.mixture import (
    experts_of,
    fuse_experts,
    has_fused_experts,
    unfuse_experts,
)
from lightkv.integrations.model.experts.router import router_forward
from lightkv.integrations.model.mixers.mixer import (
    bound_mixer,
    is_bound_mixer,
    is_mixer,
    join_projections,
    require_own_mixers,
)
from lightkv.integrations.model.plans.layer_plans import PLANS, LayerPlan, norm_form, planned_layers
from lightkv.integrations.model.plans.own_pass import (
    NUM_TOKENS,
    Call,
    NoiseHandler,
    NotFusable,
    OwnPass,
    recorded_calls,
)
from lightkv.integrations.ranks.sharded import SummedLinear
from lightkv.integrations.weights.weight_part import WeightPart
from lightkv.triton_kernels.norms import Norm

from .context import num_layers
from .decoder_layer import (
    Attention,
    DecoderLayer,
    GatedMLP,
    NextNorm,
    activate,
    activation_of,
    gated_mlp,
    layer_forward,
    mlp_forward,
)
from .fused_norm import Carry, find_norm, norm_forward
from .fused_rotary import find_layout, layout_of, use_joined
from .linears import (
    Linears,
    forward_of,
    has_hooks,
    has_registered_hooks,
    linear_forward,
    prepare_linears,
    reset_forwards,
)

Report = Callable[[str], None]

_FORWARDS = (layer_forward, norm_forward, mlp_forward, linear_forward, router_forward)


@dataclass
class FusedLayers:
    """What `fuse_layers` did. `unfused`: layers, by what of them runs transformers' code, and why."""

    linears: Linears
    num_layers: int
    num_fused: int = 0  # layers that run fused from their first norm to their last addition
    unfused: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Returns the lines to report."""
        lines = [f"fused {self.num_fused} of {self.num_layers} layers"]
        if self.unfused:
            lines.append(
                f"unfused: {'; '.join(f'{what} ({num} layers)' for what, num in self.unfused.items())}"
            )
        return lines + self.linears.lines


def unplanned_layers(model: PreTrainedModel) -> dict[str, int]:
    """Returns how many decoder layers of `model` run transformers' code whatever it computes, and why."""
    found = Counter(
        f"{type(module).__name__}: it has no plan"
        for module in _module(model).modules()
        if any(hasattr(child, "layer_idx") for child in module.children())
        and not isinstance(module, nn.ModuleList)
        and type(module).__name__ not in PLANS
    )
    return dict(found)


def unfuse_layers(model: PreTrainedModel) -> None:
    """Gives the modules of `model` that `fuse_layers` changed the forward passes of their classes.

    Joined weights stay joined. Attention modules keep what `bind` gave them.
    """
    reset_forwards(_module(model), _FORWARDS)
    unfuse_experts(_module(model))


@torch.no_grad()
def fuse_layers(model: PreTrainedModel, report: Report, packed: bool = False) -> FusedLayers:
    """Fuses the decoder layers of a bound `model` where they compute what their plans say, and reports what was
    done.

    The model runs once, and each layer a few times more, on eight tokens. Weights of q, k and v become views of
    one joined weight, and so do gate and up: at most one layer's weights are in memory twice at a time.
    `packed`: whether linear layers are packed, too (`prepare_linears`). This is for models that the engine
    loaded. Modules with hooks, or with a forward pass other than their class's, are left alone. Synchronises.
    """
    unfuse_layers(model)
    found = FoundParts(model, planned_layers(_module(model)))
    groups = {layer: found.one_input(layer) for layer in found.plans}
    linears = prepare_linears(_module(model), groups, packed=packed, few_tokens=True)
    count = num_layers(model.config.get_text_config()) or len(found.plans)
    fused = FusedLayers(linears, count, unfused=Counter(unplanned_layers(model)))
    carry = Carry()
    for module, norm in found.norms.items():
        cast(Any, module).forward = partial(norm_forward, module, norm, carry)
    for module, parts in found.mlps.items():
        if module in linears.joined or len(parts.gate_up) == 1:
            joined = linears.joined.get(module)
            gate_up = getattr(module, parts.gate_up[0]) if joined is None else joined.matmul
            mlp = GatedMLP(gate_up, parts.activation, getattr(module, parts.down))
            cast(Any, module).forward = partial(mlp_forward, module, mlp)
    for module, weight in linears.joined.items():
        if layout_of(module) is not None:
            use_joined(module, weight)
        elif is_bound_mixer(module):
            join_projections(module, weight)
    for layer, plan in found.plans.items():
        for block in (one for one in layer.modules() if experts_of(one) is not None):
            if why := fuse_experts(block, plan.router, _like(model)):
                fused.unfused[f"{type(block).__name__}: {why}"] += 1
    layers = found.decoder_layers()
    for module, decoder_layer in layers.items():
        cast(Any, module).forward = partial(layer_forward, module, decoder_layer, carry)
    for module in layers:
        try:
            found.own[module].require_same()
        except NotFusable as error:
            found.why_not[module] = str(error)
            del cast(Any, module).forward  # its parts were compared by themselves
    carry.clear()
    require_own_mixers(model)
    _count(fused, found)
    for line in fused.lines():
        report(line)
    return fused


@contextmanager
def few_layers(model: PreTrainedModel, kind: Callable[[int], Hashable]) -> Iterator[None]:
    """Skips fused layers while the block runs, where others launch the same kernels: for a dry run.

    Of the layers with weights of the same shapes, and attention of the same `kind`, by its number, two run: the
    first one may get its norm's input from elsewhere. So does the last layer of the model.
    """
    seen: Counter[Hashable] = Counter()
    skipped: dict[nn.Module, Callable[..., Any]] = {}
    for module in _module(model).modules():
        if (fused := forward_of(module, layer_forward)) is not None:
            layer = cast(DecoderLayer, fused.args[1])
            weights: tuple[Any, ...] = tuple((weight.shape, weight.dtype) for weight in module.parameters())
            weights += tuple(type(part.of) for part in module.modules() if isinstance(part, WeightPart))
            key = type(module), weights, kind(cast(Any, layer.attention.module).layer_idx), layer.is_last
            seen[key] += 1
            if seen[key] > 2:
                skipped[module] = module.forward
    for module in skipped:
        cast(Any, module).forward = lambda hidden, **given: hidden
    try:
        yield
    finally:
        for module, forward in skipped.items():
            cast(Any, module).forward = forward


def _module(model: PreTrainedModel) -> nn.Module:
    return cast(nn.Module, model)


def _like(model: PreTrainedModel) -> Tensor:
    """Returns a tensor of the dtype and on the device of `model`."""
    return torch.empty(0, dtype=model.dtype, device=model.device)


class MLPParts(NamedTuple):
    """The parts of a gated MLP, by their names in the module."""

    gate_up: tuple[str, ...]  # gate and up, or the one layer that computes both, gate first
    down: str
    activation: str


def find_mlp(module: Any, plan: LayerPlan, like: Tensor) -> MLPParts:
    """Returns the parts of a gated MLP that computes what `plan` says, from a run on noise of the dtype and
    on the device of `like`. Raises NotFusable for any other module."""
    names, activation = (*plan.gate_up, plan.down), activation_of(module) or plan.activation
    if activation is None or not all(hasattr(getattr(module, name, None), "out_features") for name in names):
        raise NotFusable(f"it has no {', '.join(names)}, or another activation than those that are known")
    parts = MLPParts(plan.gate_up, plan.down, activation)
    down = getattr(module, plan.down)
    own = OwnPass.of(module, Call((like.new_empty(1, NUM_TOKENS, down.out_features),), {}, None))

    def fused(x: Tensor) -> Tensor:
        gate_up = torch.cat([getattr(module, name)(x) for name in plan.gate_up], dim=-1)
        return cast(Tensor, down(activate(gate_up, activation)))

    own.require_same(fused)
    return parts


class FoundParts:
    """What the plans say of a model, and the parts that compute what they say.

    `plans`, `attentions`: of each layer. `calls`: of the layers, their attentions and the norms. `norms`,
    `mlps`: the modules that are known norms and gated MLPs. `own`: by layer, a run of its own code.
    `why_not`: why a module runs its own code.
    """

    def __init__(self, model: PreTrainedModel, plans: dict[nn.Module, LayerPlan]) -> None:
        self.plans = plans
        mixers = {layer: plan.mixer_of(layer) for layer, plan in self.plans.items()}
        self.attentions = {layer: mixer for layer, mixer in mixers.items() if mixer is not None}
        norms = [one for one in _module(model).modules() if norm_form(one) is not None and not has_hooks(one)]
        handler = NoiseHandler()
        self.calls = recorded_calls(model, [*self.plans, *self.attentions.values(), *norms], handler)
        self.last_mixer = handler.last
        self.norms: dict[nn.Module, Norm] = {}
        self.mlps: dict[nn.Module, MLPParts] = {}
        self.own: dict[nn.Module, OwnPass] = {}
        self.why_not: dict[nn.Module, str] = {}
        for module in norms:
            if module in self.calls:
                with self.noting(module):
                    self.norms[module] = find_norm(module, self.calls[module].x)
        for layer, plan in self.plans.items():
            for module in layer.modules():
                if not has_hooks(module) and module is not self.attentions.get(layer):
                    with self.noting(module):
                        self.mlps[module] = find_mlp(module, plan, _like(model))
            with self.noting(layer):
                self.own[layer] = self._own_pass(layer)

    @contextmanager
    def noting(self, module: nn.Module) -> Iterator[None]:
        """Notes why `module` runs its own code, where the block raises NotFusable."""
        try:
            yield
        except NotFusable as error:
            self.why_not[module] = str(error)

    def _own_pass(self, layer: nn.Module) -> OwnPass:
        """Returns a run of a layer's own code. Raises NotFusable where it cannot run fused."""
        if not self.plans[layer].adds_in_order:
            raise NotFusable("its plan fuses its parts alone")
        call, attention = self.calls.get(layer), self.calls.get(cast(nn.Module, self.attentions.get(layer)))
        if call is None or attention is None or has_hooks(layer) or len(call.args) != 1:
            raise NotFusable("it or its attention does not run, has hooks, or gets more than one tensor")
        output = attention.output
        is_pair = isinstance(output, tuple) and len(output) == 2 and output[1] is None
        if not is_pair and not is_mixer(self.attentions[layer]):
            raise NotFusable("its attention does not return an output and None")
        return OwnPass.of(layer, call)

    def one_input(self, layer: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
        """Returns the names of the linear layers of one input, by the module in `layer` that has them."""
        groups = {module: self.mlps[module].gate_up for module in layer.modules() if module in self.mlps}
        if (attention := self.attentions.get(layer)) is not None:
            if layout_of(attention) is not None:
                groups[attention] = self.plans[layer].qkv
            elif is_bound_mixer(attention):
                groups[attention] = bound_mixer(attention).one_input
        return {module: names for module, names in groups.items() if len(names) > 1}

    def decoder_layers(self) -> dict[nn.Module, DecoderLayer]:
        """Returns the layers that may run fused, with their places in the model."""
        found = {}
        for layer in self.own:
            with self.noting(layer):
                found[layer] = self.decoder_layer(layer)
        return found

    def decoder_layer(self, module: nn.Module) -> DecoderLayer:
        """Returns a layer by its plan, with its place in the model. Raises NotFusable where it lacks a part."""
        plan, call, attention = self.plans[module], self.calls[module], self.attentions[module]

        def part(name: str | None) -> nn.Module | None:
            if name and not hasattr(module, name):
                raise NotFusable(f"it has no {name}")
            found = getattr(module, name) if name else None
            return None if isinstance(found, nn.Identity) else found

        after_attention, before, after = map(part, (plan.after_attention, plan.before_mlp, plan.after_mlp))
        if after_attention is not None and after_attention not in self.norms:
            raise NotFusable(f"{plan.after_attention} is no known norm")
        # A norm beside the MLP that is not known is called as it is.
        mlp = [
            one for one in (before, *map(part, plan.mlp), after) if one is not None and one not in self.norms
        ]
        arguments = tuple(
            name
            for name, value in self.calls[attention].kwargs.items()
            if name != "lightkv" and name in call.kwargs and call.kwargs[name] is value
        )
        is_inlined = "position_embeddings" in arguments and not has_registered_hooks(attention)
        following = next((norm for norm in self.norms if self.calls[norm].x is call.output), None)
        return DecoderLayer(
            input_norm=part(plan.input_norm),
            attention=Attention(attention, arguments, is_inlined),
            after_attention=None if after_attention is None else self.norms[after_attention],
            before_mlp=None if before is None else self.norms.get(before),
            mlp=tuple(mlp),
            after_mlp=None if after is None else self.norms.get(after),
            scale=getattr(module, plan.residual_factor) if plan.residual_factor else 1.0,
            next_norm=None if following is None else NextNorm(following, self.norms[following]),
            is_last=attention is self.last_mixer,
            takes_turns=is_inlined and _sums_twice(attention, mlp[-1]),
        )


def _sums_twice(attention: nn.Module, mlp: nn.Module) -> bool:
    """Returns whether both the attention and the MLP of a layer end with a sum over ranks."""
    layout, gated = layout_of(attention), gated_mlp(mlp)
    if layout is None or gated is None:
        return False
    ends = getattr(attention, layout.plan.output), gated.down
    return all(isinstance(end, SummedLinear) for end in ends)


def _count(fused: FusedLayers, found: FoundParts) -> None:
    """Counts the layers that run fused, and what does not in each."""
    for layer, plan in found.plans.items():
        kept: list[nn.Module] = [] if forward_of(layer, layer_forward) else [layer]
        fused.num_fused += not kept
        attention = found.attentions.get(layer)
        if attention in found.calls and layout_of(attention) is None and "forward" not in vars(attention):
            kept.append(attention)
            with found.noting(attention):
                find_layout(attention, plan, found.calls[attention])
        body = [getattr(layer, name) for name in plan.mlp if hasattr(layer, name)]
        kept += [one for one in body if not any(map(_is_fused_mlp, one.modules()))][:1]
        for module in kept:
            fused.unfused[f"{type(module).__name__}: {found.why_not.get(module, 'it is not joined')}"] += 1


def _is_fused_mlp(module: nn.Module) -> bool:
    return gated_mlp(module) is not None or has_fused_experts(module)
