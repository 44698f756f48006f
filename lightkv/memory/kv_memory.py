"""The device memory of a cache: which slots are free, whose they are, and the bytes; changed by edits alone.

Knows no token id, no tree and makes no decision: what is to be done was decided by the ledger, and comes as
edits. Whoever applies the same edits in the same order has the same memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lightkv.edits import (
    Alloc,
    CopyRow,
    Edit,
    ForgetSegment,
    FreeRange,
    FreeSegment,
    KeepEntries,
    MapSegments,
    MergeSegments,
    MoveEntries,
    SetGap,
    SplitSegment,
    StoreSegment,
)
from lightkv.errors import CheckFailed
from lightkv.triton_kernels.slots.allocate import TableEntries

from .allocator import TokenAllocator
from .kv_pool import KVPool
from .kv_spec import KVSpec
from .staging import upload
from .token_table import TokenTable


@dataclass
class _Step:
    """A decode step: its rows, int64 `[n]` on the device as well, and the positions that it wrote, int64 `[n]`;
    `next_starts`: where the step after it begins, if it is the same rows'."""

    rows: tuple[int, ...]
    next_starts: tuple[int, ...]
    rows_on_device: torch.Tensor
    positions: torch.Tensor


class KVMemory:
    """An allocator, a token table, a pool, and the slots of every shared segment, on one device.

    A GPU has to be the calling thread's current device, here (else ValueError) and for every verb.
    """

    def __init__(
        self, spec: KVSpec, num_slots: int, max_sequences: int, max_entries: int, device: torch.device
    ) -> None:
        if device.type == "cuda":
            require_current(device, torch.cuda.current_device())
        self.allocator = TokenAllocator(num_slots, device)
        self.device = device = self.allocator.device  # with its number: "cuda" is another one to torch
        self.table = TokenTable(max_sequences, max_entries, device)
        self.pool = KVPool(spec, num_slots, device)
        self._segments: dict[int, torch.Tensor] = {}  # id → int32 slots, in the order of the tokens
        self._step: _Step | None = None  # the last
        # Of rows that have dropped tokens: the positions of the entries they had then, and how many it was.
        self._dropped: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def capacity(self) -> int:
        """Tokens that the pool holds."""
        return self.allocator.capacity

    @property
    def num_free(self) -> int:
        """Free slots, by the host's count."""
        return self.allocator.num_free

    @property
    def counters(self) -> torch.Tensor:
        """The device's own free count and error flags: int32 `[2]`, to copy back with a step's result."""
        return self.allocator.counters

    def positions(self, row: int, length: int) -> torch.Tensor:
        """The positions of the first `length` entries of `row`: int64 `[length]` on the device."""
        if row not in self._dropped:
            return torch.arange(length, device=self.device)
        known, dropped = self._dropped[row]
        num_known = min(len(known), length)
        later = torch.arange(num_known, length, device=self.device) + dropped
        return torch.cat((known[:num_known], later))

    def apply(self, edits: Sequence[Edit], kept: Sequence[torch.Tensor] = ()) -> torch.Tensor | None:
        """Do what the edits say, in order, without synchronising.

        `kept`: for each Keep among them, in order, the entries of its row that stay: int64 `[num_kept]` on the
        device, in any order. The host does not see them: what is named twice, or is none of the range, makes
        place for another entry of the range; there are always as many kept as the ledger counts.

        Returns the slots of the last Take, int32 `[sum(counts)]`; None where there is none. Raises ValueError,
        with nothing done, for another number of `kept` than of Keep edits.

        Edits that a ledger emitted for this memory cannot fail. If one does (OutOfTokens, KeyError for a
        segment nobody stashed), those before it are done and those after it are not: ledger and memory have
        parted for good, and neither is to be used again.
        """
        num_keeps = sum(isinstance(edit, KeepEntries) for edit in edits)
        if num_keeps != len(kept):
            raise ValueError(f"{num_keeps} Keep edits and entries for {len(kept)}; give a tensor for each")
        entries = iter(kept)
        taken: torch.Tensor | None = None
        freed: list[torch.Tensor] = []  # given back together; views, so before anything writes the table
        for edit in edits:
            if isinstance(edit, FreeRange):
                freed.append(self.table.slots(edit.row, edit.start, edit.end))
                continue
            if isinstance(edit, FreeSegment):
                freed.append(self._drop(edit))
                continue
            self._free(freed)
            match edit:
                case Alloc():
                    taken = self._take(edit)
                case MapSegments(row, segments):
                    slots = torch.cat([self._segments[segment] for segment in segments])
                    self.table.slots(row, 0, len(slots)).copy_(slots)
                case StoreSegment(row, start, end, segment):
                    self._segments[segment] = self.table.slots(row, start, end).clone()
                case SplitSegment(segment, at, head):
                    slots = self._segments[segment]
                    self._segments[head], self._segments[segment] = slots[:at], slots[at:]
                case MergeSegments(segment, head):
                    parts = self._segments.pop(head), self._segments[segment]
                    self._segments[segment] = torch.cat(parts)
                case ForgetSegment(segment):
                    del self._segments[segment]
                case CopyRow(row, source, end):
                    self.table.slots(row, 0, end).copy_(self.table.slots(source, 0, end))
                    self._dropped.pop(row, None)
                    if source in self._dropped:
                        self._dropped[row] = self._dropped[source]
                case SetGap(row, end, dropped):
                    self._dropped[row] = self.positions(row, end), dropped
                    if not dropped:
                        del self._dropped[row]
                case MoveEntries(row, start, end, to):
                    self._move(row, torch.arange(start, end, device=self.device), to, end)
                case KeepEntries():
                    freed.append(self._keep(edit, next(entries)))
        self._free(freed)
        return taken

    def check(self, private: Iterable[tuple[int, int, int]] | None = None) -> None:
        """Recount on the device, which synchronises: the allocator's books, and that no slot has two owners.

        `private`: (row, start, end) of every range that a sequence alone holds; given, every slot that is
        neither free nor in a segment has to be in one of them. Raises CheckFailed, InvalidFree.
        """
        self.allocator.check()
        owners = self.allocator.mem_state.cpu().numpy().astype(np.int64)  # 1 where free
        owners[0] += 1  # padding is its own owner
        held = list(self._segments.values())
        held += [self.table.slots(*where) for where in private or ()]
        if held:
            owners += np.bincount(torch.cat(held).cpu().numpy(), minlength=len(owners))
        most, least = int(owners.max()), int(owners.min())
        if most > 1:
            raise CheckFailed(f"slot {int(owners.argmax())} has {most} owners, free counted as one")
        if private is not None and least < 1:
            raise CheckFailed(f"slot {int(owners.argmin())} is lost: not free, and nobody holds it")

    def labels(
        self, segments: Mapping[int, int], own: Mapping[tuple[int, int, int], int], other: int
    ) -> np.ndarray:
        """A label for each slot from 1 on, int32 `[capacity]`; synchronises. 0 is a free slot.

        `segments`: by segment; `other` for those that are not named. `own`: by (row, start, end).
        """
        labels = torch.zeros(self.capacity + 1, dtype=torch.int32, device=self.device)
        held = [(slots, segments.get(segment, other)) for segment, slots in self._segments.items()]
        held += [(self.table.slots(*where), label) for where, label in own.items()]
        if held:
            slots = torch.cat([part for part, _ in held]).long()
            counts = np.array([len(part) for part, _ in held])
            (values,) = upload(
                [np.repeat(np.array([label for _, label in held], np.int32), counts)], self.device
            )
            labels.index_copy_(0, slots, values)
        return labels[1:].cpu().numpy()

    def _take(self, take: Alloc) -> torch.Tensor:
        table = self.table
        if take.counts.count(1) == len(take.rows):
            return self.allocator.alloc(len(take.rows), entries=self._step_entries(take))
        (entries,) = upload([table.entries(take.rows, take.starts, take.counts)], self.device)
        where = TableEntries(table.req_to_token, entries)
        # More than a token each means prompts, which are read best where they lie side by side.
        return self.allocator.alloc(sum(take.counts), contiguous=True, entries=where)

    def _step_entries(self, take: Alloc) -> TableEntries:
        """Where a decode step's slots go. Where it follows the one before, nothing is uploaded."""
        step = self._step
        if step is not None and step.rows == take.rows and step.next_starts == take.starts:
            if max(take.starts) >= self.table.max_entries:
                raise IndexError(f"position {max(take.starts)}, in rows of {self.table.max_entries} entries")
            step.positions.add_(1)
        else:
            self.table.entries(take.rows, take.starts, take.counts)  # refuses what lies outside
            rows, positions = upload(
                [np.array(take.rows, dtype=np.int64), np.array(take.starts, dtype=np.int64)], self.device
            )
            step = self._step = _Step(take.rows, take.starts, rows, positions)
        step.next_starts = tuple(map((1).__add__, take.starts))
        return TableEntries(self.table.req_to_token, step.positions, step.rows_on_device)

    def _keep(self, keep: KeepEntries, entries: torch.Tensor) -> torch.Tensor:
        """Returns the slots that are to be given."""
        row, start, end, num_kept = keep
        slots = self.table.slots(row, start, end)
        # One flag an entry of the range, and one that takes whatever is none of it.
        flags = torch.zeros(end - start + 1, dtype=torch.int32, device=self.device)
        place = torch.where((entries >= start) & (entries < end), entries - start, end - start)
        flags.index_fill_(0, place, 1)
        order = flags[:-1].argsort(stable=True)
        num_given = end - start - num_kept
        given = slots[order[:num_given]]
        self._move(row, order[num_given:].sort().values + start, start, end)
        return given

    def _move(self, row: int, entries: torch.Tensor, to: int, length: int) -> None:
        """Of the row's `length` entries, those from `to` on are now `entries` (ascending) and no others."""
        positions = self.positions(row, length)
        dropped = length - to - len(entries)
        if row in self._dropped:
            dropped += self._dropped[row][1]
        self._dropped[row] = torch.cat((positions[:to], positions[entries])), dropped
        self.table.slots(row, to, to + len(entries)).copy_(self.table.slots(row, 0, length)[entries])

    def _drop(self, drop: FreeSegment) -> torch.Tensor:
        slots = self._segments.pop(drop.segment)
        if drop.start:
            self._segments[drop.segment] = slots[: drop.start]
        return slots[drop.start :]

    def _free(self, freed: list[torch.Tensor]) -> None:
        if freed:
            self.allocator.free(freed[0] if len(freed) == 1 else torch.cat(freed))
            freed.clear()


def require_current(device: torch.device, current: int) -> None:
    """Raises ValueError for a GPU that is not the `current` one, on which kernels are launched wherever their
    tensors are."""
    if device.index not in (None, current):
        raise ValueError(
            f"memory on {device} while cuda:{current} is the current device, where kernels run; call "
            f"torch.cuda.set_device({device.index}) first, or work within torch.cuda.device({device.index})"
        )
