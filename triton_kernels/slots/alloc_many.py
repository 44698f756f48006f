"""Take many slots, in two kernels, with or without a search for a run of them.

The first plans: one program finds which blocks the lowest slots are in, the others, where a run is wanted,
look for one, each in a part of the pool's bits. The second has a program for every few blocks to take from; it
sees for itself what the search has found. Twins: `alloc_slots_reference`, `alloc_run_reference`.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.tuning import device_class, many_tiles, run_search

from .slot_flags import SlotFlag
from .slot_search import entries_of, highest_bit, larger, num_bits
from .slot_state import (
    BLOCK_FREE,
    FIRST_BLOCK,
    FLAGS,
    FOUND,
    MAX_FOUND,
    NUM_FREE,
    SPAN,
    SlotState,
    TableEntries,
    table_pointers,
)

_SHORT = tl.constexpr(int(SlotFlag.SHORT))
_NUM_FREE = tl.constexpr(NUM_FREE)
_FLAGS = tl.constexpr(FLAGS)
_FIRST_BLOCK = tl.constexpr(FIRST_BLOCK)
_SPAN = tl.constexpr(SPAN)
_FOUND = tl.constexpr(FOUND)
_MAX_FOUND = tl.constexpr(MAX_FOUND)
_BLOCK_FREE = tl.constexpr(BLOCK_FREE)
_NO_RUN = tl.constexpr(2**31 - 1)

_TILE_SLOTS = 2048  # slots that a program of the second kernel looks at together
_TAKE_PROGRAMS = 264


@triton.jit
def _find_run(
    books, n, part, chunk, back, FREE_BITS: tl.constexpr, NUM_WORDS: tl.constexpr,
    WORD_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The start of the lowest n consecutive free slots that one part of the words can tell of, or _NO_RUN.

    What lies before the words it reads counts as used; they begin so early that the lowest run of all is
    told of by one part at least.
    """
    free_bits = books + FREE_BITS
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
        # A run that reaches a word's end begins behind the last slot used, and goes on into the next word.
        used = bits ^ ((1 << WORD_SLOTS) - 1)
        last = tl.where(used != 0, words * WORD_SLOTS + highest_bit(used), -1)
        last = tl.maximum(tl.associative_scan(last, 0, larger), last_used)
        num_next = num_bits(((next_bits ^ 0xFFFFFFFF) & (next_bits + 1)) - 1)
        length = words * WORD_SLOTS - last + (WORD_SLOTS - 1) + num_next
        found = tl.minimum(found, tl.min(tl.where(valid & (length >= n), last + 1, _NO_RUN), 0))
        if n <= WORD_SLOTS:  # or it lies within a word: keep the bits that begin n free ones
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
def _scan_blocks(
    books, start, total, num_taken, CUM_SUM: tl.constexpr, NUM_BLOCKS: tl.constexpr, TILE: tl.constexpr
):
    """The prefix sum over the blocks start .. start + TILE - 1, written; total is the sum before them.

    Returns the first and the end of those of them that have ranks below num_taken, and the sum.
    """
    blocks = start + tl.arange(0, TILE)
    within = blocks < NUM_BLOCKS
    free = tl.load(books + _BLOCK_FREE + blocks, mask=within, other=0)
    rank_after = total + tl.cumsum(free, 0)
    tl.store(books + CUM_SUM + blocks, rank_after, mask=within)
    holds = (free > 0) & (rank_after - free < num_taken)
    first_block = tl.min(tl.where(holds, blocks, NUM_BLOCKS), 0)
    end_block = tl.max(tl.where(holds, blocks + 1, 0), 0)
    return first_block, end_block, tl.max(rank_after, 0)


