"""Attention of one request in plain torch: what the kernels of decode and prefill compute."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Scored, Variant, limits, visible_reference

from .paged_kv import AttentionOptions, PagedKV

QUERY_TILE = 512  # the most queries whose scores are in memory together


def attend_reference(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, scored: Scored) -> Tensor:
    """Computes `attend_request` in float64."""
    return attend_request(q.double(), k, v, options, scored)


def requests_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
    queries: Sequence[slice],
) -> Tensor:
    """Computes attention of each request's last tokens, which are `queries` of q, in float64: `[T, H, Dv]`, of
    the type of q, and zeros for queries of no request. A query that is in several gets the output of the first.
    Reads lengths and rows on the host, so on a GPU it synchronises."""
    out = q.new_zeros((*q.shape[:2], kv.value_dim))
    lookup = kv.lookup.of_layer(limits(options.variants))
    requests = list(enumerate(zip(rows.tolist(), lengths.tolist(), queries, strict=True)))
    for request, (row, length, some) in reversed(requests):
        positions = lookup.keys_reference(length, q.device)
        k, v = kv.read(lookup.slots_reference(kv.index, row, positions))
        k = lookup.rotate_reference(k, request)
        scored = Scored.of_last(some, request, len(positions), q.device)
        out[some] = attend_reference(q[some], k, v, options, scored).to(q.dtype)
    return out


def queries_between(starts: Sequence[int]) -> list[slice]:
    """Returns the queries of each request: from its start to the next one."""
    return [slice(begin, end) for begin, end in pairwise(starts)]


def attend_request(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, scored: Scored) -> Tensor:
    """Computes the attention of a request's queries, q `[n, H, Dk]`, to the keys of `scored`, k `[L,
    num_kv_heads, Dk]` and v `[L, num_kv_heads, Dv]`, with any variants: `[n, H, Dv]`, zeros for a query that
    sees no key. Products of q and k are computed in the type of q, all else and the output in float32, or in
    float64 where q is."""
    dtype, num_kv_heads = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    keys, values = k.to(q.dtype).permute(1, 2, 0), v.to(dtype).transpose(0, 1)
    out = torch.empty(len(q), q.shape[1], v.shape[2], dtype=dtype, device=q.device)
    for begin in range(0, len(q), QUERY_TILE):
        tile = slice(begin, min(begin + QUERY_TILE, len(q)))
        heads = q[tile].transpose(0, 1)  # [H, n, Dk]; those that share a K/V head are rows of one product
        products = torch.matmul(heads.reshape(num_kv_heads, -1, q.shape[2]), keys).to(dtype)
        scores = products.view(*heads.shape[:2], len(k)) * options.scale_for(q.shape[2])
        scores = change_reference(scores, options, scored.tile(tile.start, tile.stop))
        weights = softmax_reference(scores, options.variants).view(products.shape)
        out[tile] = torch.matmul(weights, values).view(*heads.shape[:2], -1).transpose(0, 1)
    return out


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
