"""Adds a layer's output to the residual stream and normalises the sum, in one pass over each row.

    x ─► (post norm) ─► · scale ─► + residual ─► hidden ─► norm ─► normed

Each arrow rounds to the dtype of x, where the modules of a model would round.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.norms import Norm, norm_reference

MAX_DIM = 32_768  # of a row, which one program holds in registers


class _Bound(NamedTuple):
    """A `Norm` as the kernel takes it, with its flags as constants."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    CENTRED: Any
    PLUS_ONE: Any
    ROUNDED_BEFORE: Any


@triton.jit
def _normalise(
    x,  # [BLOCK] float32, 0 beyond C
    norm,  # a `_Bound`
    dims,
    in_row,
    C: tl.constexpr,
    DTYPE: tl.constexpr,
):
    if norm.CENTRED:
        x = tl.where(in_row, x - tl.sum(x, 0) / C, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / C + norm.eps)
    if norm.ROUNDED_BEFORE:
        y = y.to(DTYPE).to(tl.float32)
    if norm.weight is not None:
        factor = tl.load(norm.weight + dims, mask=in_row, other=0.0).to(tl.float32)
        if norm.PLUS_ONE:
            factor += 1.0
        y = y * factor
    if norm.bias is not None:
        y += tl.load(norm.bias + dims, mask=in_row, other=0.0).to(tl.float32)
    return y.to(DTYPE)


@triton.jit
def _residual_norm_kernel(
    x,  # [T, C]
    residual,  # [T, C] or None
    hidden,  # [T, C], written; None if it is x itself
    normed,  # [T, C], written; None without a norm
    norm,  # a `_Bound`, or None
    post,  # likewise
    scale,  # None for 1
    stride_x,
    stride_residual,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_POST: tl.constexpr,  # Triton 3.6 compares no tuple that holds None with None
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    in_row = dims < C
    DTYPE: tl.constexpr = x.dtype.element_ty
    tuning.wait_early(EARLY)
    value = tl.load(x + row * stride_x + dims, mask=in_row, other=0.0).to(tl.float32)
    if HAS_POST:
        value = _normalise(value, post, dims, in_row, C, DTYPE).to(tl.float32)
    if scale is not None:
        value = (value * scale).to(DTYPE).to(tl.float32)
    if residual is not None:
        before = tl.load(residual + row * stride_residual + dims, mask=in_row, other=0.0).to(tl.float32)
        value = (before + value).to(DTYPE).to(tl.float32)
    if hidden is not None:
        tl.store(hidden + row * C + dims, value.to(DTYPE), mask=in_row)
    if normed is not None:
        y = _normalise(value, norm, dims, in_row, C, DTYPE)
        tl.store(normed + row * C + dims, y, mask=in_row)


_FLAGS = (tl.constexpr(False), tl.constexpr(True))


def _bound(norm: Norm | None) -> _Bound | None:
    if norm is None:
        return None
    weight, bias, eps, centred, plus_one, rounded_before = norm
    return _Bound(weight, bias, eps, _FLAGS[centred], _FLAGS[plus_one], _FLAGS[rounded_before])


def residual_norm(
    x: Tensor, residual: Tensor | None, norm: Norm | None, *, post: Norm | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns hidden = residual + scale · post(x) and norm(hidden), both of the shape and dtype of x.

    Args:
        x: `[..., C]` of any floating type, the last dim contiguous.
        residual: likewise, of the same shape and dtype; None to add nothing.
        norm: the norm of the sum; None to return the sum twice.
        post: a norm of x before it is added; None for none.
        scale: a factor of x before it is added.

    Nothing synchronises, so a CUDA graph can capture it. A model on a CPU calls the reference.

    Raises:
        ValueError: shapes or dtypes differ, a last stride is not 1, or C is above 32,768.
    """
    _require_alike(x, residual)
    dim = x.shape[-1]
    launch = launch_of(dim, post)
    rows = x.reshape(-1, dim)
    others = None if residual is None else residual.reshape(-1, dim)
    changes = others is not None or post is not None or scale != 1.0
    hidden = torch.empty_like(x, memory_format=torch.contiguous_format) if changes else x
    normed = torch.empty_like(x, memory_format=torch.contiguous_format) if norm is not None else hidden
    if rows.shape[0] and (changes or norm is not None):
        _residual_norm_kernel[(rows.shape[0],)](
            rows,
            others,
            hidden if changes else None,
            normed if norm is not None else None,
            _bound(norm),
            _bound(post),
            None if scale == 1.0 else scale,
            rows.stride(0),
            0 if others is None else others.stride(0),
            **launch,
            **tuning.early_options(x.device),
        )
    return hidden, normed


def _require_alike(x: Tensor, residual: Tensor | None) -> None:
    other = x if residual is None else residual
    if x.stride(-1) != 1 or other.stride(-1) != 1 or other.shape != x.shape or other.dtype != x.dtype:
        raise ValueError(
            f"x and residual must be alike, with a last stride of 1; got {x.dtype} {tuple(x.shape)} and "
            f"{other.dtype} {tuple(other.shape)} with strides {x.stride()} and {other.stride()}"
        )


def launch_of(dim: int, post: Norm | None) -> dict[str, Any]:
    """Returns the constants and options of a launch for rows of `dim`, and a norm before they are added. Raises
    ValueError where the rows are too long."""
    if dim > MAX_DIM:
        raise ValueError(f"rows of {dim} dims; at most {MAX_DIM} fit in a program")
    return {
        "C": dim,
        "BLOCK": triton.next_power_of_2(dim),
        "HAS_POST": post is not None,
        "num_warps": 4 if dim <= 2048 else 8 if dim <= 8192 else 16,
        "enable_fp_fusion": False,  # a product is rounded before it is added, as in torch
    }


def residual_norm_reference(
    x: Tensor, residual: Tensor | None, norm: Norm | None, *, post: Norm | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Computes `residual_norm` in plain torch."""
    _require_alike(x, residual)
    hidden = x if post is None else norm_reference(x, post, x.dtype)
    if scale != 1.0:
        hidden = hidden * scale
    if residual is not None:
        hidden = residual + hidden
    return hidden, hidden if norm is None else norm_reference(hidden, norm, x.dtype)
