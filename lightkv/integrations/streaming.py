"""Endless text in constant memory: a sliding window, and StreamingLLM's sink tokens.

    position   0      sinks        sinks + dropped             now
               ├─ sinks ─┤   dropped, no slots   ├── window ──┤

A stream holds its first tokens and the latest ones. Its row is a `Ring`: a new token is written to the slot of
one that has left the window. On a GPU, a step of one token is a CUDA graph. Keys stay as they were
computed, at their true positions. Queries attend to the window from their true position, and to the sinks from
the position that they have among the tokens held. Both are parts of one softmax, which is exact. So distances
stay within the window, however long the stream is.

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.cached_model import CachedModel
>>> from lightkv.integrations.streaming import Ring, stream
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
>>> ring = Ring(sinks=4, size=28, stride=7)
>>> lm = CachedModel(LlamaForCausalLM(config).eval(), capacity=ring.capacity, exact_positions=True)
>>> ids = list(stream(lm, [5, 6, 7, 8], ring, max_new_tokens=200))
>>> len(ids), lm.cache.capacity, lm.cache.num_held
(200, 32, 0)
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.token_ids import TokenIds, int32_bytes
from lightkv.triton_kernels.layout.ring import Ring

from .cached_model import CachedModel

STEP_TOKENS = 256  # the most that a stream computes at once, which limits memory for activations and logits


class Stream:
    """One endless sequence.

    A token attends to the sinks of `ring` and to the last `size - stride + 1` to `size` tokens up to itself.
    Their number depends on the token's position alone, and not on how the tokens came in. `start` has the
    tokens that the stream will begin with. Cached ones need not be computed: `position` says how many. Raises
    ValueError for a ring that exceeds the model's context, and for a model without exact positions.
    """

    def __init__(self, lm: CachedModel, ring: Ring, start: TokenIds) -> None:
        if ring.capacity > lm.context:
            raise ValueError(
                f"{ring} holds {ring.capacity} tokens: make it smaller, the model's context is {lm.context}"
            )
        if not lm.exact_positions:
            raise ValueError("a stream exceeds the context: make its CachedModel with exact_positions=True")
        self._lm = lm
        self._ring = ring
        self.sequence = lm.cache.open_ring(int32_bytes(start), ring)

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.sequence.position

    def feed(self, token_ids: TokenIds, all_logits: bool = False) -> Iterator[torch.Tensor]:
        """Computes `token_ids` in as many steps as needed.

        Yields the logits of every step, `[1, vocabulary]`, or with `all_logits` one row for each token. Raises
        OutOfTokens if the pool has no room for the window.
        """
        lm, sequence, ring = self._lm, self.sequence, self._ring
        ids = np.frombuffer(int32_bytes(token_ids), dtype=np.int32)
        while len(ids):
            count = min(len(ids), ring.room(sequence.position), STEP_TOKENS)
            yield lm.forward([sequence], [ids[:count]], all_logits)
            ids = ids[count:]

    def close(self) -> None:
        """Closes the sequence. None of it stays cached."""
        self._lm.cache.close(self.sequence, cache=False)


def _argmax(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def stream(
    lm: CachedModel,
    prompt: TokenIds,
    ring: Ring,
    max_new_tokens: int,
    pick: Callable[[torch.Tensor], int] = _argmax,
) -> Iterator[int]:
    """Continues a prompt of any length by up to `max_new_tokens` tokens, and yields each.

    `pick` chooses the next token from its logits, `[vocabulary]`. Raises the errors of `Stream`.
    """
    flow = Stream(lm, ring, prompt)
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
