"""The work list of a prefill step: which rows of which request's queries each program computes.

It is computed on the device once a step for all layers, from lengths that only the device has. The capacity of
the list follows from shapes alone, so a captured step stays right when lengths change.

A request's rows (its queries times the query heads that share a K/V head) are cut into tiles:

    rows     ├─ q_len * GROUP of request 0 ─┼─ of request 1 ─┼ …
    tiles    ├── BLOCK_M ──┼── BLOCK_M ──┼──┼── BLOCK_M ──┼──┼ …       the last one of a request may be short

The list has the tiles of all requests in descending order of their keys, so that no long tile starts last.
Nothing is sorted: the tiles of one request are in order already, so the number of its tiles that precede a
given tile is a division.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .attend_keys import check_mask, check_requests
from .paged_kv import HeadShape

TILE_FIELDS = (
    8  # request, row, first of its rows, rows of the request, first query, keys before it, unused, unused
)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


class PrefillPlan(NamedTuple):
    """The work list of a prefill step.

    `tiles`: int32 `[capacity, 8]`: request (-1 after the last tile), row of the index, the tile's first row
    among the request's rows, the number of the request's rows, its first query, its number of keys before that
    query (negative if it has more queries than keys).
    `taken`: int32 `[2]`, zeros: `prefill_hopper` counts there the tiles that its programs have taken, and
    resets it to zeros, so one run at a time may use a plan.
    `launch`, `window`, `num_requests`, `chunk`: what the tiles were made for.
    """

    tiles: Tensor
    taken: Tensor
    launch: tuning.Launch
    window: int
    num_requests: int
    chunk: int = 0


@triton.jit(do_not_specialize=["num_requests"])
def _plan_kernel(
    rows,  # [B]
    q_starts,  # [B + 1]
    lengths,  # [B]
    tiles,  # [capacity, 8], filled with -1
    taken,  # [2]
    num_requests,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MOST_KEYS: tl.constexpr,
):
    request = tl.program_id(0)
    if (request == 0) & (tl.program_id(1) == 0):
        tl.store(taken + tl.arange(0, 2), 0)
    row = tl.load(rows + request).to(tl.int32)
    q_begin = tl.load(q_starts + request)
    q_len = tl.load(q_starts + request + 1) - q_begin
    prefix = tl.load(lengths + request) - q_len
    num_tiles = tl.cdiv(q_len * GROUP, BLOCK_M)
    for start in range(tl.program_id(1) * BLOCK_T, num_tiles, tl.num_programs(1) * BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        last_row = tl.minimum((tile + 1) * BLOCK_M, q_len * GROUP) - 1
        num_keys = tl.minimum(tl.maximum(prefix + last_row // GROUP + 1, 0), MOST_KEYS)
        place = num_tiles - 1 - tile
        for first in range(0, num_requests, BLOCK_B):
            other = first + tl.arange(0, BLOCK_B)  # [BLOCK_B]
            is_other = (other < num_requests) & (other != request)
            other_begin = tl.load(q_starts + other, mask=is_other, other=0)
            other_len = tl.load(q_starts + other + 1, mask=is_other, other=0) - other_begin
            other_prefix = tl.load(lengths + other, mask=is_other, other=0) - other_len
            other_tiles = tl.cdiv(other_len * GROUP, BLOCK_M)
            # Tiles with more keys precede this one; of tiles with as many, those of earlier requests.
            least = num_keys[:, None] - (other < request).to(tl.int32)[None, :]
            rows_below = tl.maximum((least - other_prefix[None, :]) * GROUP, 0)
            preceding = tl.maximum(other_tiles[None, :] - rows_below // BLOCK_M, 0)
            preceding = tl.where(rows_below < (other_len * GROUP)[None, :], preceding, 0)
            preceding = tl.where(least < MOST_KEYS, preceding, 0)
            preceding = tl.where(least < 0, other_tiles[None, :], preceding)
            place += tl.sum(tl.where(is_other[None, :], preceding, 0), 1)
        is_tile = tile < num_tiles
        fields = tiles + place * _TILE_FIELDS
        tl.store(fields, request, mask=is_tile)
        tl.store(fields + 1, row, mask=is_tile)
        tl.store(fields + 2, tile * BLOCK_M, mask=is_tile)
        tl.store(fields + 3, q_len * GROUP, mask=is_tile)
        tl.store(fields + 4, q_begin, mask=is_tile)
        tl.store(fields + 5, prefix, mask=is_tile)


@torch.library.custom_op("lightkv::prefill_plan", mutates_args=("tiles", "taken"))
def _prefill_plan(
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    tiles: Tensor,
    taken: Tensor,
    group: int,
    block_m: int,
    most_keys: int,
) -> None:
    num_requests = rows.shape[0]
    tiles.fill_(-1)
    if num_requests == 0:
        taken.zero_()
        return
    block_t, block_b = 16, min(128, tuning.block_for(num_requests))
    # Long requests have many tiles, so several programs share one request; but then the requests are few.
    programs = min(64, triton.cdiv(tiles.shape[0], block_t * num_requests))
    _plan_kernel[(num_requests, programs)](
        rows,
        q_starts,
        lengths,
        tiles,
        taken,
        num_requests,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_T=block_t,
        BLOCK_B=block_b,
        MOST_KEYS=most_keys,
        num_warps=4,
    )


_prefill_plan.register_fake(lambda *_: None)  # the outputs are arguments


def _most_keys(window: int, chunk: int, block_m: int, group: int) -> int:
    """Returns an upper bound on the keys that a tile's queries see together. Tiles with more keys before them
    count as many, which orders those of chunks roughly: their keys depend on their place in the chunk."""
    return (window or chunk) + triton.cdiv(block_m, group) if window or chunk else 2**31 - 1


def prefill_plan(
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    heads: HeadShape,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    window: int = 0,
    chunk: int = 0,
    launch: tuning.Launch | None = None,
) -> PrefillPlan:
    """Makes the work list of a prefill step, which serves all layers with these heads and this window or these
    chunks.

    Args:
        rows, q_starts, lengths: as in `prefill_attention`; read on the device.
        heads: of the layers.
        num_tokens: T of q.
        dtype: of q.
        window, chunk: as in `AttentionOptions`.
        launch: tile sizes and launch options; those of `tuning.prefill_launch` if None.

    Raises:
        ValueError: rows or lengths do not fit.
    """
    check_requests(rows, lengths)
    check_mask(window, chunk)
    group = heads.num_heads // heads.num_kv_heads
    if launch is None:
        launch = tuning.prefill_launch(
            tuning.device_class(rows.device),
            len(rows),
            heads.num_kv_heads,
            num_tokens * group,
            heads.key_dim,
            heads.value_dim,
            dtype.itemsize,
        )
    block_m = launch.block_m
    # Each request's last tile may have a single row.
    capacity = (num_tokens * group + len(rows) * (block_m - 1)) // block_m
    tiles = torch.empty(capacity, TILE_FIELDS, dtype=torch.int32, device=rows.device)
    taken = torch.empty(2, dtype=torch.int32, device=rows.device)
    most_keys = _most_keys(window, chunk, block_m, group)
    _prefill_plan(rows, q_starts, lengths, tiles, taken, group, block_m, most_keys)
    return PrefillPlan(tiles, taken, launch, window, len(rows), chunk)


def prefill_plan_reference(
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    *,
    group: int,
    block_m: int,
    window: int = 0,
    chunk: int = 0,
) -> Tensor:
    """Computes `prefill_plan` in plain Python: the used tiles, int32 `[n, 8]`; unused fields are -1."""
    most_keys = _most_keys(window, chunk, block_m, group)
    starts, tiles = q_starts.tolist(), []
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        q_begin, q_end = starts[request : request + 2]
        num_rows, prefix = (q_end - q_begin) * group, length - (q_end - q_begin)
        for first_row in range(0, num_rows, block_m):
            last_query = (min(first_row + block_m, num_rows) - 1) // group
            num_keys = min(max(prefix + last_query + 1, 0), most_keys)
            fields = [request, row, first_row, num_rows, q_begin, prefix, -1, -1]
            tiles.append((-num_keys, request, -first_row, fields))
    fields = [fields for *_, fields in sorted(tiles)]
    return torch.tensor(fields, dtype=torch.int32, device=rows.device).view(-1, TILE_FIELDS)
