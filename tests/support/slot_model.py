"""The slot kernels and their references under one set of names, ways to launch allocations, and a model of
both: a Python set."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.slots import alloc_many as alloc_many
from lightkv.triton_kernels.slots import allocate
from lightkv.triton_kernels.slots.allocate import (
    AllocLaunch,
    SlotFlag,
    SlotState,
    alloc_run,
    alloc_run_reference,
    alloc_slots,
    alloc_slots_reference,
    free_slots,
    free_slots_reference,
)
from lightkv.triton_kernels.slots.slot_search import CountTiles
from lightkv.triton_kernels.slots.slot_state import TICKET


class Operations(NamedTuple):
    alloc_slots: Callable[..., None]
    alloc_run: Callable[..., None]
    free_slots: Callable[..., None]


KERNELS = Operations(alloc_slots, alloc_run, free_slots)
REFERENCES = Operations(alloc_slots_reference, alloc_run_reference, free_slots_reference)
both = pytest.mark.parametrize("operations", [KERNELS, REFERENCES], ids=["kernels", "references"])


class Model:
    """A model of the pool: a set of free slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = set(range(1, num_slots))
        self.flags = SlotFlag(0)

    def alloc(self, max_n: int, count: int) -> list[int]:
        taken = sorted(self.free)[: min(count, max_n)]
        if len(taken) < count:
            self.flags |= SlotFlag.SHORT
        self.free -= set(taken)
        return taken + [0] * (max_n - len(taken))

    def alloc_run(self, n: int) -> list[int]:
        for start in range(1, self.num_slots - n + 1):
            run = range(start, start + n)
            if self.free.issuperset(run):
                self.free -= set(run)
                return list(run)
        return self.alloc(n, n)

    def free_slots(self, slots: list[int]) -> None:
        for slot in slots:
            if not 1 <= slot < self.num_slots:
                self.flags |= SlotFlag.OUT_OF_RANGE
            elif slot in self.free:
                self.flags |= SlotFlag.DOUBLE_FREE
            else:
                self.free.add(slot)

    def check(self, state: SlotState) -> None:
        assert state.mem_state.tolist() == [int(slot in self.free) for slot in range(self.num_slots)]
        assert state.counters.tolist() == [len(self.free), int(self.flags)]
        blocks = range(0, self.num_slots, state.block_slots)
        assert state.block_free.tolist() == [
            sum(slot in self.free for slot in range(start, start + state.block_slots)) for start in blocks
        ]
        first_block = int(state.first_block)
        assert 0 <= first_block <= min(self.free, default=self.num_slots) // state.block_slots
        assert int(state.metadata[TICKET.value]) == 0
        words = [0] * len(state.free_bits)
        for slot in self.free:
            words[slot // state.word_slots] |= 1 << slot % state.word_slots
        assert [word & 0xFFFFFFFF for word in state.free_bits.tolist()] == words


def number(value: int, device: torch.device | str) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def poisoned(n: int, device: torch.device | str) -> Tensor:
    """An output tensor of which a kernel has to write every element."""
    return torch.full((n,), -7, dtype=torch.int32, device=device)


def in_programs(ranks: int, tiles: CountTiles) -> AbstractContextManager[object]:
    """Allocates in one kernel with `ranks` slots per program; `tiles`: counts that a program reads at once."""
    return mock.patch.multiple(
        allocate,
        alloc_launch=lambda max_ranks: AllocLaunch(min(ranks, max_ranks), max(1, max_ranks // ranks), 4),
        few_tiles=lambda _: tiles,
    )


@contextmanager
def in_two_kernels(tiles: CountTiles) -> Iterator[None]:
    """Allocates in two kernels, however few the slots are; `tiles`: counts that a program reads at once."""
    with (
        mock.patch.object(allocate, "MAX_IN_ONE_KERNEL", 0),
        mock.patch.object(alloc_many, "many_tiles", return_value=tiles),
    ):
        yield
