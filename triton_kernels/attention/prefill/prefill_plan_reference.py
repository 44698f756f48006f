"""The work list of a prefill step in plain Python, which the kernels of `prefill_plan.py` are compared with."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Variant

from . import prefill_tuning
from .prefill_plan import ALIGNED_COST, ALL_KEYS, ITEM_FIELDS, PrefillPlan, is_full, key_bound


def prefill_tiles_reference(
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    *,
    group: int,
    block_m: int,
    limits: tuple[Variant, ...] = (),
    causal: bool = True,
) -> list[list[int]]:
    """Computes the tiles of `prefill_plan` in plain Python, in their order, each with the fields of an item."""
    most_keys = key_bound(limits, causal, block_m, group)
    starts, tiles = q_starts.tolist(), []
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        q_begin, q_end = starts[request : request + 2]
        num_rows, prefix = (q_end - q_begin) * group, length - (q_end - q_begin)
        for first_row in range(0, num_rows, block_m):
            last_query = (min(first_row + block_m, num_rows) - 1) // group
            num_keys = min(max(prefix + last_query + 1, 0), most_keys)
            if is_full(limits, causal):
                num_keys = length
            fields = [request, row, first_row, num_rows, q_begin, prefix, 0, ALL_KEYS, -1, -1, -1, -1]
            tiles.append((-num_keys, request, -first_row, fields))
    return [fields for *_, fields in sorted(tiles)]


def _units_reference(
    tile: list[int], group: int, block_m: int, limits: Sequence[Variant], causal: bool, unit: int
) -> tuple[int, int]:
    """Returns the first unit of keys that a tile's queries see, and how many they see, at least 1."""
    first_row, num_rows, prefix = tile[2], tile[3], tile[5]
    last_row = min(first_row + block_m, num_rows) - 1
    end = max(prefix + (last_row // group + 1 if causal else num_rows // group), 0)
    begin = max((one.first_key(prefix + first_row // group) for one in limits), default=0)
    return begin // unit, max(-(-end // unit) - begin // unit, 1)


def share_reference(
    units: list[int], num_kv_heads: int, shares: prefill_tuning.PrefillShares
) -> tuple[int, bool]:
    """Returns the units of a share for tiles of so many units, in descending order, and whether each tile
    begins a share; 0 units if whole tiles keep the device busy for hardly longer than shares do."""
    num_workers, num_programs, _, least_units, least_gain = shares
    if not num_workers:
        return 0, False
    whole = preceding = turns_end = 0
    for tile, size in enumerate(units):
        first_turn, end_turn = (-(-(tile + i) * num_kv_heads // num_programs) for i in range(2))
        turns_end += (end_turn - first_turn) * size
        whole = max(whole, min(preceding * num_kv_heads // num_programs + size, turns_end))
        preceding += size
    share = max(-(-preceding // num_workers), least_units)
    aligned = False
    for longer in (share, share + share // ALIGNED_COST.value):
        if sum(-(-size // longer) for size in units) <= num_workers:
            share, aligned = longer, True
            break
    shared = share * -(-num_workers * num_kv_heads // num_programs)
    return (share if whole - shared >= least_gain + shared // 16 else 0), aligned


def prefill_plan_reference(
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    plan: PrefillPlan,
    shares: prefill_tuning.PrefillShares,
    *,
    num_kv_heads: int,
    group: int,
    key_bytes: int,
) -> tuple[Tensor, list[int]]:
    """Computes the items of `plan`, of which unused ones are -1, and its counters in plain Python, from what it
    was made for. `key_bytes`: of K and V of a token for one K/V head."""
    block_m, num_workers, unit = plan.launch.block_m, shares.num_workers, shares.unit
    limits, causal = plan.limits, plan.causal
    tiles = prefill_tiles_reference(
        rows, q_starts, lengths, group=group, block_m=block_m, limits=limits, causal=causal
    )
    units = [_units_reference(tile, group, block_m, limits, causal, unit) for tile in tiles]
    total = sum(size for _, size in units)
    share, aligned = share_reference([size for _, size in units], num_kv_heads, shares)
    items = [[-1] * ITEM_FIELDS for _ in range(len(plan.items))]
    if not share:
        items[: len(tiles)] = tiles
    begin = 0  # of a tile, in units of all tiles
    for tile, (fields, (first_unit, size)) in enumerate(zip(tiles, units, strict=True) if share else ()):
        end = begin + size
        cuts = [begin, *(cut for cut in range(0, end, share) if cut > begin), end]
        parts = [num_workers + cut // share if cut % share else cut // share for cut in cuts[:-1]]
        for piece, (first, last) in enumerate(pairwise(cuts)):
            item = list(fields)
            if len(parts) > 1:
                item[6] = (first_unit + first - begin) * unit
                item[7] = ALL_KEYS if last == end else (first_unit + last - begin) * unit
                item[8] = parts[piece]
            if last == end and last % share and last < total and not aligned:
                item[9] = plan.num_shares + tile + 1
            if piece == 1:
                item[10:] = len(parts), parts[0]
            items[plan.num_shares + tile if first % share else first // share] = item
        begin = -(-end // share) * share if aligned else end
    num_keys, most_keys = 1, key_bound(limits, causal, block_m, group)
    for length, q_len in zip(lengths.tolist(), q_starts.diff().tolist(), strict=True):
        num_keys += q_len + min(max(length - q_len, 0), most_keys)
    section_heads = min(max(prefill_tuning.SECTION_BYTES // key_bytes // num_keys, 1), num_kv_heads)
    num_entries = sum(item[0] >= 0 for item in items[: plan.num_shares])
    counters = [0, 0, num_entries, section_heads if len(rows) else 0]
    return torch.tensor(items, dtype=torch.int32, device=rows.device).view(-1, ITEM_FIELDS), counters