@triton.jit(
    do_not_specialize=["table_stride", "max_n", "chunk", "back"],
    do_not_specialize_on_alignment=["out", "count", "table", "positions", "rows"],
)
def _plan_kernel(
    books,
    out,
    count,
    table,
    positions,
    rows,
    table_stride,
    max_n,
    chunk,
    back,
    HAS_COUNT: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    CUM_SUM: tl.constexpr,
    FREE_BITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORD_SLOTS: tl.constexpr,
    SCAN: tl.constexpr,
    LATER_SCAN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0: the counters, and which ranks of which blocks are to be taken. The others look for a run."""
    part = tl.program_id(0) - 1
    if part >= 0:
        found = _find_run(books, max_n, part, chunk, back, FREE_BITS, NUM_WORDS, WORD_SLOTS, TILE)
        tl.store(books + _FOUND + part, found)
    else:
        num_free = tl.load(books + _NUM_FREE)
        start = tl.load(books + _FIRST_BLOCK)
        wanted = max_n
        if HAS_COUNT:
            wanted = tl.load(count)
        num_taken = tl.maximum(tl.minimum(tl.minimum(wanted, max_n), num_free), 0)
        first_block, end_block, total = _scan_blocks(books, start, 0, num_taken, CUM_SUM, NUM_BLOCKS, SCAN)
        start += SCAN
        while (total < num_taken) & (start < NUM_BLOCKS):
            first, end, total = _scan_blocks(books, start, total, num_taken, CUM_SUM, NUM_BLOCKS, LATER_SCAN)
            first_block = tl.minimum(first_block, first)
            end_block = tl.maximum(end_block, end)
            start += LATER_SCAN
        tl.store(books + _NUM_FREE, num_free - num_taken)
        if num_taken < wanted:
            tl.atomic_or(books + _FLAGS, _SHORT, sem="relaxed")
        tl.store(books + _SPAN, first_block)
        tl.store(books + _SPAN + 1, end_block)
        tl.store(books + _SPAN + 2, num_taken)
        for start in range(num_taken, max_n, BLOCK):
            places = start + tl.arange(0, BLOCK)
            within = places < max_n
            tl.store(out + places, tl.zeros([BLOCK], tl.int32), mask=within)
            if HAS_TABLE:
                entries = entries_of(positions, rows, table_stride, places, within, HAS_ROWS)
                tl.store(table + entries, tl.zeros([BLOCK], tl.int32), mask=within)


@triton.jit(
    do_not_specialize=["table_stride", "n", "num_found"],
    do_not_specialize_on_alignment=["out", "table", "positions", "rows"],
)
def _take_kernel(
    mem_state,
    books,
    out,
    table,
    positions,
    rows,
    table_stride,
    n,
    num_found,
    HAS_TABLE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    CUM_SUM: tl.constexpr,
    FREE_BITS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Take the run that was found, or else the ranks that were planned; no two programs look at one block."""
    parts = tl.arange(0, _MAX_FOUND)
    found = tl.load(books + _FOUND + parts, mask=parts < num_found, other=_NO_RUN)
    first_block = tl.load(books + _SPAN)
    end_block = tl.load(books + _SPAN + 1)
    num_taken = tl.load(books + _SPAN + 2)
    run = tl.min(found, 0)
    is_run = run != _NO_RUN
    if (tl.program_id(0) == 0) & (run == _NO_RUN) & (num_taken > 0):  # a run may leave free slots below it
        tl.store(books + _FIRST_BLOCK, end_block - 1)
    num_taken = tl.where(is_run, n, num_taken)
    first_block = tl.where(is_run, run // (WORDS * WORD_SLOTS), first_block)
    end_block = tl.where(is_run, (run + (n - 1)) // (WORDS * WORD_SLOTS) + 1, end_block)

    block_free = books + _BLOCK_FREE
    mem_cum_sum = books + CUM_SUM
    free_bits = books + FREE_BITS
    bit = tl.arange(0, WORD_SLOTS)
    for tile in range(
        first_block // BLOCKS + tl.program_id(0), tl.cdiv(end_block, BLOCKS), tl.num_programs(0)
    ):
        blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
        valid = (blocks >= first_block) & (blocks < end_block)  # of others the sum may be an older take's
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
        taken = ((bits[:, :, None] & one) != 0) & (places >= 0) & (places < num_taken)
        zeros = tl.zeros([BLOCKS, WORDS, WORD_SLOTS], tl.int32)
        tl.store(out + places, slots, mask=taken)
        tl.store(mem_state + slots, zeros, mask=taken)
        if HAS_TABLE:
            entries = entries_of(positions, rows, table_stride, places, taken, HAS_ROWS)
            tl.store(table + entries, slots, mask=taken)
        gone = tl.sum(tl.where(taken, one, 0), 2).to(tl.uint32)  # [BLOCKS, WORDS]
        num_gone = tl.sum(num_bits(gone), 1)
        tl.debug_barrier()  # every thread has read the counts and bits before one writes them
        tl.store(free_bits + words, (bits ^ gone).to(tl.int32, bitcast=True), mask=gone != 0)
        tl.store(block_free + blocks, num_free - num_gone, mask=num_gone > 0)


def alloc_many(
    state: SlotState, out: Tensor, count: Tensor | None, entries: TableEntries | None, find_run: bool
) -> None:
    """Take many slots. Leaves in `mem_cum_sum` the inclusive prefix sum of `block_free` as it was before, for
    the blocks it looked at: from the first with a free slot to beyond the last that it would take ranks of.

    Arguments as of `alloc_slots`; find_run: take the lowest run of `len(out)` where there is one (no `count`).
    """
    max_n, num_blocks, block_words = len(out), len(state.block_free), state.block_words
    num_words = num_blocks * block_words
    search = run_search(device_class(out.device), num_words, state.word_slots, max_n, MAX_FOUND)
    num_parts = search.num_programs if find_run else 0
    table, positions, rows = table_pointers(state, entries)
    table_stride = table.stride(0)
    has_count, has_table = count is not None, entries is not None
    has_rows = entries is not None and entries.rows is not None
    blocks = max(1, _TILE_SLOTS // state.block_slots)

    def plan_options() -> dict[str, Any]:
        tiles = many_tiles(num_blocks)
        return {
            "HAS_COUNT": has_count,
            "HAS_TABLE": has_table,
            "HAS_ROWS": has_rows,
            "CUM_SUM": state.mem_cum_sum.storage_offset(),
            "FREE_BITS": state.free_bits.storage_offset(),
            "NUM_BLOCKS": num_blocks,
            "NUM_WORDS": num_words,
            "WORD_SLOTS": state.word_slots,
            "SCAN": tiles.first,
            "LATER_SCAN": tiles.later,
            "TILE": search.tile,
            "BLOCK": 256,
            "num_warps": 8,
        }

    def take_options() -> dict[str, Any]:
        return {
            "HAS_TABLE": has_table,
            "HAS_ROWS": has_rows,
            "CUM_SUM": state.mem_cum_sum.storage_offset(),
            "FREE_BITS": state.free_bits.storage_offset(),
            "WORDS": block_words,
            "WORD_SLOTS": state.word_slots,
            "BLOCKS": blocks,
            "num_warps": 8,
        }

    state.launches.launch(
        _plan_kernel,
        ("plan many", has_count, has_table, has_rows),
        1 + num_parts,
        (
            state.books,
            out,
            state.books if count is None else count,
            table,
            positions,
            rows,
            table_stride,
            max_n,
            search.chunk,
            search.back,
        ),
        plan_options,
    )
    state.launches.launch(
        _take_kernel,
        ("take many", has_table, has_rows),
        min(-(-num_blocks // blocks), _TAKE_PROGRAMS),
        (
            state.mem_state,
            state.books,
            out,
            table,
            positions,
            rows,
            table_stride,
            max_n,
            num_parts,
        ),
        take_options,
    )
