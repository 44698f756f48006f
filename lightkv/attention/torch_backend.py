"""Attention in plain torch: the default on a CPU, and the reference for the other backends.

It reads lengths on the host, so it works on CUDA too, but not inside a CUDA graph. Decode gathers K and V of a
bucket of sequences of similar length, padded to the longest, and attends with one call; prefill attends
sequence by sequence, one tile of queries at a time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from lightkv.memory.staging import upload
from lightkv.triton_kernels.attention.attend_keys import LOG2_E
from lightkv.triton_kernels.attention.attention_mask import mask_reference
from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.attention_scores import attention_scores_reference
from lightkv.triton_kernels.attention.merge_states import merge_states_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions

from .backend import AttentionBackend
from .biased_attention import attend_with_bias
from .cross import CrossMetadata, attend_cross
from .metadata import AttentionMetadata
from .rotary import RotaryEmbedding

# Decode pads sequences to the longest of their bucket. A bucket ends where its padding would exceed a quarter
# of its tokens, unless the padding is so small that the calls for another bucket cost more.
PADDING_FRACTION = 0.25
PADDING_TOKENS = 256
# The most queries of a prefill tile that needs a bias, which has a row of the keys' length for each query.
QUERY_TILE = 512


class PaddedBucket(NamedTuple):
    """Decodes that attend together, padded to `width` keys."""

    members: torch.Tensor | None  # int64 [n], which of the decodes; None for all of them, in order
    slots: torch.Tensor  # int64 [n * width], slot 0 where padded
    width: int
    bias: torch.Tensor | None  # [n, 1, 1, width]: 0, and -inf where padded; None if there is no padding


class PrefillTile(NamedTuple):
    """Consecutive queries of one prefill, and the keys that any of them attends to."""

    start: int  # the queries are the packed tokens [start, end)
    end: int
    slots: torch.Tensor | None  # int64 [S], up to the last query's own; None: the queries' own keys


class TiledPrefill(NamedTuple):
    """The prefills of a step in tiles, and one bias for all tiles.

    A tile's keys end with its last query's own key, so the mask, counted back from the last query and key, is
    the same in every tile: a tile's bias is the lower right corner of the largest one.

        first query  ├────────── seen ──────────┼ hidden ┤
        last query   ├─────────────── seen ──────────────┤ its own key
    """

    tiles: list[PrefillTile]
    sink_tokens: list[torch.Tensor]  # int64 [num_sink_tokens] for each tile; empty in a step without sinks
    bias: torch.Tensor | None  # [at most QUERY_TILE, S of the longest tile], 0 and -inf

    def bias_of(self, tile: PrefillTile) -> torch.Tensor | None:
        """Returns the bias of a tile, `[end - start, S]`; None where every query attends to every key, or
        causally to the queries' own keys."""
        num_queries = tile.end - tile.start
        if self.bias is None or tile.slots is None or num_queries == 1:
            return None
        # A corner is copied, because torch's attention on CUDA needs an aligned bias.
        return self.bias[-num_queries:, -len(tile.slots) :].contiguous()


