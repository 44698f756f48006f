"""Linear layers over a few tokens with weights in 8 or 4 bits, which are read as they are held.

    weight[n, k]  =  (number[n, k] - zero) · scale[n // block[0], k // block[1]]

The kernels are those of `linear.py`. They read a block of numbers, and multiply what it adds to the product by
its scale. Several tokens in fp8, which `fp8_rows` rounds, are multiplied with numbers in fp8 as they are: to
turn these into 16 bits takes longer than to read them. `dequantised` writes the whole weight, for more tokens.

Two numbers of 4 bits are in a byte: inputs i and i + g / 2 of a group of g inputs, the first one in the lower
half. So both halves of a tile of bytes are multiplied with inputs that follow each other.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

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
def _number(bits, dtype: tl.constexpr):
    """Returns integers from 0 to 15, uint8, as floating numbers."""
    if dtype == tl.bfloat16:  # its last bits are the integer where the number is 128 and the integer
        return (bits.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
    elif dtype == tl.float16:  # likewise, where it is 1,024 and the integer
        return (bits.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    elif dtype == tl.float32:  # 2 ** 23 and the integer
        return (bits.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


_TOO_MUCH = tl.constexpr(128.0)  # what `_halves` returns on a GPU beyond the numbers


@triton.jit
def _halves(w, ON_GPU: tl.constexpr):
    """Returns the lower and the higher four bits of bytes as float32, on a GPU 128 and the numbers: their bits
    are the last ones of the upper half of such a float32, into which one instruction brings a byte."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, top;
            and.b32 low, $8, 0x0F0F0F0F;
            shr.b32 high, $8, 4;
            and.b32 high, high, 0x0F0F0F0F;
            mov.b32 top, 0x43000000;
            prmt.b32 $0, low, top, 0x7044;
            prmt.b32 $1, low, top, 0x7144;
            prmt.b32 $2, low, top, 0x7244;
            prmt.b32 $3, low, top, 0x7344;
            prmt.b32 $4, high, top, 0x7044;
            prmt.b32 $5, high, top, 0x7144;
            prmt.b32 $6, high, top, 0x7244;
            prmt.b32 $7, high, top, 0x7344;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [w],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        return _number(w & 15, tl.float32), _number(w >> 4, tl.float32)


