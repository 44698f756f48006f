"""A beam table: the token at a position of a row is found in another row of the index, as in beam search, where
beams share the tokens of those that they come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Variant
from lightkv.triton_kernels.checks import Tensors

from .lookup import Lookup, LookupHooks, check_shift, slots_at_reference

_TABLE = Tensors(indirection="int32 [rows, positions] with a last stride of 1")


class _Data(NamedTuple):
    table: Tensor
    stride: int


@triton.jit
def _place(index, row, positions, valid):
    rows = tl.load(index.data.table + row * index.data.stride + positions, mask=valid)
    return index.entries + rows.to(tl.int64) * index.stride, positions


@dataclass(frozen=True, eq=False)
class BeamTable(Lookup):
    """`indirection`: int32 `[num_rows, positions]`: the token at a position of row r is found in row
    `indirection[r, position]` of the index. `shift`: as of `Pages`."""

    indirection: Tensor
    shift: int = 0

    hooks = LookupHooks(place=tl.constexpr(_place))

    @property
    def page_shift(self) -> int:
        return self.shift

    def check(self, index: Tensor, variants: Sequence[Variant]) -> None:
        check_shift(self.shift)
        _TABLE.check({"rows": len(index)}, indirection=self.indirection)

    def data(self) -> Any:
        return _Data(self.indirection, self.indirection.stride(0))

    def slots_reference(self, index: Tensor, rows: int | Tensor, positions: Tensor) -> Tensor:
        return slots_at_reference(index, self.indirection[rows, positions].long(), positions, self.shift)
