"""Positions for attention modules that would take a token's place in the batch for its position.

Llama-4 scales queries of layers without rotary positions by their position, which its attention module counts
itself: from the length of the cache on. In a packed batch there is no such length. So the layer gets a cache
that holds nothing; its length, for every token, is the token's position less its place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def fix_positions(model: PreTrainedModel) -> None:
    """Makes the layers of `model` whose attention counts positions itself take those of the call.

    `release_positions` undoes it. A call with a cache of its own, or without positions, is left as it is.
    """
    for layer in _counting_layers(model):
        if not _hooks_of(layer):
            layer.register_forward_pre_hook(_give_positions, with_kwargs=True)


def has_positions(model: PreTrainedModel) -> bool:
    """Returns whether `fix_positions` has changed layers of `model`."""
    return any(_hooks_of(layer) for layer in _counting_layers(model))


def release_positions(model: PreTrainedModel) -> None:
    """Makes all layers of `model` count positions as they did before `fix_positions`."""
    for layer in _counting_layers(model):
        for hook_id in _hooks_of(layer):
            del layer._forward_pre_hooks[hook_id]
            del layer._forward_pre_hooks_with_kwargs[hook_id]


def _counting_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the layers whose attention scales queries by their place, by transformers' names for it."""
    return [
        module
        for module in model.modules()
        if any(
            getattr(child, "attn_temperature_tuning", False) and not getattr(child, "use_rope", False)
            for child in module.children()
        )
    ]


def _hooks_of(layer: nn.Module) -> list[int]:
    return [idx for idx, hook in layer._forward_pre_hooks.items() if hook is _give_positions]


def _give_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook before the forward pass of a layer that gives it a `_PlacesToPositions` for a cache."""
    position_ids = kwargs.get("position_ids")
    if kwargs.get("past_key_values") is not None or position_ids is None or len(position_ids) != 1:
        return None
    places = torch.arange(position_ids.shape[1], device=position_ids.device)
    return args, kwargs | {"past_key_values": _PlacesToPositions(position_ids[0] - places)}


@dataclass(frozen=True)
class _PlacesToPositions:
    """A cache for one call of a layer: it holds no K/V, and has a length for every token, int64 `[T]`."""

    length: torch.Tensor

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self.length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states
