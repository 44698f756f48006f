"""Token eviction: of a sequence's tokens those stay that were attended to most (heavy hitters), and the latest.

Knows no text. Attention is summed per token over queries, heads and layers, so one set of tokens stays for all
layers, and each of the others is a slot free at once. Keys stay as they were computed, at their true positions.

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.eviction import HeavyHitters
>>> from lightkv.integrations.gapped_model import GappedModel
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2)
>>> lm = GappedModel(LlamaForCausalLM(config).eval(), capacity=100)
>>> hitters = HeavyHitters(lm)
>>> sequence = lm.cache.open(range(40))
>>> logits = hitters.forward(sequence, torch.arange(40))
>>> hitters.keep(sequence, budget=20, recent=8)
20
>>> lm.cache.num_free, sequence.length, sequence.position, lm.cache.positions(sequence)[-8:].tolist()
(80, 20, 40, [32, 33, 34, 35, 36, 37, 38, 39])
"""

import torch

from lightkv.triton_kernels.attention_scores import attention_scores, attention_scores_reference

from ..attention import AttentionBackend, AttentionMetadata, AttentionOptions
from ..sequence import Sequence
from .gapped_model import GappedModel


def highest(scores: torch.Tensor, num_kept: int, recent: int) -> torch.Tensor:
    """Which of the tokens with `scores` `[n]` to keep: the last `recent`, and of the others the highest.

    Returns their places, int64 `[num_kept]`, ascending. Raises ValueError for more than there are.
    """
    if not 0 <= recent <= num_kept <= len(scores):
        raise ValueError(f"cannot keep {num_kept} of {len(scores)} tokens, the latest {recent} among them")
    older = len(scores) - recent
    best = scores[:older].topk(num_kept - recent).indices.sort().values
    return torch.cat((best, torch.arange(older, len(scores), device=scores.device)))


class HeavyHitters:
    """The attention that each token of the open sequences of `lm` has had so far, and eviction by it.

    It knows of the steps that go through `forward`. What sequences share is never evicted, and not counted.
    """

    def __init__(self, lm: GappedModel) -> None:
        self._lm = lm
        table = lm.cache.memory.table
        self._scores = torch.zeros(table.req_to_token.shape, dtype=torch.float32, device=table.device)
        self._backends = [_Watched(backend, self._scores) for backend in lm.backends]

    def forward(
        self, sequence: Sequence, token_ids: torch.Tensor, *, all_logits: bool = False
    ) -> torch.Tensor:
        """`GappedModel.forward`, with the attention of these tokens added to what each has had.

        Raises ValueError past the model's context, too: evicted or not, tokens stand where they stood.
        """
        end = sequence.position + len(token_ids)
        if end > self._lm.context:
            raise ValueError(
                f"position {end - 1} is past the model's context of {self._lm.context}; to go on, take a Stream"
            )
        return self._lm.forward(sequence, token_ids, all_logits=all_logits, backends=self._backends)

    def scores(self, sequence: Sequence) -> torch.Tensor:
        """What each token has had: float32 `[length]`, a view."""
        return self._scores[sequence.row, : sequence.length]

    def keep(self, sequence: Sequence, budget: int, recent: int) -> int:
        """Evict all but `budget` tokens: the latest `recent` stay, what it shares, and the heaviest hitters.

        Returns how many slots are free at once; none where it holds no more than that. Nothing is waited for.
        Raises ValueError for a budget that what it shares and the latest exceed.
        """
        if budget >= sequence.length:
            return 0
        shared = sequence.shared
        own = self.scores(sequence)[shared:]
        kept = highest(own, budget - shared, recent)
        own[: len(kept)] = own[kept]
        return self._lm.cache.keep(sequence, kept + shared)


class _Watched(AttentionBackend):
    """A layer's backend, and afterwards the attention of its queries, added up by row and entry."""

    def __init__(self, inner: AttentionBackend, scores: torch.Tensor) -> None:
        super().__init__(
            inner.layer_idx,
            inner.num_heads,
            inner.head_dim,
            inner.num_kv_heads,
            pos_embd_params=inner.rotary,
            options=AttentionOptions(inner.scale, inner.window, inner.softcap, inner.v_dim),
        )
        self._inner = inner
        self._scores = scores  # [rows, entries]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        attention_mask: str | None = None,
    ) -> torch.Tensor:
        if metadata.num_sinks:
            raise ValueError("a stream evicts by its window alone: run its steps by GappedModel.forward")
        out = self._inner.forward(q, k, v, metadata, attention_mask)
        memory = metadata.kv_cache_manager
        entries = metadata.position_ids
        if metadata.dropped is not None:
            entries = entries - metadata.dropped
        if self.layer_idx == 0:  # this step's tokens are new: what stands there is of others, gone by now
            rows = metadata.rows.repeat_interleave(metadata.seq_lens_cuda, output_size=metadata.num_tokens)
            self._scores.index_put_((rows, entries), self._scores.new_zeros(()))
        width = int(metadata.kv_lens_host.max())
        arguments = (
            q.view(metadata.num_tokens, self.num_heads, self.head_dim),
            memory.pool.k(self.layer_idx),
            memory.table.req_to_token,
            metadata.rows,
            metadata.q_starts,
            entries.int(),
            metadata.kv_lens,
        )
        if q.is_cuda:
            most = int(metadata.seq_lens.max())
            scores = attention_scores(
                *arguments, max_q_len=most, width=width, scale=self.scale, softcap=self.softcap
            )
        else:
            scores, _ = attention_scores_reference(
                *arguments, width=width, scale=self.scale, softcap=self.softcap
            )
        self._scores[:, :width].index_add_(0, metadata.rows, scores)
        return out

    def _write(self, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._inner._write(k, v, metadata)

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        self._inner._prefill(q, k, v, metadata, out)

    def _prefill_with_sinks(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        self._inner._prefill_with_sinks(q, metadata, out)

    def _decode(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        self._inner._decode(q, metadata, out)
