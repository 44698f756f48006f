"""How the kernel of `prefill_hopper.py` finds the slots of a tile of keys (Gluon)."""

from functools import cache

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightkv.triton_kernels.attention.records import Index


@cache
def _in_gluon(hook: triton.JITFunction) -> triton.JITFunction:
    return gluon.jit(hook.fn)


def in_gluon(index: Index) -> Index:
    """Returns an index whose lookup Gluon's kernels can call."""
    hooks = index.hooks
    return index._replace(hooks=hooks._replace(place=gl.constexpr(_in_gluon(hooks.place.value))))


@gluon.jit
def find_slots(index, row, key_tile, begin, end, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Returns the slots of a key tile; for a key outside [begin, end), the slot of the nearest key inside, so
    that no free slot is read."""
    positions = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout)
    positions = gl.minimum(gl.maximum(positions, begin), end - 1)
    start, entries = index.hooks.place(index, row, positions, None)
    return gl.load(start + (entries >> index.SHIFT)) + (entries & ((1 << index.SHIFT) - 1))


@gluon.jit
def find_inner_slots(index, row, key_tile, exists, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Returns the slots of a key tile of which every key is read; zeros if it does not exist."""
    positions = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout)
    mask = gl.full([BLOCK_N], exists, gl.int1, layout)
    start, entries = index.hooks.place(index, row, positions, mask)
    slots = gl.load(start + (entries >> index.SHIFT), mask=mask, other=0)
    return slots + (entries & ((1 << index.SHIFT) - 1))
