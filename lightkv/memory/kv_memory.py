"""The device memory of a cache: free slots, table, segments and K/V. Only edits change it.

The ledger decides and emits the edits; this side needs no token id and no tree. Two memories to which the same
edits were applied in the same order are equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

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
from lightkv.holdings import HeldRow, Holdings
from lightkv.triton_kernels.slots.allocate import TableEntries

from .allocator import TokenAllocator
from .device import require_current, usable_device
from .kv_pool import KVPool
from .kv_spec import KVSpec
from .staging import upload
from .token_table import TokenTable


@dataclass
class _Step:
    """The last decode step: its rows and, on the device, int64 `[n]` each, the rows and the positions that it
    wrote. next_starts: the positions of the next step if it has the same rows."""

    rows: tuple[int, ...]
    next_starts: tuple[int, ...]
    rows_on_device: torch.Tensor
    positions: torch.Tensor


class KVMemory:
    """An allocator, a token table, a pool, and the slots of every shared segment, on one device.

    A GPU has to be the calling thread's current device, here (else ValueError is raised) and for every verb.
    """

    def __init__(
        self, spec: KVSpec, num_slots: int, max_sequences: int, max_entries: int, device: torch.device | str
    ) -> None:
        device = usable_device(device)
        if device.type == "cuda":
            require_current(device, torch.cuda.current_device())
        self.allocator = TokenAllocator(num_slots, device)
        self.device = device = self.allocator.device  # with its index: to torch, "cuda" is another one
        self.table = TokenTable(max_sequences, max_entries, device)
        self.pool = KVPool(spec, num_slots, device)
        self._segments: dict[int, torch.Tensor] = {}  # id → int32 slots, in the order of the tokens
        self._step: _Step | None = None
        # Rows that have dropped tokens → the positions of their entries then, and how many they dropped.
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
        """Returns the positions of the first `length` entries of `row`: int64 `[length]` on the device."""
        if row not in self._dropped:
            return torch.arange(length, device=self.device)
        known, dropped = self._dropped[row]
        num_known = min(len(known), length)
        later = torch.arange(num_known, length, device=self.device) + dropped
        return torch.cat((known[:num_known], later))

    def apply(self, edits: Sequence[Edit], kept: Sequence[torch.Tensor] = ()) -> torch.Tensor | None:
        """Applies the edits in order, without synchronising.

        `kept`: for each KeepEntries among them, in order, the entries of its row that stay: int64 `[num_kept]`
        on the device, in any order. The host does not read them. For an entry that is repeated or out of range
        another entry of the range stays, so that as many stay as the ledger counts.

        Returns the slots of the last Alloc, int32 `[sum(counts)]`; None if there is none. Raises ValueError,
        with nothing done, if there are more or fewer `kept` than KeepEntries edits.

        Edits that a ledger emitted for this memory cannot fail. If one does (OutOfTokens, KeyError for a
        segment that was not stored), the edits before it are done and those after it are not: ledger and memory
        differ for good, and neither may be used again.
        """
        num_keeps = sum(isinstance(edit, KeepEntries) for edit in edits)
        if num_keeps != len(kept):
            raise ValueError(
                f"{num_keeps} KeepEntries edits and entries for {len(kept)}; give a tensor for each"
            )
        entries = iter(kept)
        allocated: torch.Tensor | None = None
        freed: list[torch.Tensor] = []  # freed together; views of the table, so before anything writes it
        for edit in edits:
            if isinstance(edit, FreeRange):
                freed.append(self.table.slots(edit.row, edit.start, edit.end))
                continue
            if isinstance(edit, FreeSegment):
                freed.append(self._cut_segment(edit))
                continue
            self._free(freed)
            match edit:
                case Alloc():
                    allocated = self._alloc(edit)
                case MapSegments(row, start, segments):
                    slots = torch.cat([self._segments[segment] for segment in segments])
                    self.table.slots(row, start, start + len(slots)).copy_(slots)
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
        return allocated

    def digest(self) -> bytes:
        """Returns a digest of which slots are free and of the token table's rows; synchronises."""
        digest = blake2b(digest_size=16)
        for tensor in (self.allocator.mem_state, self.table.req_to_token[1:]):  # row 0 is padding
            digest.update(tensor.cpu().numpy().data)
        return digest.digest()

    def check(self, holdings: Holdings | None = None) -> None:
        """Recounts on the device, which synchronises: the allocator's counts, and that no slot has two owners.

        `holdings`: the ledger's account, as of the edits applied so far. If given, the segments are those that
        it names, each row begins with the slots of its segments and has dropped as many tokens as it says, and
        every slot is free, in a segment or a row's own. Raises CheckFailed, InvalidFree.
        """
        self.allocator.check()
        if holdings is not None:
            self._check_segments(holdings.segments)
            self._check_dropped(holdings.rows)
            self._check_shared(holdings.rows)
        owners = self.allocator.mem_state.cpu().numpy().astype(np.int64)  # 1 where free
        owners[0] += 1  # padding is its own owner
        held = list(self._segments.values())
        held += [self.table.slots(*where) for where in (() if holdings is None else holdings.private)]
        if held:
            slots = torch.cat(held).cpu().numpy()
            if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < len(owners):
                raise CheckFailed(
                    f"slots {int(slots.min())} to {int(slots.max())} are held, of a pool of {len(owners)}"
                )
            owners += np.bincount(slots, minlength=len(owners))
        most, least = int(owners.max()), int(owners.min())
        if most > 1:
            raise CheckFailed(f"slot {int(owners.argmax())} has {most} owners, free counted as one")
        if holdings is not None and least < 1:
            raise CheckFailed(
                f"slot {int(owners.argmin())} is lost: it is not free, and no sequence holds it"
            )

    def _check_segments(self, lengths: Mapping[int, int]) -> None:
        """Raises CheckFailed unless the segments have the ledger's ids and numbers of tokens."""
        found = {segment: len(slots) for segment, slots in self._segments.items()}
        for segment in found.keys() | lengths.keys():
            if found.get(segment) != lengths.get(segment):
                raise CheckFailed(
                    f"segment {segment} has {found.get(segment, 'no')} slots, and "
                    f"{lengths.get(segment, 'no')} tokens by the ledger's count"
                )

    def _check_dropped(self, rows: Iterable[HeldRow]) -> None:
        """Raises CheckFailed unless rows have dropped the ledger's numbers of tokens, and the positions of
        their entries leave room for so many."""
        counted = {row.row: row.dropped for row in rows if row.dropped}
        for row in counted.keys() | self._dropped.keys():
            known, dropped = self._dropped.get(row, (torch.empty(0), 0))
            if dropped != counted.get(row, 0):
                raise CheckFailed(
                    f"row {row} has dropped {dropped} tokens, {counted.get(row, 0)} by the ledger's count"
                )
            at = known.cpu().numpy()
            if (np.diff(at, prepend=-1, append=len(at) + dropped) < 1).any():
                raise CheckFailed(
                    f"row {row} has entries at positions {at.tolist()}, and goes on at {len(at) + dropped}"
                )

    def _check_shared(self, rows: Iterable[HeldRow]) -> None:
        """Raises CheckFailed unless each row begins with the slots of its segments."""
        sharing = [row for row in rows if row.shared]
        if not sharing:
            return
        expected = torch.cat([self._segments[segment] for row in sharing for segment in row.segments])
        found = torch.cat([self.table.slots(row.row, 0, row.shared) for row in sharing])
        if torch.equal(expected, found):
            return
        for row in sharing:
            slots = torch.cat([self._segments[segment] for segment in row.segments]).tolist()
            for entry, (slot, own) in enumerate(
                zip(slots, self.table.slots(row.row, 0, row.shared).tolist(), strict=False)
            ):
                if slot != own:
                    raise CheckFailed(
                        f"entry {entry} of row {row.row} is slot {own}, and slot {slot} in its segments "
                        f"{list(row.segments)}"
                    )
        raise CheckFailed("rows share more or fewer entries than their segments have slots")

    def labels(
        self, segments: Mapping[int, int], own: Mapping[tuple[int, int, int], int], other: int
    ) -> np.ndarray:
        """Returns a label for each slot from 1 on, int32 `[capacity]`, and 0 for free slots. Synchronises.

        `segments`: labels by segment; segments that are missing there get `other`. `own`: labels by (row,
        start, end).
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

    def _alloc(self, edit: Alloc) -> torch.Tensor:
        table = self.table
        if edit.counts.count(1) == len(edit.rows):
            return self.allocator.alloc(len(edit.rows), entries=self._step_entries(edit))
        (entries,) = upload([table.entries(edit.rows, edit.starts, edit.counts)], self.device)
        where = TableEntries(table.req_to_token, entries)
        # More than one token each means prompts, which are read fastest from adjacent slots.
        return self.allocator.alloc(sum(edit.counts), contiguous=True, entries=where)

    def _step_entries(self, edit: Alloc) -> TableEntries:
        """Returns where a decode step's slots go. Uploads nothing if the step follows the one before."""
        step = self._step
        if step is not None and step.rows == edit.rows and step.next_starts == edit.starts:
            if max(edit.starts) >= self.table.max_entries:
                raise IndexError(f"position {max(edit.starts)}, in rows of {self.table.max_entries} entries")
            step.positions.add_(1)
        else:
            self.table.entries(edit.rows, edit.starts, edit.counts)  # raises for places outside the table
            rows, positions = upload(
                [np.array(edit.rows, dtype=np.int64), np.array(edit.starts, dtype=np.int64)], self.device
            )
            step = self._step = _Step(edit.rows, edit.starts, rows, positions)
        step.next_starts = tuple(map((1).__add__, edit.starts))
        return TableEntries(self.table.req_to_token, step.positions, step.rows_on_device)

    def _keep(self, edit: KeepEntries, entries: torch.Tensor) -> torch.Tensor:
        """Keeps `entries` of the range and returns the slots of the others, which are to be freed."""
        row, start, end, num_kept = edit
        slots = self.table.slots(row, start, end)
        # One flag per entry of the range, and a last one for entries out of range.
        flags = torch.zeros(end - start + 1, dtype=torch.int32, device=self.device)
        place = torch.where((entries >= start) & (entries < end), entries - start, end - start)
        flags.index_fill_(0, place, 1)
        order = flags[:-1].argsort(stable=True)
        num_freed = end - start - num_kept
        freed = slots[order[:num_freed]]
        self._move(row, order[num_freed:].sort().values + start, start, end)
        return freed

    def _move(self, row: int, entries: torch.Tensor, to: int, length: int) -> None:
        """Replaces the row's entries [to, length) by its `entries` (ascending), moved down to begin at `to`."""
        positions = self.positions(row, length)
        dropped = length - to - len(entries)
        if row in self._dropped:
            dropped += self._dropped[row][1]
        self._dropped[row] = torch.cat((positions[:to], positions[entries])), dropped
        self.table.slots(row, to, to + len(entries)).copy_(self.table.slots(row, 0, length)[entries])

    def _cut_segment(self, edit: FreeSegment) -> torch.Tensor:
        """Removes the slots from `start` on from the segment and returns them, which are to be freed."""
        slots = self._segments.pop(edit.segment)
        if edit.start:
            self._segments[edit.segment] = slots[: edit.start]
        return slots[edit.start :]

    def _free(self, freed: list[torch.Tensor]) -> None:
        if freed:
            self.allocator.free(freed[0] if len(freed) == 1 else torch.cat(freed))
            freed.clear()
