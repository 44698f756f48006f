"""What the allocator's kernels have in common: bits of words, and the prefix sum over the blocks.

Knows where the parts of a pool's books are; launches nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from .slot_state import ALIGN, BLOCK_FREE

_BLOCK_FREE = tl.constexpr(BLOCK_FREE)
_ALIGN = tl.constexpr(ALIGN)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


_COMPILED = tl.constexpr(isinstance(larger, triton.JITFunction))  # the interpreter knows no libdevice


@triton.jit
def num_bits(x):
    """How many bits of a uint32 are set."""
    if _COMPILED:
        return libdevice.popc(x.to(tl.int32, bitcast=True))
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def place_of_bit(x, n):
    """Where the n-th set bit of a uint32 is, n from 0."""
    place = tl.zeros_like(n)
    for step in tl.static_range(5):
        low = x & ((1 << (16 >> step)) - 1)  # of 32, 16, 8, 4 and 2 bits the lower half
        num_low = num_bits(low)
        above = n >= num_low
        n -= tl.where(above, num_low, 0)
        place += tl.where(above, 16 >> step, 0)
        x = tl.where(above, x >> (16 >> step), low)
    return place


@triton.jit
def highest_bit(x):
    """Where the highest set bit of a uint32 is; -1 of 0."""
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    x = x | (x >> 16)
    return num_bits(x) - 1


@triton.jit
def cum_sum_at(NUM_BLOCKS: tl.constexpr):
    """Where mem_cum_sum begins in the books."""
    return _BLOCK_FREE + (NUM_BLOCKS + _ALIGN - 1) // _ALIGN * _ALIGN


@triton.jit
def group_free_at(NUM_BLOCKS: tl.constexpr, GROUP_BLOCKS: tl.constexpr):
    """Where group_free begins in the books."""
    if GROUP_BLOCKS == 1:
        return _BLOCK_FREE
    else:
        return _BLOCK_FREE + 2 * ((NUM_BLOCKS + _ALIGN - 1) // _ALIGN * _ALIGN)


@triton.jit
def group_sum_at(NUM_BLOCKS: tl.constexpr, GROUP_BLOCKS: tl.constexpr):
    """Where a take in one kernel leaves the prefix sum of group_free; of single blocks that is mem_cum_sum."""
    if GROUP_BLOCKS == 1:
        return cum_sum_at(NUM_BLOCKS)
    else:
        return _BLOCK_FREE + 3 * ((NUM_BLOCKS + _ALIGN - 1) // _ALIGN * _ALIGN)


@triton.jit
def free_bits_at(NUM_BLOCKS: tl.constexpr):
    """Where free_bits begins in the books."""
    return _BLOCK_FREE + 4 * ((NUM_BLOCKS + _ALIGN - 1) // _ALIGN * _ALIGN)


@triton.jit
def entries_of(positions, rows, stride, places, mask, HAS_ROWS: tl.constexpr):
    """Where in the flattened table the slots of `places` go: int64."""
    entries = tl.load(positions + places, mask=mask, other=0).to(tl.int64)
    if HAS_ROWS:
        entries += tl.load(rows + places, mask=mask, other=0).to(tl.int64) * stride
    return entries


@triton.jit
def nth_of(counts, nth, columns):
    """Of each row of counts [rows, columns], where the nth thing counted is: its column, the count there, and
    which of those there it is. Rows without one give a column past the last, and nothing of use."""
    passed = tl.cumsum(counts, 1) <= nth[:, None]
    column = tl.sum(passed.to(tl.int32), 1)
    own = tl.sum(tl.where(columns[None, :] == column[:, None], counts, 0), 1)
    return column, own, nth - tl.sum(tl.where(passed, counts, 0), 1)
