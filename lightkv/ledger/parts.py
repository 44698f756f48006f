"""What segments hold in the classes of layers that do not see everything: of each segment, its last tokens.

    segment   ├──────────────── 40 tokens ───────────────┤      in the class that sees everything
    part                              ├──── 12 tokens ───┤      in a class with a window

A part is always the end of its segment, since what a window needs ends where a prompt or an answer ends, and
each such place is the end of a segment (`tails.py`). A row holds a part for as long as its window reaches it; a
part that no row holds is cached, whether or not its segment is held, and can be evicted by itself.
"""

import heapq
from collections.abc import Collection
from collections.abc import Sequence as Seq

from lightkv.errors import CheckFailed
from lightkv.layer_groups import Lifetime

from .prefix_tree import NO_PARTS, TOKEN_BYTES, Part, Segment


class Parts:
    """The parts of all segments, and which of them is evicted next."""

    def __init__(self) -> None:
        self._idle: list[tuple[int, int, Part]] = []  # a heap; see `oldest`
        self._protected: list[tuple[int, int, Part]] = []  # those that sessions protect, the same
        # Those that no confirmed step has computed yet, and some that are gone.
        self._pending: list[Part] = []
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

    def note_pending(self, part: Part, step: int) -> None:
        """Notes that `step`, which may still fail, computes tokens of a part."""
        if part.pending < 0:
            self._pending.append(part)
        part.pending = max(part.pending, step)

    def confirm(self, step: int) -> None:
        """Marks as computed what `step` and those before it compute."""
        waiting = []
        for part in self._pending:
            if part.pending > step:
                waiting.append(part)
            else:
                part.pending = -1
        self._pending = waiting

    def pending(self) -> list[Part]:
        """Returns the parts with tokens that no confirmed step has computed."""
        return [part for part in self._pending if part.segment.parts.get(part.cls) is part]

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
            if part.pending >= 0:
                self.note_pending(new, part.pending)
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
            part = segment.parts[cls]
            part.length += above.length
            if above.pending >= 0:
                self.note_pending(part, above.pending)
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


def reachable(lifetimes: Seq[Lifetime], path: list[Segment], matched: int) -> tuple[list[Segment], int, int]:
    """Returns as much of `path`, from the root on, as a sequence can hit: up to the last token after which
    every class has what the next one sees. `matched`: bytes of the last segment, as in `PrefixTree.find`, whose
    answer this replaces. Returns how many tokens the whole path matched, too."""
    end = sum([segment.length for segment in path])
    in_tree = found = end - path[-1].length + matched // TOKEN_BYTES
    of_class = [ranges_of(path, cls) for cls in range(1, len(lifetimes) + 1)]
    before = -1
    while found != before:
        before = found
        for lifetime, ranges in zip(lifetimes, of_class, strict=True):
            found = last_reachable(lifetime, ranges, found)
    while path and end - path[-1].length >= found:
        end -= path.pop().length
    return path, (found - end + path[-1].length) * TOKEN_BYTES if path else 0, in_tree


def ranges_of(path: Seq[Segment], cls: int) -> list[tuple[int, int]]:
    """Returns the ranges of tokens that a class has of a path, which is given from the root on; ascending."""
    ranges: list[tuple[int, int]] = []
    end = 0
    for segment in path:
        start, end = end, end + segment.length
        part = segment.parts.get(cls)
        if part is None:
            continue
        first = end - part.length
        if ranges and ranges[-1][1] == first == start:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((first, end))
    return ranges


def last_reachable(lifetime: Lifetime, ranges: Seq[tuple[int, int]], limit: int) -> int:
    """Returns the highest number of tokens, at most `limit`, after which a token sees only what the `ranges`
    have."""
    best = lifetime.boundary(limit)
    for first, end in reversed(ranges):
        at = min(end, limit)
        if at <= best:
            break
        if lifetime.first_seen(at) >= first:
            return at
    return best


def is_turn_off(segment: Segment) -> bool:
    """Returns whether several prompts diverge at the segment's end. A child counts once a sequence or another
    child goes on from it, so the rest of an answer whose last tokens the next prompt rewrites does not."""
    used = [one for one in segment.children.values() if one.holders or one.credit or one.children]
    return len(used) > 1
