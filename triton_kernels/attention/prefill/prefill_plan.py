"""The work list of a prefill step: the rows of a request's queries, and the keys, that each program computes.

It is computed on the device once a step for all layers, from lengths that only the device has. The capacity of
the list follows from shapes alone, so a captured step stays right when lengths change.

A request's rows (its queries times the query heads that share a K/V head) are cut into tiles:

    rows     ├─ q_len * GROUP of request 0 ─┼─ of request 1 ─┼ …
    tiles    ├── BLOCK_M ──┼── BLOCK_M ──┼──┼── BLOCK_M ──┼──┼ …       the last one of a request may be short

The tiles of all requests are put into descending order of their keys, so that no long tile starts last. Nothing
is sorted: the tiles of one request are in order already, so the number of its tiles that precede a given tile
is a division.

As a rule each tile is an item of the list, which a program computes alone. Where that would keep the device
busy for longer than necessary, as with a few queries after many keys, the keys of all tiles are laid side by
side and cut into equal shares, one for each worker:

    tiles    ├────────────── 0 ──────────────┼───────────── 1 ────────────┼───── 2 ────┤
    workers  ├─────── 0 ──────┼─────── 1 ──────┼─────── 2 ──────┼─────── 3 ──────┤          (shares)
    items    ├─────── 0 ──────┼────── 1 ─────┼c1┼────── 2 ──────┼─── 3 ───┼─ c2 ─┤ …

An item is then a piece of a tile. Item w is the first of share w, and names the next one of its share: a tile
that begins inside a share is first continued there, by the item `num_shares` + tile (c1 and c2 above). Each
piece of a tile that is cut writes a part, a partial output: item w part w, and a tile's first piece, if it
begins inside share w, part num_workers + w. `prefill_combine.py` combines them. So there are at most two parts
for each worker.

Tiles are cut where that shortens the work by a sixteenth of a share, or by a fifth where several requests have
tiles: pieces of many requests do not read the same keys together.

If shares need to be longer by a sixteenth at most for it, each tile begins a share of its own, and the rest of
its last share stays empty. Tiles of one request are cut at the same keys then:

    tiles    ├───────────── 0 ───────────┤     ├───────────── 1 ────────────┤    ├──── 2 ────┤
    workers  ├────── 0 ──────┼────── 1 ──────┼────── 2 ──────┼────── 3 ──────┼────── 4 ──────┤
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_inputs import REQUESTS, check_limits, check_plan
from lightkv.triton_kernels.attention.paged_kv import RECORDS, AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.variants.hooks import first_key
from lightkv.triton_kernels.attention.variants.variant import Variant, bind
from lightkv.triton_kernels.attention.variants.variant import limits as limits_of
from lightkv.triton_kernels.operators import operator
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat

from . import prefill_tuning

# 0 to 5: request, row, first of its rows, rows of the request, first query, keys before it
# 6 to 9: first key, end of the keys, part (-1: the whole tile), next item of the share (-1: none)
# 10 and 11, of a tile's second piece: parts of the tile, the first of them; the others begin at the item
ITEM_FIELDS = tl.constexpr(12)
ALIGNED_COST = tl.constexpr(16)  # a share may be longer by a sixteenth, so that tiles begin shares
# Whole tiles may take longer than equal shares by a sixteenth, and those of several requests by a fifth.
CUT_GAIN = tl.constexpr(16)
CUT_GAIN_OF_SEVERAL = tl.constexpr(5)
LEAST_SECTIONS = tl.constexpr(4)
ALL_KEYS = 2**31 - 1  # the end of the keys of an item that is a whole tile
_ALL_KEYS = tl.constexpr(ALL_KEYS)


class PrefillPlan(NamedTuple):
    """The work list of a prefill step.

    `items`: int32 `[capacity, 12]`: request (-1 for an unused item), row of the index, the tile's first row
    among the request's rows, the number of the request's rows, its first query, its number of keys before that
    query (negative if it has more queries than keys); first key and end of the keys that the item is limited
    to, its part (-1 if it is a whole tile), the next item of its share (-1 if there is none); and, in the
    second piece of a tile, the number of the tile's parts and the first of them (-1 in other items).
    `num_shares`: programs begin at the first `num_shares` items; all others follow one of these.
    `num_workers`: shares for each K/V head that keys are cut into; there are at most 2 * num_workers parts. 0
    if tiles are never cut.
    `counters`: int32 `[4]`: two zeros, where `prefill_hopper` counts the items that its programs have taken and
    the programs that have finished, and which it resets, so one run at a time may use a plan; the number of
    items that programs begin at; and the K/V heads of a section (`prefill_tuning.SECTION_BYTES`).
    `launch`, `num_requests`, `limits`, `causal`: what the plan was made for.
    """

    items: Tensor
    num_shares: int
    num_workers: int
    counters: Tensor
    launch: tuning.Launch
    num_requests: int
    limits: tuple[Variant, ...] = ()
    causal: bool = True

    def check(self, num_requests: int, options: AttentionOptions) -> None:
        """Raises ValueError unless the plan was made for so many requests and such layers."""
        asked = num_requests, limits_of(options.variants), options.causal
        check_plan((self.num_requests, self.limits, self.causal), asked, "requests, limits, causal")


@triton.jit(do_not_specialize=["num_requests", "section_keys", "num_kv_heads"])
def _plan_kernel(
    rows,  # [B]
    q_starts,  # [B + 1]
    lengths,  # [B]
    tiles,  # [capacity, 12], filled with -1
    counters,  # [4]
    num_requests,
    section_keys,
    num_kv_heads,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MOST_KEYS: tl.constexpr,
    FULL: tl.constexpr,
):
    request = tl.program_id(0)
    if (request == 0) & (tl.program_id(1) == 0):
        all_tiles = 0
        all_keys = 1  # not 0, which would divide
        for first in range(0, num_requests, BLOCK_B):
            other = first + tl.arange(0, BLOCK_B)  # [BLOCK_B]
            is_other = other < num_requests
            begin = tl.load(q_starts + other, mask=is_other, other=0)
            num_queries = tl.load(q_starts + other + 1, mask=is_other, other=0) - begin
            before = tl.load(lengths + other, mask=is_other, other=0) - num_queries
            all_tiles += tl.sum(tl.cdiv(num_queries * GROUP, BLOCK_M), 0)
            all_keys += tl.sum(num_queries + tl.minimum(tl.maximum(before, 0), MOST_KEYS), 0)
        tl.store(counters + tl.arange(0, 2), 0)
        tl.store(counters + 2, all_tiles)
        tl.store(counters + 3, tl.minimum(tl.maximum(section_keys // all_keys, 1), num_kv_heads))
    row = tl.load(rows + request).to(tl.int32)
    q_begin = tl.load(q_starts + request)
    q_len = tl.load(q_starts + request + 1) - q_begin
    prefix = tl.load(lengths + request) - q_len
    num_tiles = tl.cdiv(q_len * GROUP, BLOCK_M)
    for start in range(tl.program_id(1) * BLOCK_T, num_tiles, tl.num_programs(1) * BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        last_row = tl.minimum((tile + 1) * BLOCK_M, q_len * GROUP) - 1
        num_keys = tl.minimum(tl.maximum(prefix + last_row // GROUP + 1, 0), MOST_KEYS)
        if FULL:
            num_keys = tl.zeros_like(tile) + tl.maximum(prefix + q_len, 0)
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
            if FULL:  # the tiles of a request have equally many keys
                preceding = tl.where((other_prefix + other_len)[None, :] > least, other_tiles[None, :], 0)
            place += tl.sum(tl.where(is_other[None, :], preceding, 0), 1)
        is_tile = tile < num_tiles
        fields = tiles + place * ITEM_FIELDS
        tl.store(fields, request, mask=is_tile)
        tl.store(fields + 1, row, mask=is_tile)
        tl.store(fields + 2, tile * BLOCK_M, mask=is_tile)
        tl.store(fields + 3, q_len * GROUP, mask=is_tile)
        tl.store(fields + 4, q_begin, mask=is_tile)
        tl.store(fields + 5, prefix, mask=is_tile)
        tl.store(fields + 6, 0, mask=is_tile)
        tl.store(fields + 7, _ALL_KEYS, mask=is_tile)


@triton.jit
def _load_units(
    tiles,
    tile,
    capacity,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    limits,  # `Variants`
    UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Returns the first unit of keys that each tile's queries see, and how many they see; 0 for no tile, and at
    least 1 for a tile, whose output has to be written."""
    fields = tiles + tile * ITEM_FIELDS
    is_tile = tl.load(fields, mask=tile < capacity, other=-1) >= 0
    first_row = tl.load(fields + 2, mask=is_tile, other=0)
    num_rows = tl.load(fields + 3, mask=is_tile, other=0)
    prefix = tl.load(fields + 5, mask=is_tile, other=0)
    last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
    end = tl.maximum(prefix + (last_row // GROUP + 1 if CAUSAL else num_rows // GROUP), 0)
    begin = first_key(limits, prefix + first_row // GROUP)
    units = tl.maximum(tl.cdiv(end, UNIT) - begin // UNIT, 1)
    return begin // UNIT, tl.where(is_tile, units, 0)


@triton.jit(
    do_not_specialize=[
        "capacity", "num_shares", "num_workers", "num_programs", "num_kv_heads", "least_units", "least_gain"
    ],
    do_not_specialize_on_alignment=["tiles", "items", "counters"],
)  # fmt: skip
def _share_kernel(
    tiles,  # [capacity, 12]
    items,  # [num_shares + capacity, 12], filled with -1
    counters,  # [4]
    capacity,
    num_shares,
    num_workers,
    num_programs,
    num_kv_heads,
    least_units,
    least_gain,
    limits,  # `Variants`
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # How long the device is busy with whole tiles, in units. Programs take them in descending order, so one
    # begins when all programs have equal shares of those before it, or when as many turns are over as tiles of
    # full turns precede it, whichever is earlier.
    total = 0
    longest = 1
    first_request = tl.load(tiles)
    num_others = 0  # tiles of other requests
    turns_end = 0
    whole = 0
    for start in range(0, capacity, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)  # [BLOCK_T]
        _first_unit, units = _load_units(tiles, tile, capacity, GROUP, BLOCK_M, limits, UNIT, CAUSAL)
        preceding = (total + tl.cumsum(units, 0) - units).to(tl.int64) * num_kv_heads // num_programs
        first_turn = tl.cdiv(tile * num_kv_heads, num_programs)
        turns = tl.cdiv((tile + 1) * num_kv_heads, num_programs) - first_turn
        end = tl.minimum(preceding.to(tl.int32) + units, turns_end + tl.cumsum(turns * units, 0))
        whole = tl.maximum(whole, tl.max(tl.where(units > 0, end, 0), 0))
        turns_end += tl.sum(turns * units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
        request = tl.load(tiles + tile * ITEM_FIELDS, mask=tile < capacity, other=-1)
        num_others += tl.sum(((request >= 0) & (request != first_request)).to(tl.int32), 0)
        total += tl.sum(units, 0)

    share = tl.maximum(tl.cdiv(total, num_workers), least_units)
    # Where it is little longer, each tile begins a share of its own: the tiles of a request, which have nearly
    # the same keys, are then cut at the same ones, and programs that read them together do so from the cache.
    longer = share + share // ALIGNED_COST
    num_shorter = 0
    num_longer = 0
    for start in range(0, capacity, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        _first_unit, units = _load_units(tiles, tile, capacity, GROUP, BLOCK_M, limits, UNIT, CAUSAL)
        num_shorter += tl.sum(tl.cdiv(units, share), 0)
        num_longer += tl.sum(tl.cdiv(units, longer), 0)
    aligned = tl.minimum(num_shorter, num_longer) <= num_workers
    if (num_shorter > num_workers) & (num_longer <= num_workers):
        share = longer
    shared = share * tl.cdiv(num_workers * num_kv_heads, num_programs)
    gain = tl.where(num_others > 0, CUT_GAIN_OF_SEVERAL, CUT_GAIN)
    is_cut = whole - shared >= least_gain + shared // gain
    if is_cut:
        num_cut = tl.where(num_shorter > num_workers, num_longer, num_shorter)
        tl.store(counters + 2, tl.where(aligned, num_cut, tl.cdiv(total, share)))
    else:
        # A section's longest tile begins when the section before it ends. So there are as many sections as a
        # program's work has times the longest tile's. Fewer than four save less than their last tiles cost.
        length = tl.cast(longest, tl.int64) * num_programs
        sections = ((tl.cast(total, tl.int64) * num_kv_heads * 4 + length * 3) // (length * 4)).to(tl.int32)
        sections = tl.where(sections < LEAST_SECTIONS, 1, sections)
        tl.store(counters + 3, tl.maximum(tl.load(counters + 3), tl.cdiv(num_kv_heads, sections)))
    before = 0
    for start in range(0, capacity, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        first_unit, units = _load_units(tiles, tile, capacity, GROUP, BLOCK_M, limits, UNIT, CAUSAL)
        room = tl.where(aligned, tl.cdiv(units, share) * share, units)
        begin = before + tl.cumsum(room, 0) - room  # in units, of the tile among all tiles
        end = begin + units
        before += tl.sum(room, 0)
        first_worker = begin // share
        begins_inside = begin % share != 0  # a share
        num_pieces = tl.where(units > 0, tl.where(is_cut, (end - 1) // share - first_worker + 1, 1), 0)
        source = tiles + tile * ITEM_FIELDS
        for piece in range(tl.max(num_pieces, 0)):
            is_piece = piece < num_pieces
            worker = first_worker + piece
            opens_share = (piece > 0) | ~begins_inside
            item = tl.where(is_cut, tl.where(opens_share, worker, num_shares + tile), tile)
            fields = items + item * ITEM_FIELDS
            for field in tl.static_range(6):
                tl.store(fields + field, tl.load(source + field, mask=is_piece), mask=is_piece)
            is_part = is_piece & (num_pieces > 1)
            is_last = piece == num_pieces - 1
            begin_key = (first_unit + tl.maximum(worker * share - begin, 0)) * UNIT
            end_key = (first_unit + (worker + 1) * share - begin) * UNIT
            tl.store(fields + 6, tl.where(is_part, begin_key, 0), mask=is_piece)
            tl.store(fields + 7, tl.where(is_last, _ALL_KEYS, end_key), mask=is_piece)
            tl.store(fields + 8, tl.where(opens_share, worker, num_workers + worker), mask=is_part)
            goes_on = is_cut & is_last & (end % share != 0) & (end < total)  # the share, with the next tile
            goes_on = goes_on & ~aligned
            tl.store(fields + 9, num_shares + tile + 1, mask=is_piece & goes_on)
            is_second = is_part & (piece == 1)
            tl.store(fields + 10, num_pieces, mask=is_second)
            first_part = tl.where(begins_inside, num_workers + first_worker, first_worker)
            tl.store(fields + 11, first_part, mask=is_second)


class TileSizes(NamedTuple):
    """How the rows of a step are cut into tiles.

    `capacity`: the most tiles. `section_keys`: keys whose K/V of one head fills a section
    (`prefill_tuning.SECTION_BYTES`). `group`: query heads that share a K/V head. `block_m`: rows of a tile.
    """

    capacity: int
    section_keys: int
    num_kv_heads: int
    group: int
    block_m: int


@operator(
    "prefill_plan",
    writes=("numbers", "counters"),
    records=(*RECORDS, TileSizes, prefill_tuning.PrefillShares),
)
def _prefill_plan(
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    numbers: Tensor,
    counters: Tensor,
    sizes: TileSizes,
    limits: tuple[Variant, ...],
    causal: bool,
    shares: prefill_tuning.PrefillShares,
) -> None:
    num_requests = rows.shape[0]
    capacity, section_keys, num_kv_heads, group, block_m = sizes
    numbers.fill_(-1)
    if num_requests == 0:
        counters.zero_()
        return
    block_t, block_b = 16, min(128, tuning.block_for(num_requests))
    # Long requests have many tiles, so several programs share one request; but then the requests are few.
    programs = min(64, triton.cdiv(capacity, block_t * num_requests))
    items, tiles = numbers[:-capacity], numbers[-capacity:]
    _plan_kernel[(num_requests, programs)](
        rows,
        q_starts,
        lengths,
        tiles,
        counters,
        num_requests,
        section_keys,
        num_kv_heads,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_T=block_t,
        BLOCK_B=block_b,
        MOST_KEYS=key_bound(limits, causal, block_m, group),
        FULL=is_full(limits, causal),
        num_warps=4,
    )
    num_workers, num_programs, unit, least_units, least_gain = shares
    if num_workers:
        _share_kernel[(1,)](
            tiles,
            items,
            counters,
            capacity,
            len(items) - capacity,
            num_workers,
            num_programs,
            num_kv_heads,
            least_units,
            least_gain,
            bind(limits, 1.0)[0],
            GROUP=group,
            BLOCK_M=block_m,
            UNIT=unit,
            CAUSAL=causal,
            BLOCK_T=min(1024, tuning.block_for(capacity)),
            num_warps=4,
        )


def key_bound(limits: Sequence[Variant], causal: bool, block_m: int, group: int) -> int:
    """Returns an upper bound on the keys that a tile's queries see together. Tiles with more keys before them
    count as many, which orders those of chunks roughly: their keys depend on their place in the chunk."""
    bounds = [most for one in limits if (most := one.most_keys()) is not None]
    return min(bounds) + triton.cdiv(block_m, group) if bounds and causal else 2**31 - 1


def is_full(limits: Sequence[Variant], causal: bool) -> bool:
    """Returns whether every query sees all keys of its request."""
    return not causal and not limits


def prefill_plan(
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    heads: HeadShape,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    limits: tuple[Variant, ...] = (),
    causal: bool = True,
    layer_format: KVFormat = AS_COMPUTED,
    launch: tuning.Launch | None = None,
    shares: prefill_tuning.PrefillShares | None = None,
) -> PrefillPlan:
    """Makes the work list of a prefill step, which serves all layers with these heads and limits.

    Args:
        rows, q_starts, lengths: as in `prefill_attention`; read on the device.
        heads: of the layers.
        num_tokens: T of q.
        dtype: of q.
        limits: what limits the first key that a query sees (`variants.limits`).
        causal: as in `AttentionOptions`.
        layer_format: how the layers' K/V is stored.
        launch: tile sizes and launch options; those of `prefill_tuning.prefill_launch` if None.
        shares: how keys are shared out where tiles are few; `prefill_tuning.prefill_shares` if None, and
            `prefill_tuning.NO_SHARES` for never.

    Raises:
        ValueError: rows or lengths do not fit.
    """
    REQUESTS.check({}, rows=rows, lengths=lengths)
    check_limits(limits)
    group, device = heads.num_heads // heads.num_kv_heads, tuning.device_class(rows.device)
    if launch is None:
        launch = prefill_tuning.prefill_launch(
            device,
            len(rows),
            heads.num_kv_heads,
            num_tokens * group,
            heads.key_dim,
            heads.value_dim,
            dtype.itemsize,
            not limits and not layer_format.is_quantised,
        )
    block_m = launch.block_m
    # Each request's last tile may have a single row.
    capacity = (num_tokens * group + len(rows) * (block_m - 1)) // block_m
    if shares is None:
        shares = prefill_tuning.prefill_shares(device, launch, heads.num_kv_heads)
    if capacity == 0:
        shares = prefill_tuning.NO_SHARES
    num_workers = shares.num_workers
    num_shares = max(capacity, num_workers)
    # The items, then the tiles that they are made of. If no tile is ever cut, the tiles are the items.
    num_items = num_shares + capacity if num_workers else 0
    numbers = torch.empty(num_items + capacity, ITEM_FIELDS.value, dtype=torch.int32, device=rows.device)
    counters = torch.empty(4, dtype=torch.int32, device=rows.device)
    section_keys = prefill_tuning.SECTION_BYTES // heads.key_bytes(dtype)
    sizes = TileSizes(capacity, section_keys, heads.num_kv_heads, group, block_m)
    _prefill_plan(rows, q_starts, lengths, numbers, counters, sizes, limits, causal, shares)
    items = numbers[: num_items or capacity]
    return PrefillPlan(items, num_shares, num_workers, counters, launch, len(rows), limits, causal)
