"""Take and give slots on the device: which slots are free is decided, and stays, in device memory.

A pool is a set of slots, one int32 each (1 = free), with a count of the free ones in every block of slots.
The prefix sum of those counts says which blocks hold the n lowest free slots, so a search reads blocks,
not slots; within a block the rank of each slot is its place in the output. Nothing here synchronises,
and no shape depends on data, so every operation can stand in a CUDA graph.

Knows no sequence and keeps no host count. An operation that cannot be done raises no error: it does what
can be done without giving a slot two owners, and sets a flag in device memory for whoever reads it next.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .slot_flags import SlotFlag

BLOCK_SLOTS = 1024


_SHORT = tl.constexpr(int(SlotFlag.SHORT))
_DOUBLE_FREE = tl.constexpr(int(SlotFlag.DOUBLE_FREE))
_OUT_OF_RANGE = tl.constexpr(int(SlotFlag.OUT_OF_RANGE))


class SlotState(NamedTuple):
    """The state of a pool of slots; int32 tensors of one device, as the kernels use atomics on them.

    Slot 0 is padding: never free, so never taken.
    """

    mem_state: Tensor  # [num_slots], 1 = free
    block_free: Tensor  # [num_blocks], free slots of each block
    mem_cum_sum: Tensor  # [num_blocks], scratch: inclusive prefix sum of block_free, as of the last take
    counters: Tensor  # [2]: free slots of the pool, SlotFlag bits
    block_slots: int  # slots of a block, a power of two


def new_slot_state(num_slots: int, device: torch.device | str, block_slots: int = BLOCK_SLOTS) -> SlotState:
    """A pool whose slots 1..num_slots-1 are free. `block_slots` must be a power of two."""
    if num_slots < 1 or block_slots < 1 or block_slots & (block_slots - 1):
        raise ValueError(
            f"num_slots must be positive and block_slots a power of two, got {num_slots} and {block_slots}"
        )
    num_blocks = triton.cdiv(num_slots, block_slots)
    mem_state = torch.ones(num_slots, dtype=torch.int32, device=device)
    mem_state[0] = 0
    block_free = torch.full((num_blocks,), block_slots, dtype=torch.int32, device=device)
    block_free[0] -= 1
    block_free[-1] -= num_blocks * block_slots - num_slots
    counters = torch.tensor([num_slots - 1, 0], dtype=torch.int32, device=device)
    mem_cum_sum = torch.cumsum(block_free, 0, dtype=torch.int32)
    return SlotState(mem_state, block_free, mem_cum_sum, counters, block_slots)


@triton.jit(do_not_specialize=["max_n"], do_not_specialize_on_alignment=["out"])
def _scan_blocks_kernel(
    block_free,
    mem_cum_sum,
    counters,
    out,
    count,
    skip,
    num_blocks,
    max_n,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the prefix sum over the blocks, the books, and zeros in the part of out not taken."""
    offsets = tl.arange(0, BLOCK)
    total = 0
    for start in range(0, num_blocks, BLOCK):
        blocks = start + offsets
        free = tl.load(block_free + blocks, mask=blocks < num_blocks, other=0)
        tl.store(mem_cum_sum + blocks, total + tl.cumsum(free, 0), mask=blocks < num_blocks)
        total += tl.sum(free, 0)

    wanted = tl.load(count)
    available = total
    if HAS_SKIP:
        available -= tl.load(skip)
    num_taken = tl.minimum(tl.minimum(wanted, max_n), available)
    num_taken = tl.maximum(num_taken, 0)
    tl.store(counters, total - num_taken)
    if num_taken < wanted:
        tl.atomic_or(counters + 1, _SHORT)
    for start in range(0, max_n - num_taken, BLOCK):
        places = num_taken + start + offsets
        tl.store(out + places, tl.zeros([BLOCK], tl.int32), mask=places < max_n)


