"""Computes the causal depthwise convolution of packed sequences, each of which goes on from the inputs that its
slot of a pool holds, and writes the last inputs to the slot that the next step reads."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.layers.gated_activation import activate

MAX_WIDTH = 8
_BLOCK_T = 8  # tokens of a program
_BLOCK_D = 256  # channels of a program
_BLOCK_N = tl.constexpr(256)  # sequences whose starts a program looks at at once
_TAKEN = Tensors(
    x="float32 or float16 or bfloat16 [T, D] with a last stride of 1",
    weight="floats [D, W]",
    bias="contiguous floats [D]",
    states="[slots, before, D] with a last stride of 1",
    reads="contiguous int64 [n]",
    writes="contiguous int64 [n]",
    starts="contiguous int32 [n + 1]",
    places="contiguous int64 [packed]",
    out="[rows, D] with a last stride of 1",
)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _row(places, token, within):
    """Returns where a packed token stands, int64."""
    if places is None:  # noqa: SIM108, of which Triton would compile both sides
        row = token.to(tl.int64)
    else:
        row = tl.load(places + token, mask=within, other=0)
    return row


@triton.jit
def _taps(weight, bias, channels, in_dim, stride_tap, W: tl.constexpr):
    """Returns the factors of the W inputs, and the bias."""
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight + j * stride_tap, mask=in_dim, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    offset = tl.where(in_dim, 0.0, 0.0)
    if bias is not None:
        offset += tl.load(bias + channels, mask=in_dim, other=0.0).to(tl.float32)
    return taps, offset


@triton.jit
def _output(inputs, taps, offset, t: tl.constexpr, W: tl.constexpr, ACTIVATION: tl.constexpr):
    """Returns the output whose first input is number t."""
    total = offset
    for j in tl.static_range(W):
        total += inputs[t + j].to(tl.float32) * taps[j]
    if ACTIVATION is not None:
        total = activate(total, ACTIVATION)
    return total


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences"],
    do_not_specialize_on_alignment=["reads", "writes", "starts", "places"],
)
def _causal_conv_kernel(
    x,  # [T, D]
    weight,  # [D, W]
    bias,  # [D] or None
    states,  # [slots, W - 1, D]
    reads,  # [n]
    writes,  # [n]
    starts,  # [n + 1]
    places,  # [packed] or None
    out,  # [T, D], written
    num_tokens,
    num_sequences,
    stride_x,
    stride_out,
    stride_channel,  # of weight
    stride_tap,
    stride_slot,
    D: tl.constexpr,
    W: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_dim = channels < D
    taps, offset = _taps(weight + channels * stride_channel, bias, channels, in_dim, stride_tap, W)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if program < num_sequences:  # the state of a sequence, and its first W - 1 tokens
        first = tl.load(starts + program).to(tl.int64)
        length = tl.load(starts + program + 1) - first
        state = states + tl.load(reads + program) * stride_slot + channels
        write = tl.load(writes + program)
        inputs = ()
        for j in tl.static_range(W - 1):
            inputs += (tl.load(state + j * D, mask=in_dim, other=0.0),)  # type: ignore[assignment]
        for j in tl.static_range(W - 1):
            row = _row(places, first + j, j < length)
            inputs += (tl.load(x + row * stride_x + channels, mask=in_dim & (j < length), other=0.0),)  # type: ignore[assignment]
        last = ()
        for j in tl.static_range(W - 1):
            is_old = length + j < W - 1
            old = tl.load(state + (length + j) * D, mask=in_dim & is_old, other=0.0)
            row = _row(places, first + length + j - (W - 1), is_old == 0)
            new = tl.load(x + row * stride_x + channels, mask=in_dim & (is_old == 0), other=0.0)
            last += (tl.where(is_old, old, new),)  # type: ignore[assignment]
        tl.debug_barrier()  # every thread has read the old state before one writes the new
        for j in tl.static_range(W - 1):
            total = _output(inputs, taps, offset, j, W, ACTIVATION).to(out.dtype.element_ty)
            row = _row(places, first + j, j < length)
            tl.store(out + row * stride_out + channels, total, mask=in_dim & (j < length))
            tl.store(states + write * stride_slot + j * D + channels, last[j], mask=in_dim & (write != 0))
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
        row = _row(places, token, within)
        inputs += (tl.load(x + row * stride_x + channels, mask=in_dim & within, other=0.0),)  # type: ignore[assignment]
    for j in tl.static_range(BLOCK_T):
        token = first + j
        total = tl.where(token < end, _output(inputs, taps, offset, j, W, ACTIVATION), 0.0)
        is_mine = (token < num_tokens) & ((token >= end) | ((begins >> j) & ((1 << (W - 1)) - 1) == 0))
        if places is not None:
            is_mine &= token < end
        row = _row(places, token, is_mine)
        tl.store(out + row * stride_out + channels, total.to(out.dtype.element_ty), mask=in_dim & is_mine)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    starts: Tensor,
    activation: str | None,
    places: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns act(bias + Σ_j weight[:, j] · input[t - (W - 1) + j]) of every token t, `[T, D]`, summed in
    float32. A sequence's state holds the inputs before its first token, and then becomes its last W - 1 inputs.

    Args:
        x: `[T, D]`, float32, float16 or bfloat16: the tokens of all sequences, one sequence after the other.
        weight: `[D, W]` with a W of 2 to 8, fastest where the channels are contiguous. bias: `[D]`, or None.
        states: `[num_slots, W - 1, D]` of the dtype of x, each slot contiguous, the oldest input first.
        reads: int64 `[n]`, the slot that holds each sequence's state.
        writes: int64 `[n]`, the slot to which its new state goes; 0 to write none.
        starts: int32 `[n + 1]`. Tokens `starts[i]` to `starts[i + 1]` are sequence i's, and may be none.
            Tokens from `starts[n]` on are padding, whose output is 0. Those before `starts[0]` are of others:
            what is written there says nothing.
        activation: "silu", or None.
        places: int64 `[packed]`, where the tokens of the sequences stand in x and in the output, as the packed
            tokens that `starts` counts; None where they are packed there. Those of padding are not read.
        out: `[T, D]`, where the output is written; with `places` the other tokens of it stay. None for a new
            tensor.

    A slot that one sequence writes must not be read by another. Nothing synchronises, so a CUDA graph can
    capture it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor or the activation is none of these.
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "states": states}
    tensors |= {"reads": reads, "writes": writes, "starts": starts, "places": places}
    _TAKEN.check({}, out=out, **tensors)
    (num_tokens, dim), width, num_sequences = x.shape, weight.shape[1], len(reads)
    num_tokens = num_tokens if places is None else len(places)
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
    if out is None:
        out = torch.empty((len(x), dim), dtype=x.dtype, device=x.device)
    block_d = min(_BLOCK_D, triton.next_power_of_2(dim))
    grid = num_sequences + triton.cdiv(num_tokens, _BLOCK_T), triton.cdiv(dim, block_d)
    strides = x.stride(0), out.stride(0), *weight.stride(), states.stride(0)
    constants = {"D": dim, "W": width, "ACTIVATION": activation, "BLOCK_T": _BLOCK_T, "BLOCK_D": block_d}
    options = {"num_warps": 1, **tuning.early_options(x.device)}
    if grid[0]:
        _causal_conv_kernel[grid](
            *tensors.values(), out, num_tokens, num_sequences, *strides, **constants, **options
        )
    return out


def causal_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    starts: Tensor,
    activation: str | None,
    places: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes `causal_conv` in plain torch, of all sequences at once."""
    if places is not None:
        assert out is not None
        packed = places[: int(starts[-1])]
        state = (states, reads, writes, starts)
        out[packed] = causal_conv_reference(x[packed], weight, bias, *state, activation)
        return out
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
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[:first], out[end:] = 0.0, 0.0
    out[first:end] = functional.silu(total) if activation == "silu" else total
    return out
