"""Proves that an adapted model's attention modules compute what their own forward passes compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from lightkv.attention import LayerShape
from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.attention_call import AttentionCall, KeptHandler
from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.variants.variant import Scored

from .adapt import adapted_modules

# Of a token's attention output. Modules are compared in float32, but the bias by distance that they are given
# is rounded to the model's type, and by Falcon to bfloat16.
_TOLERANCE = 2.0**-6


@dataclass(frozen=True)
class _Reference:
    """An AttentionHandler that attends over one text, by the options of the layers; as zeros with `zeros`."""

    layers: Sequence[LayerShape]
    zeros: bool

    def attend(self, call: AttentionCall) -> Tensor:
        if self.zeros:
            return call.q.new_zeros(call.output_shape)
        call = call.rotated()
        q, k, v = (heads[0].transpose(0, 1) for heads in (call.q, call.k, call.v))
        options = self.layers[call.module.layer_idx].options
        scored = Scored.of_last(slice(0, len(q)), 0, len(q), q.device)
        return attend_reference(q, k, v, options, scored)[None].to(q.dtype)


def require_own_attention(
    model: PreTrainedModel, kept: KeptHandler, layers: Sequence[LayerShape], input_ids: Tensor
) -> None:
    """Raises UnsupportedModel unless each adapted module of `model` returns what its own forward pass returns.

    `input_ids`, int64 `[T]`, is a text. The model runs over it as transformers runs it, and each module is
    called again with the arguments of its call there, in float32: so the weights of one module are in memory in
    float32 beside the model. The model has to be in evaluation mode.
    """
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((module, args, kwargs))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in adapted_modules(model)]
    try:
        model(input_ids=input_ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for module, args, kwargs in calls:
        state = dict(chain(module.named_parameters(), module.named_buffers()))
        forward = partial(functional_call, module, _wide(state), _wide(args), _wide(kwargs))
        own, *ours = (
            output[0][0]
            for output in (
                forward(),
                kept.run(_Reference(layers, zeros=False), forward),
                kept.run(_Reference(layers, zeros=True), forward),
            )
        )
        error = _error(own, *ours)
        if not error <= _TOLERANCE:
            raise UnsupportedModel(
                type(model).__name__,
                f"lightkv's attention of layer {module.layer_idx} differs from its own by {error:.2g} of the "
                f"largest, and may by {_TOLERANCE:.2g}",
            )


def _wide(value: Any) -> Any:
    """Returns `value` with the floating-point tensors in it as float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _wide(one) for name, one in value.items()}
    return tuple(map(_wide, value)) if isinstance(value, tuple) else value


def _error(own: Tensor, ours: Tensor, empty: Tensor) -> float:
    """Returns the median, over tokens, of the largest difference relative to what attention adds to the output.

    All are float32 `[T, C]`; `empty` is the output with zeros from attention: a bias, or a residual, whose
    rounding is allowed for.
    """
    largest = (own - empty).abs().amax(1)
    rounding = 4 * torch.finfo(own.dtype).eps * own.abs().amax(1)
    difference = ((ours - own).abs().amax(1) - rounding).clamp(min=0)
    return float((difference / largest.clamp(min=1e-30)).median())
