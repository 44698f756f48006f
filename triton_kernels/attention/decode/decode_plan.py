"""The work list of a decode step: which keys of which request each program attends to.

One program computes it on the device, once a step for all layers. The launches that follow depend on shapes
alone, so a captured step stays right when lengths change.

The keys of all requests are laid side by side and cut into equal shares, one for each worker, so every program
reads the same amount, however much the lengths differ. A share may hold the end of one request, several whole
requests and the beginning of another; each of these is an item:

    requests   ├──────── 0 ────────┼─ 1 ─┼──────────── 2 ───────────┼─ 3 ─┤
    workers    ├────── 0 ──────┼────── 1 ──────┼────── 2 ──────┼────── 3 ──────┤
    items      ├─────── 0 ─────┼ 1 ┼─ 2 ─┼─ 3 ─┼────── 4 ──────┼─ 5 ┼─ 6 ─┤

A prefix that several requests share is read once for all of them. It is a run of its own, before the requests'
runs:

    runs       ├─ prefix 0 ─┼─ rest of request 0 ─┼─ rest of 1 ─┼─ rest of 2 ─┤ …

Every item of a run that is cut writes a part, a partial output; an item of a prefix writes a part for each of
its M members. Item i of a prefix has the parts from i * M on, item i of a request has part own_parts + i:

    parts  0 ├─ M parts of item 0 ─┼─ M of item 1 ─┼ … ┤ own_parts ├─ one part per item of a request …
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_inputs import REQUESTS, check_limits
from lightkv.triton_kernels.attention.paged_kv import RECORDS, HeadShape
from lightkv.triton_kernels.attention.records import Together
from lightkv.triton_kernels.attention.variants.hooks import first_key
from lightkv.triton_kernels.attention.variants.variant import Variant, bind
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.operators import operator
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat

from . import decode_tuning

ITEM_FIELDS = tl.constexpr(4)  # request (or -1 - prefix), row, first key, end of the keys
SHARE_FIELDS = tl.constexpr(8)  # first item, and its fields
PART_FIELDS = tl.constexpr(4)  # first of the request's own parts, their number; the same of its shared prefix
_PREFIXES = Tensors(
    members="contiguous int32 [P, M]", keys="contiguous int32 [P]", place="contiguous int32 [B]"
)


class SharedPrefixGroups(NamedTuple):
    """Sets of requests that share a prefix, which is read once for all members of a set.

    `members`: int32 `[P, M]`, the requests that share each prefix, then -1; M is `prefix_members` of
    `decode_tuning.py`.
    `keys`: int32 `[P]`, how many first keys the members have in the same slots, all of them before any query; 0
    for a prefix that is not used.
    `place`: int32 `[B]`, each request's prefix * M + its place among the members; -1 for a request without one.
    """

    members: Tensor
    keys: Tensor
    place: Tensor


class DecodePlan(NamedTuple):
    """The work list of a decode step, of B requests with P shared prefixes.

    `items`: int32 `[P + B + workers, 4]`: request (-1 - prefix for a shared prefix), row of the index, first
    key, end of the keys.
    `shares`: int32 `[workers + 1, 8]`: worker w has the items shares[w, 0] to shares[w + 1, 0]; then the fields
    of the first of them, so that a program need not load them through `items`.
    `parts`: int32 `[B, 4]`: the first of a request's own parts, and their number; the same of its shared
    prefix, whose parts lie M apart. A request with a single part writes its output at once, and no part.
    `split`: int32: the requests that have several parts, then -1.
    `members`: `[P, M]`, the requests that share each prefix; None without shared prefixes.
    `limits`, `num_queries`: what the plan was made for.
    """

    items: Tensor
    shares: Tensor
    parts: Tensor
    split: Tensor
    members: Tensor | None
    limits: tuple[Variant, ...] = ()
    num_queries: int = 1

    @property
    def num_members(self) -> int:
        """M: how many requests an item of a shared prefix serves; 1 without shared prefixes."""
        return 1 if self.members is None else self.members.shape[1]

    @property
    def own_parts(self) -> int:
        """Where the parts of requests begin: item i of a request writes part `own_parts` + i; item i of a
        prefix writes the M parts from i * M on."""
        num_workers = self.shares.shape[0] - 1
        return 0 if self.members is None else (self.members.shape[0] + num_workers) * self.num_members

    @property
    def num_parts(self) -> int:
        """How many parts there can be."""
        return self.own_parts + self.items.shape[0]


@triton.jit
def _store_item(item, request, row, begin, end, is_item):
    tl.store(item, request, mask=is_item)
    tl.store(item + 1, row, mask=is_item)
    tl.store(item + 2, begin, mask=is_item)
    tl.store(item + 3, end, mask=is_item)


@triton.jit(
    do_not_specialize=["num_requests", "num_prefixes", "num_workers", "num_listed"],
    do_not_specialize_on_alignment=[
        "rows", "lengths", "members", "keys", "place", "items", "shares", "parts", "split", "prefix_parts"
    ],
)  # fmt: skip
def _plan_kernel(
    rows,  # [B]
    lengths,  # [B]
    members,  # [P, MEMBERS]
    keys,  # [P]
    place,  # [B]
    items,  # [P + B + num_workers, 4]
    shares,  # [num_workers + 1, 8]
    parts,  # [B, 4]
    split,  # [num_listed]
    prefix_parts,  # [P, 2]: first item, number of parts
    num_requests,
    num_prefixes,
    num_workers,
    num_listed,
    limits,  # `Variants`
    together,  # `Together`
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    UNIT: tl.constexpr,
):
    NUM_QUERIES: tl.constexpr = together.NUM_QUERIES
    MEMBERS: tl.constexpr = together.MEMBERS
    IS_LIMITED: tl.constexpr = limits.flags.has_first_key
    run = tl.arange(0, BLOCK_R)  # those of prefixes, then those of requests
    request = run - num_prefixes
    is_request = (request >= 0) & (request < num_requests)
    end_key = tl.load(lengths + request, mask=is_request, other=0)
    row = tl.load(rows + request, mask=is_request, other=0).to(tl.int32)
    begin_key = first_key(limits, end_key - NUM_QUERIES)
    own_place = tl.full([BLOCK_R], -1, tl.int32)
    if MEMBERS > 1:
        own_place = tl.load(place + request, mask=is_request, other=-1)
        own_begin = tl.load(keys + own_place // MEMBERS, mask=own_place >= 0, other=0)
        begin_key = tl.maximum(begin_key, own_begin) if IS_LIMITED else own_begin
        is_prefix = run < num_prefixes
        shared = tl.load(keys + run, mask=is_prefix, other=0)
        leader = tl.load(members + run * MEMBERS, mask=is_prefix & (shared > 0), other=0)
        row = tl.where(is_prefix, tl.load(rows + leader, mask=is_prefix, other=0).to(tl.int32), row)
        if IS_LIMITED:
            # A prefix is read from the first key on that one of its members sees.
            prefix_begin = shared
            for place_in_prefix in range(MEMBERS):
                listed = members + run * MEMBERS + place_in_prefix
                member = tl.load(listed, mask=is_prefix & (shared > 0), other=-1)
                length = tl.load(lengths + member, mask=member >= 0, other=0)
                seen_from = first_key(limits, length - NUM_QUERIES)
                prefix_begin = tl.where(member >= 0, tl.minimum(prefix_begin, seen_from), prefix_begin)
            begin_key = tl.where(is_prefix, prefix_begin, begin_key)
        end_key = tl.where(is_prefix, shared, end_key)
    # Lengths of runs in units of keys. A request without keys has one unit: a program has to write its zeros.
    units = tl.maximum(tl.cdiv(end_key - begin_key, UNIT), is_request.to(tl.int32))
    end = tl.cumsum(units, 0)
    begin = end - units
    total = tl.sum(units, 0)

    share = tl.cdiv(total, num_workers)
    worker = begin // share  # the worker at which a run begins
    num_parts = tl.where(units > 0, (end - 1) // share - worker + 1, 0)
    first_item = tl.cumsum(num_parts, 0) - num_parts
    first_part = first_item
    prefix_part = tl.zeros_like(run)
    num_prefix_parts = tl.zeros_like(run)
    if MEMBERS > 1:
        tl.store(prefix_parts + run * 2, first_item, mask=is_prefix)
        tl.store(prefix_parts + run * 2 + 1, num_parts, mask=is_prefix)
        tl.debug_barrier()  # other threads read what was stored
        its_prefix = prefix_parts + own_place // MEMBERS * 2
        prefix_item = tl.load(its_prefix, mask=own_place >= 0, other=0)
        prefix_part = tl.where(own_place >= 0, prefix_item * MEMBERS + own_place % MEMBERS, 0)
        num_prefix_parts = tl.load(its_prefix + 1, mask=own_place >= 0, other=0)
        first_part += (num_prefixes + num_workers) * MEMBERS
    fields = parts + request * PART_FIELDS
    tl.store(fields, first_part, mask=is_request)
    tl.store(fields + 1, num_parts, mask=is_request)
    tl.store(fields + 2, prefix_part, mask=is_request)
    tl.store(fields + 3, num_prefix_parts, mask=is_request)

    is_split = is_request & (num_parts + num_prefix_parts > 1)
    rank = tl.cumsum(is_split.to(tl.int32), 0) - 1
    tl.store(split + rank, request, mask=is_split)
    for start in range(tl.sum(is_split.to(tl.int32), 0), num_listed, BLOCK_R):
        tl.store(split + start + run, -1, mask=start + run < num_listed)

    owner = tl.where(request < 0, -1 - run, request)
    for i in range(tl.max(num_parts, 0)):
        is_part = i < num_parts
        cut = tl.maximum((worker + i) * share, begin)  # in units
        first = begin_key + (cut - begin) * UNIT
        last = tl.minimum(begin_key + ((worker + i + 1) * share - begin) * UNIT, end_key)
        _store_item(items + (first_item + i) * ITEM_FIELDS, owner, row, first, last, is_part)
        opens_share = is_part & (cut == (worker + i) * share)
        opened = shares + (worker + i) * SHARE_FIELDS
        tl.store(opened, first_item + i, mask=opens_share)
        _store_item(opened + 1, owner, row, first, last, opens_share)
    num_items = tl.sum(num_parts, 0)
    for start in range(tl.cdiv(total, share), num_workers + 1, BLOCK_W):
        idle = start + tl.arange(0, BLOCK_W)
        tl.store(shares + idle * SHARE_FIELDS, num_items, mask=idle <= num_workers)


@operator("decode_plan", writes=("plan", "prefix_parts"), records=(*RECORDS, SharedPrefixGroups, DecodePlan))
def _decode_plan(
    rows: Tensor,
    lengths: Tensor,
    prefixes: SharedPrefixGroups | None,
    plan: DecodePlan,
    prefix_parts: Tensor,
) -> None:
    num_requests, num_workers = rows.shape[0], plan.shares.shape[0] - 1
    if num_requests == 0:
        return
    num_prefixes, num_members = (0, 1) if prefixes is None else prefixes.members.shape
    block_r = tuning.block_for(num_prefixes + num_requests)
    num_queries = plan.num_queries if plan.limits else 1
    _plan_kernel[(1,)](
        rows,
        lengths,
        *(prefixes or (None, None, None)),
        *plan[:4],
        prefix_parts,
        num_requests,
        num_prefixes,
        num_workers,
        plan.split.shape[0],
        bind(plan.limits, 1.0)[0],
        Together(tl.constexpr(num_queries), tl.constexpr(num_members), tl.constexpr(False)),
        BLOCK_R=block_r,
        BLOCK_W=64,
        UNIT=decode_tuning.DECODE_UNIT,
        num_warps=4 if block_r <= 512 else 8,
    )


def decode_plan(
    rows: Tensor,
    lengths: Tensor,
    heads: HeadShape,
    *,
    dtype: torch.dtype,
    limits: tuple[Variant, ...] = (),
    num_queries: int = 1,
    shared_prefixes: SharedPrefixGroups | None = None,
    layer_format: KVFormat = AS_COMPUTED,
) -> DecodePlan:
    """Makes the work list of a decode step, which serves all layers with these heads and limits.

    Args:
        rows, lengths: as in `decode_attention`; read on the device.
        heads: of the layers.
        dtype: of q.
        limits: what limits the first key that a query sees (`variants.limits`, changed by `Lookup.limits`).
        num_queries: queries of each request, at its last positions.
        shared_prefixes: the prefixes to read once for several requests. They are read on the device, so a
            captured plan follows them, too; their values are not checked. With one member each they are
            ignored.
        layer_format: how the layers' K/V is stored.

    Raises:
        ValueError: rows, lengths or prefixes do not fit, there are prefixes and a window, or several queries
            and limits that are for one.
    """
    num_requests = len(rows)
    REQUESTS.check({}, rows=rows, lengths=lengths)
    check_limits(limits)
    if num_queries > 1 and any(one.is_for_one_query for one in limits):
        raise ValueError(f"a plan with {limits} has one query a request; got {num_queries}")
    if shared_prefixes is not None:
        if any(one.flags.is_short for one in limits):
            raise ValueError(f"shared prefixes are for layers without a window; got {limits}")
        _PREFIXES.check({"B": num_requests}, **shared_prefixes._asdict())
        if shared_prefixes.members.shape[1] < 2:
            shared_prefixes = None
    num_prefixes, num_members = (0, 1) if shared_prefixes is None else shared_prefixes.members.shape
    together, elements = num_members * num_queries, layer_format.elements
    num_programs = decode_tuning.decode_programs(together, heads.key_bytes(dtype))
    if elements.is_quantised:
        num_rows = together * heads.num_heads // heads.num_kv_heads
        dims = heads.key_dim, heads.value_dim
        num_programs = decode_tuning.quantised_decode(
            num_rows, together > 1, *dims, elements.bits, bool(elements.group)
        ).num_programs
    device = tuning.device_class(rows.device)
    num_workers = decode_tuning.decode_workers(device, num_programs, heads.num_kv_heads)
    # Without prefixes, only a request in which a worker's share ends has several parts.
    num_listed = min(num_requests, num_workers) if shared_prefixes is None else num_requests
    sizes = (
        (num_prefixes + num_requests + num_workers) * ITEM_FIELDS.value,
        (num_workers + 1) * SHARE_FIELDS.value,
        num_requests * PART_FIELDS.value,
        num_listed,
        num_prefixes * 2,
    )
    numbers = torch.empty(sum(sizes), dtype=torch.int32, device=rows.device).split(sizes)
    items, shares, parts, split, prefix_parts = numbers
    items, shares = items.view(-1, ITEM_FIELDS.value), shares.view(-1, SHARE_FIELDS.value)
    plan = DecodePlan(items, shares, parts.view(-1, PART_FIELDS.value), split, None, limits, num_queries)
    _decode_plan(rows, lengths, shared_prefixes, plan, prefix_parts)
    return plan if shared_prefixes is None else plan._replace(members=shared_prefixes.members)
