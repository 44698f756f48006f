"""Orders the rows of a mixture of experts by their experts, and cuts each expert's rows into tiles.

    few ids [T, k] ─► order: the place of each pair, by comparing it with all others; the tiles
    many ids ─► counts of each chunk of pairs ─► order

A pair is a token and one of its k experts. The place of one of few pairs is the number of those with a lower
expert, or with the same one and an earlier token: programs that place some pairs each wait for nothing but the
ids. Of many pairs, this is a counting sort: a place follows from the numbers of pairs of each expert, of those
in the chunks before, and of those before it in its chunk. One program more writes the tiles.
Pairs of one expert stay in the order of the tokens, so results do not vary.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .expert_choice import zeroed_indices

_COMPARED = tl.constexpr(64)  # of many pairs, those that a program's pairs are compared with in a turn
_NUMBERS = tl.constexpr(8192)  # that a program holds in a turn, of experts by chunks
_MOST_CHUNKS = 64  # whose counts each program reads
TILE_WORDS = tl.constexpr(4)  # of a tile, one of which is unused


class OrderLaunch(NamedTuple):
    """How pairs are ordered: in one launch by comparing each with all others, or by counting them before."""

    is_compared: bool
    read: int  # pairs that a program reads in a turn: all of them, if they are compared
    placed: int  # pairs that a program places
    num_warps: int


# The launches by the pairs that they are for at most, and that of more. Measured on an H200 with Triton 3.6.
_FEW = {most: OrderLaunch(True, most, 8, 4) for most in (256, 512, 2048)}
_MANY = OrderLaunch(False, 1024, 128, 4)


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
    return tl.minimum(tl.load(ids + pairs, mask=pairs < num_pairs, other=E).to(tl.int32), E)


@triton.jit
def _write_places(pairs_at, places, experts_at, place, pairs, own, num_pairs, E: tl.constexpr):
    within = pairs < num_pairs
    tl.store(places + pairs, place, mask=within)
    tl.store(pairs_at + place, pairs, mask=within)
    tl.store(experts_at + place, tl.minimum(own, E - 1), mask=within)


@triton.jit
def _largest(a, b, other_a, other_b):
    return tl.maximum(a, other_a), tl.maximum(b, other_b)


@triton.jit
def _write_tiles(
    offsets, tiles, total, num_tiles, E: tl.constexpr, E_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the ends and the tiles of all experts, which have `total` pairs each."""
    experts = tl.arange(0, E_BLOCK)
    if tiles is None:
        tl.store(offsets + experts, tl.cumsum(total, 0), mask=experts < E)
    else:
        num = (total + BLOCK - 1) // BLOCK
        sums = tl.cumsum((num.to(tl.int64) << 32) + total, 0)  # both at once: a sum has several barriers
        ends = sums.to(tl.int32)
        until = (sums >> 32).to(tl.int32)
        most, last = tl.reduce((num, until), 0, _largest)
        tl.store(offsets + experts, ends, mask=experts < E)
        at = tiles + (until - num) * TILE_WORDS
        begin = ends - total
        for turn in range(most):
            has_tile = turn < num
            tl.store(at, experts, mask=has_tile)
            tl.store(at + 1, begin, mask=has_tile)
            tl.store(at + 2, tl.minimum(begin + BLOCK, ends), mask=has_tile)
            at += TILE_WORDS
            begin += BLOCK
        for first in range(last, num_tiles, E_BLOCK):
            unused = first + experts
            tl.store(tiles + unused * TILE_WORDS, E, mask=unused < num_tiles)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _compare_kernel(
    ids,  # [T, k], contiguous
    pairs_at,  # the tensors of an `ExpertOrder`, written
    places,
    experts_at,
    offsets,
    tiles,  # None for none
    num_pairs,  # up to READ
    num_tiles,
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,  # places of a tile
    READ: tl.constexpr,
    PLACED: tl.constexpr,  # pairs that a program places
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    tuning.wait_early(EARLY)
    if program == 0:
        every = _experts_of(ids, tl.arange(0, READ), num_pairs, E)
        total = tl.histogram(every, E_BLOCK, mask=every < E)
        _write_tiles(offsets, tiles, total, num_tiles, E, E_BLOCK, BLOCK)
    else:
        others = tl.arange(0, READ)[None, :]
        pairs = (program - 1) * PLACED + tl.arange(0, PLACED)[:, None]
        other = _experts_of(ids, others, num_pairs, E)
        own = _experts_of(ids, pairs, num_pairs, E)
        # One comparison of numbers that have the order of experts, then pairs. What is no pair is behind all.
        is_before = other * READ + others < own * READ + pairs
        place = tl.sum(is_before.to(tl.int32), 1, keep_dims=True)
        _write_places(pairs_at, places, experts_at, place, pairs, own, num_pairs, E)


@triton.jit(do_not_specialize=["num_pairs", "chunk"])
def _count_kernel(
    ids,  # [T, k], contiguous
    counts,  # int32 [chunks, E_BLOCK], written
    num_pairs,
    chunk,  # pairs of a chunk, a multiple of READ
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    READ: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    count = tl.zeros([E_BLOCK], tl.int32)
    if EARLY:  # in this order, so that the next kernel finds the ids without waiting
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for begin in range(program * chunk, tl.minimum((program + 1) * chunk, num_pairs), READ):
        other = _experts_of(ids, begin + tl.arange(0, READ), num_pairs, E)
        count += tl.histogram(other, E_BLOCK, mask=other < E)
    tl.store(counts + program * E_BLOCK + tl.arange(0, E_BLOCK), count)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "chunk"])
