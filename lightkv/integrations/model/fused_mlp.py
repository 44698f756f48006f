"""A fused forward pass for gated MLPs: gate and up as one product, the activation and the gating in one pass.

`find_mlp` compares a module with down(activation(gate(x)) * up(x)) on random inputs, so it knows no class and
no name of a part. A module that computes anything else keeps its own forward pass.
"""

from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightkv.triton_kernels.layers.gated_activation import (
    ACTIVATIONS,
    gated_activation,
    gated_activation_reference,
)

from .fused_norm import MIN_EPS
from .fused_rotary import LARGE, is_equal, noise
from .joined_linear import JoinedLinear

_NUM_TOKENS = 8


class MLPLayout(NamedTuple):
    """The parts of a gated MLP, by their names in the module."""

    gate_up: tuple[str, ...]  # gate and up, or the one layer that computes both, gate first
    down: str
    activation: str  # one of ACTIVATIONS


def mlp_forward(
    module: Any, layout: MLPLayout, joined: JoinedLinear | None, *args: Any, **kwargs: Any
) -> Any:
    """The fused forward pass of an MLP. `joined` computes gate and up; None if they are one layer anyway."""
    if len(args) != 1 or kwargs:
        return type(module).forward(module, *args, **kwargs)
    gate_up = getattr(module, layout.gate_up[0]) if joined is None else joined
    return getattr(module, layout.down)(_activate(gate_up(args[0]), layout.activation))


def _activate(gate_up: Tensor, activation: str) -> Tensor:
    function = gated_activation if gate_up.is_cuda else gated_activation_reference
    return function(gate_up, activation)


def set_mlp_forward(module: nn.Module, layout: MLPLayout, joined: JoinedLinear | None) -> None:
    """Gives `module` the forward pass `mlp_forward`."""
    module.forward = partial(mlp_forward, module, layout, joined)


def find_mlp(module: nn.Module, like: Tensor) -> MLPLayout | None:
    """Returns the parts of `module` if it is a gated MLP of linear layers; None if it is anything else.

    The module is run on noise of the dtype and on the device of `like`.
    """
    linears: dict[str, Any] = {name: child for name, child in module.named_children() if _is_linear(child)}
    if len(linears) not in (2, 3):
        return None
    for *first, down in permutations(linears):
        if _fit([linears[name] for name in first], linears[down]):
            layout = MLPLayout(tuple(first), down, "")
            try:
                activation = _find_activation(module, layout, like)
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
                return None  # it takes other arguments, or does not run each part once
            if activation is not None:
                return layout._replace(activation=activation)
    return None


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _fit(first: list[Any], down: Any) -> bool:
    """Returns whether the sizes are those of gate and up, or of one layer for both, and of down."""
    size = down.in_features * (2 if len(first) == 1 else 1)
    return all(one.in_features == down.out_features and one.out_features == size for one in first)


class _Call(NamedTuple):
    x: Tensor
    y: Tensor


def _find_activation(module: Any, layout: MLPLayout, like: Tensor) -> str | None:
    """Returns the activation with which the parts of `layout` compute what `module` computes, or None.

    The module is run on noise of two magnitudes. Gate and up have to get its input, and down has to return its
    output, bit for bit; what down gets has to be the product to rounding.
    """
    down = getattr(module, layout.down)
    token = torch.arange(_NUM_TOKENS, device=like.device)[None, :, None]
    x = noise((1, _NUM_TOKENS, down.out_features), like)
    x = x * torch.where(token % 2 == 1, LARGE, 1.0).to(x.dtype)
    calls = _record(module, (*layout.gate_up, layout.down), x)
    output = calls.pop("")
    last = calls.pop(layout.down)
    inner = last.x
    gate_up = torch.cat([calls[name].y for name in layout.gate_up], dim=-1)
    if not all(is_equal(call.x, x) for call in calls.values()) or not is_equal(last.y, output.y):
        return None
    errors = {
        activation: _error(gated_activation_reference(gate_up, activation), inner, gate_up)
        for activation in ACTIVATIONS
    }
    best = min(ACTIVATIONS, key=lambda activation: errors[activation])
    # The kernel itself, too: this is what will run.
    ours = _activate(gate_up, best)
    return best if max(errors[best], _error(ours, inner, gate_up)) <= 1.0 else None


def _record(module: Any, names: tuple[str, ...], x: Tensor) -> dict[str, _Call]:
    """Runs `module` on x; returns what each of its parts got and returned, and under "" the module itself.

    Raises ValueError if a part runs more than once, or gets more than one argument.
    """
    calls: dict[str, _Call] = {}

    def note(name: str, part: Any, args: tuple[Any, ...], output: Any) -> None:
        if name in calls:
            raise ValueError(f"{name} runs more than once")
        (given,) = args
        calls[name] = _Call(given, output)

    handles = [getattr(module, name).register_forward_hook(partial(note, name)) for name in names]
    try:
        calls[""] = _Call(x, type(module).forward(module, x))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _error(ours: Tensor, own: Tensor, gate_up: Tensor) -> float:
    """Returns the largest difference, in units of what rounding may change: gate * up bounds the products."""
    if ours.dtype != own.dtype or ours.shape != own.shape:
        return float("inf")
    gate, up = gate_up.float().chunk(2, dim=-1)
    eps = max(torch.finfo(own.dtype).eps, MIN_EPS)
    unit = 4 * eps * (gate * up).abs()
    error = ((ours.float() - own.float()).abs() / unit.clamp(min=1e-30)).max()
    return float(torch.nan_to_num(error, nan=float("inf")))
