"""Attention in plain torch: the default on a CPU, and what the other backends are compared with.

Knows the lengths on the host, so it needs no kernel that reads them; it works on CUDA as well, but not inside
a CUDA graph. Decode gathers K and V of several sequences at once, padded to the longest, and attends with one
call; prefill attends sequence by sequence.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ..staging import upload
from .backend import AttentionBackend
from .metadata import AttentionMetadata

# Decode pads sequences to the longest of their group. A group ends where its padding would pass a quarter of
# its tokens, unless that saves fewer tokens than the calls for another group cost.
PADDING_FRACTION = 0.25
PADDING_TOKENS = 256


class DecodeGroup(NamedTuple):
    """Generations that attend together, padded to `width` keys."""

    members: torch.Tensor | None  # int64 [G]: which of the generations; None is all of them, in order
    slots: torch.Tensor  # int32 [G * width], slot 0 where padded
    width: int
    bias: torch.Tensor | None  # [G, 1, 1, width]: 0, and -inf where padded; None where nothing is


class PrefillChunk(NamedTuple):
    """One context: its rows of the packed tokens, and what it attends."""

    start: int
    end: int
    slots: torch.Tensor | None  # int32 [S], the keys in the pool; None: it attends its own fresh K/V only
    bias: (
        torch.Tensor | None
    )  # [end - start, S], 0 and -inf; None: every key, or causal where `slots` is None


class TorchPlan:
    """What all layers of a step share: indices, masks, and the memory that K/V is gathered into.

    Kept in the metadata, renewed with its step; layers with the same window share an entry.
    """

    def __init__(self) -> None:
        self._step = -1
        self._decode: dict[tuple[int, torch.dtype], list[DecodeGroup]] = {}
        self._prefill: dict[tuple[int, torch.dtype], list[PrefillChunk]] = {}
        self._scratch: torch.Tensor | None = None

    @staticmethod
    def of(metadata: AttentionMetadata) -> "TorchPlan":
        """The plan for the step that `metadata` is at."""
        plan = metadata.plan
        if not isinstance(plan, TorchPlan):
            plan = metadata.plan = TorchPlan()
        if plan._step != metadata.step:
            plan._step = metadata.step
            plan._decode.clear()
            plan._prefill.clear()
        return plan

    def gather(self, buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """`buffer[slots]`, `[len(slots), width]`, valid until the next call."""
        numel = len(slots) * buffer.shape[1]
        scratch = self._scratch
        if scratch is None or scratch.numel() < numel or scratch.dtype != buffer.dtype:
            # Half as much again, for sequences grow by a token a step.
            scratch = self._scratch = buffer.new_empty(numel + numel // 2)
        gathered = scratch[:numel].view(len(slots), buffer.shape[1])
        return torch.index_select(buffer, 0, slots, out=gathered)

    def decode_groups(
        self, metadata: AttentionMetadata, window: int, dtype: torch.dtype
    ) -> list[DecodeGroup]:
        """The generations of a step, in groups of similar length. `dtype`: of the queries."""
        groups = self._decode.get((window, dtype))
        if groups is None:
            lengths = metadata.kv_lens_host[metadata.num_contexts :]
            if window:
                lengths = np.minimum(lengths, window)
            # A padding row of a static batch has length 0, and attends slot 0 rather than nothing: no NaN.
            lengths = np.maximum(lengths, 1)
            buckets = bucket_lengths(lengths)
            groups = [
                _decode_group(metadata, lengths, members if len(buckets) > 1 else None, dtype)
                for members in buckets
            ]
            self._decode[window, dtype] = groups
        return groups

    def prefill_chunks(
        self, metadata: AttentionMetadata, window: int, dtype: torch.dtype
    ) -> list[PrefillChunk]:
        """The contexts of a step. `dtype`: of the queries."""
        chunks = self._prefill.get((window, dtype))
        if chunks is None:
            ends = metadata.seq_lens[: metadata.num_contexts].cumsum(0).tolist()
            chunks = [
                _prefill_chunk(metadata, idx, start, end, window, dtype)
                for idx, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
            ]
            self._prefill[window, dtype] = chunks
        return chunks


def bucket_lengths(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices into `lengths` (`[B]`, all at least 1), in groups to be padded to their longest."""
    order = np.argsort(-lengths, kind="stable")
    cuts = []
    longest = total = count = 0
    for idx, length in enumerate(lengths[order].tolist()):
        padding = (count + 1) * longest - (total + length)
        if count and padding > max(PADDING_FRACTION * (total + length), PADDING_TOKENS):
            cuts.append(idx)
            count = total = 0
        if not count:
            longest = length
        count += 1
        total += length
    return np.split(order, cuts)


