"""Merges attention over several parts of the keys into attention over all of them.

A part's result is its normalised output and the log-sum-exp of its scores. The outputs, weighted by these, add
up to what one softmax over all keys computes. So different kernels may attend to the parts, with different
queries (StreamingLLM's sinks), or to parts that several batches share. Learned sinks (`AttentionOptions`)
belong to exactly one of the parts, whose log-sum-exp contains them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.operators import operator

from .records import heads_record

_TAKEN = Tensors(
    partial_out="float32 [P, T, H, Dv] with a last stride of 1",
    partial_lse="float32 [P, T, H]",
    out="[T, H, Dv] with a last stride of 1",
    lse="float32 [T, H]",
)


@triton.jit
def add_partials(acc, total, peak, tile, part_lse):
    """Adds normalised outputs, [BLOCK_P, BLOCK_DV], whose log-sum-exps are `part_lse`, to the weighted sum of
    those before; returns it, the sum of the weights and the largest log-sum-exp."""
    new_peak = tl.maximum(peak, tl.max(part_lse, 0))
    weights = tl.exp2(part_lse - new_peak)
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 0)
    acc = acc * decay + tl.sum(weights[:, None] * tile, 0)
    return acc, total, new_peak


class _Partials(NamedTuple):
    """Outputs `[P, T, H, Dv]`, or log-sum-exps `[P, T, H]`, of parts of the keys."""

    data: Any
    stride_part: Any
    stride_token: Any
    stride_head: Any


@triton.jit(do_not_specialize=["num_parts"])
def _merge_kernel(
    partial_out,  # `_Partials`
    partial_lse,
    out,  # `Heads`
    lse,
    num_parts,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_DV)
    out_head = partial_out.data + token * partial_out.stride_token + head * partial_out.stride_head
    lse_head = partial_lse.data + token * partial_lse.stride_token + head * partial_lse.stride_head

    # The peak starts at a finite number, not at -inf: while every part is empty, weights are 0, not NaN.
    peak = -1.0e30
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        parts = (start + tl.arange(0, BLOCK_P)).to(tl.int64)  # [BLOCK_P]
        part_lse = tl.load(
            lse_head + parts * partial_lse.stride_part, mask=parts < num_parts, other=float("-inf")
        )
        written = part_lse > float("-inf")  # the output of an empty part is not read
        tile = tl.load(
            out_head + parts[:, None] * partial_out.stride_part + dims[None, :],
            mask=written[:, None] & (dims < DV)[None, :],
            other=0.0,
        )  # [BLOCK_P, BLOCK_DV]
        acc, total, peak = add_partials(acc, total, peak, tile, part_lse)
    acc = acc / tl.where(total > 0.0, total, 1.0)
    pointers = out.data + token * out.stride_token + head * out.stride_head + dims
    tl.store(pointers, acc.to(out.data.dtype.element_ty), mask=dims < DV)
    tl.store(lse.data + token * lse.stride_token + head * lse.stride_head, peak + tl.log2(total))


def merge_launch(num_parts: int, value_dim: int) -> tuning.Launch:
    """Returns the launch of `merge_states`, with the parts that a program reads at a time in `block_n`: a tile
    that stays in registers."""
    block_parts = min(triton.next_power_of_2(num_parts), max(1, 4096 // tuning.padded_dim(value_dim)))
    return tuning.Launch(block_m=0, block_n=block_parts, num_warps=1 if num_parts <= 4 else 4, num_stages=2)


@operator("merge_states", writes=("out", "lse"))
def _merge_states(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    num_parts, num_tokens, num_heads, value_dim = partial_out.shape
    if num_tokens == 0:
        return
    launch = merge_launch(num_parts, value_dim)
    _merge_kernel[(num_heads, num_tokens)](
        _Partials(partial_out, *partial_out.stride()[:3]),
        _Partials(partial_lse, *partial_lse.stride()),
        heads_record(out),
        heads_record(lse),
        num_parts,
        DV=value_dim,
        BLOCK_DV=tuning.padded_dim(value_dim),
        BLOCK_P=launch.block_n,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def merge_states(
    partial_out: Tensor, partial_lse: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges the attention of the same queries to several parts of their keys.

    Args:
        partial_out: float32 `[P, T, H, Dv]`, each part's normalised output; any strides, except that the last
            one is 1. Not read where the part is empty.
        partial_lse: float32 `[P, T, H]`, the log-sum-exp of each part's scaled scores in base 2; -inf where the
            part is empty. Any strides.
        out: `[T, H, Dv]` of any floating type to write to; allocated in float32 if None.
        lse: float32 `[T, H]` to write to; allocated if None.

    Returns:
        `out` and `lse`, the output and log-sum-exp (base 2) over all parts, which can be merged further; zero
        and -inf where every part is empty.

    Raises:
        ValueError: shapes, strides or dtypes do not fit.
    """
    _TAKEN.check({}, partial_out=partial_out, partial_lse=partial_lse, out=out, lse=lse)
    if not len(partial_out):
        raise ValueError("partial_out has no parts; give at least one")
    if out is None:
        out = torch.empty(partial_out.shape[1:], dtype=torch.float32, device=partial_out.device)
    if lse is None:
        lse = torch.empty(partial_lse.shape[1:], dtype=torch.float32, device=partial_lse.device)
    _merge_states(partial_out, partial_lse, out, lse)
    return out, lse


def merge_states_reference(partial_out: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `merge_states` in plain torch, in the type of its arguments."""
    peak = partial_lse.amax(0).clamp(min=-1e30)  # finite, so that empty parts weigh 0 and not NaN
    weights = torch.exp2(partial_lse - peak)  # [P, T, H]
    total = weights.sum(0)
    weights = weights / total.clamp(min=torch.finfo(total.dtype).tiny)
    # The output of an empty part may be NaN.
    weighted = torch.where(weights[..., None] > 0, partial_out * weights[..., None], 0.0)
    return weighted.sum(0), peak + total.log2()
