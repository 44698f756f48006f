"""Learned sinks: a score of each query head that joins the softmax's sum and has no value, as in gpt-oss. It is
neither scaled nor capped."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .hooks import LOG2_E, Flags, Hooks
from .variant import Variant, check_heads

_LOG2_E = tl.constexpr(LOG2_E)


class _Data(NamedTuple):
    logits: Tensor


@triton.jit
def _join(data, rows, joins, peak, total):
    # A sink is a score without a value, so the rows that it joins start at its score, with a sum of 1.
    sinks = tl.load(data.logits + rows.heads, mask=joins, other=float("-inf")) * _LOG2_E
    new_peak = tl.maximum(peak, sinks)
    return new_peak, total * tl.exp2(peak - new_peak) + tl.exp2(sinks - new_peak)


@dataclass(frozen=True, eq=False)
class SinkLogits(Variant):
    """`logits`: float32 `[num_heads]`, contiguous.

    A log-sum-exp contains them, so of several results that are merged, only one may have sinks.
    """

    logits: Tensor

    hooks = Hooks(join=tl.constexpr(_join))
    flags = Flags(has_join=True)
    on_hopper = (16, 8)

    def check(self, q: Tensor, num_requests: int) -> None:
        check_heads(q, logits=self.logits)

    def data(self, scale: float) -> _Data:
        return _Data(self.logits)

    def for_hopper(self, scale: float) -> dict[str, Any]:
        return {"sink_logits": self.logits}

    def joins_reference(self) -> Tensor:
        return self.logits
