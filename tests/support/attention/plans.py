"""The work lists of decode and prefill steps in plain Python, which the kernels that make them are compared
with."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.decode.decode_plan import SHARE_FIELDS, DecodePlan, SharedPrefixGroups
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.prefill_plan import (
    ALIGNED_COST,
    ALL_KEYS,
    CUT_GAIN,
    CUT_GAIN_OF_SEVERAL,
    ITEM_FIELDS,
    LEAST_SECTIONS,
    PrefillPlan,
    is_full,
    key_bound,
)
from lightkv.triton_kernels.attention.variants.variant import Variant


def decode_plan_reference(
    rows: Tensor,
    lengths: Tensor,
    *,
    num_workers: int,
    unit: int,
    limits: tuple[Variant, ...] = (),
    num_queries: int = 1,
    shared_prefixes: SharedPrefixGroups | None = None,
) -> DecodePlan:
    """Computes `decode_plan` in plain Python.

    Unused items are left out, and fields that the kernel does not write are 0.
    """
    rows_host, lengths_host = rows.tolist(), lengths.tolist()
    runs: list[list[int]] = []  # request or -1 - prefix, row, first key, end
    num_prefixes, num_members, places = 0, 1, [-1] * len(rows_host)
    if shared_prefixes is not None:
        num_prefixes, num_members = shared_prefixes.members.shape
        places = shared_prefixes.place.tolist()
        leaders, keys = shared_prefixes.members[:, 0].tolist(), shared_prefixes.keys.tolist()
        for prefix, (leader, shared) in enumerate(zip(leaders, keys, strict=True)):
            chosen = shared_prefixes.members[prefix].tolist() if shared and limits else []
            seen_from = [_first_key(limits, lengths_host[one] - num_queries) for one in chosen if one >= 0]
            begin = min([shared, *seen_from]) if limits else 0
            runs.append([-1 - prefix, rows_host[leader] if shared else 0, begin, shared])
    for request, (row, length) in enumerate(zip(rows_host, lengths_host, strict=True)):
        first = _first_key(limits, length - num_queries)
        if places[request] >= 0:
            first = max(first, runs[places[request] // num_members][3])
        runs.append([request, row, first, length])
    units = [max(-(-(end - first) // unit), int(owner >= 0)) for owner, _, first, end in runs]
    ends = [sum(units[: i + 1]) for i in range(len(units))]
    share = -(-ends[-1] // num_workers)
    cuts = [min(worker * share, ends[-1]) for worker in range(num_workers + 1)]

    items: list[list[int]] = []
    shares = [[0] * SHARE_FIELDS.value for _ in cuts]
    found: list[tuple[int, int]] = []  # first item of each run, and how many
    for (owner, row, first, last), size, run_end in zip(runs, units, ends, strict=True):
        run_begin, first_item = run_end - size, len(items)
        for worker, (share_begin, share_end) in enumerate(pairwise(cuts)):
            begin, end = max(share_begin, run_begin), min(share_end, run_end)
            if begin < end:
                stop = min(first + (end - run_begin) * unit, last)
                item = [owner, row, first + (begin - run_begin) * unit, stop]
                if begin == share_begin:
                    shares[worker][:5] = [len(items), *item]
                items.append(item)
        found.append((first_item, len(items) - first_item))
    for worker, cut in enumerate(cuts):
        if cut == cuts[-1]:
            shares[worker][0] = len(items)
    own_parts = (num_prefixes + num_workers) * num_members if shared_prefixes is not None else 0
    parts = []
    for request, (first_item, count) in enumerate(found[num_prefixes:]):
        prefix, member = divmod(places[request], num_members)
        prefix_item, prefix_count = found[prefix] if places[request] >= 0 else (0, 0)
        prefix_part = prefix_item * num_members + member if places[request] >= 0 else 0
        parts.append([own_parts + first_item, count, prefix_part, prefix_count])
    split = [request for request, (_, count, _, more) in enumerate(parts) if count + more > 1]
    num_listed = len(parts) if shared_prefixes is not None else min(len(parts), num_workers)
    split += [-1] * (num_listed - len(split))
    members = None if shared_prefixes is None else shared_prefixes.members
    listed = (torch.tensor(numbers, dtype=torch.int32) for numbers in (items, shares, parts, split))
    on_device = [numbers.to(lengths.device) for numbers in listed]
    return DecodePlan._make([*on_device, members, limits, num_queries])


def _first_key(limits: Sequence[Variant], position: int) -> int:
    return max((one.first_key(max(position, 0)) for one in limits), default=0)


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
    units: list[int], num_kv_heads: int, shares: prefill_tuning.PrefillShares, is_alone: bool = True
) -> tuple[int, bool]:
    """Returns the units of a share for tiles of so many units, in descending order, and whether each tile
    begins a share; 0 units if whole tiles keep the device busy for hardly longer than shares do. `is_alone`:
    whether the tiles are of one request."""
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
    gain = (CUT_GAIN if is_alone else CUT_GAIN_OF_SEVERAL).value
    return (share if whole - shared >= least_gain + shared // gain else 0), aligned


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
    is_alone = len({tile[0] for tile in tiles}) <= 1
    share, aligned = share_reference([size for _, size in units], num_kv_heads, shares, is_alone)
    items = [[-1] * ITEM_FIELDS.value for _ in range(len(plan.items))]
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
    if num_workers and not share:
        longest = max((size for _, size in units), default=1) * shares.num_programs
        sections = (4 * total * num_kv_heads + 3 * longest) // (4 * longest)
        least_heads = -(-num_kv_heads // sections) if sections >= LEAST_SECTIONS.value else num_kv_heads
        section_heads = max(section_heads, least_heads)
    num_entries = sum(item[0] >= 0 for item in items[: plan.num_shares])
    counters = [0, 0, num_entries, section_heads if len(rows) else 0]
    return torch.tensor(items, dtype=torch.int32, device=rows.device).view(-1, ITEM_FIELDS.value), counters
