"""Finds gated MLPs, and the parts that they compute with.

A module is compared with down(activation(gate(x)) * up(x)) on random inputs, so no class and no name of a part
is known. A module that computes anything else is not fusable.
"""

from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightkv.integrations.model.decoder_layer import activate
from lightkv.triton_kernels.layers.gated_activation import ACTIVATIONS, gated_activation_reference

from .own_pass import LARGE, NotFusable, is_equal, noise, own_forward, relative_error, run_own

_NUM_TOKENS = 8


class MLPLayout(NamedTuple):
    """The parts of a gated MLP, by their names in the module."""

    gate_up: tuple[str, ...]  # gate and up, or the one layer that computes both, gate first
    down: str
    activation: str  # one of ACTIVATIONS


def find_mlp(module: Any, like: Tensor) -> MLPLayout:
    """Returns the parts of `module`, a gated MLP of linear layers. Raises NotFusable if it is anything else.

    The module is run on noise of the dtype and on the device of `like`.
    """
    linears: dict[str, Any] = {name: child for name, child in module.named_children() if _is_linear(child)}
    if len(linears) not in (2, 3):
        raise NotFusable(f"a gated MLP has 2 or 3 linear layers, and it has {len(linears)}")
    reason = NotFusable("the sizes of its linear layers are not those of a gated MLP")
    for *first, down in permutations(linears):
        if _fit([linears[name] for name in first], linears[down]):
            try:
                return MLPLayout(tuple(first), down, _find_activation(module, tuple(first), down, like))
            except NotFusable as error:
                reason = error
    raise reason


def _is_linear(module: Any) -> bool:
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def _fit(first: list[Any], down: Any) -> bool:
    """Returns whether the sizes are those of gate and up, or of one layer for both, and of down."""
    size = down.in_features * (2 if len(first) == 1 else 1)
    return all(one.in_features == down.out_features and one.out_features == size for one in first)


class _Call(NamedTuple):
    x: Tensor
    y: Tensor


def _find_activation(module: Any, first: tuple[str, ...], down: str, like: Tensor) -> str:
    """Returns the activation with which the layers `first` and `down` compute what `module` computes.

    The module is run on noise of two magnitudes. Gate and up have to get its input, and down has to return its
    output, bit for bit; what down gets has to be the product to rounding. Raises NotFusable otherwise.
    """
    token = torch.arange(_NUM_TOKENS, device=like.device)[None, :, None]
    x = noise((1, _NUM_TOKENS, getattr(module, down).out_features), like)
    x = x * torch.where(token % 2 == 1, LARGE, 1.0).to(x.dtype)
    output, calls = _record(module, (*first, down), x)
    last = calls.pop(down)
    if not all(is_equal(call.x, x) for call in calls.values()) or not is_equal(last.y, output):
        raise NotFusable(f"gate or up does not get its input, or {down} does not return its output")
    if len({call.y.shape[:-1] for call in calls.values()}) > 1:
        raise NotFusable("gate and up return different shapes")
    inner = last.x
    gate_up = torch.cat([calls[name].y for name in first], dim=-1)
    gate, up = gate_up.float().chunk(2, dim=-1)
    products = gate * up  # which bound those with the activation
    errors = {
        activation: relative_error(gated_activation_reference(gate_up, activation), inner, products, 4)
        for activation in ACTIVATIONS
    }
    best = min(ACTIVATIONS, key=lambda activation: errors[activation])
    # The kernel itself, too: this is what will run.
    if max(errors[best], relative_error(activate(gate_up, best), inner, products, 4)) > 1.0:
        raise NotFusable(f"{down} does not get the product of up and an activation of the gate")
    return best


def _record(module: Any, names: tuple[str, ...], x: Tensor) -> tuple[Any, dict[str, _Call]]:
    """Runs `module` on x; returns its output, and what each of its parts got and returned.

    Raises NotFusable if a part does not run once, from one tensor to one tensor.
    """
    runs: list[tuple[str, tuple[Any, ...], Any]] = []

    def note(name: str, part: Any, args: tuple[Any, ...], output: Any) -> None:
        runs.append((name, args, output))

    handles = [getattr(module, name).register_forward_hook(partial(note, name)) for name in names]
    try:
        output = run_own(own_forward(module), x)
    finally:
        for handle in handles:
            handle.remove()
    if sorted(name for name, _, _ in runs) != sorted(names):
        raise NotFusable(f"{', '.join(names)} do not run once each")
    calls: dict[str, _Call] = {}
    for name, args, y in runs:
        if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(y, Tensor):
            raise NotFusable(f"{name} does not map one tensor to another")
        calls[name] = _Call(args[0], y)
    return output, calls
