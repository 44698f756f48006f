"""Attention of one request in float64, in the two steps between which a test hides keys and adds biases."""

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants import SinkLogits, Softcap
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E


def scores_of(
    q: Tensor, kv: PagedKV, row: Tensor, length: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Returns the scores of queries `[n, H, Dk]` and the first `length` keys, `[H, n, length]`, with the
    soft-cap, and V of these keys, `[length, H, Dv]`."""
    num_heads, key_dim = q.shape[1:]
    slots = slots_reference(kv, row, torch.arange(length, device=q.device))
    k, v = (cache[slots].double().repeat_interleave(num_heads // cache.shape[1], 1) for cache in kv[:2])
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * options.scale_for(key_dim)
    softcap = options.of(Softcap)
    return scores if softcap is None else softcap.cap * torch.tanh(scores / softcap.cap), v


def weigh(scores: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the softmax over keys and sink of scores, -inf where a key is hidden: the output `[n, H, Dv]`,
    the log-sum-exp `[n, H]` in base 2, and the probabilities `[H, n, length]`."""
    sinks = options.of(SinkLogits)
    column = torch.full((*scores.shape[:2], 1), -torch.inf, dtype=torch.float64, device=scores.device)
    if sinks is not None:
        column[:] = sinks.logits.double()[:, None, None]
    columns = torch.cat([scores, column], 2)
    weights = columns.softmax(2).nan_to_num(0.0)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v), columns.logsumexp(2).T * LOG2_E, weights
