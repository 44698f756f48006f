"""The device memory of a cache: which slots are free, whose they are, and the bytes; changed by edits alone.

Knows no token id, no tree and makes no decision: what is to be done was decided by the ledger, and comes as
edits. Whoever applies the same edits in the same order has the same memory.
"""

from collections.abc import Iterable

import numpy as np
import torch

from .allocator import TokenAllocator
from .edits import Drop, Edit, Give, Map, Split, Stash, Take
from .errors import CheckFailed
from .kv_pool import KVPool
from .kv_spec import KVSpec
from .staging import upload
from .token_table import TokenTable


class KVMemory:
    """An allocator, a token table, a pool, and the slots of every shared segment, on one device."""

    def __init__(
        self, spec: KVSpec, num_slots: int, max_sequences: int, max_entries: int, device: torch.device
    ) -> None:
        self.device = device
        self.allocator = TokenAllocator(num_slots, device)
        self.table = TokenTable(max_sequences, max_entries, device)
        self.pool = KVPool(spec, num_slots, device)
        self._segments: dict[int, torch.Tensor] = {}  # id → int32 slots, in the order of the tokens

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

    def apply(self, edits: Iterable[Edit]) -> None:
        """Do what the edits say, in order, without synchronising.

        Edits that a ledger emitted for this memory cannot fail. If one does (OutOfTokens, KeyError for a
        segment nobody stashed), those before it are done and those after it are not: ledger and memory have
        parted for good, and neither is to be used again.
        """
        freed: list[torch.Tensor] = []  # given back together; views, so before anything writes the table
        for edit in edits:
            if isinstance(edit, Give):
                freed.append(self.table.slots(edit.row, edit.start, edit.end))
                continue
            if isinstance(edit, Drop):
                freed.append(self._drop(edit))
                continue
            self._free(freed)
            match edit:
                case Take():
                    self._take(edit)
                case Map(row, start, segment):
                    slots = self._segments[segment]
                    self.table.slots(row, start, start + len(slots)).copy_(slots)
                case Stash(row, start, end, segment):
                    self._segments[segment] = self.table.slots(row, start, end).clone()
                case Split(segment, at, head):
                    slots = self._segments[segment]
                    self._segments[head], self._segments[segment] = slots[:at], slots[at:]
        self._free(freed)

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

    def _take(self, take: Take) -> None:
        total = sum(take.counts)
        # More than a token each means prompts, which are read best where they lie side by side.
        slots = self.allocator.alloc(total, contiguous=total > len(take.rows))
        (entries,) = upload([self.table.entries(take.rows, take.starts, take.counts)], self.device)
        self.table.write(entries, slots)

    def _drop(self, drop: Drop) -> torch.Tensor:
        slots = self._segments.pop(drop.segment)
        if drop.start:
            self._segments[drop.segment] = slots[: drop.start]
        return slots[drop.start :]

    def _free(self, freed: list[torch.Tensor]) -> None:
        if freed:
            self.allocator.free(freed[0] if len(freed) == 1 else torch.cat(freed))
            freed.clear()
