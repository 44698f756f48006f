"""Allocates many slots in two kernels, with or without a search for a run of consecutive slots.

The first kernel plans: one program finds the blocks that hold the lowest free slots; if a run is wanted, the
other programs search for one, each in a part of the pool's bits. The second kernel allocates: each of its
programs handles a few blocks, and reads the result of the search by itself. References:
`alloc_slots_reference`, `alloc_run_reference`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.layout.slot_flags import SlotFlag
from lightkv.triton_kernels.tuning import INTERPRETER, DeviceClass, device_class

from .slot_search import CountTiles, entries_of, highest_bit, larger, num_bits
from .slot_state import (
    BLOCK_FREE,
    FIRST_BLOCK,
    FLAGS,
    FOUND,
    MAX_FOUND,
    NUM_FREE,
    SPAN,
    Given,
    SlotState,
    TableEntries,
    table_arguments,
)

_SHORT = tl.constexpr(int(SlotFlag.SHORT))
_NO_RUN = tl.constexpr(2**31 - 1)

_TILE_SLOTS = 2048  # slots that a program of the second kernel handles at once
_ALLOC_PROGRAMS = 264
# Counts of blocks that the search reads in a turn: passing used blocks should take few turns.
_FIRST_TILE, _LATER_TILE = 1024, 8192


def many_tiles(num_blocks: int) -> CountTiles:
    """Returns the tiles of an allocation in two kernels, where one program searches for all."""
    num = triton.next_power_of_2(num_blocks)
    return CountTiles(min(_FIRST_TILE, num), min(_LATER_TILE, num))


class Search(NamedTuple):
    """How the programs of a search for a run divide the words of a pool's bits."""

    num_programs: int
    chunk: int  # words in which one program finds the runs that end there
    back: int  # words before the chunk that it reads as well, since a run may begin there
    tile: int  # words that it reads at a time


