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
>>> end = greedy.token_ids[0]
>>> generate(lm, [5, 6, 7, 8], max_new_tokens=20, eos_token_ids=[end]).token_ids == [end]
True
"""

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch

from lightkv.token_ids import TokenIds, int32_bytes

from .cached_model import CachedModel
from .guess_tree import GuessTree


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
    """The tokens so far, and for each short run of them the places of the tokens that followed it, the last
    `most_places` of them."""

    def __init__(self, token_ids: list[int], shortest: int, longest: int, most_places: int = 1) -> None:
        self._tokens: list[int] = []
        self._most_places = most_places
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], deque[int]] = {}  # run → places of the tokens after it, last first
        self.extend(token_ids)

    def extend(self, token_ids: list[int]) -> None:
        """Appends tokens."""
        for token in token_ids:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    run = tuple(self._tokens[end - size :])
                    places = self._after.get(run)
                    if places is None:
                        places = self._after[run] = deque(maxlen=self._most_places)
                    places.appendleft(end)
            self._tokens.append(token)

    def propose_lines(self, count: int, most_lines: int) -> list[list[int]]:
        """Returns up to `most_lines` different lines of up to `count` tokens that followed earlier matches of
        the runs at the end, the longest run first, and of each run the latest match first."""
        lines: list[list[int]] = []
        for size in self._sizes:
            for start in self._after.get(tuple(self._tokens[-size:]), ()):
                line = self._tokens[start : start + count]
                if len(lines) < most_lines and line not in lines:
                    lines.append(line)
        return lines


@torch.no_grad()
def generate(
    lm: CachedModel,
    prompt: TokenIds,
    max_new_tokens: int,
    *,
    num_proposed: int = 10,
    shortest_run: int = 2,
    longest_run: int = 3,
    num_lines: int = 1,
    eos_token_ids: Collection[int] = (),
) -> Generated:
    """Decodes greedily, verifying up to `num_proposed` proposed tokens in each step; 0 is plain decoding.

    After wrong proposals the next step proposes fewer: two more than twice the number that was right. The last
    `longest_run` tokens are looked up first, then shorter runs down to `shortest_run`. With several lines, up
    to `num_lines` continuations of so many tokens each are proposed as a tree, and one pass verifies all.
    Raises the errors of `CachedModel.prefill` and `forward`, and ValueError, also for several lines and a model
    whose layers have windows or chunks, which would count a guess's place in the tree.
    """
    if num_lines < 1 or (num_lines > 1 and lm.windows):
        raise ValueError(
            f"{num_lines} lines of guesses for a model with windows or chunks {lm.windows}: at least one, and "
            "several only without these"
        )
    if max_new_tokens < 1 or num_proposed < 0 or not 1 <= shortest_run <= longest_run:
        raise ValueError(
            f"{max_new_tokens} new tokens with {num_proposed} proposed after runs of {shortest_run} to "
            f"{longest_run}: only the number proposed may be 0, and the longest run must not be the shorter one"
        )
    known = np.frombuffer(int32_bytes(prompt), dtype=np.int32).tolist()
    sequence, logits = lm.prefill(prompt)
    output: list[int] = []
    tree = GuessTree.of_lines(0, [])
    num_forwards, num_verified, num_accepted = 1, 0, 0
    budget = num_proposed
    try:
        lookup = PromptLookup(known, shortest_run, longest_run, num_lines)
        most_entries = lm.cache.memory.table.max_entries
        rows = logits[None]
        while True:
            # The next token after the last one, and after each proposed one.
            chosen = rows.argmax(-1).tolist()
            path = tree.accept(chosen)
            num_right, count = len(path) - 1, len(tree.tokens) - 1
            if num_right < count:
                lm.take(sequence, sequence.length - 1 - count, path)
            num_verified, num_accepted = num_verified + count, num_accepted + num_right
            if count:
                budget = min(num_proposed, 2 * num_right + 2)
            fresh = [chosen[node] for node in path]
            ends = [place for place, token in enumerate(fresh) if token in eos_token_ids]
            if ends:
                fresh = fresh[: ends[0] + 1]
            output += fresh
            if ends or len(output) == max_new_tokens:
                return Generated(output, num_forwards, num_verified, num_accepted)
            lookup.extend(fresh)
            # One less than may still be generated, because the pass yields a token of its own.
            lines = lookup.propose_lines(min(budget, max_new_tokens - len(output) - 1), num_lines)
            tree = GuessTree.of_lines(output[-1], lines, max(1, most_entries - sequence.length))
            masked = None if tree.is_line else tree  # a line attends as a chunk of a prompt
            rows = lm.forward([sequence], [tree.tokens], all_logits=True, tree=masked)
            num_forwards += 1
    finally:
        lm.cache.close(sequence, output)
