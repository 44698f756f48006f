"""Token eviction: a sequence keeps its latest tokens, and those that were attended to most (heavy hitters).

Attention is summed for each token over queries, heads and layers, so all layers keep the same tokens, and the
slot of every other token is free at once. Keys stay as they were computed, at their true positions.

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

from typing import NamedTuple

import torch

from lightkv.integrations.model.attention_call import AttentionCall
from lightkv.integrations.model.hf_model import PackedStep
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.sequence import Sequence
from lightkv.token_ids import TokenIds, int32_bytes

from .cached_model import CachedModel


def highest(scores: torch.Tensor, num_kept: int, recent: int) -> torch.Tensor:
    """Selects tokens by `scores` `[n]`: the last `recent`, and of the others those with the highest scores.

    Returns their `num_kept` indices, int64, ascending. Raises ValueError if there are not as many tokens.
    """
    if not 0 <= recent <= num_kept <= len(scores):
        raise ValueError(f"cannot keep {num_kept} of {len(scores)} tokens, the latest {recent} among them")
    older = len(scores) - recent
    best = scores[:older].topk(num_kept - recent).indices.sort().values
    return torch.cat((best, torch.arange(older, len(scores), device=scores.device)))


class _Counted(NamedTuple):
    """The sequence whose scores a row holds, and its counts when the scores were last complete."""

    sequence: Sequence
    length: int
    dropped: int


class HeavyHitters:
    """Sums up the attention that each token of the open sequences of `lm` gets, and evicts tokens by it.

    Do not publish a sequence from which you want to evict. Published tokens are shared, and shared tokens are
    never evicted, even if no other sequence holds them. `CachedModel.prefill` publishes, so open the sequence
    yourself, and run its prompt through `forward`.

    Only steps through `forward` are counted, and only `keep` may drop tokens. A new sequence starts at zero,
    and so does a fork. A known sequence may be truncated. If other calls computed or dropped tokens of it, its
    scores would belong to other tokens, so every call for it raises ValueError. (A truncation followed by as
    many tokens, computed elsewhere, is not noticed.) Raises ValueError for a model whose layers have windows
    or chunks.
    """

    def __init__(self, lm: CachedModel) -> None:
        if lm.windows:
            raise ValueError(
                f"the model's layers have windows or chunks of their own ({lm.windows}), which decide what "
                "they attend to"
            )
        self._lm = lm
        table = lm.cache.memory.table
        self._scores = torch.zeros(table.req_to_token.shape, dtype=torch.float32, device=table.device)
        self._counted: dict[int, _Counted] = {}  # by row

    def forward(self, sequence: Sequence, token_ids: TokenIds, *, all_logits: bool = False) -> torch.Tensor:
        """Runs `CachedModel.forward` for one sequence, and adds the attention of these tokens to the scores.

        Raises ValueError also past the model's context: eviction does not change a token's position.
        """
        ids = int32_bytes(token_ids)
        end = sequence.position + len(ids) // TOKEN_BYTES
        if end > self._lm.context:
            raise ValueError(
                f"position {end - 1} is past the model's context of {self._lm.context}; use a Stream instead"
            )
        self._follow(sequence)
        start = sequence.length
        scored = _Scores()
        logits = self._lm.forward([sequence], [ids], all_logits, scored.of_step)
        assert scored.scores is not None
        own = self._scores[sequence.row, : sequence.length]
        own[start:] = 0.0  # these are scores of tokens that the row held before
        own += scored.scores[0]
        self._note(sequence)
        return logits

    def scores(self, sequence: Sequence) -> torch.Tensor:
        """Returns the attention that each token has got so far: float32 `[length]`, a view."""
        self._follow(sequence)
        return self._scores[sequence.row, : sequence.length]

    def keep(self, sequence: Sequence, budget: int, recent: int) -> int:
        """Evicts all but `budget` tokens: shared tokens stay, the latest `recent`, and the heaviest hitters.

        Published tokens are shared, so all of them stay. Returns how many slots are free at once, which is 0 if
        the sequence holds no more than `budget` tokens. Does not synchronise. Raises ValueError if the shared
        and the latest tokens exceed the budget.
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
        self._counted[sequence.row] = _Counted(sequence, sequence.length, sequence.dropped)

    def _follow(self, sequence: Sequence) -> None:
        """Makes sure that the row of `sequence` holds its scores. Raises ValueError if it cannot."""
        self._lm.cache.ledger.require_open(sequence)
        if not sequence.slot_per_token:
            raise ValueError("a stream evicts by its window alone: run its steps with CachedModel.forward")
        counted = self._counted.get(sequence.row)
        if counted is None or counted.sequence is not sequence or not sequence.length:
            self._scores[sequence.row, : sequence.length] = 0.0
        elif sequence.dropped != counted.dropped or sequence.length > counted.length:
            raise ValueError(
                f"{sequence} had {counted.length} tokens and {counted.dropped} dropped when its attention was "
                "counted last, so the scores belong to other tokens. Run its steps with HeavyHitters.forward, "
                "and drop tokens with HeavyHitters.keep; close this sequence, and run its text again"
            )
        self._note(sequence)


class _Scores:
    """An AttentionHandler that also sums up, over its layers, the attention to each entry: `scores`,
    float32 `[B, longest]`."""

    _packed: PackedStep

    def __init__(self) -> None:
        self.scores: torch.Tensor | None = None

    def of_step(self, step: PackedStep) -> "_Scores":
        """Returns the handler of this step."""
        self._packed = step
        return self

    def attend(self, call: AttentionCall) -> torch.Tensor:
        out = self._packed.attend(call)  # which applies positions to q
        backend = self._packed.backends[call.module.layer_idx]
        scores = backend.entry_scores(call.q[0].transpose(0, 1), self._packed.step)
        self.scores = scores if self.scores is None else self.scores + scores
        return out
