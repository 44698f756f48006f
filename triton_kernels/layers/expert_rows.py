"""Brings the tokens' rows into the order of their experts, and adds up what the experts return.

    x ─► expert_rows ─► a row for each expert of each token, by expert ─► products ─► weighted_sum ─► [T, C]

One kernel each. The products in between, over all rows of an expert at once, are PyTorch's `grouped_mm`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .expert_choice import zeroed_indices

# Up to so many rows each program finds the places of its own rows by comparing their experts with all others'.
# That is quadratic, so beyond it PyTorch sorts the experts, and the kernel copies rows alone.
MAX_COMPARED = 8192
_PAIRS = tl.constexpr(512)  # experts that are compared in a turn
_COLUMNS = tl.constexpr(1024)  # of a row that are copied in a turn
_SUM_COLUMNS = tl.constexpr(512)  # of a program of `weighted_sum`
_EXPERTS = tl.constexpr(16)  # whose offsets one program counts


class ExpertRows(NamedTuple):
    """The rows of T tokens for k experts each: R = T · k rows, those of one expert after another.

    Rows of one expert are in the order of the tokens. A token's expert whose id is the number of experts or
    above is no expert of ours: its row comes behind all others, and belongs to none.
    """

    x: Tensor  # [R, C]
    experts: Tensor  # int32 [R], of each row; of a row that belongs to none, the last one
    places: Tensor  # int32 [T, k], the row of each token's expert; -1 where it is none of ours
    offsets: Tensor  # int32 [E], the end of each expert's rows


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x,  # [T, C]
    ids,  # [T, K], contiguous
    sorted_places,  # int32 [T, K], the row of each token's expert; None to count
    rows,  # an `ExpertRows`, written
    num_rows,
    stride_x,
    C: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    num_tokens = num_rows // K
    tuning.wait_early(EARLY)
    if token < num_tokens:
        slots = tl.arange(0, K_BLOCK)
        within = slots < K
        pairs = token * K + slots
        own = tl.minimum(tl.load(ids + pairs, mask=within, other=E), E).to(tl.int32)
        if sorted_places is not None:
            places = tl.load(sorted_places + pairs, mask=within, other=0)
        else:
            places = tl.zeros([K_BLOCK], tl.int32)
            for begin in range(0, num_rows, _PAIRS):
                others = begin + tl.arange(0, _PAIRS)
                other = tl.load(ids + others, mask=others < num_rows, other=E).to(tl.int32)
                other = tl.where(others < num_rows, tl.minimum(other, E), E + 1)
                is_before = (other[None, :] == own[:, None]) & (others[None, :] < pairs[:, None])
                is_before = is_before | (other[None, :] < own[:, None])
                places += tl.sum(is_before.to(tl.int32), 1)
        tl.store(rows.places + pairs, tl.where(own < E, places, -1), mask=within)
        tl.store(rows.experts + places, tl.minimum(own, E - 1), mask=within)
        starts = rows.x + places.to(tl.int64) * C
        for begin in range(0, C, _COLUMNS):
            columns = begin + tl.arange(0, _COLUMNS)
            row = tl.load(x + token.to(tl.int64) * stride_x + columns, mask=columns < C, other=0.0)
            copies = tl.broadcast_to(row[None, :], (K_BLOCK, _COLUMNS))
            tl.store(
                starts[:, None] + columns[None, :], copies, mask=within[:, None] & (columns < C)[None, :]
            )
    else:
        experts = (token - num_tokens) * _EXPERTS + tl.arange(0, _EXPERTS)
        ends = tl.zeros([_EXPERTS], tl.int32)
        for begin in range(0, num_rows, _PAIRS):
            others = begin + tl.arange(0, _PAIRS)
            other = tl.load(ids + others, mask=others < num_rows, other=E).to(tl.int32)
            ends += tl.sum((other[None, :] <= experts[:, None]).to(tl.int32), 1)
        tl.store(rows.offsets + experts, ends, mask=experts < E)


def expert_rows(x: Tensor, ids: Tensor, num_experts: int) -> ExpertRows:
    """Returns the rows of x, `[T, C]`, for the experts `ids`, int64 `[T, k]`, of each token.

    x is of any floating type, the last dim contiguous. Nothing synchronises, so a CUDA graph can capture it.
    A model on a CPU calls the reference.

    Raises:
        ValueError: the last stride of x is not 1, or `ids` has not one row for each of x.
    """
    if x.stride(-1) != 1 or x.dim() != 2 or ids.dim() != 2 or len(ids) != len(x):
        raise ValueError(
            f"x of {tuple(x.shape)}, stride {x.stride(-1)}, and ids of {tuple(ids.shape)}; give one row of ids "
            "for each contiguous row of x"
        )
    (num_tokens, dim), top_k, ids = x.shape, ids.shape[1], ids.contiguous()
    num_rows = num_tokens * top_k
    is_compared = num_rows <= MAX_COMPARED
    places, offsets = (None, None) if is_compared else _places_and_offsets(ids, num_experts)
    rows = ExpertRows(
        x.new_empty((num_rows, dim)),
        zeroed_indices(x, (num_rows,), torch.int32),
        zeroed_indices(x, (num_tokens, top_k), torch.int32),
        zeroed_indices(x, (num_experts,), torch.int32) if offsets is None else offsets,
    )
    if num_rows:
        _rows_kernel[(num_tokens + is_compared * triton.cdiv(num_experts, _EXPERTS.value),)](
            x,
            ids,
            places,
            rows,
            num_rows,
            x.stride(0),
            C=dim,
            E=num_experts,
            K=top_k,
            K_BLOCK=max(2, triton.next_power_of_2(top_k)),
            num_warps=4,
            **tuning.early_options(x.device),
        )
    return rows


def expert_rows_reference(x: Tensor, ids: Tensor, num_experts: int) -> ExpertRows:
    """Computes `expert_rows` in plain torch."""
    places, offsets = _places_and_offsets(ids, num_experts)
    order = (
        torch.empty_like(places)
        .flatten()
        .scatter_(
            0, places.flatten().long(), torch.arange(places.numel(), dtype=torch.int32, device=x.device)
        )
    )
    experts = ids.flatten()[order].clamp(max=num_experts - 1).int()
    places = torch.where(ids < num_experts, places, -1)
    return ExpertRows(x[order // ids.shape[1]], experts, places, offsets)


def _places_and_offsets(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns the place of each of `ids` in their order, int32 `[T, k]`, and the end of each expert's."""
    experts = torch.arange(num_experts, device=ids.device, dtype=torch.int16)
    short = ids.flatten().clamp(max=num_experts).to(torch.int16)  # the sort passes over each byte
    ordered, order = short.sort(stable=True)
    numbers = torch.arange(len(order), device=ids.device, dtype=torch.int32)
    places = torch.empty_like(numbers).scatter_(0, order, numbers)
    return places.view(ids.shape), torch.searchsorted(ordered, experts, right=True, out_int32=True)


