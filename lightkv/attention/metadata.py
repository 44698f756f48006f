"""What every layer's attention needs to know about a step: its sequences, their lengths, and where their K/V
is.

A batch is packed: first the prefills, each with any number of tokens, then the decodes, with one token each.
Static batches, which CUDA graphs are captured on, have the decodes' tokens first (`BatchShape`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import packed_size, upload
from lightkv.memory.token_table import TokenTable
from lightkv.triton_kernels.attention.decode.decode_plan import SharedPrefixGroups
from lightkv.triton_kernels.attention.lookups import TOKEN_TABLE, BeamTable, Lookup, RingRows
from lightkv.triton_kernels.attention.variants import TreeMask, ValueMask
from lightkv.triton_kernels.layout.ring import Ring


class BatchShape(NamedTuple):
    """The slots of a static batch: tokens, prefills and decodes, as many as a CUDA graph is captured for.

    A batch without prefill slots is a decode batch, with as many tokens as decode slots. Otherwise the tokens
    are those of the decodes, then those of the prefills, then padding:

        tokens   ├─ d decodes ─┼── prefills, by q_starts ──┼── padding ──┤ num_tokens
                 ├── num_decodes: decode attention ──┤

    The host alone knows d, so decode attention always covers the first `num_decodes` tokens, of which those
    after the first d belong to decodes of length 0. Prefill attention comes after it and writes the
    output of every token from d on. The last prefill slot is a request of length 0 whose queries are the
    padding: their output is zeros, so nothing that is not finite reaches the padding slot of the pool. So
    there is one more prefill slot than there can be prefills.
    """

    num_tokens: int
    num_prefills: int
    num_decodes: int

    @classmethod
    def of_decodes(cls, num_decodes: int) -> "BatchShape":
        """Returns the shape of a decode batch."""
        return cls(num_decodes, 0, num_decodes)

    @property
    def decodes_first(self) -> bool:
        """Whether the decodes' tokens precede those of prefills."""
        return self.num_prefills > 0

    def fits(self, num_tokens: int, num_prefills: int, num_decodes: int) -> bool:
        """Returns whether a batch of these numbers has room in the slots."""
        return (
            num_tokens <= self.num_tokens
            and num_prefills <= max(self.num_prefills - 1, 0)
            and num_decodes <= self.num_decodes
        )

    def place(self, numbers: np.ndarray, num_prefills: int) -> np.ndarray:
        """Returns numbers of each sequence, prefills first, in the slots of the batch; 0 in the others."""
        placed = np.zeros(self.num_prefills + self.num_decodes, dtype=numbers.dtype)
        placed[:num_prefills] = numbers[:num_prefills]
        num_decodes = len(numbers) - num_prefills
        placed[self.num_prefills : self.num_prefills + num_decodes] = numbers[num_prefills:]
        return placed

    def place_tokens(self, numbers: np.ndarray, num_prefill_tokens: int) -> np.ndarray:
        """Returns numbers of each token, those of prefills first, in the tokens of the batch; 0 in the others.

        This makes the order of tokens above, also where there are no prefill slots.
        """
        placed = np.zeros(self.num_tokens, dtype=numbers.dtype)
        num_decodes = len(numbers) - num_prefill_tokens
        placed[:num_decodes] = numbers[num_prefill_tokens:]
        placed[num_decodes : len(numbers)] = numbers[:num_prefill_tokens]
        return placed


