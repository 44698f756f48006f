"""The log-sum-exps of queries in float64."""

import math

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants import (
    Alibi,
    Chunk,
    SinkLogits,
    Softcap,
    TreeMask,
    ValueMask,
    Window,
)
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from tests.support.attention.caches import Cache


def assert_lse(lse: Tensor, q: Tensor, cache: Cache, options: AttentionOptions, *, num_queries: int) -> None:
    """Compares the log-sum-exp of every query's scores with float64."""
    kv, scale = cache.kv, options.scale_for(q.shape[2])
    window, softcap = options.of(Window), options.of(Softcap)
    for request, length in enumerate(cache.lengths.tolist()):
        positions = torch.arange(length, device=q.device)
        slots = slots_reference(kv, cache.rows[request], positions)
        keys = kv.k[slots].double().repeat_interleave(q.shape[1] // kv.k.shape[1], 1)
        for query in range(num_queries):
            token, position = request * num_queries + query, length - num_queries + query
            scores = torch.einsum("hd,khd->hk", q[token].double(), keys) * scale
            if softcap is not None:
                scores = softcap.cap * torch.tanh(scores / softcap.cap)
            seen = (positions <= position) & (positions > (-1 if window is None else position - window.size))
            expected = torch.logsumexp(scores[:, seen], 1) * LOG2_E
            torch.testing.assert_close(lse[token].double(), expected, atol=2e-2, rtol=1e-3)


def added_by_masks(options: AttentionOptions, queries: slice, request: int, length: int) -> Tensor:
    """Returns what masks and trees of guesses add to a request's scores, `[1 or H, n, length]`."""
    values, tree = options.of(ValueMask), options.of(TreeMask)
    added = torch.zeros(1, queries.stop - queries.start, length, dtype=torch.float64)
    if values is not None:
        column = 0 if values.columns is None else int(values.columns[request])
        own = values.values[..., queries, column : column + length].cpu()
        if own.dtype == torch.bool:
            own = torch.zeros(own.shape).masked_fill(~own, -torch.inf)
        own = own.double() if own.dim() == 3 else own.double()[None]
        added = torch.nn.functional.pad(own, (0, length - own.shape[2]), value=-torch.inf)
    if tree is not None:
        size = 8 * tree.bits.dtype.itemsize
        rows = [
            sum(word % 2**size << size * place for place, word in enumerate(words))
            for words in tree.bits[queries].tolist()
        ]
        count, shown = len(rows), min(len(rows), length)
        own = torch.tensor([[row >> query & 1 for query in range(count)] for row in rows]).view(count, count)
        added[..., length - shown :].masked_fill_(own[:, count - shown :] == 0, -torch.inf)
    return added


def lse_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Computes the log-sum-exp of each query's scores and sink in base 2, in float64, and returns it as
    float32; -inf where it has neither."""
    scale, sinks = options.scale_for(q.shape[2]), options.of(SinkLogits)
    window, chunk = options.of(Window), options.of(Chunk)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for request, row in enumerate(rows.tolist()):
        begin, end, length = int(q_starts[request]), int(q_starts[request + 1]), int(lengths[request])
        keys = torch.arange(length, device=q.device)
        k = kv.k[slots_reference(kv, row, keys)].double()
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->qhk", q[begin:end].double(), k) * scale
        softcap = options.of(Softcap)
        if softcap is not None:
            scores = softcap.cap * torch.tanh(scores / softcap.cap)
        positions = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        alibi = options.of(Alibi)
        if alibi is not None:
            scores += alibi.slopes.double()[:, None] * (keys - positions)[:, None]
        visible = (keys <= positions) if options.causal else (keys >= 0).expand(end - begin, -1)
        if window is not None:
            visible = visible & (keys > positions - window.size)
        if chunk is not None:
            visible = visible & (keys // chunk.size == positions // chunk.size)
        scores += added_by_masks(options, slice(begin, end), request, length).transpose(0, 1).to(q.device)
        lse[begin:end] = scores.masked_fill(~visible[:, None], -torch.inf).logsumexp(2) / math.log(2)
        if sinks is not None:
            lse[begin:end] = torch.logaddexp2(lse[begin:end], sinks.logits / math.log(2))
    return lse
