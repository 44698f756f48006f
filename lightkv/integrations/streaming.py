"""Text without end in memory that stays the same: a sliding window, and StreamingLLM's sinks.

Knows no text and no batch. A stream holds the first `sinks` tokens and the latest ones; what falls out of the
window is free in the same step. Keys stay as they were computed, at their true positions. The window is
attended from the query's true position, the sinks from the position that it has among the tokens held; the two
results are merged, which is exact. Distances so stay within the window however far the stream goes.

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.gapped_model import GappedModel
>>> from lightkv.integrations.streaming import Window, stream
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
>>> window = Window(size=28, sinks=4, stride=7)
>>> lm = GappedModel(LlamaForCausalLM(config).eval(), capacity=window.capacity)
>>> ids = list(stream(lm, [5, 6, 7, 8], window, max_new_tokens=200))
>>> len(ids), lm.cache.capacity, lm.cache.num_held
(200, 32, 0)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..token_ids import TokenIds, int32_bytes
from .gapped_model import GappedModel

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
    context.
    """

    def __init__(self, lm: GappedModel, window: Window, start: TokenIds) -> None:
        if window.capacity > lm.context:
            raise ValueError(
                f"{window} holds {window.capacity} tokens, the model's context is {lm.context}; make it smaller"
            )
        self._lm = lm
        self._window = window
        self.sequence = lm.cache.open(int32_bytes(start)[: 4 * window.capacity])

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.sequence.position

    def feed(self, token_ids: torch.Tensor, all_logits: bool = False) -> Iterator[torch.Tensor]:
        """Compute `token_ids`, int64 `[n]` on the model's device, in as many steps as it takes.

        Yields every step's logits, `[1, vocabulary]` or with `all_logits` a line a token. Raises OutOfTokens if
        the pool has no room for the window.
        """
        lm, sequence, window = self._lm, self.sequence, self._window
        while len(token_ids):
            if due := window.dropped(sequence.position) - sequence.dropped:
                lm.cache.release(sequence, due, window.sinks)
            count = min(len(token_ids), window.capacity - sequence.length, STEP_TOKENS)
            yield lm.forward(sequence, token_ids[:count], all_logits=all_logits)
            token_ids = token_ids[count:]

    def close(self) -> None:
        """End it. Nothing of it is cached."""
        self._lm.cache.close(self.sequence, cache=False)


def _argmax(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def stream(
    lm: GappedModel,
    prompt: TokenIds,
    window: Window,
    max_new_tokens: int,
    pick: Callable[[torch.Tensor], int] = _argmax,
) -> Iterator[int]:
    """Continue a prompt of any length, one token at a time, for as long as one likes.

    pick: the next token, from its logits `[vocabulary]`. Raises as `Stream`.
    """
    ids = _tensor(prompt, lm)
    flow = Stream(lm, window, prompt)
    try:
        fresh = ids[flow.position :]
        for _ in range(max_new_tokens):
            for logits in flow.feed(fresh):
                last = logits
            token = pick(last[-1])
            yield token
            fresh = torch.tensor([token], device=ids.device)
    finally:
        flow.close()


def token_losses(lm: GappedModel, token_ids: TokenIds, window: Window) -> torch.Tensor:
    """The negative log likelihood of every token but the first, as a stream sees it: float32 `[n - 1]`."""
    ids = _tensor(token_ids, lm)
    flow = Stream(lm, window, token_ids[:4] if isinstance(token_ids, bytes) else token_ids[:1])
    losses = []
    at = 1
    try:
        for logits in flow.feed(ids[:-1], all_logits=True):
            targets = ids[at : at + len(logits)]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none"))
            at += len(logits)
    finally:
        flow.close()
    return torch.cat(losses)


def perplexity(lm: GappedModel, token_ids: TokenIds, window: Window) -> float:
    """Of all tokens but the first, each predicted from what a stream holds when it comes."""
    return float(token_losses(lm, token_ids, window).double().mean().exp())


def _tensor(token_ids: TokenIds, lm: GappedModel) -> torch.Tensor:
    ids = torch.frombuffer(bytearray(int32_bytes(token_ids)), dtype=torch.int32)
    return ids.to(lm.model.device, torch.int64)
