"""Computes the gated delta rule token by token, for decodes and for short pieces of prompts: reads a sequence's
state at one slot of a pool, and writes it at another or at the same."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.checks import Tensors

_EPS = tl.constexpr(1e-6)  # added to the squared length of a query or key
_TAKEN = Tensors(
    qkv="floats [T, dims] with a last stride of 1",
    a="floats [T, HV] with a last stride of 1",
    b="floats [T, HV] with a last stride of 1",
    a_log="contiguous floats [HV]",
    dt_bias="contiguous floats [HV]",
    states="float32 [slots, HV, DK, DV] with a last stride of 1",
    reads="contiguous int64 [n]",
    writes="contiguous int64 [n]",
    starts="contiguous int32 [n + 1]",
    places="contiguous int64 [packed]",
    out="contiguous [rows, HV, DV]",
)


@triton.jit
def _log_decay(a, a_log):
    """Returns -exp(a_log) · softplus(a)."""
    power = tl.exp(tl.minimum(a, 20.0))
    sum_ = 1.0 + power
    # The quotient is what rounding the sum made of the power, where that is small.
    small = tl.where(sum_ == 1.0, power, tl.log(sum_) * power / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0))
    return -tl.exp(a_log) * tl.where(a > 20.0, a, small)


@triton.jit
def _unit(x):
    """Returns x [BLOCK_K] divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + _EPS)


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "starts", "places"])
def _gated_delta_decode_kernel(
    qkv,  # [n, 2 * HK * DK + HV * DV]
    a,  # [n, HV]
    b,  # [n, HV]
    a_log,  # [HV]
    dt_bias,  # [HV]
    states,  # [slots, HV, DK, DV]
    reads,  # [n]
    writes,  # [n]
    starts,  # [n + 1] or None
    places,  # [packed] or None
    out,  # [T, HV, DV], written
    stride_qkv,
    stride_a,
    stride_b,
    stride_slot,
    beta_scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = keys < DK, values < DV
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    read = tl.load(reads + row)
    write = tl.load(writes + row)
    in_state = in_k[:, None] & in_v[None, :] & (write != 0)
    tile = states + head * DK * DV + keys[:, None] * DV + values[None, :]
    state = tl.load(tile + read * stride_slot, mask=in_state, other=0.0)

    decay_rate = tl.load(a_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    first, end = row, row + 1
    if starts is not None:
        first, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    # The tokens of a piece are loaded ahead.
    for token in tl.range(first, end, num_stages=1 if starts is None else 3):
        place = token
        if places is not None:
            place = tl.load(places + token)
        q = qkv + place * stride_qkv + head // (HV // HK) * DK + keys
        query = _unit(tl.load(q, mask=in_k, other=0.0).to(tl.float32)) * (DK**-0.5)
        key = _unit(tl.load(q + HK * DK, mask=in_k, other=0.0).to(tl.float32))
        v = qkv + place * stride_qkv + 2 * HK * DK + head * DV + values
        value = tl.load(v, mask=in_v, other=0.0).to(tl.float32)
        beta = beta_scale * tl.sigmoid(tl.load(b + place * stride_b + head).to(tl.float32))
        gate = tl.load(a + place * stride_a + head).to(tl.float32) + bias

        state *= tl.exp(_log_decay(gate, decay_rate))
        delta = beta * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * delta[None, :]
        total = tl.where(write != 0, tl.sum(state * query[:, None], 0), 0.0)
        tl.store(out + (place * HV + head) * DV + values, total.to(out.dtype.element_ty), mask=in_v)
    tl.store(tile + write * stride_slot, state, mask=in_state)


def gated_delta_decode(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    num_k_heads: int,
    beta_scale: float = 1.0,
    starts: Tensor | None = None,
    places: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the output of the gated delta rule for one token of each row, or for the tokens of each sequence,
    `[T, HV, DV]` in the dtype of qkv.

    With q and k divided by their lengths and q by √DK besides, β = beta_scale · sigmoid(b) and the decay
    d = exp(-exp(a_log) · softplus(a + dt_bias)), a head's state S becomes d·S + k (β (v - d·Sᵀk))ᵀ, and its
    output is Sᵀq of the new S. All of it is computed in float32.

    Args:
        qkv: `[T, 2 * HK * DK + HV * DV]`, the heads of q, of k and of v. HV is a multiple of HK, which is
            `num_k_heads`; head h of v has head h // (HV // HK) of q and k.
        a, b: `[T, HV]`. a_log, dt_bias: `[HV]`. Any floating types.
        states: float32 `[num_slots, HV, DK, DV]`, each slot contiguous.
        reads: int64 `[n]`, the slot that holds each row's state.
        writes: int64 `[n]`, the slot to which its new state goes; 0 for a row of padding, whose output is 0 and
            which writes no state.
        starts: int32 `[n + 1]`, where the tokens of each sequence begin; None where each row has one token.
        places: int64 `[packed]`, where these tokens stand in qkv, a, b and the output; None where they are
            packed there.
        out: where the output is written; other tokens of it stay. None for a new tensor, without `places`.

    A slot that one row writes must not be read by another. Nothing synchronises, so a CUDA graph can capture
    it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor is none of these.
    """
    tensors: dict[str, Tensor | None] = {"qkv": qkv, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    tensors |= {"states": states, "reads": reads, "writes": writes, "starts": starts, "places": places}
    _TAKEN.check({}, out=out, **tensors)
    num_v_heads, key_dim, value_dim = states.shape[1:]
    wanted = 2 * num_k_heads * key_dim + num_v_heads * value_dim
    if qkv.shape[1] != wanted or num_v_heads % num_k_heads or not states[:1].is_contiguous():
        raise ValueError(
            f"states of {num_v_heads} heads of {key_dim} x {value_dim} need {wanted} columns of qkv, a divisor "
            f"of {num_v_heads} as num_k_heads and contiguous slots; got {qkv.shape[1]} columns, {num_k_heads} "
            f"and strides {states.stride()}"
        )
    if out is None:
        out = qkv.new_empty(len(qkv), num_v_heads, value_dim)
    block_v, num_warps = _tile(tuning.device_class(qkv.device), len(reads) * num_v_heads, value_dim)
    strides = qkv.stride(0), a.stride(0), b.stride(0), states.stride(0)
    constants = {"HK": num_k_heads, "HV": num_v_heads, "DK": key_dim, "DV": value_dim}
    constants |= {"BLOCK_K": triton.next_power_of_2(key_dim), "BLOCK_V": block_v}
    options = {"num_warps": num_warps, **tuning.early_options(qkv.device)}
    if len(reads):
        grid = triton.cdiv(value_dim, block_v), num_v_heads, len(reads)
        _gated_delta_decode_kernel[grid](*tensors.values(), out, *strides, beta_scale, **constants, **options)
    return out


def _tile(device: tuning.DeviceClass, num_heads: int, value_dim: int) -> tuple[int, int]:
    """Returns the values of a program, and its warps: few for a small batch, whose programs would not fill the
    device otherwise. `num_heads`: those of all rows together."""
    if num_heads * triton.cdiv(value_dim, 64) >= 30 * device.num_multiprocessors:
        return 64, 4
    if num_heads * triton.cdiv(value_dim, 32) >= 7 * device.num_multiprocessors:
        return 32, 2
    return 8, 1


def gated_delta_decode_reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    num_k_heads: int,
    beta_scale: float = 1.0,
    starts: Tensor | None = None,
    places: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes `gated_delta_decode` in plain torch, one token of all sequences after the other."""
    num_v_heads, key_dim, value_dim = states.shape[1:]
    if out is None:
        out = qkv.new_zeros(len(qkv), num_v_heads, value_dim)
    bounds = torch.arange(len(reads) + 1, device=qkv.device) if starts is None else starts.long()
    decays = torch.exp(-a_log.float().exp() * functional.softplus(a.float() + dt_bias.float()))
    betas = beta_scale * torch.sigmoid(b.float())
    state, lengths = states[reads], bounds.diff()
    for number in range(int(lengths.max()) if len(lengths) else 0):
        running = lengths > number
        token = (bounds[:-1] + number)[running]
        place = token if places is None else places[token]
        q, k, v = qkv[place].float().split([num_k_heads * key_dim] * 2 + [num_v_heads * value_dim], 1)
        query, key = (
            (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPS.value))
            .repeat_interleave(num_v_heads // num_k_heads, 1)
            .unsqueeze(2)
            for part in (x.unflatten(1, (num_k_heads, key_dim)) for x in (q, k))
        )
        decayed = state[running] * decays[place][..., None, None]
        delta = betas[place][..., None, None] * (v.view(-1, num_v_heads, 1, value_dim) - key @ decayed)
        state[running] = decayed + key.transpose(2, 3) * delta
        total = (query * key_dim**-0.5 @ state[running])[:, :, 0]
        out[place] = total.masked_fill((writes[running] == 0)[:, None, None], 0.0).to(qkv.dtype)
    is_written = writes != 0
    states[writes[is_written]] = state[is_written]
    return out
