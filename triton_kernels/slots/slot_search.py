"""What the allocator's kernels share: the tiles of a search, bits of a word, places in a table."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice


class CountTiles(NamedTuple):
    """How many counts of blocks a search for free slots reads in its first turn, and in each later turn."""

    first: int
    later: int


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


_COMPILED = tl.constexpr(isinstance(larger, triton.JITFunction))  # the interpreter has no libdevice


@triton.jit
def num_bits(x):
    """Returns how many bits of a uint32 are set."""
    if _COMPILED:
        return libdevice.popc(x.to(tl.int32, bitcast=True))
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def place_of_bit(x, n):
    """Returns the place of the n-th set bit of a uint32, n from 0."""
    place = tl.zeros_like(n)
    for step in tl.static_range(5):
        low = x & ((1 << (16 >> step)) - 1)  # the lower half of 32, 16, 8, 4 and 2 bits
        num_low = num_bits(low)
        above = n >= num_low
        n -= tl.where(above, num_low, 0)
        place += tl.where(above, 16 >> step, 0)
        x = tl.where(above, x >> (16 >> step), low)
    return place


@triton.jit
def highest_bit(x):
    """Returns the place of the highest set bit of a uint32; -1 for 0."""
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    x = x | (x >> 16)
    return num_bits(x) - 1


@triton.jit
def entries_of(positions, rows, stride, places, mask, HAS_ROWS: tl.constexpr):
    """Returns where in the flattened table the slots of `places` go: int64."""
    entries = tl.load(positions + places, mask=mask, other=0).to(tl.int64)
    if HAS_ROWS:
        entries += tl.load(rows + places, mask=mask, other=0).to(tl.int64) * stride
    return entries
