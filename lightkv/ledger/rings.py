"""Sequences that are rings: a row gets slots until it is full, and then writes to them again."""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightkv.errors import CheckFailed
from lightkv.triton_kernels.layout.ring import Ring

from .segments import TOKEN_BYTES, Segment
from .sequence import Sequence


class RingSequence(Sequence):
    """A sequence whose row is a ring: once `length` is `ring.capacity`, new tokens take the slots of old ones,
    and `dropped` grows instead. At most its sinks are shared, since the others' slots are written again.

    dropped: positions that it has passed and no longer holds. end: the highest `position` that it ever had,
    also by steps that were undone (`shrink`), which have written to its slots. undone: how many of these tokens
    were undone and not computed again, so that `position + undone == end`.
    """

    __slots__ = ("dropped", "end", "ring", "undone")

    slot_per_token: ClassVar[bool] = False

    dropped: int
    ring: Ring

    def __init__(self, prompt: bytes, ring: Ring) -> None:
        if not isinstance(ring, Ring):
            raise TypeError(f"ring is {ring!r} ({type(ring).__name__}); give a Ring")
        super().__init__(prompt)
        self.ring = ring
        self.dropped = self.end = self.undone = 0

    @property
    def is_whole(self) -> bool:
        return self.end <= self.ring.capacity  # no token ever took the slot of another one

    @property
    def lookup_key(self) -> bytes:
        return self.prompt[: (self.ring.sinks + 1) * TOKEN_BYTES]

    def enter(self, row: int, root: Segment, node: Segment, shared: int) -> None:
        super().enter(row, root, node, shared)
        self.end = shared

    def slots_needed(self, count: int) -> int:
        """Returns how many slots it lacks for its next `count` tokens. Raises ValueError for more tokens than a
        ring takes at once."""
        if count > (room := self.ring.room(self.position)):
            raise ValueError(
                f"{count} tokens at position {self.position} of {self.ring}, which takes {room} at once, as "
                "the others would overwrite what the first one sees; compute them in several steps"
            )
        return min(count, self.ring.capacity - self.length)

    def advance(self, count: int) -> None:
        added = min(count, self.ring.capacity - self.length)
        self.length += added
        self.dropped += count - added
        # These are not derived from `position`, so that `check` can compare them with it.
        self.end += max(count - self.undone, 0)
        self.undone = max(self.undone - count, 0)

    def require_shrink(self, count: int) -> None:
        """Raises ValueError unless the ring without its last `count` tokens still holds all that its next token
        sees. Tokens that were undone before have overwritten others, too."""
        ring, position = self.ring, self.position
        if not 0 <= count <= position - self.shared or (
            count and ring.dropped(position - count) != ring.dropped(self.end - 1)
        ):
            raise ValueError(f"{self} cannot go {count} tokens back: others took their entries")

    def shrink(self, count: int) -> int:
        position, length = self.position - count, self.length
        self.length = min(position, self.ring.capacity)
        self.dropped = position - self.length
        self.undone += count
        return length - self.length

    def require_branching(self) -> None:
        raise ValueError(
            f"{self} is a ring, whose slots are written again: it is extended, published (its sinks) and "
            "closed, and no more. Open another one for the same text, or a sequence without a ring"
        )

    @property
    def num_publishable(self) -> int:
        return 0 if self.dropped else min(super().num_publishable, self.ring.sinks)

    @property
    def is_cacheable(self) -> bool:
        return self.is_whole

    def entries_at(self, positions: Any) -> Any:
        return self.ring.entries(positions)

    def positions_of(self, known: Any) -> Any:
        # No edit tells of tokens that a ring drops, so `known` are its entries.
        return self.ring.positions(known, self.position)

    def check(self, sequences: Mapping[int, Sequence]) -> None:
        super().check(sequences)
        ring, position, end, undone = self.ring, self.position, self.end, self.undone
        if self.length != min(position, ring.capacity) or self.shared > ring.sinks:
            raise CheckFailed(f"{self} has {self.length} slots of {ring}, at position {position}")
        # It was undone by no more tokens than `require_shrink` allows.
        may_be_undone = undone > 0 and ring.dropped(position) == ring.dropped(end - 1)
        if position + undone != end or (undone and not may_be_undone):
            raise CheckFailed(
                f"{self} of {ring} is at position {position}, and {undone} tokens of {end} are undone"
            )
