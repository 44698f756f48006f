"""The device memory of a cache: free slots, table, segments and K/V. Only edits change it.

The ledger decides and emits the edits; the memory needs no token ids and no tree. Two memories are equal after
the same edits in the same order. Where layers have groups, both memories also need the same calls: all edits of
a step's plan are one call of `apply`, because its last Alloc is carried out together with the ones before it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress
from operator import add
from typing import NamedTuple

import numpy as np
import torch

from lightkv.counts import checked_count
from lightkv.edits import (
    Alloc,
    AllocPart,
    CopyRow,
    Edit,
    ForgetSegment,
    FreePart,
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
from lightkv.memory_map import CACHED, OWN, slot_labels
from lightkv.triton_kernels.slots.allocate import TableEntries
from lightkv.triton_kernels.slots.entries import reuse_entries, reuse_entries_reference

from .allocator import TokenAllocator
from .device import require_current, usable_device
from .kv_pool import KVPool
from .kv_spec import KVSpec
from .segment_slots import SegmentSlots
from .staging import upload
from .state_memory import StateMemory
from .token_table import TokenTable


class _Taken(NamedTuple):
    """Entries that take slots in a class: `counts[i]` of them from entry `starts[i]` of row `rows[i]` on."""

    cls: int
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass
class _Pending:
    """Edits that are not done yet. `KVMemory._flush` does them kind by kind, in the order of these fields, in a
    few launches however many they are. What they leave is the same as if each was done in its turn.

    Attributes:
        is_single: whether there is one layer group.
        freed: the slots to free: views of the table or of segments.
        mapped, mapped_rows: the entries of rows to copy slots to, and these slots; the rows and classes.
        allocs: what is allocated at once, one such list after the other. In each, class 0 occurs at most once,
            and first. In a plan, the Alloc of decodes follows on their AllocPart.
        num_last: the tokens of the last Alloc.
        reuses: done after these, of which some may allocate what is reused.
        stored, segments: the tensors of segments to copy slots to, and these slots: views of the table. The
            segments, which cannot be read until then.
        ends: by row, how many of its first entries cannot be written until then.
    """

    is_single: bool
    freed: list[torch.Tensor] = field(default_factory=list)
    mapped: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))
    mapped_rows: set[tuple[int, int]] = field(default_factory=set)
    allocs: list[list[_Taken]] = field(default_factory=lambda: [[]])
    num_last: int = 0
    reuses: list[_Taken] = field(default_factory=list)
    stored: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))
    segments: set[int] = field(default_factory=set)
    ends: dict[int, int] = field(default_factory=dict)

    def must_precede(self, edit: Edit) -> bool:
        """Returns whether these have to be done before `edit` is added."""
        allocates = bool(self.allocs[0] or self.reuses)
        match edit:
            case Alloc(rows, starts) | AllocPart(_, rows, starts):
                ends = self.ends
                return bool(ends) and any(starts[i] < ends.get(row, 0) for i, row in enumerate(rows))
            case _ if allocates and not self.is_single:
                return True
            case StoreSegment() | SplitSegment() | ForgetSegment():
                return False
            case MapSegments(row, _, segments, cls):
                is_mapped = (row, cls) in self.mapped_rows  # the copies of one launch come in no order
                return is_mapped or row in self.ends or not self.segments.isdisjoint(segments)
            case FreeRange(row, _, _, cls):
                return allocates or (row, cls) in self.mapped_rows
            case FreeSegment(segment) | FreePart(_, segment):
                return allocates or segment in self.segments
        return True

    def allocate(self, edit: Alloc) -> None:
        """Adds an Alloc."""
        taken, together = _Taken(0, *edit), self.allocs[-1]
        if not together or together[0].cls:
            together.insert(0, taken)
        elif self.is_single and {1}.issuperset(edit.counts + together[0].counts):
            # One token a row takes the lowest free slot, so all of them take the same ones at once.
            together[0] = _Taken(0, *map(add, together[0][1:], edit))
        else:
            self.allocs.append([taken])
        self.num_last = sum(edit.counts)


@dataclass
class _Step:
    """The last step that wrote one entry of each row: in each class in turn, its rows, and the positions of the
    next step if that has the same rows; and on the device, int64 `[n]` each, the rows of all groups and the
    positions that it wrote."""

    rows: list[tuple[int, tuple[int, ...]]]
    next_starts: list[tuple[int, ...]]
    rows_on_device: torch.Tensor
    positions: torch.Tensor


class KVMemory:
    """An allocator, a token table, a pool, and the slots of every shared segment, on one device. Where the spec
    has states, `states` are those of `num_states` sequences and snapshots; None elsewhere.

    A GPU has to be the calling thread's current device, here (else ValueError is raised) and for every verb.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_slots: int,
        max_sequences: int,
        max_entries: int,
        device: torch.device | str,
        num_states: int = 0,
    ) -> None:
        device = usable_device(device)
        if device.type == "cuda":
            require_current(device, torch.cuda.current_device())
        self.allocator = TokenAllocator(num_slots, device)
        self.device = device = self.allocator.device  # with its index: to torch, "cuda" is another one
        groups = spec.groups
        self.table = TokenTable(max_sequences, max_entries, device, groups.num_groups)
        self.pool = KVPool(spec, num_slots, device)
        self._reuse_entries = reuse_entries if device.type == "cuda" else reuse_entries_reference
        places = groups.places
        self.group_of_layer = [places[spec.holder(layer)][0] for layer in range(spec.num_layers)]
        self._groups = groups.slices  # of each class, in the table
        self._distances = [one.lifetime.distance for one in groups.classes]
        self._num_classes = len(groups.classes)
        self.segments = SegmentSlots(self._num_classes)
        self.states: StateMemory | None = None
        if spec.states:
            num_slots = checked_count("num_states", num_states) + 1
            self.states = StateMemory(spec, num_slots, max_sequences, len(groups.classes), device)
        self._step: _Step | None = None
        self._reused: dict[int, _Step] = {}  # by class: the last step in which slots were used again
        # Rows that have dropped tokens → the positions of their entries then, and how many they dropped.
        self._dropped: dict[int, tuple[torch.Tensor, int]] = {}

    @property
    def capacity(self) -> int:
        """Slots of the pool, but for padding."""
        return self.allocator.capacity

    @property
    def num_free(self) -> int:
        """Free slots, by the host's count."""
        return self.allocator.num_free

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
        segment that was not stored), some of the others are done: ledger and memory differ for good, and
        neither may be used again.
        """
        num_keeps = sum(isinstance(edit, KeepEntries) for edit in edits)
        if num_keeps != len(kept):
            raise ValueError(
                f"{num_keeps} KeepEntries edits and entries for {len(kept)}; give a tensor for each"
            )
        if self.states is not None:
            edits, _ = self.states.apply(edits, {})
        return self._apply(edits, iter(kept))

    def apply_step(
        self, edits: Sequence[Edit], pieces: Mapping[int, tuple[int, int]]
    ) -> dict[int, tuple[int, int]]:
        """Applies the edits of a step, which has no KeepEntries. Returns the states of its `pieces`, as
        `StateMemory.apply` does."""
        found = dict[int, tuple[int, int]]()
        if self.states is not None:
            edits, found = self.states.apply(edits, pieces)
        self._apply(edits, iter(()))
        return found

    def _apply(self, edits: Iterable[Edit], kept: Iterator[torch.Tensor]) -> torch.Tensor | None:
        """Applies edits of tokens. Returns the slots of the last Alloc."""
        pending, allocated = _Pending(len(self.table.groups) == 1), None
        for edit in edits:
            if pending.must_precede(edit):
                allocated = self._flush(pending, allocated)
                pending = _Pending(pending.is_single)
            match edit:
                case Alloc():
                    pending.allocate(edit)
                case AllocPart():
                    self._divide(edit, pending.allocs[-1], pending.reuses)
                case MapSegments(row, start, segments, cls):
                    pending.mapped_rows.add((row, cls))
                    for segment in segments:
                        slots = self.segments.of_class[cls][segment]
                        end = start + slots.shape[-1]
                        pending.mapped[0].append(self.entries(cls, row, start, end))
                        pending.mapped[1].append(slots)
                        start = end
                case StoreSegment(row, start, end, segment, cls):
                    of_row = self.entries(cls, row, start, end)
                    self.segments.of_class[cls][segment] = torch.empty_like(of_row)
                    pending.stored[0].append(self.segments.of_class[cls][segment])
                    pending.stored[1].append(of_row)
                    pending.segments.add(segment)
                    pending.ends[row] = max(end, pending.ends.get(row, 0))
                case FreeRange(row, start, end, cls):
                    pending.freed.append(self.entries(cls, row, start, end))
                case FreeSegment():
                    pending.freed += self.segments.cut(*edit)
                case FreePart(cls, segment):
                    pending.freed.append(self.segments.of_class[cls].pop(segment))
                case SplitSegment(segment, _, head):
                    self.segments.split(*edit)
                    if segment in pending.segments:
                        pending.segments.add(head)
                case _:
                    self._change(edit, pending.freed, kept)
        return self._flush(pending, allocated)

    def _flush(self, pending: _Pending, allocated: torch.Tensor | None) -> torch.Tensor | None:
        """Does what is pending. Returns the slots of the last Alloc, which are `allocated` if there is none."""
        if freed := [slots.flatten() for slots in pending.freed]:
            self.allocator.free(freed[0] if len(freed) == 1 else torch.cat(freed))
        if pending.mapped[0]:
            torch._foreach_copy_(*pending.mapped)
        if pending.allocs[0]:
            slots, first = self._grow(pending.allocs), pending.allocs[-1][0]
            if not first.cls:
                end = sum(first.counts)
                allocated = slots[end - pending.num_last : end]
        for taken in pending.reuses:  # the newest entries of rows get the slots of those that have passed
            step = self._reused[taken.cls] = self._moved_on(self._reused.get(taken.cls), [taken])
            where = self.table.all_rows, step.rows_on_device, step.positions
            self._reuse_entries(*where, self._distances[taken.cls])
        if pending.stored[0]:
            torch._foreach_copy_(*pending.stored)
        return allocated

    def _change(self, edit: Edit, freed: list[torch.Tensor], kept: Iterator[torch.Tensor]) -> None:
        """Applies an edit that changes rows or segments at once. What it frees is added to `freed`."""
        match edit:
            case MergeSegments():
                self.segments.merge(*edit)
            case ForgetSegment(segment):
                self.segments.forget(segment)
            case CopyRow(row, source, end):
                self.table.groups[:, row, :end] = self.table.groups[:, source, :end]
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
                freed.append(self._keep(edit, next(kept)))

    def entries(self, cls: int, row: int, start: int, end: int) -> torch.Tensor:
        """Returns the slots of entries [start, end) of `row` in a class, as segments have them: a view."""
        if len(self.table.groups) == 1:
            return self.table.slots(row, start, end)
        return self.table.groups[self._groups[cls], row, start:end]

    def digest(self) -> bytes:
        """Returns a digest of which slots are free and of the token table's rows; synchronises."""
        digest = blake2b(digest_size=16)
        tensors = [self.allocator.mem_state, self.table.groups[:, 1:].contiguous()]  # row 0 is padding
        if self.states is not None:
            tensors += [self.states.table, torch.tensor(sorted(self.states.free))]
        for tensor in tensors:
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
            for row in holdings.rows:
                if len(row.holds) != self._num_classes + (self.states is not None):
                    raise CheckFailed(
                        f"row {row.row} is counted in {len(row.holds)} classes of layers, and the memory has "
                        f"{self._num_classes}: make the ledger for the spec's groups"
                    )
            self.segments.check(holdings)
            self._check_dropped(holdings.rows)
            self._check_shared(holdings.rows)
            if self.states is not None:
                self.states.owners(holdings)
        owners = self.allocator.mem_state.cpu().numpy().astype(np.int64)  # 1 where free
        owners[0] += 1  # padding is its own owner
        if held := [slots for slots, _ in self._held(holdings or Holdings([], {}))]:
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
        """Raises CheckFailed unless each row has the slots of its segments, and of their parts."""
        for row in rows:
            for cls, (segments, start, end, _) in enumerate(row.holds[: self._num_classes]):
                have = self.entries(cls, row.row, start, end)
                if segments and not torch.equal(have, want := self.segments.slots(cls, segments)):
                    raise CheckFailed(
                        f"entries {start} to {end} of row {row.row} in class {cls} are slots {have.tolist()}, "
                        f"and {want.tolist()} in the segments {list(segments)}"
                    )

    def labels(self, holdings: Holdings) -> np.ndarray:
        """Returns the label of each slot from 1 on (`MemoryMap`), int32 `[capacity]`. Synchronises."""
        found = torch.zeros(self.capacity + 1, dtype=torch.int32, device=self.device)
        if held := self._held(holdings):
            slots = torch.cat([some for some, _ in held]).long()
            counts = np.array([len(some) for some, _ in held])
            (values,) = upload(
                [np.repeat(np.array([label for _, label in held], np.int32), counts)], self.device
            )
            found.index_copy_(0, slots, values)
        return found[1:].cpu().numpy()

    def _held(self, holdings: Holdings) -> list[tuple[torch.Tensor, int]]:
        """Returns the slots of each segment, and of what each row alone has, in each class, with their labels
        (`MemoryMap`)."""
        labels, own = slot_labels(holdings)
        held = [
            (slots.flatten(), labels[cls].get(segment, CACHED) if cls < len(labels) else CACHED)
            for cls, segments in enumerate(self.segments.of_class)
            for segment, slots in segments.items()
        ]
        own = [where for where in own if where[0] < self._num_classes]
        return held + [(self.entries(*where).flatten(), OWN + where[1]) for where in own]

    def _divide(self, edit: AllocPart, allocs: list[_Taken], reuses: list[_Taken]) -> None:
        """Adds what the tokens of an edit take in each of its classes to the allocations, or to the reuses."""
        classes, *columns, reused = edit
        for cls in range(len(self._groups)):
            bit = 1 << cls
            if not classes & bit:
                continue
            again = [bits & bit for bits in reused]
            for taken, chosen in ((reuses, again), (allocs, [not one for one in again])):
                if any(chosen):
                    rows, starts, counts = (tuple(compress(column, chosen)) for column in columns)
                    taken.append(_Taken(cls, rows, starts, counts))

    def _grow(self, allocs: Sequence[Sequence[_Taken]]) -> torch.Tensor:
        """Allocates the slots of each of these lists. Returns those of the last."""
        steps = [all(edit.counts.count(1) == len(edit.rows) for edit in together) for together in allocs]
        if steps == [True]:  # of a decode step, which uploads nothing if it follows the one before
            step = self._step = self._moved_on(self._step, allocs[0])
            places = [TableEntries(self.table.all_rows, step.positions, step.rows_on_device)]
        else:
            places = self._prompt_entries(allocs)
        for is_step, where in zip(steps, places, strict=True):
            # More than one token each means prompts, which are read fastest from adjacent slots.
            slots = self.allocator.alloc(len(where.positions), contiguous=not is_step, entries=where)
        return slots

    def _prompt_entries(self, allocs: Sequence[Sequence[_Taken]]) -> list[TableEntries]:
        """Returns where the slots of each of these lists go, group by group, in one upload."""
        table, arrays = self.table, []
        for together in allocs:
            places = []
            for cls, *where in together:
                of_row, groups = table.entries(*where), self._groups[cls]
                places += [
                    of_row + group * table.req_to_token.numel() for group in range(groups.start, groups.stop)
                ]
            arrays.append(np.concatenate(places))
        return [TableEntries(table.all_rows, entries) for entries in upload(arrays, self.device)]

    def _moved_on(self, step: _Step | None, taken: Sequence[_Taken]) -> _Step:
        """Returns the step that takes these entries, one of each row. It is uploaded unless it follows
        `step`."""
        rows, starts = [(one.cls, one.rows) for one in taken], [one.starts for one in taken]
        if step is not None and step.rows == rows and step.next_starts == starts:
            if (last := max(map(max, starts))) >= self.table.max_entries:
                raise IndexError(f"position {last}, in rows of {self.table.max_entries} entries")
            step.positions.add_(1)
        else:
            rows_there, positions = [], []
            for one in taken:
                self.table.entries(one.rows, one.starts, one.counts)  # raises for places outside the table
                groups = self._groups[one.cls]
                # The rows of all groups follow one another.
                firsts = np.arange(groups.start, groups.stop)[:, None] * (self.table.max_sequences + 1)
                rows_there.append((firsts + np.array(one.rows, dtype=np.int64)).ravel())
                positions.append(np.tile(np.array(one.starts, dtype=np.int64), len(firsts)))
            there = upload([np.concatenate(rows_there), np.concatenate(positions)], self.device)
            step = _Step(rows, starts, *there)
        step.next_starts = [tuple(map((1).__add__, begin)) for begin in starts]
        return step

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
