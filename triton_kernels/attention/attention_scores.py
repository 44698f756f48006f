"""Attention probabilities: how much the queries of a step attend to each entry of their row.

Attention kernels never store probabilities. Where they are needed, for example to rank tokens for eviction,
they are computed again from q and the keys in the cache: first each query's log-sum-exp, then, key by key, the
probabilities summed over heads and queries. One program sums up a key in a fixed order, so equal calls return
equal bits.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from lightkv.triton_kernels.attention.variants.variant import Scored, bind
from lightkv.triton_kernels.operators import operator

from .attention_inputs import check_attention_inputs
from .attention_reference import change_reference, joined_reference, slots_reference
from .paged_kv import DEFAULT_OPTIONS, RECORDS, AttentionOptions, PagedKV
from .records import heads_record, shape_record
from .scores_kernels import lse_kernel, scores_kernel


class ScoredBatch(NamedTuple):
    """The requests of a call, as `attention_scores` takes them."""

    rows: Tensor
    q_starts: Tensor
    query_positions: Tensor
    lengths: Tensor


def scores_launch(key_dim: int, element_size: int) -> tuning.Launch:
    """Returns the tiles of `attention_scores`: small ones for float32, whose exact dot is unrolled."""
    if element_size >= 4:
        return tuning.Launch(block_m=16, block_n=32, num_warps=4, num_stages=2)
    wide = tuning.padded_dim(key_dim) > 128
    return tuning.Launch(block_m=32 if wide else 64, block_n=64, num_warps=4, num_stages=2)


@operator("attention_scores", writes=("lse", "out"), records=(*RECORDS, ScoredBatch))
def _attention_scores(
    q: Tensor,
    kv: PagedKV,
    batch: ScoredBatch,
    lse: Tensor,
    out: Tensor,
    max_q_len: int,
    options: AttentionOptions,
) -> None:
    (cache, index), num_requests, num_kv_heads = kv.for_kernels(), len(batch.rows), kv.k.shape[1]
    launch = scores_launch(q.shape[2], q.element_size())
    shape = shape_record(q, cache, q.shape[2], launch.block_m, launch.block_n, options.causal)
    bound, score_scale = bind(options.variants, options.scale_for(q.shape[2]))
    num_tiles = triton.cdiv(max_q_len * (q.shape[1] // num_kv_heads), launch.block_m)
    taken = heads_record(q), cache, index, batch, lse
    warps = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if num_requests and num_tiles:
        lse_kernel[(num_kv_heads, num_tiles, num_requests)](*taken, score_scale, bound, shape, **warps)
    if out.numel():
        width = out.shape[1]
        sizes = num_kv_heads, width, out.stride(0)
        grid = triton.cdiv(width, launch.block_n), num_requests
        scores_kernel[grid](*taken, out, *sizes, score_scale, bound, shape, **warps)


def attention_scores(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    max_q_len: int,
    width: int,
) -> Tensor:
    """Computes how much the queries attend to each entry of their row: probabilities, summed over queries and
    heads.

    Args:
        q: `[T, H, Dk]`, request after request; H is a multiple of num_kv_heads.
        kv: the layer's K/V and the index that finds it; V is not read. The dot products run in the dtype of q
            and accumulate in float32.
        rows: int32 or int64 `[B]`, each request's row of the index.
        q_starts: int32 `[B + 1]`: the queries of request b are q[q_starts[b] : q_starts[b + 1]].
        query_positions: int32 `[T]`, the entry of each query, which attends to it and to the entries before.
        lengths: int32 `[B]`, how many entries a request's row has; at most num_entries * 2**page_shift, which
            is not checked.
        max_q_len: an upper bound on the queries of a request, which sizes the grid.
        width: the number of entries to return scores for.
        options: the scale, whether the layer is causal, and its variants. The queries of a tree of guesses are
            at the last entries.

    Returns:
        float32 `[B, width]`, zero beyond a request's length. If `width` covers them, a request's entries add up
        to its number of queries times H, less what the sinks take.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    if width < 0 or max_q_len < 0:
        raise ValueError(f"width and max_q_len must be 0 or more, got {width} and {max_q_len}")
    check_attention_inputs(
        q, kv, rows, lengths, options, q_starts=q_starts, query_positions=query_positions,
        num_prefills=rows.numel(),
    )  # fmt: skip
    if not kv.lookup.is_plain:
        raise ValueError(
            f"scores are those of a row's own entries, which {type(kv.lookup).__name__} does not read in order"
        )
    out = torch.empty(len(rows), width, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    batch = ScoredBatch(rows, q_starts, query_positions, lengths)
    _attention_scores(q, kv, batch, lse, out, max_q_len, options)
    return out


def attention_scores_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Computes `attention_scores` `[B, width]`, and the log-sum-exps `[T, H]` in base 2, in plain torch, one
    request at a time, in float32, or in float64 where q is. Reads rows, q_starts and lengths on the host, so on
    a GPU it synchronises."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = options.scale_for(q.shape[2])
    num_heads, num_kv_heads = q.shape[1], kv.k.shape[1]
    out = torch.zeros(len(rows), width, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    starts = q_starts.tolist()
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        queries = slice(starts[request], starts[request + 1])
        entries = torch.arange(length, device=q.device)
        k, _ = kv.read(slots_reference(kv, row, entries))
        k = k.to(dtype)  # [L, num_kv_heads, Dk]
        # [num_kv_heads, group * n, Dk]: query heads that share a K/V head are rows of one matrix
        q_rows = q[queries].to(dtype).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.matmul(q_rows, k.permute(1, 2, 0)) * scale
        num_queries = queries.stop - queries.start
        scores = scores.view(num_heads, num_queries, length)
        scored = Scored(
            queries, request, query_positions[queries].long(), entries, length, length - num_queries
        )
        scores = change_reference(scores, options, scored)
        # [H, n], -inf where a query sees no key
        row_lse = scores.logsumexp(2)
        for joins in joined_reference(options.variants):
            row_lse = torch.logaddexp(row_lse, joins.to(dtype)[:, None])
        lse[queries] = row_lse.T * LOG2_E
        weights = scores.sub_(row_lse.clamp(min=-1e30)[..., None]).exp_()
        shown = min(length, width)
        out[request, :shown] = weights.sum((0, 1))[:shown]
    return out, lse
