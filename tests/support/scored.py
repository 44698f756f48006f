"""The log-sum-exps that `attention_scores` computes on the way, for tests that compare them by themselves."""

from torch import Tensor

from lightkv.triton_kernels.attention.attention_scores import ScoredBatch, _compute
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
    batch = ScoredBatch(rows, q_starts, query_positions, lengths)
    return _compute(q, kv, batch, options, max_q_len, None)
