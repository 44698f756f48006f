"""A batch on the device: what all layers' attention reads of it, uploaded once a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightkv.memory.staging import packed_size, upload
from lightkv.triton_kernels.attention.lookups import BeamTable, Lookup, Pages

from .beams import Beams


@dataclass(frozen=True)
class BatchNumbers:
    """A batch on the host: int64 `[B]` each. `q_lens`: this step's queries. `kv_lens`: this step's keys, which
    may be an encoder's. `cached`: keys that are in the cache before. `num_contexts`: how many of the first
    sequences are in the context phase. `beams`: which of the others are beams of one request, or None."""

    q_lens: np.ndarray
    kv_lens: np.ndarray
    cached: np.ndarray
    num_contexts: int
    beams: Beams | None = None

    @property
    def num_queries(self) -> int:
        """Queries of the batch."""
        return int(self.q_lens.sum())

    @property
    def num_keys(self) -> int:
        """Keys that the batch brings."""
        return int(self.kv_lens.sum())

    @property
    def lengths(self) -> np.ndarray:
        """Keys that each sequence has once this step's are there."""
        return self.cached + self.kv_lens

    @property
    def num_prefills(self) -> int:
        """How many sequences are attended as prefills: the contexts, and all if a generation has more than one
        query."""
        generations = self.q_lens[self.num_contexts :]
        return self.num_contexts if (generations == 1).all() else len(self.q_lens)


