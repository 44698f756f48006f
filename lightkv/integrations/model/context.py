"""How long a sequence a model was made for, as its configuration says. Loads no torch."""

from typing import Any

# What configurations call it.
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)


def context_length(config: Any) -> int | None:
    """The longest sequence, in tokens, that a model of this (text) configuration was made for.

    None if the configuration does not say.
    """
    for name in CONTEXT_NAMES:
        length = getattr(config, name, None)
        if type(length) is int and length > 0:
            return length
    return None
