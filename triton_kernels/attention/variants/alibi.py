"""ALiBi, attention with linear biases (Press et al., 2022): slope * (key position - query position) is added to
the scaled score, also for keys after the query."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hooks import LOG2_E, Flags, Hooks
from .variant import Scored, Variant, check_heads

_LOG2_E = tl.constexpr(LOG2_E)


class _Data(NamedTuple):
    slopes: Tensor


@triton.jit
def load_slopes(slopes, heads, in_tile):
    """Returns the slopes of a tile's rows in base 2, [BLOCK_M]."""
    return tl.load(slopes + heads, mask=in_tile, other=0.0) * _LOG2_E


@triton.jit
def _start(data, rows):
    return (load_slopes(data.slopes, rows.heads, rows.in_tile),)


@triton.jit
def _score(data, state, loaded, scores, score_scale):
    # One multiply-add a score; what a row adds to all scores of the tile is its offset.
    columns = tl.arange(0, scores.shape[1]).to(tl.float32)
    return scores + (state[0] / score_scale)[:, None] * columns[None, :]


@triton.jit
def _offset(data, state, offset, start, query_positions):
    # Positions are subtracted as integers, so large ones lose no precision.
    return offset + state[0] * (start - query_positions).to(tl.float32)


@dataclass(frozen=True, eq=False)
class Alibi(Variant):
    """`slopes`: float32 `[num_heads]`, contiguous, as `alibi_slopes` makes them."""

    slopes: Tensor

    hooks = Hooks(start=tl.constexpr(_start), score=tl.constexpr(_score), offset=tl.constexpr(_offset))
    flags = Flags(has_offset=True, reads_positions=True)
    on_hopper = (16, 8)

    def check(self, q: Tensor, num_requests: int) -> None:
        check_heads(q, slopes=self.slopes)

    def data(self, scale: float) -> _Data:
        return _Data(self.slopes)

    def for_hopper(self, scale: float) -> dict[str, Any]:
        return {"slopes": self.slopes}

    def scores_reference(self, scores: Tensor, scored: Scored) -> Tensor:
        distances = scored.keys[None, :] - scored.positions[:, None]
        return scores + self.slopes.to(scores.dtype)[:, None, None] * distances


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
    # Made on the device: a copy from the host could not be captured in a CUDA graph.
    heads = torch.arange(num_heads, device=device, dtype=torch.float64)
    power = 1 << (num_heads.bit_length() - 1)  # the largest power of two that is no larger
    others = 2 * (heads - power) + 1  # every second slope of twice the power
    exponents = torch.where(heads < power, (heads + 1) / power, others / (2 * power))
    return torch.exp2(exponents * -max_bias).float()
