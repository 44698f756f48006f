"""Random K/V in caches full of NaN, prefixes that requests share, and how near outputs have to be."""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.decode.decode_plan import SharedPrefixGroups
from lightkv.triton_kernels.attention.lookups import Pages
from lightkv.triton_kernels.attention.paged_kv import PagedKV

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Cache(NamedTuple):
    """K/V of some requests, with their rows and lengths: the arguments of the operators, in order."""

    kv: PagedKV
    rows: Tensor
    lengths: Tensor


def poisoned_cache(
    lengths: list[int],
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    shift: int = 0,
) -> Cache:
    """Makes random K/V in shuffled slots. All free slots hold NaN, also those that stale entries name."""
    longest = max(*lengths, 1) + 3
    page = longest if shift == 31 else 1 << shift
    pages_per_row = -(-longest // page) + 1 if shift < 31 else 1
    num_pages = len(lengths) * pages_per_row
    places = 1 + torch.randperm(num_pages).view(len(lengths), pages_per_row) * page
    rows = 1 + torch.randperm(len(lengths))
    index = torch.zeros(len(lengths) + 1, pages_per_row, dtype=torch.int32)
    index[rows] = places.int()

    num_slots = 1 + num_pages * page
    if key_dim == value_dim:
        buffer = torch.full((num_slots, 2 * num_kv_heads, key_dim), torch.nan)
        k_cache, v_cache = buffer[:, :num_kv_heads], buffer[:, num_kv_heads:]
    else:
        k_cache = torch.full((num_slots, num_kv_heads, key_dim), torch.nan)
        v_cache = torch.full((num_slots, num_kv_heads, value_dim), torch.nan)
    for place, length in zip(places, lengths, strict=True):
        slots = (place[:, None] + torch.arange(page)).flatten()[:length]
        k_cache[slots] = torch.randn(length, num_kv_heads, key_dim)
        v_cache[slots] = torch.randn(length, num_kv_heads, value_dim)
    k_cache[0] = v_cache[0] = 1e4
    if key_dim == value_dim:
        buffer = buffer.to(device, dtype)
        k_cache, v_cache = buffer[:, :num_kv_heads], buffer[:, num_kv_heads:]
    else:
        k_cache, v_cache = k_cache.to(device, dtype), v_cache.to(device, dtype)
    return Cache(
        PagedKV(k_cache, v_cache, index.to(device), Pages(shift)),
        rows.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def share_first_keys(cache: Cache, sets: list[tuple[int, list[int]]], num_members: int) -> SharedPrefixGroups:
    """Makes each set (keys, requests) share its first keys, in the slots of the first request; the slots that
    the others had become NaN. More requests than `num_members` are several prefixes; one prefix is left
    unused."""
    kv, shift = cache.kv, cache.kv.lookup.page_shift
    members, keys, place = [[-1] * num_members], [0], [-1] * len(cache.rows)
    for count, requests in sets:
        first, *others = (kv.index[row] for row in cache.rows[requests].tolist())
        for entries in others:
            slots = (entries[: count >> shift, None] + torch.arange(1 << shift, device=entries.device)).long()
            kv.k[slots] = kv.v[slots] = torch.nan
            entries[: count >> shift] = first[: count >> shift]
        for begin in range(0, len(requests), num_members):
            some = requests[begin : begin + num_members]
            for member, request in enumerate(some):
                place[request] = len(members) * num_members + member
            members.append(some + [-1] * (num_members - len(some)))
            keys.append(count)
    device = cache.rows.device
    tensors = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (members, keys, place))
    return SharedPrefixGroups(*tensors)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def starts(q_lens: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device)