class AttentionMetadata:
    """A step's metadata: `prepare` fills it once a step, and every layer's backend reads it. For B sequences
    with T tokens in all:

    - on the host: `num_prefills`, `num_decodes`, `num_tokens`, `num_prefill_tokens`, `first_prefill_token` and
      `first_decode_token` (where the tokens of prefills and of decodes begin); `num_sequences` and
      `num_real_prefills` (padding aside); `q_lens` int32 `[B]` on the CPU (this step's tokens of each
      sequence), `prefill_lens` (those of the prefills), `rows_host` and `kv_lens_host` int64 `[B]`,
      `num_sink_tokens` (0 unless sequences that have dropped tokens still hold the first ones);
    - on the device: `q_lens_on_device` int32 `[B]`, `position_ids` int64 `[T]`, `rows` int64 `[B]` (of the
      token table), `kv_lens` int32 `[B]` (tokens in the cache, this step's included), `q_starts`
      int32 `[B + 1]`, `slot_mapping` int64 `[T]` (the slots that this step's K/V is written to), `dropped`
      int64 `[T]` (None if no token was dropped), `shared_prefixes` (decodes whose first tokens are in the same
      slots; None if no prefix is read for several of them), `index` int32 `[num_rows, num_entries]` (the slots
      of each row's entries: the token table's, or those of rings in order), `ring` (what the rows are rings of;
      None where they are not, or where `index` has them in order), `ring_in_order` (the ring whose rows
      `index` has in order, or None), `mask` and `indirection` (those of `prepare`, or None).

        q         ├──── prefill 0 ────┼─ prefill 1 ─┼ decode 2 ┼ decode 3 ┤
        q_starts  0                   ┘             ┘          ┘          └ T

    With sinks, a query attends to the first `num_sink_tokens` entries as if the dropped tokens had never been
    there, and to all other entries at their true positions.

    A step over rings (`prepare`) has decodes only, each at a position of its own; or prefills only, whose
    entries are then put in order: `index` has a row for each sequence, with the sinks and then what its first
    query sees. To attention such a step is one of sequences that have dropped tokens.

    With a `shape` it holds a batch of exactly that shape, in tensors that never move. A smaller batch is padded
    with sequences in row 0, with length 0, and tokens at position 0, with slot 0. Where the shape has prefill
    slots, `q_starts` is of them alone, `[num_prefills + 1]`; `num_prefills`, `num_decodes` and
    `num_prefill_tokens` count padding, too.

    `prefix_members` is how many decodes may read one shared prefix together (`attention.prefix_members` of the
    backends); with 1, prefixes that `prepare` gets are ignored.
    """

    def __init__(
        self,
        max_num_requests: int,
        max_num_tokens: int,
        memory: KVMemory,
        shape: BatchShape | None = None,
        prefix_members: int = 1,
        room: int = 0,
    ) -> None:
        self.max_num_requests = max_num_requests
        self.max_num_tokens = max_num_tokens
        self.memory = memory
        self.shape = shape
        self.prefix_members = prefix_members
        self.step = 0  # counts calls of `prepare`: whatever a backend derived from an earlier step is stale
        self.plan: object | None = None  # what the backend derives once a step for all its layers
        self._room = room
        self._static: torch.Tensor | None = None
        self.prepare([], [], [], 0)

    def create_cuda_graph_metadata(self, max_batch_size: int) -> "AttentionMetadata":
        """Makes metadata in static tensors for decode batches of up to `max_batch_size`, for a graph to be
        captured on.

        `prepare` loads a batch in one upload, outside the graph; kernels inside the graph may change `rows`,
        `kv_lens`, `position_ids` and `slot_mapping` in place.
        """
        return self.create_static(BatchShape.of_decodes(max_batch_size))

    def create_static(self, shape: BatchShape, room: int = 0) -> "AttentionMetadata":
        """Makes metadata in static tensors for batches that fit `shape`; otherwise as
        `create_cuda_graph_metadata`. `room`: the bytes of what `prepare` gets in `also`
        (`staging.packed_size`), the same in every step."""
        return AttentionMetadata(
            shape.num_prefills + shape.num_decodes,
            shape.num_tokens,
            self.memory,
            shape=shape,
            prefix_members=self.prefix_members,
            room=room,
        )

    @property
    def is_cuda_graph(self) -> bool:
        """Whether the tensors never move, so that a CUDA graph can be captured on them."""
        return self.shape is not None

    @property
    def decodes_first(self) -> bool:
        """Whether the decodes' tokens precede those of prefills (`BatchShape`)."""
        return self.shape is not None and self.shape.decodes_first

    @property
    def prefill_lens(self) -> torch.Tensor:
        """This step's tokens of each prefill, int32 `[num_prefills]` on the CPU."""
        return self.q_lens[: self.num_prefills]

    def prepare(
        self,
        rows: Sequence[int] | np.ndarray,
        starts: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray,
        num_prefills: int,
        *,
        dropped: Sequence[int] = (),
        num_sink_tokens: int = 0,
        ring: Ring | None = None,
        prefixes: Sequence[SharedPrefix] | None = None,
        also: Sequence[np.ndarray] = (),
        mask: ValueMask | TreeMask | None = None,
        positions: Sequence[int] | None = None,
        indirection: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Loads a step's batch, with one upload (two where tokens were dropped) and without synchronising.

        Args:
            rows: each sequence's row of the token table.
            starts: how many entries of its row have K/V before this step.
            counts: how many tokens it computes in this step; their slots are in the table already.
            num_prefills: the first so many sequences are prefills, all others decodes.
            dropped: how many tokens each sequence has dropped so far; the position of an entry is the entry
                plus that number. Empty if no sequence has dropped tokens.
            num_sink_tokens: how many first entries every sequence still holds after dropping (see the class).
                Every sequence must then have dropped tokens, and be a prefill, even if of one token.
            ring: every sequence's row is such a ring. `starts` are then positions, and neither `dropped` nor
                `num_sink_tokens` is given. All are decodes, or all are prefills, of which either each has
                dropped tokens before this step or none has; a prefill takes up to `ring.room` tokens.
            prefixes: decodes whose first entries are in the same slots, which are then read once
                (`KVCache.shared_prefixes`); no row twice. A graph that is captured with shared prefixes needs a
                list in every step, even an empty one.
            also: one-dimensional arrays of the caller's, to upload with the batch.
            mask: what hides keys or changes scores in this step, in every layer, with a row for each token of
                the batch, on the device. A captured graph reads the tensors that it was captured with. There is
                none in a step over rings, or with sinks; where tokens were dropped, only a tree of guesses.
            positions: of each token, where they do not follow from the entries, as those of a tree of guesses.
            indirection: int32 `[table rows, n]` on the device, with n as large as the longest sequence: the row
                whose slot is read for each position of a row, as of beams (`BeamTable.indirection`). New K/V is
                written to a row's own slots. A captured graph reads the tensor that it was captured with. No
                sequence has dropped tokens then, no prefill is of a ring, and no prefixes are read together.

        Returns:
            `also` on the device.

        Raises:
            ValueError: the batch breaks these rules or exceeds the maxima.
        """
        row, start, count = (np.array(numbers, dtype=np.int64) for numbers in (rows, starts, counts))
        self._validate(row, start, count, num_prefills)
        if ring is not None:
            self._validate_ring(start, count, num_prefills, ring, bool(len(dropped) or num_sink_tokens))
        self._validate_tensors(start + count, num_prefills, ring, num_sink_tokens, mask, indirection)
        if isinstance(mask, ValueMask) and any(dropped):
            raise ValueError(
                f"a mask of values and {list(dropped)} dropped tokens: its columns are positions, and these "
                "sequences do not hold all of theirs; run them without a mask, or with one of bits"
            )
        if indirection is not None and (len(dropped) or prefixes):
            raise ValueError(
                f"an indirection with {list(dropped)} dropped tokens and prefixes {prefixes}: it names a row "
                "for each position, so nothing may be dropped, and each sequence reads its own; run these apart"
            )
        gap = np.array(dropped, dtype=np.int64) if len(dropped) else np.zeros_like(row)
        self._validate_dropped(start, gap, num_prefills, num_sink_tokens)
        shape, table = self.shape, self.memory.table
        num_sequences, num_real_prefills = len(row), num_prefills
        index, in_order = table.req_to_token, False
        if ring is None:
            entries = table.entries(row, start, count)
            token_positions = entries + np.repeat(gap - row * table.max_entries, count)
        else:
            entries = table.entries_in_rings(row, start, count, [ring] * len(row))
            spans = [np.arange(*span) for span in zip(start, start + count, strict=True)]
            token_positions = np.concatenate([np.zeros(0, dtype=np.int64), *spans])
            if num_prefills:
                gap = np.array([ring.dropped(first) for first in start.tolist()], dtype=np.int64)
                num_sink_tokens = ring.sinks if gap.any() else 0
                in_order = bool(gap.any())
        if in_order:
            assert ring is not None
            index = _in_order(table, row, gap, ring)
            row, start = np.arange(len(row)), start - gap
        kv_len = start + count
        if positions is not None:
            if len(positions) != len(entries):
                raise ValueError(f"{len(positions)} positions of {len(entries)} tokens: give one each")
            token_positions = np.array(positions, dtype=np.int64)
        num_prefill_tokens = int(count[:num_prefills].sum())
        first_prefill_token, first_decode_token = 0, num_prefill_tokens
        if shape is not None:
            num_tokens = len(entries)
            entries = shape.place_tokens(entries, num_prefill_tokens)
            token_positions = shape.place_tokens(token_positions, num_prefill_tokens)
            row, start, kv_len = (shape.place(numbers, num_prefills) for numbers in (row, start, kv_len))
            first_decode_token = 0
            count = shape.place(count, num_prefills)
            num_prefills = shape.num_prefills
            count[num_prefills:] = 1
            if shape.decodes_first:
                count[num_prefills - 1] = shape.num_tokens - num_tokens  # the padding
                first_prefill_token = num_tokens - num_prefill_tokens
                num_prefill_tokens = shape.num_tokens - first_prefill_token
        q_starts = np.zeros(len(row) + 1, dtype=np.int32)
        np.cumsum(count, out=q_starts[1:])
        if self.decodes_first:
            q_starts = q_starts[: num_prefills + 1] + np.int32(first_prefill_token)
        may_share = self.prefix_members > 1 and len(row) - num_prefills > 1
        # The tensors of a graph always have room for prefixes.
        has_prefixes = may_share and (shape is not None or bool(prefixes))
        shared: list[np.ndarray] = []
        if has_prefixes:
            decodes = row[num_prefills:], start[num_prefills:]
            shared = _shared_prefixes(*decodes, prefixes or (), self.prefix_members)

        self.step += 1
        self.num_sequences, self.num_real_prefills = num_sequences, num_real_prefills
        self.mask, self.indirection = mask, indirection
        self.rows_host, self.kv_lens_host = row, kv_len
        self.num_prefills = num_prefills
        self.num_decodes = len(row) - num_prefills
        self.num_tokens = len(entries)
        self.num_prefill_tokens = num_prefill_tokens
        self.first_prefill_token = first_prefill_token
        self.first_decode_token = first_decode_token
        self.q_lens = torch.from_numpy(count.astype(np.int32))

        arrays = [
            row,
            entries,
            token_positions,
            kv_len.astype(np.int32),
            q_starts,
            count.astype(np.int32),
            *shared,
            *also,
        ]
        device = self.memory.device
        if shape is not None and self._static is None:
            size = packed_size(arrays) + self._room
            self._static = torch.empty(size, dtype=torch.uint8, device=device)
            self.slot_mapping = torch.empty(self.num_tokens, dtype=torch.int64, device=device)
        uploaded = upload(arrays, device, out=self._static)
        self.rows, on_device, self.position_ids, self.kv_lens, self.q_starts, self.q_lens_on_device = (
            uploaded[:6]
        )
        self.shared_prefixes: SharedPrefixGroups | None = None
        if has_prefixes and prefixes is not None:
            members, keys, place = uploaded[6:9]
            self.shared_prefixes = SharedPrefixGroups(members.view(-1, self.prefix_members), keys, place)
        slots = table.read(on_device)
        if shape is not None:
            self.slot_mapping.copy_(slots)
        else:
            self.slot_mapping = slots.long()
        self.index = index
        self.ring = None if in_order or num_prefills else ring
        self.ring_in_order = ring if in_order else None
        self.lookup: Lookup = TOKEN_TABLE if indirection is None else BeamTable(indirection)
        if self.ring is not None:
            self.lookup = RingRows(self.ring)
        self.num_sink_tokens = num_sink_tokens
        self.dropped = upload([np.repeat(gap, count)], device)[0] if gap.any() else None
        return uploaded[len(uploaded) - len(also) :]

    def _validate(self, row: np.ndarray, start: np.ndarray, count: np.ndarray, num_prefills: int) -> None:
        if not len(row) == len(start) == len(count):
            raise ValueError(
                f"{len(row)} rows, {len(start)} starts and {len(count)} counts: give one each a sequence"
            )
        if len(row) > self.max_num_requests or count.sum() > self.max_num_tokens:
            raise ValueError(
                f"{len(row)} sequences of {count.sum()} tokens; this metadata takes {self.max_num_requests} "
                f"of {self.max_num_tokens}: split the step, or make it larger"
            )
        limit = len(row)
        if self.shape is not None:
            limit = max(self.shape.num_prefills - 1, 0)
        if not 0 <= num_prefills <= min(limit, len(row)):
            raise ValueError(f"{num_prefills} prefills; there can be 0 to {limit} here")
        if self.shape is not None and len(row) - num_prefills > self.shape.num_decodes:
            raise ValueError(
                f"{len(row) - num_prefills} decodes; there are slots for {self.shape.num_decodes} here"
            )
        if (count < 1).any() or (count[num_prefills:] != 1).any():
            raise ValueError(
                f"counts {count.tolist()} with {num_prefills} prefills: a prefill computes at least one "
                "token, a decode exactly one, and the prefills come first"
            )

    def _validate_tensors(
        self,
        kv_lens: np.ndarray,
        num_prefills: int,
        ring: Ring | None,
        num_sink_tokens: int,
        mask: ValueMask | TreeMask | None,
        indirection: torch.Tensor | None,
    ) -> None:
        if mask is not None and (ring is not None or num_sink_tokens):
            raise ValueError(
                f"a mask in a step over {ring} with {num_sink_tokens} sinks: its columns are the positions of "
                "sequences that hold all their tokens; run the sequences with a mask in a step of their own"
            )
        if indirection is None:
            return
        table = self.memory.table
        wanted, longest = len(table.req_to_token), int(kv_lens.max(initial=0))
        if (
            indirection.dim() != 2
            or indirection.dtype != torch.int32
            or len(indirection) != wanted
            or indirection.shape[1] < longest
            or indirection.device != table.device
        ):
            raise ValueError(
                f"indirection must be int32 [{wanted}, n] on {table.device}, a row for each of the table and n "
                f"of {longest} or more; got {indirection.dtype} {tuple(indirection.shape)} on "
                f"{indirection.device}"
            )
        if ring is not None:
            raise ValueError(
                f"a step over {ring} with an indirection: a row is a ring or reads from other rows, not both"
            )

    def _validate_dropped(
        self, start: np.ndarray, gap: np.ndarray, num_prefills: int, num_sink_tokens: int
    ) -> None:
        if len(gap) != len(start) or (gap < 0).any() or num_sink_tokens < 0:
            raise ValueError(
                f"{gap.tolist()} tokens dropped by {len(start)} sequences with {num_sink_tokens} sinks: give "
                "0 or more, one number a sequence"
            )
        if self.is_cuda_graph and gap.any():
            raise ValueError(
                f"{gap.tolist()} tokens dropped: a CUDA graph takes entries for positions; run this step "
                "eagerly"
            )
        if num_sink_tokens and (
            num_prefills < len(start) or not gap.all() or (start < num_sink_tokens).any()
        ):
            raise ValueError(
                f"{num_sink_tokens} sinks: in such a step every sequence is a prefill, has dropped tokens "
                f"and holds the sinks; here {num_prefills} of {len(start)} are prefills, they have dropped "
                f"{gap.tolist()} and hold {start.tolist()}. Run the others in a step of their own"
            )

    def _validate_ring(
        self, start: np.ndarray, count: np.ndarray, num_prefills: int, ring: Ring, has_dropped: bool
    ) -> None:
        if has_dropped or num_prefills not in (0, len(start)):
            raise ValueError(
                f"{num_prefills} prefills among {len(start)} rings: a step over rings has prefills or decodes "
                "only, and gets positions instead of dropped tokens and sinks; run the others in another step"
            )
        if not num_prefills:
            return
        gaps = [ring.dropped(first) > 0 for first in start.tolist()]
        rooms = [ring.room(first) for first in start.tolist()]
        if self.is_cuda_graph or any(gaps) != all(gaps) or (count > rooms).any():
            raise ValueError(
                f"prefills of {count.tolist()} tokens at {start.tolist()} of {ring}: eagerly, all have dropped "
                f"tokens or none has, and at most {rooms} are computed at once; cut them, or run them apart"
            )


def _in_order(table: TokenTable, rows: np.ndarray, gaps: np.ndarray, ring: Ring) -> torch.Tensor:
    """Returns an index of rings, int32 `[B, capacity]`: the slots of the sinks, then those of the tokens from
    the first one on that is not dropped."""
    column = np.arange(ring.size)
    window = ring.sinks + (gaps[:, None] + column) % ring.size
    sinks = np.broadcast_to(np.arange(ring.sinks), (len(rows), ring.sinks))
    entries = np.concatenate((sinks, window), 1) + rows[:, None] * table.max_entries
    (on_device,) = upload([entries.reshape(-1)], table.device)
    return table.read(on_device).view(len(rows), ring.capacity)


def _shared_prefixes(
    rows: np.ndarray, starts: np.ndarray, prefixes: Sequence[SharedPrefix], most_members: int
) -> list[np.ndarray]:
    """Makes the arrays of `SharedPrefixGroups` for decodes in `rows`, flat: members, keys, place. Raises
    ValueError.

    A prefix with more than `most_members` sequences is cut into several, as equal in size as possible. Each has
    at least two members, so there are never more than half as many as decodes.
    """
    members = np.full((len(rows) // 2, most_members), -1, dtype=np.int32)
    keys = np.zeros(len(members), dtype=np.int32)
    place = np.full(len(rows), -1, dtype=np.int32)
    known = {row: i for i, row in enumerate(rows.tolist())} if prefixes else {}
    num = 0
    for prefix in prefixes:
        chosen = np.array([known.pop(row, -1) for row in prefix.rows])
        if (chosen < 0).any() or (starts[chosen] < prefix.num_tokens).any():
            raise ValueError(
                f"rows {prefix.rows} are to read {prefix.num_tokens} entries together: each has to be a decode "
                "that had so many before this step, and may be named only once"
            )
        for some in np.array_split(chosen, -(-len(chosen) // most_members)):
            if len(some) > 1:
                members[num, : len(some)] = some
                keys[num] = prefix.num_tokens
                place[some] = num * most_members + np.arange(len(some))
                num += 1
    return [members.reshape(-1), keys, place]
