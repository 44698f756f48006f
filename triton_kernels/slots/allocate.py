"""Allocates and frees slots on the device: the list of free slots is read and written in device memory only.

The prefix sum of the blocks' free counts tells which blocks hold the n lowest free slots, and a block's bits
tell which of its slots these are. The sum begins at the first block that can have a free slot. So a search
reads some hundred counts and one or two cache lines per slot, however large or fragmented the pool is. No
operation synchronises, and no shape depends on data, so all of them can be captured in a CUDA graph.

- A few slots (a decode step) are allocated by one kernel. Each of its programs finds its own slots in two
  dependent reads; the last program to finish reading writes the metadata for all of them.
- Many slots (a prompt) are allocated by two kernels (`alloc_many.py`): the first plans, the second has a
  program for every few blocks.
- To allocate a run, programs of the first kernel search the pool's bits while another program plans for the
  case that there is no run.

An operation that cannot be done raises no error: it does as much as it can without giving a slot two owners,
and sets a flag in device memory (`SlotFlag`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.layout.slot_flags import SlotFlag
from lightkv.triton_kernels.tuning import block_for

from .alloc_many import alloc_many
from .slot_search import CountTiles, entries_of, num_bits, place_of_bit
from .slot_state import (
    BLOCK_FREE,
    FIRST_BLOCK,
    FLAGS,
    NUM_FREE,
    TICKET,
    Given,
    SlotState,
    TableEntries,
    new_slot_state,
    table_arguments,
)

__all__ = [
    "SlotFlag",
    "SlotState",
    "TableEntries",
    "alloc_run",
    "alloc_run_reference",
    "alloc_slots",
    "alloc_slots_reference",
    "free_slots",
    "free_slots_reference",
    "lowest_run",
    "new_slot_state",
]

_SHORT = tl.constexpr(int(SlotFlag.SHORT))
_DOUBLE_FREE = tl.constexpr(int(SlotFlag.DOUBLE_FREE))
_OUT_OF_RANGE = tl.constexpr(int(SlotFlag.OUT_OF_RANGE))
_NEVER = tl.constexpr(2**31 - 1)  # larger than any rank
_NO_SLOT = tl.constexpr(-(2**30))  # in no word and no block

_FREE_BLOCK = 256

MAX_IN_ONE_KERNEL = 512  # slots; each costs a search through the words of its block
# Counts of blocks that a search reads in a turn: few at first, since enough free slots are usually close behind
# the first block that has one.
_FIRST_TILE, _LATER_TILE = 256, 2048


def few_tiles(num_blocks: int) -> CountTiles:
    """Returns the tiles of an allocation in one kernel, where every program searches by itself."""
    num = max(32, triton.next_power_of_2(num_blocks))
    return CountTiles(min(_FIRST_TILE, num), min(_LATER_TILE, num))


class AllocLaunch(NamedTuple):
    """How an allocation in one kernel divides its slots among programs."""

    ranks: int  # slots per program
    num_programs: int
    num_warps: int


def alloc_launch(max_ranks: int) -> AllocLaunch:
    """Returns the launch for a power of two of slots: one program as long as that is faster, since it need not
    find out which program is last."""
    if max_ranks <= 64:
        return AllocLaunch(max_ranks, 1, 4 if max_ranks <= 16 else 8)
    return AllocLaunch(16, max_ranks // 16, 4)


@triton.jit
def _pass_blocks(metadata, start, total, ranks, layout, TILE: tl.constexpr, RANKS: tl.constexpr):
    """Returns for each rank how many of the blocks start .. start + TILE - 1 end before it and their prefix sum
    (0 if there are none), and the sum over all these blocks. `total`: the sum before `start`."""
    blocks = start + tl.arange(0, TILE)
    within = blocks < layout.NUM_BLOCKS
    sums = total + tl.cumsum(tl.load(metadata + BLOCK_FREE + blocks, mask=within, other=0), 0)
    after = tl.where(within, sums, _NEVER)
    # The ranks from a block's prefix sum on pass the block. It is counted at the first of them, then summed.
    first_passing = tl.maximum(after - tl.min(ranks, 0), 0)
    passed = tl.cumsum(tl.histogram(first_passing, RANKS, mask=first_passing < RANKS), 0)
    before = tl.where(passed > 0, tl.gather(after, tl.maximum(passed - 1, 0), 0), 0)
    return passed, before, tl.max(sums, 0)


@triton.jit
def _find_slots(metadata, ranks, first_rank, first_block, num_alloc, layout, tiles, RANKS: tl.constexpr):
    """Returns the slots of these ranks; 0 for ranks from num_alloc on."""
    WORDS: tl.constexpr = layout.WORDS
    passed, before, total = _pass_blocks(metadata, first_block, 0, ranks, layout, tiles.first, RANKS)
    block = first_block + passed
    if tiles.first < layout.NUM_BLOCKS:
        start = first_block + tiles.first
        end_rank = tl.where(first_rank < num_alloc, tl.minimum(first_rank + RANKS, num_alloc), 0)
        while (total < end_rank) & (start < layout.NUM_BLOCKS):
            passed, sum_passed, total = _pass_blocks(
                metadata, start, total, ranks, layout, tiles.later, RANKS
            )
            block += passed
            before = tl.maximum(before, sum_passed)
            start += tiles.later
    taken = ranks < num_alloc
    nth = ranks - before  # which of the block's free slots

    columns = tl.arange(0, WORDS)
    words = (block * WORDS)[:, None] + columns[None, :]
    bits = tl.load(metadata + layout.FREE_BITS + words, mask=taken[:, None], other=0)
    num_set = num_bits(bits.to(tl.uint32, bitcast=True))
    passed_words = tl.cumsum(num_set, 1) <= nth[:, None]
    column = tl.sum(passed_words.to(tl.int32), 1)
    nth -= tl.sum(tl.where(passed_words, num_set, 0), 1)  # which of the word's
    word = tl.sum(tl.where(columns[None, :] == column[:, None], bits, 0), 1)
    place = place_of_bit(word.to(tl.uint32, bitcast=True), nth)
    return tl.where(taken, (block * WORDS + column) * layout.WORD_SLOTS + place, 0)


@triton.jit
def _write_metadata(
    metadata, out, num_alloc, num_free, wanted, layout, ALL_RANKS: tl.constexpr, CACHE: tl.constexpr
):
    """Updates the metadata once all slots of `out` are allocated, from the first and last slot of each word and
    block.

    The lowest slots are allocated first, so no slot up to the last one is free afterwards: in each word all
    bits up to its last allocated slot are cleared, and each block's count falls by the ranks from its first to
    its last.
    """
    WORD_SLOTS: tl.constexpr = layout.WORD_SLOTS
    BLOCK_SLOTS: tl.constexpr = layout.WORDS * WORD_SLOTS
    ranks = tl.arange(0, ALL_RANKS)
    taken = ranks < num_alloc
    slots = tl.load(out + ranks, mask=taken, other=0, cache_modifier=CACHE)
    lower = tl.load(out + ranks - 1, mask=taken & (ranks > 0), other=_NO_SLOT, cache_modifier=CACHE)
    higher = tl.load(out + ranks + 1, mask=ranks + 1 < num_alloc, other=_NO_SLOT, cache_modifier=CACHE)
    words = slots // WORD_SLOTS
    above = tl.full([ALL_RANKS], -2, tl.int32) << slots % WORD_SLOTS
    ends_word = taken & (words != higher // WORD_SLOTS)
    tl.atomic_and(metadata + layout.FREE_BITS + words, above, mask=ends_word, sem="relaxed")
    blocks = slots // BLOCK_SLOTS
    begins = taken & (blocks != lower // BLOCK_SLOTS)
    ends = taken & (blocks != higher // BLOCK_SLOTS)
    change = tl.where(begins, ranks, 0) - tl.where(ends, ranks + 1, 0)
    tl.atomic_add(metadata + BLOCK_FREE + blocks, change, mask=begins | ends, sem="relaxed")
    tl.store(metadata + FIRST_BLOCK + tl.zeros_like(blocks), blocks, mask=ranks == num_alloc - 1)
    tl.store(metadata + NUM_FREE, num_free - num_alloc)
    if num_alloc < wanted:
        tl.atomic_or(metadata + FLAGS, _SHORT, sem="relaxed")


@triton.jit(
    do_not_specialize=["table_stride", "max_n"],
    do_not_specialize_on_alignment=["out", "count", "table", "positions", "rows"],
)
def _alloc_few_kernel(
    mem_state,
    metadata,
    out,
    count,
    table,
    positions,
    rows,
    table_stride,
    max_n,
    given,  # `Given`
    layout,  # `Layout`
    tiles,  # `CountTiles`
    RANKS: tl.constexpr,
    ALL_RANKS: tl.constexpr,
):
    """Allocates the free slots of ranks 0 .. count - 1. Each program finds RANKS of them by itself."""
    first_rank = tl.program_id(0) * RANKS
    ranks = first_rank + tl.arange(0, RANKS)
    within = ranks < max_n
    # Independent loads are issued first, so that they overlap.
    num_free = tl.load(metadata + NUM_FREE)
    first_block = tl.load(metadata + FIRST_BLOCK)
    wanted = max_n
    if given.COUNT:
        wanted = tl.load(count)
    if given.TABLE:
        entries = entries_of(positions, rows, table_stride, ranks, within, given.ROWS)
    num_alloc = tl.maximum(tl.minimum(tl.minimum(wanted, max_n), num_free), 0)
    slots = _find_slots(metadata, ranks, first_rank, first_block, num_alloc, layout, tiles, RANKS)
    tl.store(out + ranks, slots, mask=within)
    # Every thread has read what it needs of the metadata and written its part of `out`.
    tl.debug_barrier()
    is_last = True
    # The first-level cache does not see what other programs write.
    CACHE: tl.constexpr = ".cg" if ALL_RANKS > RANKS else ""
    if ALL_RANKS > RANKS:
        is_last = tl.atomic_add(metadata + TICKET, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if given.TABLE:
        tl.store(table + entries, slots, mask=within)
    tl.store(mem_state + slots, tl.zeros([RANKS], tl.int32), mask=ranks < num_alloc)
    if is_last:
        _write_metadata(metadata, out, num_alloc, num_free, wanted, layout, ALL_RANKS, CACHE)
        if ALL_RANKS > RANKS:
            tl.store(metadata + TICKET, 0)


@triton.jit(do_not_specialize=["num_to_free"], do_not_specialize_on_alignment=["to_free"])
def _free_slots_kernel(
    mem_state,
    metadata,
    to_free,
    num_to_free,
    num_slots,
    FREE_BITS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    WORD_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = places < num_to_free
    slots = tl.load(to_free + places, mask=valid, other=0)
    in_range = valid & (slots >= 1) & (slots < num_slots)
    # The exchange returns a slot's old state to exactly one of the threads that free it.
    one = tl.full([BLOCK], 1, tl.int32)
    was_free = tl.atomic_xchg(mem_state + slots, one, mask=in_range, sem="relaxed")
    freed = in_range & (was_free == 0)
    bit = one << (slots % WORD_SLOTS).to(tl.int32)
    tl.atomic_or(metadata + FREE_BITS + slots // WORD_SLOTS, bit, mask=freed, sem="relaxed")
    blocks = slots // BLOCK_SLOTS
    tl.atomic_add(metadata + BLOCK_FREE + blocks, one, mask=freed, sem="relaxed")
    lowest = tl.min(tl.where(freed, blocks, _NEVER), 0).to(tl.int32)
    tl.atomic_min(metadata + FIRST_BLOCK, lowest, sem="relaxed")
    tl.atomic_add(metadata + NUM_FREE, tl.sum(freed.to(tl.int32), 0), sem="relaxed")
    double_free = tl.max((in_range & (was_free == 1)).to(tl.int32), 0)
    out_of_range = tl.max((valid & (in_range == 0)).to(tl.int32), 0)
    if double_free + out_of_range > 0:
        tl.atomic_or(
            metadata + FLAGS, double_free * _DOUBLE_FREE + out_of_range * _OUT_OF_RANGE, sem="relaxed"
        )


def alloc_slots(
    state: SlotState, out: Tensor, count: Tensor | None = None, entries: TableEntries | None = None
) -> None:
    """Allocates the `count` lowest free slots, ascending.

    If fewer are free, or `out` is shorter, it allocates as many as it can and sets the flag SHORT.

    Args:
        state: the pool; updated in place.
        out: int32 `[max_n]`, contiguous: receives the allocated slots, then zeros.
        count: int32 `[1]` on the device; None for max_n.
        entries: places in a table that `out` is written to as well. They have to be distinct, except
            for those that zeros are written to.
    """
    max_n = len(out)
    if max_n > MAX_IN_ONE_KERNEL:
        alloc_many(state, out, count, entries, find_run=False)
        return
    given, all_ranks = Given.of(count, entries), block_for(max_n)
    shape, counted = alloc_launch(all_ranks), state.metadata if count is None else count
    state.launches.launch(
        _alloc_few_kernel,
        ("alloc few", all_ranks, given),
        shape.num_programs,
        (state.mem_state, state.metadata, out, counted, *table_arguments(state, entries), max_n),
        lambda: {
            "given": given.constants(),
            "layout": state.layout(),
            "tiles": few_tiles(len(state.block_free)).constants(),
            "RANKS": shape.ranks,
            "ALL_RANKS": all_ranks,
            "num_warps": shape.num_warps,
        },
    )


def alloc_run(state: SlotState, out: Tensor, entries: TableEntries | None = None) -> None:
    """Allocates the lowest `len(out)` consecutive free slots if there are any, else as `alloc_slots`.

    `out`: int32 `[n]`, contiguous. `entries`: as for `alloc_slots`. The device decides which case it is.
    """
    if len(out):
        alloc_many(state, out, None, entries, find_run=True)


def free_slots(state: SlotState, slots: Tensor) -> None:
    """Frees slots. `slots`: int32 or int64 `[n]`, contiguous, in any order.

    A slot that is free already, or occurs twice, is free once and sets the flag DOUBLE_FREE. A number outside
    1..num_slots-1 changes nothing and sets OUT_OF_RANGE.
    """
    if slots.numel() == 0:
        return
    state.launches.launch(
        _free_slots_kernel,
        ("free", slots.dtype),
        -(-len(slots) // _FREE_BLOCK),
        (state.mem_state, state.metadata, slots, len(slots), len(state.mem_state)),
        lambda: {
            "FREE_BITS": state.free_bits.storage_offset(),
            "BLOCK_SLOTS": state.block_slots,
            "WORD_SLOTS": state.word_slots,
            "BLOCK": _FREE_BLOCK,
        },
    )


def lowest_run(state: SlotState, n: int) -> Tensor:
    """Returns how many free slots come before the lowest `n` consecutive free slots: int32 `[1]` on the device;
    0 if there is no such run.

    Plain torch over the whole pool (a window of n slots is free if its states sum to n): a part of the
    reference.
    """
    num_slots = len(state.mem_state)
    if n < 1 or n > num_slots:
        return torch.zeros(1, dtype=torch.int32, device=state.mem_state.device)
    cum_sum = torch.cumsum(state.mem_state, 0, dtype=torch.int32)  # [num_slots]
    free_before = cum_sum - state.mem_state
    is_run = cum_sum[n - 1 :] - free_before[: num_slots - n + 1] == n
    start = is_run.int().argmax(dim=0, keepdim=True)  # argmax returns the first of equals
    return free_before.gather(0, start) * is_run.gather(0, start)


def alloc_slots_reference(
    state: SlotState, out: Tensor, count: Tensor | None = None, entries: TableEntries | None = None
) -> None:
    """The reference of `alloc_slots`, in plain torch; it also runs on the CPU."""
    _alloc_reference(state, out, count, None, entries)


def alloc_run_reference(state: SlotState, out: Tensor, entries: TableEntries | None = None) -> None:
    """The reference of `alloc_run`, in plain torch; it also runs on the CPU."""
    if len(out):
        _alloc_reference(state, out, None, lowest_run(state, len(out)), entries)


def free_slots_reference(state: SlotState, slots: Tensor) -> None:
    """The reference of `free_slots`, in plain torch; it also runs on the CPU."""
    if slots.numel() == 0:
        return
    ordered = slots.long().sort().values
    in_range = (ordered >= 1) & (ordered < len(state.mem_state))
    safe = ordered.where(in_range, 0)  # slot 0 stands for numbers out of range; it is repaired below
    repeated = torch.zeros_like(in_range)
    repeated[1:] = ordered[1:] == ordered[:-1]
    freed = in_range & ~repeated & (state.mem_state[safe] == 0)
    state.mem_state.index_fill_(0, safe, 1)
    state.mem_state[:1] = 0
    state.free_bits.index_add_(0, safe // state.word_slots, _bit_of(state, safe).where(freed, 0))
    blocks = safe // state.block_slots
    state.block_free.index_add_(0, blocks, freed.int())
    lowest = blocks.where(freed, len(state.block_free)).amin().int()
    state.first_block.copy_(torch.minimum(state.first_block, lowest))
    state.counters[0] += freed.sum(dtype=torch.int32)
    double_free = (in_range & ~freed).any().int() * int(SlotFlag.DOUBLE_FREE)
    out_of_range = (~in_range).any().int() * int(SlotFlag.OUT_OF_RANGE)
    state.counters[1] |= double_free | out_of_range


def _alloc_reference(
    state: SlotState, out: Tensor, count: Tensor | None, skip: Tensor | None, entries: TableEntries | None
) -> None:
    """Allocates the `count` free slots after the `skip` lowest (int32 `[1]` on the device; None for 0).

    Reads the count of every block, and the slots of at most as many blocks as there are slots to allocate. It
    does not raise `first_block`, which stays a lower bound.
    """
    num_slots, num_blocks, max_n = len(state.mem_state), len(state.block_free), len(out)
    if count is None:
        count = torch.full((1,), max_n, dtype=torch.int32, device=out.device)
    cum_sum = torch.cumsum(state.block_free, 0, dtype=torch.int32, out=state.mem_cum_sum)
    first_rank = torch.zeros_like(count) if skip is None else skip
    num_alloc = torch.minimum(count.clamp(max=max_n), cum_sum[-1:] - first_rank).clamp(min=0)
    places = torch.arange(max_n, dtype=torch.int32, device=out.device)
    taken = places < num_alloc

    # The first max_n blocks with a rank from first_rank on; each has at least one free slot. Where there are
    # fewer blocks, and past the end of the last one, the pool's last slot stands in: it comes last, so it is
    # not reached.
    passed = cum_sum <= first_rank
    holding = (state.block_free > 0) & ~passed
    nth = torch.arange(1, min(max_n, num_blocks) + 1, device=out.device)
    blocks = torch.searchsorted(holding.cumsum(0), nth)
    within = torch.arange(state.block_slots, device=out.device)
    slots = (blocks[:, None] * state.block_slots + within).clamp_(max=num_slots - 1).view(-1)

    # The slot of rank r is the first at which r + 1 free slots have been counted.
    cum_free = state.mem_state[slots].cumsum(0, dtype=torch.int32)
    num_before = state.block_free.where(passed, 0).sum(dtype=torch.int32)
    found = torch.searchsorted(cum_free, first_rank - num_before + places + 1)
    chosen = slots[found.where(taken, 0)].where(taken, 0)
    out.copy_(chosen)
    state.mem_state.index_fill_(0, chosen, 0)  # slot 0 is never free
    state.free_bits.index_add_(0, chosen // state.word_slots, -_bit_of(state, chosen).where(taken, 0))
    state.block_free.index_add_(0, chosen // state.block_slots, -taken.int())
    state.counters[:1] -= num_alloc
    state.counters[1:] |= (num_alloc < count).int() * int(SlotFlag.SHORT)
    if entries is not None:
        table, at_entries, rows = entries
        if rows is not None:
            at_entries = rows * table.stride(0) + at_entries
        table.view(-1).index_copy_(0, at_entries, chosen.int())


def _bit_of(state: SlotState, slots: Tensor) -> Tensor:
    """Returns each slot's (int64) bit in its word of free_bits: int32, so the highest bit is a negative number.

    Distinct bits of a word are set by adding them and cleared by subtracting them.
    """
    return (1 << slots % state.word_slots).int()
