"""Attention of one request in plain torch and float64: what the kernels of decode and prefill compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Scored, Variant, visible_reference

from .paged_kv import AttentionOptions, PagedKV


def attend_reference(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, scored: Scored) -> Tensor:
    """Computes attention of one request in float64: q `[n, H, Dk]`, k `[L, num_kv_heads, Dk]`, v `[L,
    num_kv_heads, Dv]` -> `[n, H, Dv]`. The output of a query that sees no key is zeros."""
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * options.scale_for(q.shape[2])
    scores = change_reference(scores, options, scored)
    return torch.einsum("hqk,khd->qhd", softmax_reference(scores, options.variants), v)


def change_reference(scores: Tensor, options: AttentionOptions, scored: Scored) -> Tensor:
    """Returns scaled scores `[H, n, L]` as the variants change them, -inf where a key is not visible."""
    for one in options.variants:
        scores = one.scores_reference(scores, scored)
    visible = visible_reference(options.variants, options.causal, scored)
    return scores.masked_fill(~visible, float("-inf"))


def softmax_reference(scores: Tensor, variants: Sequence[Variant]) -> Tensor:
    """Returns the weights of scores `[H, n, L]` (base e), with what joins their sums; zeros where a query sees
    no key.

    Weights are divided by their sum, and not made with the log-sum-exp: beside a peak of -1e9, as of a query
    that a mask hides everything from, float32 has no room for the logarithm of the sum.
    """
    peak = scores.new_full((*scores.shape[:2], 1), -1e30)  # finite, so that hidden keys weigh 0 and not NaN
    if scores.shape[2]:
        peak = torch.maximum(peak, scores.amax(2, keepdim=True))
    joined = [one.to(scores.dtype)[:, None, None] for one in joined_reference(variants)]
    for one in joined:
        peak = torch.maximum(peak, one)
    weights = (scores - peak).exp()
    total = weights.sum(2, keepdim=True)
    for one in joined:
        total += (one - peak).exp()
    return weights / total.masked_fill(total == 0, 1.0)


def joined_reference(variants: Sequence[Variant]) -> list[Tensor]:
    """Returns the scores, `[H]` each, that join the sums of the softmax."""
    return [joins for one in variants if (joins := one.joins_reference()) is not None]


def slots_reference(kv: PagedKV, row: int, positions: Tensor) -> Tensor:
    """Returns the slots, int64, of the tokens at `positions` of a row."""
    return kv.lookup.slots_reference(kv.index, row, positions.long())
