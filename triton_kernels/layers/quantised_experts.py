"""Products of rows in the order of their experts with quantised weights, which are read as they are held.

A program multiplies a tile of one expert's rows with a block of its outputs. It finds the expert from the ends
of all experts' rows, so that nothing on the host depends on how many rows an expert has.
"""

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .quantised_linear import QuantisedTensors, quantised_launch, total_of_tile


@triton.jit(do_not_specialize=["K"])
def _experts_kernel(
    x,  # [R, K], by expert
    data,  # [E * N, K], or [E * N, K // 2] of two numbers a byte
    scales,
    zeros,  # None for 8
    out,  # [R, N]
    offsets,  # int32 [E], the end of each expert's rows
    stride_x,
    stride_n,
    stride_scale,
    N,
    K,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # the block of a scale
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile = tl.program_id(1)
    experts = tl.arange(0, E_BLOCK)
    tuning.wait_early(EARLY)
    ends = tl.load(offsets + experts, mask=experts < E, other=0)
    begins = tl.load(offsets + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = tl.where(experts < E, (ends - begins + BLOCK_T - 1) // BLOCK_T, 0)
    until = tl.cumsum(tiles, 0)
    expert = tl.sum((until <= tile).to(tl.int32), 0)
    is_own = experts == expert
    begin = tl.sum(tl.where(is_own, begins + (tile - until + tiles) * BLOCK_T, 0), 0)
    end = tl.sum(tl.where(is_own, ends, 0), 0)
    if begin < end:  # beyond the last tile there is no expert, and so no row
        outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        tokens = begin + tl.arange(0, BLOCK_T)
        total = total_of_tile(
            x,
            None,
            data,
            scales,
            zeros,
            expert * N + outputs,
            tokens,
            tokens < end,
            stride_x,
            0,
            stride_n,
            stride_scale,
            0,
            K,
            K,
            ROWS,
            GROUP,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
            STAGES,
        )
        tl.store(
            out + tokens.to(tl.int64)[None, :] * N + outputs[:, None],
            total.to(out.dtype.element_ty),
            mask=(tokens < end)[None, :],
        )


def quantised_experts(x: Tensor, tensors: QuantisedTensors, offsets: Tensor) -> Tensor | None:
    """Returns the products `[R, N]` of rows x `[R, K]`, by expert, with their experts' weights; None where no
    kernel can run.

    Args:
        x: contiguous.
        tensors: the weights of E experts of N outputs, `[E · N, K]`.
        offsets: int32 `[E]`, the end of each expert's rows. Rows behind the last one's are undefined.

    Nothing synchronises, so a CUDA graph can capture it.
    """
    (data, scales, zeros, (rows, group)), num_experts = tensors, len(offsets)
    num_outputs = len(data) // num_experts
    block_t = 16 if len(x) <= 16 * num_experts else 64
    launch = quantised_launch(tuning.device_class(x.device), block_t, tensors, x.element_size())
    if launch is None or num_outputs % launch.block_n or num_outputs % rows or not len(x):
        return None
    out = x.new_empty((len(x), num_outputs))
    tiles = min(len(x), len(x) // block_t + num_experts)
    _experts_kernel[(num_outputs // launch.block_n, tiles)](
        x,
        data,
        scales,
        zeros,
        out,
        offsets,
        x.stride(0),
        data.stride(0),
        scales.stride(0),
        num_outputs,
        tensors.num_columns,
        E=num_experts,
        E_BLOCK=triton.next_power_of_2(num_experts),
        ROWS=rows,
        GROUP=group,
        BLOCK_T=block_t,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        **tuning.early_options(x.device),
    )
    return out
