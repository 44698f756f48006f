"""Four designs of slot management with one interface: lightkv's, and those of three engines, re-implemented.

The other three were written from descriptions of LightLLM, SGLang and vLLM of 2025, not from their code. Each
is the simplest form of its idea. The rows and lengths of a decode step stay on the device if the design
allows it.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lightkv import KVSpec
from lightkv.edits import Alloc, FreeRange
from lightkv.memory.kv_memory import KVMemory

PAGE = 16  # tokens of a block of vLLM's
SMALLEST = KVSpec(num_layers=1, num_kv_heads=1, k_dim=1, v_dim=1, dtype=torch.float16)  # no K/V is written


class Design(Protocol):
    """A pool of slots 1..num_slots-1, and a table on the device from (row, position) to slot."""

    name: str
    table: Tensor

    def load(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Sets the batch of `decode`: rows and their lengths. Their slots are not used."""

    def decode(self) -> None:
        """Allocates a slot for the next token of every row of the batch. Lengths grow by one."""

    def undo_decode(self) -> None:
        """Frees the slots of the last `decode`, and restores the lengths."""

    def prompt(self, row: int, n: int) -> None:
        """Allocates n slots for positions 0..n-1 of `row`."""

    def release(self, row: int, n: int) -> None:
        """Frees the slots that `prompt` allocated."""

    def slots(self, row: int, start: int, end: int) -> Tensor:
        """Returns the slots of `row` at positions [start, end), for checks."""

    def num_free(self) -> int:
        """Counts the free slots, for checks. May synchronise with the device."""


