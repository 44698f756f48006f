"""The cache that an engine embeds: a ledger, and the device memory that follows it.

Knows no model and no request. Every verb is the ledger's, with its edits applied before it returns; an
engine whose ledger and memory live in different processes uses `TokenLedger` and `KVMemory` themselves.
"""

from collections.abc import Sequence as Seq

import torch

from .errors import CheckFailed
from .kv_memory import KVMemory
from .kv_spec import KVSpec
from .ledger import Sequence, TokenLedger
from .prefix_tree import Namespace
from .staging import upload
from .token_ids import TokenIds, int32_bytes


class KVCache:
    """K/V of up to `capacity` tokens, shared by prefix, one token at a time.

    >>> import torch
    >>> from lightkv import KVCache, KVSpec
    >>> spec = KVSpec(num_layers=1, num_kv_heads=2, k_dim=8, v_dim=8, dtype=torch.float32)
    >>> cache = KVCache(spec, capacity=100, max_sequences=4, max_entries=64, device="cpu")
    >>> sequence = cache.open([5, 6, 7, 8])
    >>> slots = cache.extend([sequence], [4 - sequence.length])  # where the prompt's K/V goes
    >>> cache.memory.pool.k(0)[slots] = torch.randn(4, 2, 8)
    >>> cache.publish(sequence)  # from now on others can hit it
    >>> cache.confirm()  # the forward pass has succeeded
    >>> slots = cache.extend([sequence], [1])  # a decode step
    >>> cache.close(sequence, output_ids=[9])
    >>> again = cache.open([5, 6, 7, 8, 9, 10])
    >>> again.num_hit, cache.num_free, cache.num_cached, cache.num_held
    (5, 95, 0, 5)
    """

    def __init__(
        self,
        spec: KVSpec,
        capacity: int,
        max_sequences: int,
        max_entries: int,
        device: torch.device | str,
    ) -> None:
        self.ledger = TokenLedger(capacity, max_sequences, max_entries)
        self.memory = KVMemory(spec, capacity + 1, max_sequences, max_entries, torch.device(device))

    @property
    def capacity(self) -> int:
        """Tokens that the cache can hold."""
        return self.ledger.capacity

    @property
    def num_free(self) -> int:
        """Tokens that nobody holds and nothing is cached in."""
        return self.ledger.num_free

    @property
    def num_cached(self) -> int:
        """Tokens kept only because they may be hit: `extend` evicts them as needed."""
        return self.ledger.num_cached

    @property
    def num_held(self) -> int:
        """Tokens that some open sequence holds, shared ones once."""
        return self.ledger.num_held

    def open(self, token_ids: TokenIds, namespace: Namespace = ()) -> Sequence:
        """A new sequence that holds the longest cached prefix of its prompt: its first `length` tokens.

        At least one token is always left to compute. Sequences of different `namespace` share nothing. Raises
        OutOfRows, SequenceTooLong, ValueError.
        """
        sequence = self.ledger.open(int32_bytes(token_ids), namespace)
        self._apply()
        return sequence

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> torch.Tensor:
        """`counts[i]` more tokens for `sequences[i]`, all or none; evicts cached tokens as needed.

        Returns the slots to write their K/V to: int64 `[sum(counts)]` on the device, packed in the order of
        `sequences`. Raises OutOfTokens only when free and cached tokens together are too few,
        SequenceTooLong, ValueError.
        """
        starts = [sequence.length for sequence in sequences]
        self.ledger.extend(sequences, counts)
        self._apply()
        table = self.memory.table
        rows = [sequence.row for sequence in sequences]
        (entries,) = upload([table.entries(rows, starts, counts)], self.memory.device)
        return table.read(entries).long()

    def publish(self, sequence: Sequence) -> None:
        """Let what has slots of the sequence's prompt be hit by others, while it still runs.

        It may be published before its K/V is written, if that is done before anyone reads it; `confirm` once it
        is, or `retract` should it fail.
        """
        self.ledger.publish(sequence)
        self._apply()

    def confirm(self) -> None:
        """All that was published has its K/V: it stays."""
        self.ledger.confirm(self.ledger.step)

    def retract(self) -> None:
        """What was published since the last `confirm` never got its K/V: drop it from the cache.

        Close its sequences first, with `cache=False`. Raises ValueError while one still holds such tokens.
        """
        self.ledger.retract()
        self._apply()

    def close(self, sequence: Sequence, output_ids: TokenIds = b"", cache: bool = True) -> None:
        """End a sequence. With `cache` its tokens stay to be hit, those beyond the prompt as far as
        `output_ids` (the generated ids) names them; the rest is freed. Without, its private tokens are freed.
        """
        self.ledger.close(sequence, int32_bytes(output_ids), cache)
        self._apply()

    def evict(self, count: int) -> None:
        """Free exactly `count` cached tokens, those used longest ago first. Raises OutOfTokens."""
        self.ledger.evict(count)
        self._apply()

    def check(self) -> None:
        """Recount everything, on the device too, which synchronises. Raises CheckFailed, InvalidFree."""
        self.ledger.check()
        if self.num_free != self.memory.num_free:
            raise CheckFailed(
                f"the ledger counts {self.num_free} free tokens, the memory {self.memory.num_free}"
            )
        self.memory.check(
            [(sequence.row, sequence.shared, sequence.length) for sequence in self.ledger.sequences]
        )

    def _apply(self) -> None:
        self.memory.apply(self.ledger.drain())
