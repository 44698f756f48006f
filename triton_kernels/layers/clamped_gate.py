"""Adds the biases of experts to their gate and up, clamps both, and multiplies them, in one pass."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

_BLOCK = 1024  # columns of a program


class ClampedGate(NamedTuple):
    """(up + offset) · gate · sigmoid(alpha · gate), with the gate at most `limit`, and up within ± limit.

    `interleaved`: gate and up take turns in a row; otherwise the gate is its first half.
    """

    alpha: float
    limit: float
    offset: float
    interleaved: bool


@triton.jit
def clamped(gate, up, by, DTYPE: tl.constexpr):
    """Returns both factors of a `ClampedGate`, of float32 values, rounded where modules round."""
    gate = tl.where(gate > by.limit, by.limit, gate)  # what is no number stays none
    up = tl.where(up > by.limit, by.limit, tl.where(up < -by.limit, -by.limit, up))
    steep = (gate * by.alpha).to(DTYPE).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-steep))).to(DTYPE).to(tl.float32)
    active = (gate * share).to(DTYPE).to(tl.float32)
    return active, (up + by.offset).to(DTYPE).to(tl.float32)


@triton.jit
def _clamped_gate_kernel(
    gate_up,  # [R, 2n]
    experts,  # [R], of each row; used with a bias
    bias,  # [E, 2n] or None
    out,  # [R, n]
    n,
    by,  # `ClampedGate`
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < n
    DTYPE: tl.constexpr = gate_up.dtype.element_ty
    if by.interleaved:
        gates = 2 * columns
        ups = gates + 1
    else:
        gates = columns
        ups = n + columns
    tuning.wait_early(EARLY)
    gate = tl.load(gate_up + row * 2 * n + gates, mask=within, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * n + ups, mask=within, other=0.0).to(tl.float32)
    if bias is not None:
        biases = bias + tl.load(experts + row).to(tl.int64) * 2 * n
        gate += tl.load(biases + gates, mask=within, other=0.0).to(tl.float32)
        up += tl.load(biases + ups, mask=within, other=0.0).to(tl.float32)
        gate = gate.to(DTYPE).to(tl.float32)
        up = up.to(DTYPE).to(tl.float32)
    active, up = clamped(gate, up, by, DTYPE)
    tl.store(out + row * n + columns, (active * up).to(DTYPE), mask=within)


def clamped_gate(gate_up: Tensor, gate: ClampedGate, experts: Tensor, bias: Tensor | None) -> Tensor:
    """Returns what `gate` says, `[R, n]`, of `gate_up` `[R, 2n]`, contiguous, rounded where modules round.

    `bias`: `[E, 2n]`, contiguous, of which each row gets that of its expert, int32 `[R]`, first; None for none.
    A model on a CPU calls the reference.

    Raises:
        ValueError: the last dim is odd, a tensor is not contiguous, or the shapes differ.
    """
    num_rows, n = len(gate_up), gate_up.shape[-1] // 2
    fits = gate_up.shape == (num_rows, 2 * n) and (bias is None or bias.shape[1:] == gate_up.shape[1:])
    if not fits or not gate_up.is_contiguous() or not (bias is None or bias.is_contiguous()):
        raise ValueError(
            f"rows of {tuple(gate_up.shape)} and biases of {None if bias is None else tuple(bias.shape)}; give "
            "contiguous rows of one even length"
        )
    out = gate_up.new_empty((num_rows, n))
    if num_rows:
        _clamped_gate_kernel[(num_rows, triton.cdiv(n, _BLOCK))](
            gate_up,
            experts,
            bias,
            out,
            n,
            gate._replace(interleaved=tl.constexpr(gate.interleaved)),
            BLOCK=_BLOCK,
            num_warps=4,
            **tuning.early_options(gate_up.device),
        )
    return out


def clamped_gate_reference(
    gate_up: Tensor, gate: ClampedGate, experts: Tensor, bias: Tensor | None
) -> Tensor:
    """Computes `clamped_gate` in plain torch."""
    if bias is not None:
        gate_up = gate_up + bias[experts]
    if gate.interleaved:
        x, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        x, up = gate_up.chunk(2, dim=-1)
    x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return (up + gate.offset) * (x * (x * gate.alpha).sigmoid())
