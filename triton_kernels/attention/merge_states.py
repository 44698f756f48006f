"""Merges attention over several parts of the keys into attention over all of them, in plain torch.

A part's result is its normalised output and the log-sum-exp of its scores. The outputs, weighted by these, add
up to what one softmax over all keys computes. So different kernels may attend to the parts, with different
queries (StreamingLLM's sinks), or to parts that several batches share. Learned sinks (`AttentionOptions`)
belong to exactly one of the parts, whose log-sum-exp contains them.
"""

import torch
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors

_TAKEN = Tensors(
    partial_out="float32 or float64 [P, T, H, Dv]",
    partial_lse="float32 or float64 [P, T, H]",
    out="floats [T, H, Dv]",
    lse="float32 or float64 [T, H]",
)


def merge_states(
    partial_out: Tensor, partial_lse: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges the attention of the same queries to several parts of their keys. Nothing synchronises, so a CUDA
    graph can capture it.

    Args:
        partial_out: float32 or float64 `[P, T, H, Dv]`, each part's normalised output. Any number where the
            part is empty.
        partial_lse: of that type, `[P, T, H]`, the log-sum-exp of each part's scaled scores in base 2; -inf
            where the part is empty.
        out: `[T, H, Dv]` of any floating type to write to; None for new memory.
        lse: `[T, H]` to write to; None for new memory.

    Returns:
        `out` and `lse`, the output and log-sum-exp (base 2) over all parts, which can be merged further; zero
        and -inf where every part is empty.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _TAKEN.check({}, partial_out=partial_out, partial_lse=partial_lse, out=out, lse=lse)
    if not len(partial_out):
        raise ValueError("partial_out has no parts; give at least one")
    peak = partial_lse.amax(0).clamp(min=-1e30)  # finite, so that empty parts weigh 0 and not NaN
    weights = torch.exp2(partial_lse - peak)  # [P, T, H]
    total = weights.sum(0)
    weights = weights / total.clamp(min=torch.finfo(total.dtype).tiny)
    # The output of an empty part may be NaN.
    weighted = torch.where(weights[..., None] > 0, partial_out * weights[..., None], 0.0)
    merged, merged_lse = weighted.sum(0), peak + total.log2()
    return (
        merged if out is None else out.copy_(merged),
        merged_lse if lse is None else lse.copy_(merged_lse),
    )
