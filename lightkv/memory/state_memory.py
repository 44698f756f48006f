"""The states of recurrent and convolutional layers: a pool of state slots, and which of them each row reads and
writes. Only edits change the second (`lightkv/ledger/snapshots.py` says when)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lightkv.edits import (
    AllocStates,
    CopyRow,
    Edit,
    FreePart,
    FreeRange,
    MapSegments,
    ReadStates,
    StoreSegment,
)
from lightkv.errors import CheckFailed, OutOfMemory
from lightkv.holdings import Holdings
from lightkv.memory_map import CACHED, FREE, OWN
from lightkv.triton_kernels.slots.allocate import TableEntries

from .allocator import TokenAllocator
from .kv_pool import free_bytes
from .kv_spec import KVSpec
from .staging import upload


class StateSlots(NamedTuple):
    """The state slots of rows: int64 `[n]` each, on the device. A row reads slot 0, which is zero, before its
    first token."""

    reads: torch.Tensor
    writes: torch.Tensor


class StateMemory:
    """`num_slots` slots of the states of `spec` on `device`, for rows 1 to `max_sequences`: class `cls` of
    edits.

    `layers` has by layer with states, in the spec's order, the tensors by their names, `[num_slots, *shape]`.
    `table`: int32 `[max_sequences + 1, 2]`, the slots that rows read, and those that they write: 0 where there
    is none. Slot 0 is the state before any token. It stays zero: what computes padding rows must not write it.
    Raises OutOfMemory, with nothing allocated, if the device has no room.
    """

    def __init__(
        self, spec: KVSpec, num_slots: int, max_sequences: int, cls: int, device: torch.device
    ) -> None:
        self.allocator = TokenAllocator(num_slots, device)
        self.table = torch.zeros((max_sequences + 1, 2), dtype=torch.int32, device=device)
        self.cls = cls
        self._segments: dict[int, torch.Tensor] = {}  # the slot of each snapshot, int32 `[1]`
        self.layers: list[dict[str, torch.Tensor]] = []
        try:
            for tensors in spec.states:
                made = {
                    name: torch.empty((num_slots, *shape), dtype=dtype, device=device)
                    for name, shape, dtype in tensors
                }
                self.layers.append(made)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises the bare type
            self.layers.clear()
            raise OutOfMemory(free_bytes(device), spec.bytes_per_state, num_slots, "states") from error
        for tensor in self.tensors:
            tensor[:1].zero_()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers: to copy a state is to copy its row of each."""
        return [tensor for layer in self.layers for tensor in layer.values()]

    def slots(self, rows: Sequence[int]) -> StateSlots:
        """Returns the slots of these rows, without synchronising."""
        return self.slots_of(*upload([np.array(rows, dtype=np.int64)], self.table.device))

    def slots_of(self, rows: torch.Tensor) -> StateSlots:
        """Returns the slots of `rows`, int64 `[n]` on the device."""
        reads, writes = self.table.index_select(0, rows).long().unbind(1)
        return StateSlots(reads.contiguous(), writes.contiguous())

    def newest(self, row: int) -> torch.Tensor:
        """Returns the slot of a row's state: int64 `[1]`, that which it writes, or else that which it reads."""
        reads, writes = self.table[row].long().split(1)
        return torch.where(writes > 0, writes, reads)

    def apply(self, edit: Edit) -> bool:
        """Applies an edit of states. Returns whether it is of nothing else."""
        match edit:
            case AllocStates(rows):
                to = np.ones(len(rows), dtype=np.int64)
                chosen, entries = upload([np.array(rows, dtype=np.int64), to], self.table.device)
                self.allocator.alloc(len(rows), entries=TableEntries(self.table, entries, chosen))
            case ReadStates(rows):
                (chosen,) = upload([np.array(rows, dtype=np.int64)], self.table.device)
                self.table[:, 0].index_copy_(0, chosen, self.table[:, 1].index_select(0, chosen))
            case MapSegments(row, _, segments, self.cls):
                self.table[row].zero_()
                if segments:
                    self.table[row, :1].copy_(self._segments[segments[0]])
            case StoreSegment(row, _, _, segment, self.cls):
                self._segments[segment] = self.table[row, 1:].clone()
            case FreeRange(row, _, _, self.cls):
                self.allocator.free(self.table[row, 1:])
                self.table[row, 1:].zero_()
            case FreePart(self.cls, segment):
                self.allocator.free(self._segments.pop(segment))
            case CopyRow(row, source, _):
                self.table[row].copy_(self.table[source])
                return False
            case _:
                return False
        return True

    def labels(self, holdings: Holdings) -> np.ndarray:
        """Returns the label of each state slot from 1 on (`MemoryMap`), int32 `[num_states]`: one that a row
        writes is its own, and a snapshot is cached. Synchronises."""
        owners = self.owners(holdings)[1:]
        return np.where(owners > 0, OWN + owners, np.where(owners == 0, CACHED, FREE)).astype(np.int32)

    def owners(self, holdings: Holdings) -> np.ndarray:
        """Returns what each slot has: int32 `[num_slots]`, -1 where it is free or slot 0, 0 in a snapshot, and
        the row whose own it is. Synchronises, and recounts: raises CheckFailed, InvalidFree."""
        self.allocator.check()
        table = self.table.cpu().numpy()
        snapshots = {segment: int(slot) for segment, slot in self._segments.items()}
        if snapshots.keys() != holdings.lengths(self.cls).keys():
            raise CheckFailed(
                f"segments {sorted(snapshots)} have states, and by the ledger's count "
                f"{sorted(holdings.lengths(self.cls))}"
            )
        held = [(slot, 0) for slot in snapshots.values()]
        for row, windows in [(one.row, one.windows[-1]) for one in holdings.rows]:
            segments, start, own, end = windows
            reads, writes = table[row].tolist()
            if start < own and reads != snapshots[segments[-1]]:
                raise CheckFailed(f"row {row} reads state {reads}, not that of segment {segments[-1]}")
            if (end > own) != (writes > 0):
                raise CheckFailed(f"row {row} writes state {writes}, and the ledger counts {end - own}")
            held += [(writes, row)] * (end > own)
        found = np.full(len(self.allocator.mem_state), -1, dtype=np.int32)
        is_free = self.allocator.mem_state.cpu().numpy() == 1
        for slot, owner in held:
            if is_free[slot] or found[slot] >= 0 or not slot:
                raise CheckFailed(f"state {slot} has two owners, free counted as one")
            found[slot] = owner
        if (lost := (found < 0) & ~is_free)[1:].any():
            raise CheckFailed(f"states {np.flatnonzero(lost)[1:].tolist()} are lost: free, and held by none")
        if any(bool(tensor[0].any()) for tensor in self.tensors):
            raise CheckFailed("state 0, which stands for no token, was written; leave padding rows out")
        return found