@triton.jit
def _weighted_sum_kernel(
    y,  # [R, C]
    rows,  # an `ExpertRows`
    weights,  # [T, K], contiguous
    bias,  # [E, C], contiguous, or None
    out,  # [T, C], written
    C: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _SUM_COLUMNS + tl.arange(0, _SUM_COLUMNS)
    slots = tl.arange(0, K_BLOCK)
    within = slots < K
    DTYPE: tl.constexpr = y.dtype.element_ty
    tuning.wait_early(EARLY)
    places = tl.load(rows.places + token * K + slots, mask=within, other=-1)
    weight = tl.load(weights + token * K + slots, mask=within, other=0.0).to(tl.float32)
    is_ours = places >= 0
    places = tl.maximum(places, 0)
    mask = is_ours[:, None] & (columns < C)[None, :]
    at = places.to(tl.int64)[:, None] * C + columns[None, :]
    values = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        experts = tl.load(rows.experts + places, mask=is_ours, other=0).to(tl.int64)
        added = tl.load(bias + experts[:, None] * C + columns[None, :], mask=mask, other=0.0)
        values = (values + added.to(tl.float32)).to(DTYPE).to(tl.float32)
    values = values * weight[:, None]
    if weights.dtype.element_ty == DTYPE:
        values = values.to(DTYPE).to(tl.float32)
    tl.store(out + token * C + columns, tl.sum(values, 0).to(DTYPE), mask=columns < C)


def weighted_sum(y: Tensor, rows: ExpertRows, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the sum over each token's experts of their weight times their row of y, `[T, C]`.

    The product is rounded to the dtype of y, unless the weights are float32, and added up in float32.

    Args:
        y: `[R, C]`, contiguous, what the experts return for `rows`.
        weights: `[T, k]` of the dtype of y, or float32.
        bias: `[E, C]`, of each expert, added to its rows first; None for none.

    Raises:
        ValueError: a dtype or a shape does not fit.
    """
    num_tokens, top_k = rows.places.shape
    fits = len(y) == num_tokens * top_k and weights.shape == rows.places.shape
    if not fits or weights.dtype not in (y.dtype, torch.float32):
        raise ValueError(
            f"y {y.dtype} {tuple(y.shape)} and weights {weights.dtype} {tuple(weights.shape)} for "
            f"{num_tokens} tokens with {top_k} experts each; give float32 weights, or those of the dtype of y"
        )
    dim = y.shape[1]
    out = y.new_empty((num_tokens, dim))
    if num_tokens:
        _weighted_sum_kernel[(num_tokens, triton.cdiv(dim, _SUM_COLUMNS.value))](
            y.contiguous(),
            rows,
            weights.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            C=dim,
            K=top_k,
            K_BLOCK=max(2, triton.next_power_of_2(top_k)),
            num_warps=4,
            **tuning.early_options(y.device),
        )
    return out


def weighted_sum_reference(y: Tensor, rows: ExpertRows, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `weighted_sum` in plain torch."""
    places = rows.places.clamp(min=0)
    values = y[places] if bias is None else y[places] + bias[rows.experts[places]]
    values = (values * weights[..., None]).masked_fill((rows.places < 0)[..., None], 0.0)
    return values.sum(1).to(y.dtype)
