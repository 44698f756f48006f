"""Computes one token of the gated delta rule for each row of a batch: reads the row's state at one slot of a
pool, and writes it at another or at the same."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.checks import Tensors

_EPS = tl.constexpr(1e-6)  # added to the squared length of a query or key
_TAKEN = Tensors(
    qkv="floats [n, dims] with a last stride of 1",
    a="floats [n, HV] with a last stride of 1",
    b="floats [n, HV] with a last stride of 1",
    a_log="contiguous floats [HV]",
    dt_bias="contiguous floats [HV]",
    states="float32 [slots, HV, DK, DV] with a last stride of 1",
    reads="contiguous int64 [n]",
    writes="contiguous int64 [n]",
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


@triton.jit(do_not_specialize_on_alignment=["reads", "writes"])
def _gated_delta_decode_kernel(
    qkv,  # [n, 2 * HK * DK + HV * DV]
    a,  # [n, HV]
    b,  # [n, HV]
    a_log,  # [HV]
    dt_bias,  # [HV]
    states,  # [slots, HV, DK, DV]
    reads,  # [n]
    writes,  # [n]
    out,  # [n, HV, DV], written
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

    q = qkv + row * stride_qkv + head // (HV // HK) * DK + keys
    query = _unit(tl.load(q, mask=in_k, other=0.0).to(tl.float32)) * (DK**-0.5)
    key = _unit(tl.load(q + HK * DK, mask=in_k, other=0.0).to(tl.float32))
    v = qkv + row * stride_qkv + 2 * HK * DK + head * DV + values
    value = tl.load(v, mask=in_v, other=0.0).to(tl.float32)
    beta = beta_scale * tl.sigmoid(tl.load(b + row * stride_b + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    gate = tl.load(a + row * stride_a + head).to(tl.float32) + bias

    state *= tl.exp(_log_decay(gate, tl.load(a_log + head).to(tl.float32)))
    delta = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * delta[None, :]
    tl.store(tile + write * stride_slot, state, mask=in_state)
    total = tl.where(write != 0, tl.sum(state * query[:, None], 0), 0.0)
    tl.store(out + (row * HV + head) * DV + values, total.to(out.dtype.element_ty), mask=in_v)


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
) -> Tensor:
    """Returns the output of the gated delta rule for one token of each row, `[n, HV, DV]` in the dtype of qkv.

    With q and k divided by their lengths and q by √DK besides, β = beta_scale · sigmoid(b) and the decay
    d = exp(-exp(a_log) · softplus(a + dt_bias)), a head's state S becomes d·S + k (β (v - d·Sᵀk))ᵀ, and its
    output is Sᵀq of the new S. All of it is computed in float32.

    Args:
        qkv: `[n, 2 * HK * DK + HV * DV]`, the heads of q, of k and of v. HV is a multiple of HK, which is
            `num_k_heads`; head h of v has head h // (HV // HK) of q and k.
        a, b: `[n, HV]`. a_log, dt_bias: `[HV]`. Any floating types.
        states: float32 `[num_slots, HV, DK, DV]`, each slot contiguous.
        reads: int64 `[n]`, the slot that holds each row's state.
        writes: int64 `[n]`, the slot to which its new state goes; 0 for a row of padding, whose output is 0 and
            which writes no state.

    A slot that one row writes must not be read by another. Nothing synchronises, so a CUDA graph can capture
    it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor is none of these.
    """
    tensors = {"qkv": qkv, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    tensors |= {"states": states, "reads": reads, "writes": writes}
    _TAKEN.check({}, **tensors)
    num_v_heads, key_dim, value_dim = states.shape[1:]
    wanted = 2 * num_k_heads * key_dim + num_v_heads * value_dim
    if qkv.shape[1] != wanted or num_v_heads % num_k_heads or not states[:1].is_contiguous():
        raise ValueError(
            f"states of {num_v_heads} heads of {key_dim} x {value_dim} need {wanted} columns of qkv, a divisor "
            f"of {num_v_heads} as num_k_heads and contiguous slots; got {qkv.shape[1]} columns, {num_k_heads} "
            f"and strides {states.stride()}"
        )
    out = qkv.new_empty(len(qkv), num_v_heads, value_dim)
    block_v, num_warps = _tile(tuning.device_class(qkv.device), len(qkv) * num_v_heads, value_dim)
    grid = triton.cdiv(value_dim, block_v), num_v_heads, len(qkv)
    strides = qkv.stride(0), a.stride(0), b.stride(0), states.stride(0)
    constants = {"HK": num_k_heads, "HV": num_v_heads, "DK": key_dim, "DV": value_dim}
    constants |= {"BLOCK_K": triton.next_power_of_2(key_dim), "BLOCK_V": block_v}
    options = {"num_warps": num_warps, **tuning.early_options(qkv.device)}
    if len(qkv):
        _gated_delta_decode_kernel[grid](*tensors.values(), out, *strides, beta_scale, **constants, **options)
    return out


def _tile(device: tuning.DeviceClass, num_heads: int, value_dim: int) -> tuple[int, int]:
    """Returns the values of a program, and its warps: few for a small batch, whose programs would not fill the
    device otherwise. `num_heads`: those of all rows together."""
    if num_heads * triton.cdiv(value_dim, 32) >= 4 * device.num_multiprocessors:
        return 32, 4
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
) -> Tensor:
    """Computes `gated_delta_decode` in plain torch."""
    num_v_heads, key_dim, value_dim = states.shape[1:]
    q, k, v = qkv.float().split([num_k_heads * key_dim] * 2 + [num_v_heads * value_dim], 1)
    query, key = (
        part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPS.value)
        for part in (x.unflatten(1, (num_k_heads, key_dim)) for x in (q, k))
    )
    query, key = (x.repeat_interleave(num_v_heads // num_k_heads, 1)[:, :, None] for x in (query, key))
    beta = beta_scale * torch.sigmoid(b.float())
    decay = torch.exp(-a_log.float().exp() * functional.softplus(a.float() + dt_bias.float()))

    state = states.index_select(0, reads).mul_(decay[..., None, None])
    delta = beta[..., None, None] * (v.view(-1, num_v_heads, 1, value_dim) - key @ state)
    state += key.transpose(2, 3) * delta
    written = writes.nonzero()[:, 0]
    states.index_copy_(0, writes[written], state.index_select(0, written))
    out = (query * key_dim**-0.5 @ state)[:, :, 0]
    return out.masked_fill((writes == 0)[:, None, None], 0.0).to(qkv.dtype)
