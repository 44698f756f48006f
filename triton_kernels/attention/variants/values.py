"""A mask of values: a tensor says what is added to each score, or which keys each query sees."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.layout.strides import has_unit_stride

from .hooks import LOG2_E, Flags, Hooks
from .variant import Scored, Variant

_LOG2_E = tl.constexpr(LOG2_E)


class _Data(NamedTuple):
    """`added`: the values, bytes for bool. `columns`: `[B]`, or None."""

    added: Tensor
    columns: Tensor | None
    width: int
    stride_head: int
    stride_token: int


@triton.jit
def _start(data, rows):
    """Returns pointers to the value of key 0 in the mask's rows of a tile, and how many keys each row has, 0
    where not in the tile; both [BLOCK_M]."""
    pointers = data.added + rows.tokens.to(tl.int64) * data.stride_token
    pointers += rows.heads.to(tl.int64) * data.stride_head
    widths = tl.where(rows.in_tile, data.width, 0)
    if data.columns is not None:
        first = tl.load(data.columns + rows.requests, mask=rows.in_tile, other=0)
        pointers += first
        widths -= first
    return pointers, widths


@triton.jit
def _load(data, state, positions, exists, MASKED: tl.constexpr):
    pointers, widths = state
    within = (widths > 0)[:, None] & exists
    if MASKED:
        within = positions[None, :] < widths[:, None]
    if pointers.dtype.element_ty == tl.uint8:
        values = tl.load(pointers[:, None] + positions[None, :], mask=within, other=0)
    else:
        values = tl.load(pointers[:, None] + positions[None, :], mask=within, other=float("-inf"))
    return (values,)


@triton.jit
def _score(data, state, loaded, scores, score_scale):
    if loaded[0].dtype == tl.uint8:
        scores += tl.where(loaded[0] != 0, 0.0, float("-inf"))
    else:
        scores += loaded[0].to(tl.float32) * (_LOG2_E / score_scale)
    return scores


@triton.jit
def _whole(data, state, begin, end, in_tile, BLOCK_N: tl.constexpr):
    least = tl.min(tl.where(in_tile, state[1], 2**30), 0)
    return begin + tl.maximum(tl.minimum(end, least) - begin, 0) // BLOCK_N * BLOCK_N


@dataclass(frozen=True, eq=False)
class ValueMask(Variant):
    """What is added to scores, or hides keys.

    `values`: `[T, width]`, or `[H, T, width]` with a mask for each query head; a row for each query of q, and a
    column for each position of the query's request. Bool: whether the query sees the key. Floating: added to
    the score, scaled and capped, and -inf hides the key. Keys at positions of `width` and beyond are hidden. A
    value that overflows float32 when divided by the layer's scale hides, too. Strides are free, except that the
    last one is 1. A query that sees no key gets zeros.
    `columns`: int32 `[B]`: the column of the first key of each request, as where the masks of all requests are
    the blocks of one tensor; None for column 0.
    """

    values: Tensor
    columns: Tensor | None = None

    hooks = Hooks(
        start=tl.constexpr(_start),
        load=tl.constexpr(_load),
        score=tl.constexpr(_score),
        whole=tl.constexpr(_whole),
    )
    flags = Flags(has_load=True, may_exceed=True)

    @property
    def loaded_bytes(self) -> int:
        return self.values.element_size()

    def check(self, q: Tensor, num_requests: int) -> None:
        tokens, heads = q.shape[:2]
        values, columns = self.values, self.columns
        fits = values.dim() == 2 or (values.dim() == 3 and values.shape[0] == heads)
        if not fits or values.shape[-2] != tokens or not has_unit_stride(values):
            raise ValueError(
                f"a mask must be [{tokens}, width], or values [{heads}, {tokens}, width], with a last stride "
                f"of 1; got {tuple(values.shape)} with strides {values.stride()}"
            )
        if values.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"a mask's values must be bool, float32, float16 or bfloat16, got {values.dtype}"
            )
        if columns is not None and (
            columns.dtype != torch.int32 or columns.shape != (num_requests,) or not columns.is_contiguous()
        ):
            raise ValueError(
                f"columns must be contiguous int32 [{num_requests}]; got {columns.dtype} {tuple(columns.shape)}"
            )

    def data(self, scale: float) -> _Data:
        values = self.values.view(torch.uint8) if self.values.dtype == torch.bool else self.values
        stride_head = values.stride(0) if values.dim() == 3 else 0
        return _Data(values, self.columns, values.shape[-1], stride_head, values.stride(-2))

    def of_queries(self, begin: int, end: int) -> Self:
        return type(self)(self.values[..., begin:end, :], self.columns)

    def of_requests(self, begin: int, end: int) -> Self:
        return type(self)(self.values, None if self.columns is None else self.columns[begin:end])

    def scores_reference(self, scores: Tensor, scored: Scored) -> Tensor:
        values = self.values if self.values.dim() == 3 else self.values[None]
        first = 0 if self.columns is None else int(self.columns[scored.request])
        values = values[:, scored.queries, first : first + scored.length]
        if values.dtype == torch.bool:
            values = torch.zeros(values.shape, device=values.device).masked_fill_(~values, float("-inf"))
        missing = scored.length - values.shape[2]
        added = torch.nn.functional.pad(values.double(), (0, missing), value=float("-inf"))
        return scores + added[..., scored.keys].to(scores.dtype)