def _place_kernel(
    ids,  # [T, k], contiguous
    counts,  # int32 [chunks, E_BLOCK]
    pairs_at,  # the tensors of an `ExpertOrder`, written
    places,
    experts_at,
    offsets,
    tiles,  # None for none
    num_pairs,
    num_tiles,
    chunk,  # pairs of a chunk, a multiple of READ
    E: tl.constexpr,
    E_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,  # places of a tile
    READ: tl.constexpr,
    PLACED: tl.constexpr,  # pairs that a program places; READ is a multiple
    EARLY: tl.constexpr,
):
    ROWS: tl.constexpr = _NUMBERS // E_BLOCK
    first = (tl.program_id(0) - 1) * PLACED  # below 0 in the program of the tiles
    pairs = first + tl.arange(0, PLACED)
    total = tl.zeros([E_BLOCK], tl.int32)
    before = tl.zeros([E_BLOCK], tl.int32)
    place = tl.zeros([PLACED], tl.int32)
    own = tl.full([PLACED], E, tl.int32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if first >= 0:  # before the counts are there
        own = _experts_of(ids, pairs, num_pairs, E)
        for begin in range(0, PLACED, _COMPARED):
            others = first + begin + tl.arange(0, _COMPARED)
            other = _experts_of(ids, others, num_pairs, E)
            is_before = (other[:, None] == own[None, :]) & (others[:, None] < pairs[None, :])
            place += tl.sum(is_before.to(tl.int32), 0)
        for begin in range(first // chunk * chunk, first, READ):
            others = begin + tl.arange(0, READ)
            other = _experts_of(ids, others, num_pairs, E)
            before += tl.histogram(other, E_BLOCK, mask=(other < E) & (others < first))
    if EARLY:
        tl.extra.cuda.gdc_wait()
    num_chunks = tl.cdiv(num_pairs, chunk)
    for begin in range(0, num_chunks, ROWS):
        chunks = begin + tl.arange(0, ROWS)[:, None]
        at = counts + chunks * E_BLOCK + tl.arange(0, E_BLOCK)[None, :]
        count = tl.load(at, mask=chunks < num_chunks, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((chunks + 1) * chunk <= first, count, 0), 0)
    if first < 0:
        _write_tiles(offsets, tiles, total, num_tiles, E, E_BLOCK, BLOCK)
    else:
        behind = first + tl.sum(total - before, 0)  # where the next pair of no expert is
        base = tl.cumsum(total, 0) - total + before
        place += tl.where(own < E, tl.gather(base, tl.minimum(own, E - 1), 0), behind)
        _write_places(pairs_at, places, experts_at, place, pairs, own, num_pairs, E)


def most_tiles(num_pairs: int, num_experts: int, block: int) -> int:
    """Returns how many tiles of `block` places there are at most."""
    return min(num_pairs, num_pairs // block + num_experts)


def order_launch(num_pairs: int) -> OrderLaunch:
    """Returns how so many pairs are ordered."""
    return next((launch for most, launch in _FEW.items() if num_pairs <= most), _MANY)


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
    launch, early = order_launch(num_pairs), tuning.early_options(ids.device)
    sizes: dict[str, Any] = {"E": num_experts, "E_BLOCK": max(32, triton.next_power_of_2(num_experts))}
    tiled = sizes | {"BLOCK": block or 0, "PLACED": launch.placed, "num_warps": launch.num_warps}
    grid = (1 + triton.cdiv(num_pairs, launch.placed),)
    if launch.is_compared:
        _compare_kernel[grid](ids, *order, num_pairs, num_tiles, READ=launch.read, **tiled, **early)
        return order
    chunk = launch.read * triton.cdiv(num_pairs, launch.read * _MOST_CHUNKS)
    counts = ids.new_empty((triton.cdiv(num_pairs, chunk), sizes["E_BLOCK"]), dtype=torch.int32)
    read = {"READ": launch.read} | early
    _count_kernel[(len(counts),)](ids, counts, num_pairs, chunk, **sizes, **read, num_warps=4)
    _place_kernel[grid](ids, counts, *order, num_pairs, num_tiles, chunk, **tiled, **read)
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