class TorchPlan:
    """What all layers of a step share: indices, masks, and the memory that K/V is gathered into.

    It is kept in the metadata and renewed with each step. Layers with the same window and chunk share an entry.
    """

    def __init__(self) -> None:
        self._step = -1
        self._decode: dict[tuple[int, int, torch.dtype], list[PaddedBucket]] = {}
        self._prefill: dict[tuple[int, int, torch.dtype, bool], TiledPrefill] = {}
        self._scratch: torch.Tensor | None = None

    @staticmethod
    def of(metadata: AttentionMetadata) -> "TorchPlan":
        """Returns the plan for the current step of `metadata`."""
        plan = metadata.plan
        if not isinstance(plan, TorchPlan):
            plan = metadata.plan = TorchPlan()
        if plan._step != metadata.step:
            plan._step = metadata.step
            plan._decode.clear()
            plan._prefill.clear()
        return plan

    def gather(self, buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Returns `buffer[slots]`, `[len(slots), width]`, which is valid until the next call."""
        numel = len(slots) * buffer.shape[1]
        scratch = self._scratch
        if scratch is None or scratch.numel() < numel or scratch.dtype != buffer.dtype:
            # Half as much again, since sequences grow by a token per step.
            scratch = self._scratch = buffer.new_empty(numel + numel // 2)
        gathered = scratch[:numel].view(len(slots), buffer.shape[1])
        return torch.index_select(buffer, 0, slots, out=gathered)

    def decode_buckets(
        self, metadata: AttentionMetadata, options: AttentionOptions, dtype: torch.dtype
    ) -> list[PaddedBucket]:
        """Returns the decodes of a step in buckets of similar length. `dtype` is that of the queries."""
        key = options.window, options.chunk, dtype
        padded = self._decode.get(key)
        if padded is None:
            lengths = metadata.kv_lens_host[metadata.num_prefills :]
            if options.window:
                lengths = np.minimum(lengths, options.window)
            if options.chunk:
                lengths = lengths - np.maximum(lengths - 1, 0) // options.chunk * options.chunk
            # A padding row of a static batch has length 0. Attention to no key is NaN, so it attends to slot 0.
            lengths = np.maximum(lengths, 1)
            buckets = bucket_lengths(lengths)
            padded = [
                _padded_bucket(metadata, lengths, members if len(buckets) > 1 else None, dtype)
                for members in buckets
            ]
            self._decode[key] = padded
        return padded

    def prefill(
        self, metadata: AttentionMetadata, options: AttentionOptions, dtype: torch.dtype, fused: bool
    ) -> TiledPrefill:
        """Returns the prefills of a step in tiles. `dtype` is that of the queries. With `fused`, attention
        stores no scores, so a prefill without a prefix is one tile, whatever its length, or one in each
        chunk."""
        window, chunk = options.window, options.chunk
        key = window, chunk, dtype, fused
        plan = self._prefill.get(key)
        if plan is None:
            tiles, sink_tokens = _prefill_tiles(metadata, window, chunk, fused)
            plan = TiledPrefill(tiles, sink_tokens, _tile_bias(tiles, window, dtype))
            self._prefill[key] = plan
        return plan


def bucket_lengths(lengths: np.ndarray) -> list[np.ndarray]:
    """Returns indices into `lengths` (`[B]`, all at least 1), in buckets to be padded to their longest."""
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


def _padded_bucket(
    metadata: AttentionMetadata, lengths: np.ndarray, members: np.ndarray | None, dtype: torch.dtype
) -> PaddedBucket:
    table = metadata.memory.table
    rows = metadata.rows_host[metadata.num_prefills :]
    ends = np.maximum(metadata.kv_lens_host[metadata.num_prefills :], 1)
    if members is not None:
        rows, ends, lengths = rows[members], ends[members], lengths[members]
    width = int(lengths.max())
    offsets = np.arange(width)
    padded = offsets >= lengths[:, None]  # [G, width]
    entries = (ends - lengths)[:, None] + offsets
    if (ring := metadata.ring) is not None:
        within = ring.sinks + (entries - ring.sinks) % ring.size
        entries = np.where(entries < ring.sinks, entries, within)
    entries += rows[:, None] * table.max_entries
    # Padding reads row 0, hence slot 0, whose K/V is finite. The row's own entries there are stale: a free slot
    # may hold NaN, which no bias masks.
    entries[padded] = 0
    arrays = [entries.reshape(-1), padded.reshape(-1), *([] if members is None else [members])]
    where, hidden, *chosen = upload(arrays, table.device)
    bias = None
    if padded.any():
        bias = torch.zeros(len(rows), 1, 1, width, dtype=dtype, device=table.device)
        bias.masked_fill_(hidden.view(bias.shape), float("-inf"))
    return PaddedBucket(chosen[0] if chosen else None, table.read(where).long(), width, bias)


def _prefill_tiles(
    metadata: AttentionMetadata, window: int, chunk: int, fused: bool
) -> tuple[list[PrefillTile], list[torch.Tensor]]:
    """Returns the prefills in tiles, and the slots of each tile's sink tokens. No tile has queries of two
    chunks, so within a tile every query sees all keys of its chunk up to its own."""
    index, num_sink_tokens = metadata.index, metadata.num_sink_tokens
    tiles = []
    sink_tokens = []
    packed_end = 0
    for idx, num_tokens in enumerate(metadata.prefill_lens.tolist()):
        packed_end += num_tokens
        row, kv_len = int(metadata.rows_host[idx]), int(metadata.kv_lens_host[idx])
        if not kv_len:  # padding of a static batch
            continue
        prefix = kv_len - num_tokens
        shift = packed_end - kv_len  # from entries to packed tokens
        for begin, stop in _chunks_of(prefix, kv_len, chunk):
            # What the queries from `begin` to `stop` see begins here, a window aside.
            floor = begin // chunk * chunk if chunk else 0
            sees_all = begin == floor and (not window or stop - begin <= window)
            if sees_all and (fused or stop - begin <= QUERY_TILE):
                tiles.append(PrefillTile(begin + shift, stop + shift, None))
                continue
            # The first keys are seen by no query (a window), or only by queries rotated back (sink tokens).
            skipped = max(0, begin - window + 1) if window else floor + num_sink_tokens
            slots = index[row, skipped:stop].long()
            for start in range(begin, stop, QUERY_TILE):
                end = min(start + QUERY_TILE, stop)
                first = max(0, start - window + 1) if window else skipped
                tiles.append(PrefillTile(start + shift, end + shift, slots[first - skipped : end - skipped]))
                if num_sink_tokens:
                    sink_tokens.append(index[row, :num_sink_tokens].long())
    return tiles, sink_tokens


def _chunks_of(begin: int, end: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Cuts the entries [begin, end) where chunks begin; with a chunk of 0 they stay together."""
    while begin < end:
        stop = min((begin // chunk + 1) * chunk, end) if chunk else end
        yield begin, stop
        begin = stop


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
    """Attention of one layer in plain torch."""

    @property
    def _is_fused(self) -> bool:
        """Whether torch's own attention computes this layer, which knows no soft-cap and no sinks."""
        return not self.options.softcap and self.options.sink_logits is None

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
        pool = metadata.memory.pool
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
        if self._has_bias or metadata.mask is not None:
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
    def _has_bias(self) -> bool:
        """Whether scores have a bias, or keys after the query are seen, which the paths by bucket and by tile
        do not know."""
        return self.options.alibi_slopes is not None or not self.options.causal

    def _attend_each(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        """Attends sequence by sequence, decodes first: in a static batch, prefills write over the output of
        unused ones."""
        pool, table, num_prefills = metadata.memory.pool, metadata.memory.table, metadata.num_prefills
        step = TorchPlan.of(metadata)
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
            slots = table.slots(row, 0, length).long()
            keys, values = pool.spec.split(step.gather(pool.kv(self.layer_idx), slots))
            mask = metadata.mask
            added = None if mask is None else mask_reference(mask, queries, idx, length)
            out[queries] = attend_with_bias(q[queries], keys, values, self.options, added)

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        pool = metadata.memory.pool
        step = TorchPlan.of(metadata)
        plan = step.prefill(metadata, self.options, q.dtype, fused=self._is_fused)
        group = self.num_heads // self.num_kv_heads
        if metadata.is_cuda_graph:
            out.zero_()  # also the padding, so that what is computed of it stays finite
        for tile in plan.tiles:
            if tile.slots is None:
                # The pool's type may be narrower than the model's: attend to what a later step will read.
                keys = k[tile.start : tile.end].to(pool.spec.dtype)
                values = v[tile.start : tile.end].to(pool.spec.dtype)
            else:
                keys, values = pool.spec.split(step.gather(pool.kv(self.layer_idx), tile.slots))
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
        pool = metadata.memory.pool
        step = TorchPlan.of(metadata)
        plan = step.prefill(metadata, self.options, q.dtype, fused=False)
        assert self.rotary is not None
        assert metadata.dropped is not None
        rotated = self.rotary.rotate_back(q, metadata.dropped)
        for tile, sink_tokens in zip(plan.tiles, plan.sink_tokens, strict=True):
            assert tile.slots is not None
            parts = ((q, tile.slots, plan.bias_of(tile)), (rotated, sink_tokens, None))
            states = []
            for part, (queries, slots, bias) in enumerate(parts):
                keys, values = pool.spec.split(step.gather(pool.kv(self.layer_idx), slots))
                # Learned sinks join one of the parts, here the first.
                states.append(
                    self._attend_part(queries[tile.start : tile.end], keys, values, bias, part == 0)
                )
            partial_out, partial_lse = (torch.stack(part) for part in zip(*states, strict=True))
            out[tile.start : tile.end] = merge_states_reference(partial_out, partial_lse)[0]

    def _attend_to_rings(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        kv, ring, rotated = self.paged_kv(metadata), metadata.ring, q
        assert ring is not None
        if ring.sinks:
            assert self.rotary is not None
            lengths = metadata.kv_lens_host.tolist()
            dropped = torch.tensor([ring.dropped(length - 1) for length in lengths], device=q.device)
            rotated = self.rotary.rotate_back(q, dropped)
        out.zero_()  # also the padding of a static batch
        for token, length in enumerate(metadata.kv_lens_host.tolist()):
            parts: list[tuple[torch.Tensor, torch.Tensor]] = []
            sinks = range(min(ring.sinks, length))
            window = range(ring.first_key(length - 1), length)
            # Learned sinks join one of the parts, here the first.
            for queries, positions in ((q, window), (rotated, sinks)):
                if positions or (length and not parts):
                    row, seen = (
                        int(metadata.rows_host[token]),
                        torch.tensor(list(positions), dtype=torch.int64),
                    )
                    slots = slots_reference(kv, row, seen.to(q.device))
                    parts.append(
                        self._attend_part(
                            queries[token : token + 1], kv.k[slots], kv.v[slots], None, not parts
                        )
                    )
            if parts:
                outs, lses = (torch.stack(part) for part in zip(*parts, strict=True))
                out[token : token + 1] = merge_states_reference(outs, lses)[0]

    def _attend_cross(self, q: torch.Tensor, cross: CrossMetadata, out: torch.Tensor) -> None:
        attend_cross(q, self.paged_kv(cross.metadata), cross, self.options, out)

    def _decode(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        pool = metadata.memory.pool
        plan = TorchPlan.of(metadata)
        for members, slots, width, bias in plan.decode_buckets(metadata, self.options, q.dtype):
            queries = q if members is None else q.index_select(0, members)
            keys, values = pool.spec.split(plan.gather(pool.kv(self.layer_idx), slots))
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
        scores, _ = attention_scores_reference(
            q,
            self.paged_kv(metadata),
            metadata.rows,
            metadata.q_starts,
            entries,
            metadata.kv_lens,
            self.options,
            width=width,
            mask=metadata.mask,
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
        if (sink_logits := self.options.sink_logits) is None:
            weights = scores.softmax(-1)
        else:
            sinks = sink_logits.view(self.num_kv_heads, -1, *sink_dims)
            weights = (scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)).exp()
        return torch.matmul(weights.to(v.dtype), v)

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Computes the scores `[..., n, S]`, float32, of q `[..., n, D]` and k `[..., S, D]`."""
        softcap = self.options.softcap
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * self.scale
        return softcap * torch.tanh(scores / softcap) if softcap else scores

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
        if bias is not None:
            scores += bias
        lse = scores.logsumexp(-1)  # [num_kv_heads, group, T]
        if with_sinks and self.options.sink_logits is not None:
            lse = torch.logaddexp(lse, self.options.sink_logits.view(*lse.shape[:2], 1))
        weights = scores.sub_(lse[..., None]).exp_().flatten(1, 2)
        attended = torch.matmul(weights.to(v.dtype), v.transpose(0, 1)).float().unflatten(1, (-1, num_tokens))
        return attended.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2) * LOG2_E
