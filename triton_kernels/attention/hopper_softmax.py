"""The softmax of a computing warpgroup's rows in `prefill_hopper`: its start, and a tile of scores (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attend_keys import LOG2_E

_LOG2_E = gl.constexpr(LOG2_E)


@gluon.jit
def start_softmax(
    sink_logits, tile, HALF: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr
):
    """Returns the peak and the sum with which the softmax of a warpgroup's rows starts; as `start_softmax` in
    `attend_keys`."""
    # The peak starts at a finite number, not at -inf: weights of a row whose keys are all masked are 0, not
    # NaN.
    peak = gl.full([ROWS], -1.0e30, gl.float32, layout)
    total = gl.full([ROWS], 0.0, gl.float32, layout)
    if sink_logits is not None:
        heads = tile[0] * GROUP + (tile[2] + HALF * ROWS + gl.arange(0, ROWS, layout)) % GROUP
        sinks = gl.load(sink_logits + heads) * _LOG2_E
        peak = gl.maximum(peak, sinks)
        total = gl.exp2(sinks - peak)
    return peak, total


@gluon.jit
def online_softmax(
    s,
    peak,
    total,
    first_key,
    positions,
    scales,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Returns the weights of a tile's scores and the factor by which earlier sums decay; as in
    `attend_keys`."""
    layout: gl.constexpr = s.type.layout
    BLOCK_N: gl.constexpr = s.shape[1]
    score_scale, cap_scale = scales
    if SOFTCAP:
        s = 2.0 / (1.0 + gl.exp(-s * cap_scale)) - 1.0  # tanh
    if MASKED:
        keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        visible = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        if CHUNK > 0:
            visible = visible & (keys[None, :] >= (positions // CHUNK * CHUNK)[:, None])
        s = gl.where(visible, s, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(s, 1) * score_scale)
    weights = gl.exp2(s * score_scale - new_peak[:, None])
    decay = gl.exp2(peak - new_peak)
    total = total * decay + gl.sum(weights, 1)
    return weights, decay, new_peak, total
