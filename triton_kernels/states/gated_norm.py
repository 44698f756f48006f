"""Normalises heads, and multiplies them with the activation of their gates if there are any, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.records import heads_record
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.layers.gated_activation import activate
from lightkv.triton_kernels.norms import Norm, norm_reference

_BLOCK = 2048  # numbers of a program
_TAKEN = Tensors(
    x="floats [T, H, D] with a last stride of 1",
    gate="floats [T, H, D] with a last stride of 1",
    weight="contiguous floats [D]",
)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x,  # `Heads`
    gate,  # `Heads`, or None
    weight,  # [D]
    out,  # [T, H, D], written
    num_rows,  # T * H
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    within = (row < num_rows)[:, None] & (dims < D)[None, :]
    DTYPE: tl.constexpr = out.dtype.element_ty
    tuning.wait_early(EARLY)
    token, head = (row // H)[:, None], (row % H)[:, None]
    heads = x.data + token * x.stride_token + head * x.stride_head
    value = tl.load(heads + dims[None, :], mask=within, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    factor = tl.load(weight + dims, mask=dims < D, other=0.0).to(tl.float32)
    value = (value.to(DTYPE).to(tl.float32) * factor[None, :]).to(DTYPE).to(tl.float32)
    if gate is not None:
        gates = gate.data + token * gate.stride_token + head * gate.stride_head
        value *= activate(tl.load(gates + dims[None, :], mask=within, other=0.0).to(tl.float32), "silu")
    tl.store(out + row[:, None] * D + dims[None, :], value.to(DTYPE), mask=within)


def gated_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) · weight · silu(gate), `[T, H, D]`, with means over the last dim.

    The normalised head and its product with the weight are rounded to the dtype of x, and silu(gate) is not, as
    in the modules of a model.

    Args:
        x: `[T, H, D]` of any floating type. Only the last dim need be contiguous.
        gate: the same, or None for no gate.
        weight: `[D]` in the dtype of x.

    Nothing synchronises, so a CUDA graph can capture it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor is none of these.
    """
    num_heads, dim = _TAKEN.check({}, x=x, gate=gate, weight=weight)["H"], x.shape[2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows, block_d = len(x) * num_heads, triton.next_power_of_2(dim)
    block_r = max(1, _BLOCK // block_d)
    constants = {"H": num_heads, "D": dim, "BLOCK_R": block_r, "BLOCK_D": block_d}
    # Without fusion a product is rounded before it is added, as in torch.
    options = {"num_warps": 4, "enable_fp_fusion": False, **tuning.early_options(x.device)}
    if num_rows:
        grid = (triton.cdiv(num_rows, block_r),)
        heads = heads_record(x), None if gate is None else heads_record(gate)
        _gated_norm_kernel[grid](*heads, weight, out, num_rows, eps, **constants, **options)
    return out


def gated_norm_reference(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Computes `gated_norm` in plain torch."""
    normed = norm_reference(x, Norm(weight, None, eps), x.dtype)
    return normed if gate is None else (normed * functional.silu(gate.float())).to(x.dtype)
