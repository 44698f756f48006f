"""Positions for modules of a model that would count them in another way than `compute`, which gives them.

RoBERTa and its kin begin a text after the position that has the id of the padding token, so the positions of a
call are moved to there. The decoders of BART and its kin take no positions: they count them from the length of
the cache on, and hand them to a module with the embeddings. That module gets those of the call.

Llama-4 scales queries of layers without rotary positions by their position, which its attention module counts
itself: from the length of the cache on. In a packed batch there is no such length. So the layer gets a cache
that holds nothing; its length, for every token, is the token's position less its place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightkv.errors import UnsupportedModel

from .context import argument_names, cache_name, first_position, given_cache


def fix_positions(model: PreTrainedModel) -> None:
    """Makes the modules of `model` that count positions in a way of their own take those of `compute`.

    `release_positions` undoes it. A layer that is called with a cache of its own, or without positions, and a
    model that is not called by `compute`, are left as they are.
    """
    if has_positions(model):
        return
    for layer in model.modules():
        # Whose attention scales queries by their place, by transformers' names for it.
        if any(
            getattr(child, "attn_temperature_tuning", False) and not getattr(child, "use_rope", False)
            for child in layer.children()
        ):
            layer.register_forward_pre_hook(_CountGiven(cache_name(layer)), with_kwargs=True)
    embeddings, first = counting_embeddings(model), first_position(model.config)
    if embeddings or first:
        given = _GivenPositions(first, is_named="position_ids" in argument_names(model))
        model.register_forward_pre_hook(given, with_kwargs=True)
        for embedding in embeddings:
            embedding.register_forward_pre_hook(_EmbedGiven(given), with_kwargs=True)


def has_positions(model: PreTrainedModel) -> bool:
    """Returns whether `fix_positions` has changed modules of `model`."""
    return any(_hooks_of(module) for module in model.modules())


def release_positions(model: PreTrainedModel) -> None:
    """Makes all modules of `model` count positions as they did before `fix_positions`."""
    for module in model.modules():
        for hook_id in _hooks_of(module):
            del module._forward_pre_hooks[hook_id]
            del module._forward_pre_hooks_with_kwargs[hook_id]


def counting_embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the embeddings of positions of a `model` that counts them itself: its forward pass takes none."""
    if "position_ids" in argument_names(model):
        return []
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding) and "position_ids" in argument_names(module)
    ]


def counts_itself(model: PreTrainedModel) -> bool:
    """Returns whether `model` counts the positions of a text right only where it is given none."""
    return first_position(model.config) > 0 or bool(counting_embeddings(model))


def require_generated_positions(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel if transformers' `generate` gives `model` other positions than `compute` does."""
    name = type(model).__name__
    if first := first_position(model.config):
        reason = f"it counts positions from {first}, and transformers' generate gives it positions from 0"
        raise UnsupportedModel(name, f"{reason}; LLM and CachedModel run it")
    if counting_embeddings(model):
        raise UnsupportedModel(name, "its forward pass takes no position_ids; LLM and CachedModel run it")


def _hooks_of(module: nn.Module) -> list[int]:
    """Returns the ids of the hooks of this file that `module` has."""
    own: dict[int, Callable[..., Any]] = module._forward_pre_hooks
    return [idx for idx, hook in own.items() if isinstance(hook, _GivenPositions | _EmbedGiven | _CountGiven)]


@dataclass(eq=False)
class _GivenPositions:
    """A hook before the forward pass of a model that moves the positions of `compute` to those of the model.

    It also keeps them for the modules that embed them.

    `first`: the position of a text's first token. `is_named`: whether the forward pass takes positions.
    """

    first: int
    is_named: bool
    positions: torch.Tensor | None = None  # int64 [1, T], of the present call; None if the model counts them

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("position_ids") if kwargs.get("lightkv") is not None else None
        self.positions = None if given is None else given + self.first
        if self.positions is None:
            return None
        rest = {name: value for name, value in kwargs.items() if name != "position_ids"}
        return args, rest | ({"position_ids": self.positions} if self.is_named else {})


@dataclass(eq=False)
class _EmbedGiven:
    """A hook before the forward pass of a module that embeds positions, which gives it those of the call."""

    given: _GivenPositions

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = self.given.positions
        return None if positions is None else (args, kwargs | {"position_ids": positions[0]})


@dataclass(frozen=True)
class _CountGiven:
    """A hook before the forward pass of a layer that gives it a `_PlacesToPositions` for a cache."""

    cache_name: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position_ids = kwargs.get("position_ids")
        if given_cache(kwargs) is not None or position_ids is None or len(position_ids) != 1:
            return None
        places = torch.arange(position_ids.shape[1], device=position_ids.device)
        return args, kwargs | {self.cache_name: _PlacesToPositions(position_ids[0] - places)}


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
