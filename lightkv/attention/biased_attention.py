"""Attention of one request in plain torch with any variants, and where keys after the query are seen."""

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_reference import change_reference, softmax_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants.variant import Scored

QUERY_TILE = 512  # the most queries whose scores are in memory together


def attend_with_bias(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, scored: Scored) -> Tensor:
    """Computes the attention of a request's queries, q `[n, H, Dk]`, to the keys of `scored`, k `[L,
    num_kv_heads, Dk]` and v `[L, num_kv_heads, Dv]`: `[n, H, Dv]`, float32; zeros for a query that sees no
    key."""
    group = q.shape[1] // k.shape[1]
    keys = k.to(q.dtype).permute(1, 2, 0).repeat_interleave(group, 0)  # [H, Dk, L]
    values = v.float().transpose(0, 1).repeat_interleave(group, 0)
    out = []
    for begin in range(0, len(q), QUERY_TILE):
        tile = slice(begin, min(begin + QUERY_TILE, len(q)))
        scores = torch.matmul(q[tile].transpose(0, 1), keys).float() * options.scale_for(q.shape[2])
        scores = change_reference(scores, options, scored.tile(tile.start, tile.stop))
        weights = softmax_reference(scores, options.variants)
        out.append(torch.matmul(weights, values).transpose(0, 1))
    return torch.cat(out)
