"""Computes the gated delta rule token by token, for decodes and for short pieces of prompts: reads a sequence's
state at one slot of a pool, and writes it at another or at the same."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.records import heads_record
from lightkv.triton_kernels.checks import Tensors

from . import matrices
from .rows import StateRows, place_of, tokens_of

_EPS = tl.constexpr(1e-6)  # added to the squared length of a query or key
_TAKEN = Tensors(
    qkv="floats [T, dims] with a last stride of 1",
    a="floats [T, HV] with a last stride of 1",
    b="floats [T, HV] with a last stride of 1",
)
_GATES = Tensors(a_log="contiguous floats [HV]", dt_bias="contiguous floats [HV]")


class DeltaGates(NamedTuple):
    """What makes a token's decay and rate of correction of its a and b: `a_log` and `dt_bias`, `[HV]`.

    log_decay = −exp(a_log)·softplus(a + dt_bias);   beta = beta_scale·sigmoid(b)
    """

    a_log: Tensor
    dt_bias: Tensor
    beta_scale: float


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
    qkv, a, b, gates, states, reads, writes, starts, places, out, EARLY: tl.constexpr
):
    """`qkv`, `a` and `b`: `Heads`; `gates`: `DeltaGates`; `states`: `Matrices`."""
    head, keys, values = matrices.dims_of(states)
    group = head // (states.HV // states.HK)
    tuning.wait_early(EARLY)
    state, target, in_state, write = matrices.load_state(states, reads, writes, head, keys, values)

    decay_rate = tl.load(gates.a_log + head).to(tl.float32)
    bias = tl.load(gates.dt_bias + head).to(tl.float32)
    first, end = tokens_of(starts)
    # Where few programs run, the tokens of a piece are loaded ahead.
    for token in tl.range(first, end, num_stages=3 if starts is not None and states.BLOCK_V <= 8 else 1):
        place = place_of(places, token, token < end)
        q = qkv.data + place * qkv.stride_token + group * states.DK + keys
        query = _unit(tl.load(q, mask=keys < states.DK, other=0.0).to(tl.float32)) * (states.DK**-0.5)
        key = _unit(tl.load(q + states.HK * states.DK, mask=keys < states.DK, other=0.0).to(tl.float32))
        v = qkv.data + place * qkv.stride_token + 2 * states.HK * states.DK + head * states.DV + values
        value = tl.load(v, mask=values < states.DV, other=0.0).to(tl.float32)
        rate = tl.load(b.data + place * b.stride_token + head).to(tl.float32)
        gate = tl.load(a.data + place * a.stride_token + head).to(tl.float32) + bias

        state *= tl.exp(_log_decay(gate, decay_rate))
        delta = gates.beta_scale * tl.sigmoid(rate) * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * delta[None, :]
        matrices.store_output(out, states, place, head, values, state, query, write)
    tl.store(target, state, mask=in_state)


def gated_delta_decode(
    qkv: Tensor, a: Tensor, b: Tensor, gates: DeltaGates, states: Tensor, rows: StateRows, out: Tensor
) -> None:
    """Writes the outputs of the gated delta rule of all tokens of rows to `out`.

    With q and k divided by their lengths and q by √DK besides, β = beta_scale · sigmoid(b) and the decay
    d = exp(-exp(a_log) · softplus(a + dt_bias)), a head's state S becomes d·S + k (β (v - d·Sᵀk))ᵀ, and its
    output is Sᵀq of the new S. All of it is computed in float32.

    Args:
        qkv: `[T, 2 * HK * DK + HV * DV]`, the heads of q, of k and of v. HV is a multiple of HK; head h of v
            has head h // (HV // HK) of q and k.
        a, b: `[T, HV]`. These and the tensors of `gates` are of any floating types.
        states, rows, out: as in `decay_decode`.

    Nothing synchronises, so a CUDA graph can capture it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor is none of these.
    """
    rows.check()
    sizes = matrices.TAKEN.check(_TAKEN.check({}, qkv=qkv, a=a, b=b), states=states, out=out)
    _GATES.check({"HV": sizes["HV"]}, a_log=gates.a_log, dt_bias=gates.dt_bias)
    num_v_heads, key_dim, value_dim = states.shape[1:]
    num_k_heads, rest = divmod(qkv.shape[1] - num_v_heads * value_dim, 2 * key_dim)
    if num_k_heads < 1 or rest:
        raise ValueError(
            f"states of {num_v_heads} heads of {key_dim} x {value_dim} need {num_v_heads * value_dim} columns "
            f"of qkv and {2 * key_dim} more for each head of q and k; got {qkv.shape[1]}"
        )
    block_v, num_warps = _tile(tuning.device_class(qkv.device), len(rows.reads) * num_v_heads, value_dim)
    pool = matrices.record(states, num_k_heads, block_v)
    options = {"num_warps": num_warps, **tuning.early_options(qkv.device)}
    if len(rows.reads):
        grid = triton.cdiv(value_dim, block_v), num_v_heads, len(rows.reads)
        _gated_delta_decode_kernel[grid](*map(heads_record, (qkv, a, b)), gates, pool, *rows, out, **options)


def _tile(device: tuning.DeviceClass, num_heads: int, value_dim: int) -> tuple[int, int]:
    """Returns the values of a program, and its warps: few for a small batch, whose programs would not fill the
    device otherwise. `num_heads`: those of all rows together."""
    if num_heads * triton.cdiv(value_dim, 64) >= 30 * device.num_multiprocessors:
        return 64, 4
    if num_heads * triton.cdiv(value_dim, 32) >= 7 * device.num_multiprocessors:
        return 32, 2
    return 8, 1


def gated_delta_decode_reference(
    qkv: Tensor, a: Tensor, b: Tensor, gates: DeltaGates, states: Tensor, rows: StateRows, out: Tensor
) -> None:
    """Computes `gated_delta_decode` in plain torch."""
    num_v_heads, key_dim, value_dim = states.shape[1:]
    of_keys = (qkv.shape[1] - num_v_heads * value_dim) // 2
    decays = torch.exp(-gates.a_log.float().exp() * functional.softplus(a.float() + gates.dt_bias.float()))
    betas = gates.beta_scale * torch.sigmoid(b.float())

    def step(place: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = qkv[place].float().split((of_keys, of_keys, num_v_heads * value_dim), 1)
        query, key = (
            (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPS.value))
            .repeat_interleave(num_v_heads * key_dim // of_keys, 1)
            .unsqueeze(2)
            for part in (x.unflatten(1, (-1, key_dim)) for x in (q, k))
        )
        decayed = state * decays[place][..., None, None]
        delta = betas[place][..., None, None] * (v.view(-1, num_v_heads, 1, value_dim) - key @ decayed)
        state = decayed + key.transpose(2, 3) * delta
        return state, (query * key_dim**-0.5 @ state)[:, :, 0]

    rows.recur_reference(states, step, out)
