"""Steps of prefills and decodes, as `mixed_attention` takes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.mixed_attention import (
    MixedPlan,
    mixed_plan,
)
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV
from tests.support.attention.caches import poisoned_cache, starts


class Step(NamedTuple):
    """The tensors of `mixed_attention`, in its order."""

    q: Tensor
    kv: PagedKV
    rows: Tensor
    q_starts: Tensor
    lengths: Tensor

    def plan(self, options: AttentionOptions = DEFAULT_OPTIONS, *, num_queries: int = 1) -> MixedPlan:
        return mixed_plan(
            self.rows,
            self.q_starts,
            self.lengths,
            HeadShape.of(self.q, self.kv),
            num_tokens=len(self.q),
            dtype=self.q.dtype,
            options=options,
            num_queries=num_queries,
        )


def make_step(
    prefills: list[tuple[int, int]],
    decodes: list[int],
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    group: int = 2,
    num_kv_heads: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    shift: int = 0,
    num_queries: int = 1,
    surplus: int = 0,
) -> Step:
    """Makes a step with `surplus` queries between prefills and decodes that belong to no request."""
    lengths = [q_len + prefix for q_len, prefix in prefills] + decodes
    cache = poisoned_cache(
        lengths,
        device=device,
        dtype=dtype,
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        shift=shift,
    )
    q_lens = [q_len for q_len, _ in prefills]
    num_tokens = sum(q_lens) + surplus + len(decodes) * num_queries
    q = torch.randn(num_tokens, group * num_kv_heads, key_dim).to(device, dtype)
    return Step(q, cache.kv, cache.rows, starts(q_lens, device), cache.lengths)
