"""Linear layers over a few tokens with weights in fp8, which are read as they are held.

    weight[n, k]  =  number[n, k] · scale[n // block[0], k // block[1]]

The kernels are those of `linear.py`. They read a block of numbers, and multiply what it adds to the product by
its scale. Several tokens in fp8, which `fp8_rows` rounds, are multiplied with the numbers as they are: to turn
these into 16 bits takes longer than to read them. `dequantised` writes the whole weight, for more tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .gated_activation import activate
from .linear import store_total

MAX_TOKENS = 64  # of `quantised_linear`
_LARGEST_FP8 = tl.constexpr(448.0)
_SHARED_FOR_SUMS = 8 * 1024  # bytes of shared memory that are left to a program beside its pipeline


class QuantisedTensors(NamedTuple):
    """A quantised weight `[N, K]`.

    `data`: float8_e4m3fn `[N, K]`, or uint8 `[N, K / 2]` for numbers of 4 bits. `scales`: float32,
    `[N / block[0], K / block[1]]`, rounded up; `[N, 1]` where block is (1, 0): a row has one scale. `zeros`:
    what is subtracted from numbers of 4 bits, uint8, of the shape of `scales`; None: 8.
    """

    data: Tensor
    scales: Tensor
    zeros: Tensor | None
    block: tuple[int, int]

    @property
    def num_columns(self) -> int:
        """K."""
        return self.data.shape[1] * (2 if self.data.dtype == torch.uint8 else 1)


@triton.jit
def _vector_kernel(
    x,  # [K]
    data,  # float8_e4m3fn [N, K]
    scales,
    bias,  # [N] or None
    out,  # [N]
    N,
    stride_n,
    stride_scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,  # the block of a scale
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    CHUNK: tl.constexpr = 16  # numbers that a thread loads at once; it adds up their products by itself
    CHUNKS: tl.constexpr = BLOCK_K // CHUNK
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    chunks = tl.arange(0, CHUNKS) * CHUNK
    in_rows = rows < N
    source = data + rows.to(tl.int64)[:, None] * stride_n + columns[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    totals = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        inside = columns < K - k
        w = tl.load(
            source + k, mask=in_rows[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        if GROUP:
            row_scales = (rows // ROWS)[:, None] * stride_scale + (chunks // GROUP)[None, :]
            within = in_rows[:, None] & (chunks < K - k)[None, :]
            scale = tl.load(scales + k // GROUP + row_scales, mask=within, other=0.0)
        if EARLY and k == 0:  # the first weights are read before x is there
            tl.extra.cuda.gdc_wait()
        vector = tl.load(x + k + columns, mask=inside, other=0.0).to(tl.float32)
        sums = tl.sum(tl.reshape(w.to(tl.float32) * vector[None, :], (BLOCK_N, CHUNKS, CHUNK)), 2)
        totals += sums * scale if GROUP else sums
    total = tl.sum(totals, 1)
    if GROUP == 0:
        total *= tl.load(scales + rows // ROWS * stride_scale, mask=in_rows, other=0.0)
    if bias is not None:
        total += tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=in_rows)


@triton.jit(do_not_specialize=["num_tokens", "K"])
def _few_tokens_kernel(
    x,  # [T, K], in 16 bits, or in fp8 as the numbers are
    x_scales,  # [T, K / GROUP] or [T, 1] of x in fp8, whose columns are contiguous; else None
    data,  # float8_e4m3fn [N, K]
    scales,
    bias,  # [N] or None
    out,  # [T, N]
    parts,  # as in `linear.py`
    tickets,
    num_tokens,
    stride_x,
    stride_group,  # of x_scales
    stride_n,
    stride_scale,
    stride_out,
    K,
    ROWS: tl.constexpr,  # the block of a scale
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,  # blocks of K in a turn: their products do not wait for each other
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    STEP: tl.constexpr = BLOCK_K * UNROLL
    dtype: tl.constexpr = x.dtype.element_ty
    block = tl.program_id(0)
    split = tl.program_id(1)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_T)
    in_tokens = tokens < num_tokens
    columns = tl.arange(0, BLOCK_K)
    source = data + rows.to(tl.int64)[:, None] * stride_n + columns[None, :]
    vectors = x + tokens.to(tl.int64)[None, :] * stride_x + columns[:, None]
    # Rows of a program that have the same scales read them once.
    of_rows = block * BLOCK_N // ROWS * stride_scale
    if ROWS % BLOCK_N:
        of_rows = (rows // ROWS * stride_scale)[:, None]
    chunk = tl.cdiv(K, SPLITS * STEP) * STEP
    first = split * chunk
    tuning.wait_early(EARLY)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for begin in tl.range(first, tl.minimum(first + chunk, K), STEP, num_stages=STAGES):
        for turn in tl.static_range(UNROLL):
            k = begin + turn * BLOCK_K
            w = tl.load(source + k, eviction_policy="evict_first")
            vector = tl.load(vectors + k, mask=in_tokens[None, :], other=0.0)
            if GROUP:
                group = k // GROUP
                scale = tl.load(scales + of_rows + group)
                part = tl.dot(w.to(dtype), vector)
                if x_scales is not None:
                    of_x = x_scales + group * stride_group + tokens
                    scale = scale * tl.load(of_x, mask=in_tokens, other=0.0)[None, :]
                total += part * scale
            elif x_scales is not None:
                total += tl.dot(w, vector)  # of fp8, the units sum few products precisely
            else:
                total = tl.dot(w.to(dtype), vector, total)
    if GROUP == 0:
        total *= tl.load(scales + rows // ROWS * stride_scale)[:, None]
        if x_scales is not None:
            total *= tl.load(x_scales + tokens, mask=in_tokens, other=0.0)[None, :]
    store_total(total, out, bias, parts, tickets, block, split, rows, tokens, in_tokens, stride_out, SPLITS)


@triton.jit
def _dequantised_kernel(
    data,  # [N, K]
    scales,
    out,  # [N, K], contiguous
    N,
    K,
    stride_scale,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * BLOCK_K
    columns = begin + tl.arange(0, BLOCK_K)
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    places = rows.to(tl.int64)[:, None] * K + columns[None, :]
    w = tl.load(data + places, mask=inside)
    at = rows // ROWS * stride_scale + (begin // GROUP if GROUP else 0)
    scale = tl.load(scales + at, mask=rows < N)[:, None]
    tl.store(out + places, (w.to(tl.float32) * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_rows_kernel(
    x,  # [T, K]; of a gated activation [T, 2K], the gate first
    rows,  # float8_e4m3fn [T', K], contiguous
    scales,  # [T', K // GROUP]
    num_tokens,
    stride_x,
    stride_token,
    stride_group,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.arange(0, BLOCK)
    places = groups[:, None] * GROUP + columns[None, :]
    inside = (columns < GROUP)[None, :] & (groups < K // GROUP)[:, None]
    tuning.wait_early(EARLY)
    source = x + token.to(tl.int64) * stride_x + places
    inputs = tl.load(source, mask=inside & (token < num_tokens), other=0.0)
    if ACTIVATION is not None:  # rounded as `gated_activation` does
        up = tl.load(source + K, mask=inside & (token < num_tokens), other=0.0)
        inputs = activate(inputs.to(tl.float32), ACTIVATION).to(up.dtype) * up
    values = inputs.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-9) / _LARGEST_FP8
    rounded = (values / scale[:, None]).to(rows.dtype.element_ty)
    tl.store(rows + token.to(tl.int64) * K + places, rounded, mask=inside)
    tl.store(scales + token * stride_token + groups * stride_group, scale, mask=groups < K // GROUP)


class QuantisedLaunch(NamedTuple):
    """Tiles (rows of the weight, columns), launch options, how many programs share the rows of a tile, and how
    many blocks of columns are multiplied in a turn."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int
    unroll: int


