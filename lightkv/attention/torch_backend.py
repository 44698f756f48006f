"""Attention in plain torch: the default on a CPU, and what the other backends are compared with.

Knows the lengths on the host, so it needs no kernel that reads them; it works on CUDA as well, but not inside
a CUDA graph. Decode gathers K and V of several sequences at once, padded to the longest, and attends with one
call; prefill attends sequence by sequence, a tile of queries at a time.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from lightkv.memory.staging import upload
from lightkv.triton_kernels.attention.attend_keys import LOG2_E
from lightkv.triton_kernels.attention.attention_scores import attention_scores_reference
from lightkv.triton_kernels.attention.merge_states import merge_states_reference

from .backend import AttentionBackend
from .metadata import AttentionMetadata
from .rotary import RotaryEmbedding

# Decode pads sequences to the longest of their group. A group ends where its padding would pass a quarter of
# its tokens, unless that saves fewer tokens than the calls for another group cost.
PADDING_FRACTION = 0.25
PADDING_TOKENS = 256
# Most queries that prefill attends from at once where it needs a bias: one line of the keys' length for each.
QUERY_TILE = 512


class DecodeGroup(NamedTuple):
    """Generations that attend together, padded to `width` keys."""

    members: torch.Tensor | None  # int64 [G]: which of the generations; None is all of them, in order
    slots: torch.Tensor  # int64 [G * width], slot 0 where padded
    width: int
    bias: torch.Tensor | None  # [G, 1, 1, width]: 0, and -inf where padded; None where nothing is


class PrefillTile(NamedTuple):
    """Neighbouring queries of one context, and the keys that any of them attends."""

    start: int  # the queries among the packed tokens: [start, end)
    end: int
    slots: torch.Tensor | None  # int64 [S], the last query's own last; None: the queries' own K/V


class PrefillPlan(NamedTuple):
    """The contexts of a step in tiles, and one bias for all of them.

    A tile's keys end with its last query's own. Counted from there, what is hidden from whom is the same in
    every tile, so that the biases are corners of the largest.
    """

    tiles: list[PrefillTile]
    sinks: list[torch.Tensor]  # int64 [num_sinks], of each tile; none in a step without
    bias: torch.Tensor | None  # [at most QUERY_TILE, the longest tile's S], 0 and -inf

    def bias_of(self, tile: PrefillTile) -> torch.Tensor | None:
        """`[end - start, S]`; None where every query attends every key, or causally its own."""
        num_queries = tile.end - tile.start
        if self.bias is None or tile.slots is None or num_queries == 1:
            return None
        # A copy where it is a part: CUDA's attention wants a bias aligned.
        return self.bias[-num_queries:, -len(tile.slots) :].contiguous()


class TorchPlan:
    """What all layers of a step share: indices, masks, and the memory that K/V is gathered into.

    Kept in the metadata, renewed with its step; layers with the same window share an entry.
    """

    def __init__(self) -> None:
        self._step = -1
        self._decode: dict[tuple[int, torch.dtype], list[DecodeGroup]] = {}
        self._prefill: dict[tuple[int, torch.dtype, bool], PrefillPlan] = {}
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
            lengths = metadata.kv_lens_host[metadata.num_prefills :]
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

    def prefill(
        self, metadata: AttentionMetadata, window: int, dtype: torch.dtype, fused: bool
    ) -> PrefillPlan:
        """The contexts of a step. `dtype`: of the queries. `fused`: no scores are kept, so that a fresh
        prompt of any length is one tile.
        """
        plan = self._prefill.get((window, dtype, fused))
        if plan is None:
            tiles, sinks = _prefill_tiles(metadata, window, fused)
            plan = PrefillPlan(tiles, sinks, _tile_bias(tiles, window, dtype))
            self._prefill[window, dtype, fused] = plan
        return plan


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
    rows = metadata.rows_host[metadata.num_prefills :]
    ends = np.maximum(metadata.kv_lens_host[metadata.num_prefills :], 1)
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
    return DecodeGroup(chosen[0] if chosen else None, table.read(where).long(), width, bias)


def _prefill_tiles(
    metadata: AttentionMetadata, window: int, fused: bool
) -> tuple[list[PrefillTile], list[torch.Tensor]]:
    """The contexts in tiles, and each tile's sinks."""
    table, num_sinks = metadata.kv_cache_manager.table, metadata.num_sinks
    tiles = []
    sinks = []
    packed_end = 0
    for idx, num_tokens in enumerate(metadata.context_lens.tolist()):
        packed_end += num_tokens
        row, kv_len = int(metadata.rows_host[idx]), int(metadata.kv_lens_host[idx])
        prefix = kv_len - num_tokens
        sees_all = not prefix and (not window or num_tokens <= window)
        if sees_all and (fused or num_tokens <= QUERY_TILE):
            tiles.append(PrefillTile(packed_end - num_tokens, packed_end, None))
            continue
        # Keys that no query sees, or only turned back.
        skipped = max(0, prefix - window + 1) if window else num_sinks
        slots = table.slots(row, skipped, kv_len).long()
        for start in range(prefix, kv_len, QUERY_TILE):
            end = min(start + QUERY_TILE, kv_len)
            first = max(0, start - window + 1) if window else num_sinks
            shift = packed_end - kv_len  # from positions to packed tokens
            tiles.append(PrefillTile(start + shift, end + shift, slots[first - skipped : end - skipped]))
            if num_sinks:
                sinks.append(table.slots(row, 0, num_sinks).long())
    return tiles, sinks


