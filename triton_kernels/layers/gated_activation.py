"""Multiplies the activation of a gate with its other half, in one pass over a joined projection."""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels import tuning

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
_BLOCK = 1024  # columns of a program


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Returns the activation of float32 values."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gated_activation_kernel(
    gate_up,  # [T, 2n]
    out,  # [T, n]
    n,
    stride_t,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = columns < n
    tuning.wait_early(EARLY)
    gate = tl.load(gate_up + row * stride_t + columns, mask=within, other=0.0)
    up = tl.load(gate_up + row * stride_t + n + columns, mask=within, other=0.0)
    active = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    tl.store(out + row * n + columns, active * up, mask=within)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """Returns activation(gate) · up, `[..., n]`, of `gate_up` `[..., 2n]`, whose first half is the gate.

    The activation is computed in float32 and rounded to the dtype of `gate_up` before the product, as the
    modules of a model do. `activation` is "silu", "gelu_tanh" or "gelu". A model on a CPU calls the reference.

    Raises:
        ValueError: the activation is unknown, or the last dim is odd.
    """
    if activation not in ACTIVATIONS or gate_up.shape[-1] % 2:
        raise ValueError(
            f"activation {activation!r} of a last dim of {gate_up.shape[-1]}; give one of "
            f"{', '.join(ACTIVATIONS)} and an even number"
        )
    n = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * n)
    out = rows.new_empty((*gate_up.shape[:-1], n))
    if rows.shape[0]:
        _gated_activation_kernel[(rows.shape[0], triton.cdiv(n, _BLOCK))](
            rows,
            out,
            n,
            rows.stride(0),
            ACTIVATION=activation,
            BLOCK=_BLOCK,
            num_warps=4,
            **tuning.early_options(gate_up.device),
        )
    return out


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    """Computes `gated_activation` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
