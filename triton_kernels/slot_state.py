"""The device memory of a pool of slots: which are free, and what spares a search to read them all.

Four levels say the same thing: one int32 a slot (`mem_state`), one bit a slot (`free_bits`), one count a
block of slots (`block_free`), one count a group of blocks (`group_free`). The first decides; the others are
changed by whoever changes it, and are what searches read: of a pool of 10 million slots 1.3 MB of bits, some
thousand counts of blocks and some hundred of groups. Where blocks are few each is its own group. Knows no
kernel.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .tuning import blocks_of_group, slots_of_block

# Where the parts of `books` begin: one tensor, as every argument of a launch costs the host time. The parts
# after `BLOCK_FREE` follow one another, padded to `ALIGN`.
COUNTERS = 0
SPAN = 4  # [4], of a take in two kernels: first block and end of the blocks it takes from, first rank and end
FOUND = 32  # [MAX_FOUND], of a search for a run: the lowest start that each program found
MAX_FOUND = 256
BLOCK_FREE = FOUND + MAX_FOUND
ALIGN = 64  # and the most blocks of a group, so that the last group has all its counts


class SlotState(NamedTuple):
    """The state of a pool of slots; int32 tensors of one device, as the kernels use atomics on them.

    Slot 0 is padding: never free, so never taken.
    """

    mem_state: Tensor  # [num_slots], 1 = free
    free_bits: Tensor  # [num_blocks * block_words], the same: slot s is bit s % word_slots of s // word_slots
    block_free: Tensor  # [num_blocks], free slots of each block
    group_free: Tensor  # [num_groups], free slots of each group; block_free itself if groups are of one block
    mem_cum_sum: Tensor  # [num_blocks], scratch: inclusive prefix sum of block_free, of a take in two kernels
    counters: Tensor  # [2]: free slots of the pool, SlotFlag bits
    books: Tensor  # all but mem_state are views of this
    block_slots: int  # slots of a block, a power of two
    group_blocks: int  # blocks of a group, a power of two
    launches: dict[tuple[object, ...], Callable[..., None]]  # compiled launches of takes of this state

    @property
    def word_slots(self) -> int:
        """Slots of a word of `free_bits`: 32, less only in blocks that have less."""
        return min(32, self.block_slots)

    @property
    def block_words(self) -> int:
        """Words of `free_bits` that a block has."""
        return self.block_slots // self.word_slots


def new_slot_state(
    num_slots: int,
    device: torch.device | str,
    block_slots: int | None = None,
    group_blocks: int | None = None,
) -> SlotState:
    """A pool whose slots 1..num_slots-1 are free.

    `block_slots` and `group_blocks`, powers of two, are chosen for it if None.
    """
    if block_slots is None:
        block_slots = slots_of_block(num_slots)
    if num_slots < 1 or block_slots < 1 or block_slots & (block_slots - 1):
        raise ValueError(
            f"num_slots must be positive and block_slots a power of two, got {num_slots} and {block_slots}"
        )
    num_blocks = triton.cdiv(num_slots, block_slots)
    if group_blocks is None:
        group_blocks = blocks_of_group(num_blocks)
    if not 1 <= group_blocks <= ALIGN or group_blocks & (group_blocks - 1):
        raise ValueError(f"group_blocks must be a power of two in 1..{ALIGN}, got {group_blocks}")
    num_groups = triton.cdiv(num_blocks, group_blocks)
    word_slots = min(32, block_slots)
    num_words = num_blocks * (block_slots // word_slots)
    padded = triton.cdiv(num_blocks, ALIGN) * ALIGN
    books = torch.zeros(BLOCK_FREE + 4 * padded + num_words, dtype=torch.int32, device=device)
    block_free, mem_cum_sum = books[BLOCK_FREE:][:num_blocks], books[BLOCK_FREE + padded :][:num_blocks]
    group_free = block_free if group_blocks == 1 else books[BLOCK_FREE + 2 * padded :][:num_groups]
    free_bits, counters = books[BLOCK_FREE + 4 * padded :], books[COUNTERS : COUNTERS + 2]

    mem_state = torch.ones(num_slots, dtype=torch.int32, device=device)
    mem_state[0] = 0
    block_free.fill_(block_slots)
    block_free[0] -= 1
    block_free[-1] -= num_blocks * block_slots - num_slots
    if group_blocks > 1:
        counts = block_free.new_zeros(num_groups * group_blocks)
        counts[:num_blocks] = block_free
        group_free.copy_(counts.view(num_groups, group_blocks).sum(dim=1))
    mem_cum_sum.copy_(torch.cumsum(block_free, 0))
    counters[0] = num_slots - 1
    free_bits[: num_slots // word_slots] = -1 if word_slots == 32 else (1 << word_slots) - 1
    if num_slots % word_slots:
        free_bits[num_slots // word_slots] = (1 << num_slots % word_slots) - 1
    free_bits[0] -= 1
    return SlotState(
        mem_state,
        free_bits,
        block_free,
        group_free,
        mem_cum_sum,
        counters,
        books,
        block_slots,
        group_blocks,
        {},
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