def run_search(device: DeviceClass, num_words: int, word_slots: int, n: int, max_programs: int) -> Search:
    """Returns the search for n consecutive free slots by at most `max_programs` programs."""
    tile = 32 if device is INTERPRETER else 2048  # the interpreter's scans make a call per element
    # This runs for every prompt, and a call of triton.cdiv takes a microsecond.
    back = -(-n // word_slots) + 2
    least = max(tile // 2, -(-num_words // max_programs))
    chunk = -(-(least + back) // tile) * tile - back  # chunk + back is a whole number of tiles
    return Search(-(-num_words // chunk), chunk, back, tile)


@triton.jit
def _find_run(metadata, n, part, chunk, back, layout, TILE: tl.constexpr):
    """Returns the start of the lowest n consecutive free slots that this part of the words contains, or
    _NO_RUN.

    Slots before the words it reads count as used. The parts overlap by so many words (`back`) that at least one
    of them contains the lowest run of the pool.
    """
    NUM_WORDS: tl.constexpr = layout.NUM_BLOCKS * layout.WORDS
    WORD_SLOTS: tl.constexpr = layout.WORD_SLOTS
    free_bits = metadata + layout.FREE_BITS
    first = tl.maximum(part * chunk - back, 0)
    end = tl.minimum(part * chunk + chunk, NUM_WORDS)
    last_used = first * WORD_SLOTS - 1
    found = _NO_RUN
    for start in range(first, end, TILE):
        words = start + tl.arange(0, TILE)
        valid = words < end
        bits = tl.load(free_bits + words, mask=valid, other=0).to(tl.uint32, bitcast=True)
        follows = valid & (words + 1 < NUM_WORDS)
        next_bits = tl.load(free_bits + words + 1, mask=follows, other=0).to(tl.uint32, bitcast=True)
        # A run that reaches the end of a word begins after the last used slot and continues in the next word.
        used = bits ^ (2**WORD_SLOTS - 1)
        last = tl.where(used != 0, words * WORD_SLOTS + highest_bit(used), -1)
        last = tl.maximum(tl.associative_scan(last, 0, larger), last_used)
        num_next = num_bits(((next_bits ^ 0xFFFFFFFF) & (next_bits + 1)) - 1)
        length = words * WORD_SLOTS - last + (WORD_SLOTS - 1) + num_next
        found = tl.minimum(found, tl.min(tl.where(valid & (length >= n), last + 1, _NO_RUN), 0))
        if n <= WORD_SLOTS:  # the run may lie within a word: keep the bits at which n free slots begin
            size = 1
            for _ in tl.static_range(5):
                step = tl.minimum(size, n - size)
                bits = bits & (bits >> step.to(tl.uint32))
                size += step
            inside = words * WORD_SLOTS + num_bits((bits ^ 0xFFFFFFFF) & (bits - 1))
            found = tl.minimum(found, tl.min(tl.where(bits != 0, inside, _NO_RUN), 0))
        last_used = tl.maximum(last_used, tl.max(last, 0))
    return found


@triton.jit
def _scan_blocks(metadata, start, total, num_alloc, layout, TILE: tl.constexpr):
    """Writes the prefix sum over the blocks start .. start + TILE - 1; `total` is the sum before them.

    Returns the first block and the end of the blocks with ranks below num_alloc, and the sum after the last.
    """
    blocks = start + tl.arange(0, TILE)
    within = blocks < layout.NUM_BLOCKS
    free = tl.load(metadata + BLOCK_FREE + blocks, mask=within, other=0)
    rank_after = total + tl.cumsum(free, 0)
    tl.store(metadata + layout.CUM_SUM + blocks, rank_after, mask=within)
    holds = (free > 0) & (rank_after - free < num_alloc)
    first_block = tl.min(tl.where(holds, blocks, layout.NUM_BLOCKS), 0)
    end_block = tl.max(tl.where(holds, blocks + 1, 0), 0)
    return first_block, end_block, tl.max(rank_after, 0)


@triton.jit(
    do_not_specialize=["table_stride", "max_n", "chunk", "back"],
    do_not_specialize_on_alignment=["out", "count", "table", "positions", "rows"],
)
def _plan_kernel(
    metadata,
    out,
    count,
    table,
    positions,
    rows,
    table_stride,
    max_n,
    chunk,
    back,
    given,  # `Given`
    layout,  # `Layout`
    tiles,  # `CountTiles`
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0 updates the counters and plans which blocks to allocate from. The other programs search for a
    run."""
    part = tl.program_id(0) - 1
    if part >= 0:
        found = _find_run(metadata, max_n, part, chunk, back, layout, TILE)
        tl.store(metadata + FOUND + part, found)
    else:
        num_free = tl.load(metadata + NUM_FREE)
        start = tl.load(metadata + FIRST_BLOCK)
        wanted = max_n
        if given.COUNT:
            wanted = tl.load(count)
        num_alloc = tl.maximum(tl.minimum(tl.minimum(wanted, max_n), num_free), 0)
        first_block, end_block, total = _scan_blocks(metadata, start, 0, num_alloc, layout, tiles.first)
        start += tiles.first
        while (total < num_alloc) & (start < layout.NUM_BLOCKS):
            first, end, total = _scan_blocks(metadata, start, total, num_alloc, layout, tiles.later)
            first_block = tl.minimum(first_block, first)
            end_block = tl.maximum(end_block, end)
            start += tiles.later
        tl.store(metadata + NUM_FREE, num_free - num_alloc)
        if num_alloc < wanted:
            tl.atomic_or(metadata + FLAGS, _SHORT, sem="relaxed")
        tl.store(metadata + SPAN, first_block)
        tl.store(metadata + SPAN + 1, end_block)
        tl.store(metadata + SPAN + 2, num_alloc)
        for start in range(num_alloc, max_n, BLOCK):
            places = start + tl.arange(0, BLOCK)
            within = places < max_n
            tl.store(out + places, tl.zeros([BLOCK], tl.int32), mask=within)
            if given.TABLE:
                entries = entries_of(positions, rows, table_stride, places, within, given.ROWS)
                tl.store(table + entries, tl.zeros([BLOCK], tl.int32), mask=within)


@triton.jit(
    do_not_specialize=["table_stride", "n", "num_found"],
    do_not_specialize_on_alignment=["out", "table", "positions", "rows"],
)
def _alloc_many_kernel(
    mem_state,
    metadata,
    out,
    table,
    positions,
    rows,
    table_stride,
    n,
    num_found,
    given,  # `Given`
    layout,  # `Layout`
    BLOCKS: tl.constexpr,
):
    """Allocates the run that was found, or else the ranks that were planned. Each block belongs to one
    program."""
    WORDS: tl.constexpr = layout.WORDS
    WORD_SLOTS: tl.constexpr = layout.WORD_SLOTS
    parts = tl.arange(0, MAX_FOUND)
    found = tl.load(metadata + FOUND + parts, mask=parts < num_found, other=_NO_RUN)
    first_block = tl.load(metadata + SPAN)
    end_block = tl.load(metadata + SPAN + 1)
    num_alloc = tl.load(metadata + SPAN + 2)
    run = tl.min(found, 0)
    is_run = run != _NO_RUN
    if (tl.program_id(0) == 0) & (run == _NO_RUN) & (num_alloc > 0):  # a run may leave free slots below
        tl.store(metadata + FIRST_BLOCK, end_block - 1)
    num_alloc = tl.where(is_run, n, num_alloc)
    first_block = tl.where(is_run, run // (WORDS * WORD_SLOTS), first_block)
    end_block = tl.where(is_run, (run + (n - 1)) // (WORDS * WORD_SLOTS) + 1, end_block)

    block_free = metadata + BLOCK_FREE
    mem_cum_sum = metadata + layout.CUM_SUM
    free_bits = metadata + layout.FREE_BITS
    bit = tl.arange(0, WORD_SLOTS)
    for tile in range(
        first_block // BLOCKS + tl.program_id(0), tl.cdiv(end_block, BLOCKS), tl.num_programs(0)
    ):
        blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
        valid = (blocks >= first_block) & (blocks < end_block)  # sums of other blocks may be out of date
        num_free = tl.load(block_free + blocks, mask=valid, other=0)
        rank_after = tl.load(mem_cum_sum + blocks, mask=valid, other=0)
        words = blocks[:, None] * WORDS + tl.arange(0, WORDS)[None, :]  # [BLOCKS, WORDS]
        bits = tl.load(free_bits + words, mask=valid[:, None], other=0).to(tl.uint32, bitcast=True)
        num_set = num_bits(bits)
        ranks = (rank_after - num_free)[:, None] + tl.cumsum(num_set, 1) - num_set

        one = tl.full([1, 1, WORD_SLOTS], 1, tl.uint32) << bit[None, None, :].to(tl.uint32)
        slots = words[:, :, None] * WORD_SLOTS + bit[None, None, :]  # [BLOCKS, WORDS, WORD_SLOTS]
        places = ranks[:, :, None] + num_bits(bits[:, :, None] & (one - 1))
        places = tl.where(is_run, slots - run, places)
        taken = ((bits[:, :, None] & one) != 0) & (places >= 0) & (places < num_alloc)
        zeros = tl.zeros([BLOCKS, WORDS, WORD_SLOTS], tl.int32)
        tl.store(out + places, slots, mask=taken)
        tl.store(mem_state + slots, zeros, mask=taken)
        if given.TABLE:
            entries = entries_of(positions, rows, table_stride, places, taken, given.ROWS)
            tl.store(table + entries, slots, mask=taken)
        gone = tl.sum(tl.where(taken, one, 0), 2).to(tl.uint32)  # [BLOCKS, WORDS]
        num_gone = tl.sum(num_bits(gone), 1)
        tl.debug_barrier()  # every thread has read the counts and bits before one writes them
        tl.store(free_bits + words, (bits ^ gone).to(tl.int32, bitcast=True), mask=gone != 0)
        tl.store(block_free + blocks, num_free - num_gone, mask=num_gone > 0)


def alloc_many(
    state: SlotState, out: Tensor, count: Tensor | None, entries: TableEntries | None, find_run: bool
) -> None:
    """Allocates many slots; the arguments are those of `alloc_slots`.

    find_run: allocate the lowest run of `len(out)` free slots if there is one; `count` is None then. Leaves in
    `mem_cum_sum` the inclusive prefix sum of `block_free` from before the call, for the blocks that were
    scanned: from the first one with a free slot to beyond the last one of the plan.
    """
    max_n, num_blocks = len(out), len(state.block_free)
    num_words = num_blocks * state.block_words
    search = run_search(device_class(out.device), num_words, state.word_slots, max_n, MAX_FOUND.value)
    num_parts = search.num_programs if find_run else 0
    in_table = table_arguments(state, entries)
    given, given_entries = Given.of(count, entries), Given.of(None, entries)
    blocks = max(1, _TILE_SLOTS // state.block_slots)

    counted = state.metadata if count is None else count
    state.launches.launch(
        _plan_kernel,
        ("plan", given),
        1 + num_parts,
        (state.metadata, out, counted, *in_table, max_n, search.chunk, search.back),
        lambda: {
            "given": given.constants(),
            "layout": state.layout(),
            "tiles": many_tiles(num_blocks).constants(),
            "TILE": search.tile,
            "BLOCK": 256,
            "num_warps": 8,
        },
    )
    state.launches.launch(
        _alloc_many_kernel,
        ("alloc many", given_entries),
        min(-(-num_blocks // blocks), _ALLOC_PROGRAMS),
        (state.mem_state, state.metadata, out, *in_table, max_n, num_parts),
        lambda: {
            "given": given_entries.constants(),
            "layout": state.layout(),
            "BLOCKS": blocks,
            "num_warps": 8,
        },
    )
