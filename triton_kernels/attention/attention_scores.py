"""Attention probabilities: how much the queries of a step attend to each entry of their row.

Attention kernels never store probabilities. Where they are needed, for example to rank tokens for eviction,
they are computed again from q and the keys in the cache: first each query's log-sum-exp, then, key by key, the
probabilities summed over heads and queries. One program sums up a key in a fixed order, so equal calls return
equal bits.
"""

import torch
import triton
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.quantised.unpack import as_words, is_packed

from .attend_keys import LOG2_E, score_scales
from .attention_inputs import check_attention_inputs
from .attention_mask import AttentionMask, mask_reference, mask_strides
from .attention_reference import bias_reference, find_slots_reference, join_sinks_reference
from .paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV
from .scores_kernels import lse_kernel, scores_kernel


@torch.library.custom_op("lightkv::attention_lse", mutates_args=("lse",))
def _attention_lse(
    q: Tensor,
    k_cache: Tensor,
    columns: Tensor | None,
    index: Tensor,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    sink_logits: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    mask_columns: Tensor | None,
    lse: Tensor,
    max_q_len: int,
    scale: float,
    shift: int,
    window: int,
    chunk: int,
    after: int,
    softcap: float,
    layer_format: int,
) -> None:
    num_requests, num_kv_heads = len(rows), k_cache.shape[1]
    if num_requests == 0 or max_q_len == 0:
        return
    group = q.shape[1] // num_kv_heads
    launch = tuning.scores_launch(q.shape[2], q.element_size())
    score_scale, cap_scale = score_scales(scale, softcap)
    lse_kernel[(num_kv_heads, triton.cdiv(max_q_len * group, launch.block_m), num_requests)](
        q,
        k_cache,
        columns,
        index,
        rows,
        q_starts,
        query_positions,
        lengths,
        sink_logits,
        alibi_slopes,
        mask,
        mask_columns,
        lse,
        score_scale,
        cap_scale,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        *(None, None) if columns is None else columns.stride()[:2],
        index.stride(0),
        *mask_strides(mask),
        GROUP=group,
        DK=q.shape[2],
        BLOCK_M=launch.block_m,
        BLOCK_DK=tuning.padded_dim(q.shape[2]),
        BLOCK_N=launch.block_n,
        SHIFT=shift,
        WINDOW=window,
        CHUNK=chunk,
        AFTER=after,
        SOFTCAP=softcap != 0.0,
        FORMAT=layer_format,
        PACKED=layer_format != 0 and is_packed(q),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


_attention_lse.register_fake(lambda *_: None)  # the output is an argument


@torch.library.custom_op("lightkv::attention_scores", mutates_args=("out",))
def _attention_scores(
    q: Tensor,
    k_cache: Tensor,
    columns: Tensor | None,
    index: Tensor,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    mask_columns: Tensor | None,
    lse: Tensor,
    out: Tensor,
    scale: float,
    shift: int,
    window: int,
    chunk: int,
    after: int,
    softcap: float,
    layer_format: int,
) -> None:
    num_requests, width = out.shape
    if num_requests == 0 or width == 0:
        return
    launch = tuning.scores_launch(q.shape[2], q.element_size())
    score_scale, cap_scale = score_scales(scale, softcap)
    scores_kernel[(triton.cdiv(width, launch.block_n), num_requests)](
        q,
        k_cache,
        columns,
        index,
        rows,
        q_starts,
        query_positions,
        lengths,
        alibi_slopes,
        mask,
        mask_columns,
        lse,
        out,
        k_cache.shape[1],
        width,
        score_scale,
        cap_scale,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        *(None, None) if columns is None else columns.stride()[:2],
        index.stride(0),
        out.stride(0),
        *mask_strides(mask),
        GROUP=q.shape[1] // k_cache.shape[1],
        DK=q.shape[2],
        BLOCK_M=launch.block_m,
        BLOCK_DK=tuning.padded_dim(q.shape[2]),
        BLOCK_N=launch.block_n,
        SHIFT=shift,
        WINDOW=window,
        CHUNK=chunk,
        AFTER=after,
        SOFTCAP=softcap != 0.0,
        FORMAT=layer_format,
        PACKED=layer_format != 0 and is_packed(q),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


_attention_scores.register_fake(lambda *_: None)  # the output is an argument


def attention_lse(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    query_positions: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    max_q_len: int,
    mask: AttentionMask | None = None,
) -> Tensor:
    """Computes the log-sum-exp of each query's scores, in base 2, the head's sink included: float32 `[T, H]`,
    -inf where a query sees no key and has no sink, or belongs to no request. Arguments and errors are those of
    `attention_scores`."""
    scale = check_attention_inputs(q, kv, rows, lengths, options, None, None, mask)
    _check_queries(q, rows, q_starts, query_positions)
    if kv.ring is not None or kv.indirection is not None:
        raise ValueError("scores are those of a row's own entries; pass kv without a ring and an indirection")
    if max_q_len < 0:
        raise ValueError(f"max_q_len must be 0 or more, got {max_q_len}")
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    _attention_lse(
        q,
        as_words(kv.k, kv.format.k),
        kv.scales,
        kv.index,
        rows,
        q_starts,
        query_positions,
        lengths,
        options.sink_logits,
        options.alibi_slopes,
        None if mask is None else mask.for_kernel(),
        None if mask is None else mask.columns,
        lse,
        max_q_len,
        scale,
        kv.shift,
        options.window,
        options.chunk,
        options.after,
        options.softcap,
        kv.format_code,
    )
    return lse


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
    mask: AttentionMask | None = None,
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
        lengths: int32 `[B]`, how many entries a request's row has; at most num_entries * 2**shift, which is not
            checked.
        max_q_len: an upper bound on the queries of a request, which sizes the grid.
        width: the number of entries to return scores for.
        options: scale, windows, soft-cap, chunk, sinks, ALiBi, and whether the layer is causal.
        mask: what hides keys or changes scores beside the options, with a row for each query of q. A tree's
            queries are at the last entries.

    Returns:
        float32 `[B, width]`, zero beyond a request's length. If `width` covers them, a request's entries add up
        to its number of queries times H, less what the sinks take.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    if width < 0:
        raise ValueError(f"width must be 0 or more, got {width}")
    lse = attention_lse(
        q, kv, rows, q_starts, query_positions, lengths, options, max_q_len=max_q_len, mask=mask
    )
    out = torch.empty(len(rows), width, dtype=torch.float32, device=q.device)
    _attention_scores(
        q,
        as_words(kv.k, kv.format.k),
        kv.scales,
        kv.index,
        rows,
        q_starts,
        query_positions,
        lengths,
        options.alibi_slopes,
        None if mask is None else mask.for_kernel(),
        None if mask is None else mask.columns,
        lse,
        out,
        options.scale_for(q.shape[2]),
        kv.shift,
        options.window,
        options.chunk,
        options.after,
        options.softcap,
        kv.format_code,
    )
    return out


def _check_queries(q: Tensor, rows: Tensor, q_starts: Tensor, query_positions: Tensor) -> None:
    """Raises ValueError where q_starts or query_positions do not fit. Reads no tensor's contents."""
    for name, tensor, length in (
        ("q_starts", q_starts, len(rows) + 1),
        ("query_positions", query_positions, len(q)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != (length,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 [{length}], got {tensor.dtype} {tuple(tensor.shape)}"
            )


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
    mask: AttentionMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `attention_scores` `[B, width]` and `attention_lse` `[T, H]` in plain torch, one request at a
    time, in float32, or in float64 where q is. Reads rows, q_starts and lengths on the host, so on a GPU it
    synchronises."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale, softcap = options.scale_for(q.shape[2]), options.softcap
    num_heads, num_kv_heads = q.shape[1], kv.k.shape[1]
    out = torch.zeros(len(rows), width, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    starts = q_starts.tolist()
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        queries = slice(starts[request], starts[request + 1])
        entries = torch.arange(length, device=q.device)
        k, _ = kv.read(find_slots_reference(kv.index[row], entries, kv.shift))
        k = k.to(dtype)  # [L, num_kv_heads, Dk]
        # [num_kv_heads, group * n, Dk]: query heads that share a K/V head are rows of one matrix
        q_rows = q[queries].to(dtype).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.matmul(q_rows, k.permute(1, 2, 0)) * scale
        scores = scores.view(num_heads, queries.stop - queries.start, length)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        values = None if mask is None else mask_reference(mask, queries, request, length)
        scores = bias_reference(scores, query_positions[queries].long(), entries, options, values)
        # [H, n], -inf where a query sees no key
        row_lse = join_sinks_reference(scores.logsumexp(2), options.sink_logits)
        lse[queries] = row_lse.T * LOG2_E
        weights = scores.sub_(row_lse.clamp(min=-1e30)[..., None]).exp_()
        shown = min(length, width)
        out[request, :shown] = weights.sum((0, 1))[:shown]
    return out, lse
