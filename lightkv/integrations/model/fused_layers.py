"""Fused decoder layers for a model that the engine loaded: fewer and larger kernels that compute the same.

residual + attention + norm, and residual + MLP + the next layer's norm, are one pass each; q, k and v are one
product, and so are gate and up. What a probe does not find to be the same keeps transformers' code.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightkv.errors import LightKVError
from lightkv.triton_kernels.layers.residual_norm import Norm

from .attention_call import ATTENTION, compute
from .fused_mlp import MLPLayout, find_mlp, mlp_forward, set_mlp_forward
from .fused_norm import Carry, add_and_norm, find_norm, may_be_norm, norm_forward, set_norm_forward
from .fused_rotary import NoiseHandler, fused_forwards, join_projections, spread_positions
from .hf_model import PackedStep
from .joined_linear import (
    JoinedLinear,
    has_hooks,
    is_plain,
    join,
    linear_forward,
    reset_forwards,
    set_linear_forwards,
    shared_parameters,
)
from .layer_plan import LayerCall, LayerPlan, LayerRun

T = TypeVar("T")
Report = Callable[[str], None]


def layer_forward(layer: nn.Module, plan: LayerPlan, carry: Carry, *args: Any, **kwargs: Any) -> Any:
    """The fused forward pass of `layer` if this is a call of `compute`; else the layer's own."""
    is_bound = cast(Any, plan.attention).config._attn_implementation == ATTENTION
    if "lightkv" not in kwargs or not is_bound or len(args) != 1 or kwargs.get("past_key_values") is not None:
        return type(layer).forward(layer, *args, **kwargs)
    (hidden,) = args
    x = hidden if plan.input_norm is None else plan.input_norm(hidden)
    arguments = {name: kwargs[name] for name in plan.arguments}
    step = kwargs["lightkv"]
    x, _ = plan.attention(x, lightkv=step, **arguments)
    kept = step.logits_index if plan.is_last and isinstance(step, PackedStep) else None
    if kept is not None and len(kept) < hidden.shape[1]:
        all_tokens = hidden
        x, hidden = (tokens.index_select(1, kept) for tokens in (x, hidden))
        hidden, x = add_and_norm(x, hidden, plan.before_mlp, post=plan.after_attention, scale=plan.scale)
        hidden, _ = add_and_norm(_mlp(plan, x), hidden, None, post=plan.after_mlp, scale=plan.scale)
        # The other tokens keep what they had before the layer, which is not read any more.
        return all_tokens.index_copy_(1, kept, hidden)
    hidden, x = add_and_norm(x, hidden, plan.before_mlp, post=plan.after_attention, scale=plan.scale)
    x = _mlp(plan, x)
    if plan.next_norm is None:
        return add_and_norm(x, hidden, None, post=plan.after_mlp, scale=plan.scale)[0]
    norm_module, norm = plan.next_norm
    hidden, x = add_and_norm(x, hidden, norm, post=plan.after_mlp, scale=plan.scale)
    carry.put(norm_module, hidden, x)
    return hidden


def _mlp(plan: LayerPlan, x: Tensor) -> Tensor:
    for module in plan.mlp:
        x = module(x)
    return x