@dataclass(eq=False)
class StaticRoom:
    """The sizes of a CUDA graph's tensors, and the tensors, which never move once they are made.

    `num_sequences`: of every batch. `num_tokens`: the most queries of a batch. `max_blocks`: the most blocks of
    a sequence. `only_decodes`: every sequence is a generation with one query.
    """

    num_sequences: int
    num_tokens: int
    max_blocks: int
    only_decodes: bool
    reads_beams: bool | None = None  # whether the first batch was in beam search, as a graph's kernels
    _packed: torch.Tensor | None = None
    _blocks: torch.Tensor | None = None
    _beam_rows: torch.Tensor | None = None

    def packed(self, arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
        """Returns uint8 room for the arrays of every step, which have the same sizes."""
        if self._packed is None:
            self._packed = torch.empty(packed_size(arrays), dtype=torch.uint8, device=device)
        return self._packed

    def hold(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies a table of blocks, int32 `[B, n]`, into the one that never moves, and returns that."""
        if self._blocks is None:
            shape = self.num_sequences, self.max_blocks
            self._blocks = torch.zeros(shape, dtype=torch.int32, device=blocks.device)
        self._blocks[:, : blocks.shape[1]].copy_(blocks)
        return self._blocks

    def beam_rows(self, longest: int, most: int, device: torch.device) -> torch.Tensor:
        """Returns `own_rows` of all sequences, which keep what was written to them, for `longest` positions;
        the first call makes them, for `most`. Raises ValueError for more positions than that."""
        if self._beam_rows is None:
            self._beam_rows = own_rows(self.num_sequences, max(longest, most), device)
        if self._beam_rows.shape[1] < longest:
            raise ValueError(
                f"sequences of {longest} tokens in beam search, and the CUDA graph has room for "
                f"{self._beam_rows.shape[1]}, as its first table of beams: make that one for the longest"
            )
        return self._beam_rows


def own_rows(num_sequences: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """Returns int32 `[num_sequences, num_positions]`, in which each row holds its own number."""
    own = torch.arange(num_sequences, dtype=torch.int32, device=device)
    return own[:, None].repeat(1, num_positions)


class Step:
    """One batch, uploaded without synchronising. For B sequences, of which the first P are prefills, with T
    keys of this step in all (0 without a cache):

    - on the host: `numbers`, `num_prefills`, and `num_blocks` (of each sequence; None without a cache);
    - on the device: `rows` int64 `[B]` (0, 1, 2 …), `lengths` int32 `[B]` (keys of each sequence, this step's
      included), `q_starts` int32 `[P + 1]`, `kv_starts` int32 `[B, 1]` (where each sequence's keys of this step
      begin), `token_rows` and `token_positions` int64 `[T]` (which key of which sequence each is), `sources`
      int64 `[T]` (the row of k that it is in; None where that is its own number), `blocks` int32 `[B, n]` (None
      without a cache), and `beam_rows` int32 `[B, n]` (whose keys each sequence reads at each position; None
      for its own).

    Under a CUDA graph T is the room's, and the keys beyond the batch's repeat the last one.
    """

    def __init__(
        self,
        numbers: BatchNumbers,
        device: torch.device,
        blocks: Sequence[Sequence[int]] | torch.Tensor | None,
        num_blocks: Sequence[int] | None,
        room: StaticRoom | None,
    ) -> None:
        if room is not None and isinstance(blocks, torch.Tensor) and blocks.shape[1] > room.max_blocks:
            raise ValueError(
                f"a sequence of {blocks.shape[1]} blocks, and the CUDA graph has room for {room.max_blocks}; "
                "make its metadata with the cache manager that they are of"
            )
        self.numbers = numbers
        self.num_prefills = num_prefills = numbers.num_prefills
        if room is not None:
            self.num_prefills = num_prefills = 0 if room.only_decodes else len(numbers.q_lens)
        self.num_blocks = num_blocks
        num_sequences = len(numbers.q_lens)
        q_starts = np.zeros(num_prefills + 1, dtype=np.int32)
        np.cumsum(numbers.q_lens[:num_prefills], out=q_starts[1:])
        ends = np.cumsum(numbers.kv_lens)
        token_rows = np.repeat(np.arange(num_sequences), numbers.kv_lens)
        positions = np.arange(len(token_rows)) - np.repeat(ends - numbers.kv_lens, numbers.kv_lens)
        positions += np.repeat(numbers.cached, numbers.kv_lens)
        if blocks is None:  # nothing is written, so keys need no place
            token_rows, positions = token_rows[:0], positions[:0]
        sources = np.arange(len(token_rows))
        self.is_padded = room is not None and not room.only_decodes
        if room is not None and self.is_padded and len(sources):
            sources = np.minimum(np.arange(room.num_tokens), len(sources) - 1)
            token_rows, positions = token_rows[sources], positions[sources]
        arrays: list[np.ndarray] = [
            np.arange(num_sequences),
            numbers.lengths.astype(np.int32),
            q_starts,
            (ends - numbers.kv_lens).astype(np.int32),
            token_rows,
            positions,
            sources,
        ]
        if blocks is not None and not isinstance(blocks, torch.Tensor):
            table = _block_table(blocks, None if room is None else room.max_blocks)
            if room is None:
                arrays.append(table.reshape(-1))
            else:  # a graph's steps may have them as lists or on the device, and its arrays have fixed sizes
                blocks = upload([table.reshape(-1)], device)[0].view(table.shape)
        out = None if room is None else room.packed(arrays, device)
        uploaded = upload(arrays, device, out=out)
        self.rows, self.lengths, self.q_starts = uploaded[:3]
        self.kv_starts = uploaded[3][:, None]
        self.token_rows, self.token_positions = uploaded[4:6]
        self.sources = uploaded[6] if self.is_padded and len(sources) else None
        self.beam_rows: torch.Tensor | None = None
        self.blocks: torch.Tensor | None = None
        if isinstance(blocks, torch.Tensor):
            self.blocks = blocks if room is None else room.hold(blocks)
        elif blocks is not None:
            self.blocks = uploaded[7].view(table.shape)

    def lookup(self, page_shift: int) -> Lookup:
        """Returns how the keys of a sequence are found in an index of pages of `2**page_shift` tokens."""
        return Pages(page_shift) if self.beam_rows is None else BeamTable(self.beam_rows, page_shift)


def check_blocks(numbers: BatchNumbers, num_blocks: Sequence[int], page_size: int) -> None:
    """Raises ValueError if a sequence has more keys than its `num_blocks` of `page_size` tokens hold."""
    for number, (length, count) in enumerate(zip(numbers.lengths.tolist(), num_blocks, strict=True)):
        if length > count * page_size:
            raise ValueError(
                f"sequence {number} of the batch has {length} tokens with this step's, and {count} blocks of "
                f"{page_size}; have the cache manager add blocks before prepare"
            )


def _block_table(blocks: Sequence[Sequence[int]], width: int | None) -> np.ndarray:
    """Returns the blocks of each sequence in rows of `width`, or as long as the longest, int32; 0 elsewhere."""
    longest = max((len(one) for one in blocks), default=0)
    table = np.zeros((len(blocks), max(longest, 1) if width is None else width), dtype=np.int32)
    if longest > table.shape[1]:
        raise ValueError(
            f"a sequence of {longest} blocks, and the CUDA graph has room for {width}; give the cache "
            "manager a max_blocks_per_seq of as many"
        )
    for row, one in zip(table, blocks, strict=True):
        row[: len(one)] = np.maximum(np.array(one, dtype=np.int64), 0)  # below 0: a block that is gone
    return table
