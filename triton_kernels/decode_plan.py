"""The work list of a decode step: which keys of which request each program attends to.

Computed on the device, by one program, once a step for all layers: launches that follow it depend on shapes
alone, so a captured step stays right when lengths change. Knows lengths and rows; knows no key, no query and
no head.

All the requests' keys, one after the other, are cut into equal shares, one a worker. So every program reads as
much as every other, however the lengths differ; a share may hold the end of one request, several whole ones and
the beginning of another:

    requests   ├──────── 0 ────────┼─ 1 ─┼──────────── 2 ───────────┼─ 3 ─┤
    workers    ├────── 0 ──────┼────── 1 ──────┼────── 2 ──────┼────── 3 ──────┤
    items      ├─────── 0 ─────┼ 1 ┼─ 2 ─┼─ 3 ─┼────── 4 ──────┼─ 5 ┼─ 6 ─┤
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tuning

ITEM_FIELDS = 4  # request, row, first key, end of the keys
SHARE_FIELDS = 8  # first item, and its fields
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)


class DecodePlan(NamedTuple):
    """`items`: int32 `[B + workers, 4]`: request, row of the index, first key, end of the keys.
    `shares`: int32 `[workers + 1, 8]`: worker w has the items from shares[w, 0] to shares[w + 1, 0]; then the
    first of them, so that it is read at once.
    `parts`: int32 `[B, 2]`: a request's first item, and how many it has, at least one.
    `split`: int32 `[min(B, workers)]`: the requests that have several; then -1."""

    items: Tensor
    shares: Tensor
    parts: Tensor
    split: Tensor


class DecodeGroups(NamedTuple):
    """Requests that share their first keys, which are read once for all of a group.

    `members`: int32 `[G, M]`: the requests (places in the batch) of each group, -1 after the last.
    `keys`: int32 `[G]`: how many first keys the members have in the same slots; 0 for a group that is not used.
    `place`: int32 `[B]`: group * M + place among its members, of each request; -1 for a request in no group.
    """

    members: Tensor
    keys: Tensor
    place: Tensor


@triton.jit
def _store_item(item, request, row, begin, end, is_item):
    tl.store(item, request, mask=is_item)
    tl.store(item + 1, row, mask=is_item)
    tl.store(item + 2, begin, mask=is_item)
    tl.store(item + 3, end, mask=is_item)


@triton.jit(do_not_specialize=["num_requests", "num_workers"])
def _plan_kernel(
    rows,  # [B]
    lengths,  # [B]
    items,  # [B + num_workers, 4]
    shares,  # [num_workers + 1, 8]
    parts,  # [B, 2]
    split,  # [min(B, num_workers)]
    num_requests,
    num_workers,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    request = tl.arange(0, BLOCK_B)
    is_request = request < num_requests
    length = tl.load(lengths + request, mask=is_request, other=0)
    row = tl.load(rows + request, mask=is_request, other=0).to(tl.int32)
    num_keys = tl.minimum(length, WINDOW) if WINDOW > 0 else length
    # In units of keys, of which a request without any still takes one: someone has to write its zeros.
    units = tl.where(is_request, tl.maximum(tl.cdiv(num_keys, UNIT), 1), 0)
    end = tl.cumsum(units, 0)
    begin = end - units
    total = tl.sum(units, 0)
    share = tl.cdiv(total, num_workers)
    worker = begin // share
    num_parts = tl.where(is_request, (end - 1) // share - worker + 1, 0)
    first_item = tl.cumsum(num_parts, 0) - num_parts
    tl.store(parts + request * 2, first_item, mask=is_request)
    tl.store(parts + request * 2 + 1, num_parts, mask=is_request)

    is_split = num_parts > 1
    rank = tl.cumsum(is_split.to(tl.int32), 0) - 1
    tl.store(split + rank, request, mask=is_split)
    num_split = tl.sum(is_split.to(tl.int32), 0)
    num_listed = tl.minimum(num_requests, num_workers)
    for start in range(num_split, num_listed, BLOCK_B):
        tl.store(split + start + request, -1, mask=start + request < num_listed)

    first_key = length - num_keys
    for i in range(tl.max(num_parts, 0)):
        is_part = i < num_parts
        cut = tl.maximum((worker + i) * share, begin)  # in units
        first = first_key + (cut - begin) * UNIT
        last = tl.minimum(first_key + ((worker + i + 1) * share - begin) * UNIT, length)
        _store_item(items + (first_item + i) * _ITEM_FIELDS, request, row, first, last, is_part)
        opens_share = is_part & (cut == (worker + i) * share)
        opened = shares + (worker + i) * _SHARE_FIELDS
        tl.store(opened, first_item + i, mask=opens_share)
        _store_item(opened + 1, request, row, first, last, opens_share)
    num_items = tl.sum(num_parts, 0)
    for start in range(tl.cdiv(total, share), num_workers + 1, BLOCK_W):
        idle = start + tl.arange(0, BLOCK_W)
        tl.store(shares + idle * _SHARE_FIELDS, num_items, mask=idle <= num_workers)


@torch.library.custom_op("lightkv::decode_plan", mutates_args=("items", "shares", "parts", "split"))
def _decode_plan(
    rows: Tensor, lengths: Tensor, items: Tensor, shares: Tensor, parts: Tensor, split: Tensor, window: int
) -> None:
    num_requests = rows.shape[0]
    if num_requests == 0:
        return
    block_b = max(16, triton.next_power_of_2(num_requests))
    _plan_kernel[(1,)](
        rows,
        lengths,
        items,
        shares,
        parts,
        split,
        num_requests,
        shares.shape[0] - 1,
        BLOCK_B=block_b,
        BLOCK_W=64,
        UNIT=tuning.DECODE_UNIT,
        WINDOW=window,
        num_warps=4 if block_b <= 512 else 8,
    )


_decode_plan.register_fake(lambda *_: None)  # the outputs are arguments


def decode_plan(
    rows: Tensor,
    lengths: Tensor,
    *,
    num_kv_heads: int,
    window: int = 0,
    num_queries: int = 1,
    groups: DecodeGroups | None = None,
) -> DecodePlan:
    """The work list of one decode step for layers of `num_kv_heads`, each of which goes through it.

    Args:
        rows, lengths: as in `decode_attention`; read on the device.
        window: of each query; 0 for all keys.
        num_queries: of each request, at its last positions.
        groups: of requests that share their first keys.
    """
    num_requests = len(rows)
    device = tuning.device_class(rows.device)
    num_workers = tuning.decode_workers(device, num_requests, num_queries, num_kv_heads)
    sizes = (
        (num_requests + num_workers) * ITEM_FIELDS,
        (num_workers + 1) * SHARE_FIELDS,
        2 * num_requests,
        min(num_requests, num_workers),
    )
    items, shares, parts, split = torch.empty(sum(sizes), dtype=torch.int32, device=rows.device).split(sizes)
    plan = DecodePlan(items.view(-1, ITEM_FIELDS), shares.view(-1, SHARE_FIELDS), parts.view(-1, 2), split)
    _decode_plan(rows, lengths, *plan, window + num_queries - 1 if window else 0)
    return plan


def decode_plan_reference(
    rows: Tensor, lengths: Tensor, *, num_workers: int, unit: int, window: int = 0
) -> DecodePlan:
    """The specification of `decode_plan`; `window` is the keys that a request's queries see together.

    Items that are not used are left out, and what is not written is 0.
    """
    items: list[list[int]] = []
    shares: list[list[int]] = []
    parts: list[list[int]] = []
    lengths_host, rows_host = lengths.tolist(), rows.tolist()
    firsts = [max(length - window, 0) if window else 0 for length in lengths_host]
    units = [max(-(-(end - first) // unit), 1) for first, end in zip(firsts, lengths_host, strict=True)]
    share = -(-sum(units) // num_workers)
    used = 0  # units of the requests so far
    for request, count in enumerate(units):
        first = firsts[request]
        cuts = [used, *range((used // share + 1) * share, used + count, share), used + count]
        parts.append([len(items), len(cuts) - 1])
        for cut, end in pairwise(cuts):
            last = min(first + (end - used) * unit, lengths_host[request])
            item = [request, rows_host[request], first + (cut - used) * unit, last]
            if cut % share == 0:
                shares.append([len(items), *item, 0, 0, 0])
            items.append(item)
        used += count
    shares += [[len(items)] + [0] * (SHARE_FIELDS - 1)] * (num_workers + 1 - len(shares))
    split = [request for request, (_, count) in enumerate(parts) if count > 1]
    split += [-1] * (min(len(units), num_workers) - len(split))
    tensors = (torch.tensor(numbers, dtype=torch.int32) for numbers in (items, shares, parts, split))
    return DecodePlan(*(tensor.to(lengths.device) for tensor in tensors))
