"""Fuses what a mixture of experts computes beside its products, where that is proved to compute the same.

    router ─► ids, weights          expert_choice
    ids    ─► order of the rows     expert_order
    x      ─► gate and up ─► gate   up_product
           ─► down ─► sum           down_product, weighted_sum

Quantised experts copy their rows by expert (`rows_by_expert`) for the weights' own product, and models on a CPU
for PyTorch's `grouped_mm`, with gated_activation or clamped_gate behind it.

transformers' experts look their function up by name (`ExpertsInterface`), as attention does, so ours is
registered there. It has their arguments and their attributes: no class is known here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from lightkv.integrations.model.decoder_layer import activate, activation_of
from lightkv.integrations.model.linears import has_hooks, has_registered_hooks
from lightkv.integrations.model.plans.layer_plans import RouterPlan
from lightkv.integrations.model.plans.own_pass import (
    LARGE,
    NotFusable,
    noise,
    own_forward,
    relative_error,
    run_own,
)
from lightkv.integrations.weights.experts import QuantisedExperts
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layers.clamped_gate import ClampedGate, clamped_gate, clamped_gate_reference
from lightkv.triton_kernels.layers.expert_order import (
    ExpertOrder,
    ExpertRows,
    expert_order,
    expert_order_reference,
)
from lightkv.triton_kernels.layers.expert_products import (
    KERNEL_TYPES,
    ExpertWeights,
    Gate,
    Load,
    down_product,
    expert_launch,
    order_rows,
    up_product,
)
from lightkv.triton_kernels.layers.expert_rows import (
    rows_by_expert,
    rows_by_expert_reference,
    weighted_sum,
    weighted_sum_reference,
)

from .router import find_router, router_forward

_NAME = "lightkv"  # of our function of experts
_OWN = "grouped_mm"  # of the one that it stands in for
_GATE = "lightkv_gate"  # the attribute of experts that run so
_NUM_TOKENS = 8
_SMALL = 0.05  # what gates return is compared as if it were at least as large
# What experts have that use the interface.
_INTERFACE = ("config", "num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")


def _forward(module: Any, gate: Gate, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of what the experts `ids` of each token return, by `weights`: `[T, C]` of `[T, C]`."""
    if not len(x):
        return torch.empty_like(x)
    ids, by_kernels = ids.contiguous(), kernel_weights(module, gate) if _has_kernels(x) else None
    if by_kernels is not None:
        up, down = by_kernels
        load = Load(ids.numel(), module.num_experts, up.weight.dtype, up.weight.stride(-1) != 1)
        launch = expert_launch(tuning.device_class(x.device), load)
        rows = order_rows(ids, module.num_experts, launch)
        inner = up_product(x.to(up.weight.dtype), up, rows, launch)
        inner = _own_gate(module, inner) if gate is None else inner
        return weighted_sum(down_product(inner, down, rows, launch), rows, weights, None).to(x.dtype)
    return _by_copies(module, gate, x, ids, weights).to(x.dtype)


def kernel_weights(module: Any, gate: Gate) -> tuple[ExpertWeights, ExpertWeights] | None:
    """Returns the weights of both products, for kernels that find their rows; None of quantised ones, and of
    types that have none."""
    names = _up_name(module), "down_proj"
    held = [getattr(module, name) for name in names]
    if any(isinstance(one, QuantisedExperts) or one.dtype not in KERNEL_TYPES for one in held):
        return None
    up, down = (one.transpose(1, 2) if module.is_transposed else one for one in held)
    return ExpertWeights(up, _bias(module, names[0]), gate), ExpertWeights(down, _bias(module, names[1]))


