"""Attention in plain torch: the default on a CPU, and the reference for the other backends.

It reads lengths on the host, so it works on CUDA too, but not inside a CUDA graph. Decode gathers K and V of a
bucket of sequences of similar length, padded to the longest, and attends with one call; prefill attends
sequence by sequence, one tile of queries at a time.
"""

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from lightkv.triton_kernels.attention.attention_inputs import check_variants
from lightkv.triton_kernels.attention.attention_reference import joined_reference, slots_reference
from lightkv.triton_kernels.attention.attention_scores import attention_scores_reference
from lightkv.triton_kernels.attention.lookups import BeamTable
from lightkv.triton_kernels.attention.merge_states import merge_states_reference
from lightkv.triton_kernels.attention.variants.chunk import Chunk
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from lightkv.triton_kernels.attention.variants.sink_logits import SinkLogits
from lightkv.triton_kernels.attention.variants.softcap import Softcap
from lightkv.triton_kernels.attention.variants.variant import Scored
from lightkv.triton_kernels.attention.variants.window import Window
from lightkv.triton_kernels.quantised.quantise_reference import rotate_heads

from .backend import AttentionBackend
from .biased_attention import attend_with_bias
from .cross import CrossMetadata, attend_cross
from .metadata import AttentionMetadata
from .rotary import RotaryEmbedding
from .torch_plan import TorchPlan


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
        metadata: AttentionMetadata,
        rotary: RotaryEmbedding | None,
    ) -> None:
        if rotary is not None:
            rotary.rotate(q)
            rotary.rotate(k)
        metadata.memory.pool.write(self.layer_idx, metadata.slot_mapping, k, v)

    def _read(self, metadata: AttentionMetadata, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of slots, int64 `[n]`, which may be valid until the next call only."""
        pool = metadata.memory.pool
        if pool.format(self.layer_idx).is_quantised:
            return pool.read(self.layer_idx, slots)
        rows = TorchPlan.of(metadata).gather(pool.kv(self.layer_idx), slots)
        return pool.spec.split(rows, self.layer_idx)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        if self._is_general or metadata.mask is not None or isinstance(metadata.lookup, BeamTable):
            self._attend_each(q, metadata, out)
            return
        # Decodes come first: in a static batch, prefills write over the output of unused ones.
        if metadata.num_decodes:
            start = metadata.first_decode_token
            decoded = slice(start, start + metadata.num_decodes)
            self._decode(q[decoded], metadata, out[decoded])
        if metadata.num_prefills:
            start = metadata.first_prefill_token
            prefilled = slice(start, start + metadata.num_prefill_tokens)
            self._prefill(q[prefilled], k[prefilled], v[prefilled], metadata, out[prefilled])

    @property
    def _is_general(self) -> bool:
        """Whether the layer has variants that the paths by bucket and by tile do not know, or keys after the
        query are seen."""
        known = Window | Chunk | Softcap | SinkLogits
        return not self.options.causal or not all(isinstance(one, known) for one in self.options.variants)

    def _attend_each(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        """Attends sequence by sequence, decodes first: in a static batch, prefills write over the output of
        unused ones."""
        num_prefills, kv = metadata.num_prefills, self.paged_kv(metadata)
        options = self.options.plus(metadata.mask)
        check_variants(options.variants, q, len(metadata.rows_host))
        window = options.of(Window)
        counts = metadata.q_lens.numpy()
        ends = np.cumsum(counts[:num_prefills]) + metadata.first_prefill_token
        decodes = np.arange(len(counts) - num_prefills) + metadata.first_decode_token + 1
        ends = np.concatenate([ends, decodes])
        for idx in (*range(num_prefills, len(counts)), *range(num_prefills)):
            queries = slice(int(ends[idx] - counts[idx]), int(ends[idx]))
            row, length = int(metadata.rows_host[idx]), int(metadata.kv_lens_host[idx])
            if not length:
                out[queries] = 0
                continue
            # A ring does not hold what is before the window.
            first = 0 if window is None else window.first_key(length - int(counts[idx]))
            slots = slots_reference(kv, row, torch.arange(first, length, device=q.device))
            keys, values = self._read(metadata, slots)
            scored = Scored.of_last(queries, idx, length, q.device)
            scored = scored._replace(keys=scored.keys[first:])
            out[queries] = attend_with_bias(q[queries], keys, values, options, scored)

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        pool = metadata.memory.pool
        plan = TorchPlan.of(metadata).prefill(metadata, self.options, q.dtype, fused=self._is_fused)
        group = self.num_heads // self.num_kv_heads
        if metadata.is_cuda_graph:
            out.zero_()  # also the padding, so that what is computed of it stays finite
        for tile in plan.tiles:
            if tile.slots is None:
                # The pool's type may be narrower than the model's: attend to what a later step will read.
                own = slice(tile.start, tile.end)
                if pool.format(self.layer_idx).is_quantised:
                    keys, values = self._read(metadata, metadata.slot_mapping[own])
                else:
                    keys, values = k[own].to(pool.spec.dtype), v[own].to(pool.spec.dtype)
            else:
                keys, values = self._read(metadata, tile.slots)
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

    def _attend_with_sinks(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        plan = TorchPlan.of(metadata).prefill(metadata, self.options, q.dtype, fused=False)
        assert self.rotary is not None
        assert metadata.dropped is not None
        rotated = self.rotary.rotate_back(q, metadata.dropped)
        for tile, sink_tokens in zip(plan.tiles, plan.sink_tokens, strict=True):
            assert tile.slots is not None
            parts = ((q, tile.slots, plan.bias_of(tile)), (rotated, sink_tokens, None))
            states = []
            for part, (queries, slots, bias) in enumerate(parts):
                keys, values = self._read(metadata, slots)
                # Learned sinks join one of the parts, here the first.
                states.append(
                    self._attend_part(queries[tile.start : tile.end], keys, values, bias, part == 0)
                )
            partial_out, partial_lse = (torch.stack(part) for part in zip(*states, strict=True))
            out[tile.start : tile.end] = merge_states_reference(partial_out, partial_lse)[0]

    def _attend_to_rings(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        kv, ring, lengths = self.paged_kv(metadata), metadata.ring, metadata.kv_lens_host.tolist()
        assert ring is not None
        rotated = q
        if ring.sinks:
            assert self.rotary is not None
            dropped = torch.tensor([ring.dropped(length - 1) for length in lengths], device=q.device)
            rotated = self.rotary.rotate_back(q, dropped)
        out.zero_()  # also the padding of a static batch
        for token, (row, length) in enumerate(zip(metadata.rows_host.tolist(), lengths, strict=True)):
            if not length:
                continue
            queries = slice(token, token + 1)
            first = min(ring.first_key(length - 1), length)
            window = slots_reference(kv, row, torch.arange(first, length, device=q.device))
            if not ring.sinks:
                scored = Scored.of_last(queries, token, len(window), q.device)
                out[queries] = attend_with_bias(
                    q[queries], *self._read(metadata, window), self.options, scored
                )
                continue
            sinks = slots_reference(kv, row, torch.arange(min(ring.sinks, length), device=q.device))
            # Learned sinks join one of the parts, here the first.
            states = [self._attend_part(rotated[queries], *self._read(metadata, sinks), None, True)]
            if first < length:
                states.append(self._attend_part(q[queries], *self._read(metadata, window), None, False))
            outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
            out[queries] = merge_states_reference(outs, lses)[0]

    def _attend_cross(self, q: torch.Tensor, cross: CrossMetadata, out: torch.Tensor) -> None:
        attend_cross(q, lambda slots: self._read(cross.metadata, slots), cross, self.options, out)

    def _decode(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        plan = TorchPlan.of(metadata)
        for members, slots, width, bias in plan.decode_buckets(metadata, self.options, q.dtype):
            queries = q if members is None else q.index_select(0, members)
            keys, values = self._read(metadata, slots)
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

    def _entry_scores(
        self, q: torch.Tensor, entries: torch.Tensor, width: int, metadata: AttentionMetadata
    ) -> torch.Tensor:
        kv = self.paged_kv(metadata)
        scores, _ = attention_scores_reference(
            rotate_heads(q) if kv.format.k.is_rotated else q,
            kv,
            metadata.rows,
            metadata.q_starts,
            entries,
            metadata.kv_lens,
            self.options.plus(metadata.mask),
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
        scores = self._scores(q, k)
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

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Computes the scores `[..., n, S]`, float32, of q `[..., n, D]` and k `[..., S, D]`."""
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * self.scale
        softcap = self.options.of(Softcap)
        return scores if softcap is None else softcap.cap_scores(scores)

    def _attend_part(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        with_sinks: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends from q `[T, H, D]` to a part of its keys, k and v `[S, num_kv_heads, D]`, for `merge_states`.

        Returns the output `[T, H, v_dim]` and the log-sum-exp `[T, H]` in base 2, both float32.
        `with_sinks`: with the layer's learned sinks, if it has any.
        """
        num_tokens = len(q)
        # Query heads that share a K/V head are its query rows: [num_kv_heads, group * T, D]
        rows = q.unflatten(1, (self.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = self._scores(rows, k.to(q.dtype).transpose(0, 1)).unflatten(1, (-1, num_tokens))
        scored = Scored.of_last(slice(0, num_tokens), 0, len(k), q.device)
        for one in self.options.variants:
            if not isinstance(one, Softcap):  # which `_scores` has applied
                changed = one.scores_reference(scores.flatten(0, 1), scored)
                scores = changed.view(scores.shape)
        if bias is not None:
            scores = scores + bias
        lse = scores.logsumexp(-1)  # [num_kv_heads, group, T]
        for joins in joined_reference(self.options.variants) if with_sinks else ():
            lse = torch.logaddexp(lse, joins.view(*lse.shape[:2], 1))
        weights = scores.sub_(lse[..., None]).exp_().flatten(1, 2)
        attended = torch.matmul(weights.to(v.dtype), v.transpose(0, 1)).float().unflatten(1, (-1, num_tokens))
        return attended.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2) * LOG2_E