@dataclass
class FusedLayers:
    """What `fuse_layers` did: how many layers have which fused part, and what keeps its own code."""

    num_layers: int = 0
    num_fused: int = 0  # layers with the fused forward pass
    num_norms: int = 0
    products: Counter[str] = field(default_factory=Counter)  # layers, by what is one product in them
    activations: Counter[str] = field(default_factory=Counter)
    kept: Counter[tuple[str, str]] = field(default_factory=Counter)  # layers, by the part and its class
    joined: list[JoinedLinear] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns the lines to report."""
        products = sorted(self.products, reverse=True)  # qkv first
        parts = []
        if products:
            parts.append(f"{' and '.join(products)} as one product{' each' if len(products) > 1 else ''}")
        if self.num_fused:
            parts.append("norms with the residual")
        elif self.num_norms:
            parts.append("norms as one kernel each")
        parts += [f"{name} with its product" for name in sorted(self.activations)]
        lines = [f"fused {self.num_fused} of {self.num_layers} layers: {', '.join(parts) or 'nothing'}"]
        for (part, kind), count in self.kept.items():
            layers = f"{count} layer{'s' if count > 1 else ''}"
            lines.append(f"kept transformers' code for the {part} of {layers} ({kind})")
        return lines


def unfuse_layers(model: PreTrainedModel) -> None:
    """Gives the modules of `model` that `fuse_layers` changed the forward passes of their classes.

    Joined weights stay joined. Attention modules keep what `bind` gave them.
    """
    reset_forwards(_module(model), _FORWARDS)


@torch.no_grad()
def fuse_layers(model: PreTrainedModel, report: Report) -> FusedLayers:
    """Fuses the decoder layers of a bound `model` where they compute the same, and reports what was done.

    The model runs once, and each layer a few times more, on eight tokens. Weights of q, k and v become views of
    one joined weight, and so do gate and up: at most one layer's weights are in memory twice at a time. This is
    for models that the engine loaded. Modules with hooks, or with a forward pass other than their class's, are
    left alone. Synchronises.
    """
    unfuse_layers(model)
    calls = _ModelCalls(model)
    norms = {module: norm for module, x in calls.norms.items() if (norm := find_norm(module, x)) is not None}
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    mlps = {
        module: layout
        for module in _module(model).modules()
        if not has_hooks(module)
        and module not in calls.attending
        and (layout := find_mlp(module, like)) is not None
    }
    runs: dict[nn.Module, LayerRun] = {}
    plans: dict[nn.Module, LayerPlan] = {}
    for layer, call in calls.layers.items():
        run = _unless_misfit(partial(LayerRun, layer, call))
        if run is not None and (plan := _unless_misfit(partial(run.plan, norms))) is not None:
            runs[layer], plans[layer] = run, plan
    attentions = fused_forwards(model)
    joined = _join_all(model, list(calls.layers), mlps)

    carry = Carry()
    for module, norm in norms.items():
        set_norm_forward(module, norm, carry)
    for module, layout in mlps.items():
        if module in joined or len(layout.gate_up) == 1:
            set_mlp_forward(module, layout, joined.get(module))
    for layer, plan in plans.items():
        following = calls.next_norms.get(layer)
        next_norm = (following, norms[following]) if following in norms else None
        plan = replace(plan, next_norm=next_norm, is_last=plan.attention is calls.last_attention)
        layer.forward = partial(layer_forward, layer, plan, carry)
    set_linear_forwards([_module(model), *joined.values()])
    for layer in plans:
        if not _unless_misfit(partial(_agrees, runs[layer])):
            reset_forwards(layer, _FORWARDS)
            attention = runs[layer].attention
            if attention in attentions:
                attention.forward = attentions[attention]
    carry.clear()

    fused = _summary(model, calls, plans, norms, joined, attentions)
    for line in fused.lines():
        report(line)
    return fused


_FORWARDS = (layer_forward, norm_forward, mlp_forward, linear_forward)


def _module(model: PreTrainedModel) -> nn.Module:
    return cast(nn.Module, model)


class _ModelCalls:
    """A run of a model over eight tokens: how it calls its layers, and what its norms are given.

    `attending`: the modules that call attention, and `last_attention` the last of them. `attentions`: by
    layer, which of its parts does. `next_norms`: by layer, the norm that gets its very output.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: dict[nn.Module, LayerCall] = {}
        self.norms: dict[nn.Module, Tensor] = {}
        modules = [module for module in _module(model).modules() if not has_hooks(module)]
        handles = [
            *(
                module.register_forward_hook(self._note_layer, with_kwargs=True)
                for module in modules
                if any(hasattr(child, "layer_idx") for child in module.children())
            ),
            *(module.register_forward_pre_hook(self._note_norm) for module in modules if may_be_norm(module)),
        ]
        positions, handler = spread_positions(model), NoiseHandler()
        try:
            compute(model, torch.zeros_like(positions), positions, handler, positions[:1])
        finally:
            for handle in handles:
                handle.remove()
        self.attending = {call.module for call in handler.calls}
        self.last_attention = handler.calls[-1].module
        self.attentions = {
            layer: child for layer in self.layers for child in layer.children() if child in self.attending
        }
        self.layers = {layer: self.layers[layer] for layer in self.attentions}
        self.next_norms = {
            layer: norm
            for layer, call in self.layers.items()
            for norm, x in self.norms.items()
            if x is call.output
        }

    def _note_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if len(args) == 1:
            self.layers[module] = LayerCall(args[0], kwargs, output)

    def _note_norm(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.norms.setdefault(module, args[0])


def _unless_misfit(compute: Callable[[], T]) -> T | None:
    """Returns what `compute` does; None if it fails, as with a layer that calls its parts in another way than
    the fused one."""
    try:
        return compute()
    except torch.OutOfMemoryError:
        raise
    except (LightKVError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return None


def _agrees(run: LayerRun) -> bool:
    """Returns whether the layer, fused, returns what its own forward pass returned, but for rounding.

    The order of its computations is known to be right; this is a check of the kernels on these very shapes.
    """
    ours = run.layer(run.x, **run.arguments | {"lightkv": NoiseHandler()}).float()
    own = run.output.float()
    tolerance = max(8 * torch.finfo(run.output.dtype).eps, 2.0**-11)
    return bool(((ours - own).abs() <= tolerance * own.abs().amax(-1, keepdim=True)).all())


def _join_all(
    model: PreTrainedModel, layers: list[nn.Module], mlps: dict[nn.Module, MLPLayout]
) -> dict[nn.Module, JoinedLinear]:
    """Joins qkv and gate_up, layer by layer; returns the joined layers by the module that they are part of."""
    shared = shared_parameters(_module(model))
    joined: dict[nn.Module, JoinedLinear] = {}
    for layer in layers:
        before = [parameter.data for parameter in layer.parameters()] if model.device.type == "cuda" else []
        num_before = len(joined)
        for module in layer.modules():
            if module in mlps and len(mlps[module].gate_up) == 2:
                found = join(module, mlps[module].gate_up, shared)
            else:
                found = join_projections(module, shared)
            if found is not None:
                joined[module] = found
        if before and len(joined) > num_before:
            # transformers loads all weights into one block of memory. If the others stayed, the block would
            # keep holes that fit no joined weight. A layer that moves as a whole leaves room for the next one.
            for module in layer.modules():
                if is_plain(module):
                    _move(module.weight, shared)
        del before
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    return joined


def _move(weight: Any, shared: set[nn.Parameter]) -> None:
    """Puts a weight into other memory, unless it is part of a larger tensor or stands in several places."""
    if weight not in shared and weight.untyped_storage().nbytes() == weight.nbytes:
        weight.data = weight.data.clone()


def _summary(
    model: PreTrainedModel,
    calls: _ModelCalls,
    plans: dict[nn.Module, LayerPlan],
    norms: dict[nn.Module, Norm],
    joined: dict[nn.Module, JoinedLinear],
    attentions: dict[nn.Module, Callable[..., Any]],
) -> FusedLayers:
    fused = FusedLayers(
        model.config.get_text_config().num_hidden_layers, joined=list(joined.values()), num_norms=len(norms)
    )
    for layer, attention in calls.attentions.items():
        if _runs(layer, layer_forward):
            fused.num_fused += 1
        else:
            fused.kept["residuals", type(layer).__name__] += 1
        if attention in joined or (attention in attentions and not hasattr(attention, "q_proj")):
            fused.products["qkv"] += 1
        if attention not in attentions and "forward" not in vars(
            attention
        ):  # an adapter's is not transformers'
            fused.kept["attention", type(attention).__name__] += 1
        mlps = [module for module in layer.modules() if _runs(module, mlp_forward)]
        if mlps:
            fused.products["gate_up"] += 1
        for module in mlps:
            fused.activations[cast(Any, module.forward).args[1].activation] += 1
        body = plans[layer].mlp if layer in plans else ()
        if kept := [module for module in body if module not in mlps] or ([layer] if not mlps else []):
            fused.kept["MLP", type(kept[0]).__name__] += 1
    return fused


def _runs(module: nn.Module, function: Callable[..., Any]) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is function
