"""Token eviction: of a sequence's tokens those stay that were attended to most (heavy hitters), and the latest.

Knows no text. Attention is summed per token over queries, heads and layers, so one set of tokens stays for all
layers, and each of the others is a slot free at once. Keys stay as they were computed, at their true positions.

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.eviction import HeavyHitters
>>> from lightkv.integrations.cached_model import CachedModel
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2)
>>> lm = CachedModel(LlamaForCausalLM(config).eval(), capacity=100)
>>> hitters = HeavyHitters(lm)
>>> sequence = lm.cache.open(range(40))
>>> logits = hitters.forward(sequence, range(40))
>>> hitters.keep(sequence, budget=20, recent=8)
20
>>> lm.cache.num_free, sequence.length, sequence.position, lm.cache.positions(sequence)[-8:].tolist()
(80, 20, 40, [32, 33, 34, 35, 36, 37, 38, 39])
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightkv.integrations.model.attention_call import AttentionCall
from lightkv.integrations.model.hf_model import PackedStep
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.sequence import Sequence
from lightkv.token_ids import TokenIds, int32_bytes

from .cached_model import CachedModel


def highest(scores: torch.Tensor, num_kept: int, recent: int) -> torch.Tensor:
    """Which of the tokens with `scores` `[n]` to keep: the last `recent`, and of the others the highest.

    Returns their places, int64 `[num_kept]`, ascending. Raises ValueError for more than there are.
    """
    if not 0 <= recent <= num_kept <= len(scores):
        raise ValueError(f"cannot keep {num_kept} of {len(scores)} tokens, the latest {recent} among them")
    older = len(scores) - recent
    best = scores[:older].topk(num_kept - recent).indices.sort().values
    return torch.cat((best, torch.arange(older, len(scores), device=scores.device)))


class _Scored(NamedTuple):
    """Whose scores a row has, and how much of it there was when they were last right."""

    sequence: Sequence
    length: int
    dropped: int


class HeavyHitters:
    """The attention that each token of the open sequences of `lm` has had so far, and eviction by it.

    Do not publish what is to be evicted: what is shared never is, and after `publish` (`CachedModel.prefill`
    publishes) the prompt counts as shared even if nobody else holds it. Open the sequence, and run its prompt
    through `forward`.

    It knows of the steps that go through `forward`, and drops tokens by `keep`. A sequence that it has not seen
    begins at zero, a fork too. One that it has seen may be truncated; if it was computed or dropped from by
    others, its scores would be other tokens', and every call of it raises ValueError. (A truncation that others
    have made up for, token by token, is not noticed.) Raises ValueError for a model whose layers have windows.
    """

    def __init__(self, lm: CachedModel) -> None:
        if lm.windows:
            raise ValueError(f"layers with windows of their own ({lm.windows}) evict by those alone")
        self._lm = lm
        table = lm.cache.memory.table
        self._scores = torch.zeros(table.req_to_token.shape, dtype=torch.float32, device=table.device)
        self._scored: dict[int, _Scored] = {}  # by row

    def forward(self, sequence: Sequence, token_ids: TokenIds, *, all_logits: bool = False) -> torch.Tensor:
        """`CachedModel.forward`, with the attention of these tokens added to what each has had.

        Raises ValueError past the model's context, too: evicted or not, tokens stand where they stood.
        """
        ids = int32_bytes(token_ids)
        end = sequence.position + len(ids) // TOKEN_BYTES
        if end > self._lm.context:
            raise ValueError(
                f"position {end - 1} is past the model's context of {self._lm.context}; to go on, take a Stream"
            )
        self._follow(sequence)
        start = sequence.length
        watched = _WatchedStep(self._lm.step)
        logits = self._lm.forward([sequence], [ids], all_logits, watched)
        assert watched.scores is not None
        own = self._scores[sequence.row, : sequence.length]
        own[start:] = 0.0  # what stood there was of others, gone by now
        own += watched.scores[0]
        self._note(sequence)
        return logits

    def scores(self, sequence: Sequence) -> torch.Tensor:
        """What each token has had: float32 `[length]`, a view."""
        self._follow(sequence)
        return self._scores[sequence.row, : sequence.length]

    def keep(self, sequence: Sequence, budget: int, recent: int) -> int:
        """Evict all but `budget` tokens: the latest `recent` stay, what it shares, and the heaviest hitters.

        What was published is shared, so all of it stays. Returns how many slots are free at once; none where it
        holds no more than that. Nothing is waited for. Raises ValueError for a budget that what it shares and
        the latest exceed.
        """
        shared = sequence.shared
        own = self.scores(sequence)[shared:]
        if budget >= sequence.length:
            return 0
        kept = highest(own, budget - shared, recent)
        num_freed = self._lm.cache.keep(sequence, kept + shared)
        own[: len(kept)] = own[kept]
        self._note(sequence)
        return num_freed

    def _note(self, sequence: Sequence) -> None:
        self._scored[sequence.row] = _Scored(sequence, sequence.length, sequence.dropped)

    def _follow(self, sequence: Sequence) -> None:
        """Make sure that its row has its scores."""
        if sequence.dropped and sequence.num_sinks:
            raise ValueError("a stream evicts by its window alone: run its steps by CachedModel.forward")
        self._lm.cache.ledger.require_open(sequence)
        scored = self._scored.get(sequence.row)
        if scored is None or scored.sequence is not sequence or not sequence.length:
            self._scores[sequence.row, : sequence.length] = 0.0
        elif sequence.dropped != scored.dropped or sequence.length > scored.length:
            raise ValueError(
                f"{sequence} had {scored.length} tokens and {scored.dropped} dropped when its attention was "
                "counted last, so the scores are other tokens'. Run its steps by HeavyHitters.forward, drop by "
                "its keep; this one, close and run anew"
            )
        self._note(sequence)


@dataclass
class _WatchedStep:
    """A step, and how much its queries attend to each entry, added up over the layers."""

    step: PackedStep
    scores: torch.Tensor | None = None  # float32 [B, longest]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        out = self.step.attend(call)  # which applies positions to q
        backend = self.step.backends[call.layer_idx]
        scores = backend.entry_scores(call.q[0].transpose(0, 1), self.step.metadata)
        self.scores = scores if self.scores is None else self.scores + scores
        return out
