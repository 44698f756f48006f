"""The cache that an engine embeds: a ledger, and the device memory that its edits are applied to.

Every verb calls the ledger's verb of that name and applies its edits before it returns. An engine whose ledger
and memory live in different processes uses `TokenLedger` and `KVMemory` directly.
"""

import reprlib
from collections.abc import Sequence as Seq

import numpy as np
import torch

from lightkv.ledger.crosses import CrossSequence, ReaderSequence
from lightkv.ledger.prefix_tree import TOKEN_BYTES, Namespace
from lightkv.ledger.rings import RingSequence
from lightkv.ledger.sequence import Sequence, require_list
from lightkv.ledger.shared_prefixes import PrefixSharing, SharedPrefix, shared_prefixes
from lightkv.memory.exported_kv import ExportedKV, read_row, write_row
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.kv_spec import KVSpec
from lightkv.memory.staging import upload
from lightkv.memory.state_memory import StateSlots
from lightkv.memory.token_table import KVIndices
from lightkv.triton_kernels.layout.ring import Ring

from .caller import Caller, OnEdits
from .counts import checked_counts, checked_integer
from .errors import OutOfTokens
from .ledger import TokenLedger
from .memory_map import MemoryMap
from .token_ids import TokenIds, int32_bytes


class KVCache:
    """K/V of up to `capacity` tokens, shared by prefix, one token at a time.

    A cache belongs to the thread that makes it; a verb called from another thread raises WrongThread. A GPU has
    to be that thread's current device (`torch.cuda.set_device`); making a cache on another one raises
    ValueError. Counts are integers of Python or numpy; others raise TypeError. If the device memory fails in a
    verb, such as by torch.OutOfMemoryError, that error is raised, and every later verb raises MemoryFailed.

    `on_edits(edits, kept)` is called after every verb that changes something, with the edits that were applied
    and the entries of each KeepEntries among them: the arguments of `KVMemory.apply`. The verb is complete by
    then, so an exception of the callback is logged (logger "lightkv") and not raised. The callback may read the
    cache; a verb that would change it raises LightKVError.

    `num_states`: where layers have states (`KVSpec.states`), how many the cache keeps: one of each sequence
    that runs, and snapshots for others to go on from.

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
        num_states: int = 0,
    ) -> None:
        if bool(spec.states) != bool(num_states):
            raise ValueError(f"{num_states} state slots for {len(spec.states)} layers with states")
        self.ledger = ledger = TokenLedger(
            capacity, max_sequences, max_entries, groups=spec.groups, num_states=num_states
        )
        self.memory = KVMemory(
            spec, ledger.capacity + 1, ledger.max_sequences, ledger.max_entries, device, num_states
        )
        self.on_edits: OnEdits | None = None
        self._caller = Caller(self.memory)

    def __repr__(self) -> str:
        tokens = f"{self.num_free} free, {self.num_cached} cached, {self.num_held} held of {self.capacity}"
        rows = f"{self.num_open} of {self.max_sequences} sequences open"
        return f"KVCache({tokens} tokens; {rows}; on {self.memory.device}; {self.memory.pool.spec})"

    @property
    def capacity(self) -> int:
        """Tokens that the cache can hold. Where its layers have groups (`KVSpec.groups`), this and the other
        counts are of slots, of which a token takes one in each group whose layers still see it."""
        return self.ledger.capacity

    @property
    def num_free(self) -> int:
        """Tokens that no sequence holds and the cache does not keep."""
        return self.ledger.num_free

    @property
    def num_cached(self) -> int:
        """Tokens that no sequence holds, kept because a prompt may hit them: `extend` evicts them as needed."""
        return self.ledger.num_cached

    @property
    def num_held(self) -> int:
        """Tokens that open sequences hold; shared tokens count once."""
        return self.ledger.num_held

    @property
    def num_available(self) -> int:
        """Tokens that `extend` can allocate: the free ones and, by eviction, the cached ones."""
        return self.ledger.num_available

    @property
    def num_open(self) -> int:
        """Open sequences."""
        return self.ledger.num_open

    @property
    def max_sequences(self) -> int:
        """Sequences that can be open at once."""
        return self.ledger.max_sequences

    def match(self, token_ids: TokenIds, namespace: Namespace = ()) -> int:
        """Returns how many tokens of this prompt `open` would hit. Changes nothing. Raises ValueError."""
        self._caller.require_readable()
        ids = int32_bytes(token_ids)
        branch = self.ledger.find_branch(ids, namespace)
        return branch.point if branch else self.ledger.match(ids, namespace).num_tokens

    def open(self, token_ids: TokenIds, namespace: Namespace = (), keep_at: Seq[int] = ()) -> Sequence:
        """Opens a sequence that holds the longest cached prefix of its prompt: its first `length` tokens.

        At least one token is always left to compute. Sequences of different `namespace` share nothing.
        `keep_at`: after how many tokens other prompts may go on (`TokenLedger.open`). Raises OutOfRows,
        SequenceTooLong, ValueError.
        """
        self._caller.require_writable()
        ids = int32_bytes(token_ids)
        if branch := self.ledger.find_branch(ids, namespace):
            self.ledger.keep_branch(branch)
        sequence = self.ledger.open(ids, namespace, keep_at=checked_counts("keep_at", keep_at))
        self._apply()
        return sequence

    def states(self, sequences: Seq[Sequence]) -> StateSlots:
        """Returns which state slots the pieces read and write that these sequences were extended by last. Ask
        before a sequence is extended again: each piece has its own. Raises ValueError."""
        self._require_open(sequences)
        if self.memory.states is None:
            raise ValueError("no layer has states; make the cache of a spec with states")
        return self.memory.states.slots([sequence.row for sequence in sequences])

    def open_ring(self, token_ids: TokenIds, ring: Ring, namespace: Namespace = ()) -> RingSequence:
        """Opens a sequence whose row is a ring of `ring.capacity` entries, for a stream of any length in
        constant memory.

        It gets slots as it fills, and then writes to them again: nothing is freed, moved or copied. It shares
        its sinks at most, and cannot be forked or cut. Raises OutOfRows, SequenceTooLong, ValueError.
        """
        self._caller.require_writable()
        sequence = self.ledger.open_ring(int32_bytes(token_ids), ring, namespace)
        self._apply()
        return sequence

    def open_reader(
        self, token_ids: TokenIds, cross: CrossSequence, namespace: Namespace = ()
    ) -> ReaderSequence:
        """Opens a sequence that reads a cross sequence (`open_cross`), and keeps it open; so do its forks.

        It shares tokens with the other readers only. Raises OutOfRows, SequenceTooLong, ValueError.
        """
        self._caller.require_writable()
        sequence = self.ledger.open_reader(int32_bytes(token_ids), cross, namespace)
        self._apply()
        return sequence

    def open_cross(self, length: int) -> CrossSequence:
        """Opens a cross sequence of `length` tokens, such as an encoder's output, and allocates its slots
        (`slots`), which are to be written once.

        `open_reader` takes it. Its tokens are held once, however many sequences read it. `close` ends the
        caller's hold, and may be called as soon as there are readers: the slots are freed with the last of
        them, and so are the tokens that readers have left cached. Raises OutOfTokens, OutOfRows,
        SequenceTooLong, ValueError.
        """
        self._caller.require_writable()
        sequence = self.ledger.open_cross(checked_integer("length", length))
        self._apply()
        return sequence

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> torch.Tensor:
        """Allocates `counts[i]` more slots for `sequences[i]`, all or none; evicts cached tokens as needed.

        Returns the slots to write their K/V to: int64 `[sum(counts)]` on the device, packed in the order of
        `sequences`; where layers have groups `[num_groups, sum(counts)]`, and those of a layer are in the row
        `memory.group_of_layer[layer]`. In a ring these may be slots of old tokens, and a call takes up to
        `ring.room(position)` tokens. Raises OutOfTokens only when free and cached tokens together are too few,
        SequenceTooLong, ValueError. What windows have passed is freed even where slots are then too few.
        """
        self._caller.require_writable()
        counts = checked_counts("counts", counts)
        try:
            edit = self.ledger.extend(sequences, counts)
        except OutOfTokens:
            self._apply()  # where layers have groups, what their windows have passed was freed all the same
            raise
        slots = self._apply()
        try:
            # Some tokens took no slot of their own, or one in each group.
            if slots is None or edit.counts != tuple(counts) or not self.ledger.groups.is_uniform:
                return self._newest_slots(sequences, counts)
            return slots.long()
        except BaseException as error:  # the caller does not know the slots, to which no K/V will be written
            self._caller.note_failure(error)
            raise

    def shrink(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Undoes an `extend` whose tokens were not computed: frees the last `counts[i]` slots of
        `sequences[i]`, all or none. The prompts stay as they are. Raises ValueError for slots that other
        sequences may hold.
        """
        self._caller.require_writable()
        self.ledger.shrink(sequences, checked_counts("counts", counts))
        self._apply()

    def publish(self, sequence: Sequence) -> None:
        """Lets other sequences hit those tokens of the sequence's prompt that have slots, while it runs.

        It may be called before their K/V is written, as long as that happens before any sequence reads it. Call
        `confirm` once it is written, or `retract` if that fails.
        """
        self._caller.require_writable()
        self.ledger.publish(sequence)
        self._apply()

    def confirm(self) -> None:
        """Keeps what was published, whose K/V is written now."""
        self._caller.require_writable()
        self.ledger.confirm(self.ledger.step)
        self.ledger.step += 1

    def retract(self) -> None:
        """Drops what was published since the last `confirm`, because its K/V was not written.

        Close its sequences first, with `cache=False`. Raises ValueError while one still holds such tokens.
        """
        self._caller.require_writable()
        self.ledger.retract()
        self._apply()

    def fork(self, sequence: Sequence) -> Sequence:
        """Opens another sequence with the same tokens in the same slots: K/V is shared and never copied.

        Tokens that either of them adds from now on are its own. Where layers have groups, fork after the
        forward pass that computes the newest ones, since a fork gives up what windows have passed. Raises
        OutOfRows, ValueError.
        """
        self._caller.require_writable()
        fork = self.ledger.fork(sequence)
        self._apply()
        return fork

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drops all but the first `length` entries of a sequence, such as after tokens that were guessed wrong.

        Shared tokens stay with the other holders, or cached. The prompt is cut to `length` too. The position of
        the next token is then `length + sequence.dropped`. Raises ValueError.
        """
        self._caller.require_writable()
        self.ledger.truncate(sequence, checked_integer("length", length))
        self._apply()

    def release(self, sequence: Sequence, count: int, sink_tokens: int = 0) -> int:
        """Drops the `count` oldest tokens after the first `sink_tokens`, as a sliding window does.

        The remaining entries move down in the row; their K/V stays in its slots, unchanged. Returns how many
        slots this frees at once. Nothing that the sequence computes is cached from now on. Raises ValueError.
        """
        self._caller.require_writable()
        count, sink_tokens = checked_integer("count", count), checked_integer("sink_tokens", sink_tokens)
        num_freed = self.ledger.release(sequence, count, sink_tokens)
        self._apply()
        return num_freed

    def keep(self, sequence: Sequence, entries: torch.Tensor) -> int:
        """Keeps only the private tokens at `entries`, and frees the others at once.

        Published tokens count as shared even while no other sequence holds them: do not publish tokens that are
        to be dropped one by one.

        `entries`: int64 `[n]` on the device, distinct, in any order, from `sequence.shared` (or
        `sequence.gap.start` if that is more, because sinks stay) to `sequence.length`. They move down in the
        row in their old order. The host does not read them: for an entry that is repeated or out of range
        another entry of the range stays. Returns how many slots this frees. Raises ValueError, and TypeError if
        `entries` is not a tensor.
        """
        self._caller.require_writable()
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
        """Closes a sequence. With `cache` its tokens stay to be hit: the prompt's, and those whose ids are in
        `output_ids` (the generated ids). The other private tokens are freed; without `cache`, all of them.

        The K/V of every cached token has to be written, because a later hit reads it. The token that was
        sampled last has no K/V unless a slot was allocated and filled for it; tokens without a slot are not
        cached. Raises ValueError.
        """
        self._caller.require_writable()
        self.ledger.close(sequence, int32_bytes(output_ids), cache)
        self._apply()

    def evict(self, count: int) -> None:
        """Frees `count` cached tokens, longest unused, least hit first. Raises OutOfTokens, ValueError."""
        self._caller.require_writable()
        self.ledger.evict(checked_integer("count", count))
        self._apply()

    def slots(self, sequence: Sequence, layer_idx: int = 0) -> torch.Tensor:
        """Returns the slots of its tokens in a layer: int32 `[length]` on the device, a view of its row of the
        table. In a layer with a window or a chunk, those that it has passed are not its own any more.

        Raises ValueError.
        """
        self._require_open([sequence])
        group = self.memory.group_of_layer[layer_idx]
        return self.memory.table.groups[group, sequence.row, : sequence.length]

    def positions(self, sequence: Sequence) -> torch.Tensor:
        """Returns the positions of its tokens: int64 `[length]` on the device, with gaps where some were
        dropped.

        Raises ValueError.
        """
        self._require_open([sequence])
        positions: torch.Tensor = sequence.positions_of(self.memory.positions(sequence.row, sequence.length))
        return positions

    def kv_indices(self, sequences: Seq[Sequence]) -> KVIndices:
        """Returns the batch's slots in FlashInfer's form with a page size of one. Raises ValueError."""
        self._require_open(sequences)
        rows = [sequence.row for sequence in sequences]
        return self.memory.table.kv_indices(rows, [sequence.length for sequence in sequences])

    def shared_prefixes(self, sequences: Seq[Sequence], max_members: int) -> list[SharedPrefix]:
        """Returns which sequences of a decode batch share a prefix that is worth reading once for all of them:
        for `Batch.sharing`.

        Call it once the step's slots are allocated (`extend`). The answer stays right while these sequences are
        open and drop no tokens. `max_members`: sequences that one read serves (`attention.prefix_members` of
        the backends). Prefixes that save too little are left out (`shared_prefixes.PrefixSharing`). Raises
        ValueError.
        """
        self._require_open(sequences)
        sharing = PrefixSharing(checked_integer("max_members", max_members))
        return shared_prefixes(self.ledger.shared, sequences, sharing)

    def export(self, sequence: Sequence) -> ExportedKV:
        """Copies the K/V of a sequence, which stays open, to host memory. Waits for the device.

        It copies every entry that has a slot, so call it after the forward pass that writes them; where layers
        have groups, those with windows copy what they keep. Raises ValueError, also for a sequence that has
        dropped tokens.
        """
        self._require_open([sequence])
        if not sequence.is_whole:
            raise ValueError(
                f"{sequence} has dropped tokens, so a prompt's K/V cannot be made of it; run it anew"
            )
        firsts = [0, *(hold.kept for hold in sequence.holds if hold.of.bit)]
        return read_row(self.memory, sequence.row, firsts, sequence.length)

    def import_sequence(
        self, token_ids: TokenIds, exported: ExportedKV, namespace: Namespace = ()
    ) -> Sequence:
        """Opens a sequence with this K/V, which is that of the first tokens of `token_ids`.

        Tokens that the cache has already are shared, and only the others are copied. Raises what `open` and
        `extend` raise, and it then holds nothing; before that ValueError and TypeError for K/V of another shape
        or type, and for K/V that lacks some of what the next token sees.
        """
        self._caller.require_writable()
        if not isinstance(exported, ExportedKV):
            raise TypeError(f"exported is {reprlib.repr(exported)}; give what `export` returned")
        ids = int32_bytes(token_ids)
        firsts = exported.require_fit(self.memory.pool, len(ids) // TOKEN_BYTES)
        sequence = self.open(ids, namespace)
        try:
            if (start := sequence.length) < exported.length:
                self.ledger.extend_imported(sequence, exported.length, firsts[1:])
                self._apply()
                write_row(self.memory, sequence.row, start, exported)
        except BaseException:  # Ctrl-C as well
            if not self._caller.failure:
                self.close(sequence, cache=False)  # not all of its K/V is written
            raise
        return sequence

    def memory_map(self, of_states: bool = False) -> MemoryMap:
        """Returns what every slot is used for now, or every state slot. Waits for the device."""
        self._caller.require_readable()
        memory = self.memory.states if of_states else self.memory
        if memory is None:
            raise ValueError("no layer has states; make the cache of a spec with states")
        return MemoryMap(memory.labels(self.ledger.holdings()))

    def check(self) -> None:
        """Recounts everything, on the device too, which synchronises: counts, holders, readers and rings; that
        each slot has one owner, each row begins with the slots of its segments, and each has dropped as many
        tokens as the ledger says. Raises CheckFailed, InvalidFree."""
        self._caller.require_readable()
        self.ledger.check()
        self.memory.check(self.ledger.holdings())

    def _newest_slots(self, sequences: Seq[Sequence], counts: Seq[int]) -> torch.Tensor:
        """Returns the slots of the last `counts[i]` tokens of each sequence, wherever they are in its row."""
        table = self.memory.table
        entries = [np.empty(0, np.int64)]  # of no sequence, too
        for one, count in zip(sequences, counts, strict=True):
            entries.append(one.entries_at(np.arange(one.position - count, one.position)))
        places = table.places(np.repeat([one.row for one in sequences], counts), np.concatenate(entries))
        return table.read(upload([places], self.memory.device)[0]).long()

    def _require_open(self, sequences: Seq[Sequence]) -> None:
        self._caller.require_readable()
        require_list(sequences)
        for sequence in sequences:
            self.ledger.require_open(sequence)

    def _apply(self, kept: Seq[torch.Tensor] = ()) -> torch.Tensor | None:
        """Applies the ledger's edits. Returns the slots that the last Alloc took, int32; None if there is
        none."""
        return self._caller.apply(self.ledger.drain(), kept, self.on_edits)
