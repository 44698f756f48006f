"""Entries of token tables in one launch: they take the slots of earlier ones, or their slots are read.

A table has a row for each sequence and an entry for each of its tokens; the tables of several layer groups lie
one after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64


@triton.jit(do_not_specialize=["stride", "distance", "num"])
def _reuse_kernel(table, rows, positions, stride, distance, num, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = places < num
    row = tl.load(rows + places, mask=valid, other=0)
    entry = table + row * stride + tl.load(positions + places, mask=valid, other=0)
    tl.store(entry, tl.load(entry - distance, mask=valid, other=0), mask=valid)


def reuse_entries(table: Tensor, rows: Tensor, positions: Tensor, distance: int) -> None:
    """Gives entry `positions[i]` of row `rows[i]` the slot of its entry `positions[i] - distance`.

    `table`: int32 `[num_rows, num_entries]`, contiguous; rows and positions: int64 `[n]`; no entry occurs
    twice, nor as another one's source. Contents are not checked.
    """
    if len(rows):
        grid = (triton.cdiv(len(rows), _BLOCK),)
        _reuse_kernel[grid](table, rows, positions, table.stride(0), distance, len(rows), BLOCK=_BLOCK)


def reuse_entries_reference(table: Tensor, rows: Tensor, positions: Tensor, distance: int) -> None:
    """Computes `reuse_entries` in plain torch."""
    table[rows, positions] = table[rows, positions - distance]


@triton.jit(do_not_specialize=["group_stride", "row_stride", "num"])
def _read_kernel(tables, rows, positions, slots, group_stride, row_stride, num, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1).to(tl.int64)
    valid = places < num
    row = tl.load(rows + places, mask=valid, other=0)
    entry = group * group_stride + row * row_stride + tl.load(positions + places, mask=valid, other=0)
    slot = tl.load(tables + entry, mask=valid, other=0)
    tl.store(slots + group * num + places, slot.to(tl.int64), mask=valid)


def read_entries(tables: Tensor, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Writes the slots of entries `positions[i]` of rows `rows[i]`, in the table of each group, to `slots`.

    `tables`: int32 `[num_groups, num_rows, num_entries]`; rows and positions: int64 `[n]`; slots: int64
    `[num_groups, n]`; all contiguous. Contents are not checked.
    """
    if len(rows):
        grid = triton.cdiv(len(rows), _BLOCK), len(tables)
        strides = tables.stride(0), tables.stride(1)
        _read_kernel[grid](tables, rows, positions, slots, *strides, len(rows), BLOCK=_BLOCK)


def read_entries_reference(tables: Tensor, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Computes `read_entries` in plain torch."""
    torch.index_select(tables.flatten(1).long(), 1, rows * tables.shape[2] + positions, out=slots)