def quantised_launch(
    device: tuning.DeviceClass, num_tokens: int, tensors: QuantisedTensors, element_size: int
) -> QuantisedLaunch | None:
    """Returns the launch of `quantised_linear`; None where its kernels cannot run. `element_size`: of the
    tokens, 1 in fp8."""
    interpreted, (num_rows, num_columns) = device is tuning.INTERPRETER, tensors.data.shape
    group = tensors.block[1]
    if not interpreted and (device.major < 9 or element_size > 2):
        return None
    if (group and num_columns % group) or num_tokens > MAX_TOKENS:
        return None
    if num_tokens == 1:
        block_k = max(min(4096 if num_columns > 8192 else 2048, triton.next_power_of_2(num_columns)), group)
        return QuantisedLaunch(4, block_k, 4, 1, 1, 1)
    block_n, block_k = (16, group or 16) if interpreted else (64, min(group or 128, 128))
    if num_rows % block_n or num_columns % block_k or (group and group % block_k):
        return None
    in_turns = element_size == 1 and group > 0 and num_columns % (2 * block_k) == 0
    if in_turns and num_tokens > 16 and num_rows % 128 == 0 and num_rows > 128 * device.num_multiprocessors:
        # Where every program computes several tiles, larger tiles read the tokens fewer times.
        return QuantisedLaunch(128, block_k, 4, 4, 1, 1)
    blocks, most = num_rows // block_n, device.num_multiprocessors * (2 if in_turns else 1)
    splits = 1
    while 2 * blocks * splits <= most and num_columns > 8 * block_k * splits:
        splits *= 2
    # As many tiles are on their way as fit beside those of the other programs of a multiprocessor.
    tile = block_k * (block_n + max(16, num_tokens) * element_size)
    programs = 1 if blocks * splits <= device.num_multiprocessors else 2
    stages = (device.shared_memory // programs - _SHARED_FOR_SUMS) // tile
    unroll = 2 if in_turns else 1
    return QuantisedLaunch(block_n, block_k, 4, max(2, min(8, stages) // unroll), splits, unroll)


def quantised_linear(
    x: Tensor,
    tensors: QuantisedTensors,
    bias: Tensor | None,
    tickets: Tensor,
    out: Tensor | None = None,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Returns x · weight^T + bias for 1 to `MAX_TOKENS` tokens; None for more, and where no kernel can run.

    Args:
        x: `[..., K]`.
        tensors: the weight `[N, K]`.
        bias: `[N]`, or None.
        tickets: of `tickets_for`; may serve any number of products with as many rows, one after the other.
        out: `[..., N]`, contiguous, written and returned; None for new memory.
        rounded: what `fp8_rows` returns of x, for the groups of a weight in fp8 (or for rows, where each row of
            the weight has one scale): these are multiplied in the place of several tokens x.

    Sums are float32, rounded once at the end. Nothing synchronises, so a CUDA graph can capture it.
    """
    data, scales, _, (rows_of_scale, group) = tensors
    num_rows, dim = len(data), tensors.num_columns
    num_tokens = x.numel() // dim
    is_compiled = isinstance(_vector_kernel, triton.JITFunction)
    if not num_tokens or (is_compiled and not x.is_cuda) or x.stride(-1) != 1:
        return None
    tokens, token_scales = (x.reshape(num_tokens, dim), None) if rounded is None else rounded
    launch = quantised_launch(tuning.device_class(x.device), num_tokens, tensors, tokens.element_size())
    if launch is None:
        return None
    if out is None:
        out = x.new_empty((*x.shape[:-1], num_rows))
    options = {"num_warps": launch.num_warps, **tuning.early_options(x.device)}
    if num_tokens == 1:
        _vector_kernel[(triton.cdiv(num_rows, launch.block_n),)](
            tokens,
            data,
            scales,
            bias,
            out,
            num_rows,
            data.stride(0),
            scales.stride(0),
            K=dim,
            ROWS=rows_of_scale,
            GROUP=group,
            BLOCK_N=launch.block_n,
            BLOCK_K=launch.block_k,
            **options,
        )
        return out
    block_t, blocks = max(16, triton.next_power_of_2(num_tokens)), num_rows // launch.block_n
    size = blocks * launch.splits * launch.block_n * block_t
    parts = torch.empty(size, dtype=torch.float32, device=x.device) if launch.splits > 1 else None
    _few_tokens_kernel[(blocks, launch.splits)](
        tokens,
        token_scales,
        data,
        scales,
        bias,
        out,
        parts,
        tickets if launch.splits > 1 else None,
        num_tokens,
        tokens.stride(0),
        0 if token_scales is None else token_scales.stride(1),
        data.stride(0),
        scales.stride(0),
        num_rows,
        dim,
        ROWS=rows_of_scale,
        GROUP=group,
        BLOCK_T=block_t,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        UNROLL=launch.unroll,
        SPLITS=launch.splits,
        STAGES=launch.num_stages,
        **options,
    )
    return out


def dequantised(tensors: QuantisedTensors, dtype: torch.dtype) -> Tensor:
    """Returns the weight as `[N, K]` of `dtype`, on a GPU."""
    data, scales, _, (rows, group) = tensors
    num_columns, block_k = tensors.num_columns, group or 128
    out = torch.empty((len(data), num_columns), dtype=dtype, device=data.device)
    _dequantised_kernel[(triton.cdiv(len(data), 32), triton.cdiv(num_columns, block_k))](
        data,
        scales,
        out,
        len(data),
        num_columns,
        scales.stride(0),
        ROWS=rows,
        GROUP=group,
        BLOCK_N=32,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out


def fp8_rows(x: Tensor, group: int, activation: str | None = None) -> tuple[Tensor, Tensor]:
    """Returns the tokens x `[T, K]` in float8_e4m3fn with a scale for each `group` inputs, as `_scaled_mm`
    takes them: `[T', K]`, and float32 `[T', K / group]`, of which a column is contiguous. T' is T rounded up
    to a multiple of 16; rows beyond T are zeros. With an `activation`, x is `[T, 2K]`, and the tokens are what
    `gated_activation` returns of it."""
    num_tokens, dim, padded = len(x), x.shape[1] // (1 if activation is None else 2), -(-len(x) // 16) * 16
    rows = torch.empty((padded, dim), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((dim // group, padded), dtype=torch.float32, device=x.device).t()
    block = triton.next_power_of_2(group)
    groups = max(1, 1024 // block)
    _fp8_rows_kernel[(padded, triton.cdiv(dim // group, groups))](
        x,
        rows,
        scales,
        num_tokens,
        x.stride(0),
        scales.stride(0),
        scales.stride(1),
        K=dim,
        GROUP=group,
        GROUPS=groups,
        BLOCK=block,
        ACTIVATION=activation,
        num_warps=4,
        **tuning.early_options(x.device),
    )
    return rows, scales
