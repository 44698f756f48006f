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
_BEAMS = Tensors(
    cache_indirection="int32 [batch, beams, positions]",
    rows="int64 [batch, beams]",
    out="int32 [rows, positions]",
)


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
    `indirection[r, position]` of the index (`beam_indirection` makes it). `shift`: as of `Pages`."""

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


def beam_indirection(cache_indirection: Tensor, rows: Tensor, out: Tensor) -> None:
    """Writes the indirection of beams' rows to `out`, from a table of beams as TensorRT-LLM's decode takes it.

    Everything is read on the device, so a captured call may be replayed.

    Args:
        cache_indirection: int32 `[batch, beams, positions]`, the beam of the same request whose K/V a beam has
            at each position. Unlike in TensorRT-LLM, this holds for a beam's newest token, too: its K/V is the
            beam's own, so its number is that of the beam.
        rows: int64 `[batch, beams]`, the row of the index that each beam writes to.
        out: int32 `[num_rows, positions]`, `BeamTable.indirection`, of which the rows in `rows` are written.

    Raises:
        ValueError: shapes or dtypes do not fit. Nothing is written then. The numbers are not checked.
    """
    _BEAMS.check({}, cache_indirection=cache_indirection, rows=rows, out=out)
    batch, beams, positions = cache_indirection.shape
    chosen = rows[:, None].expand(batch, beams, beams).gather(2, cache_indirection.long())
    out.index_copy_(0, rows.flatten(), chosen.view(batch * beams, positions).int())
