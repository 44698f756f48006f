"""The slopes of ALiBi, attention with linear biases (Press et al., 2022), for any number of heads."""

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, max_bias: float = 8.0, device: torch.device | str | None = None) -> Tensor:
    """Returns the slope of each query head: float32 `[num_heads]`, contiguous.

    For a power of two of heads, head h has 2 ** (-max_bias * (h + 1) / num_heads). Otherwise the first heads
    have the slopes of the largest power of two below, and the others every second slope of twice that power, as
    in the paper's code, Bloom, Falcon and MPT. `max_bias` is 8 there; in MPT it is `alibi_bias_max`. Falcon
    multiplies the bias by the scale of its scores, too, so its slopes are these times `head_dim ** -0.5`.

    Raises:
        ValueError: `num_heads` or `max_bias` is not positive.
    """
    if num_heads < 1 or not max_bias > 0:
        raise ValueError(f"heads and the largest bias must be positive; got {num_heads} heads and {max_bias}")
    power = 1 << (num_heads.bit_length() - 1)  # the largest power of two that is no larger
    slopes = _geometric(power, max_bias) + _geometric(2 * power, max_bias)[::2][: num_heads - power]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _geometric(num: int, max_bias: float) -> list[float]:
    return [2.0 ** (-max_bias * (head + 1) / num) for head in range(num)]
