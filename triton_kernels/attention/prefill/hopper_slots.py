"""How the kernel of `prefill_hopper.py` finds the slots of a tile of keys (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _entries_of(index, row, positions, mask):
    """Returns where the row's entries of `positions` begin, and their places from there. Positions where `mask`
    is false, if there is a mask, read nothing. `index`: `Index`."""
    if index.indirection is not None:  # each position has a row of its own
        rows = index.indirection + row * index.stride_indirection
        start = index.entries + gl.load(rows + positions, mask=mask).to(gl.int64) * index.stride
    else:
        start = index.entries + row * index.stride
    if index.RING > 0:
        within = index.SINKS + (positions - index.SINKS) % index.RING
        positions = gl.where(positions < index.SINKS, positions, within)
    return start, positions


@gluon.jit
def find_slots(index, row, key_tile, begin, end, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Returns the slots of a key tile; for a key outside [begin, end), the slot of the nearest key inside, so
    that no free slot is read."""
    positions = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout)
    positions = gl.minimum(gl.maximum(positions, begin), end - 1)
    start, positions = _entries_of(index, row, positions, None)
    return gl.load(start + (positions >> index.SHIFT)) + (positions & ((1 << index.SHIFT) - 1))


@gluon.jit
def find_inner_slots(index, row, key_tile, exists, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Returns the slots of a key tile of which every key is read; zeros if it does not exist."""
    positions = key_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout)
    mask = gl.full([BLOCK_N], exists, gl.int1, layout)
    start, positions = _entries_of(index, row, positions, mask)
    entries = gl.load(start + (positions >> index.SHIFT), mask=mask, other=0)
    return entries + (positions & ((1 << index.SHIFT) - 1))
