"""The table that the kernels read: (row, position) → slot.

Row 0 is padding, and all its entries are slot 0. Entries of a row beyond its sequence's length are stale; those
slots may belong to other sequences.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lightkv.counts import checked_count

from .device import usable_device
from .staging import upload


class KVIndices(NamedTuple):
    """A batch's slots in FlashInfer's form with a page size of one. All int32, on the table's device."""

    kv_indptr: torch.Tensor  # [B + 1]
    kv_indices: torch.Tensor  # [sum(lengths)]
    kv_last_page_len: torch.Tensor  # [B], ones


class TokenTable:
    """`req_to_token`: int32 `[max_sequences + 1, max_entries]` on `device`.

    `groups` has such a table for each layer group, int32 `[num_groups, max_sequences + 1, max_entries]`, of
    which `req_to_token` is the first. `places` and `entries` are the same in all of them. `all_rows` is a view
    of it, `[num_groups * (max_sequences + 1), max_entries]`.
    """

    def __init__(
        self, max_sequences: int, max_entries: int, device: torch.device | str, num_groups: int = 1
    ) -> None:
        self.max_sequences = checked_count("max_sequences", max_sequences)
        self.max_entries = checked_count("max_entries", max_entries)
        self.device = usable_device(device)
        shape = checked_count("num_groups", num_groups), self.max_sequences + 1, self.max_entries
        self.groups = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.req_to_token = self.groups[0]
        self.all_rows = self.groups.flatten(0, 1)
        self._flat = self.groups.view(num_groups, -1)

    def entries(
        self,
        rows: Sequence[int] | np.ndarray,
        starts: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray,
    ) -> np.ndarray:
        """Returns where positions `starts[i] : starts[i] + counts[i]` of row `rows[i]` are in the flattened
        table.

        int64 `[sum(counts)]` on the host, packed in order. Raises IndexError for places outside the table.
        """
        numbers = np.array((rows, starts, counts), dtype=np.int64)
        row, start, count = numbers
        if row.size and (
            numbers.min() < 0 or row.max() > self.max_sequences or (start + count).max() > self.max_entries
        ):
            raise IndexError(
                f"rows {row.min()} to {row.max()} up to position {(start + count).max()}, in a table of "
                f"{self.max_sequences + 1} rows of {self.max_entries} entries"
            )
        return packed_ranges(row * self.max_entries + start, count)

    def places(self, rows: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Returns where entry `entries[i]` of row `rows[i]` is in the flattened table, as `entries` does."""
        return self.entries(rows, entries, np.ones(len(rows), dtype=np.int64))

    def read(self, entries: torch.Tensor) -> torch.Tensor:
        """Returns the slots at `entries` (int64 `[n]` on the table's device): int32 `[n]`, or `[num_groups, n]`
        where there are several groups."""
        flat = self._flat
        return flat[0].index_select(0, entries) if len(flat) == 1 else flat.index_select(1, entries)

    def slots(self, row: int, start: int, end: int) -> torch.Tensor:
        """Returns the slots of `row` at positions [start, end): int32, a view of the table."""
        return self.req_to_token[row, start:end]

    def kv_indices(self, rows: Sequence[int], lengths: Sequence[int]) -> KVIndices:
        """Returns the first `lengths[i]` slots of each of `rows`, packed. Uploads once, without
        synchronising."""
        entries = self.entries(rows, np.zeros(len(rows), dtype=np.int64), lengths)
        indptr = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=indptr[1:])
        kv_indptr, last, at = upload([indptr, np.ones(len(rows), dtype=np.int32), entries], self.device)
        return KVIndices(kv_indptr, self.read(at), last)


def packed_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns `starts[i] : starts[i] + counts[i]` for each i, packed, int64. A count below 0 stands for 0."""
    if len(counts) == 1:  # a prompt
        return np.arange(starts[0], starts[0] + counts[0])
    if not len(counts) or (counts == 1).all():  # a decode step
        return starts
    counts = np.maximum(counts, 0)
    ends = counts.cumsum()
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])
