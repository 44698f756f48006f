"""Computes the causal depthwise convolution of packed sequences, each of which goes on from the inputs that its
slot of a pool holds, and writes the last inputs to the slot that the next step reads."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.records import heads_record
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.layers.gated_activation import activate

from .rows import StateRows, place_of

MAX_WIDTH = 8
_BLOCK_T = 8  # tokens of a program
_BLOCK_D = 256  # channels of a program
_BLOCK_N = tl.constexpr(256)  # sequences whose starts a program looks at at once
_WEIGHTS = Tensors(weight="floats [D, W]", bias="contiguous floats [D]")
_TAKEN = Tensors(
    x="float32 or float16 or bfloat16 [T, D] with a last stride of 1",
    states="[slots, before, D] with a last stride of 1",
    out="[rows, D] with a last stride of 1",
)


class Convolution(NamedTuple):
    """A causal depthwise convolution: `weight` `[D, W]` with a W of 2 to 8, fastest where the channels are
    contiguous; `bias` `[D]`, or None; and the activation behind it, "silu" or None."""

    weight: Tensor
    bias: Tensor | None
    activation: str | None


class _Taps(NamedTuple):
    """`weight` `[D, W]` and `bias` `[D]` or None."""

    weight: Any
    stride_channel: Any
    stride_tap: Any
    bias: Any


class _Windows(NamedTuple):
    """States by slot, `[slots, W - 1, D]`."""

    data: Any
    stride_slot: Any


class _Shape(NamedTuple):
    """The constants of a launch. `SILU`: the activation."""

    D: Any
    W: Any
    SILU: Any
    BLOCK_T: Any
    BLOCK_D: Any


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _load_taps(taps, channels, in_dim, W: tl.constexpr):
    """Returns the factors of the W inputs, and the bias."""
    factors = ()
    for j in tl.static_range(W):
        factor = taps.weight + channels * taps.stride_channel + j * taps.stride_tap
        factors += (tl.load(factor, mask=in_dim, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    offset = tl.where(in_dim, 0.0, 0.0)
    if taps.bias is not None:
        offset += tl.load(taps.bias + channels, mask=in_dim, other=0.0).to(tl.float32)
    return factors, offset


@triton.jit
def _load_input(x, row, channels, mask):
    return tl.load(x.data + row * x.stride_token + channels, mask=mask, other=0.0)


@triton.jit
def _store_output(out, row, channels, total, mask):
    tl.store(out.data + row * out.stride_token + channels, total.to(out.data.dtype.element_ty), mask=mask)


@triton.jit
def _output(inputs, factors, offset, t: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr):
    """Returns the output whose first input is number t."""
    total = offset
    for j in tl.static_range(W):
        total += inputs[t + j].to(tl.float32) * factors[j]
    if SILU:
        total = activate(total, "silu")
    return total


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences"],
    do_not_specialize_on_alignment=["reads", "writes", "starts", "places"],
)
def _causal_conv_kernel(
    x, taps, states, reads, writes, starts, places, out, num_tokens, num_sequences, shape, EARLY: tl.constexpr
):
    """`x` and `out`: `Heads` without heads, `[T, D]`; `taps`, `states` and `shape`: as they are named above."""
    D: tl.constexpr = shape.D
    W: tl.constexpr = shape.W
    SILU: tl.constexpr = shape.SILU
    BLOCK_T: tl.constexpr = shape.BLOCK_T
    program = tl.program_id(0)
    channels = tl.program_id(1) * shape.BLOCK_D + tl.arange(0, shape.BLOCK_D)
    in_dim = channels < D
    factors, offset = _load_taps(taps, channels, in_dim, W)
    tuning.wait_early(EARLY)
    if program < num_sequences:  # the state of a sequence, and its first W - 1 tokens
        first = tl.load(starts + program).to(tl.int64)
        length = tl.load(starts + program + 1) - first
        state = states.data + tl.load(reads + program) * states.stride_slot + channels
        write = tl.load(writes + program)
        inputs = ()
        for j in tl.static_range(W - 1):
            inputs += (tl.load(state + j * D, mask=in_dim, other=0.0),)  # type: ignore[assignment]
        for j in tl.static_range(W - 1):
            row = place_of(places, first + j, j < length)
            inputs += (_load_input(x, row, channels, in_dim & (j < length)),)  # type: ignore[assignment]
        last = ()
        for j in tl.static_range(W - 1):
            is_old = length + j < W - 1
            old = tl.load(state + (length + j) * D, mask=in_dim & is_old, other=0.0)
            row = place_of(places, first + length + j - (W - 1), is_old == 0)
            new = _load_input(x, row, channels, in_dim & (is_old == 0))
            last += (tl.where(is_old, old, new),)  # type: ignore[assignment]
        tl.debug_barrier()  # every thread has read the old state before one writes the new
        for j in tl.static_range(W - 1):
            total = _output(inputs, factors, offset, j, W, SILU)
            row = place_of(places, first + j, j < length)
            _store_output(out, row, channels, total, in_dim & (j < length))
            kept = states.data + write * states.stride_slot + j * D + channels
            tl.store(kept, last[j], mask=in_dim & (write != 0))
        return
    # Some tokens, less the first W - 1 of each sequence. `begins` has a bit for each token at which one begins.
    first = (program - num_sequences).to(tl.int64) * BLOCK_T
    begins = 0
    for base in range(0, num_sequences, _BLOCK_N):
        sequence = base + tl.arange(0, _BLOCK_N)
        start = tl.load(starts + sequence, mask=sequence < num_sequences, other=num_tokens)
        since = (start - (first - (W - 2))).to(tl.int32)
        is_near = (sequence < num_sequences) & (since >= 0) & (since < BLOCK_T + W - 2)
        begins |= tl.reduce(tl.where(is_near, 1 << tl.where(is_near, since, 0), 0), 0, _or)
    end = tl.load(starts + num_sequences)
    inputs = ()
    for j in tl.static_range(BLOCK_T + W - 1):
        token = first + j - (W - 1)
        within = (token >= 0) & (token < end)
        row = place_of(places, token, within)
        inputs += (_load_input(x, row, channels, in_dim & within),)  # type: ignore[assignment]
    for j in tl.static_range(BLOCK_T):
        token = first + j
        total = tl.where(token < end, _output(inputs, factors, offset, j, W, SILU), 0.0)
        is_mine = (token < num_tokens) & ((token >= end) | ((begins >> j) & (2 ** (W - 1) - 1) == 0))
        if places is not None:
            is_mine &= token < end
        row = place_of(places, token, is_mine)
        _store_output(out, row, channels, total, in_dim & is_mine)


def causal_conv(x: Tensor, conv: Convolution, states: Tensor, rows: StateRows, out: Tensor) -> None:
    """Writes act(bias + Σ_j weight[:, j] · input[t - (W - 1) + j]) of every token t to `out`, summed in
    float32. A sequence's state holds the inputs before its first token, and then becomes its last W - 1 inputs.

    Args:
        x: `[T, D]`, float32, float16 or bfloat16: the tokens of all sequences, one sequence after the other.
        conv: its weight, bias and activation.
        states: `[num_slots, W - 1, D]` of the dtype of x, each slot contiguous, the oldest input first.
        rows: the slots that they read and write, and where their tokens stand in x and `out`. Without `places`,
            tokens from `starts[n]` on are padding, whose output is 0, and those before `starts[0]` are of
            others: what is written there says nothing.
        out: `[T, D]`; with `places` the other tokens of it stay.

    Nothing synchronises, so a CUDA graph can capture it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor or the activation is none of these.
    """
    weight, bias, activation = conv
    rows.check()
    _WEIGHTS.check({"D": _TAKEN.check({}, x=x, states=states, out=out)["D"]}, weight=weight, bias=bias)
    (num_tokens, dim), width, num_sequences = x.shape, weight.shape[1], len(rows.reads)
    num_tokens = num_tokens if rows.places is None else len(rows.places)
    if not 2 <= width <= MAX_WIDTH or activation not in (None, "silu"):
        raise ValueError(
            f"a convolution of width {width} with activation {activation!r}; give a width of 2 to {MAX_WIDTH} "
            "and 'silu' or None"
        )
    if (states.dtype, states.shape[1]) != (x.dtype, width - 1) or not states[:1].is_contiguous():
        raise ValueError(
            f"states must be {x.dtype} [slots, {width - 1}, {dim}] with contiguous slots; got {states.dtype} "
            f"{tuple(states.shape)} with strides {states.stride()}"
        )
    block_d = min(_BLOCK_D, triton.next_power_of_2(dim))
    grid = num_sequences + triton.cdiv(num_tokens, _BLOCK_T), triton.cdiv(dim, block_d)
    taps = _Taps(weight, weight.stride(0), weight.stride(1), bias)
    windows = _Windows(states, states.stride(0))
    shape = _Shape(*map(tl.constexpr, (dim, width, activation is not None, _BLOCK_T, block_d)))
    options = {"num_warps": 1, **tuning.early_options(x.device)}
    if grid[0]:
        _causal_conv_kernel[grid](
            heads_record(x),
            taps,
            windows,
            *rows._replace(starts=rows.bounds()),
            heads_record(out),
            num_tokens,
            num_sequences,
            shape,
            **options,
        )


def causal_conv_reference(x: Tensor, conv: Convolution, states: Tensor, rows: StateRows, out: Tensor) -> None:
    """Computes `causal_conv` in plain torch, of all sequences at once."""
    (weight, bias, activation), (reads, writes, _, places) = conv, rows
    starts = rows.bounds()
    if places is not None:
        packed = places[: int(starts[-1])]
        found = torch.empty_like(x[packed])
        causal_conv_reference(x[packed], conv, states, rows._replace(places=None), found)
        out[packed] = found
        return
    before, first, end, device = weight.shape[1] - 1, int(starts[0]), int(starts[-1]), x.device
    starts, used = starts - first, end - first
    lengths, numbers = (starts[1:] - starts[:-1]).long(), torch.arange(len(reads), device=device)
    # The inputs of all sequences in one tensor, each sequence's state before its tokens.
    olds = (starts[:-1] + numbers * before)[:, None] + torch.arange(before, device=device)
    news = torch.arange(used, device=device) + (torch.repeat_interleave(numbers, lengths) + 1) * before
    inputs = x.new_empty(used + olds.numel(), x.shape[1])
    inputs[olds] = states[reads]
    inputs.index_copy_(0, news, x[first:end])
    is_written = writes != 0
    states[writes[is_written]] = inputs[(olds + lengths[:, None])[is_written]]

    wide, taps = inputs.float(), weight.float().T.contiguous()
    total = wide[: max(0, len(wide) - before)] * taps[0]
    for j in range(1, len(taps)):
        total.addcmul_(wide[j : j + len(total)], taps[j])
    total = total.index_select(0, news - before)
    if bias is not None:
        total += bias.float()
    out[:first], out[end:] = 0.0, 0.0
    out[first:end] = functional.silu(total) if activation == "silu" else total
