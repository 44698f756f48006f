"""The device memory of a pool of slots: which slots are free, at three levels.

    mem_state    one int32 per slot: the truth
    free_bits    one bit per slot             1.3 MB for a pool of 10 million slots
    block_free   one count per block          ten thousand counts for such a pool; a search begins here

Every operation that changes one level changes all three. The layout of the metadata tensor is decided here
alone; kernels are told the offsets of its parts. The compiled kernels of a pool are kept with it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .relaunch import Launches

# The layout of `metadata`: one tensor, because every argument of a launch costs host time. Parts of fixed size:
NUM_FREE = tl.constexpr(0)  # free slots of the pool
FLAGS = tl.constexpr(1)  # SlotFlag bits
FIRST_BLOCK = tl.constexpr(2)  # no block before it has a free slot; allocations raise it, frees lower it
TICKET = tl.constexpr(3)  # programs of the running allocation that have read; 0 between allocations
SPAN = tl.constexpr(4)  # [3], the plan of `alloc_many`: first block, end of the blocks, number of slots
FOUND = tl.constexpr(32)  # [MAX_FOUND], the lowest start of a run that each searching program found
MAX_FOUND = tl.constexpr(256)
# From here on block_free, mem_cum_sum and free_bits, each padded to ALIGN.
BLOCK_FREE = tl.constexpr(FOUND.value + MAX_FOUND.value)
ALIGN = 64

BLOCK_SLOTS = 1024  # 32 words of bits: one cache line for each slot that a decode step allocates


class SlotState(NamedTuple):
    """The state of a pool of slots; int32 tensors of one device, as the kernels use atomics on them.

    Slot 0 is padding: never free, so never allocated.
    """

    mem_state: Tensor  # [num_slots], 1 = free
    free_bits: Tensor  # [num_blocks * block_words], the same: slot s is bit s % word_slots of s // word_slots
    block_free: Tensor  # [num_blocks], free slots of each block
    mem_cum_sum: Tensor  # [num_blocks], scratch of `alloc_many`
    counters: Tensor  # [2]: free slots of the pool, SlotFlag bits
    first_block: Tensor  # [1], a lower bound: no block before it has a free slot
    metadata: Tensor  # all tensors but mem_state are views of this one
    block_slots: int  # slots per block, a power of two
    launches: Launches

    @property
    def word_slots(self) -> int:
        """Slots per word of `free_bits`: 32, or the slots of a block if those are fewer."""
        return min(32, self.block_slots)

    @property
    def block_words(self) -> int:
        """Words of `free_bits` per block."""
        return self.block_slots // self.word_slots

    def layout(self) -> "Layout":
        """Returns where kernels find the parts of the metadata."""
        offsets = self.mem_cum_sum.storage_offset(), self.free_bits.storage_offset()
        return Layout(*map(tl.constexpr, (*offsets, len(self.block_free), self.block_words, self.word_slots)))


class Layout(NamedTuple):
    """A pool's constants as kernels take them: where the parts of `metadata` begin that have no fixed place,
    the number of blocks, words of a block, and slots of a word."""

    CUM_SUM: Any
    FREE_BITS: Any
    NUM_BLOCKS: Any
    WORDS: Any
    WORD_SLOTS: Any


def new_slot_state(num_slots: int, device: torch.device | str, block_slots: int = BLOCK_SLOTS) -> SlotState:
    """Makes a pool whose slots 1..num_slots-1 are free. `block_slots`: a power of two. Raises ValueError."""
    if num_slots < 1 or block_slots < 1 or block_slots & (block_slots - 1):
        raise ValueError(
            f"num_slots must be positive and block_slots a power of two, got {num_slots} and {block_slots}"
        )
    num_blocks = triton.cdiv(num_slots, block_slots)
    word_slots = min(32, block_slots)
    num_words = num_blocks * (block_slots // word_slots)
    padded = triton.cdiv(num_blocks, ALIGN) * ALIGN
    begin = BLOCK_FREE.value
    metadata = torch.zeros(begin + 2 * padded + num_words, dtype=torch.int32, device=device)
    block_free, mem_cum_sum = metadata[begin:][:num_blocks], metadata[begin + padded :][:num_blocks]
    free_bits = metadata[begin + 2 * padded :]
    counters = metadata[NUM_FREE.value : FLAGS.value + 1]
    first_block = metadata[FIRST_BLOCK.value :][:1]

    mem_state = torch.ones(num_slots, dtype=torch.int32, device=device)
    mem_state[0] = 0
    block_free.fill_(block_slots)
    block_free[0] -= 1
    block_free[-1] -= num_blocks * block_slots - num_slots
    counters[0] = num_slots - 1
    free_bits[: num_slots // word_slots] = -1 if word_slots == 32 else (1 << word_slots) - 1
    if num_slots % word_slots:
        free_bits[num_slots // word_slots] = (1 << num_slots % word_slots) - 1
    free_bits[0] -= 1
    return SlotState(
        mem_state,
        free_bits,
        block_free,
        mem_cum_sum,
        counters,
        first_block,
        metadata,
        block_slots,
        Launches(),
    )


class TableEntries(NamedTuple):
    """Where an allocation also writes its slots: slot i of its output at `table[rows[i], positions[i]]`."""

    table: Tensor  # int32 [num_rows, max_entries], contiguous
    positions: Tensor  # int64 [max_n], contiguous
    rows: Tensor | None = None  # int64 [max_n], contiguous; None: positions index the flattened table


def table_arguments(state: SlotState, entries: TableEntries | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns table, positions, rows and the table's stride as kernel arguments; any tensor in place of those
    that are not read."""
    if entries is None:
        return state.metadata, state.metadata, state.metadata, 1
    table, positions, rows = entries
    return table, positions, positions if rows is None else rows, table.stride(0)


class Given(NamedTuple):
    """What an allocation has beside its output: a count on the device, entries of a table, and their rows."""

    COUNT: Any
    TABLE: Any
    ROWS: Any

    @classmethod
    def of(cls, count: Tensor | None, entries: TableEntries | None) -> "Given":
        return cls(count is not None, entries is not None, entries is not None and entries.rows is not None)

    def constants(self) -> "Given":
        """Returns it as kernels take it."""
        return Given(*map(tl.constexpr, self))
