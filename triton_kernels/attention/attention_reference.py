"""Attention of one request in plain torch and float64: what the kernels of decode and prefill compute."""

import torch
from torch import Tensor

from .paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_positions: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    mask: Tensor | None = None,
) -> Tensor:
    """Computes attention of one request in float64: q `[n, H, Dk]`, k `[L, num_kv_heads, Dk]`, v `[L,
    num_kv_heads, Dv]`, query_positions int `[n]` -> `[n, H, Dv]`. The output of a query that sees no key is
    zeros. `mask`: float64 `[1 or H, n, L]` (`mask_reference`), added to the scores."""
    scale, softcap = options.scale_for(q.shape[2]), options.softcap
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, dim=1)
    v = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = bias_reference(scores, query_positions, torch.arange(len(k), device=q.device), options, mask)
    return torch.einsum("hqk,khd->qhd", softmax_reference(scores, options.sink_logits), v)


def bias_reference(
    scores: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    options: AttentionOptions,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns scores `[H, n, L]` with the bias of ALiBi and the mask added, -inf where a key is not visible."""
    if options.alibi_slopes is not None:
        distances = key_positions[None, :] - query_positions[:, None]
        scores = scores + options.alibi_slopes.to(scores.dtype)[:, None, None] * distances
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    visible = visible_reference(query_positions, key_positions, options)
    return scores.masked_fill(~visible, float("-inf"))


def visible_reference(query_positions: Tensor, key_positions: Tensor, options: AttentionOptions) -> Tensor:
    """Returns which keys the queries see, bool `[n, L]`: by causality, the windows or the chunks."""
    queries, keys = query_positions[:, None], key_positions[None, :]
    visible = keys <= queries + options.after
    if options.window:
        visible &= keys > queries - options.window
    if options.chunk:
        visible &= keys >= queries // options.chunk * options.chunk
    return visible


def softmax_reference(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Returns the weights of scores `[H, n, L]` (base e) that the heads' sinks join; zeros where a query sees
    no key.

    Weights are divided by their sum, and not made with the log-sum-exp: beside a peak of -1e9, as of a query
    that a mask hides everything from, float32 has no room for the logarithm of the sum.
    """
    peak = scores.new_full((*scores.shape[:2], 1), -1e30)  # finite, so that hidden keys weigh 0 and not NaN
    if scores.shape[2]:
        peak = torch.maximum(peak, scores.amax(2, keepdim=True))
    sinks = None if sink_logits is None else sink_logits.to(scores.dtype)[:, None, None]
    if sinks is not None:
        peak = torch.maximum(peak, sinks)
    weights = (scores - peak).exp()
    total = weights.sum(2, keepdim=True)
    if sinks is not None:
        total += (sinks - peak).exp()
    return weights / total.masked_fill(total == 0, 1.0)


def join_sinks_reference(lse: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Returns the log-sum-exp `[H, n]` (base e) of scores and the heads' sinks, from that of the scores."""
    return lse if sink_logits is None else torch.logaddexp(lse, sink_logits.to(lse.dtype)[:, None])


def slots_reference(kv: PagedKV, row: int, positions: Tensor) -> Tensor:
    """Returns the slots, int64, of the tokens at `positions` of a row, which may be a ring or have an
    indirection."""
    positions = entries = positions.long()
    if kv.ring is not None:
        sinks, size = kv.ring.sinks, kv.ring.size
        entries = torch.where(positions < sinks, positions, sinks + (positions - sinks) % size)
    if kv.indirection is None:
        return find_slots_reference(kv.index[row], entries, kv.shift)
    index = kv.index[kv.indirection[row, positions].long(), entries >> kv.shift].long()
    return index + (entries & ((1 << kv.shift) - 1))


def find_slots_reference(index_row: Tensor, positions: Tensor, shift: int) -> Tensor:
    """Returns the slots, int64, of the tokens at `positions` of one row of the index."""
    positions = positions.long()
    return index_row[positions >> shift].long() + (positions & ((1 << shift) - 1))
