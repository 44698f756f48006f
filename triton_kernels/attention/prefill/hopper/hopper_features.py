"""The variants of attention that the kernels for compute capability 9 know, as constants of their own.

These kernels place what a variant does among their instructions: ALiBi goes into the product of q and K, values
come to shared memory beside K and V, and the bits of a tree are shifted for all columns of a thread at once. So
they take no hooks, and a call with a variant that they do not know goes to `prefill_kernel.py`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton.language as tl

from lightkv.triton_kernels.attention.variants.alibi import Alibi
from lightkv.triton_kernels.attention.variants.chunk import Chunk
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from lightkv.triton_kernels.attention.variants.sink_logits import SinkLogits
from lightkv.triton_kernels.attention.variants.softcap import Softcap
from lightkv.triton_kernels.attention.variants.tree import TreeMask
from lightkv.triton_kernels.attention.variants.values import ValueMask
from lightkv.triton_kernels.attention.variants.variant import Variant
from lightkv.triton_kernels.attention.variants.window import Window

VARIANTS = (Softcap, Alibi, Window, Chunk, TreeMask, ValueMask, SinkLogits)
FP8_VARIANTS = (Softcap, Alibi, Window, Chunk, SinkLogits)
_ALL_AFTER = 2**30  # more tokens than a request has; positions plus this fit in int32


class HopperFeatures(NamedTuple):
    """What a call has of `VARIANTS`: tensors or None, numbers or 0. `AFTER`: how many tokens after itself a
    query sees. `ADDS_COLUMNS`: the product of q and K adds the slopes times the columns of a tile
    (`hopper_scores.slope_pairs`). `tree`: the words of a tree of guesses, how many a query has, and the stride
    of queries. `added`: a mask of values, bytes for bool, of `width` keys; `coarse_scale`: of
    `hopper_values.scale_at`."""

    sink_logits: Any
    slopes: Any
    tree: Any
    added: Any
    stride_added_head: Any
    stride_added_token: Any
    width: Any
    coarse_scale: Any
    cap_scale: Any
    WINDOW: Any
    CHUNK: Any
    AFTER: Any
    SOFTCAP: Any
    ADDS_COLUMNS: Any


def adds_columns(variants: Sequence[Variant]) -> bool:
    """Returns whether the product of q and K adds ALiBi. It cannot if there is a cap, which comes before."""
    kinds = {type(one) for one in variants}
    return Alibi in kinds and Softcap not in kinds


def features_of(variants: Sequence[Variant], scale: float, causal: bool) -> tuple[HopperFeatures, float]:
    """Returns what the kernels take for variants of `VARIANTS`, and what multiplies a score, in base 2."""
    sink_logits = slopes = tree = None
    added = stride_added_head = stride_added_token = width = coarse_scale = None
    window = chunk = 0
    cap_scale, score_scale = 0.0, scale
    for one in variants:
        if isinstance(one, Softcap):
            cap_scale, score_scale = one.data(scale).cap_scale, one.rescale(scale)
        elif isinstance(one, Alibi):
            slopes = one.slopes
        elif isinstance(one, Window):
            window = one.size
        elif isinstance(one, Chunk):
            chunk = one.size
        elif isinstance(one, TreeMask):
            tree = tuple(one.data(scale))
        elif isinstance(one, ValueMask):
            added, _, width, stride_added_head, stride_added_token = one.data(scale)
        elif isinstance(one, SinkLogits):
            sink_logits = one.logits
    if added is not None:
        coarse_scale = 2.0 ** math.ceil(math.log2(score_scale * LOG2_E))
    return HopperFeatures(
        sink_logits,
        slopes,
        tree,
        added,
        stride_added_head,
        stride_added_token,
        width,
        coarse_scale,
        cap_scale,
        tl.constexpr(window),
        tl.constexpr(chunk),
        tl.constexpr(0 if causal else _ALL_AFTER),
        tl.constexpr(cap_scale != 0.0),
        tl.constexpr(adds_columns(variants)),
    ), score_scale * LOG2_E
