"""The device memory of a pool of slots: which are free, and what spares a search to read them all.

Three levels say the same thing: one int32 a slot (`mem_state`), one bit a slot (`free_bits`), one count a block
of slots (`block_free`). The first decides; the other two are changed by whoever changes it, and are what
searches read: of a pool of 10 million slots 1.3 MB of bits and some thousand counts. Knows no kernel.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .tuning import slots_of_block

# Where the parts of `books` begin: one tensor, as every argument of a launch costs the host time. The parts
# after `BLOCK_FREE` follow one another, padded to `ALIGN`.
COUNTERS = 0
SPAN = 4  # [4], of a take in two kernels: first block and end of the blocks it takes from, first rank and end
FOUND = 32  # [MAX_FOUND], of a search for a run: the lowest start that each program found
MAX_FOUND = 256
MARKS = FOUND + MAX_FOUND  # [MAX_MARKS], of a take in one kernel: at a block's first rank, the block + 1
MAX_MARKS = 512
BLOCK_FREE = MARKS + MAX_MARKS
ALIGN = 32


class SlotState(NamedTuple):
    """The state of a pool of slots; int32 tensors of one device, as the kernels use atomics on them.

    Slot 0 is padding: never free, so never taken.
    """

    mem_state: Tensor  # [num_slots], 1 = free
    free_bits: Tensor  # [num_blocks * block_words], the same: slot s is bit s % word_slots of s // word_slots
    block_free: Tensor  # [num_blocks], free slots of each block
    mem_cum_sum: Tensor  # [num_blocks], scratch: inclusive prefix sum of block_free, as of the last take
    counters: Tensor  # [2]: free slots of the pool, SlotFlag bits
    books: Tensor  # all but mem_state are views of this
    block_slots: int  # slots of a block, a power of two

    @property
    def word_slots(self) -> int:
        """Slots of a word of `free_bits`: 32, less only in blocks that have less."""
        return min(32, self.block_slots)

    @property
    def block_words(self) -> int:
        """Words of `free_bits` that a block has."""
        return self.block_slots // self.word_slots


def new_slot_state(num_slots: int, device: torch.device | str, block_slots: int | None = None) -> SlotState:
    """A pool whose slots 1..num_slots-1 are free. `block_slots`, a power of two, is chosen for it if None."""
    if block_slots is None:
        block_slots = slots_of_block(num_slots)
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
    free_bits, counters = books[BLOCK_FREE + 2 * padded :], books[COUNTERS : COUNTERS + 2]

    mem_state = torch.ones(num_slots, dtype=torch.int32, device=device)
    mem_state[0] = 0
    block_free.fill_(block_slots)
    block_free[0] -= 1
    block_free[-1] -= num_blocks * block_slots - num_slots
    mem_cum_sum.copy_(torch.cumsum(block_free, 0))
    counters[0] = num_slots - 1
    free_bits[: num_slots // word_slots] = -1 if word_slots == 32 else (1 << word_slots) - 1
    if num_slots % word_slots:
        free_bits[num_slots // word_slots] = (1 << num_slots % word_slots) - 1
    free_bits[0] -= 1
    return SlotState(mem_state, free_bits, block_free, mem_cum_sum, counters, books, block_slots)
