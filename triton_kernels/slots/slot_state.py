"""The device memory of a pool of slots: which are free, and what spares a search to read them all.

Three levels say the same thing: one int32 a slot (`mem_state`), one bit a slot (`free_bits`), one count a block
of slots (`block_free`). The first decides; the others are changed by whoever changes it, and are what searches
read: of a pool of 10 million slots 1.3 MB of bits and ten thousand counts, of which a search begins with the
first that can be other than 0.

The layout of the books is decided here alone: kernels are told where the parts lie. Knows no kernel; what they
were compiled to for a pool is kept with it, and goes with it.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .relaunch import Launches

# Of `books`, one tensor, as every argument of a launch costs the host time. Parts of fixed size:
NUM_FREE = 0  # free slots of the pool
FLAGS = 1  # SlotFlag bits
FIRST_BLOCK = 2  # no block before this one has a free slot: a lower bound, raised by takes, lowered by gifts
TICKET = 3  # programs of a take under way that have read all they need; 0 between takes
SPAN = 4  # [3], of a take in two kernels: first block and end of the blocks it takes from, number of slots
FOUND = 32  # [MAX_FOUND], of a search for a run: the lowest start that each program found
MAX_FOUND = 256
# From here on block_free, mem_cum_sum and free_bits, each padded to ALIGN.
BLOCK_FREE = FOUND + MAX_FOUND
ALIGN = 64

BLOCK_SLOTS = 1024  # 32 words of bits: one cache line for each slot that a decode step takes


class SlotState(NamedTuple):
    """The state of a pool of slots; int32 tensors of one device, as the kernels use atomics on them.

    Slot 0 is padding: never free, so never taken.
    """

    mem_state: Tensor  # [num_slots], 1 = free
    free_bits: Tensor  # [num_blocks * block_words], the same: slot s is bit s % word_slots of s // word_slots
    block_free: Tensor  # [num_blocks], free slots of each block
    mem_cum_sum: Tensor  # [num_blocks], scratch of a take in two kernels: see `alloc_many`
    counters: Tensor  # [2]: free slots of the pool, SlotFlag bits
    first_block: Tensor  # [1]: no block before it has a free slot; a lower bound
    books: Tensor  # all but mem_state are views of this
    block_slots: int  # slots of a block, a power of two
    launches: Launches

    @property
    def word_slots(self) -> int:
        """Slots of a word of `free_bits`: 32, less only in blocks that have less."""
        return min(32, self.block_slots)

    @property
    def block_words(self) -> int:
        """Words of `free_bits` that a block has."""
        return self.block_slots // self.word_slots


def new_slot_state(num_slots: int, device: torch.device | str, block_slots: int = BLOCK_SLOTS) -> SlotState:
    """A pool whose slots 1..num_slots-1 are free. `block_slots`: a power of two."""
    if num_slots < 1 or block_slots < 1 or block_slots & (block_slots - 1):
        raise ValueError(
            f"num_slots must be positive and block_slots a power of two, got {num_slots} and {block_slots}"
        )
    num_blocks = triton.cdiv(num_slots, block_slots)
    word_slots = min(32, block_slots)
    num_words = num_blocks * (block_slots // word_slots)
    padded = triton.cdiv(num_blocks, ALIGN) * ALIGN
    books = torch.zeros(BLOCK_FREE + 2 * padded + num_words, dtype=torch.int32, device=device)
    block_free, mem_cum_sum = books[BLOCK_FREE:][:num_blocks], books[BLOCK_FREE + padded :][:num_blocks]
    free_bits = books[BLOCK_FREE + 2 * padded :]
    counters, first_block = books[NUM_FREE : FLAGS + 1], books[FIRST_BLOCK : FIRST_BLOCK + 1]

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
        books,
        block_slots,
        Launches(),
    )


class TableEntries(NamedTuple):
    """Where a take also writes its slots: place i of its output at `table[rows[i], positions[i]]`."""

    table: Tensor  # int32 [num_rows, max_entries], contiguous
    positions: Tensor  # int64 [max_n], contiguous
    rows: Tensor | None = None  # int64 [max_n], contiguous; None: positions count through the whole table


def table_pointers(state: SlotState, entries: TableEntries | None) -> tuple[Tensor, Tensor, Tensor]:
    """Table, positions and rows as the kernels take them; for what is missing, what is never read."""
    if entries is None:
        return state.books, state.books, state.books
    return entries.table, entries.positions, entries.positions if entries.rows is None else entries.rows
