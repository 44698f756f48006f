"""Take and give slots on the device: which slots are free is decided, and stays, in device memory.

The prefix sum of the blocks' free counts says which blocks hold the n lowest free slots, and a block's bits
which slots of it they are; so a search reads some thousand counts and a line of bits a slot, whether the pool
is empty, full or in fragments. Nothing here synchronises, and no shape depends on data, so every operation
can stand in a CUDA graph.

- A few slots (a decode step) are taken by one program in one kernel: the chain from counts to slots is two
  reads long, and a second launch, or a ticket among programs, would cost more than the rest of it.
- Many (a prompt) take two: the first plans, the second has a program for every few blocks to take from.
- A run is looked for by programs of the first kernel, each over a part of the pool's bits, while another
  plans what is to be taken should there be none. Whether there is one the programs of the second see for
  themselves.

Knows no sequence and keeps no host count. An operation that cannot be done raises no error: it does what
can be done without giving a slot two owners, and sets a flag in device memory for whoever reads it next.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import slot_state as at
from .slot_flags import SlotFlag
from .slot_state import SlotState, new_slot_state
from .tuning import device_class, run_search, scan_tile, take_in_one_kernel, take_warps

__all__ = [
    "SlotFlag",
    "SlotState",
    "TableEntries",
    "give_slots",
    "give_slots_reference",
    "lowest_run",
    "new_slot_state",
    "take_run",
    "take_run_reference",
    "take_slots",
    "take_slots_reference",
]

_SHORT = tl.constexpr(int(SlotFlag.SHORT))
_DOUBLE_FREE = tl.constexpr(int(SlotFlag.DOUBLE_FREE))
_OUT_OF_RANGE = tl.constexpr(int(SlotFlag.OUT_OF_RANGE))
_SPAN = tl.constexpr(at.SPAN)
_FOUND = tl.constexpr(at.FOUND)
_MAX_FOUND = tl.constexpr(at.MAX_FOUND)
_MARKS = tl.constexpr(at.MARKS)
_BLOCK_FREE = tl.constexpr(at.BLOCK_FREE)
_ALIGN = tl.constexpr(at.ALIGN)
_NO_RUN = tl.constexpr(2**31 - 1)

_TILE_SLOTS = 4096  # slots that a program of a large take looks at together
_TAKE_PROGRAMS = 264
_GIVE_BLOCK = 256


class TableEntries(NamedTuple):
    """Where a take also writes its slots: place i of its output at `table[rows[i], positions[i]]`."""

    table: Tensor  # int32 [num_rows, max_entries], contiguous
    positions: Tensor  # int64 [max_n], contiguous
    rows: Tensor | None = None  # int64 [max_n], contiguous; None: positions count through the whole table


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _num_bits(x):
    """How many bits of a uint32 are set; Triton has no operator for it outside libdevice."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _place_of_bit(x, n):
    """Where the n-th set bit of a uint32 is, n from 0."""
    place = tl.zeros_like(n)
    for step in tl.static_range(5):
        low = x & ((1 << (16 >> step)) - 1)  # of 32, 16, 8, 4 and 2 bits the lower half
        num_low = _num_bits(low)
        above = n >= num_low
        n -= tl.where(above, num_low, 0)
        place += tl.where(above, 16 >> step, 0)
        x = tl.where(above, x >> (16 >> step), low)
    return place


@triton.jit
def _highest_bit(x):
    """Where the highest set bit of a uint32 is; -1 of 0."""
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    x = x | (x >> 16)
    return _num_bits(x) - 1


@triton.jit
def _cum_sum_at(NUM_BLOCKS: tl.constexpr):
    """Where mem_cum_sum begins in the books."""
    return _BLOCK_FREE + (NUM_BLOCKS + _ALIGN - 1) // _ALIGN * _ALIGN