def _tile_bias(tiles: list[PrefillTile], window: int, dtype: torch.dtype) -> torch.Tensor | None:
    shapes = [(tile.end - tile.start, tile.slots) for tile in tiles]
    masked = [(num_queries, slots) for num_queries, slots in shapes if slots is not None and num_queries > 1]
    if not masked:
        return None
    num_queries = max(num_queries for num_queries, _ in masked)
    num_keys = max(len(slots) for _, slots in masked)
    key = torch.arange(num_keys, device=masked[0][1].device)
    query = key[num_keys - num_queries :, None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=dtype, device=key.device).masked_fill_(hidden, float("-inf"))


class TorchAttention(AttentionBackend):
    """One layer's attention in plain torch."""

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
        pool = metadata.kv_cache_manager.pool
        pool.k(self.layer_idx).index_copy_(0, metadata.slot_mapping, k.to(pool.spec.dtype))
        pool.v(self.layer_idx).index_copy_(0, metadata.slot_mapping, v.to(pool.spec.dtype))

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        num_prefill_tokens = metadata.num_prefill_tokens
        if metadata.num_prefills:
            fresh = (k[:num_prefill_tokens], v[:num_prefill_tokens])
            self._prefill(q[:num_prefill_tokens], *fresh, metadata, out[:num_prefill_tokens])
        if metadata.num_generations:
            self._decode(q[num_prefill_tokens:], metadata, out[num_prefill_tokens:])

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        pool = metadata.kv_cache_manager.pool
        step = TorchPlan.of(metadata)
        plan = step.prefill(metadata, self.window, q.dtype, fused=not self.softcap)
        group = self.num_heads // self.num_kv_heads
        for tile in plan.tiles:
            if tile.slots is None:
                # What a later step would read back: the pool's type may be narrower than the model's.
                keys = k[tile.start : tile.end].to(pool.spec.dtype)
                values = v[tile.start : tile.end].to(pool.spec.dtype)
            else:
                keys, values = pool.spec.split(step.gather(pool.kv(self.layer_idx), tile.slots))
            # [T, H, D] as [num_kv_heads, group, T, D]; the keys [S, num_kv_heads, D] repeat along the group
            queries = q[tile.start : tile.end].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
            attended = self._attend_keys(
                queries,
                keys.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1),
                values.to(q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1),
                plan.bias_of(tile),
                causal=tile.slots is None,
            )
            out[tile.start : tile.end].unflatten(1, (-1, group)).copy_(attended.permute(2, 0, 1, 3))

    def _attend_with_sinks(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        pool = metadata.kv_cache_manager.pool
        step = TorchPlan.of(metadata)
        plan = step.prefill(metadata, self.window, q.dtype, fused=False)
        assert self.rotary is not None
        assert metadata.dropped is not None
        turned = self.rotary.rotate_back(q, metadata.dropped)
        for tile, sinks in zip(plan.tiles, plan.sinks, strict=True):
            assert tile.slots is not None
            parts = ((q, tile.slots, plan.bias_of(tile)), (turned, sinks, None))
            states = []
            for queries, slots, bias in parts:
                keys, values = pool.spec.split(step.gather(pool.kv(self.layer_idx), slots))
                states.append(self._attend_part(queries[tile.start : tile.end], keys, values, bias))
            partial_out, partial_lse = (torch.stack(part) for part in zip(*states, strict=True))
            out[tile.start : tile.end] = merge_states_reference(partial_out, partial_lse)[0]

    def _decode(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        pool = metadata.kv_cache_manager.pool
        plan = TorchPlan.of(metadata)
        for members, slots, width, bias in plan.decode_groups(metadata, self.window, q.dtype):
            queries = q if members is None else q.index_select(0, members)
            keys, values = pool.spec.split(plan.gather(pool.kv(self.layer_idx), slots))
            # The heads of a group are the query rows of their KV head: K and V are read once, not per head.
            attended = self._attend_keys(
                queries.unflatten(1, (self.num_kv_heads, -1)),  # [G, num_kv_heads, group, D]
                keys.to(q.dtype).unflatten(0, (-1, width)).transpose(1, 2),  # [G, num_kv_heads, width, D]
                values.to(q.dtype).unflatten(0, (-1, width)).transpose(1, 2),
                bias,
            ).flatten(1, 2)
            if members is None:
                out.copy_(attended)
            else:
                out.index_copy_(0, members, attended)

    def _entry_scores(
        self, q: torch.Tensor, entries: torch.Tensor, width: int, metadata: AttentionMetadata
    ) -> torch.Tensor:
        memory = metadata.kv_cache_manager
        scores, _ = attention_scores_reference(
            q,
            memory.pool.k(self.layer_idx),
            memory.table.req_to_token,
            metadata.rows,
            metadata.q_starts,
            entries,
            metadata.kv_lens,
            width=width,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return scores.float()

    def _attend_keys(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        causal: bool = False,
    ) -> torch.Tensor:
        if not self.softcap:
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=self.scale)
        scores = self._scores(q, k)
        if causal:
            bias = torch.full_like(scores[0, 0], float("-inf")).triu_(1)
        if bias is not None:
            scores = scores + bias
        return torch.matmul(scores.softmax(-1).to(v.dtype), v)

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """`[..., n, S]` float32, of q `[..., n, D]` and k `[..., S, D]`."""
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * self.scale
        return self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores

    def _attend_part(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A part of the attention of q `[T, H, D]`, to k and v `[S, num_kv_heads, D]`, for `merge_states`.

        Returns `[T, H, v_dim]` and the log-sum-exp `[T, H]`, float32.
        """
        num_tokens = len(q)
        # The heads of a group are query rows of their KV head: [num_kv_heads, group * T, D]
        rows = q.unflatten(1, (self.num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = self._scores(rows, k.to(q.dtype).transpose(0, 1)).unflatten(1, (-1, num_tokens))
        if bias is not None:
            scores += bias
        lse = scores.logsumexp(-1)  # [num_kv_heads, group, T]
        weights = scores.sub_(lse[..., None]).exp_().flatten(1, 2)
        attended = torch.matmul(weights.to(v.dtype), v.transpose(0, 1)).float().unflatten(1, (-1, num_tokens))
        return attended.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2) * LOG2_E
