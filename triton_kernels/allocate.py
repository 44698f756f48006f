"""Take and give slots on the device: which slots are free is decided, and stays, in device memory.

The prefix sum of the groups' free counts says which groups of blocks hold the n lowest free slots, a group's
counts which blocks, and a block's bits which slots of it they are; so a search reads a thousand counts and a
line or two a slot, whether the pool is empty, full or in fragments. Nothing here synchronises, and no shape
depends on data, so every operation can stand in a CUDA graph.

- A few slots (a decode step) are taken by one program in one kernel: the chain from counts to slots is two
  reads long, three in large pools, and nobody has to wait for another program, or for a second launch.
- Many (a prompt) take two: the first plans, the second has a program for every few blocks to take from.
- A run is looked for by programs of the first kernel, each over a part of the pool's bits, while another
  plans what is to be taken should there be none. Whether there is one the programs of the second see for
  themselves.

Knows no sequence and keeps no host count. An operation that cannot be done raises no error: it does what
can be done without giving a slot two owners, and sets a flag in device memory for whoever reads it next.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from .slot_flags import SlotFlag
from .slot_search import entries_of, free_bits_at, group_free_at, group_sum_at, nth_of, num_bits, place_of_bit
from .slot_state import BLOCK_FREE, SlotState, TableEntries, new_slot_state, table_pointers
from .take_many import take_many
from .tuning import group_chunks, group_tile, take_in_one_kernel, take_warps

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
_BLOCK_FREE = tl.constexpr(BLOCK_FREE)
_NEVER = tl.constexpr(2**31 - 1)  # more than any rank

_GIVE_BLOCK = 256


@triton.jit(
    do_not_specialize=["table_stride", "max_n"],
    do_not_specialize_on_alignment=["out", "count", "table", "positions", "rows"],
)
def _take_few_kernel(
    mem_state,
    books,
    out,
    count,
    table,
    positions,
    rows,
    table_stride,
    max_n,
    HAS_COUNT: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_SLOTS: tl.constexpr,
    SCAN: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """One program: the free slots of rank 0 .. count - 1, each found for itself."""
    places = tl.arange(0, RANKS)
    within = places < max_n
    # All that depends on nothing is read before anything waits.
    num_free = tl.load(books)
    wanted = max_n
    if HAS_COUNT:
        wanted = tl.load(count)
    if HAS_TABLE:
        entries = entries_of(positions, rows, table_stride, places, within, HAS_ROWS)
    num_taken = tl.maximum(tl.minimum(tl.minimum(wanted, max_n), num_free), 0)
    taken = places < num_taken

    NUM_GROUPS: tl.constexpr = (NUM_BLOCKS + GROUP_BLOCKS - 1) // GROUP_BLOCKS
    group_free = books + group_free_at(NUM_BLOCKS, GROUP_BLOCKS)
    group_sum = books + group_sum_at(NUM_BLOCKS, GROUP_BLOCKS)
    before = 0
    for start in range(0, NUM_GROUPS, SCAN):
        groups = start + tl.arange(0, SCAN)
        free = tl.load(group_free + groups, mask=groups < NUM_GROUPS, other=0)
        rank_after = before + tl.cumsum(free, 0)
        if NUM_GROUPS > SCAN:
            before += tl.sum(free, 0)
        held = tl.minimum(rank_after, num_taken) - (rank_after - free)
        tl.store(group_sum + groups, rank_after, mask=groups < NUM_GROUPS)
        tl.debug_barrier()  # every thread has read the counts before one writes them; the sums are there
        tl.store(group_free + groups, free - held, mask=held > 0)

    # A place's group is behind those whose sums its rank has passed: first whole chunks, then single ones.
    chunks = tl.arange(0, CHUNKS)
    ends = tl.load(group_sum + tl.minimum(chunks * CHUNK + CHUNK, NUM_GROUPS) - 1)[None, :]
    passed = ends <= places[:, None]  # [RANKS, CHUNKS]
    before = tl.max(tl.where(passed, ends, 0), 1)
    columns = tl.arange(0, CHUNK)
    block = tl.sum(passed.to(tl.int32), 1) * CHUNK
    groups = block[:, None] + columns[None, :]
    sums = tl.load(group_sum + groups, mask=taken[:, None] & (groups < NUM_GROUPS), other=_NEVER)
    passed = sums <= places[:, None]  # [RANKS, CHUNK]
    before = tl.maximum(before, tl.max(tl.where(passed, sums, 0), 1))
    block += tl.sum(passed.to(tl.int32), 1)
    nth = places - before  # of the group's free slots
    if GROUP_BLOCKS > 1:
        columns = tl.arange(0, GROUP_BLOCKS)
        block_free = books + _BLOCK_FREE + block * GROUP_BLOCKS
        counts = tl.load(block_free[:, None] + columns[None, :], mask=taken[:, None], other=0)
        column, block_num_free, nth = nth_of(counts, nth, columns)
        block = block * GROUP_BLOCKS + column
        left = block_num_free - tl.minimum(block_num_free, num_taken - places)
        left = tl.where(taken & (nth == 0), left, -1)  # of the block, whose count one place changes for all

    first_word = block * WORDS
    columns = tl.arange(0, WORDS)
    free_bits = books + free_bits_at(NUM_BLOCKS)
    bits = tl.load(free_bits + (first_word[:, None] + columns[None, :]), mask=taken[:, None], other=0)
    column, _, nth = nth_of(num_bits(bits.to(tl.uint32, bitcast=True)), nth, columns)
    word = tl.sum(tl.where(columns[None, :] == column[:, None], bits, 0), 1)  # [RANKS]
    bit = place_of_bit(word.to(tl.uint32, bitcast=True), nth)
    slots = tl.where(taken, (first_word + column) * WORD_SLOTS + bit, 0)

    # Words, bits and blocks are counted again from the slots: every value that is wanted in another layout
    # takes a turn through shared memory.
    tl.debug_barrier()  # every thread has read the bits and counts before one changes them
    tl.store(out + places, slots, mask=within)
    if HAS_TABLE:
        tl.store(table + entries, slots, mask=within)
    tl.store(mem_state + slots, tl.zeros([RANKS], tl.int32), mask=taken)
    bit = tl.full([RANKS], 1, tl.int32) << slots % WORD_SLOTS
    tl.atomic_and(free_bits + slots // WORD_SLOTS, ~bit, mask=taken, sem="relaxed")
    if GROUP_BLOCKS > 1:
        tl.store(books + _BLOCK_FREE + slots // (WORDS * WORD_SLOTS), left, mask=left >= 0)
    tl.store(books, num_free - num_taken)
    if num_taken < wanted:
        tl.atomic_or(books + 1, _SHORT, sem="relaxed")


@triton.jit(do_not_specialize=["num_given"], do_not_specialize_on_alignment=["given"])
def _give_slots_kernel(
    mem_state,
    books,
    given,
    num_given,
    num_slots,
    NUM_BLOCKS: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
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
    free_bits = books + free_bits_at(NUM_BLOCKS)
    tl.atomic_or(free_bits + slots // WORD_SLOTS, bit, mask=freed, sem="relaxed")
    tl.atomic_add(books + _BLOCK_FREE + slots // BLOCK_SLOTS, one, mask=freed, sem="relaxed")
    if GROUP_BLOCKS > 1:
        groups = slots // (BLOCK_SLOTS * GROUP_BLOCKS)
        tl.atomic_add(
            books + group_free_at(NUM_BLOCKS, GROUP_BLOCKS) + groups, one, mask=freed, sem="relaxed"
        )
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
    max_n = len(out)
    if skip is not None or max_n > take_in_one_kernel(state.block_words):
        take_many(state, out, count, skip, entries, find_run=False)
        return
    has_rows = entries is not None and entries.rows is not None
    table, positions, rows = table_pointers(state, entries)
    arguments = (
        state.mem_state,
        state.books,
        out,
        state.books if count is None else count,
        table,
        positions,
        rows,
        table.stride(0),
        max_n,
    )
    # The kernel as compiled for one call is right for every other of this state with the same key: what a
    # compilation depends on besides, alignment and the values of numbers, it was told not to look at.
    rank_bits = (max_n - 1).bit_length() if max_n else 0
    key = (rank_bits, out.dtype, count is None, entries is None, has_rows)
    relaunch = state.launches.get(key)
    if relaunch is not None:
        relaunch(*arguments)
        return
    chunks, chunk = group_chunks(len(state.group_free))
    ranks, num_groups = 1 << rank_bits, len(state.group_free)
    constants = {
        "HAS_COUNT": count is not None,
        "HAS_TABLE": entries is not None,
        "HAS_ROWS": has_rows,
        "NUM_BLOCKS": len(state.block_free),
        "GROUP_BLOCKS": state.group_blocks,
        "WORDS": state.block_words,
        "WORD_SLOTS": state.word_slots,
        "SCAN": group_tile(num_groups),
        "CHUNKS": chunks,
        "CHUNK": chunk,
        "RANKS": ranks,
    }
    num_warps = take_warps(ranks, max(state.block_words, state.group_blocks, chunk), group_tile(num_groups))
    compiled = _take_few_kernel[(1,)](*arguments, **constants, num_warps=num_warps)
    if isinstance(compiled, CompiledKernel):  # the interpreter compiles none
        state.launches[key] = _relaunch(compiled, tuple(constants.values()))


def take_run(state: SlotState, out: Tensor, entries: TableEntries | None = None) -> None:
    """Take the lowest `len(out)` consecutive free slots where there are such, else as `take_slots`.

    `out`: int32 or int64 `[n]`, contiguous. `entries`: as for `take_slots`. Decided on the device.
    """
    if len(out):
        take_many(state, out, None, None, entries, find_run=True)


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
        GROUP_BLOCKS=state.group_blocks,
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
    _count(state, chosen, -taken.int())
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
    _count(state, safe, freed.int())
    state.counters[0] += freed.sum(dtype=torch.int32)
    double_free = (in_range & ~freed).any().int() * int(SlotFlag.DOUBLE_FREE)
    out_of_range = (~in_range).any().int() * int(SlotFlag.OUT_OF_RANGE)
    state.counters[1] |= double_free | out_of_range


def _relaunch(compiled: CompiledKernel, constants: tuple[object, ...]) -> Callable[..., None]:
    """The compiled kernel as a function of its arguments, without the search that a launch begins with."""
    launch = compiled[(1, 1, 1)]
    return lambda *arguments: launch(*arguments, *constants)


def _count(state: SlotState, slots: Tensor, change: Tensor) -> None:
    """Add the change (int32) of each slot to what its block and its group have free."""
    blocks = slots // state.block_slots
    state.block_free.index_add_(0, blocks, change)
    if state.group_blocks > 1:
        state.group_free.index_add_(0, blocks // state.group_blocks, change)


def _bit_of(state: SlotState, slots: Tensor) -> Tensor:
    """The bit of each slot (int64) in its word of free_bits: int32, the 32nd the negative number of its kind.

    Distinct bits of a word are set by adding them and cleared by taking them off.
    """
    return (1 << slots % state.word_slots).int()
