"""The log-sum-exps that `attention_scores` computes on the way, for tests that compare them by themselves."""

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_scores import ScoredBatch, _attention_scores, attention_scores
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV


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
) -> Tensor:
    """Returns the log-sum-exp of each query's scores, in base 2, the head's sink included: float32 `[T, H]`,
    -inf where a query sees no key and has no sink, or belongs to no request. Arguments and errors are those of
    `attention_scores`."""
    args = q, kv, rows, q_starts, query_positions, lengths, options
    nothing = attention_scores(*args, max_q_len=max_q_len, width=0)  # makes the checks
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    batch = ScoredBatch(rows, q_starts, query_positions, lengths)
    _attention_scores(q, kv, batch, lse, nothing, max_q_len, options)
    return lse
