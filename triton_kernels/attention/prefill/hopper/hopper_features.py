"""What a call of the kernels for compute capability 9 has beside plain attention, as constants of their own.

These kernels place what a variant does among their instructions: ALiBi goes into the product of q and K, values
are copied to shared memory beside K and V, and the bits of a tree are shifted for all columns of a thread at
once. So they call no hooks of a variant: it says itself which of these features it is (`Variant.for_hopper`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton.language as tl

from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from lightkv.triton_kernels.attention.variants.variant import Variant

_ALL_AFTER = 2**30  # more tokens than a request has; positions plus this fit in int32


class HopperFeatures(NamedTuple):
    """What a call has: tensors or None, numbers or 0. `AFTER`: how many tokens after itself a query sees.
    `ADDS_COLUMNS`: the product of q and K adds the slopes times the columns of a tile
    (`hopper_scores.slope_pairs`). `tree`: the words of a tree of guesses, how many a query has, and the stride
    of queries. `added`: a mask of values, bytes for bool, of `width` keys; `coarse_scale`: of
    `hopper_values.scale_at`."""

    sink_logits: Any = None
    slopes: Any = None
    tree: Any = None
    added: Any = None
    stride_added_head: Any = None
    stride_added_token: Any = None
    width: Any = None
    coarse_scale: Any = None
    cap_scale: Any = 0.0
    WINDOW: Any = tl.constexpr(0)
    CHUNK: Any = tl.constexpr(0)
    AFTER: Any = tl.constexpr(0)
    SOFTCAP: Any = tl.constexpr(False)
    ADDS_COLUMNS: Any = tl.constexpr(False)


def features_of(variants: Sequence[Variant], scale: float, causal: bool) -> tuple[HopperFeatures, float]:
    """Returns what the kernels take for variants that run on them, and what multiplies a score, in base 2."""
    features = HopperFeatures(AFTER=tl.constexpr(0 if causal else _ALL_AFTER))
    for one in variants:
        features = features._replace(**one.for_hopper(scale))
        scale = one.rescale(scale)
    # A cap comes before ALiBi, so the product cannot add it then.
    adds_columns = features.slopes is not None and not features.SOFTCAP.value
    return features._replace(ADDS_COLUMNS=tl.constexpr(adds_columns)), scale * LOG2_E
