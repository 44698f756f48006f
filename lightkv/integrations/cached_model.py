"""A Hugging Face model and the cache of its K/V: sequences in, logits out.

Knows no sampling and no text. The decoding loops beside it (`sampling`, `prompt_lookup`) are written on it, and
it is as much as a loop of your own needs:

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.cached_model import CachedModel
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2)
>>> lm = CachedModel(LlamaForCausalLM(config).eval(), capacity=100)
>>> sequence, logits = lm.prefill([5, 6, 7, 8])
>>> ids = []
>>> for _ in range(3):
...     ids.append(int(logits.argmax()))
...     (logits,) = lm.decode([sequence], ids[-1:])
>>> lm.cache.close(sequence, ids)
>>> lm.cache.num_cached, lm.cache.num_free
(7, 93)
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from transformers import PreTrainedModel

from ..attention import AttentionMetadata, make_backends
from ..errors import OutOfRows
from ..kv_cache import KVCache
from ..sequence import Sequence
from ..staging import upload
from ..token_ids import TokenIds, int32_bytes
from .transformers import bind, forward, probe


class CachedModel:
    """A model, bound to lightkv's attention, and a `KVCache` of `capacity` tokens that it alone writes.

    max_sequences: how many may be open at once. max_entries: the longest that one may get; by default the
    model's context, or the pool if that is smaller. backend: of the attention; by default the device's own.
    Raises UnsupportedModel, OutOfMemory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        max_sequences: int = 16,
        max_entries: int | None = None,
        backend: str | None = None,
    ) -> None:
        shape = probe(model)
        max_entries = max_entries or min(capacity, model.config.get_text_config().max_position_embeddings)
        self.model = model
        self.cache = KVCache(shape.spec, capacity, max_sequences, max_entries, model.device)
        self._backends = make_backends(backend, model.device, shape.layers)
        self._metadata = AttentionMetadata(max_sequences, max_sequences * max_entries, self.cache.memory)
        bind(model)

    @torch.no_grad()
    def prefill(self, prompt: TokenIds) -> tuple[Sequence, torch.Tensor]:
        """Open a sequence, and compute what the cache has not of its prompt, which others can hit from now on.

        Returns the sequence and the logits of the next token, `[vocabulary]`. Raises as `KVCache.open` and
        `extend`, with nothing opened then.
        """
        ids = int32_bytes(prompt)
        sequence = self.cache.open(ids)
        try:
            missing = np.frombuffer(ids, dtype=np.int32)[sequence.length :]
            (logits,) = self.forward([sequence], [missing.tolist()])
        except BaseException:
            self.cache.close(sequence)
            raise
        self.cache.publish(sequence)
        self.cache.confirm()
        return sequence, logits

    @torch.no_grad()
    def decode(self, sequences: Seq[Sequence], token_ids: Seq[int]) -> torch.Tensor:
        """One token more of each sequence. Returns the logits of the next, `[len(sequences), vocabulary]`."""
        return self.forward(sequences, [[token] for token in token_ids])

    @torch.no_grad()
    def forward(
        self, sequences: Seq[Sequence], token_ids: Seq[Seq[int]], all_logits: bool = False
    ) -> torch.Tensor:
        """Compute `token_ids[i]` at the end of `sequences[i]`, all in one call of the model.

        Returns the logits after the last token of each, `[len(sequences), vocabulary]`, or with `all_logits`
        after every one, packed in order. Raises as `KVCache.extend`. If it fails the sequences have as much K/V
        as before.
        """
        counts = [len(ids) for ids in token_ids]
        starts = [sequence.length for sequence in sequences]
        self.cache.extend(sequences, counts)
        try:
            rows = [sequence.row for sequence in sequences]
            num_contexts = len(rows) if max(counts) > 1 else 0
            self._metadata.prepare(rows, starts, counts, num_contexts)
            packed = np.array([token for ids in token_ids for token in ids], dtype=np.int64)
            last = np.cumsum(np.array(counts, dtype=np.int64)) - 1
            input_ids, wanted = upload([packed, last], self.model.device)
            index = None if all_logits else wanted
            return forward(self.model, input_ids, self._metadata, self._backends, index)
        except BaseException:
            for sequence, start in zip(sequences, starts, strict=True):
                self.cache.truncate(sequence, start)
            raise


def select(cache: KVCache, sequences: Seq[Sequence], order: Seq[int]) -> list[Sequence]:
    """The sequences at `order`, forked where one is named again, and those that are not named closed.

    Indices are copied, never K/V. Raises OutOfRows, with nothing changed.
    """
    num_forks, num_closed = len(order) - len(set(order)), len(sequences) - len(set(order))
    if cache.ledger.num_open + num_forks - num_closed > cache.ledger.max_sequences:
        raise OutOfRows(cache.ledger.max_sequences)
    for idx in set(range(len(sequences))).difference(order):
        cache.close(sequences[idx], cache=False)
    taken: set[int] = set()
    selected = []
    for idx in order:
        selected.append(cache.fork(sequences[idx]) if idx in taken else sequences[idx])
        taken.add(idx)
    return selected
