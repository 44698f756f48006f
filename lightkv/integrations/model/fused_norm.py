"""Finds out how a norm module computes, and carries a normalised output from one layer to the next.

A layer computes its last addition together with the norm that comes next, which belongs to another module: the
next layer, or the model. The `Carry` holds the result until that norm is called.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightkv.integrations.model.proofs.own_pass import (
    NotFusable,
    epsilons,
    noise,
    own_forward,
    relative_error,
    run_own,
)
from lightkv.triton_kernels.layers.residual_norm import (
    MAX_DIM,
    Norm,
    residual_norm,
    residual_norm_reference,
)

from .linears import has_registered_hooks

# The factors of the rows that a norm is tried on: large ones show clipping, small ones the epsilon.
_FACTORS = (1.0, 64.0, 2.0**-10)


def add_and_norm(
    x: Tensor, residual: Tensor | None, norm: Norm | None, *, post: Norm | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns what `residual_norm` returns, on any device."""
    function = residual_norm if x.is_cuda else residual_norm_reference
    return function(x, residual, norm, post=post, scale=scale)


class _Carried(NamedTuple):
    norm: nn.Module
    hidden: Tensor
    normed: Tensor


class Carry:
    """Holds what a layer computed for the norm that comes after it, until that norm, or another one, asks."""

    def __init__(self) -> None:
        self._carried: _Carried | None = None

    def put(self, norm: nn.Module, hidden: Tensor, normed: Tensor) -> None:
        """Holds `normed`, the output of the module `norm` for the very tensor `hidden`."""
        self._carried = _Carried(norm, hidden, normed)

    def take(self, norm: nn.Module, hidden: Tensor) -> Tensor | None:
        """Returns the output of `norm` for the very tensor `hidden` if it is held, and holds nothing then."""
        carried, self._carried = self._carried, None
        if carried is None or carried.norm is not norm or carried.hidden is not hidden:
            return None
        return carried.normed

    def clear(self) -> None:
        """Drops what is held."""
        self._carried = None


def norm_forward(module: nn.Module, norm: Norm, carry: Carry, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a norm module in one kernel, or what a layer computed of it."""
    if len(args) != 1 or kwargs:
        return type(module).forward(module, *args, **kwargs)
    (x,) = args
    carried = carry.take(module, x)
    return add_and_norm(x, None, norm)[1] if carried is None else carried


def set_norm_forward(module: nn.Module, norm: Norm, carry: Carry) -> None:
    """Gives `module` the forward pass `norm_forward`."""
    module.forward = partial(norm_forward, module, norm, carry)


def is_called_as_norm(module: nn.Module) -> bool:
    """Returns whether a call of `module` computes its norm and nothing else: it has no hooks, and its forward
    pass is its class's or `norm_forward`."""
    forward = vars(module).get("forward")
    is_ours = isinstance(forward, partial) and forward.func is norm_forward
    return not has_registered_hooks(module) and (forward is None or is_ours)


def may_be_norm(module: nn.Module) -> bool:
    """Returns whether `module` has no parts, and no parameters but a weight and a bias of one dimension."""
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    sizes = {parameter.dim() for parameter in module.parameters()}
    return not module._modules and not module._buffers and names <= {"weight", "bias"} and sizes <= {1}


def find_norm(module: Any, x: Tensor) -> Norm | None:
    """Returns how `module` computes, from a run on noise of the shape, dtype and device of x `[..., C]`.

    Returns None unless a Norm gives the same to rounding. Of several, the one that is closest is returned.
    """
    if x.shape[-1] > MAX_DIM:
        return None
    rows = noise(tuple(x.shape), x) + 0.5  # with a mean, so that a norm that subtracts it shows
    factors = torch.tensor(_FACTORS).repeat(rows[..., 0].numel())[: rows[..., 0].numel()]
    rows = rows * factors.view(x.shape[:-1])[..., None].to(x)
    try:
        own = run_own(own_forward(module), rows)
    except NotFusable:
        return None  # it takes other arguments, or another shape
    if not isinstance(own, Tensor) or own.shape != rows.shape or own.dtype != rows.dtype:
        return None
    best, least, largest = None, float("inf"), own.abs().amax(-1, keepdim=True)
    for norm in _forms(module, rows):
        error = relative_error(residual_norm_reference(rows, None, norm)[1], own, largest, 3)
        if error <= 1.0 and error < least:
            best, least = norm, error
        if error == 0.0:
            break
    # The kernel itself has to agree, too: this is what will run.
    if best is None or relative_error(add_and_norm(rows, None, best)[1], own, largest, 3) > 1.0:
        return None
    return best


def _forms(module: Any, x: Tensor) -> Iterator[Norm]:
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    forms = list(product((False, True), (False, True) if weight is not None else (False,), (True, False)))
    for eps in epsilons(module, x.dtype):
        for centred, plus_one, rounded_before in forms:
            yield Norm(weight, bias, eps, centred, plus_one, rounded_before)
