"""Finds out which modules a decoder layer runs, in which order, and how it adds them up.

A layer is run on noise while its parts are watched. What it returns has to be what its own parts returned,
added up, bit for bit. So no class and no name of a part is known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightkv.triton_kernels.layers.residual_norm import Norm

from .fused_rotary import LARGE, NoiseHandler, is_equal, noise


@dataclass(frozen=True)
class LayerPlan:
    """How a layer computes: attention, then the MLP, each added to the residual, with norms around them.

    A Norm that is None is not there, or is unknown and among the modules of `mlp`.
    """

    input_norm: nn.Module | None
    attention: nn.Module
    arguments: tuple[str, ...]  # the keyword arguments of the layer that the attention module gets
    after_attention: Norm | None  # of what attention returns, before it is added
    before_mlp: Norm | None  # of the sum
    mlp: tuple[nn.Module, ...]  # one after the other
    after_mlp: Norm | None  # of what the MLP returns, before it is added
    scale: float  # the factor of what is added
    # The norm of the layer's output, which another module has.
    next_norm: tuple[nn.Module, Norm] | None = None
    is_last: bool = False  # no layer comes after it, so only the tokens whose logits are wanted need its MLP


class LayerCall(NamedTuple):
    """How the model calls a layer, and which tensor it got back."""

    x: Tensor
    arguments: dict[str, Any]
    output: Any


class _PartCall(NamedTuple):
    module: nn.Module
    x: Tensor
    arguments: dict[str, Any]
    output: Tensor


class LayerRun:
    """A run of a layer's own forward pass on noise of two magnitudes, and of each of its parts.

    Raises ValueError if the layer calls its parts, or attention, in a way that no LayerPlan describes.
    """

    def __init__(self, layer: nn.Module, call: LayerCall) -> None:
        self.layer = layer
        self.arguments = call.arguments
        token = torch.arange(call.x.shape[1], device=call.x.device)[:, None]
        factors = torch.where(token // 2 % 2 == 1, LARGE, 1.0).to(call.x.dtype)
        self.x = noise(tuple(call.x.shape), call.x) * factors
        self.calls: list[_PartCall] = []
        self._pairs: set[nn.Module] = set()  # the parts that return an output and None
        handler = NoiseHandler()
        handles = [
            part.register_forward_hook(self._note, with_kwargs=True)
            for part in dict.fromkeys(layer.children())
        ]
        try:
            self.output: Tensor = type(layer).forward(layer, self.x, **self.arguments | {"lightkv": handler})
        finally:
            for handle in handles:
                handle.remove()
        (self.attention,) = (call.module for call in handler.calls)
        if self.attention not in self._pairs:
            raise ValueError("its attention does not return an output and None")
        if not isinstance(self.output, Tensor):
            raise ValueError("it returns more than one tensor")

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(module, nn.Dropout | nn.Identity):
            return  # they change nothing, which the comparison of what follows shows
        arguments = dict(kwargs)
        (x,) = args or (arguments.pop("hidden_states"),)
        if isinstance(output, tuple):
            output, weights = output
            if weights is not None:
                raise ValueError("a part returns more than one tensor")
            self._pairs.add(module)
        self.calls.append(_PartCall(module, x, arguments, output))

    def plan(self, norms: Mapping[nn.Module, Norm]) -> LayerPlan | None:
        """Returns how the layer computes; None if no LayerPlan describes it. `norms`: those known."""
        at = next((i for i, call in enumerate(self.calls) if call.module is self.attention), None)
        if at is None or at > 1:
            return None
        before, attention, after = self.calls[:at], self.calls[at], self.calls[at + 1 :]
        if not _is_chain(self.x, [*before, attention]):
            return None
        arguments = self._attention_arguments(attention)
        if arguments is None:
            return None
        after_attention = after.pop(0) if after and is_equal(after[0].x, attention.output) else None
        added = (after_attention or attention).output
        for scale in (1.0, *self._factors()):
            hidden = self.x + _scaled(added, scale)
            if not after or not _is_chain(hidden, after):
                continue
            if is_equal(hidden + _scaled(after[-1].output, scale), self.output):
                break
        else:
            return None
        modules = [call.module for call in after]
        before_mlp = norms[modules.pop(0)] if len(modules) > 1 and modules[0] in norms else None
        after_mlp = norms[modules.pop()] if len(modules) > 1 and modules[-1] in norms else None
        if after_attention is not None and after_attention.module not in norms:
            return None
        return LayerPlan(
            input_norm=before[0].module if before else None,
            attention=attention.module,
            arguments=arguments,
            after_attention=None if after_attention is None else norms[after_attention.module],
            before_mlp=before_mlp,
            mlp=tuple(modules),
            after_mlp=after_mlp,
            scale=scale,
        )

    def _attention_arguments(self, attention: _PartCall) -> tuple[str, ...] | None:
        """Returns the names of the layer's arguments that attention gets; None if it gets anything else."""
        names = []
        for name, value in attention.arguments.items():
            if name == "lightkv":
                continue
            if name in self.arguments and self.arguments[name] is value:
                names.append(name)
            elif not (value is None or value is False):
                return None
        return tuple(names)

    def _factors(self) -> list[float]:
        """Returns the numbers that the layer keeps: one of them may be the factor of what it adds."""
        return [value for value in vars(self.layer).values() if isinstance(value, float) and value != 1.0]


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def _is_chain(x: Tensor, calls: list[_PartCall]) -> bool:
    """Returns whether the first call gets x, and each other one the output of the one before it."""
    given = [x, *(call.output for call in calls[:-1])]
    return all(map(is_equal, (call.x for call in calls), given))