def _pinned(numbers: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory() if device.type == "cuda" else tensor


class Ours:
    """lightkv's eager step: applies the edits that a ledger would emit.

    The kernel that writes the table also chooses the slots.
    """

    name = "lightkv"

    def __init__(self, num_slots: int, free: np.ndarray, table: Tensor) -> None:
        """`free`: the free slots, in the order in which they were freed."""
        num_rows, max_entries = table.shape
        self.memory = KVMemory(SMALLEST, num_slots, num_rows - 1, max_entries, table.device)
        self.table = self.memory.table.req_to_token
        self.allocator = self.memory.allocator
        self.allocator.alloc(num_slots - 1)
        self.allocator.free(torch.from_numpy(free).to(table.device, torch.int32))

    def load(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.allocs = [
            Alloc(tuple(rows), tuple(length - back for length in lengths), (1,) * len(rows))
            for back in (1, 0)
        ]
        self._step_before()

    def _step_before(self) -> None:
        """Runs the step before the measured one, which leaves its lengths on the device."""
        allocated = self.memory.apply(self.allocs[:1])
        assert allocated is not None
        self.allocator.free(allocated)

    def decode(self) -> None:
        allocated = self.memory.apply(self.allocs[1:])
        assert allocated is not None
        self.slots_of_step = allocated

    def undo_decode(self) -> None:
        self.allocator.free(self.slots_of_step)
        self._step_before()

    def prompt(self, row: int, n: int) -> None:
        self.memory.apply([Alloc((row,), (0,), (n,))])

    def release(self, row: int, n: int) -> None:
        self.memory.apply([FreeRange(row, 0, n)])

    def slots(self, row: int, start: int, end: int) -> Tensor:
        return self.table[row, start:end]

    def num_free(self) -> int:
        self.allocator.check()
        return int(self.allocator.counters[0])


class PinnedStack:
    """LightLLM: a stack of slots in pinned memory.

    An allocation copies the top of the stack into a ring and uploads it. Freeing slots downloads them first.
    """

    name = "pinned stack"

    def __init__(self, num_slots: int, free: np.ndarray, table: Tensor) -> None:
        self.table = table
        self.stack = _pinned(np.zeros(num_slots, dtype=np.int32), table.device)
        self.top = num_slots - len(free)  # free slots are stack[top:]
        self.stack[self.top :] = torch.from_numpy(free.astype(np.int32))
        self.ring = _pinned(np.zeros(3 * num_slots, dtype=np.int32), table.device)
        self.at = 0

    def alloc(self, n: int) -> Tensor:
        if n > len(self.stack) - self.top:
            raise RuntimeError(f"{n} slots needed, {len(self.stack) - self.top} free")
        if self.at + n > len(self.ring):
            self.at = 0
        staged = self.ring[self.at : self.at + n]
        staged.copy_(self.stack[self.top : self.top + n])
        self.at += n
        self.top += n
        return staged.to(self.table.device, non_blocking=True)

    def free(self, slots: Tensor) -> None:
        self.stack[self.top - len(slots) : self.top] = slots.cpu()
        self.top -= len(slots)

    def load(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        device = self.table.device
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=device)

    def decode(self) -> None:
        self.table[self.rows, self.lengths] = self.alloc(len(self.rows))
        self.lengths.add_(1)

    def undo_decode(self) -> None:
        self.top -= len(self.rows)  # the stack still holds these slots
        self.lengths.sub_(1)

    def prompt(self, row: int, n: int) -> None:
        self.table[row, :n] = self.alloc(n)

    def release(self, row: int, n: int) -> None:
        self.free(self.table[row, :n])

    def slots(self, row: int, start: int, end: int) -> Tensor:
        return self.table[row, start:end]

    def num_free(self) -> int:
        return len(self.stack) - self.top


class FreeList:
    """SGLang: a tensor of the free slots on the device. Allocation slices it, freeing concatenates."""

    name = "free list"

    def __init__(self, num_slots: int, free: np.ndarray, table: Tensor) -> None:
        self.table = table
        self.free_slots = torch.from_numpy(free.astype(np.int64)).to(table.device)

    def alloc(self, n: int) -> Tensor:
        if n > len(self.free_slots):
            raise RuntimeError(f"{n} slots needed, {len(self.free_slots)} free")
        slots = self.free_slots[:n]
        self.free_slots = self.free_slots[n:]
        return slots

    def free(self, slots: Tensor) -> None:
        self.free_slots = torch.cat((self.free_slots, slots))

    def load(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        device = self.table.device
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device=device)

    def decode(self) -> None:
        self.before = self.free_slots
        self.table[self.rows, self.lengths] = self.alloc(len(self.rows)).to(torch.int32)
        self.lengths.add_(1)

    def undo_decode(self) -> None:
        self.free_slots = self.before
        self.lengths.sub_(1)

    def prompt(self, row: int, n: int) -> None:
        self.table[row, :n] = self.alloc(n).to(torch.int32)

    def release(self, row: int, n: int) -> None:
        self.free(self.table[row, :n].to(torch.int64))

    def slots(self, row: int, start: int, end: int) -> Tensor:
        return self.table[row, start:end]

    def num_free(self) -> int:
        return len(self.free_slots)


class _Block:
    __slots__ = ("following", "number", "previous")

    def __init__(self, number: int) -> None:
        self.number = number
        self.previous: _Block | None = None
        self.following: _Block | None = None


class _Queue:
    """A doubly linked list, so that a block which is hit in the cache can be removed from its middle."""

    def __init__(self) -> None:
        self.head, self.tail = _Block(-1), _Block(-1)
        self.head.following, self.tail.previous = self.tail, self.head
        self.length = 0

    def pop(self) -> _Block:
        block = self.head.following
        if block is None or block is self.tail:
            raise RuntimeError("a block is needed, and none is free")
        following = block.following
        assert following is not None
        self.head.following, following.previous = following, self.head
        block.previous = block.following = None
        self.length -= 1
        return block

    def append(self, block: _Block) -> None:
        last = self.tail.previous
        assert last is not None
        last.following, block.previous, block.following, self.tail.previous = block, last, self.tail, block
        self.length += 1


class BlockQueue:
    """vLLM: a Python queue of free blocks of 16 tokens.

    A step uploads the batch's lines of the block table, which attention reads, and the slots of its tokens.
    """

    name = "block queue"

    def __init__(self, num_slots: int, free: np.ndarray, table: Tensor) -> None:
        """Makes `len(free) // PAGE` blocks free: those of the free slots, in their order."""
        self.device = table.device
        self.queue = _Queue()
        wanted = len(free) // PAGE
        numbers = np.unique(free // PAGE, return_index=True)
        order = numbers[0][np.argsort(numbers[1])]
        for number in order[order > 0][:wanted].tolist():
            self.queue.append(_Block(number))
        num_rows, max_entries = table.shape
        self.table = torch.zeros(num_rows, max_entries // PAGE, dtype=torch.int32, device=self.device)
        self.staged = _pinned(np.zeros(self.table.shape, dtype=np.int32), self.device)
        self.lines = self.staged.numpy()
        self.blocks: list[list[_Block]] = [[] for _ in range(num_rows)]
        self.mapping = _pinned(np.zeros(max(num_rows, max_entries), dtype=np.int64), self.device)
        self.slot_mapping = torch.zeros(len(self.mapping), dtype=torch.int64, device=self.device)

    def _grow(self, row: int, length: int) -> None:
        blocks = self.blocks[row]
        while len(blocks) * PAGE < length:
            block = self.queue.pop()
            self.lines[row, len(blocks)] = block.number
            blocks.append(block)

    def _map(self, rows: np.ndarray, positions: np.ndarray) -> None:
        n = len(rows)
        np.multiply(self.lines[rows, positions // PAGE], PAGE, out=self.mapping.numpy()[:n])
        self.mapping.numpy()[:n] += positions % PAGE
        self.slot_mapping[:n].copy_(self.mapping[:n], non_blocking=True)

    def load(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.rows = np.array(rows)
        self.lengths = np.array(lengths)
        for row, length in zip(rows, lengths, strict=True):  # placeholders that are not from the queue
            while len(self.blocks[row]) * PAGE < length:
                self.blocks[row].append(_Block(0))

    def decode(self) -> None:
        held = self.queue.length
        for row, length in zip(self.rows.tolist(), self.lengths.tolist(), strict=True):
            if len(self.blocks[row]) * PAGE <= length:
                self._grow(row, length + 1)
        self.num_taken = held - self.queue.length
        n = int(self.rows.max()) + 1
        self.table[:n].copy_(self.staged[:n], non_blocking=True)
        self._map(self.rows, self.lengths)
        self.lengths += 1

    def undo_decode(self) -> None:
        self.lengths -= 1
        for row, length in zip(self.rows.tolist(), self.lengths.tolist(), strict=True):
            while (len(self.blocks[row]) - 1) * PAGE >= length:
                self.queue.append(self.blocks[row].pop())

    def prompt(self, row: int, n: int) -> None:
        self._grow(row, n)
        self.table[row : row + 1].copy_(self.staged[row : row + 1], non_blocking=True)
        self._map(np.full(n, row), np.arange(n))

    def release(self, row: int, n: int) -> None:
        for block in reversed(self.blocks[row]):
            self.queue.append(block)
        self.blocks[row] = []

    def slots(self, row: int, start: int, end: int) -> Tensor:
        positions = torch.arange(start, end, device=self.device)
        return self.table[row, positions // PAGE] * PAGE + positions % PAGE

    def num_free(self) -> int:
        return self.queue.length * PAGE


DESIGNS: tuple[type[Ours] | type[PinnedStack] | type[FreeList] | type[BlockQueue], ...] = (
    Ours,
    PinnedStack,
    FreeList,
    BlockQueue,
)
