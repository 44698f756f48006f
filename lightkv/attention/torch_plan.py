"""What the torch backend derives from a step once for all its layers: decodes in padded buckets, prefills in
tiles, and the biases that hide keys from their queries."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from lightkv.memory.staging import upload
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants.chunk import Chunk
from lightkv.triton_kernels.attention.variants.window import Window

from .step import Step

# Decode pads sequences to the longest of their bucket. A bucket ends where its padding would exceed a quarter
# of its tokens, unless the padding is so small that the calls for another bucket cost more.
PADDING_FRACTION = 0.25
PADDING_TOKENS = 256
# The most queries of a prefill tile that needs a bias, which has a row of the keys' length for each query.
QUERY_TILE = 512


def window_and_chunk(options: AttentionOptions) -> tuple[int, int]:
    """Returns the sizes of a layer's window and of its chunks; 0 for none."""
    window, chunk = options.of(Window), options.of(Chunk)
    return 0 if window is None else window.size, 0 if chunk is None else chunk.size


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
    row: int  # of the step's index
    slots: torch.Tensor | None  # int64 [S], up to the last query's own; None: the queries' own keys


class TiledPrefill(NamedTuple):
    """The prefills of a step in tiles, and one bias for all tiles.

    A tile's keys end with its last query's own key, so the mask, counted back from the last query and key, is
    the same in every tile: a tile's bias is the lower right corner of the largest one.

        first query  ├────────── seen ──────────┼ hidden ┤
        last query   ├─────────────── seen ──────────────┤ its own key
    """

    tiles: list[PrefillTile]
    bias: torch.Tensor | None  # [at most QUERY_TILE, S of the longest tile], 0 and -inf

    def bias_of(self, tile: PrefillTile) -> torch.Tensor | None:
        """Returns the bias of a tile, `[end - start, S]`; None where every query attends to every key, or
        causally to the queries' own keys."""
        num_queries = tile.end - tile.start
        if self.bias is None or tile.slots is None or num_queries == 1:
            return None
        # A corner is copied, because torch's attention on CUDA needs an aligned bias.
        return self.bias[-num_queries:, -len(tile.slots) :].contiguous()


def decode_buckets(
    step: Step, index: torch.Tensor, options: AttentionOptions, dtype: torch.dtype
) -> list[PaddedBucket]:
    """Returns the decodes of a step in buckets of similar length. `index`: the layer's (`Step.index_of`);
    `dtype` is that of the queries."""
    window, chunk = window_and_chunk(options)
    lengths = step.host.kv_lens[step.host.num_prefills :]
    if window:
        lengths = np.minimum(lengths, window)
    if chunk:
        lengths = lengths - np.maximum(lengths - 1, 0) // chunk * chunk
    # A padding row of a static batch has length 0. Attention to no key is NaN, so it attends to slot 0.
    lengths = np.maximum(lengths, 1)
    buckets = bucket_lengths(lengths)
    return [
        _padded_bucket(step, index, lengths, members if len(buckets) > 1 else None, dtype)
        for members in buckets
    ]


def tiled_prefill(
    step: Step, index: torch.Tensor, options: AttentionOptions, dtype: torch.dtype, fused: bool
) -> TiledPrefill:
    """Returns the prefills of a step in tiles. `index`: the layer's (`Step.index_of`); `dtype` is that of the
    queries. With `fused`, attention stores no scores, so a prefill without a prefix is one tile, whatever its
    length, or one in each chunk."""
    window, chunk = window_and_chunk(options)
    tiles = _prefill_tiles(step, index, window, chunk, fused)
    return TiledPrefill(tiles, _tile_bias(tiles, window, dtype))


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
    step: Step, index: torch.Tensor, lengths: np.ndarray, members: np.ndarray | None, dtype: torch.dtype
) -> PaddedBucket:
    host = step.host
    rows = host.rows[host.num_prefills :]
    ends = np.maximum(host.kv_lens[host.num_prefills :], 1)
    if members is not None:
        rows, ends, lengths = rows[members], ends[members], lengths[members]
    width = int(lengths.max())
    offsets = np.arange(width)
    padded = offsets >= lengths[:, None]  # [G, width]
    entries = (ends - lengths)[:, None] + offsets
    entries += rows[:, None] * index.shape[1]
    # Padding reads row 0, hence slot 0, whose K/V is finite. The row's own entries there are stale: a free slot
    # may hold NaN, which no bias masks.
    entries[padded] = 0
    arrays = [entries.reshape(-1), padded.reshape(-1), *([] if members is None else [members])]
    where, hidden, *chosen = upload(arrays, index.device)
    bias = None
    if padded.any():
        bias = torch.zeros(len(rows), 1, 1, width, dtype=dtype, device=index.device)
        bias.masked_fill_(hidden.view(bias.shape), float("-inf"))
    return PaddedBucket(chosen[0] if chosen else None, index.view(-1)[where].long(), width, bias)


def _prefill_tiles(
    step: Step, index: torch.Tensor, window: int, chunk: int, fused: bool
) -> list[PrefillTile]:
    """Returns the prefills in tiles. No tile has queries of two chunks, so within a tile every query sees all
    keys of its chunk up to its own."""
    host = step.host
    tiles = []
    packed_end = 0
    for idx, num_tokens in enumerate(host.counts[: host.num_prefills].tolist()):
        packed_end += num_tokens
        row, kv_len = int(host.rows[idx]), int(host.kv_lens[idx])
        if not kv_len:  # padding of a static batch
            continue
        prefix = kv_len - num_tokens
        shift = packed_end - kv_len  # from entries to packed tokens
        for begin, stop in _chunks_of(prefix, kv_len, chunk):
            # What the queries from `begin` to `stop` see begins here, a window aside.
            floor = begin // chunk * chunk if chunk else 0
            sees_all = begin == floor and (not window or stop - begin <= window)
            if sees_all and (fused or stop - begin <= QUERY_TILE):
                tiles.append(PrefillTile(begin + shift, stop + shift, row, None))
                continue
            begin_keys = max(0, begin - window + 1) if window else floor
            slots = index[row, begin_keys:stop].long()
            for start in range(begin, stop, QUERY_TILE):
                end = min(start + QUERY_TILE, stop)
                first = max(0, start - window + 1) if window else begin_keys
                keys = slots[first - begin_keys : end - begin_keys]
                tiles.append(PrefillTile(start + shift, end + shift, row, keys))
    return tiles


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
