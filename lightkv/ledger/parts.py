"""What segments hold in the classes of layers that do not see everything: of each segment, its last tokens.

    segment   ├──────────────── 40 tokens ───────────────┤      in the class that sees everything
    part                              ├──── 12 tokens ───┤      in a class with a window

A part is always the end of its segment, since what a window needs ends where a prompt or an answer ends, and
each such place is the end of a segment (`tails.py`). A row holds a part for as long as its window reaches it; a
part that no row holds is cached, whether or not its segment is held, and can be evicted by itself.
"""

import heapq
from collections.abc import Collection

from lightkv.errors import CheckFailed

from .prefix_tree import NO_PARTS, Segment


class Part:
    """The last `length` tokens of `segment` in class `cls`.

    width: slots that a token takes in the class. holders: the rows whose windows reach it. superseded: whether
    a later part of the same path serves what this one could, so that it is evicted before all others.
    """

    __slots__ = ("cls", "holders", "length", "number", "queued", "segment", "superseded", "width")

    def __init__(self, number: int, segment: Segment, cls: int, length: int, width: int) -> None:
        self.number = number  # which no other part of the ledger has
        self.segment = segment
        self.cls = cls
        self.length = length
        self.width = width
        self.holders: set[int] = set()
        self.superseded = False
        self.queued = False  # whether it is in a heap of `Parts`, perhaps with an older due

    @property
    def num_slots(self) -> int:
        """Slots of the part."""
        return self.length * self.width

    @property
    def due(self) -> int:
        """Its place in the order of eviction, among those of segments."""
        return 0 if self.superseded else self.segment.due

    @property
    def is_whole(self) -> bool:
        """Whether it has all tokens of its segment."""
        return self.length == self.segment.length

    def __repr__(self) -> str:
        return f"Part({self.length} tokens of {self.segment}, class {self.cls}, holders={len(self.holders)})"


class Parts:
    """The parts of all segments, and which of them is evicted next."""

    def __init__(self) -> None:
        self._idle: list[tuple[int, int, Part]] = []  # a heap; see `oldest`
        self._protected: list[tuple[int, int, Part]] = []  # those that sessions protect, the same
        self._next_number = 0

    def store(self, segment: Segment, cls: int, length: int, width: int) -> Part:
        """Makes the last `length` tokens of `segment` its part, which has no holder; or lengthens the part that
        it has."""
        if not segment.parts:
            segment.parts = {}
        part = segment.parts.get(cls)
        if part is None:
            part = segment.parts[cls] = Part(self._next_number, segment, cls, length, width)
            self._next_number += 1
        part.length = length
        return part

    def remove(self, part: Part) -> None:
        """Removes a part."""
        del part.segment.parts[part.cls]

    def note_idle(self, part: Part) -> None:
        """Puts a part that no row holds among those that can be evicted."""
        if not part.holders and not part.queued:
            part.queued = True
            heapq.heappush(self._idle, (part.due, part.number, part))

    def supersede(self, part: Part) -> None:
        """Has a part evicted before all that are not superseded."""
        if not part.superseded:
            part.superseded = True
            if not part.holders:
                part.queued = True  # perhaps a second time: what is out of date leaves at the top
                heapq.heappush(self._idle, (0, part.number, part))

    def oldest(self) -> Part | None:
        """Returns the part that is evicted first, of those that no session protects; None if there is none."""
        return self._first(self._idle, self._protected)

    def oldest_protected(self) -> Part | None:
        """Returns the part that is evicted first when only what sessions protect is left."""
        return self._first(self._protected, None)

    def _first(
        self, heap: list[tuple[int, int, Part]], protected: list[tuple[int, int, Part]] | None
    ) -> Part | None:
        while heap:
            due, _, part = heap[0]
            if part.holders or part.segment.parts.get(part.cls) is not part:
                heapq.heappop(heap)
                part.queued = False
            elif due != part.due:
                heapq.heapreplace(heap, (part.due, part.number, part))
            elif protected is not None and part.segment.protected and not part.superseded:
                heapq.heappush(protected, heapq.heappop(heap))
            else:
                return part
        return None

    # What becomes of parts when the tree's segments change

    def split(self, segment: Segment, head: Segment) -> None:
        """Divides the parts of a segment whose first tokens have become `head`."""
        for part in list(segment.parts.values()):
            if (above := part.length - segment.length) <= 0:
                continue
            part.length = segment.length
            new = self.store(head, part.cls, above, part.width)
            new.holders = part.holders.copy()
            new.superseded = part.superseded
            self.note_idle(new)

    def cut(self, segment: Segment, freed: int) -> int:
        """Takes the last `freed` tokens of an unheld segment out of its parts, before they leave the segment.
        Returns how many slots this frees."""
        slots = 0
        for part in list(segment.parts.values()):
            lost = min(part.length, freed)
            slots += lost * part.width
            part.length -= lost
            if not part.length:
                self.remove(part)
        return slots

    def can_join(self, head: Segment, segment: Segment) -> bool:
        """Returns whether the parts of a segment and of the one above it are each the end of both, joined, with
        the same holders."""
        for cls, above in head.parts.items():
            below = segment.parts.get(cls)
            if below is None or not below.is_whole or below.holders != above.holders:
                return False
        return True

    def join(self, head: Segment, segment: Segment) -> None:
        """Joins the parts of `head` to those of `segment`, before the tokens are joined."""
        for cls, above in head.parts.items():
            segment.parts[cls].length += above.length
        head.parts = NO_PARTS

    def check(self, segments: Collection[Segment]) -> None:
        """Raises CheckFailed unless the parts of these segments fit them, and those without holders can be
        evicted."""
        queued = {part for heap in (self._idle, self._protected) for *_, part in heap}
        for segment in segments:
            for cls, part in segment.parts.items():
                if part.segment is not segment or part.cls != cls:
                    raise CheckFailed(f"{part} is filed as class {cls} of {segment}")
                if not 1 <= part.length <= segment.length:
                    raise CheckFailed(f"{part} has {part.length} tokens of {segment.length}")
                if not part.holders and not segment.indexed:
                    raise CheckFailed(f"{part} of a segment that no look-up finds has no holder")
                if not part.holders and part not in queued:
                    raise CheckFailed(f"{part} has no holder and cannot be evicted")
