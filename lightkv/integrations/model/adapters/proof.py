"""Proves that an adapted model's attention modules compute what their own forward passes compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightkv.attention import LayerShape
from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.attention_call import AttentionCall, KeptHandler
from lightkv.triton_kernels.attention.attention_reference import attend_reference

from .adapt import adapted_modules

_MIN_TOKENS, _MAX_TOKENS = 24, 512
# Of a token's attention output: scores in 16 bits are rounded before their exponential is taken, and Falcon
# rounds the bias of ALiBi to bfloat16 in every type.
_TOLERANCES = {torch.float32: 2.0**-6}
_TOLERANCE_16_BITS = 2.0**-3


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
        positions = torch.arange(len(q), device=q.device)
        options = self.layers[call.module.layer_idx].options
        return attend_reference(q, k, v, positions, options)[None].to(q.dtype)


def num_tokens_for(layers: Sequence[LayerShape], context: int | None) -> int:
    """Returns how many tokens the text of `require_own_attention` should have, to reach past the windows."""
    widest = max(layer.options.window for layer in layers)
    return min(max(_MIN_TOKENS, widest + 8), _MAX_TOKENS, context or _MAX_TOKENS)


def require_own_attention(
    model: PreTrainedModel, kept: KeptHandler, layers: Sequence[LayerShape], input_ids: Tensor
) -> None:
    """Raises UnsupportedModel unless each adapted module of `model` returns what its own forward pass returns.

    `input_ids`, int64 `[T]`, is a text. The model runs over it as transformers runs it, and each module is
    called again with the arguments of its call there. The model has to be in evaluation mode.
    """
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append((module, args, kwargs, output[0]))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in adapted_modules(model)]
    try:
        model(input_ids=input_ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for module, args, kwargs, own in calls:
        ours, empty = (
            kept.run(_Reference(layers, zeros), module, *args, **kwargs)[0] for zeros in (False, True)
        )
        error = _error(ours[0].float(), own[0].float(), empty[0].float(), torch.finfo(own.dtype).eps)
        if not error <= (allowed := _TOLERANCES.get(own.dtype, _TOLERANCE_16_BITS)):
            raise UnsupportedModel(
                type(model).__name__,
                f"layer {module.layer_idx}'s own attention and lightkv's differ by {error:.2g} of the largest, "
                f"and may differ by {allowed:.2g}",
            )


def _error(ours: Tensor, own: Tensor, empty: Tensor, eps: float) -> float:
    """Returns the median, over tokens, of the largest difference relative to what attention adds to the output.

    All are `[T, C]`; `empty` is the output with zeros from attention: a bias, or a residual, whose rounding is
    allowed for.
    """
    largest = (own - empty).abs().amax(1)
    difference = ((ours - own).abs().amax(1) - 4 * eps * own.abs().amax(1)).clamp(min=0)
    return float((difference / largest.clamp(min=1e-30)).median())
