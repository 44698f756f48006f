"""K/V of random requests in a pool, in any format; slots that no sequence holds are NaN, or its bytes."""

import torch
from torch import Tensor

from lightkv import KVPool, KVSpec
from lightkv.triton_kernels.attention.lookups import Pages
from lightkv.triton_kernels.attention.paged_kv import PagedKV
from lightkv.triton_kernels.quantised.kv_format import KVFormat

NUM_SLOTS = 512


def make_kv(
    name: str | KVFormat,
    device: torch.device | str,
    *,
    lengths: list[int],
    shift: int = 0,
    dims: tuple[int, int] = (64, 64),
    heads: int = 2,
    dtype: torch.dtype = torch.float16,
) -> tuple[PagedKV, Tensor]:
    """Returns K/V of random requests at shuffled places, and their rows of the index."""
    spec = KVSpec(1, heads, *dims, dtype, name)
    pool = KVPool(spec, NUM_SLOTS, torch.device(device))
    for buffer in pool.buffers:
        buffer.view(torch.uint8).fill_(0xFF)  # NaN in 16 bits, and in fp8
    if pool.format(0).is_static:
        pool.set_static_scales(0, torch.tensor([0.013]), 0.01 * torch.arange(1.0, heads + 1))
    page = 1 << shift if shift < 31 else max([1, *lengths])
    pages = torch.randperm((NUM_SLOTS - 1) // page)[: len(lengths) * (NUM_SLOTS // page)] * page + 1
    num_entries = -(-max([1, *lengths]) // page)
    index = torch.full((len(lengths) + 3, num_entries), -(2**30), dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
    given = 0
    for row, length in zip(rows.tolist(), lengths, strict=True):
        count = -(-length // page)
        index[row, :count] = pages[given : given + count].int()
        given += count
        positions = torch.arange(length)
        slots = (index[row][positions // page] + positions % page).long().to(device)
        k, v = ((torch.randn(length, heads, dim) * 3 + 1).to(device) for dim in dims)
        pool.write(0, slots, k, v)
    kv = PagedKV(
        pool.k(0), pool.v(0), index.to(device), Pages(shift), scales=pool.scales(0), format=pool.format(0)
    )
    return kv, rows.to(device)
