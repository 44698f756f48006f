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
from lightkv.triton_kernels.attention.attention_reference import joined_reference, slots_reference
from lightkv.triton_kernels.attention.attention_scores import attention_scores_reference
from lightkv.triton_kernels.attention.variants.chunk import Chunk
from lightkv.triton_kernels.attention.variants.sink_logits import SinkLogits
from lightkv.triton_kernels.attention.variants.softcap import Softcap
from lightkv.triton_kernels.attention.variants.variant import Scored
from lightkv.triton_kernels.attention.variants.window import Window
from lightkv.triton_kernels.quantised.quantise_reference import apply_hadamard

from .backend import AttentionBackend
from .biased_attention import attend_with_bias
from .rotary import RotaryEmbedding
from .step import Step
from .torch_plan import decode_buckets, tiled_prefill, window_and_chunk


class TorchAttention(AttentionBackend):
    """Attention of one layer in plain torch."""

    @property
    def _is_fused(self) -> bool:
        """Whether torch's own attention computes this layer, which knows no soft-cap and no sinks."""
        return all(isinstance(one, Window | Chunk) for one in self.options.variants)

    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: Step,
        rotary: RotaryEmbedding | None,
    ) -> None:
        if rotary is not None:
            rotary.apply(q, k)
        step.memory.pool.write(self.layer_idx, step.slots_of(self.layer_idx), k, v)

    def read(self, step: Step, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of slots, int64 `[n]`, which may be valid until the next call only."""
        gatherer = step.plans.keep("scratch", lambda: KVGatherer(step.memory.pool))
        return gatherer.read(self.layer_idx, slots)

    def _attend(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        step.form.attend_in_torch(self, q, step, out)

    def attend_plain(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        """Writes the attention of q `[T, H, Dk]` to all that the step's index and lookup find to `out` `[T, H,
        Dv]`."""
        if self._is_general or step.mask is not None or not step.lookup.is_plain:
            self._attend_each(q, step, out)
            return
        host = step.host
        # Decodes come first: in a static batch, prefills write over the output of unused ones.
        if host.num_decodes:
            decoded = slice(host.first_decode_token, host.first_decode_token + host.num_decodes)
            self._decode(q[decoded], step, out[decoded])
        if host.num_prefills:
            prefilled = slice(host.first_prefill_token, host.first_prefill_token + host.num_prefill_tokens)
            self._prefill(q[prefilled], step, out[prefilled])

    @property
    def _is_general(self) -> bool:
        """Whether the layer has variants that the paths by bucket and by tile do not know, or keys after the
        query are seen."""
        known = Window | Chunk | Softcap | SinkLogits
        return not self.options.causal or not all(isinstance(one, known) for one in self.options.variants)

    def _attend_each(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        """Attends sequence by sequence, decodes first: in a static batch, prefills write over the output of
        unused ones."""
        host, kv = step.host, self.paged_kv(step)
        num_prefills, counts = host.num_prefills, host.counts
        options = self.options.plus(step.mask)
        check_variants(options.variants, q, len(host.rows))
        window = options.of(Window)
        ends = np.cumsum(counts[:num_prefills]) + host.first_prefill_token
        decodes = np.arange(host.num_decodes) + host.first_decode_token + 1
        ends = np.concatenate([ends, decodes])
        for idx in (*range(num_prefills, len(counts)), *range(num_prefills)):
            queries = slice(int(ends[idx] - counts[idx]), int(ends[idx]))
            row, length = int(host.rows[idx]), int(host.kv_lens[idx])
            if not length:
                out[queries] = 0
                continue
            # What is before the window may not be held any more.
            first = 0 if window is None else window.first_key(length - int(counts[idx]))
            slots = slots_reference(kv, row, torch.arange(first, length, device=q.device))
            keys, values = self.read(step, slots)
            scored = Scored.of_last(queries, idx, length, q.device)
            scored = scored._replace(keys=scored.keys[first:])
            out[queries] = attend_with_bias(q[queries], keys, values, options, scored)

    def _prefill(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        index = step.index_of(self.layer_idx)
        key = "tiles", *window_and_chunk(self.options), q.dtype, self._is_fused, index.data_ptr()
        plan = step.plans.get(
            key, self.layer_idx, lambda: tiled_prefill(step, index, self.options, q.dtype, self._is_fused)
        )
        written = step.slots_of(self.layer_idx)[step.host.first_prefill_token :]
        group = self.num_heads // self.num_kv_heads
        if step.host.decodes_first:
            out.zero_()  # also the padding, so that what is computed of it stays finite
        for tile in plan.tiles:
            # The pool's type may be narrower than the model's: attend to what a later step will read.
            own = written[tile.start : tile.end]
            keys, values = self.read(step, own if tile.slots is None else tile.slots)
            # [T, H, D] as [num_kv_heads, group, T, D]; keys [S, num_kv_heads, D] are repeated along the group
            queries = q[tile.start : tile.end].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
            attended = self._attend_keys(
                queries,
                keys.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1),
                values.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1),
                plan.bias_of(tile),
                sink_dims=(1, 1),
                causal=tile.slots is None,
            )
            out[tile.start : tile.end].unflatten(1, (-1, group)).copy_(attended.permute(2, 0, 1, 3))

    def _decode(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        index = step.index_of(self.layer_idx)
        key = "buckets", *window_and_chunk(self.options), q.dtype, index.data_ptr()
        buckets = step.plans.get(
            key, self.layer_idx, lambda: decode_buckets(step, index, self.options, q.dtype)
        )
        for members, slots, width, bias in buckets:
            queries = q if members is None else q.index_select(0, members)
            keys, values = self.read(step, slots)
            # Query heads that share a K/V head are its query rows: K and V are read once, not per head.
            attended = self._attend_keys(
                queries.unflatten(1, (self.num_kv_heads, -1)),  # [n, num_kv_heads, group, D]
                keys.to(q.dtype).unflatten(0, (-1, width)).transpose(1, 2),  # [n, num_kv_heads, width, D]
                values.to(q.dtype).unflatten(0, (-1, width)).transpose(1, 2),
                bias,
                sink_dims=(1,),
            ).flatten(1, 2)
            if members is None:
                out.copy_(attended)
            else:
                out.index_copy_(0, members, attended)

    def _entry_scores(self, q: torch.Tensor, entries: torch.Tensor, width: int, step: Step) -> torch.Tensor:
        kv = self.paged_kv(step)
        scores, _ = attention_scores_reference(
            apply_hadamard(q) if kv.format.elements.has_hadamard else q,
            kv,
            step.rows,
            step.q_starts,
            entries,
            step.kv_lens,
            self.options.plus(step.mask),
            width=width,
        )
        return scores.float()

    def _attend_keys(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sink_dims: tuple[int, ...],
        causal: bool = False,
    ) -> torch.Tensor:
        """Attends from q `[..., n, D]` to k and v `[..., S, D]`. `sink_dims`: ones, for the dimensions of q
        after those of K/V heads and groups."""
        if self._is_fused:
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=self.scale)
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * self.scale
        if (softcap := self.options.of(Softcap)) is not None:
            scores = softcap.cap_scores(scores)
        if causal:
            bias = torch.full_like(scores[0, 0], float("-inf")).triu_(1)
        if bias is not None:
            scores = scores + bias
        joined = joined_reference(self.options.variants)
        if not joined:
            return torch.matmul(scores.softmax(-1).to(v.dtype), v)
        lse = scores.logsumexp(-1, keepdim=True)
        for joins in joined:
            lse = torch.logaddexp(lse, joins.view(self.num_kv_heads, -1, *sink_dims))
        weights = (scores - lse).exp()
        return torch.matmul(weights.to(v.dtype), v)
