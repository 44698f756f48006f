"""Take many slots, in two kernels, with or without a search for a run of them.

The first plans: one program finds which blocks the lowest slots are in, the others, where a run is wanted,
look for one, each in a part of the pool's bits. The second has a program for every few blocks to take from; it
sees for itself what the search has found. Twins: `take_slots_reference`, `take_run_reference`.
"""

import triton
import triton.language as tl
from torch import Tensor

from .slot_flags import SlotFlag
from .slot_search import (
    cum_sum_at,
    entries_of,
    free_bits_at,
    group_free_at,
    highest_bit,
    larger,
    num_bits,
)
from .slot_state import BLOCK_FREE, FOUND, MAX_FOUND, SPAN, SlotState, TableEntries, table_pointers
from .tuning import device_class, run_search, scan_tile

_SHORT = tl.constexpr(int(SlotFlag.SHORT))
_SPAN = tl.constexpr(SPAN)
_FOUND = tl.constexpr(FOUND)
_MAX_FOUND = tl.constexpr(MAX_FOUND)
_BLOCK_FREE = tl.constexpr(BLOCK_FREE)
_NO_RUN = tl.constexpr(2**31 - 1)

_TILE_SLOTS = 2048  # slots that a program of the second kernel looks at together
_TAKE_PROGRAMS = 264


