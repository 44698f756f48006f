"""Orders the rows of a mixture of experts by their experts, and cuts each expert's rows into tiles.

    ids [T, k] ─► (counts of each chunk of pairs) ─► order: the place of each pair, the tiles

A pair is a token and one of its k experts. This is a counting sort: a pair's place follows from the numbers of
pairs of each expert, of those in the chunks before its own, and of those before it in its chunk. Pairs of one
expert stay in the order of the tokens, so results do not vary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .expert_choice import zeroed_indices

# Up to so many pairs every program counts all of them. Beyond it a launch before counts those of each chunk.
MAX_COUNTED = 2048
_CHUNK = tl.constexpr(256)  # pairs that a program places
_PIECE = tl.constexpr(1024)  # pairs that are counted in a turn
_COMPARED = tl.constexpr(64)  # pairs that a program's pairs are compared with in a turn
_NUMBERS = tl.constexpr(8192)  # that a program holds in a turn, of experts by chunks or by tiles
TILE_WORDS = tl.constexpr(4)  # of a tile, one of which is unused


class ExpertOrder(NamedTuple):
    """The order of R = T · k pairs by expert. A pair whose id is the number of experts or above is of no expert
    of ours: its place is behind all others."""

    pairs: Tensor  # int32 [R], the pair at each place
    places: Tensor  # int32 [T, k], the place of each pair
    experts: Tensor  # int32 [R], of each place; where there is none, the last one
    offsets: Tensor  # int32 [E], the end of each expert's places
    # int32 [n, 4], the expert of each tile and the places where it begins and ends. Those behind the last tile
    # have E in the place of the expert. None for no tiles.
    tiles: Tensor | None


class ExpertRows(NamedTuple):
    """Which experts the rows of T tokens are for: R = T · k rows.

    `order`: that of the rows; None if the rows are in the order of their tokens, as few rows are, of which
    hardly any two have the same expert.
    """

    ids: Tensor  # int64 [T, k], contiguous
    num_experts: int
    order: ExpertOrder | None


@triton.jit
def _experts_of(ids, pairs, num_pairs, E: tl.constexpr):
    """Returns the experts of pairs, int32; E where there is none."""
    return tl.minimum(tl.load(ids + pairs, mask=pairs < num_pairs, other=E), E).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids,  # [T, k], contiguous
    counts,  # int32 [chunks, E_BLOCK], written
    num_pairs,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    chunk = tl.program_id(0)
    tuning.wait_early(EARLY)
    own = _experts_of(ids, chunk * _CHUNK + tl.arange(0, _CHUNK), num_pairs, E)
    count = tl.histogram(own, E_BLOCK, mask=own < E)
    tl.store(counts + chunk * E_BLOCK + tl.arange(0, E_BLOCK), count)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _order_kernel(
    ids,  # [T, k], contiguous
    counts,  # int32 [chunks, E_BLOCK]; None to count here
    pairs_at,  # the tensors of an `ExpertOrder`, written
    places,
    experts_at,
    offsets,
    tiles,  # None for none
    num_pairs,
    num_tiles,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,  # places of a tile
    TILES: tl.constexpr,  # that a program writes
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    first = program * _CHUNK
    experts = tl.arange(0, E_BLOCK)
    total = tl.zeros([E_BLOCK], tl.int32)
    before = tl.zeros([E_BLOCK], tl.int32)
    tuning.wait_early(EARLY)
    if counts is None:
        for begin in range(0, num_pairs, _PIECE):
            others = begin + tl.arange(0, _PIECE)
            other = _experts_of(ids, others, num_pairs, E)
            total += tl.histogram(other, E_BLOCK, mask=other < E)
            before += tl.histogram(other, E_BLOCK, mask=(other < E) & (others < first))
    else:
        ROWS: tl.constexpr = _NUMBERS // E_BLOCK
        num_chunks = tl.cdiv(num_pairs, _CHUNK)
        for begin in range(0, num_chunks, ROWS):
            chunks = begin + tl.arange(0, ROWS)
            at = counts + chunks[:, None] * E_BLOCK + experts[None, :]
            count = tl.load(at, mask=(chunks < num_chunks)[:, None], other=0)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where((chunks < program)[:, None], count, 0), 0)
    ends = tl.cumsum(total, 0)
    begins = ends - total
    if program == 0:
        tl.store(offsets + experts, ends, mask=experts < E)
    if first < num_pairs:
        pairs = first + tl.arange(0, _CHUNK)
        own = _experts_of(ids, pairs, num_pairs, E)
        places_of = tl.zeros([_CHUNK], tl.int32)
        for begin in range(0, _CHUNK, _COMPARED):
            others = first + begin + tl.arange(0, _COMPARED)
            other = _experts_of(ids, others, num_pairs, E)
            is_before = (other[:, None] == own[None, :]) & (others[:, None] < pairs[None, :])
            places_of += tl.sum(is_before.to(tl.int32), 0)
        behind = tl.sum(total, 0) + first - tl.sum(before, 0)
        known = tl.minimum(own, E - 1)
        places_of += tl.where(own < E, tl.gather(begins + before, known, 0), behind)
        within = pairs < num_pairs
        tl.store(places + pairs, places_of, mask=within)
        tl.store(pairs_at + places_of, pairs, mask=within)
        tl.store(experts_at + places_of, known, mask=within)
    if tiles is not None:
        num = (total + BLOCK - 1) // BLOCK
        until = tl.cumsum(num, 0)
        tile = program * TILES + tl.arange(0, TILES)
        expert = tl.sum((until[:, None] <= tile[None, :]).to(tl.int32), 0)
        known = tl.minimum(expert, E - 1)
        begin = tl.gather(begins, known, 0) + (tile - tl.gather(until - num, known, 0)) * BLOCK
        end = tl.minimum(tl.gather(ends, known, 0), begin + BLOCK)
        within = tile < num_tiles
        at = tiles + tile * TILE_WORDS
        tl.store(at, tl.minimum(expert, E), mask=within)
        tl.store(at + 1, begin, mask=within)
        tl.store(at + 2, end, mask=within)


def most_tiles(num_pairs: int, num_experts: int, block: int) -> int:
    """Returns how many tiles of `block` places there are at most."""
    return min(num_pairs, num_pairs // block + num_experts)


def expert_order(ids: Tensor, num_experts: int, block: int | None = None) -> ExpertOrder:
    """Returns the order of the pairs of `ids`, int64 `[T, k]`, by expert.

    block: the places of a tile; None for no tiles.

    Nothing synchronises, so a CUDA graph can capture it. A model on a CPU calls the reference.

    Raises:
        ValueError: `ids` are not contiguous rows.
    """
    if ids.dim() != 2 or not ids.is_contiguous():
        raise ValueError(f"ids of {tuple(ids.shape)}, strides {ids.stride()}; give contiguous rows [T, k]")
    num_pairs = ids.numel()
    num_tiles = 0 if block is None else most_tiles(num_pairs, num_experts, block)
    order = ExpertOrder(
        ids.new_empty((num_pairs,), dtype=torch.int32),
        ids.new_empty(ids.shape, dtype=torch.int32),
        ids.new_empty((num_pairs,), dtype=torch.int32),
        zeroed_indices(ids, (num_experts,), torch.int32),  # which PyTorch's product reads
        None if block is None else ids.new_empty((num_tiles, TILE_WORDS.value), dtype=torch.int32),
    )
    if not num_pairs:
        order.offsets.zero_()
        return order
    e_block, early = max(32, triton.next_power_of_2(num_experts)), tuning.early_options(ids.device)
    num_chunks, counts = triton.cdiv(num_pairs, _CHUNK.value), None
    if num_pairs > MAX_COUNTED:
        counts = ids.new_empty((num_chunks, e_block), dtype=torch.int32)
        _count_kernel[(num_chunks,)](
            ids, counts, num_pairs, E=num_experts, E_BLOCK=e_block, num_warps=4, **early
        )
    tiles = max(2, min(64, _NUMBERS.value // e_block))
    _order_kernel[(max(num_chunks, triton.cdiv(num_tiles, tiles)),)](
        ids,
        counts,
        *order,
        num_pairs,
        num_tiles,
        E=num_experts,
        E_BLOCK=e_block,
        BLOCK=block or 0,
        TILES=tiles,
        num_warps=8,
        **early,
    )
    return order


def expert_order_reference(ids: Tensor, num_experts: int, block: int | None = None) -> ExpertOrder:
    """Computes `expert_order` in plain torch."""
    experts, pairs = ids.flatten().clamp(max=num_experts).sort(stable=True)
    numbers = torch.arange(len(pairs), device=ids.device)
    places = torch.empty_like(pairs).scatter_(0, pairs, numbers).view(ids.shape)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, experts, torch.ones_like(experts))[:-1]
    ends = counts.cumsum(0)
    tiles = None
    if block is not None:
        until = (counts + block - 1).div(block, rounding_mode="floor").cumsum(0)
        numbers = torch.arange(most_tiles(len(pairs), num_experts, block), device=ids.device)
        expert = torch.searchsorted(until, numbers, right=True)
        known = expert.clamp(max=num_experts - 1)
        earlier = torch.where(known > 0, until[known - 1], 0)
        begin = (ends - counts)[known] + (numbers - earlier) * block
        end = torch.minimum(ends[known], begin + block)
        tiles = torch.stack([expert, begin, end, torch.zeros_like(end)], 1).int()
    known = experts.clamp(max=num_experts - 1).int()
    return ExpertOrder(pairs.int(), places.int(), known, ends.int(), tiles)
