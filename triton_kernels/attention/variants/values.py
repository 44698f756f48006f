"""A mask of values: a tensor says what is added to each score, or which keys each query sees."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors

from .hooks import LOG2_E, Flags, Hooks
from .variant import Scored, Variant

_LOG2_E = tl.constexpr(LOG2_E)
_TYPES = "bool or float32 or float16 or bfloat16"
_OF_ALL_HEADS = Tensors(values=f"{_TYPES} [T, width] with a last stride of 1", columns="contiguous int32 [B]")
_OF_EACH_HEAD = Tensors(
    values=f"{_TYPES} [H, T, width] with a last stride of 1", columns="contiguous int32 [B]"
)


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
    on_hopper = (16,)

    @property
    def loaded_bytes(self) -> int:
        return self.values.element_size()

    def check(self, q: Tensor, num_requests: int) -> None:
        taken = _OF_EACH_HEAD if self.values.dim() == 3 else _OF_ALL_HEADS
        sizes = {"T": q.shape[0], "H": q.shape[1], "B": num_requests}
        taken.check(sizes, values=self.values, columns=self.columns)

    def data(self, scale: float) -> _Data:
        values = self.values.view(torch.uint8) if self.values.dtype == torch.bool else self.values
        stride_head = values.stride(0) if values.dim() == 3 else 0
        return _Data(values, self.columns, values.shape[-1], stride_head, values.stride(-2))

    def runs_on_hopper(self, variants: Sequence[Variant], bits: int) -> bool:
        # Values are copied 16 bytes at a time. Beside ALiBi's, sums of very low ones would not be precise.
        size = self.values.element_size()
        starts = self.values.data_ptr(), *(size * stride for stride in self.values.stride()[:-1])
        aligned = self.columns is None and not any(start % 16 for start in starts)
        beside_alibi = any(one.flags.has_offset for one in variants)
        return super().runs_on_hopper(variants, bits) and aligned and not beside_alibi

    def for_hopper(self, scale: float) -> dict[str, Any]:
        data = self.data(scale)
        return {
            "added": data.added,
            "width": data.width,
            "stride_added_head": data.stride_head,
            "stride_added_token": data.stride_token,
            "coarse_scale": 2.0 ** math.ceil(math.log2(scale * LOG2_E)),
        }

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
