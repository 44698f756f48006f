"""Speculative decoding without a second model: tokens that followed the same words before are proposed again.

The last few tokens are looked up in the prompt and the output so far. The tokens that came after them are
proposed, and one forward pass verifies them all. Wrong ones are truncated, so their slots are free in the same
step. The output is that of greedy decoding, in fewer forward passes.

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.cached_model import CachedModel
>>> from lightkv.integrations.prompt_lookup import generate
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2)
>>> lm = CachedModel(LlamaForCausalLM(config).eval(), capacity=200)
>>> greedy = generate(lm, [5, 6, 7, 8], max_new_tokens=20, num_proposed=0)
>>> found = generate(lm, [5, 6, 7, 8], max_new_tokens=20)
>>> found.token_ids == greedy.token_ids, found.num_forwards <= greedy.num_forwards == 20
(True, True)
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from lightkv.token_ids import TokenIds, int32_bytes

from .cached_model import CachedModel


class Generated(NamedTuple):
    """The generated ids, the end token included, and the work that they took.

    `num_forwards` counts calls of the model, the prompt's among them; `num_proposed` the proposed tokens that
    were verified, and `num_accepted` those of them that were right.
    """

    token_ids: list[int]
    num_forwards: int
    num_proposed: int
    num_accepted: int

    @property
    def tokens_per_forward(self) -> float:
        """The number of generated tokens per call of the model."""
        return len(self.token_ids) / self.num_forwards


class PromptLookup:
    """The tokens so far, and for each short run of them the place of the token that followed it last."""

    def __init__(self, token_ids: list[int], shortest: int, longest: int) -> None:
        self._tokens: list[int] = []
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}  # run → place of the token after it
        self.extend(token_ids)

    def extend(self, token_ids: list[int]) -> None:
        """Appends tokens."""
        for token in token_ids:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """Returns up to `count` tokens that followed the latest earlier match of the longest run at the end."""
        for size in self._sizes:
            start = self._after.get(tuple(self._tokens[-size:]))
            if start is not None:
                return self._tokens[start : start + count]
        return []


@torch.no_grad()
def generate(
    lm: CachedModel,
    prompt: TokenIds,
    max_new_tokens: int,
    *,
    num_proposed: int = 10,
    shortest_run: int = 2,
    longest_run: int = 3,
    eos_token_ids: Collection[int] = (),
) -> Generated:
    """Decodes greedily, verifying up to `num_proposed` proposed tokens in each step; 0 is plain decoding.

    After wrong proposals the next step proposes fewer: two more than twice the number that was right. The last
    `longest_run` tokens are looked up first, then shorter runs down to `shortest_run`. Raises the errors of
    `CachedModel.prefill` and `forward`, and ValueError.
    """
    if max_new_tokens < 1 or num_proposed < 0 or not 1 <= shortest_run <= longest_run:
        raise ValueError(
            f"{max_new_tokens} new tokens with {num_proposed} proposed after runs of {shortest_run} to "
            f"{longest_run}: only the number proposed may be 0, and the longest run must not be the shorter one"
        )
    known = np.frombuffer(int32_bytes(prompt), dtype=np.int32).tolist()
    sequence, logits = lm.prefill(prompt)
    output: list[int] = []
    proposed: list[int] = []
    num_forwards, num_verified, num_accepted = 1, 0, 0
    budget = num_proposed
    try:
        lookup = PromptLookup(known, shortest_run, longest_run)
        rows = logits[None]
        while True:
            chosen = rows.argmax(
                -1
            ).tolist()  # the next token after the last one, and after each proposed one
            num_right = 0
            while num_right < len(proposed) and proposed[num_right] == chosen[num_right]:
                num_right += 1
            if num_right < len(proposed):
                lm.cache.truncate(sequence, sequence.length - (len(proposed) - num_right))
            num_verified, num_accepted = num_verified + len(proposed), num_accepted + num_right
            if proposed:
                budget = min(num_proposed, 2 * num_right + 2)
            fresh = chosen[: num_right + 1]
            ends = [place for place, token in enumerate(fresh) if token in eos_token_ids]
            if ends:
                fresh = fresh[: ends[0] + 1]
            output += fresh
            if ends or len(output) == max_new_tokens:
                return Generated(output, num_forwards, num_verified, num_accepted)
            lookup.extend(fresh)
            # One less than may still be generated, because the pass yields a token of its own.
            proposed = lookup.propose(min(budget, max_new_tokens - len(output) - 1))
            rows = lm.forward([sequence], [[output[-1], *proposed]], all_logits=True)
            num_forwards += 1
    finally:
        lm.cache.close(sequence, output)
