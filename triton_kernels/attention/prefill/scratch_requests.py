"""The requests of a scratch, which holds K and V of one after the other: how the programs that fill it find
theirs, and what they have to be."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.paged_kv import PagedKV
from lightkv.triton_kernels.layout.strides import has_unit_stride


@triton.jit
def block_of(starts, lengths, num_requests, capacity, KV_HEADS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns which head of K (or, from KV_HEADS on, of V) a program fills, its first row of the scratch, and
    whether a request has rows from there on. Heads run fastest, so neighbouring programs read neighbouring
    heads."""
    head = tl.program_id(0) % (2 * KV_HEADS)
    first = tl.program_id(0) // (2 * KV_HEADS) * BLOCK_T
    last = num_requests - 1
    end = tl.minimum(tl.load(starts + last) + tl.load(lengths + last), capacity)
    return head, first, first < end


@triton.jit
def find_requests(starts, first, num_requests, TURNS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns the last request that begins at or before each token of the scratch from `first` on, int32
    [BLOCK_T], or -1: that of the first token by bisection, where 2**TURNS is more than the number of requests,
    and then those that begin within the block, mostly none."""
    found = -1
    for turn in tl.static_range(TURNS):
        later = found + (1 << (TURNS - 1 - turn))
        begin = tl.load(starts + later, mask=later < num_requests, other=2147483647)
        found = tl.where(begin <= first, later, found)
    tokens = first + tl.arange(0, BLOCK_T)
    requests = tl.full([BLOCK_T], 0, tl.int32) + found
    following = found + 1
    begin = tl.load(starts + following, mask=following < num_requests, other=2147483647)
    while begin < first + BLOCK_T:
        requests = tl.where(begin <= tokens, following, requests)
        following += 1
        begin = tl.load(starts + following, mask=following < num_requests, other=2147483647)
    return requests


def check_requests_of(kv: PagedKV, rows: Tensor, lengths: Tensor, starts: Tensor, name: str) -> None:
    """Raises ValueError where rows, lengths, the starts of requests, of this name, or the index are not as
    kernels read them."""
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64) or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous int32 or int64 [B], got {rows.dtype} {tuple(rows.shape)}")
    for called, tensor in (("lengths", lengths), (name, starts)):
        if tensor.shape != rows.shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{called} must be contiguous int32 {tuple(rows.shape)}, as rows; got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )
    if kv.index.dim() != 2 or kv.index.dtype != torch.int32 or not has_unit_stride(kv.index):
        raise ValueError(
            f"the index must be int32 [rows, entries] with a last stride of 1, got {kv.index.dtype} "
            f"{tuple(kv.index.shape)} with strides {kv.index.stride()}"
        )
