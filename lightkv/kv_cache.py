"""The cache that an engine embeds: a ledger, and the device memory that follows it.

Knows no model and no request. Every verb is the ledger's, with its edits applied before it returns; an
engine whose ledger and memory live in different processes uses `TokenLedger` and `KVMemory` themselves.
"""

import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import index
from typing import NamedTuple

import torch

from lightkv.ledger.prefix_tree import TOKEN_BYTES, Namespace
from lightkv.ledger.sequence import Sequence
from lightkv.ledger.shared_prefixes import PrefixSharing, SharedPrefix, shared_prefixes
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.kv_spec import KVSpec
from lightkv.memory.token_table import KVIndices

from .edits import Edit
from .errors import CheckFailed, LightKVError, WrongThread
from .ledger import TokenLedger
from .memory_map import CACHED, OWN, MemoryMap, segment_labels
from .token_ids import TokenIds, int32_bytes

_logger = logging.getLogger("lightkv")


class ExportedKV(NamedTuple):
    """A sequence's K/V in host memory (pinned where the cache is on a GPU): of each layer `[length, width]`."""

    spec: KVSpec
    length: int
    layers: list[torch.Tensor]


class KVCache:
    """K/V of up to `capacity` tokens, shared by prefix, one token at a time.

    It belongs to the thread that makes it; a verb called from another raises WrongThread. A GPU has to be that
    thread's current device (`torch.cuda.set_device`); making a cache on another one raises ValueError. Counts
    are integers, Python's or numpy's; others raise TypeError.

    `on_edits(edits, kept)` is called with the edits of every verb that changes something, after they are
    applied, and with the entries that each Keep among them was given: what `KVMemory.apply` takes. The verb has
    happened by then, so an exception of the callback is logged (logger "lightkv") and goes no further. From
    within it the cache may be read; a verb that would change it raises LightKVError.

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
        self.ledger = ledger = TokenLedger(capacity, max_sequences, max_entries)
        self.memory = KVMemory(
            spec, ledger.capacity + 1, ledger.max_sequences, ledger.max_entries, torch.device(device)
        )
        self.on_edits: Callable[[list[Edit], list[torch.Tensor]], None] | None = None
        self._owner = threading.current_thread()
        self._is_telling = False  # is `on_edits` running?

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

    @property
    def num_available(self) -> int:
        """Tokens that `extend` could give: the free and, by eviction, the cached."""
        return self.ledger.num_available

    @property
    def num_open(self) -> int:
        """Sequences that are open."""
        return self.ledger.num_open

    @property
    def max_sequences(self) -> int:
        """Sequences that can be open at once."""
        return self.ledger.max_sequences

    def match(self, token_ids: TokenIds, namespace: Namespace = ()) -> int:
        """How many tokens of this prompt `open` would find cached. Changes nothing. Raises ValueError."""
        self._require_owner()
        return self.ledger.match(int32_bytes(token_ids), namespace).num_tokens

    def open(self, token_ids: TokenIds, namespace: Namespace = ()) -> Sequence:
        """A new sequence that holds the longest cached prefix of its prompt: its first `length` tokens.

        At least one token is always left to compute. Sequences of different `namespace` share nothing. Raises
        OutOfRows, SequenceTooLong, ValueError.
        """
        self._require_turn()
        sequence = self.ledger.open(int32_bytes(token_ids), namespace)
        self._apply()
        return sequence

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> torch.Tensor:
        """`counts[i]` more tokens for `sequences[i]`, all or none; evicts cached tokens as needed.

        Returns the slots to write their K/V to: int64 `[sum(counts)]` on the device, packed in the order of
        `sequences`. Raises OutOfTokens only when free and cached tokens together are too few,
        SequenceTooLong, ValueError.
        """
        self._require_turn()
        self.ledger.extend(sequences, [index(count) for count in counts])
        taken = self._apply()
        if taken is None:  # nobody was to be extended
            return torch.empty(0, dtype=torch.int64, device=self.memory.device)
        return taken.long()

    def shrink(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Undo an `extend`, all or none: the last `counts[i]` slots of `sequences[i]` go back, for what was
        to be computed was not. Their prompts stay what they are. Raises ValueError for slots that others may
        hold.
        """
        self._require_turn()
        self.ledger.shrink(sequences, [index(count) for count in counts])
        self._apply()

    def publish(self, sequence: Sequence) -> None:
        """Let what has slots of the sequence's prompt be hit by others, while it still runs.

        It may be published before its K/V is written, if that is done before anyone reads it; `confirm` once it
        is, or `retract` should it fail.
        """
        self._require_turn()
        self.ledger.publish(sequence)
        self._apply()

    def confirm(self) -> None:
        """All that was published has its K/V: it stays."""
        self._require_turn()
        self.ledger.confirm(self.ledger.step)

    def retract(self) -> None:
        """What was published since the last `confirm` never got its K/V: drop it from the cache.

        Close its sequences first, with `cache=False`. Raises ValueError while one still holds such tokens.
        """
        self._require_turn()
        self.ledger.retract()
        self._apply()

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence with the same tokens, in the same slots: K/V is shared, never copied.

        What each adds from here on is its own. Raises OutOfRows, ValueError.
        """
        self._require_turn()
        twin = self.ledger.fork(sequence)
        self._apply()
        return twin

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Let go of all but its first `length` entries: say, of tokens that were guessed wrong.

        What it shared stays with the others, or cached; what is cut off of its prompt is its prompt no more.
        The position of its next token is `length + sequence.dropped` then. Raises ValueError.
        """
        self._require_turn()
        self.ledger.truncate(sequence, index(length))
        self._apply()

    def release(self, sequence: Sequence, count: int, sinks: int = 0) -> int:
        """Drop the `count` oldest tokens after its first `sinks`: the window has moved on.

        The entries that remain move down in its row; their K/V stays where and as it is. Returns how many slots
        are free at once. Nothing that the sequence computes is cached from now on. Raises ValueError.
        """
        self._require_turn()
        num_freed = self.ledger.release(sequence, index(count), index(sinks))
        self._apply()
        return num_freed

    def keep(self, sequence: Sequence, entries: torch.Tensor) -> int:
        """Of the tokens that it alone holds, only those at `entries` stay: the others are free at once.

        What it has published counts as shared, even while nobody else holds it: do not publish what is to be
        evicted by token.
        `entries`: int64 `[n]` on the device, each once, in any order, of `shared` (or `num_sinks`, if that is
        more: sinks stay) to `length`. They move down in the row, in the order that they had. The host does not
        look at them: for what is named twice, or is out of range, another entry of the range stays. Returns how
        many slots are free at once. Raises ValueError, and TypeError for what is no tensor.
        """
        self._require_turn()
        if not isinstance(entries, torch.Tensor):
            raise TypeError(
                f"entries is a {type(entries).__name__}; give a tensor, int64 [n] on {self.memory.device}"
            )
        if entries.dim() != 1 or entries.dtype != torch.int64 or entries.device != self.memory.device:
            raise ValueError(
                f"entries must be int64 [n] on {self.memory.device}, got {entries.dtype} "
                f"{tuple(entries.shape)} on {entries.device}"
            )
        num_freed = self.ledger.keep(sequence, len(entries))
        self._apply([entries] if num_freed else [])
        return num_freed

    def close(self, sequence: Sequence, output_ids: TokenIds = b"", cache: bool = True) -> None:
        """End a sequence. With `cache` its tokens stay to be hit, those beyond the prompt as far as
        `output_ids` (the generated ids) names them; the rest is freed. Without, its private tokens are freed.

        Every token that is named has to have its K/V written: whoever hits it reads what is there. The token
        that was sampled last has none yet, unless a slot was taken for it and filled. Raises ValueError.
        """
        self._require_turn()
        self.ledger.close(sequence, int32_bytes(output_ids), cache)
        self._apply()

    def evict(self, count: int) -> None:
        """Free exactly `count` cached tokens, those used longest ago first. Raises OutOfTokens."""
        self._require_turn()
        self.ledger.evict(index(count))
        self._apply()

    def slots(self, sequence: Sequence) -> torch.Tensor:
        """Where its tokens are: int32 `[length]` on the device, a view of its row of the table.

        Raises ValueError.
        """
        self._require_owner()
        self.ledger.require_open(sequence)
        return self.memory.table.slots(sequence.row, 0, sequence.length)

    def positions(self, sequence: Sequence) -> torch.Tensor:
        """The positions of its tokens: int64 `[length]` on the device, with gaps where some were dropped.

        Raises ValueError.
        """
        self._require_owner()
        self.ledger.require_open(sequence)
        return self.memory.positions(sequence.row, sequence.length)

    def kv_indices(self, sequences: Seq[Sequence]) -> KVIndices:
        """The batch as FlashInfer takes it, at a page size of one. Raises ValueError."""
        self._require_owner()
        for sequence in sequences:
            self.ledger.require_open(sequence)
        rows = [sequence.row for sequence in sequences]
        return self.memory.table.kv_indices(rows, [sequence.length for sequence in sequences])

    def shared_prefixes(self, sequences: Seq[Sequence], max_members: int) -> list[SharedPrefix]:
        """Of a batch that is to decode, who reads which first tokens together: for `AttentionMetadata.prepare`.

        Ask once the step's slots are taken (`extend`). It stays right as long as these sequences are open, and
        neither cut nor dropped from. `max_members`: as many as one reading serves (`metadata.prefix_members`).
        What saves too little is left out (`shared_prefixes.PrefixSharing`). Raises ValueError.
        """
        self._require_owner()
        for sequence in sequences:
            self.ledger.require_open(sequence)
        return shared_prefixes(self.ledger.shared, sequences, PrefixSharing(index(max_members)))

    def export(self, sequence: Sequence) -> ExportedKV:
        """Its K/V in host memory, to be kept elsewhere or handed over; it stays open. Waits for the device.

        Of every entry that has a slot: call it after the pass that writes them.
        Raises ValueError, also for one that has dropped tokens.
        """
        self._require_owner()
        self.ledger.require_open(sequence)
        if sequence.dropped:
            raise ValueError(
                f"{sequence} has dropped tokens, so a prompt's K/V cannot be made of it; run it anew"
            )
        pool, device = self.memory.pool, self.memory.device
        slots = self.slots(sequence).long()
        layers = []
        for layer_idx in range(pool.spec.num_layers):
            shape = len(slots), pool.spec.width
            layer = torch.empty(shape, dtype=pool.spec.dtype, pin_memory=device.type == "cuda")
            layers.append(layer.copy_(pool.kv(layer_idx).index_select(0, slots), non_blocking=True))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return ExportedKV(pool.spec, len(slots), layers)

    def import_sequence(
        self, token_ids: TokenIds, exported: ExportedKV, namespace: Namespace = ()
    ) -> Sequence:
        """A new sequence with this K/V, which is that of the first tokens of `token_ids`.

        What the cache has of them is shared, and only the rest copied. Raises as `open` and `extend`, and
        ValueError for K/V of another shape or type; whatever it raises, nothing is held then.
        """
        self._require_turn()
        ids, pool = int32_bytes(token_ids), self.memory.pool
        num_ids = len(ids) // TOKEN_BYTES
        if exported.spec != pool.spec or not 1 <= exported.length <= num_ids:
            raise ValueError(
                f"K/V of {exported.length} tokens of {exported.spec} for {num_ids} token ids in a cache of "
                f"{pool.spec}; give the ids that it was computed from, at least one"
            )
        found = [(tuple(layer.shape), layer.dtype) for layer in exported.layers]
        expected = [((exported.length, pool.spec.width), pool.spec.dtype)] * pool.spec.num_layers
        if found != expected:
            raise ValueError(
                f"K/V of {len(found)} layers {sorted(set(map(str, found)))} where {len(expected)} of "
                f"{expected[0]} are needed; give what `export` returned, whole"
            )
        sequence = self.open(ids, namespace)
        try:
            start, count = sequence.length, exported.length - sequence.length
            if count > 0:
                slots = self.extend([sequence], [count])
                for layer_idx, layer in enumerate(exported.layers):
                    part = layer[start:].to(self.memory.device, non_blocking=True)
                    pool.kv(layer_idx).index_copy_(0, slots, part)
        except BaseException:  # Ctrl-C as well
            self.close(sequence, cache=False)  # not all of its K/V is written
            raise
        return sequence

    def memory_map(self) -> MemoryMap:
        """What every slot is used for now. Waits for the device."""
        self._require_owner()
        own = {where: OWN + where[0] for where in self.ledger.private_ranges()}
        return MemoryMap(self.memory.labels(segment_labels(self.ledger), own, CACHED))

    def check(self) -> None:
        """Recount everything, on the device too, which synchronises. Raises CheckFailed, InvalidFree."""
        self._require_owner()
        self.ledger.check()
        if self.num_free != self.memory.num_free:
            raise CheckFailed(
                f"the ledger counts {self.num_free} free tokens, the memory {self.memory.num_free}"
            )
        self.memory.check(self.ledger.private_ranges())

    def _require_owner(self) -> None:
        caller = threading.current_thread()
        if caller is not self._owner:
            raise WrongThread(self._owner.name, caller.name)

    def _require_turn(self) -> None:
        self._require_owner()
        if self._is_telling:
            raise LightKVError(
                "on_edits called a verb that changes the cache, in the middle of another; note it there, and "
                "call it once that one has returned"
            )

    def _apply(self, kept: Seq[torch.Tensor] = ()) -> torch.Tensor | None:
        """Returns the slots that were taken, int32; None where none were."""
        edits = self.ledger.drain()
        taken = self.memory.apply(edits, kept)
        if edits and self.on_edits is not None:
            self._is_telling = True
            try:
                self.on_edits(edits, list(kept))
            except Exception:  # it was told of what is done; whoever called the verb must get what it returns
                _logger.exception("on_edits failed on %d edits, which have been applied", len(edits))
            finally:
                self._is_telling = False
        return taken
