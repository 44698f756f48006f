"""The norm that a module computes, and what carries a normalised output from one layer to the next.

A layer computes its last addition together with the norm that comes next, which belongs to another module: the
next layer, or the model. The `Carry` holds the result until that norm is called.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightkv.integrations.model.plans.layer_plans import norm_form
from lightkv.integrations.model.plans.own_pass import (
    NotFusable,
    noise,
    own_forward,
    relative_error,
    run_fused,
    run_own,
)
from lightkv.triton_kernels.layers.residual_norm import (
    MAX_DIM,
    residual_norm,
    residual_norm_reference,
)
from lightkv.triton_kernels.norms import Norm

from .linears import forward_of, has_registered_hooks

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


def is_called_as_norm(module: nn.Module) -> bool:
    """Returns whether a call of `module` computes its norm and nothing else: it has no hooks, and its forward
    pass is its class's or `norm_forward`."""
    is_known = "forward" not in vars(module) or forward_of(module, norm_forward) is not None
    return is_known and not has_registered_hooks(module)


def norm_of(module: Any) -> Norm | None:
    """Returns the norm of `module`, by the form of its class; None where it has none, or names no epsilon."""
    form = norm_form(module)
    if form is None:
        return None
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    named = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    eps = next((one for one in (*named, form.eps) if isinstance(one, float)), None)
    return None if eps is None else Norm(weight, bias, eps, *form[:3])


def find_norm(module: Any, x: Tensor) -> Norm:
    """Returns the norm of `module`, for rows like x `[..., C]`. Raises NotFusable unless the kernel returns
    what the module's own forward pass returns for noise, to rounding."""
    norm = norm_of(module)
    if norm is None or x.shape[-1] > MAX_DIM or any(one.dim() > 1 for one in module.parameters()):
        raise NotFusable("it is no norm that is known, or has rows that no kernel takes")
    rows = noise(tuple(x.shape), x) + 0.5  # with a mean, so that a norm that subtracts it shows
    factors = torch.tensor(_FACTORS).repeat(rows[..., 0].numel())[: rows[..., 0].numel()]
    rows = rows * factors.view(x.shape[:-1])[..., None].to(x)
    own = run_own(own_forward(module), rows)
    if not isinstance(own, Tensor):
        raise NotFusable("it does not return a tensor")
    ours = run_fused(add_and_norm, rows, None, norm)[1]
    if relative_error(ours, own, own.abs().amax(-1, keepdim=True), 3) > 1.0:
        raise NotFusable("it computes something else than its class did")
    return norm