@triton.jit
def _find_run(
    books, n, part, chunk, back, NUM_WORDS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    WORD_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The start of the lowest n consecutive free slots that one part of the words can tell of, or _NO_RUN.

    What lies before the words it reads counts as used; they begin so early that the lowest run of all is
    told of by one part at least.
    """
    free_bits = books + free_bits_at(NUM_BLOCKS)
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
def _scan_blocks(books, first_rank, num_ranks, NUM_BLOCKS: tl.constexpr, SCAN: tl.constexpr):
    """The prefix sum over the blocks, written; and which blocks have the num_ranks ranks from first_rank on.

    Returns the sum, and the first block and the end of those blocks.
    """
    block_free = books + _BLOCK_FREE
    mem_cum_sum = books + cum_sum_at(NUM_BLOCKS)
    end_rank = first_rank + num_ranks
    total = 0
    first_block = 0
    end_block = 0
    for start in range(0, NUM_BLOCKS, SCAN):
        blocks = start + tl.arange(0, SCAN)
        valid = blocks < NUM_BLOCKS
        free = tl.load(block_free + blocks, mask=valid, other=0)
        rank_after = total + tl.cumsum(free, 0)
        rank_before = rank_after - free
        total += tl.sum(free, 0)
        tl.store(mem_cum_sum + blocks, rank_after, mask=valid)
        holds = tl.minimum(rank_after, end_rank) > tl.maximum(rank_before, first_rank)
        first_block += tl.sum((valid & (rank_after <= first_rank)).to(tl.int32), 0)
        end_block = tl.maximum(end_block, tl.max(tl.where(holds, blocks + 1, 0), 0))
    return total, first_block, end_block


@triton.jit(
    do_not_specialize=["max_n", "chunk", "back"],
    do_not_specialize_on_alignment=["out", "count", "skip", "positions", "rows"],
)
def _plan_kernel(
    books,
    out,
    count,
    skip,
    table,
    positions,
    rows,
    table_stride,
    max_n,
    chunk,
    back,
    HAS_COUNT: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WORD_SLOTS: tl.constexpr,
    SCAN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program 0: the counters, and which ranks of which blocks are to be taken. The others look for a run."""
    part = tl.program_id(0) - 1
    if part >= 0:
        found = _find_run(books, max_n, part, chunk, back, NUM_WORDS, NUM_BLOCKS, WORD_SLOTS, TILE)
        tl.store(books + _FOUND + part, found)
    else:
        wanted = max_n
        if HAS_COUNT:
            wanted = tl.load(count)
        first_rank = 0
        if HAS_SKIP:
            first_rank = tl.load(skip)
        num_ranks = tl.maximum(tl.minimum(wanted, max_n), 0)
        total, first_block, end_block = _scan_blocks(books, first_rank, num_ranks, NUM_BLOCKS, SCAN)
        num_taken = tl.maximum(tl.minimum(num_ranks, total - first_rank), 0)
        tl.store(books, total - num_taken)
        if num_taken < wanted:
            tl.atomic_or(books + 1, _SHORT, sem="relaxed")
        tl.store(books + _SPAN, first_block)
        tl.store(books + _SPAN + 1, end_block)
        tl.store(books + _SPAN + 2, first_rank)
        tl.store(books + _SPAN + 3, first_rank + num_taken)
        for start in range(num_taken, max_n, BLOCK):
            places = start + tl.arange(0, BLOCK)
            within = places < max_n
            tl.store(out + places, tl.zeros([BLOCK], tl.int32), mask=within)
            if HAS_TABLE:
                entries = entries_of(positions, rows, table_stride, places, within, HAS_ROWS)
                tl.store(table + entries, tl.zeros([BLOCK], tl.int32), mask=within)


@triton.jit(do_not_specialize=["n", "num_found"], do_not_specialize_on_alignment=["out", "positions", "rows"])
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
    NUM_BLOCKS: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Take the run that was found, or else the ranks that were planned; no two programs look at one block."""
    parts = tl.arange(0, _MAX_FOUND)
    found = tl.load(books + _FOUND + parts, mask=parts < num_found, other=_NO_RUN)
    first_block = tl.load(books + _SPAN)
    end_block = tl.load(books + _SPAN + 1)
    first_rank = tl.load(books + _SPAN + 2)
    end_rank = tl.load(books + _SPAN + 3)
    run = tl.min(found, 0)
    is_run = run != _NO_RUN
    num_taken = tl.where(is_run, n, end_rank - first_rank)
    first_block = tl.where(is_run, run // (WORDS * WORD_SLOTS), first_block)
    end_block = tl.where(is_run, (run + (n - 1)) // (WORDS * WORD_SLOTS) + 1, end_block)

    block_free = books + _BLOCK_FREE
    mem_cum_sum = books + cum_sum_at(NUM_BLOCKS)
    free_bits = books + free_bits_at(NUM_BLOCKS)
    bit = tl.arange(0, WORD_SLOTS)
    for tile in range(
        first_block // BLOCKS + tl.program_id(0), tl.cdiv(end_block, BLOCKS), tl.num_programs(0)
    ):
        blocks = tile * BLOCKS + tl.arange(0, BLOCKS)
        valid = blocks < NUM_BLOCKS
        num_free = tl.load(block_free + blocks, mask=valid, other=0)
        rank_after = tl.load(mem_cum_sum + blocks, mask=valid, other=0)
        words = blocks[:, None] * WORDS + tl.arange(0, WORDS)[None, :]  # [BLOCKS, WORDS]
        bits = tl.load(free_bits + words, mask=valid[:, None], other=0).to(tl.uint32, bitcast=True)
        num_set = num_bits(bits)
        ranks = (rank_after - num_free)[:, None] + tl.cumsum(num_set, 1) - num_set

        one = tl.full([1, 1, WORD_SLOTS], 1, tl.uint32) << bit[None, None, :].to(tl.uint32)
        slots = words[:, :, None] * WORD_SLOTS + bit[None, None, :]  # [BLOCKS, WORDS, WORD_SLOTS]
        places = ranks[:, :, None] + num_bits(bits[:, :, None] & (one - 1)) - first_rank
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
        if GROUP_BLOCKS > 1:
            groups = books + group_free_at(NUM_BLOCKS, GROUP_BLOCKS) + blocks // GROUP_BLOCKS
            tl.atomic_add(groups, -num_gone, mask=num_gone > 0, sem="relaxed")


def take_many(
    state: SlotState,
    out: Tensor,
    count: Tensor | None,
    skip: Tensor | None,
    entries: TableEntries | None,
    find_run: bool,
) -> None:
    max_n, num_blocks, block_words = len(out), len(state.block_free), state.block_words
    num_words = num_blocks * block_words
    search = run_search(device_class(out.device), num_words, state.word_slots, max_n, MAX_FOUND)
    num_parts = search.num_programs if find_run else 0
    table, positions, rows = table_pointers(state, entries)
    has_table = entries is not None
    has_rows = entries is not None and entries.rows is not None
    _plan_kernel[(1 + num_parts,)](
        state.books,
        out,
        state.books if count is None else count,
        state.books if skip is None else skip,
        table,
        positions,
        rows,
        table.stride(0),
        max_n,
        search.chunk,
        search.back,
        HAS_COUNT=count is not None,
        HAS_SKIP=skip is not None,
        HAS_TABLE=has_table,
        HAS_ROWS=has_rows,
        NUM_BLOCKS=num_blocks,
        NUM_WORDS=num_words,
        WORD_SLOTS=state.word_slots,
        SCAN=scan_tile(num_blocks),
        TILE=search.tile,
        BLOCK=256,
        num_warps=8,
    )
    blocks = max(1, _TILE_SLOTS // state.block_slots)
    _take_kernel[(min(triton.cdiv(num_blocks, blocks), _TAKE_PROGRAMS),)](
        state.mem_state,
        state.books,
        out,
        table,
        positions,
        rows,
        table.stride(0),
        max_n,
        num_parts,
        HAS_TABLE=has_table,
        HAS_ROWS=has_rows,
        NUM_BLOCKS=num_blocks,
        GROUP_BLOCKS=state.group_blocks,
        WORDS=block_words,
        WORD_SLOTS=state.word_slots,
        BLOCKS=blocks,
        num_warps=8,
    )
