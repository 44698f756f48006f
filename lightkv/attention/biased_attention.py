"""Attention of one request in plain torch where scores have a bias, as with ALiBi and masks, or where keys
after the query are seen."""

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.attention_reference import bias_reference, softmax_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions

QUERY_TILE = 512  # the most queries whose scores are in memory together


def attend_with_bias(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, mask: Tensor | None = None
) -> Tensor:
    """Computes the attention of a request's last tokens, q `[n, H, Dk]`, to its tokens, k `[L, num_kv_heads,
    Dk]` and v `[L, num_kv_heads, Dv]`: `[n, H, Dv]`, float32; zeros for a query that sees no key.

    `mask`: `[1 or H, n, L]`, added to the scores (`mask_reference`).
    """
    num_queries, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    keys = k.to(q.dtype).permute(1, 2, 0).repeat_interleave(group, 0)  # [H, Dk, L]
    values = v.float().transpose(0, 1).repeat_interleave(group, 0)
    key_positions = torch.arange(length, device=q.device)
    query_positions = torch.arange(length - num_queries, length, device=q.device)
    out = []
    for begin in range(0, num_queries, QUERY_TILE):
        tile = slice(begin, begin + QUERY_TILE)
        scores = torch.matmul(q[tile].transpose(0, 1), keys).float() * options.scale_for(q.shape[2])
        if options.softcap:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        added = None if mask is None else mask[:, tile]
        scores = bias_reference(scores, query_positions[tile], key_positions, options, added)
        weights = softmax_reference(scores, options.sink_logits)
        out.append(torch.matmul(weights, values).transpose(0, 1))
    return torch.cat(out)
