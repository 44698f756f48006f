"""Fuses the decoder layers of a model that the engine loaded, where that is proved to compute the same.

`fuse_layers` finds the parts (proofs/), has their linear layers joined (linears.py), gives the layers the
forward pass of decoder_layer.py, and compares each with the model's own. What differs keeps transformers' code.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightkv.integrations.model.experts.mixture import fuse_experts, has_fused_experts, unfuse_experts
from lightkv.integrations.model.experts.router import router_forward
from lightkv.integrations.model.proofs.gated_mlp import MLPLayout, find_mlp
from lightkv.integrations.model.proofs.layer_run import LayerCall, LayerRun
from lightkv.integrations.model.proofs.own_pass import NotFusable
from lightkv.integrations.ranks.sharded import SummedLinear
from lightkv.triton_kernels.layers.residual_norm import Norm

from .attention_call import compute
from .context import num_layers
from .decoder_layer import DecoderLayer, GatedMLP, NextNorm, gated_mlp, layer_forward, mlp_forward
from .fused_norm import Carry, find_norm, may_be_norm, norm_forward, set_norm_forward
from .fused_rotary import (
    NoiseHandler,
    fused_forwards,
    layout_of,
    separate_projections,
    spread_positions,
    use_joined,
)
from .linears import (
    Linears,
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
    """What `fuse_layers` did: how many layers have which fused part, and what keeps its own code."""

    linears: Linears
    num_layers: int = 0
    num_fused: int = 0  # layers with the fused forward pass
    num_norms: int = 0
    products: Counter[str] = field(default_factory=Counter)  # layers, by what is one product in them
    activations: Counter[str] = field(default_factory=Counter)
    num_mixtures: int = 0  # layers whose experts are fused
    # Layers, by the part that keeps its own code, its class, and why; "" where that is not known.
    kept: Counter[tuple[str, str, str]] = field(default_factory=Counter)

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
        if self.num_mixtures:
            has_routers = not any(part == "router" for part, _, _ in self.kept)
            parts.append(f"experts' {'choice, ' if has_routers else ''}rows and sum as one kernel each")
        lines = [f"fused {self.num_fused} of {self.num_layers} layers: {', '.join(parts) or 'nothing'}"]
        for (part, kind, reason), count in self.kept.items():
            layers = f"{count} layer{'s' if count > 1 else ''}"
            why = f": {reason}" if reason else ""
            lines.append(f"kept transformers' code for the {part} of {layers} ({kind}){why}")
        return lines + self.linears.lines


def unfuse_layers(model: PreTrainedModel) -> None:
    """Gives the modules of `model` that `fuse_layers` changed the forward passes of their classes.

    Joined weights stay joined. Attention modules keep what `bind` gave them.
    """
    reset_forwards(_module(model), _FORWARDS)
    unfuse_experts(_module(model))


@torch.no_grad()
def fuse_layers(model: PreTrainedModel, report: Report, packed: bool = False) -> FusedLayers:
    """Fuses the decoder layers of a bound `model` where they compute the same, and reports what was done.

    The model runs once, and each layer a few times more, on eight tokens. Weights of q, k and v become views of
    one joined weight, and so do gate and up: at most one layer's weights are in memory twice at a time.
    `packed`: whether linear layers are packed, too (`prepare_linears`). This is for models that the engine
    loaded. Modules with hooks, or with a forward pass other than their class's, are left alone. Synchronises.
    """
    unfuse_layers(model)
    calls = _ModelCalls(model)
    parts = _ModelParts.of(model, calls)
    attentions = fused_forwards(model)
    linears = prepare_linears(
        _module(model),
        {layer: parts.one_input(layer) for layer in calls.layers},
        packed=packed,
        few_tokens=True,
    )
    why_not = fuse_experts(_module(model), _like(model))
    carry = Carry()
    for module, norm in parts.norms.items():
        set_norm_forward(module, norm, carry)
    for module, layout in parts.mlps.items():
        if module in linears.joined or len(layout.gate_up) == 1:
            gate_up = linears.joined.get(module) or getattr(module, layout.gate_up[0])
            mlp = GatedMLP(gate_up, layout.activation, getattr(module, layout.down))
            cast(Any, module).forward = partial(mlp_forward, module, mlp)
    for module, joined in linears.joined.items():
        if layout_of(module) is not None:
            use_joined(module, joined)
    for module in parts.layers:
        cast(Any, module).forward = partial(layer_forward, module, parts.placed(module, calls), carry)
    for module, (run, found) in parts.layers.items():
        if not _agrees(run):
            parts.why_not[module] = "fused, it returns something else"
            reset_forwards(module, _FORWARDS)
            unfuse_experts(module)
            if found.attention.module in attentions:
                cast(Any, found.attention.module).forward = attentions[found.attention.module]
    carry.clear()

    fused = _summary(model, calls, parts, linears, attentions, why_not)
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
        if _runs(module, layer_forward):
            layer = cast(DecoderLayer, cast(Any, module).forward.args[1])
            weights = tuple((weight.shape, weight.dtype) for weight in module.parameters())
            key = type(module), weights, kind(cast(Any, layer.attention.module).layer_idx), layer.is_last
            seen[key] += 1
            if seen[key] > 2:
                skipped[module] = module.forward
    for module in skipped:
        cast(Any, module).forward = _skip
    try:
        yield
    finally:
        for module, forward in skipped.items():
            cast(Any, module).forward = forward


def _skip(hidden: Tensor, **given: Any) -> Tensor:
    return hidden


def _module(model: PreTrainedModel) -> nn.Module:
    return cast(nn.Module, model)


def _like(model: PreTrainedModel) -> Tensor:
    """Returns a tensor of the dtype and on the device of `model`."""
    return torch.empty(0, dtype=model.dtype, device=model.device)


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


class _ModelParts(NamedTuple):
    """What was found in a model: its known norms, its gated MLPs, and its layers, each with a run of its own.

    `why_not`: why other modules were not found to be layers, or gated MLPs.
    """

    norms: dict[nn.Module, Norm]
    mlps: dict[nn.Module, MLPLayout]
    layers: dict[nn.Module, tuple[LayerRun, DecoderLayer]]
    why_not: dict[nn.Module, str]

    @classmethod
    def of(cls, model: PreTrainedModel, calls: _ModelCalls) -> "_ModelParts":
        norms = {
            module: norm for module, x in calls.norms.items() if (norm := find_norm(module, x)) is not None
        }
        parts = cls(norms, {}, {}, {})
        like = _like(model)
        for module in _module(model).modules():
            if has_hooks(module) or module in calls.attending:
                continue
            try:
                parts.mlps[module] = find_mlp(module, like)
            except NotFusable as error:
                parts.why_not[module] = str(error)
        for layer, call in calls.layers.items():
            try:
                run = LayerRun(layer, call)
                parts.layers[layer] = run, run.plan(norms)
            except NotFusable as error:
                parts.why_not[layer] = str(error)
        return parts

    def one_input(self, layer: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
        """Returns the names of the linear layers of one input, by the module in `layer` that has them."""
        groups = {}
        for module in layer.modules():
            gate_up = self.mlps[module].gate_up if module in self.mlps else ()
            names = gate_up if len(gate_up) == 2 else separate_projections(module)
            if names:
                groups[module] = names
        return groups

    def placed(self, module: nn.Module, calls: _ModelCalls) -> DecoderLayer:
        """Returns a layer that was found, with its place in the model, and with its attention inlined where
        that has no hooks."""
        (_, layer), following = self.layers[module], calls.next_norms.get(module)
        attention = layer.attention
        is_inlined = "position_embeddings" in attention.arguments and not has_registered_hooks(
            attention.module
        )
        return replace(
            layer,
            attention=replace(attention, is_inlined=is_inlined),
            next_norm=NextNorm(following, self.norms[following]) if following in self.norms else None,
            is_last=attention.module is calls.last_attention,
            takes_turns=is_inlined and _sums_twice(layer),
        )


def _sums_twice(layer: DecoderLayer) -> bool:
    """Returns whether both the attention and the MLP of a layer end with a sum over ranks."""
    layout, gated = layout_of(layer.attention.module), gated_mlp(layer.mlp[-1])
    if layout is None or gated is None:
        return False
    ends = getattr(layer.attention.module, layout.output), gated.down
    return all(isinstance(end, SummedLinear) for end in ends)


def _agrees(run: LayerRun) -> bool:
    """Returns whether the layer, fused, returns what its own forward pass returned, but for rounding.

    The order of its computations is known to be right; this is a check of the kernels on these very shapes. It
    runs code of ours, and parts that have run on these inputs before: whatever it raises is a bug.
    """
    ours = run.layer(run.x, **run.arguments | {"lightkv": NoiseHandler()}).float()
    own = run.output.float()
    tolerance = max(8 * torch.finfo(run.output.dtype).eps, 2.0**-11)
    return bool(((ours - own).abs() <= tolerance * own.abs().amax(-1, keepdim=True)).all())


def _summary(
    model: PreTrainedModel,
    calls: _ModelCalls,
    parts: _ModelParts,
    linears: Linears,
    attentions: Mapping[nn.Module, Callable[..., Any]],
    why_not: Mapping[nn.Module, str],
) -> FusedLayers:
    count = num_layers(model.config.get_text_config()) or len(calls.layers)
    fused = FusedLayers(linears, count, num_norms=len(parts.norms))

    def keep(part: str, module: nn.Module, reason: str = "") -> None:
        fused.kept[part, type(module).__name__, reason] += 1

    for layer, attention in calls.attentions.items():
        if _runs(layer, layer_forward):
            fused.num_fused += 1
        else:
            keep("residuals", layer, parts.why_not[layer])
        if attention in linears.joined or (attention in attentions and not hasattr(attention, "q_proj")):
            fused.products["qkv"] += 1
        # What has an adapter's forward pass does not keep transformers' code.
        if attention not in attentions and "forward" not in vars(attention):
            keep("attention", attention)
        mlps = [module for module in layer.modules() if _runs(module, mlp_forward)]
        if mlps:
            fused.products["gate_up"] += 1
        for module in mlps:
            fused.activations[cast(GatedMLP, gated_mlp(module)).activation] += 1
        mixtures = [module for module in layer.modules() if has_fused_experts(module)]
        fused.num_mixtures += bool(mixtures)
        for module in mixtures:
            if module in why_not:
                keep("router", module, why_not[module])
        body = parts.layers[layer][1].mlp if layer in parts.layers else ()
        if kept := [module for module in body if module not in (*mlps, *mixtures)]:
            keep("MLP", kept[0], {**parts.why_not, **why_not}.get(kept[0], ""))
        elif not mlps and not mixtures:
            keep("MLP", layer)
    return fused


def _runs(module: nn.Module, function: Callable[..., Any]) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is function
