"""Linear layers over a few tokens, which read the weights at the speed of memory.

For up to `MAX_TOKENS` tokens a product takes as long as its weights take to read, and cuBLAS reads them at well
below the bandwidth (`bench.kernels.linear` compares). There are two kernels here. One token is a matrix times a
vector, on the ordinary cores. Several tokens use the matrix units, with the weights as the left operand, since
these units take tiles of 64 rows:

    out^T [N, T]  =  weight [N, K]  ·  x^T [K, T]         a program: 64 rows of the weight, one part of K

Both are launched while the kernel before them still runs (programmatic dependent launch), and wait for it
before they read x; the first one loads weights before it waits. Where N is small, several programs share 64
rows, each with a part of K. The last one of them adds up the parts, in their order, so results do not vary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning

MAX_TOKENS = 64  # more are left to cuBLAS
_ROWS = 64  # of the weight, which a program multiplies with several tokens
_LEAST_ROWS = 16  # the same in the interpreter


class LinearLaunch(NamedTuple):
    """Tiles (rows of the weight, columns), launch options, and how many programs share the rows of a tile."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int


def linear_launch(
    device: tuning.DeviceClass, num_tokens: int, num_rows: int, num_columns: int, element_size: int
) -> LinearLaunch | None:
    """Returns the launch of `linear` for a weight of so many rows and columns; None where its kernels cannot
    run. `bench.kernels.linear` compares it with cuBLAS."""
    interpreted = device is tuning.INTERPRETER
    if (device.major != 9 or element_size != 2) and not interpreted:
        return None
    if num_tokens == 1:
        return LinearLaunch(2, min(4096, triton.next_power_of_2(num_columns)), 4, 1, 1)
    block_n, block_k = (_ROWS, 128) if not interpreted else (_LEAST_ROWS, 16)
    if num_rows % block_n or num_columns % block_k:
        return None
    blocks = num_rows // block_n
    most = device.num_multiprocessors  # programs that run at once with deep pipelines
    splits = 1
    while 2 * blocks * splits <= most and num_columns > 8 * block_k * splits:
        splits *= 2
    if interpreted or blocks * splits <= most:
        # With one program on a multiprocessor, more of the weight has to be on its way.
        return LinearLaunch(block_n, block_k, 4, 4 if num_tokens > 32 else 6, splits)
    if 2 * blocks < 3 * most:  # few multiprocessors have a second program, which better comes after the first
        return LinearLaunch(block_n, block_k, 4, 6, 1) if num_tokens <= 32 else None
    if blocks <= 2 * most:  # the pipelines of two programs have to fit on a multiprocessor
        return LinearLaunch(block_n, block_k, 4, 3 if num_tokens > 32 else 4 if num_tokens > 16 else 5, 1)
    if num_tokens <= 16 or num_rows % 128:
        return LinearLaunch(block_n, block_k, 4, 4, 1)
    return LinearLaunch(128, 128, 8, 4, 1) if num_tokens <= 32 else LinearLaunch(128, 64, 8, 6, 1)


