"""The context length, first position and layers of a model, by its configuration, and what its forward passes
take. Loads no torch."""

import inspect
from collections.abc import Mapping
from typing import Any

# The names that configurations give to the longest sequence.
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "max_target_positions",
)
# Models whose position embeddings begin after the one that has the id of the padding token.
_AFTER_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
# The names of the cache in forward passes: since transformers 5.24, and before it.
_CACHE, _OLD_CACHE = "cache", "past_key_values"


def context_length(config: Any) -> int | None:
    """Returns the longest sequence, in tokens, that a model of this (text) configuration was made for.

    Returns None if the configuration does not state it.
    """
    for name in CONTEXT_NAMES:
        length = getattr(config, name, None)
        if type(length) is int and length > 0:
            return max(1, length - first_position(config))
    return None


def first_position(config: Any) -> int:
    """Returns the position that a model of this (text) configuration gives to the first token of a text: 0, but
    for RoBERTa and its kin the one after the id of the padding token."""
    padding = getattr(config, "pad_token_id", None)
    if getattr(config, "model_type", None) not in _AFTER_PADDING or type(padding) is not int:
        return 0
    return max(0, padding + 1)


def num_layers(config: Any) -> int | None:
    """Returns how many layers the decoder of a model of this (text) configuration has. None if it does not say.

    The configurations of BART and its kin call those of the encoder num_hidden_layers.
    """
    for name in ("decoder_layers", "num_hidden_layers"):
        if type(count := getattr(config, name, None)) is int:
            return count
    return None


def argument_names(module: Any) -> set[str]:
    """Returns the names of what the forward pass of a module's class takes."""
    return set(inspect.signature(type(module).forward).parameters)


def cache_name(module: Any) -> str:
    """Returns the name by which the forward pass of `module` takes a cache, and returns it in its output."""
    return _CACHE if _CACHE in argument_names(module) else _OLD_CACHE


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """Returns the cache among the keyword arguments of a forward pass, by either name; None without one."""
    found = kwargs.get(_CACHE)
    return kwargs.get(_OLD_CACHE) if found is None else found
