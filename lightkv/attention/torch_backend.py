"""Attention in plain torch: the default on a CPU, and the reference for the other backends.

It reads lengths on the host, so it works on CUDA too, but not inside a CUDA graph. Decode gathers K and V of a
bucket of sequences of similar length, padded to the longest, and attends with one call; prefill attends
sequence by sequence, one tile of queries at a time.
"""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from lightkv.memory.kv_gatherer import KVGatherer
from lightkv.triton_kernels.attention.attention_inputs import check_variants
from lightkv.triton_kernels.attention.attention_reference import QUERY_TILE, attend_request, joined_reference
from lightkv.triton_kernels.attention.variants.chunk import Chunk
from lightkv.triton_kernels.attention.variants.sink_logits import SinkLogits
from lightkv.triton_kernels.attention.variants.softcap import Softcap
from lightkv.triton_kernels.attention.variants.variant import Scored, limits, visible_reference
from lightkv.triton_kernels.attention.variants.window import Window

from .backend import AttentionBackend, NewHeads
from .rotary import RotaryEmbedding
from .step import Step
from .torch_plan import decode_buckets


class TorchAttention(AttentionBackend):
    """Attention of one layer in plain torch."""

    @property
    def _is_fused(self) -> bool:
        """Whether torch's own attention computes this layer, which knows no soft-cap and no sinks."""
        return all(isinstance(one, Window | Chunk) for one in self.options.variants)

    def _write(self, new: NewHeads, step: Step, rotary: RotaryEmbedding | None) -> None:
        if rotary is not None:
            rotary.apply(new.q, new.k)
        step.memory.pool.write(self.layer_idx, step.slots_of(self.layer_idx), new.k, new.v)

    def read(self, step: Step, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of slots, int64 `[n]`, which may be valid until the next call only."""
        gatherer = step.plans.keep("scratch", lambda: KVGatherer(step.memory.pool))
        return gatherer.read(self.layer_idx, slots)

    def _attend(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        host, by_bucket = step.host, Window | Chunk | Softcap | SinkLogits
        is_known = self.options.causal and all(isinstance(one, by_bucket) for one in self.options.variants)
        # Decodes come first: in a static batch, prefills write over the output of unused ones.
        if not is_known or step.mask is not None or not step.lookup.is_plain:
            self._attend_each(range(host.num_prefills, len(host.rows)), q, step, out)
        elif host.num_decodes:
            decoded = slice(host.first_decode_token, host.first_decode_token + host.num_decodes)
            self._decode(q[decoded], step, out[decoded])
        self._attend_each(range(host.num_prefills), q, step, out)

    def _attend_each(self, sequences: range, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        """Attends sequence by sequence."""
        host, kv, own_limits = step.host, self.paged_kv(step), limits(self.options.variants)
        lookup, num_sinks = kv.lookup.of_layer(own_limits), 0 if own_limits else step.form.num_sinks
        num_prefills, counts = host.num_prefills, host.counts
        options = self.options.plus(step.mask)
        check_variants(options.variants, q, len(host.rows))
        is_fused = self._is_fused and options.causal and step.mask is None and not num_sinks
        ends = np.cumsum(counts[:num_prefills]) + host.first_prefill_token
        decodes = np.arange(host.num_decodes) + host.first_decode_token + 1
        ends = np.concatenate([ends, decodes])
        for idx in sequences:
            queries = slice(int(ends[idx] - counts[idx]), int(ends[idx]))
            row, length = int(host.rows[idx]), int(host.kv_lens[idx])
            if not length:
                out[queries] = 0
                continue
            # What is before the window or the chunk is not read: it may not be held any more.
            start = length - int(counts[idx])
            first = max((one.first_key(start) for one in own_limits), default=0)
            positions = lookup.keys_reference(length, q.device)[first:]
            slots = lookup.slots_reference(kv.index, row, positions)
            # The pool's type may be narrower than the model's: attend to what a later step will read.
            keys, values = self.read(step, slots)
            if sinks := min(num_sinks, len(keys)):  # the same scores as of queries that are rotated back
                assert self.rotary is not None
                by = torch.tensor([-step.form.dropped_by(idx, length)], device=q.device)
                moved = self.rotary.rotate_back(keys[:sinks].to(q.dtype), by)
                keys = torch.cat((moved, keys[sinks:].to(q.dtype)))
            scored = Scored.of_last(queries, idx, first + len(keys), q.device)
            scored = scored._replace(keys=scored.keys[first:])
            if is_fused:
                self._attend_fused(q[queries], keys, values, scored, out[queries])
            else:
                out[queries] = attend_request(q[queries], keys, values, options, scored)

    def _attend_fused(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scored: Scored, out: torch.Tensor
    ) -> None:
        """Writes the attention of a request's last queries to `out` by torch's own, in tiles of queries, or at
        once where no bias is needed. Each query sees itself, in a layer with a window or chunks at most."""
        group, first, own = self.num_heads // self.num_kv_heads, scored.length - len(k), scored.own_begin
        bounded = limits(self.options.variants)
        sees_all = own == first and all(one.first_key(scored.length - 1) <= first for one in bounded)
        size = len(q) if sees_all else QUERY_TILE
        # [L, num_kv_heads, D] as [num_kv_heads, group, L, D]
        k, v = (x.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
        for begin in range(0, len(q), size):
            end = min(begin + size, len(q))
            seen = max((one.first_key(own + begin) for one in bounded), default=0) - first
            keys = slice(max(seen, 0), own + end - first)
            mask = None
            if not sees_all:
                tile = scored.tile(begin, end)._replace(keys=scored.keys[keys])
                mask = visible_reference(bounded, True, tile)
            attended = self._attend_keys(
                q[begin:end].unflatten(1, (-1, group)).permute(1, 2, 0, 3),
                k[:, :, keys],
                v[:, :, keys],
                mask,
                causal=sees_all,
            )
            out[begin:end].unflatten(1, (-1, group)).copy_(attended.permute(2, 0, 1, 3))

    def _decode(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        index, bounded = step.index_of(self.layer_idx), limits(self.options.variants)
        key = "buckets", bounded, q.dtype, index.data_ptr()
        buckets = step.plans.get(key, self.layer_idx, lambda: decode_buckets(step, index, bounded, q.dtype))
        for members, slots, width, bias in buckets:
            queries = q if members is None else q.index_select(0, members)
            keys, values = self.read(step, slots)
            # Query heads that share a K/V head are its query rows: K and V are read once, not per head.
            attended = self._attend_keys(
                queries.unflatten(1, (self.num_kv_heads, -1)),  # [n, num_kv_heads, group, D]
                keys.to(q.dtype).unflatten(0, (-1, width)).transpose(1, 2),  # [n, num_kv_heads, width, D]
                values.to(q.dtype).unflatten(0, (-1, width)).transpose(1, 2),
                bias,
            ).flatten(1, 2)
            if members is None:
                out.copy_(attended)
            else:
                out.index_copy_(0, members, attended)

    def _attend_keys(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        causal: bool = False,
    ) -> torch.Tensor:
        """Attends from q `[..., n, D]` to k and v `[..., S, D]`. What is not fused is `[decodes, num_kv_heads,
        group, D]`, and not causal."""
        if self._is_fused:
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=self.scale)
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * self.scale
        if (softcap := self.options.of(Softcap)) is not None:
            scores = softcap.cap_scores(scores)
        if bias is not None:
            scores = scores + bias
        lse = scores.logsumexp(-1, keepdim=True)
        for joins in joined_reference(self.options.variants):
            lse = torch.logaddexp(lse, joins.view(self.num_kv_heads, -1, 1))
        weights = (scores - lse).exp()
        return torch.matmul(weights.to(v.dtype), v)
