"""Finds out which modules a decoder layer runs, in which order, and how it adds them up.

A layer is run on noise while its parts are watched. What it returns has to be what its own parts returned,
added up, bit for bit. So no class and no name of a part is known here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightkv.integrations.model.decoder_layer import Attention, DecoderLayer
from lightkv.integrations.model.fused_rotary import NoiseHandler
from lightkv.triton_kernels.layers.residual_norm import Norm

from .own_pass import LARGE, NotFusable, is_equal, noise, own_forward, run_own


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
    rest: tuple[Any, ...]  # what the part returned with the output


class LayerRun:
    """A run of a layer's own forward pass on noise of two magnitudes, and of each of its parts.

    Raises NotFusable if the layer calls its parts, or attention, in a way that no DecoderLayer describes.
    """

    def __init__(self, layer: nn.Module, call: LayerCall) -> None:
        self.layer = layer
        self.arguments = call.arguments
        if not isinstance(call.x, Tensor) or call.x.dim() != 3:
            raise NotFusable("it does not get one vector for each token")
        token = torch.arange(call.x.shape[1], device=call.x.device)[:, None]
        factors = torch.where(token // 2 % 2 == 1, LARGE, 1.0).to(call.x.dtype)
        self.x = noise(tuple(call.x.shape), call.x) * factors
        runs: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            runs.append((module, args, kwargs, output))

        handler = NoiseHandler()
        handles = [
            part.register_forward_hook(note, with_kwargs=True) for part in dict.fromkeys(layer.children())
        ]
        try:
            self.output: Tensor = run_own(own_forward(layer), self.x, **self.arguments | {"lightkv": handler})
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(self.output, Tensor):
            raise NotFusable("it returns more than one tensor")
        if len(handler.calls) != 1:
            raise NotFusable(f"it attends {len(handler.calls)} times")
        self.attention = handler.calls[0].module
        # Dropout and Identity change nothing, which the comparison of what follows shows.
        self.calls = [_part_call(*run) for run in runs if not isinstance(run[0], nn.Dropout | nn.Identity)]

    def plan(self, norms: Mapping[nn.Module, Norm]) -> DecoderLayer:
        """Returns how the layer computes. Raises NotFusable if no DecoderLayer describes it.

        `norms`: those known.
        """
        at = next((i for i, call in enumerate(self.calls) if call.module is self.attention), None)
        if at is None or at > 1:
            raise NotFusable("more than a norm comes before its attention")
        before, attention, after = self.calls[:at], self.calls[at], self.calls[at + 1 :]
        if attention.rest != (None,):
            raise NotFusable("its attention does not return an output and None")
        others = [*before, *after]
        if any(call.rest for call in others[:-1]) or any(_more(call.arguments) for call in others):
            raise NotFusable("a part gets or returns more than one tensor")
        if not _is_chain(self.x, [*before, attention]):
            raise NotFusable("its attention does not get what its first norm returns")
        arguments = self._attention_arguments(attention)
        after_attention = after.pop(0) if after and is_equal(after[0].x, attention.output) else None
        added = (after_attention or attention).output
        if added.shape != self.x.shape or any(call.output.shape != self.x.shape for call in after):
            raise NotFusable("its parts return other shapes than it gets")
        for scale in (1.0, *self._factors()):
            hidden = self.x + _scaled(added, scale)
            if not after or not _is_chain(hidden, after):
                continue
            if is_equal(hidden + _scaled(after[-1].output, scale), self.output):
                break
        else:
            raise NotFusable("what it returns is not x + attention + MLP, added up in this order")
        modules = [call.module for call in after]
        before_mlp = norms[modules.pop(0)] if len(modules) > 1 and modules[0] in norms else None
        after_mlp = norms[modules.pop()] if len(modules) > 1 and modules[-1] in norms else None
        if after_attention is not None and after_attention.module not in norms:
            raise NotFusable(f"{type(after_attention.module).__name__} after its attention is no known norm")
        return DecoderLayer(
            input_norm=before[0].module if before else None,
            attention=Attention(attention.module, arguments),
            after_attention=None if after_attention is None else norms[after_attention.module],
            before_mlp=before_mlp,
            mlp=tuple(modules),
            after_mlp=after_mlp,
            scale=scale,
        )

    def _attention_arguments(self, attention: _PartCall) -> tuple[str, ...]:
        """Returns the names of the layer's arguments that attention gets. Raises NotFusable if it gets more."""
        names = []
        for name, value in attention.arguments.items():
            if name == "lightkv":
                continue
            if name in self.arguments and self.arguments[name] is value:
                names.append(name)
            elif _more({name: value}):
                raise NotFusable(f"its attention gets a {name} that the layer makes")
        return tuple(names)

    def _factors(self) -> list[float]:
        """Returns the numbers that the layer keeps: one of them may be the factor of what it adds."""
        return [value for value in vars(self.layer).values() if isinstance(value, float) and value != 1.0]


def _part_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> _PartCall:
    """Returns a call of a part from one tensor to one. Raises NotFusable for any other call."""
    name, arguments = type(module).__name__, dict(kwargs)
    given = args or (arguments.pop("hidden_states", None),)
    if len(given) != 1 or not isinstance(given[0], Tensor):
        raise NotFusable(f"its {name} does not get one tensor")
    y, *rest = output if isinstance(output, tuple) else (output,)
    if not isinstance(y, Tensor):
        raise NotFusable(f"its {name} does not return a tensor")
    return _PartCall(module, given[0], arguments, y, tuple(rest))


def _more(arguments: Mapping[str, Any]) -> bool:
    """Returns whether any of `arguments` says something."""
    return any(not (value is None or value is False) for value in arguments.values())


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def _is_chain(x: Tensor, calls: list[_PartCall]) -> bool:
    """Returns whether the first call gets x, and each other one the output of the one before it."""
    given = [x, *(call.output for call in calls[:-1])]
    return all(map(is_equal, (call.x for call in calls), given))
