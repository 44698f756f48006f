"""The work list of a decode step: which keys of which request each program attends to.

Computed on the device, by one program, once a step for all layers: launches that follow it depend on shapes
alone, so a captured step stays right when lengths change. Knows lengths and rows; knows no key, no query and
no head.

All the keys, one after the other, are cut into equal shares, one a worker. So every program reads as much as
every other, however the lengths differ; a share may hold the end of one request, several whole ones and the
beginning of another:

    requests   ├──────── 0 ────────┼─ 1 ─┼──────────── 2 ───────────┼─ 3 ─┤
    workers    ├────── 0 ──────┼────── 1 ──────┼────── 2 ──────┼────── 3 ──────┤
    items      ├─────── 0 ─────┼ 1 ┼─ 2 ─┼─ 3 ─┼────── 4 ──────┼─ 5 ┼─ 6 ─┤

Requests that share their first keys can have them read once, in runs that come before their own:

    runs       ├─ of group 0 ─┼─ own of request 0 ─┼─ own of 1 ─┼─ own of 2 ─┤ …
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .attend_keys import check_requests

ITEM_FIELDS = 4  # request (or -1 - group), row, first key, end of the keys
SHARE_FIELDS = 8  # first item, and its fields
PART_FIELDS = 4  # first slot, how many; of its group: the request's first slot, how many
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_PART_FIELDS = tl.constexpr(PART_FIELDS)


class SharedPrefixGroups(NamedTuple):
    """Requests that share their first keys, which are read once for all of a group.

    `members`: int32 `[G, M]`: the requests of each group, -1 after the last; M is `tuning.group_members`.
    `keys`: int32 `[G]`: how many first keys the members have in the same slots, none of them a query's own;
    0 for a group that is not used.
    `place`: int32 `[B]`: group * M + place among its members, of each request; -1 for one in no group.
    """

    members: Tensor
    keys: Tensor
    place: Tensor


class DecodePlan(NamedTuple):
    """`items`: int32 `[G + B + workers, 4]`: request (of a group, -1 - group), row of the index, first key, end
    of the keys.
    `shares`: int32 `[workers + 1, 8]`: worker w has the items from shares[w, 0] to shares[w + 1, 0]; then the
    first of them, so that it is read at once.
    `parts`: int32 `[B, 4]`: where partial outputs are: the first slot of a request's own, and how many; the
    same of its group's, which lie M apart. One of its own alone is the whole output, and uses no slot.
    `split`: int32: the requests that have several parts; then -1.
    `members`: of the groups, `[G, M]`; None without.
    `window`, `num_queries`: what the plan is for."""

    items: Tensor
    shares: Tensor
    parts: Tensor
    split: Tensor
    members: Tensor | None
    window: int = 0
    num_queries: int = 1

    @property
    def num_members(self) -> int:
        """M: requests that an item of a group serves; 1 without groups."""
        return 1 if self.members is None else self.members.shape[1]

    @property
    def own_slots(self) -> int:
        """Item i has the slot `own_slots` + i; of a group, those from i * M on, one for each member."""
        num_workers = self.shares.shape[0] - 1
        return 0 if self.members is None else (self.members.shape[0] + num_workers) * self.num_members

    @property
    def num_slots(self) -> int:
        """How many slots for partial outputs there are."""
        return self.own_slots + self.items.shape[0]


@triton.jit
def _store_item(item, request, row, begin, end, is_item):
    tl.store(item, request, mask=is_item)
    tl.store(item + 1, row, mask=is_item)
    tl.store(item + 2, begin, mask=is_item)
    tl.store(item + 3, end, mask=is_item)


@triton.jit(
    do_not_specialize=["num_requests", "num_groups", "num_workers", "num_listed"],
    do_not_specialize_on_alignment=[
        "rows", "lengths", "members", "keys", "place", "items", "shares", "parts", "split", "group_parts"
    ],
)  # fmt: skip
def _plan_kernel(
    rows,  # [B]
    lengths,  # [B]
    members,  # [G, MEMBERS]
    keys,  # [G]
    place,  # [B]
    items,  # [G + B + num_workers, 4]
    shares,  # [num_workers + 1, 8]
    parts,  # [B, 4]
    split,  # [num_listed]
    group_parts,  # [G, 2]
    num_requests,
    num_groups,
    num_workers,
    num_listed,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    run = tl.arange(0, BLOCK_R)  # of a group, then of a request
    request = run - num_groups
    is_request = (request >= 0) & (request < num_requests)
    end_key = tl.load(lengths + request, mask=is_request, other=0)
    row = tl.load(rows + request, mask=is_request, other=0).to(tl.int32)
    first_key = tl.maximum(end_key - WINDOW, 0) if WINDOW > 0 else tl.zeros_like(end_key)
    own_place = tl.full([BLOCK_R], -1, tl.int32)
    if MEMBERS > 1:
        own_place = tl.load(place + request, mask=is_request, other=-1)
        first_key = tl.load(keys + own_place // MEMBERS, mask=own_place >= 0, other=0)
        is_group = run < num_groups
        shared = tl.load(keys + run, mask=is_group, other=0)
        leader = tl.load(members + run * MEMBERS, mask=is_group & (shared > 0), other=0)
        row = tl.where(is_group, tl.load(rows + leader, mask=is_group, other=0).to(tl.int32), row)
        end_key = tl.where(is_group, shared, end_key)
    # In units of keys, of which a request without any still takes one: someone has to write its zeros.
    units = tl.maximum(tl.cdiv(end_key - first_key, UNIT), is_request.to(tl.int32))
    end = tl.cumsum(units, 0)
    begin = end - units
    total = tl.sum(units, 0)

    share = tl.cdiv(total, num_workers)
    worker = begin // share  # that a run begins with
    num_parts = tl.where(units > 0, (end - 1) // share - worker + 1, 0)
    first_item = tl.cumsum(num_parts, 0) - num_parts
    first_slot = first_item
    group_slot = tl.zeros_like(run)
    num_group_parts = tl.zeros_like(run)
    if MEMBERS > 1:
        tl.store(group_parts + run * 2, first_item, mask=is_group)
        tl.store(group_parts + run * 2 + 1, num_parts, mask=is_group)
        tl.debug_barrier()  # what was stored is read by other threads
        its_group = group_parts + own_place // MEMBERS * 2
        group_item = tl.load(its_group, mask=own_place >= 0, other=0)
        group_slot = tl.where(own_place >= 0, group_item * MEMBERS + own_place % MEMBERS, 0)
        num_group_parts = tl.load(its_group + 1, mask=own_place >= 0, other=0)
        first_slot += (num_groups + num_workers) * MEMBERS
    fields = parts + request * _PART_FIELDS
    tl.store(fields, first_slot, mask=is_request)
    tl.store(fields + 1, num_parts, mask=is_request)
    tl.store(fields + 2, group_slot, mask=is_request)
    tl.store(fields + 3, num_group_parts, mask=is_request)

    is_split = is_request & (num_parts + num_group_parts > 1)
    rank = tl.cumsum(is_split.to(tl.int32), 0) - 1
    tl.store(split + rank, request, mask=is_split)
    for start in range(tl.sum(is_split.to(tl.int32), 0), num_listed, BLOCK_R):
        tl.store(split + start + run, -1, mask=start + run < num_listed)

    owner = tl.where(request < 0, -1 - run, request)
    for i in range(tl.max(num_parts, 0)):
        is_part = i < num_parts
        cut = tl.maximum((worker + i) * share, begin)  # in units
        first = first_key + (cut - begin) * UNIT
        last = tl.minimum(first_key + ((worker + i + 1) * share - begin) * UNIT, end_key)
        _store_item(items + (first_item + i) * _ITEM_FIELDS, owner, row, first, last, is_part)
        opens_share = is_part & (cut == (worker + i) * share)
        opened = shares + (worker + i) * _SHARE_FIELDS
        tl.store(opened, first_item + i, mask=opens_share)
        _store_item(opened + 1, owner, row, first, last, opens_share)
    num_items = tl.sum(num_parts, 0)
    for start in range(tl.cdiv(total, share), num_workers + 1, BLOCK_W):
        idle = start + tl.arange(0, BLOCK_W)
        tl.store(shares + idle * _SHARE_FIELDS, num_items, mask=idle <= num_workers)


@torch.library.custom_op(
    "lightkv::decode_plan", mutates_args=("items", "shares", "parts", "split", "group_parts")
)
def _decode_plan(
    rows: Tensor,
    lengths: Tensor,
    members: Tensor | None,
    keys: Tensor | None,
    place: Tensor | None,
    items: Tensor,
    shares: Tensor,
    parts: Tensor,
    split: Tensor,
    group_parts: Tensor,
    window: int,
) -> None:
    num_requests, num_workers = rows.shape[0], shares.shape[0] - 1
    if num_requests == 0:
        return
    num_groups, num_members = (0, 1) if members is None else members.shape
    block_r = max(16, triton.next_power_of_2(num_groups + num_requests))
    _plan_kernel[(1,)](
        rows,
        lengths,
        members,
        keys,
        place,
        items,
        shares,
        parts,
        split,
        group_parts,
        num_requests,
        num_groups,
        num_workers,
        split.shape[0],
        BLOCK_R=block_r,
        BLOCK_W=64,
        UNIT=tuning.DECODE_UNIT,
        WINDOW=window,
        MEMBERS=num_members,
        num_warps=4 if block_r <= 512 else 8,
    )


_decode_plan.register_fake(lambda *_: None)  # the outputs are arguments


def decode_plan(
    rows: Tensor,
    lengths: Tensor,
    *,
    num_kv_heads: int,
    window: int = 0,
    num_queries: int = 1,
    groups: SharedPrefixGroups | None = None,
) -> DecodePlan:
    """The work list of one decode step for layers of `num_kv_heads`, each of which goes through it.

    Args:
        rows, lengths: as in `decode_attention`; read on the device.
        window: of each query; 0 for all keys.
        num_queries: of each request, at its last positions.
        groups: requests whose first keys are read together; read on the device, so a captured plan follows
            them, too. What they say is not checked. Of one member each they are left out.

    Raises:
        ValueError: rows, lengths or groups that do not fit, or groups with a window.
    """
    num_requests = len(rows)
    check_requests(rows, lengths)
    if groups is not None:
        _check_groups(groups, num_requests, window)
        if groups.members.shape[1] < 2:
            groups = None
    num_groups, num_members = (0, 1) if groups is None else groups.members.shape
    device = tuning.device_class(rows.device)
    num_workers = tuning.decode_workers(device, num_members * num_queries, num_kv_heads)
    # Without groups every worker but the last ends in one request at most.
    num_listed = min(num_requests, num_workers) if groups is None else num_requests
    sizes = (
        (num_groups + num_requests + num_workers) * ITEM_FIELDS,
        (num_workers + 1) * SHARE_FIELDS,
        num_requests * PART_FIELDS,
        num_listed,
        num_groups * 2,
    )
    numbers = torch.empty(sum(sizes), dtype=torch.int32, device=rows.device).split(sizes)
    items, shares, parts, split, group_parts = numbers
    items, shares = items.view(-1, ITEM_FIELDS), shares.view(-1, SHARE_FIELDS)
    parts = parts.view(-1, PART_FIELDS)
    members, keys, place = groups or (None, None, None)
    seen = window + num_queries - 1 if window else 0
    _decode_plan(rows, lengths, members, keys, place, items, shares, parts, split, group_parts, seen)
    return DecodePlan(items, shares, parts, split, members, window, num_queries)


def _check_groups(groups: SharedPrefixGroups, num_requests: int, window: int) -> None:
    if window or groups.place.shape != (num_requests,):
        raise ValueError(
            f"groups are for layers without a window, and have a place for each request; got a window of "
            f"{window} and places {tuple(groups.place.shape)} for {num_requests} requests"
        )
    if groups.members.dim() != 2 or groups.keys.shape != groups.members.shape[:1]:
        raise ValueError(
            f"groups have members [G, M] and keys [G], got {tuple(groups.members.shape)} and "
            f"{tuple(groups.keys.shape)}"
        )
    if any(numbers.dtype != torch.int32 or not numbers.is_contiguous() for numbers in groups):
        kinds = ", ".join(str(numbers.dtype) for numbers in groups)
        raise ValueError(f"members, keys and places of groups must be contiguous int32, got {kinds}")


def decode_plan_reference(
    rows: Tensor,
    lengths: Tensor,
    *,
    num_workers: int,
    unit: int,
    window: int = 0,
    groups: SharedPrefixGroups | None = None,
) -> DecodePlan:
    """The specification of `decode_plan`; `window` is the keys that a request's queries see together.

    Items that are not used are left out, and what is not written is 0.
    """
    rows_host, lengths_host = rows.tolist(), lengths.tolist()
    runs: list[list[int]] = []  # request or -1 - group, row, first key, end
    num_groups, num_members, places = 0, 1, [-1] * len(rows_host)
    if groups is not None:
        num_groups, num_members = groups.members.shape
        places = groups.place.tolist()
        for group, (leader, shared) in enumerate(
            zip(groups.members[:, 0].tolist(), groups.keys.tolist(), strict=True)
        ):
            runs.append([-1 - group, rows_host[leader] if shared else 0, 0, shared])
    for request, (row, length) in enumerate(zip(rows_host, lengths_host, strict=True)):
        first = max(length - window, 0) if window else 0
        if places[request] >= 0:
            first = runs[places[request] // num_members][3]
        runs.append([request, row, first, length])
    units = [max(-(-(end - first) // unit), int(owner >= 0)) for owner, _, first, end in runs]
    ends = [sum(units[: i + 1]) for i in range(len(units))]
    share = -(-ends[-1] // num_workers)
    cuts = [min(worker * share, ends[-1]) for worker in range(num_workers + 1)]

    items: list[list[int]] = []
    shares = [[0] * SHARE_FIELDS for _ in cuts]
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
    own_slots = (num_groups + num_workers) * num_members if groups is not None else 0
    parts = []
    for request, (first_item, count) in enumerate(found[num_groups:]):
        group, member = divmod(places[request], num_members)
        group_item, group_count = found[group] if places[request] >= 0 else (0, 0)
        slot = group_item * num_members + member if places[request] >= 0 else 0
        parts.append([own_slots + first_item, count, slot, group_count])
    split = [request for request, (_, count, _, more) in enumerate(parts) if count + more > 1]
    num_listed = len(parts) if groups is not None else min(len(parts), num_workers)
    split += [-1] * (num_listed - len(split))
    members = None if groups is None else groups.members
    listed = (torch.tensor(numbers, dtype=torch.int32) for numbers in (items, shares, parts, split))
    on_device = [numbers.to(lengths.device) for numbers in listed]
    return DecodePlan._make([*on_device, members, window, 1])