@triton.jit
def _vector_kernel(
    x,  # [K]
    data,  # [N, K], or [N, K // 2] of two numbers a byte
    scales,
    zeros,  # None for 8
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
    ON_GPU: tl.constexpr,
):
    PACKED: tl.constexpr = data.dtype.element_ty == tl.uint8
    PER: tl.constexpr = 2 if PACKED else 1
    UNIT: tl.constexpr = (GROUP if GROUP else BLOCK_K) // PER  # bytes that have a scale of their own
    CHUNK: tl.constexpr = 16  # bytes that a thread loads at once; it adds up their products by itself
    CHUNKS: tl.constexpr = BLOCK_K // PER // CHUNK
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K // PER)
    inputs = columns // UNIT * (UNIT * PER) + columns % UNIT  # the first one of a byte
    chunks = tl.arange(0, CHUNKS) * CHUNK
    in_rows = rows < N
    source = data + rows.to(tl.int64)[:, None] * stride_n + columns[None, :]
    row_scales = (rows // ROWS)[:, None] * stride_scale + (chunks // UNIT)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    totals = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        inside = columns < (K - k) // PER
        w = tl.load(
            source + k // PER,
            mask=in_rows[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        within = in_rows[:, None] & (chunks < (K - k) // PER)[None, :]
        if GROUP:
            scale = tl.load(scales + k // GROUP + row_scales, mask=within, other=0.0)
        if EARLY and k == 0:  # the first weights are read before x is there
            tl.extra.cuda.gdc_wait()
        vector = tl.load(x + k + inputs, mask=inside, other=0.0).to(tl.float32)
        if PACKED:
            other = tl.load(x + k + inputs + UNIT, mask=inside, other=0.0).to(tl.float32)
            low, high = _halves(w, ON_GPU)
            zero = 8.0
            if zeros is not None:
                zero = tl.load(zeros + k // GROUP + row_scales, mask=within, other=0).to(tl.float32)
            if ON_GPU:
                zero += _TOO_MUCH
            sums = tl.sum(tl.reshape(low * vector[None, :], (BLOCK_N, CHUNKS, CHUNK)), 2)
            sums += tl.sum(tl.reshape(high * other[None, :], (BLOCK_N, CHUNKS, CHUNK)), 2)
            sums -= zero * tl.sum(tl.reshape(vector + other, (CHUNKS, CHUNK)), 1)[None, :]
        else:
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
    data,  # [N, K], or [N, K // 2] of two numbers a byte
    scales,
    zeros,  # None for 8
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
    PACKED: tl.constexpr = data.dtype.element_ty == tl.uint8
    PER: tl.constexpr = 2 if PACKED else 1
    STEP: tl.constexpr = BLOCK_K * UNROLL
    dtype: tl.constexpr = x.dtype.element_ty
    block = tl.program_id(0)
    split = tl.program_id(1)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_T)
    in_tokens = tokens < num_tokens
    columns = tl.arange(0, BLOCK_K // PER)
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
            w = tl.load(source + k // PER, eviction_policy="evict_first")
            low = tl.load(vectors + k, mask=in_tokens[None, :], other=0.0)
            if GROUP:
                group = k // GROUP
                scale = tl.load(scales + of_rows + group)
                if PACKED:
                    high = tl.load(vectors + k + BLOCK_K // 2, mask=in_tokens[None, :], other=0.0)
                    zero = tl.full([BLOCK_N, 1], 8.0, dtype)
                    if zeros is not None:
                        zero = _number(tl.load(zeros + of_rows + group), dtype)
                    part = tl.dot((_number(w & 15, dtype) - zero).to(dtype), low)
                    part = tl.dot((_number(w >> 4, dtype) - zero).to(dtype), high, part)
                else:
                    part = tl.dot(w.to(dtype), low)
                if x_scales is not None:
                    of_x = x_scales + group * stride_group + tokens
                    scale = scale * tl.load(of_x, mask=in_tokens, other=0.0)[None, :]
                total += part * scale
            elif x_scales is not None:
                total += tl.dot(w, low)  # of fp8, the units sum few products precisely
            else:
                total = tl.dot(w.to(dtype), low, total)
    if GROUP == 0:
        total *= tl.load(scales + rows // ROWS * stride_scale)[:, None]
        if x_scales is not None:
            total *= tl.load(x_scales + tokens, mask=in_tokens, other=0.0)[None, :]
    store_total(total, out, bias, parts, tickets, block, split, rows, tokens, in_tokens, stride_out, SPLITS)


@triton.jit
def _dequantised_kernel(
    data,  # [N, K], or [N, K // 2] of two numbers a byte
    scales,
    zeros,
    out,  # [N, K], contiguous
    N,
    K,
    stride_scale,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    PACKED: tl.constexpr = data.dtype.element_ty == tl.uint8
    PER: tl.constexpr = 2 if PACKED else 1
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(1) * BLOCK_K
    columns = tl.arange(0, BLOCK_K // PER)
    inside = (rows < N)[:, None] & (begin + columns * PER < K)[None, :]
    w = tl.load(
        data + rows.to(tl.int64)[:, None] * (K // PER) + (begin // PER + columns)[None, :], mask=inside
    )
    at = rows // ROWS * stride_scale + (begin // GROUP if GROUP else 0)
    scale = tl.load(scales + at, mask=rows < N)[:, None]
    target = out + rows.to(tl.int64)[:, None] * K + begin + columns[None, :]
    if PACKED:
        zero = 8.0
        if zeros is not None:
            zero = tl.load(zeros + at, mask=rows < N).to(tl.float32)[:, None]
        low = (_number(w & 15, tl.float32) - zero) * scale
        high = (_number(w >> 4, tl.float32) - zero) * scale
        tl.store(target, low.to(out.dtype.element_ty), mask=inside)
        tl.store(target + BLOCK_K // 2, high.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(target, (w.to(tl.float32) * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_rows_kernel(
    x,  # [T, K]
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
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.arange(0, BLOCK)
    places = groups[:, None] * GROUP + columns[None, :]
    inside = (columns < GROUP)[None, :] & (groups < K // GROUP)[:, None]
    tuning.wait_early(EARLY)
    loaded = tl.load(
        x + token.to(tl.int64) * stride_x + places, mask=inside & (token < num_tokens), other=0.0
    )
    values = loaded.to(tl.float32)
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
    interpreted, is_packed = device is tuning.INTERPRETER, tensors.data.dtype == torch.uint8
    (num_rows, num_bytes), group, num_columns = tensors.data.shape, tensors.block[1], tensors.num_columns
    if not interpreted and (device.major < (8 if is_packed else 9) or element_size > 2):
        return None
    if (group and num_columns % group) or num_tokens > MAX_TOKENS or (is_packed and not group):
        return None
    if num_tokens == 1:
        if is_packed and not interpreted and num_columns < 256:  # a thread would load less than it splits
            return None
        block_k = max(min(2048, triton.next_power_of_2(num_columns)), group)
        return (
            QuantisedLaunch(8, block_k, 2, 1, 1, 1) if is_packed else QuantisedLaunch(4, block_k, 4, 1, 1, 1)
        )
    block_n, block_k = (16, group or 16) if interpreted else (64, min(group or 128, 128))
    if num_rows % block_n or num_columns % block_k or (group and group % block_k):
        return None
    in_turns = element_size == 1 and group > 0 and num_columns % (2 * block_k) == 0
    blocks, most = num_rows // block_n, device.num_multiprocessors * (2 if in_turns else 1)
    splits = 1
    while 2 * blocks * splits <= most and num_columns > 8 * block_k * splits:
        splits *= 2
    # As many tiles are on their way as fit beside those of the other programs of a multiprocessor.
    tile = block_n * block_k * num_bytes // num_columns + block_k * max(16, num_tokens) * element_size
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
    data, scales, zeros, (rows_of_scale, group) = tensors
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
            zeros,
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
            ON_GPU=is_compiled,
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
        zeros,
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
    """Returns the weight as `[N, K]` of `dtype`, on a GPU. Numbers of 4 bits have groups of inputs."""
    data, scales, zeros, (rows, group) = tensors
    num_columns, block_k = tensors.num_columns, group or 128
    out = torch.empty((len(data), num_columns), dtype=dtype, device=data.device)
    _dequantised_kernel[(triton.cdiv(len(data), 32), triton.cdiv(num_columns, block_k))](
        data,
        scales,
        zeros,
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


def fp8_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens x `[T, K]` in float8_e4m3fn with a scale for each `group` inputs, as `_scaled_mm`
    takes them: `[T', K]`, and float32 `[T', K / group]`, of which a column is contiguous. T' is T rounded up
    to a multiple of 16; rows beyond T are zeros."""
    (num_tokens, dim), padded = x.shape, -(-len(x) // 16) * 16
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
        num_warps=4,
        **tuning.early_options(x.device),
    )
    return rows, scales
