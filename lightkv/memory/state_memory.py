"""The states of recurrent and convolutional layers: a pool of state slots, and which of them each row reads and
writes. Only edits change the second (`lightkv/ledger/snapshots.py` says when).

The host chooses the state slots, unlike the slots of tokens: there are few of them, and the order of the edits
alone says which they are. So the device gets one upload for all edits of a step, the rows that they change.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
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
from lightkv.errors import CheckFailed, OutOfMemory, OutOfStates
from lightkv.holdings import Holdings
from lightkv.memory_map import CACHED, FREE, OWN

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
    `of_rows`: by row, the slot that it reads, and the one that it writes: 0 where there is none. `table`: the
    same on the device, int32 `[max_sequences + 1, 2]`. Slot 0 is the state before any token. It stays zero:
    what computes padding rows must not write it. Raises OutOfMemory, with nothing allocated, if there is no
    room.
    """

    def __init__(
        self, spec: KVSpec, num_slots: int, max_sequences: int, cls: int, device: torch.device
    ) -> None:
        self.of_rows = [(0, 0)] * (max_sequences + 1)
        self.free = list(range(1, num_slots))  # a heap: the lowest free slot is allocated first
        self.table = torch.zeros((max_sequences + 1, 2), dtype=torch.int32, device=device)
        self.cls = cls
        self._segments: dict[int, int] = {}  # the slot of each snapshot
        self._changed: set[int] = set()  # rows in which the table on the device is behind
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
    def capacity(self) -> int:
        """The state slots that can be allocated: all but slot 0."""
        return len(self.tensors[0]) - 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers: to copy a state is to copy its row of each."""
        return [tensor for layer in self.layers for tensor in layer.values()]

    def slots(self, rows: Sequence[int]) -> StateSlots:
        """Returns the slots of these rows, without synchronising."""
        slots = np.array([self.of_rows[row] for row in rows], dtype=np.int64).reshape(-1, 2)
        return StateSlots(*upload(list(slots.T), self.table.device))

    def slots_of(self, rows: torch.Tensor) -> StateSlots:
        """Returns the slots of `rows`, int64 `[n]` on the device, as of when this runs."""
        reads, writes = self.table.index_select(0, rows).long().unbind(1)
        return StateSlots(reads.contiguous(), writes.contiguous())

    def newest(self, row: int) -> slice:
        """Returns where a row's state is: in the slot that it writes, or else in the one that it reads."""
        reads, writes = self.of_rows[row]
        return slice(slot := writes or reads, slot + 1)

    def apply(
        self, edits: Sequence[Edit], pieces: Mapping[int, tuple[int, int]]
    ) -> tuple[list[Edit], dict[int, tuple[int, int]]]:
        """Applies the edits of states in order, without synchronising. `pieces`: numbers of edits, each with a
        row. Returns the other edits, and of each piece the slots that its row reads and writes after so many
        edits."""
        others, found, done = list[Edit](), dict[int, tuple[int, int]](), 0
        for name, (end, row) in sorted(pieces.items(), key=lambda piece: piece[1]):
            others += [edit for edit in edits[done:end] if not self._apply(edit)]
            found[name], done = self.of_rows[row], end
        others += [edit for edit in edits[done:] if not self._apply(edit)]
        if self._changed:
            rows = np.array([*self._changed], dtype=np.int64)
            slots = np.array([self.of_rows[row] for row in self._changed], dtype=np.int32)
            at, there = upload([rows, slots.ravel()], self.table.device)
            self.table.index_copy_(0, at, there.view(-1, 2))
            self._changed.clear()
        return others, found

    def _apply(self, edit: Edit) -> bool:
        """Applies an edit of states on the host. Returns whether it is of nothing else."""
        of_rows = self.of_rows
        match edit:
            case AllocStates(rows):
                if len(rows) > len(self.free):
                    raise OutOfStates(len(rows), len(self.free), self.capacity)
                for row in rows:
                    self._set(row, of_rows[row][0], heappop(self.free))
            case ReadStates(rows):
                for row in rows:
                    self._set(row, of_rows[row][1], of_rows[row][1])
            case MapSegments(row, _, segments, self.cls):
                self._set(row, self._segments[segments[0]] if segments else 0, 0)
            case StoreSegment(row, _, _, segment, self.cls):
                self._segments[segment] = of_rows[row][1]
            case FreeRange(row, _, _, self.cls):
                heappush(self.free, of_rows[row][1])
                self._set(row, of_rows[row][0], 0)
            case FreePart(self.cls, segment):
                heappush(self.free, self._segments.pop(segment))
            case CopyRow(row, source, _):
                self._set(row, *of_rows[source])
                return False
            case _:
                return False
        return True

    def _set(self, row: int, reads: int, writes: int) -> None:
        self.of_rows[row] = reads, writes
        self._changed.add(row)

    def labels(self, holdings: Holdings) -> np.ndarray:
        """Returns the label of each state slot from 1 on (`MemoryMap`), int32 `[num_states]`: one that a row
        writes is its own, and a snapshot is cached. Synchronises."""
        owners = self.owners(holdings)[1:]
        return np.where(owners > 0, OWN + owners, np.where(owners == 0, CACHED, FREE)).astype(np.int32)

    def owners(self, holdings: Holdings) -> np.ndarray:
        """Returns what each slot has: int32 `[num_slots]`, -1 where it is free or slot 0, 0 in a snapshot, and
        the row whose own it is. Synchronises, and recounts: raises CheckFailed."""
        table = self.table.cpu().numpy()
        if (wrong := (table != self.of_rows).any(1)).any():
            row = int(wrong.argmax())
            raise CheckFailed(
                f"row {row} has states {table[row].tolist()} on the device, {self.of_rows[row]} on the host"
            )
        lengths = holdings.lengths(self.cls)
        if self._segments.keys() != lengths.keys():
            raise CheckFailed(
                f"segments {sorted(self._segments)} have states, and by the ledger's count {sorted(lengths)}"
            )
        held = [(slot, 0) for slot in self._segments.values()]
        for row, windows in [(one.row, one.windows[-1]) for one in holdings.rows]:
            segments, start, own, end = windows
            reads, writes = self.of_rows[row]
            if start < own and reads != self._segments[segments[-1]]:
                raise CheckFailed(f"row {row} reads state {reads}, not that of segment {segments[-1]}")
            if (end > own) != (writes > 0):
                raise CheckFailed(f"row {row} writes state {writes}, and the ledger counts {end - own}")
            held += [(writes, row)] * (end > own)
        num_owners = np.bincount([0, *self.free, *(slot for slot, _ in held)], minlength=self.capacity + 1)
        if num_owners.max() > 1:
            raise CheckFailed(f"state {num_owners.argmax()} has two owners, free counted as one")
        if not num_owners.all():
            raise CheckFailed(f"states {np.flatnonzero(num_owners == 0).tolist()} are neither free nor held")
        if any(bool(tensor[0].any()) for tensor in self.tensors):
            raise CheckFailed("state 0, which stands for no token, was written; leave padding rows out")
        found = np.full(self.capacity + 1, -1, dtype=np.int32)
        for slot, owner in held:
            found[slot] = owner
        return found
