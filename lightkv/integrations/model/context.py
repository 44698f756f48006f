"""The context length of a model, as its configuration states it. Loads no torch."""

from typing import Any

# The names that configurations give to the longest sequence.
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)


def context_length(config: Any) -> int | None:
    """Returns the longest sequence, in tokens, that a model of this (text) configuration was made for.

    Returns None if the configuration does not state it.
    """
    for name in CONTEXT_NAMES:
        length = getattr(config, name, None)
        if type(length) is int and length > 0:
            return length
    return None
