"""Adds a layer's output to the residual stream and normalises the sum, in one pass over each row.

    x ─► (post norm) ─► · scale ─► + residual ─► hidden ─► norm ─► normed

Each arrow rounds to the dtype of x, where the modules of a model would round.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

MAX_DIM = 32_768  # of a row, which one program holds in registers


class Norm(NamedTuple):
    """A norm over the last dim: x / sqrt(mean(x²) + eps) · weight + bias.

    `weight`, `bias`: `[C]`; None for factors of 1 and for no bias. `centred`: the mean is subtracted first
    (LayerNorm). `plus_one`: the factor is 1 + weight (Gemma). `rounded_before`: the normalised row is rounded
    to the dtype of x before it is multiplied with the weight (Llama); otherwise only the result is rounded.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool = False
    plus_one: bool = False
    rounded_before: bool = True


def _num_warps(dim: int) -> int:
    """Returns the warps of a program for rows of `dim`."""
    return 4 if dim <= 2048 else 8 if dim <= 8192 else 16


@triton.jit
def _normalise(
    x,  # [BLOCK] float32, 0 beyond C
    weight,
    bias,
    dims,
    in_row,
    eps,
    C: tl.constexpr,
    DTYPE: tl.constexpr,
    CENTRED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDED_BEFORE: tl.constexpr,
):
    if CENTRED:
        x = tl.where(in_row, x - tl.sum(x, 0) / C, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    if ROUNDED_BEFORE:
        y = y.to(DTYPE).to(tl.float32)
    if weight is not None:
        factor = tl.load(weight + dims, mask=in_row, other=0.0).to(tl.float32)
        if PLUS_ONE:
            factor += 1.0
        y = y * factor
    if bias is not None:
        y += tl.load(bias + dims, mask=in_row, other=0.0).to(tl.float32)
    return y.to(DTYPE)


@triton.jit
def _residual_norm_kernel(
    x,  # [T, C]
    residual,  # [T, C] or None
    hidden,  # [T, C], written; None if it is x itself
    normed,  # [T, C], written; None without a norm
    weight,
    bias,
    eps,
    post_weight,
    post_bias,
    post_eps,
    scale,
    stride_x,
    stride_residual,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    CENTRED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDED_BEFORE: tl.constexpr,
    HAS_POST: tl.constexpr,
    POST_CENTRED: tl.constexpr,
    POST_PLUS_ONE: tl.constexpr,
    POST_ROUNDED_BEFORE: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    in_row = dims < C
    DTYPE: tl.constexpr = x.dtype.element_ty
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * stride_x + dims, mask=in_row, other=0.0).to(tl.float32)
    if HAS_POST:
        value = _normalise(
            value, post_weight, post_bias, dims, in_row, post_eps, C, DTYPE, POST_CENTRED, POST_PLUS_ONE,
            POST_ROUNDED_BEFORE,
        ).to(tl.float32)  # fmt: skip
    if HAS_SCALE:
        value = (value * scale).to(DTYPE).to(tl.float32)
    if residual is not None:
        before = tl.load(residual + row * stride_residual + dims, mask=in_row, other=0.0).to(tl.float32)
        value = (before + value).to(DTYPE).to(tl.float32)
    if hidden is not None:
        tl.store(hidden + row * C + dims, value.to(DTYPE), mask=in_row)
    if normed is not None:
        y = _normalise(
            value, weight, bias, dims, in_row, eps, C, DTYPE, CENTRED, PLUS_ONE, ROUNDED_BEFORE
        )  # fmt: skip
        tl.store(normed + row * C + dims, y, mask=in_row)


def residual_norm(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    *,
    post: Norm | None = None,
    scale: float = 1.0,
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
    if x.stride(-1) != 1 or (residual is not None and residual.stride(-1) != 1):
        raise ValueError("the last stride of x and residual must be 1; make them contiguous")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"x and residual must be alike; got {x.dtype} {tuple(x.shape)} and {residual.dtype} "
            f"{tuple(residual.shape)}"
        )
    dim = x.shape[-1]
    if dim > MAX_DIM:
        raise ValueError(f"rows of {dim} dims; at most {MAX_DIM} fit in a program")
    rows = x.reshape(-1, dim)
    others = None if residual is None else residual.reshape(-1, dim)
    changes = others is not None or post is not None or scale != 1.0
    hidden = torch.empty_like(x, memory_format=torch.contiguous_format) if changes else x
    normed = torch.empty_like(x, memory_format=torch.contiguous_format) if norm is not None else hidden
    if rows.shape[0] and (changes or norm is not None):
        of_sum, of_x = norm or Norm(None, None, 0.0), post or Norm(None, None, 0.0)
        early = x.is_cuda and tuning.has_early_launch(tuning.device_class(x.device))
        options = {"launch_pdl": True} if early else {}
        _residual_norm_kernel[(rows.shape[0],)](
            rows,
            others,
            hidden if changes else None,
            normed if norm is not None else None,
            of_sum.weight,
            of_sum.bias,
            of_sum.eps,
            of_x.weight,
            of_x.bias,
            of_x.eps,
            scale,
            rows.stride(0),
            0 if others is None else others.stride(0),
            C=dim,
            BLOCK=triton.next_power_of_2(dim),
            HAS_SCALE=scale != 1.0,
            CENTRED=of_sum.centred,
            PLUS_ONE=of_sum.plus_one,
            ROUNDED_BEFORE=of_sum.rounded_before,
            HAS_POST=post is not None,
            POST_CENTRED=of_x.centred,
            POST_PLUS_ONE=of_x.plus_one,
            POST_ROUNDED_BEFORE=of_x.rounded_before,
            EARLY=early,
            num_warps=_num_warps(dim),
            enable_fp_fusion=False,  # a product is rounded before it is added, as in torch
            **options,
        )
    return hidden, normed


def residual_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    *,
    post: Norm | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Computes `residual_norm` in plain torch."""
    hidden = x if post is None else _norm_reference(x, post)
    if scale != 1.0:
        hidden = hidden * scale
    if residual is not None:
        hidden = residual + hidden
    return hidden, hidden if norm is None else _norm_reference(hidden, norm)


def _norm_reference(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounded_before:
        wide = wide.to(x.dtype).float()
    if norm.weight is not None:
        wide = wide * (norm.weight.float() + 1.0 if norm.plus_one else norm.weight.float())
    if norm.bias is not None:
        wide = wide + norm.bias.float()
    return wide.to(x.dtype)
