"""Text without end in memory that stays the same: a sliding window, and StreamingLLM's sinks.

Knows no text and no batch. A stream holds the first `sinks` tokens and the latest ones; what falls out of the
window is free in the same step. Keys stay as they were computed, at their true positions. The window is
attended from the query's true position, the sinks from the position that it has among the tokens held; the two
results are merged, which is exact. Distances so stay within the window however far the stream goes.

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.cached_model import CachedModel
>>> from lightkv.integrations.streaming import Window, stream
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
>>> window = Window(size=28, sinks=4, stride=7)
>>> lm = CachedModel(LlamaForCausalLM(config).eval(), capacity=window.capacity, exact_positions=True)
>>> ids = list(stream(lm, [5, 6, 7, 8], window, max_new_tokens=200))
>>> len(ids), lm.cache.capacity, lm.cache.num_held
(200, 32, 0)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.token_ids import TokenIds, int32_bytes

from .cached_model import CachedModel

STEP_TOKENS = 256  # most that a stream computes at once, for the memory that activations and logits take


@dataclass(frozen=True)
class Window:
    """What a stream holds: its first `sinks` tokens, and at most `size` others, the latest.

    Once it is full the oldest `stride` of them go at a time, so a token attends to the sinks and to between
    `size - stride + 1` and `size` tokens up to itself. Which it does depends on its position alone, not on
    how the tokens came in.
    """

    size: int
    sinks: int = 4
    stride: int = 64

    def __post_init__(self) -> None:
        if self.sinks < 0 or not 1 <= self.stride <= self.size:
            raise ValueError(
                f"{self}: sinks are 0 or more, and the stride from 1 to the window's size; choose them so"
            )

    @property
    def capacity(self) -> int:
        """The most tokens held, ever."""
        return self.sinks + self.size

    def dropped(self, position: int) -> int:
        """How many tokens are gone once the token at `position` is computed."""
        beyond = position - self.capacity
        return 0 if beyond < 0 else self.stride * (1 + beyond // self.stride)


class Stream:
    """One sequence that goes on for ever. `start`: the tokens that it will begin with, of which what the cache
    has need not be computed (`position` says how many). Raises ValueError for a window that passes the model's
    context, and for a model without exact positions.
    """

    def __init__(self, lm: CachedModel, window: Window, start: TokenIds) -> None:
        if window.capacity > lm.context:
            raise ValueError(
                f"{window} holds {window.capacity} tokens, the model's context is {lm.context}; make it smaller"
            )
        if not lm.exact_positions:
            raise ValueError("a stream goes past the context: make its CachedModel with exact_positions=True")
        self._lm = lm
        self._window = window
        self.sequence = lm.cache.open(int32_bytes(start)[: TOKEN_BYTES * window.capacity])

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.sequence.position

    def feed(self, token_ids: TokenIds, all_logits: bool = False) -> Iterator[torch.Tensor]:
        """Compute `token_ids` in as many steps as it takes.

        Yields every step's logits, `[1, vocabulary]` or with `all_logits` a line a token. Raises OutOfTokens if
        the pool has no room for the window.
        """
        lm, sequence, window = self._lm, self.sequence, self._window
        ids = np.frombuffer(int32_bytes(token_ids), dtype=np.int32)
        while len(ids):
            if due := window.dropped(sequence.position) - sequence.dropped:
                lm.cache.release(sequence, due, window.sinks)
            count = min(len(ids), window.capacity - sequence.length, STEP_TOKENS)
            yield lm.forward([sequence], [ids[:count]], all_logits)
            ids = ids[count:]

    def close(self) -> None:
        """End it. Nothing of it is cached."""
        self._lm.cache.close(self.sequence, cache=False)


def _argmax(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def stream(
    lm: CachedModel,
    prompt: TokenIds,
    window: Window,
    max_new_tokens: int,
    pick: Callable[[torch.Tensor], int] = _argmax,
) -> Iterator[int]:
    """Continue a prompt of any length, one token at a time, for as long as one likes.

    pick: the next token, from its logits `[vocabulary]`. Raises as `Stream`.
    """
    flow = Stream(lm, window, prompt)
    try:
        fresh: TokenIds = int32_bytes(prompt)[TOKEN_BYTES * flow.position :]
        for _ in range(max_new_tokens):
            for logits in flow.feed(fresh):
                last = logits
            token = pick(last[-1])
            yield token
            fresh = [token]
    finally:
        flow.close()