@triton.jit(do_not_specialize=["max_n"], do_not_specialize_on_alignment=["out"])
def _take_slots_kernel(
    mem_state,
    block_free,
    mem_cum_sum,
    out,
    count,
    skip,
    num_slots,
    max_n,
    HAS_SKIP: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """One program a block: scatter its share of the free slots of rank skip .. skip + count - 1."""
    block = tl.program_id(0)
    first_rank = 0
    if HAS_SKIP:
        first_rank = tl.load(skip)
    end_rank = first_rank + tl.minimum(tl.load(count), max_n)
    num_free = tl.load(block_free + block)
    rank_after = tl.load(mem_cum_sum + block)
    rank_before = rank_after - num_free
    if (rank_before >= end_rank) | (rank_after <= first_rank):
        return

    slots = block * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    free = tl.load(mem_state + slots, mask=slots < num_slots, other=0)
    ranks = rank_before + tl.cumsum(free, 0) - 1
    taken = (free == 1) & (ranks >= first_rank) & (ranks < end_rank)
    tl.store(out + (ranks - first_rank), slots, mask=taken)
    tl.store(mem_state + slots, tl.zeros([BLOCK_SLOTS], tl.int32), mask=taken)
    tl.store(block_free + block, num_free - tl.sum(taken.to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_given"], do_not_specialize_on_alignment=["given"])
def _give_slots_kernel(
    mem_state,
    block_free,
    counters,
    given,
    num_given,
    num_slots,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = places < num_given
    slots = tl.load(given + places, mask=valid, other=0)
    in_range = valid & (slots >= 1) & (slots < num_slots)
    # The exchange hands a slot's old state to exactly one of those who give it.
    was_free = tl.atomic_xchg(mem_state + slots, tl.full([BLOCK], 1, tl.int32), mask=in_range)
    freed = in_range & (was_free == 0)
    tl.atomic_add(block_free + slots // BLOCK_SLOTS, tl.full([BLOCK], 1, tl.int32), mask=freed)
    tl.atomic_add(counters, tl.sum(freed.to(tl.int32), 0))
    double_free = tl.max((in_range & (was_free == 1)).to(tl.int32), 0)
    out_of_range = tl.max((valid & (in_range == 0)).to(tl.int32), 0)
    if double_free + out_of_range > 0:
        tl.atomic_or(counters + 1, double_free * _DOUBLE_FREE + out_of_range * _OUT_OF_RANGE)


def take_slots(state: SlotState, out: Tensor, count: Tensor, skip: Tensor | None = None) -> None:
    """Take the `count` lowest free slots, ascending.

    If fewer are free, or `out` is shorter, what fits is taken and the flag SHORT is set.

    Args:
        state: the pool; updated in place.
        out: int32 `[max_n]`, contiguous: the slots taken, then zeros.
        count: int32 `[1]` on the device.
        skip: int32 `[1]` on the device: pass over that many free slots first, the lowest; None for 0.
    """
    num_slots, num_blocks, max_n = len(state.mem_state), len(state.block_free), len(out)
    has_skip = skip is not None
    skip = count if skip is None else skip
    _scan_blocks_kernel[(1,)](
        state.block_free,
        state.mem_cum_sum,
        state.counters,
        out,
        count,
        skip,
        num_blocks,
        max_n,
        HAS_SKIP=has_skip,
        BLOCK=1024,
    )
    _take_slots_kernel[(num_blocks,)](
        state.mem_state,
        state.block_free,
        state.mem_cum_sum,
        out,
        count,
        skip,
        num_slots,
        max_n,
        HAS_SKIP=has_skip,
        BLOCK_SLOTS=state.block_slots,
    )


def give_slots(state: SlotState, slots: Tensor) -> None:
    """Make slots free. `slots`: int32 or int64 `[n]`, contiguous, in any order.

    A slot that is free already, or comes a second time, stays free once and sets the flag DOUBLE_FREE.
    What is outside 1..num_slots-1 is left alone and sets OUT_OF_RANGE.
    """
    if slots.numel() == 0:
        return
    block = 256
    _give_slots_kernel[(triton.cdiv(len(slots), block),)](
        state.mem_state,
        state.block_free,
        state.counters,
        slots,
        len(slots),
        len(state.mem_state),
        BLOCK_SLOTS=state.block_slots,
        BLOCK=block,
    )


def lowest_run(state: SlotState, n: int) -> Tensor:
    """How many free slots come before the lowest `n` consecutive free ones; 0 if there are no such.

    This is the `skip` with which `take_slots` takes that run. int32 `[1]` on the device. Plain torch over
    the whole pool (a window of n slots is free if its states sum to n): meant for prompts, not for decode.
    """
    num_slots = len(state.mem_state)
    if n < 1 or n > num_slots:
        return torch.zeros(1, dtype=torch.int32, device=state.mem_state.device)
    cum_sum = torch.cumsum(state.mem_state, 0, dtype=torch.int32)  # [num_slots]
    free_before = cum_sum - state.mem_state
    is_run = cum_sum[n - 1 :] - free_before[: num_slots - n + 1] == n
    start = is_run.int().argmax(dim=0, keepdim=True)  # of equals argmax gives the first
    return free_before.gather(0, start) * is_run.gather(0, start)


def take_run(state: SlotState, out: Tensor) -> None:
    """Take the lowest `len(out)` consecutive free slots where there are such, else as `take_slots`.

    `out`: int32 `[n]`, contiguous. Decided on the device.
    """
    count = torch.full((1,), len(out), dtype=torch.int32, device=out.device)
    take_slots(state, out, count, lowest_run(state, len(out)))


def take_slots_reference(state: SlotState, out: Tensor, count: Tensor, skip: Tensor | None = None) -> None:
    """The specification of `take_slots`, in plain torch; also what runs on the CPU.

    Reads the sum of every block, and the slots of no more blocks than there are slots to take.
    """
    num_slots, num_blocks, max_n = len(state.mem_state), len(state.block_free), len(out)
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
    out.copy_(slots[found.where(taken, 0)].where(taken, 0))
    state.mem_state.index_fill_(0, out.long(), 0)  # slot 0 is never free
    state.block_free.index_add_(0, out.long() // state.block_slots, -taken.int())
    state.counters[:1] -= num_taken
    state.counters[1:] |= (num_taken < count).int() * int(SlotFlag.SHORT)


def take_run_reference(state: SlotState, out: Tensor) -> None:
    """The specification of `take_run`, in plain torch; also what runs on the CPU."""
    count = torch.full((1,), len(out), dtype=torch.int32, device=out.device)
    take_slots_reference(state, out, count, lowest_run(state, len(out)))


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
    state.block_free.index_add_(0, safe // state.block_slots, freed.int())
    state.counters[0] += freed.sum(dtype=torch.int32)
    double_free = (in_range & ~freed).any().int() * int(SlotFlag.DOUBLE_FREE)
    out_of_range = (~in_range).any().int() * int(SlotFlag.OUT_OF_RANGE)
    state.counters[1] |= double_free | out_of_range
