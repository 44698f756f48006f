"""The slots of a pool: which are free is known on the device alone, how many are free on the host too.

The host's count is exact, because the size of every operation is known before it is launched. The device keeps
its own count, and `check()` compares the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightkv.counts import checked_count
from lightkv.errors import CheckFailed, InvalidFree, OutOfTokens
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.layout.slot_flags import describe_flags
from lightkv.triton_kernels.slots.allocate import (
    SlotFlag,
    TableEntries,
    alloc_run,
    alloc_run_reference,
    alloc_slots,
    alloc_slots_reference,
    free_slots,
    free_slots_reference,
    new_slot_state,
)

from .device import usable_device

_TAKEN = Tensors(
    slots="int32 or int64 [n]",
    out="contiguous int32 [n]",
    count="contiguous int32 [1]",
    table="contiguous int32 [num_rows, num_entries]",
    positions="contiguous int64 [n]",
    rows="contiguous int64 [n]",
)


class TokenAllocator:
    """Allocates the slots 1..num_slots-1 of a pool. Slot 0 is padding and never allocated.

    Args:
        num_slots: slots of the pool, slot 0 included; at least 2.
        device: where the slots are chosen. On a GPU only `check` synchronises.

    Attributes:
        mem_state: int32 `[num_slots]` on the device, 1 = free.
        counters: int32 `[2]` on the device: the device's own count of free slots, and `SlotFlag` bits for
            `raise_for_flags`. Copied back with a step's results, it checks that step at no cost.
        device: the device that the slots are chosen on.
    """

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        num_slots = checked_count("num_slots", num_slots, least=0)
        if not 2 <= num_slots < 2**31:
            raise ValueError(f"num_slots must be in 2..2**31-1 (slot 0 is padding), got {num_slots}")
        self._state = new_slot_state(num_slots, usable_device(device))
        self.mem_state = self._state.mem_state
        self.counters = self._state.counters
        self._num_free = self.capacity
        self.device = self.mem_state.device
        on_gpu = self.mem_state.is_cuda
        self._alloc_slots = alloc_slots if on_gpu else alloc_slots_reference
        self._alloc_run = alloc_run if on_gpu else alloc_run_reference
        self._free_slots = free_slots if on_gpu else free_slots_reference

    @property
    def capacity(self) -> int:
        """The slots that can be allocated: all but slot 0."""
        return len(self.mem_state) - 1

    @property
    def num_free(self) -> int:
        """Free slots by the host's count, which trusts that only slots in use are freed."""
        return self._num_free

    @property
    def _mem_cum_sum(self) -> Tensor:
        """int32 `[num_blocks]` on the device: the prefix sum over blocks that the last large allocation
        left."""
        return self._state.mem_cum_sum

    def alloc(self, n: int, contiguous: bool = False, entries: TableEntries | None = None) -> Tensor:
        """Allocates the `n` lowest free slots, ascending, all or none.

        Args:
            n: how many; 0 gives an empty tensor.
            contiguous: allocate the lowest run of n consecutive free slots if there is one. This searches one
                bit per slot of the pool, so it is meant for prompts.
            entries: n distinct places of a table on the device, which the same kernel writes the slots to.

        Returns:
            int32 `[n]` on the device.

        Raises:
            OutOfTokens: fewer than n are free. Nothing has been allocated.
        """
        self._require_free(n)
        if entries is not None:
            self._check({"n": n}, **entries._asdict())
        out = torch.empty(n, dtype=torch.int32, device=self.device)
        if n and contiguous:
            self._alloc_run(self._state, out, entries)
        elif n:
            self._alloc_slots(self._state, out, entries=entries)
        self._num_free -= n
        return out

    def free(self, slots: Tensor) -> None:
        """Frees slots: int32 or int64 `[n]` on the device, in any order.

        A slot that is free already, or a number that is not a slot of the pool, is left alone and flagged on
        the device, so that no slot gets two owners. The next `check()` or `raise_for_flags` then raises
        InvalidFree.

        Raises:
            InvalidFree: more slots than are in use. Nothing has been freed.
        """
        self._check({}, slots=slots)
        num_used = self.capacity - self._num_free
        if len(slots) > num_used:
            raise InvalidFree(
                f"{len(slots)} slots to free while {num_used} are in use; free each slot once, and only "
                "slots of this allocator"
            )
        if len(slots):
            self._free_slots(self._state, slots.contiguous())
            self._num_free += len(slots)

    def alloc_into(self, out: Tensor, count: Tensor, entries: TableEntries | None = None) -> None:
        """Allocates the lowest free slots, as many as `count` on the device says: the form to capture in a CUDA
        graph.

        The host does not read the count: call `claim(n)` before each replay or eager call. If too few slots are
        free, `out` gets those, then slot 0, and a flag is set.

        Args:
            out: int32 `[max_n]` on the device, contiguous: receives the allocated slots, then zeros.
            count: int32 `[1]` on the device, at most max_n.
            entries: max_n places of a table on the device, which the same kernel writes `out` to (a decode
                step's entries). The first `count` places are distinct; the others get slot 0.
        """
        self._check({}, out=out, count=count, **({} if entries is None else entries._asdict()))
        self._alloc_slots(self._state, out, count, entries=entries)

    def claim(self, n: int) -> None:
        """Subtracts `n` from the host's count, for an `alloc_into` that is about to run.

        Raises:
            OutOfTokens: fewer than n are free, so it must not run.
        """
        self._require_free(n)
        self._num_free -= n

    def _require_free(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"the number of slots must be 0 or more, got {n}")
        if n > self._num_free:
            raise OutOfTokens(needed=n, free=self._num_free, capacity=self.capacity)

    def _check(self, sizes: dict[str, int], **tensors: Tensor | None) -> None:
        """Raises ValueError unless these are tensors as `_TAKEN` says, on the device."""
        _TAKEN.check(sizes, **tensors)
        for name, tensor in tensors.items():
            if tensor is not None and tensor.device != self.device:
                raise ValueError(f"{name} must be on {self.device}, and is on {tensor.device}; move it there")

    def check(self) -> None:
        """Recounts everything on the device, which synchronises.

        Raises:
            InvalidFree: a slot was freed that was not in use.
            CheckFailed: an `alloc_into` found too few free slots, or the counts disagree.
        """
        num_counted, flags = self.counters.tolist()
        raise_for_flags(flags)
        state = self._state
        num_slots, num_blocks = len(state.mem_state), len(state.block_free)
        padded = state.mem_state.new_zeros(num_blocks * state.block_slots)
        padded[:num_slots] = state.mem_state
        recounted = padded.view(num_blocks, state.block_slots).sum(dim=1)
        total = int(recounted.sum())
        if not total == num_counted == self._num_free:
            raise CheckFailed(
                f"{total} slots are free, the device counted {num_counted} and the host {self._num_free}; "
                "claim() exactly what each alloc_into allocates, and write to no tensor of the allocator"
            )
        states_valid = bool(((state.mem_state == 0) | (state.mem_state == 1)).all())
        bits = 1 << torch.arange(state.word_slots, device=self.device)
        words = (padded.view(-1, state.word_slots) * bits).sum(dim=1)
        if (
            not states_valid
            or bool(state.mem_state[0])
            or not torch.equal(recounted, state.block_free.long())
            or not torch.equal(words, state.free_bits.long() & (2**32 - 1))
            or bool(recounted[: int(state.first_block)].any())
        ):
            raise CheckFailed(
                "mem_state and the free counts or bits of its blocks disagree, or slot 0 is free, or a free "
                "slot lies before the first block that is searched; something else wrote to the allocator's "
                "tensors"
            )


def raise_for_flags(flags: int) -> None:
    """Raises the error for the flag bits of `counters[1]`, read back to the host, unless they are 0.

    The flags stay set: the host's count is wrong from then on, and the allocator has to be replaced.

    Raises:
        InvalidFree: a slot was freed twice, or was not a slot of the pool.
        CheckFailed: an `alloc_into` found fewer free slots than its count.
    """
    invalid_frees = flags & (SlotFlag.DOUBLE_FREE | SlotFlag.OUT_OF_RANGE)
    if invalid_frees:
        raise InvalidFree(
            f"{describe_flags(invalid_frees)}; free each slot once, and only what alloc returned (no other "
            "slot is affected, but the host's count is wrong: make a new allocator)"
        )
    if flags & SlotFlag.SHORT:
        raise CheckFailed(
            f"{describe_flags(SlotFlag.SHORT)}: an alloc_into wrote slot 0 for the rest; discard that step, "
            "claim() its count before each run, and make a new allocator"
        )
