"""Entries of a row in order: a token table, a page table, or one contiguous run for each row.

A token's slot is `index[row, position >> shift] + (position & (2**shift - 1))`, so the three are one kernel
with another shift.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Variant

from .lookup import Lookup, check_shift, slots_at_reference


@dataclass(frozen=True)
class Pages(Lookup):
    """`shift`: 0 for a token table, log2(page) for a page table, 31 for one contiguous run per row."""

    shift: int = 0

    is_plain = True

    @property
    def page_shift(self) -> int:
        return self.shift

    def check(self, index: Tensor, variants: Sequence[Variant]) -> None:
        check_shift(self.shift)

    def slots_reference(self, index: Tensor, rows: int | Tensor, positions: Tensor) -> Tensor:
        return slots_at_reference(index, rows, positions, self.shift)


TOKEN_TABLE = Pages()
CONTIGUOUS = Pages(31)
