"""The ledger's verbs for sequences that are rings: a row gets slots until it is full, and then writes to them
again. `TokenLedger.extend` and `shrink` document them."""

from collections.abc import Sequence as Seq

from lightkv.edits import Alloc
from lightkv.errors import CheckFailed

from .sequence import Sequence


def plan_extend(sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
    """Returns the allocation of the slots that these sequences, rings or not, still lack. Raises ValueError for
    more tokens than a ring takes at once."""
    rows, starts, missing = [], [], []
    for sequence, count in zip(sequences, counts, strict=True):
        needed = count
        if (ring := sequence.ring) is not None:
            if count > (room := ring.room(sequence.position)):
                raise ValueError(
                    f"{count} tokens at position {sequence.position} of {ring}, which takes {room} at once, as "
                    "the others would overwrite what the first one sees; compute them in several steps"
                )
            needed = min(count, ring.capacity - sequence.length)
        if needed:
            rows.append(sequence.row)
            starts.append(sequence.length)
            missing.append(needed)
    return Alloc(tuple(rows), tuple(starts), tuple(missing))


def advance(sequences: Seq[Sequence], counts: Seq[int]) -> None:
    """Moves the sequences on by tokens whose slots are allocated."""
    for sequence, count in zip(sequences, counts, strict=True):
        added = count
        if sequence.ring is not None:
            added = min(count, sequence.ring.capacity - sequence.length)
        sequence.length += added
        sequence.dropped += count - added
        if sequence.ring is not None:
            # These are not derived from `position`, so that `check` can compare them with it.
            sequence.ring_end += max(count - sequence.ring_undone, 0)
            sequence.ring_undone = max(sequence.ring_undone - count, 0)


def may_shrink(sequence: Sequence, count: int) -> bool:
    """Returns whether a ring without its last `count` tokens still holds all that its next token sees. Tokens
    that were undone before have overwritten others, too."""
    position, ring = sequence.position, sequence.ring
    assert ring is not None
    if not 0 <= count <= position - sequence.shared:
        return False
    return not count or ring.dropped(position - count) == ring.dropped(sequence.ring_end - 1)


def check(sequence: Sequence) -> None:
    """Raises CheckFailed for a ring whose numbers do not fit each other."""
    ring, position, end, undone = sequence.ring, sequence.position, sequence.ring_end, sequence.ring_undone
    assert ring is not None
    if sequence.length != min(position, ring.capacity) or sequence.shared > ring.sinks:
        raise CheckFailed(f"{sequence} has {sequence.length} slots of {ring}, at position {position}")
    # It was undone by no more tokens than `may_shrink` allows.
    may_be_undone = undone > 0 and ring.dropped(position) == ring.dropped(end - 1)
    if position + undone != end or (undone and not may_be_undone):
        raise CheckFailed(
            f"{sequence} of {ring} is at position {position}, and {undone} tokens of {end} are undone"
        )


def shrink(sequence: Sequence, count: int) -> int:
    """Moves a ring back by `count` tokens. Returns how many of its last entries are to be freed."""
    ring, position, length = sequence.ring, sequence.position - count, sequence.length
    assert ring is not None
    sequence.length = min(position, ring.capacity)
    sequence.dropped = position - sequence.length
    sequence.ring_undone += count
    return length - sequence.length