@triton.jit
def _free_bits_at(NUM_BLOCKS: tl.constexpr):
    """Where free_bits begins in the books."""
    return _BLOCK_FREE + 2 * ((NUM_BLOCKS + _ALIGN - 1) // _ALIGN * _ALIGN)


@triton.jit
def _entries(positions, rows, stride, places, mask, HAS_ROWS: tl.constexpr):
    """Where in the flattened table the slots of `places` go: int64."""
    entries = tl.load(positions + places, mask=mask, other=0).to(tl.int64)
    if HAS_ROWS:
        entries += tl.load(rows + places, mask=mask, other=0).to(tl.int64) * stride
    return entries


@triton.jit
def _scan_blocks(
    books,
    first_rank,
    num_ranks,
    TAKE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """The prefix sum over the blocks, written; and which blocks have the num_ranks ranks from first_rank on.

    With TAKE the ranks leave the blocks' counts, and every such block is marked at the place of its first.
    Returns the sum, the first block and the end of those blocks, and of the first the ranks before first_rank.
    """
    block_free = books + _BLOCK_FREE
    mem_cum_sum = books + _cum_sum_at(NUM_BLOCKS)
    end_rank = first_rank + num_ranks
    total = 0
    first_block = 0
    end_block = 0
    skipped = 0
    for start in tl.static_range(0, NUM_BLOCKS, SCAN):
        blocks = start + tl.arange(0, SCAN)
        valid = blocks < NUM_BLOCKS
        free = tl.load(block_free + blocks, mask=valid, other=0)
        if TAKE:
            tl.debug_barrier()  # every thread has read the counts before one writes them; the marks are zero
        rank_after = total + tl.cumsum(free, 0)
        rank_before = rank_after - free
        total += tl.sum(free, 0)
        tl.store(mem_cum_sum + blocks, rank_after, mask=valid)
        held = tl.minimum(rank_after, end_rank) - tl.maximum(rank_before, first_rank)
        holds = held > 0
        if TAKE:
            if HAS_SKIP:
                skipped += tl.sum(tl.where(holds, tl.maximum(first_rank - rank_before, 0), 0), 0)
            tl.store(books + _MARKS + tl.maximum(rank_before - first_rank, 0), blocks + 1, mask=holds)
            tl.store(block_free + blocks, free - held, mask=holds)
        else:
            first_block += tl.sum((valid & (rank_after <= first_rank)).to(tl.int32), 0)
            end_block = tl.maximum(end_block, tl.max(tl.where(holds, blocks + 1, 0), 0))
    return total, first_block, end_block, skipped


@triton.jit(do_not_specialize=["max_n"], do_not_specialize_on_alignment=["out", "positions", "rows"])
def _take_few_kernel(
    mem_state,
    books,
    out,
    count,
    skip,
    table,
    positions,
    rows,
    table_stride,
    max_n,
    HAS_COUNT: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_SLOTS: tl.constexpr,
    SCAN: tl.constexpr,
    RANKS: tl.constexpr,
):
    """One program: every free slot of rank skip .. skip + count - 1, each found for itself."""
    places = tl.arange(0, RANKS)
    within = places < max_n
    # All that depends on nothing is read before anything waits.
    wanted = max_n
    if HAS_COUNT:
        wanted = tl.load(count)
    first_rank = 0
    if HAS_SKIP:
        first_rank = tl.load(skip)
    if HAS_TABLE:
        entries = _entries(positions, rows, table_stride, places, within, HAS_ROWS)
    tl.store(books + _MARKS + places, tl.zeros([RANKS], tl.int32))
    num_ranks = tl.maximum(tl.minimum(wanted, max_n), 0)
    total, _, _, skipped = _scan_blocks(books, first_rank, num_ranks, True, HAS_SKIP, NUM_BLOCKS, SCAN)
    num_taken = tl.maximum(tl.minimum(num_ranks, total - first_rank), 0)
    tl.store(books, total - num_taken)
    if num_taken < wanted:
        tl.atomic_or(books + 1, _SHORT, sem="relaxed")

    # A place's block is the one marked last, at it or before it; the running maximum brings both along.
    tl.debug_barrier()  # the marks are written
    mark = tl.load(books + _MARKS + places)
    key = tl.where(mark > 0, (places.to(tl.int64) << 32) | (mark - 1).to(tl.int64), 0)
    key = tl.associative_scan(key, 0, _larger)
    marked = (key >> 32).to(tl.int32)
    first_word = (key & 0x7FFFFFFF).to(tl.int32) * WORDS
    nth = places - marked + tl.where(marked == 0, skipped, 0)  # of the block's free slots

    taken = places < num_taken
    free_bits = books + _free_bits_at(NUM_BLOCKS)
    columns = tl.arange(0, WORDS)
    bits = tl.load(free_bits + (first_word[:, None] + columns[None, :]), mask=taken[:, None], other=0)
    bits = bits.to(tl.uint32, bitcast=True)  # [RANKS, WORDS]
    num_bits = _num_bits(bits)
    passed = tl.cumsum(num_bits, 1) <= nth[:, None]
    column = tl.sum(passed.to(tl.int32), 1)
    nth -= tl.sum(tl.where(passed, num_bits, 0), 1)
    word = tl.sum(tl.where(columns[None, :] == column[:, None], bits, 0), 1).to(tl.uint32)  # [RANKS]
    bit = _place_of_bit(word, nth)
    words = first_word + column
    slots = tl.where(taken, words * WORD_SLOTS + bit, 0)

    tl.debug_barrier()  # every thread has read the bits before one changes them
    tl.store(out + places, slots, mask=within)
    tl.store(mem_state + slots, tl.zeros([RANKS], tl.int32), mask=taken)
    tl.atomic_and(free_bits + words, ~(tl.full([RANKS], 1, tl.int32) << bit), mask=taken, sem="relaxed")
    if HAS_TABLE:
        tl.store(table + entries, slots, mask=within)


@triton.jit
def _find_run(
    books, n, part, chunk, back, NUM_WORDS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    WORD_SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The start of the lowest n consecutive free slots that one part of the words can tell of, or _NO_RUN.

    What lies before the words it reads counts as used; they begin so early that the lowest run of all is
    told of by one part at least.
    """
    free_bits = books + _free_bits_at(NUM_BLOCKS)
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
        last = tl.where(used != 0, words * WORD_SLOTS + _highest_bit(used), -1)
        last = tl.maximum(tl.associative_scan(last, 0, _larger), last_used)
        num_next = _num_bits(((next_bits ^ 0xFFFFFFFF) & (next_bits + 1)) - 1)
        length = words * WORD_SLOTS - last + (WORD_SLOTS - 1) + num_next
        found = tl.minimum(found, tl.min(tl.where(valid & (length >= n), last + 1, _NO_RUN), 0))
        if n <= WORD_SLOTS:  # or it lies within a word: keep the bits that begin n free ones
            size = 1
            for _ in tl.static_range(5):
                step = tl.minimum(size, n - size)
                bits = bits & (bits >> step.to(tl.uint32))
                size += step
            inside = words * WORD_SLOTS + _num_bits((bits ^ 0xFFFFFFFF) & (bits - 1))
            found = tl.minimum(found, tl.min(tl.where(bits != 0, inside, _NO_RUN), 0))
        last_used = tl.maximum(last_used, tl.max(last, 0))
    return found


@triton.jit(
    do_not_specialize=["max_n", "chunk", "back"], do_not_specialize_on_alignment=["out", "positions", "rows"]
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
        total, first_block, end_block, _ = _scan_blocks(
            books, first_rank, num_ranks, False, HAS_SKIP, NUM_BLOCKS, SCAN
        )
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
                entries = _entries(positions, rows, table_stride, places, within, HAS_ROWS)
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
    mem_cum_sum = books + _cum_sum_at(NUM_BLOCKS)
    free_bits = books + _free_bits_at(NUM_BLOCKS)
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
        num_bits = _num_bits(bits)
        ranks = (rank_after - num_free)[:, None] + tl.cumsum(num_bits, 1) - num_bits

        one = tl.full([1, 1, WORD_SLOTS], 1, tl.uint32) << bit[None, None, :].to(tl.uint32)
        slots = words[:, :, None] * WORD_SLOTS + bit[None, None, :]  # [BLOCKS, WORDS, WORD_SLOTS]
        places = ranks[:, :, None] + _num_bits(bits[:, :, None] & (one - 1)) - first_rank
        places = tl.where(is_run, slots - run, places)
        taken = ((bits[:, :, None] & one) != 0) & (places >= 0) & (places < num_taken)
        zeros = tl.zeros([BLOCKS, WORDS, WORD_SLOTS], tl.int32)
        tl.store(out + places, slots, mask=taken)
        tl.store(mem_state + slots, zeros, mask=taken)
        if HAS_TABLE:
            entries = _entries(positions, rows, table_stride, places, taken, HAS_ROWS)
            tl.store(table + entries, slots, mask=taken)
        gone = tl.sum(tl.where(taken, one, 0), 2).to(tl.uint32)  # [BLOCKS, WORDS]
        num_gone = tl.sum(_num_bits(gone), 1)
        tl.debug_barrier()  # every thread has read the counts and bits before one writes them
        tl.store(free_bits + words, (bits ^ gone).to(tl.int32, bitcast=True), mask=gone != 0)
        tl.store(block_free + blocks, num_free - num_gone, mask=num_gone > 0)


@triton.jit(do_not_specialize=["num_given"], do_not_specialize_on_alignment=["given"])
def _give_slots_kernel(
    mem_state,
    books,
    given,
    num_given,
    num_slots,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    WORD_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = places < num_given
    slots = tl.load(given + places, mask=valid, other=0)
    in_range = valid & (slots >= 1) & (slots < num_slots)
    # The exchange hands a slot's old state to exactly one of those who give it.
    one = tl.full([BLOCK], 1, tl.int32)
    was_free = tl.atomic_xchg(mem_state + slots, one, mask=in_range, sem="relaxed")
    freed = in_range & (was_free == 0)
    bit = one << (slots % WORD_SLOTS).to(tl.int32)
    free_bits = books + _free_bits_at(NUM_BLOCKS)
    tl.atomic_or(free_bits + slots // WORD_SLOTS, bit, mask=freed, sem="relaxed")
    tl.atomic_add(books + _BLOCK_FREE + slots // BLOCK_SLOTS, one, mask=freed, sem="relaxed")
    tl.atomic_add(books, tl.sum(freed.to(tl.int32), 0), sem="relaxed")
    double_free = tl.max((in_range & (was_free == 1)).to(tl.int32), 0)
    out_of_range = tl.max((valid & (in_range == 0)).to(tl.int32), 0)
    if double_free + out_of_range > 0:
        tl.atomic_or(books + 1, double_free * _DOUBLE_FREE + out_of_range * _OUT_OF_RANGE, sem="relaxed")


def take_slots(
    state: SlotState,
    out: Tensor,
    count: Tensor | None = None,
    skip: Tensor | None = None,
    entries: TableEntries | None = None,
) -> None:
    """Take the `count` lowest free slots, ascending.

    If fewer are free, or `out` is shorter, what fits is taken and the flag SHORT is set.

    Args:
        state: the pool; updated in place.
        out: int32 or int64 `[max_n]`, contiguous: the slots taken, then zeros.
        count: int32 `[1]` on the device; None for max_n.
        skip: int32 `[1]` on the device: pass over that many free slots first, the lowest; None for 0.
        entries: where in a table all of `out` is written too. What several of them name is one entry, and
            has to get the same slot from each: only what the zeros go to may be named twice.
    """
    max_n, block_words = len(out), state.block_words
    if max_n > take_in_one_kernel(block_words):
        _take_many(state, out, count, skip, entries, find_run=False)
        return
    scan, ranks = scan_tile(len(state.block_free)), max(1, triton.next_power_of_2(max_n))
    table, positions, rows = _pointers(out, entries)
    _take_few_kernel[(1,)](
        state.mem_state,
        state.books,
        out,
        out if count is None else count,
        out if skip is None else skip,
        table,
        positions,
        rows,
        table.stride(0),
        max_n,
        HAS_COUNT=count is not None,
        HAS_SKIP=skip is not None,
        HAS_TABLE=entries is not None,
        HAS_ROWS=entries is not None and entries.rows is not None,
        NUM_BLOCKS=len(state.block_free),
        WORDS=block_words,
        WORD_SLOTS=state.word_slots,
        SCAN=scan,
        RANKS=ranks,
        num_warps=take_warps(ranks, block_words, scan),
    )


def take_run(state: SlotState, out: Tensor, entries: TableEntries | None = None) -> None:
    """Take the lowest `len(out)` consecutive free slots where there are such, else as `take_slots`.

    `out`: int32 or int64 `[n]`, contiguous. `entries`: as for `take_slots`. Decided on the device.
    """
    if len(out):
        _take_many(state, out, None, None, entries, find_run=True)


def _pointers(out: Tensor, entries: TableEntries | None) -> tuple[Tensor, Tensor, Tensor]:
    """Table, positions and rows as the kernels take them: `out` stands in for those that are not there."""
    if entries is None:
        return out, out, out
    return entries.table, entries.positions, entries.positions if entries.rows is None else entries.rows


def _take_many(
    state: SlotState,
    out: Tensor,
    count: Tensor | None,
    skip: Tensor | None,
    entries: TableEntries | None,
    find_run: bool,
) -> None:
    max_n, num_blocks, block_words = len(out), len(state.block_free), state.block_words
    num_words = num_blocks * block_words
    search = run_search(device_class(out.device), num_words, state.word_slots, max_n, at.MAX_FOUND)
    num_parts = search.num_programs if find_run else 0
    table, positions, rows = _pointers(out, entries)
    has_table = entries is not None
    has_rows = entries is not None and entries.rows is not None
    _plan_kernel[(1 + num_parts,)](
        state.books,
        out,
        out if count is None else count,
        out if skip is None else skip,
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
        WORDS=block_words,
        WORD_SLOTS=state.word_slots,
        BLOCKS=blocks,
        num_warps=8,
    )


def give_slots(state: SlotState, slots: Tensor) -> None:
    """Make slots free. `slots`: int32 or int64 `[n]`, contiguous, in any order.

    A slot that is free already, or comes a second time, stays free once and sets the flag DOUBLE_FREE.
    What is outside 1..num_slots-1 is left alone and sets OUT_OF_RANGE.
    """
    if slots.numel() == 0:
        return
    _give_slots_kernel[(triton.cdiv(len(slots), _GIVE_BLOCK),)](
        state.mem_state,
        state.books,
        slots,
        len(slots),
        len(state.mem_state),
        NUM_BLOCKS=len(state.block_free),
        BLOCK_SLOTS=state.block_slots,
        WORD_SLOTS=state.word_slots,
        BLOCK=_GIVE_BLOCK,
    )


def lowest_run(state: SlotState, n: int) -> Tensor:
    """How many free slots come before the lowest `n` consecutive free ones; 0 if there are no such.

    This is the `skip` with which `take_slots` takes that run. int32 `[1]` on the device. Plain torch over
    the whole pool (a window of n slots is free if its states sum to n): a part of the specification.
    """
    num_slots = len(state.mem_state)
    if n < 1 or n > num_slots:
        return torch.zeros(1, dtype=torch.int32, device=state.mem_state.device)
    cum_sum = torch.cumsum(state.mem_state, 0, dtype=torch.int32)  # [num_slots]
    free_before = cum_sum - state.mem_state
    is_run = cum_sum[n - 1 :] - free_before[: num_slots - n + 1] == n
    start = is_run.int().argmax(dim=0, keepdim=True)  # of equals argmax gives the first
    return free_before.gather(0, start) * is_run.gather(0, start)


def take_slots_reference(
    state: SlotState,
    out: Tensor,
    count: Tensor | None = None,
    skip: Tensor | None = None,
    entries: TableEntries | None = None,
) -> None:
    """The specification of `take_slots`, in plain torch; also what runs on the CPU.

    Reads the sum of every block, and the slots of no more blocks than there are slots to take.
    """
    num_slots, num_blocks, max_n = len(state.mem_state), len(state.block_free), len(out)
    if count is None:
        count = torch.full((1,), max_n, dtype=torch.int32, device=out.device)
    cum_sum = torch.cumsum(state.block_free, 0, dtype=torch.int32, out=state.mem_cum_sum)
    first_rank = torch.zeros_like(count) if skip is None else skip
    num_taken = torch.minimum(count.clamp(max=max_n), cum_sum[-1:] - first_rank).clamp(min=0)
    places = torch.arange(max_n, dtype=torch.int32, device=out.device)
    taken = places < num_taken

    # Of the blocks with a rank from first_rank on, the first max_n: each holds one at least. Where there are
    # fewer, and past the end of the last, the pool's last slot stands in: behind all others, so never reached.
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
    state.counters[:1] -= num_taken
    state.counters[1:] |= (num_taken < count).int() * int(SlotFlag.SHORT)
    if entries is not None:
        table, at_entries, rows = entries
        if rows is not None:
            at_entries = rows * table.stride(0) + at_entries
        table.view(-1).index_copy_(0, at_entries, chosen.int())


def take_run_reference(state: SlotState, out: Tensor, entries: TableEntries | None = None) -> None:
    """The specification of `take_run`, in plain torch; also what runs on the CPU."""
    if len(out):
        take_slots_reference(state, out, None, lowest_run(state, len(out)), entries)


def give_slots_reference(state: SlotState, slots: Tensor) -> None:
    """The specification of `give_slots`, in plain torch; also what runs on the CPU."""
    ordered = slots.long().sort().values
    in_range = (ordered >= 1) & (ordered < len(state.mem_state))
    safe = ordered.where(in_range, 0)  # slot 0 stands for what is no slot, and is put right below
    repeated = torch.zeros_like(in_range)
    repeated[1:] = ordered[1:] == ordered[:-1]
    freed = in_range & ~repeated & (state.mem_state[safe] == 0)
    state.mem_state.index_fill_(0, safe, 1)
    state.mem_state[:1] = 0
    state.free_bits.index_add_(0, safe // state.word_slots, _bit_of(state, safe).where(freed, 0))
    state.block_free.index_add_(0, safe // state.block_slots, freed.int())
    state.counters[0] += freed.sum(dtype=torch.int32)
    double_free = (in_range & ~freed).any().int() * int(SlotFlag.DOUBLE_FREE)
    out_of_range = (~in_range).any().int() * int(SlotFlag.OUT_OF_RANGE)
    state.counters[1] |= double_free | out_of_range


def _bit_of(state: SlotState, slots: Tensor) -> Tensor:
    """The bit of each slot (int64) in its word of free_bits: int32, the 32nd the negative number of its kind.

    Distinct bits of a word are set by adding them and cleared by taking them off.
    """
    return (1 << slots % state.word_slots).int()
