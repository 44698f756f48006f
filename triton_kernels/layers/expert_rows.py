"""Copies the tokens' rows into the order of their experts, and adds up what the experts return.

    x ─► rows_by_expert ─► a row for each expert of each token, by expert ─► products ─► weighted_sum ─► [T, C]

Products that find their rows by themselves (`expert_products.py`) need no copies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .expert_order import ExpertOrder, ExpertRows

_COLUMNS = tl.constexpr(1024)  # of a row, for a program


@triton.jit
def _rows_kernel(
    x,  # [T, C]
    places,  # int32 [T, K]
    out,  # [R, C], written
    stride_x,
    C: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    tuning.wait_early(EARLY)
    row = tl.load(x + token * stride_x + columns, mask=columns < C, other=0.0)
    for slot in tl.static_range(K):
        place = tl.load(places + token * K + slot).to(tl.int64)
        tl.store(out + place * C + columns, row, mask=columns < C)


def rows_by_expert(x: Tensor, order: ExpertOrder) -> Tensor:
    """Returns the rows of x, `[T, C]`, in the order of their experts: `[R, C]`.

    x is of any floating type, the last dim contiguous. Nothing synchronises, so a CUDA graph can capture it.
    A model on a CPU calls the reference.

    Raises:
        ValueError: the last stride of x is not 1, or the order has not one row for each of x.
    """
    num_tokens, top_k = order.places.shape
    if x.dim() != 2 or x.stride(-1) != 1 or len(x) != num_tokens:
        raise ValueError(
            f"x of {tuple(x.shape)}, stride {x.stride(-1)}, for the order of {num_tokens} tokens; give a "
            "contiguous row for each token"
        )
    out = x.new_empty((num_tokens * top_k, x.shape[1]))
    if len(out):
        _rows_kernel[(num_tokens, triton.cdiv(x.shape[1], _COLUMNS.value))](
            x,
            order.places,
            out,
            x.stride(0),
            C=x.shape[1],
            K=top_k,
            num_warps=4,
            **tuning.early_options(x.device),
        )
    return out


def rows_by_expert_reference(x: Tensor, order: ExpertOrder) -> Tensor:
    """Computes `rows_by_expert` in plain torch."""
    return x[order.pairs // order.places.shape[1]]


@triton.jit
def _weighted_sum_kernel(
    y,  # [R, C]
    places,  # int32 [T, K], the row of y of each pair; None if it is the pair's own number
    ids,  # [T, K], contiguous
    weights,  # [T, K], contiguous
    bias,  # [E, C], contiguous, or None
    out,  # [T, C], written
    C: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _COLUMNS + tl.arange(0, _COLUMNS)
    within = columns < C
    DTYPE: tl.constexpr = y.dtype.element_ty
    total = tl.zeros([_COLUMNS], tl.float32)
    tuning.wait_early(EARLY)
    for slot in tl.static_range(K):
        pair = token * K + slot
        row = pair
        if places is not None:
            row = tl.load(places + pair).to(tl.int64)
        values = tl.load(y + row * C + columns, mask=within, other=0.0).to(tl.float32)
        expert = tl.load(ids + pair)
        if bias is not None:
            at = tl.minimum(expert, E - 1) * C + columns
            added = tl.load(bias + at, mask=within, other=0.0).to(tl.float32)
            values = (values + added).to(DTYPE).to(tl.float32)
        values *= tl.load(weights + pair).to(tl.float32)
        if weights.dtype.element_ty == DTYPE:
            values = values.to(DTYPE).to(tl.float32)
        total += tl.where(expert < E, values, 0.0)
    tl.store(out + token * C + columns, total.to(DTYPE), mask=within)


def weighted_sum(y: Tensor, rows: ExpertRows, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the sum over each token's experts of their weight times their row of y, `[T, C]`.

    The product is rounded to the dtype of y, unless the weights are float32, and added up in float32. Pairs of
    no expert of ours add nothing.

    Args:
        y: contiguous, what the experts return: `[R, C]` in the order of `rows`, or `[T, k, C]` in that of the
            tokens.
        weights: `[T, k]` of the dtype of y, or float32.
        bias: `[E, C]`, of each expert, added to its rows first; None for none.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    num_tokens, top_k = rows.ids.shape
    fits = y.shape[:-1] in ((num_tokens * top_k,), rows.ids.shape) and weights.shape == rows.ids.shape
    if not fits or weights.dtype not in (y.dtype, torch.float32):
        raise ValueError(
            f"y {y.dtype} {tuple(y.shape)} and weights {weights.dtype} {tuple(weights.shape)} for "
            f"{num_tokens} tokens with {top_k} experts each; give float32 weights, or those of the dtype of y"
        )
    dim = y.shape[-1]
    out = y.new_empty((num_tokens, dim))
    if num_tokens:
        _weighted_sum_kernel[(num_tokens, triton.cdiv(dim, _COLUMNS.value))](
            y.contiguous(),
            _places(y, rows),
            rows.ids,
            weights.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            C=dim,
            K=top_k,
            E=rows.num_experts,
            num_warps=4,
            **tuning.early_options(y.device),
        )
    return out


def _places(y: Tensor, rows: ExpertRows) -> Tensor | None:
    """Returns the row of y of each pair; None where y is in the order of the tokens."""
    return None if y.dim() == 3 or rows.order is None else rows.order.places


def weighted_sum_reference(y: Tensor, rows: ExpertRows, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `weighted_sum` in plain torch."""
    places = _places(y, rows)
    values = y.reshape(*rows.ids.shape, -1) if places is None else y[places]
    values = values if bias is None else values + bias[rows.ids.clamp(max=rows.num_experts - 1)]
    values = (values * weights[..., None]).masked_fill((rows.ids >= rows.num_experts)[..., None], 0.0)
    return values.sum(1).to(y.dtype)
