"""Finds the plans of decoder layers by trying what other layers' plans say, and comparing with the layers'
own code.

    python -m tests.support.plan_search llama qwen3 ...

prints the plans of the named model types, from tiny random models, for the table in
`lightkv/integrations/model/plans/layer_plans.py`. A part whose name no plan has is not found: give it a row
by hand.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightkv.integrations.model.adapters.adapt import adapt
from lightkv.integrations.model.decoder_layer import layer_forward
from lightkv.integrations.model.experts.mixture import experts_of
from lightkv.integrations.model.experts.router import find_router
from lightkv.integrations.model.fused_layers import FoundParts, find_mlp
from lightkv.integrations.model.fused_norm import Carry, norm_of
from lightkv.integrations.model.fused_rotary import find_layout
from lightkv.integrations.model.hf_model import bind
from lightkv.integrations.model.plans.layer_plans import PLANS, LayerPlan, norm_form
from lightkv.integrations.model.plans.own_pass import NotFusable
from lightkv.triton_kernels.layers.residual_norm import residual_norm_reference
from tests.support.tiny_architectures import random_weights, tiny

Found = dict[str, dict[str, Any]]  # fields of a plan, by the class of the decoder layer

_ATTENTION = ("qkv", "is_by_head", "output", "head_norms", "norms_over_all", "angles", "is_interleaved")
_MLP = ("gate_up", "down", "activation")
_LAYER = ("input_norm", "after_attention", "before_mlp", "mlp", "after_mlp", "residual_factor")


@torch.no_grad()
def search(model: PreTrainedModel) -> Found:
    """Returns what the decoder layers of `model`, which is adapted and bound, are found to compute: for each
    part of a layer the fields of the first plan that agrees with its own code, and nothing for a part that
    none agrees with."""
    adapt(model)
    bind(model)
    root: Any = model
    layers = {layer: mixers for layer in root.modules() if (mixers := _mixers_of(layer)) is not None}
    parts = FoundParts(model, {layer: LayerPlan(mixers=mixers) for layer, mixers in layers.items()})
    like, found = torch.empty(0, dtype=model.dtype), Found()
    for layer in layers:
        fields = found.setdefault(type(layer).__name__, {})
        for searched in (
            _attention(parts, layer),
            _mlp(layer, like),
            _router(layer, like),
            _order(parts, layer),
        ):
            fields |= {name: value for name, value in searched.items() if name not in fields}
    return found


def norm_differs(norm: Any) -> bool:
    """Returns whether a norm computes, in bfloat16 and with random weights, what another form is closer to
    than the one that its class has."""
    form, norm = norm_form(norm), copy.deepcopy(norm).bfloat16()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, mean=0.5)
    dim = next((one.shape[-1] for one in norm.parameters()), getattr(norm, "normalized_shape", [32])[-1])
    x = torch.randn(64, dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    own = norm(x)

    def error(flags: tuple[bool, bool, bool]) -> float:
        found = norm_of(norm)
        ours = residual_norm_reference(x, None, found._replace(**dict(zip(_FLAGS, flags, strict=True))))[1]
        return float((ours.float() - own.float()).abs().sum())

    return any(error(flags) < error(form[:3]) for flags in product((False, True), repeat=3))


_FLAGS = ("centred", "plus_one", "rounded_before")


def _mixers_of(layer: nn.Module) -> tuple[str, ...] | None:
    slots = dict.fromkeys(plan.mixers for plan in PLANS.values())
    return next((slot for slot in slots if hasattr(getattr(layer, slot[0], None), "layer_idx")), None)


def _values(*names: str) -> Iterator[dict[str, Any]]:
    """Yields what the plans say of the fields `names` together, the commonest first."""
    every = [tuple(getattr(plan, name) for name in names) for plan in PLANS.values()]
    for values in sorted(dict.fromkeys(every), key=every.count, reverse=True):
        yield dict(zip(names, values, strict=True))


def _attention(parts: FoundParts, layer: nn.Module) -> dict[str, Any]:
    attention = parts.attentions[layer]
    for values in _values(*_ATTENTION):
        if attention in parts.calls and all(
            hasattr(attention, one) for one in (*values["qkv"], values["output"])
        ):
            with suppress(NotFusable):
                find_layout(attention, LayerPlan(**values), parts.calls[attention])
                absent = () if values["head_norms"] else ("head_norms", "norms_over_all")
                return {name: value for name, value in values.items() if name not in absent}
    return {}


def _mlp(layer: nn.Module, like: torch.Tensor) -> dict[str, Any]:
    for module, values in product(layer.modules(), _values(*_MLP)):
        with suppress(NotFusable):
            find_mlp(module, LayerPlan(**values), like)
            return values
    return {}


def _router(layer: nn.Module, like: torch.Tensor) -> dict[str, Any]:
    blocks = [module for module in layer.modules() if experts_of(module) is not None]
    for block, values in product(blocks, _values("router")):
        if (plan := values["router"]) is not None and hasattr(block, plan.name):
            router = copy.deepcopy(getattr(block, plan.name))
            # In bfloat16, in which it shows whether the product is computed in float32.
            for name in {"weight", "bias"} & router._parameters.keys():
                if (one := router._parameters[name]) is not None:
                    router._parameters[name] = nn.Parameter(one.bfloat16(), requires_grad=False)
            with suppress(NotFusable):
                find_router(router, plan, like.bfloat16())
                return values
    return {}


def _order(parts: FoundParts, layer: nn.Module) -> dict[str, Any]:
    for values in _values(*_LAYER):
        parts.plans[layer] = LayerPlan(**values)
        with suppress(NotFusable, AttributeError, IndexError, KeyError):
            decoder_layer = parts.decoder_layer(layer)
            parts.own[layer].require_same(partial(layer_forward, layer, decoder_layer, Carry()))
            return values
    return {}


if __name__ == "__main__":
    for model_type in sys.argv[1:]:
        for class_name, values in search(random_weights(tiny(model_type))).items():
            said = {name: value for name, value in values.items() if value != getattr(LayerPlan(), name)}
            print(
                f"{class_name}: LayerPlan({', '.join(f'{name}={value!r}' for name, value in said.items())})"
            )