def _decode_group(
    metadata: AttentionMetadata, lengths: np.ndarray, members: np.ndarray | None, dtype: torch.dtype
) -> DecodeGroup:
    table = metadata.kv_cache_manager.table
    rows = metadata.rows_host[metadata.num_contexts :]
    ends = np.maximum(metadata.kv_lens_host[metadata.num_contexts :], 1)
    if members is not None:
        rows, ends, lengths = rows[members], ends[members], lengths[members]
    width = int(lengths.max())
    offsets = np.arange(width)
    padded = offsets >= lengths[:, None]  # [G, width]
    entries = rows[:, None] * table.max_entries + (ends - lengths)[:, None] + offsets
    # Padding reads row 0, thus slot 0, whose numbers are finite. What the row holds there is stale: a free
    # slot may hold NaN, which no mask stops.
    entries[padded] = 0
    arrays = [entries.reshape(-1), padded.reshape(-1), *([] if members is None else [members])]
    where, hidden, *chosen = upload(arrays, table.device)
    bias = None
    if padded.any():
        bias = torch.zeros(len(rows), 1, 1, width, dtype=dtype, device=table.device)
        bias.masked_fill_(hidden.view(bias.shape), float("-inf"))
    return DecodeGroup(chosen[0] if chosen else None, table.read(where), width, bias)


def _prefill_chunk(
    metadata: AttentionMetadata, idx: int, start: int, end: int, window: int, dtype: torch.dtype
) -> PrefillChunk:
    table = metadata.kv_cache_manager.table
    row, kv_len = int(metadata.rows_host[idx]), int(metadata.kv_lens_host[idx])
    num_tokens = end - start
    prefix = kv_len - num_tokens
    first = max(0, prefix - window + 1) if window else 0  # the first key that any of its queries sees
    if not prefix and (not window or num_tokens <= window):
        return PrefillChunk(start, end, None, None)
    bias = None
    if num_tokens > 1:
        key = torch.arange(first, kv_len, device=table.device)
        query = torch.arange(prefix, kv_len, device=table.device)[:, None]
        hidden = key > query
        if window:
            hidden |= key <= query - window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=table.device)
        bias.masked_fill_(hidden, float("-inf"))
    return PrefillChunk(start, end, table.slots(row, first, kv_len), bias)


class TorchAttention(AttentionBackend):
    """One layer's attention in plain torch."""

    def _write(self, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> None:
        pool = metadata.kv_cache_manager.pool
        pool.k(self.layer_idx).index_copy_(0, metadata.slot_mapping, k.to(pool.spec.dtype))
        pool.v(self.layer_idx).index_copy_(0, metadata.slot_mapping, v.to(pool.spec.dtype))

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        pool = metadata.kv_cache_manager.pool
        plan = TorchPlan.of(metadata)
        group = self.num_heads // self.num_kv_heads
        for chunk in plan.prefill_chunks(metadata, self.window, q.dtype):
            if chunk.slots is None:
                # What a later step would read back: the pool's type may be narrower than the model's.
                keys = k[chunk.start : chunk.end].to(pool.spec.dtype)
                values = v[chunk.start : chunk.end].to(pool.spec.dtype)
            else:
                keys, values = self._split(plan.gather(pool.kv(self.layer_idx), chunk.slots))
            # [T, H, D] as [num_kv_heads, group, T, D]; the keys [S, num_kv_heads, D] repeat along the group
            queries = q[chunk.start : chunk.end].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
            attended = self._attend(
                queries,
                keys.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1),
                values.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1),
                chunk.bias,
                causal=chunk.slots is None,
            )
            out[chunk.start : chunk.end].unflatten(1, (-1, group)).copy_(attended.permute(2, 0, 1, 3))

    def _decode(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        pool = metadata.kv_cache_manager.pool
        plan = TorchPlan.of(metadata)
        for members, slots, width, bias in plan.decode_groups(metadata, self.window, q.dtype):
            queries = q if members is None else q.index_select(0, members)
            keys, values = self._split(plan.gather(pool.kv(self.layer_idx), slots))
            # The heads of a group are the query rows of their KV head: K and V are read once, not per head.
            attended = self._attend(
                queries.unflatten(1, (self.num_kv_heads, -1)),  # [G, num_kv_heads, group, D]
                keys.to(q.dtype).unflatten(0, (-1, width)).transpose(1, 2),  # [G, num_kv_heads, width, D]
                values.to(q.dtype).unflatten(0, (-1, width)).transpose(1, 2),
                bias,
            ).flatten(1, 2)
            if members is None:
                out.copy_(attended)
            else:
                out.index_copy_(0, members, attended)

    def _split(self, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots `[n, width]` as K `[n, num_kv_heads, head_dim]` and V `[n, num_kv_heads, v_dim]`."""
        keys, values = gathered.split(
            [self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_dim], dim=1
        )
        return keys.unflatten(1, (self.num_kv_heads, -1)), values.unflatten(1, (self.num_kv_heads, -1))

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        causal: bool = False,
    ) -> torch.Tensor:
        if not self.softcap:
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=self.scale)
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if causal:
            bias = torch.full_like(scores[0, 0], float("-inf")).triu_(1)
        if bias is not None:
            scores = scores + bias
        return torch.matmul(scores.softmax(-1).to(v.dtype), v)
