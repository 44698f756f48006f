"""Attention probabilities: how much the queries of a step attend to each entry of their row.

Attention kernels never store probabilities. Where they are needed, for example to rank tokens for eviction,
they are computed again from q and the keys in the cache, in plain torch.
"""

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Scored

from .attention_inputs import check_attention_inputs
from .attention_reference import queries_between, slots_reference, weights_of_request
from .paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV


def attention_scores(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    width: int,
) -> Tensor:
    """Computes how much the queries attend to each entry of their row: probabilities, summed over queries and
    heads. Reads rows, q_starts and lengths on the host, so on a GPU it synchronises.

    Args:
        q: `[T, H, Dk]`, request after request; H is a multiple of num_kv_heads.
        kv: the layer's K/V and the index that finds it. Products and sums are computed in float32, or in
            float64 where q is.
        rows: int32 or int64 `[B]`, each request's row of the index.
        q_starts: int32 `[B + 1]`: the queries of request b are q[q_starts[b] : q_starts[b + 1]].
        query_positions: int32 `[T]`, the entry of each query, which attends to it and to the entries before.
        lengths: int32 `[B]`, how many entries a request's row has; at most num_entries * 2**page_shift, which
            is not checked.
        width: the number of entries to return scores for.
        options: the scale, whether the layer is causal, and its variants. The queries of a tree of guesses are
            at the last entries.

    Returns:
        float32, or float64 where q is, `[B, width]`, zero beyond a request's length. If `width` covers them, a
        request's entries add up to its number of queries times H, less what the sinks take.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    if width < 0:
        raise ValueError(f"width must be 0 or more, got {width}")
    check_attention_inputs(
        q, kv, rows, lengths, options, q_starts=q_starts, query_positions=query_positions,
        num_prefills=rows.numel(),
    )  # fmt: skip
    if not kv.lookup.is_plain:
        raise ValueError(
            f"scores are those of a row's own entries, which {type(kv.lookup).__name__} does not read in order"
        )
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    out = torch.zeros(len(rows), width, dtype=q.dtype, device=q.device)
    requests = zip(rows.tolist(), lengths.tolist(), queries_between(q_starts.tolist()), strict=True)
    for request, (row, length, queries) in enumerate(requests):
        entries = torch.arange(length, device=q.device)
        k, _ = kv.read(slots_reference(kv, row, entries))
        own_begin = length - (queries.stop - queries.start)
        positions = query_positions[queries].long()
        scored = Scored(queries, request, positions, entries, length, own_begin)
        for _, weights in weights_of_request(q[queries], k, options, scored):
            out[request, : min(length, width)] += weights.sum((0, 1))[:width]
    return out