@triton.jit
def _vector_kernel(
    x,  # [K]
    weight,  # [N, K]
    bias,  # [N] or None
    out,  # [N]
    N,
    stride_n,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    in_rows = rows < N
    source = weight + rows.to(tl.int64)[:, None] * stride_n + columns[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    inside = in_rows[:, None] & (columns < K)[None, :]
    w = tl.load(source, mask=inside, other=0.0, eviction_policy="evict_first")  # [BLOCK_N, BLOCK_K]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    vector = tl.load(x + columns, mask=columns < K, other=0.0)
    total = tl.sum(w.to(tl.float32) * vector.to(tl.float32)[None, :], 1)
    for k in tl.static_range(BLOCK_K, K, BLOCK_K):
        inside = in_rows[:, None] & (columns < K - k)[None, :]
        w = tl.load(source + k, mask=inside, other=0.0, eviction_policy="evict_first")
        vector = tl.load(x + k + columns, mask=columns < K - k, other=0.0)
        total += tl.sum(w.to(tl.float32) * vector.to(tl.float32)[None, :], 1)
    if bias is not None:
        total += tl.load(bias + rows, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=in_rows)


@triton.jit
def _store_rows(out, bias, total, rows, tokens, in_tokens, stride_out):
    """Stores total [rows, tokens], with the bias added, to out [tokens, rows]."""
    if bias is not None:
        total += tl.load(bias + rows).to(tl.float32)[:, None]
    tl.store(
        out + tokens.to(tl.int64)[None, :] * stride_out + rows[:, None],
        total.to(out.dtype.element_ty),
        mask=in_tokens[None, :],
    )


@triton.jit
def store_total(
    total,  # [BLOCK_N, BLOCK_T] float32, what a split adds up
    out,
    bias,
    parts,
    tickets,
    block,
    split,
    rows,
    tokens,
    in_tokens,
    stride_out,
    SPLITS: tl.constexpr,
):
    """Stores the total of a program; with several splits, the last one of a block stores the sum of all."""
    BLOCK_N: tl.constexpr = total.shape[0]
    BLOCK_T: tl.constexpr = total.shape[1]
    if SPLITS == 1:
        _store_rows(out, bias, total, rows, tokens, in_tokens, stride_out)
    else:
        PART: tl.constexpr = BLOCK_N * BLOCK_T
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tokens[None, :]
        of_block = parts + block * (SPLITS * PART) + within
        tl.store(of_block + split * PART, total)
        tl.debug_barrier()  # the part of every thread is stored before the ticket is taken
        if tl.atomic_add(tickets + block, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(of_block + other * PART, volatile=True)
            _store_rows(out, bias, total, rows, tokens, in_tokens, stride_out)
            tl.store(tickets + block, 0)


@triton.jit(do_not_specialize=["num_tokens", "K"])
def _few_tokens_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N] or None
    out,  # [T, N]
    parts,  # [N // BLOCK_N, SPLITS, BLOCK_N, BLOCK_T] float32; None for one split
    tickets,  # [N // BLOCK_N], zeros before and after; None for one split
    num_tokens,
    stride_x,
    stride_n,
    stride_out,
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    block = tl.program_id(0)
    split = tl.program_id(1)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_K)
    in_tokens = tokens < num_tokens
    # Each split has whole blocks of K, and the last one may have fewer.
    chunk = tl.cdiv(K, SPLITS * BLOCK_K) * BLOCK_K
    first = split * chunk
    end = tl.minimum(first + chunk, K)
    source = weight + rows.to(tl.int64)[:, None] * stride_n + columns[None, :]
    vectors = x + tokens[None, :] * stride_x + columns[:, None]
    tuning.wait_early(EARLY)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        w = tl.load(source + k, eviction_policy="evict_first")
        total = tl.dot(w, tl.load(vectors + k, mask=in_tokens[None, :], other=0.0), total)
    store_total(total, out, bias, parts, tickets, block, split, rows, tokens, in_tokens, stride_out, SPLITS)


def tickets_for(weight: Tensor) -> Tensor:
    """Returns the tickets that `linear` needs for `weight` `[N, K]`: int32 zeros on its device."""
    num_blocks = triton.cdiv(weight.shape[0], _LEAST_ROWS)
    return torch.zeros(num_blocks, dtype=torch.int32, device=weight.device)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tickets: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns x · weight^T + bias, by the kernel that is fastest for the shape (`linear_launch`).

    Args:
        x: `[..., K]`.
        weight: `[N, K]`.
        bias: `[N]`, or None.
        tickets: of `tickets_for`; may serve any number of products with as many rows, one after the other.
            Without them products whose programs share rows are left to cuBLAS.
        out: `[..., N]`, contiguous, written and returned; None for new memory.

    Sums are float32, rounded once at the end. Nothing synchronises, so a CUDA graph can capture it.
    `torch.nn.functional.linear` computes everything but a few tokens in 16 bits on a Hopper GPU.
    """
    dim = x.shape[-1]
    num_tokens = x.numel() // max(dim, 1)
    launch = _launch(x, weight, num_tokens) if 0 < num_tokens <= MAX_TOKENS else None
    if launch is None or (launch.splits > 1 and tickets is None):
        if out is None:
            return functional.linear(x, weight, bias)
        torch.mm(x.reshape(-1, dim), weight.t(), out=out.view(-1, len(weight)))
        return out if bias is None else out.add_(bias)
    num_rows = weight.shape[0]
    tokens = x.reshape(num_tokens, dim)
    if out is None:
        out = x.new_empty((*x.shape[:-1], num_rows))
    if num_tokens == 1:
        _vector_kernel[(triton.cdiv(num_rows, launch.block_n),)](
            tokens,
            weight,
            bias,
            out,
            num_rows,
            weight.stride(0),
            K=dim,
            BLOCK_N=launch.block_n,
            BLOCK_K=launch.block_k,
            num_warps=launch.num_warps,
            **tuning.early_options(x.device),
        )
        return out
    block_t = max(16, triton.next_power_of_2(num_tokens))
    blocks = num_rows // launch.block_n
    parts = None
    if launch.splits > 1:
        parts = torch.empty(
            blocks * launch.splits * launch.block_n * block_t, dtype=torch.float32, device=x.device
        )
    _few_tokens_kernel[(blocks, launch.splits)](
        tokens,
        weight,
        bias,
        out,
        parts,
        tickets if launch.splits > 1 else None,
        num_tokens,
        tokens.stride(0),
        weight.stride(0),
        num_rows,
        dim,
        BLOCK_T=block_t,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        SPLITS=launch.splits,
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
        **tuning.early_options(x.device),
    )
    return out


def _launch(x: Tensor, weight: Tensor, num_tokens: int) -> LinearLaunch | None:
    """Returns the launch of a kernel here; None where cuBLAS is faster, or a kernel cannot run."""
    if not x.is_cuda and isinstance(_vector_kernel, triton.JITFunction):
        return None
    if x.dtype != weight.dtype or weight.stride(1) != 1 or (x.dim() > 1 and x.stride(-1) != 1):
        return None
    device = tuning.device_class(x.device)
    return linear_launch(device, num_tokens, weight.shape[0], weight.shape[1], x.element_size())