def _up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _by_copies(module: Any, gate: Gate, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Returns what `_forward` does, by products of copies of the rows in the order of their experts."""
    name, has_kernels = _up_name(module), _has_kernels(x)
    order = (expert_order if has_kernels else expert_order_reference)(ids, module.num_experts)
    copies = (rows_by_expert if has_kernels else rows_by_expert_reference)(x, order)
    inner = _product(module, name, copies, order)
    inner = _gated(module, gate, inner, order.experts, _bias(module, name))
    y = _product(module, "down_proj", inner, order)
    add_up = weighted_sum if has_kernels else weighted_sum_reference
    return add_up(y, ExpertRows(ids, module.num_experts, order), weights, _bias(module, "down_proj"))


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda


def _product(module: Any, name: str, x: Tensor, order: ExpertOrder) -> Tensor:
    weight = getattr(module, name)
    if isinstance(weight, QuantisedExperts):
        return weight.matmul(x, order.offsets)
    weight = weight if module.is_transposed else weight.transpose(1, 2)
    return functional.grouped_mm(x.to(weight.dtype), weight, offs=order.offsets)


def _bias(module: Any, name: str) -> Tensor | None:
    return cast(Tensor, getattr(module, f"{name}_bias")) if module.has_bias else None


def _gated(module: Any, gate: Gate, x: Tensor, experts: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the gate of the rows x, which are of `experts`. Only a ClampedGate has a bias."""
    if isinstance(gate, ClampedGate):
        return (clamped_gate if _has_kernels(x) else clamped_gate_reference)(x, gate, experts, bias)
    if gate is not None:
        return activate(x, gate)
    return _own_gate(module, x)


def _own_gate(module: Any, x: Tensor) -> Tensor:
    """Returns the gate, or the activation, of the rows x, by the module's own code."""
    return cast(Tensor, module._apply_gate(x) if module.has_gate else module.act_fn(x))


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function of experts that transformers calls. A module that was not proved runs as before."""
    given = hidden_states, top_k_index, top_k_weights
    if _GATE in vars(module):
        return _forward(module, gate_of(module), *given)
    if hidden_states.is_meta:  # torch has their products in bfloat16 alone there
        return torch.empty_like(hidden_states)
    with _dense_weights(module):
        return cast(Tensor, ALL_EXPERTS_FUNCTIONS[_OWN](module, *given))


@contextmanager
def _dense_weights(module: Any) -> Iterator[None]:
    """Gives a module of quantised experts dense weights while the block runs, for code of transformers."""
    quantised = {name: one for name, one in vars(module).items() if isinstance(one, QuantisedExperts)}
    vars(module).update({name: one.dense() for name, one in quantised.items()})
    try:
        yield
    finally:
        vars(module).update(quantised)


def run_quantised_experts(model: nn.Module) -> None:
    """Makes the modules of `model` whose experts are quantised compute by the function of experts here."""
    for module in model.modules():
        if any(isinstance(one, QuantisedExperts) for one in vars(module).values()):
            ExpertsInterface.register(_NAME, _experts)
            cast(Any, module).config._experts_implementation = _NAME


def fuse_experts(block: nn.Module, plan: RouterPlan | None, like: Tensor) -> str | None:
    """Fuses the experts in `block`, and the router beside them, which computes what `plan` says, where they
    compute the same on noise of the dtype and on the device of `like`.

    Modules with hooks are left alone, and so is a router with a forward pass other than its class's. Returns
    why not where the experts or the router keep transformers' code; else None.
    """
    experts: Any = experts_of(block)
    try:
        setattr(experts, _GATE, _find_gate_of(experts, like))
        experts.config._experts_implementation = _NAME
        ExpertsInterface.register(_NAME, _experts)
        router = None if plan is None else getattr(block, plan.name, None)
        if plan is None or router is None or has_hooks(router) or router._modules:
            return "its plan names no router"
        router.forward = partial(router_forward, router, find_router(router, plan, like))
    except NotFusable as error:
        return str(error)
    return None


def unfuse_experts(root: nn.Module) -> None:
    """Makes the experts in `root` compute as transformers' own do."""
    for module in root.modules():
        vars(module).pop(_GATE, None)


def experts_of(block: nn.Module) -> nn.Module | None:
    """Returns the part of `block` that is experts in transformers' interface; None if it has none."""
    return next((part for part in block.children() if all(hasattr(part, one) for one in _INTERFACE)), None)


def gate_of(experts: nn.Module) -> Gate:
    """Returns the gate of experts that `fuse_experts` fused."""
    return cast(Gate, vars(experts)[_GATE])


def has_fused_experts(block: nn.Module) -> bool:
    """Returns whether a part of `block` is experts that `fuse_experts` fused."""
    return any(_GATE in vars(child) for child in block.children())


def _find_gate_of(module: Any, like: Tensor) -> Gate:
    """Returns the gate of the experts `module`. Raises NotFusable if, with it, they do not compute the same."""
    implementation = module.config._experts_implementation
    if has_registered_hooks(module) or implementation not in (_OWN, _NAME):
        raise NotFusable(f"its experts have hooks, or run by {implementation} instead of {_OWN}")
    if getattr(module, "has_post_expert_norm", False):
        raise NotFusable("its experts end with norms")
    gate = _find_gate(module, like) if module.has_gate else None
    if module.has_bias and not isinstance(gate, ClampedGate):
        raise NotFusable("its experts have biases, and a gate that is not known")
    x = noise((_NUM_TOKENS, module.down_proj.shape[2 if module.is_transposed else 1]), like)
    num_experts = module.num_experts
    weights, ids = noise((_NUM_TOKENS, num_experts), like).softmax(-1).topk(min(3, num_experts))
    with _dense_weights(module):
        own = run_own(own_forward(module), x, ids, weights)
    largest = own.abs().amax(-1, keepdim=True)
    if relative_error(_forward(module, gate, x, ids, weights), own, largest, 8) > 1.0:
        raise NotFusable("its experts compute something else than gate, up and down")
    return gate


def _find_gate(module: Any, like: Tensor) -> Gate:
    """Returns the gate of `module`, by its activation or its clamp; None if it computes another one."""
    gate: Gate = activation_of(module)
    if gate is None and hasattr(module, "alpha") and hasattr(module, "limit"):
        gate = ClampedGate(module.alpha, module.limit, 1.0, interleaved=True)
    gate_up = noise((_NUM_TOKENS, module.gate_up_proj.shape[2 if module.is_transposed else 1]), like)
    gate_up[1::2] *= LARGE / 4  # whose products float16 has, too
    own = run_own(module._apply_gate, gate_up)
    ours = (
        None if gate is None else _gated(module, gate, gate_up, gate_up.new_empty(0, dtype=torch.int32), None)
    )
    return gate if ours is not None and relative_error(ours, own, own.abs() + _SMALL, 6) <= 1.0 else None
