"""The map of the pool: what every slot is used for, as a drawing and in numbers.

Knows labels of slots, and what a ledger says of its segments; knows no tensor.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .ledger import TokenLedger

FREE, CACHED, SHARED, OWN = range(4)  # labels of a slot; from OWN on they name the row that alone holds it

_MARKS = "·░█"  # free, cached, shared
_OWNERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Counts(Protocol):
    """How many slots of a pool are used for what."""

    @property
    def capacity(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_shared(self) -> int: ...
    @property
    def num_own(self) -> int: ...
    @property
    def longest_free_run(self) -> int: ...


@dataclass(frozen=True)
class MemoryMap:
    """`labels`: int32 `[capacity]`, of slots 1 and up: FREE, CACHED (held by nobody, may be hit), SHARED (held
    by more than one sequence), or OWN + row."""

    labels: np.ndarray

    @property
    def capacity(self) -> int:
        """Slots of the pool."""
        return len(self.labels)

    @property
    def num_free(self) -> int:
        """Free slots."""
        return int((self.labels == FREE).sum())

    @property
    def num_cached(self) -> int:
        """Slots that nobody holds and that may be hit."""
        return int((self.labels == CACHED).sum())

    @property
    def num_shared(self) -> int:
        """Slots that more than one sequence holds."""
        return int((self.labels == SHARED).sum())

    @property
    def num_own(self) -> int:
        """Slots that one sequence alone holds."""
        return int((self.labels >= OWN).sum())

    @property
    def longest_free_run(self) -> int:
        """The most free slots in a row."""
        edges = np.flatnonzero(np.diff(self.labels == FREE, prepend=False, append=False))
        return int((edges[1::2] - edges[::2]).max(initial=0))

    @property
    def fragmentation(self) -> float:
        """Share of the free slots that are not in the longest free run: 0 is one run. Nothing here needs one
        run; prompts read faster from it."""
        return _fragmentation(self)

    def draw(self, width: int = 80, height: int = 16) -> str:
        """The pool in at most `height` lines of `width` marks, then a legend of three."""
        slots_per_mark, lines = marks(self.labels, width, height)
        return "\n".join([*lines, *legend(self, slots_per_mark)])


def segment_labels(ledger: TokenLedger) -> dict[int, int]:
    """By the id of a segment, for all that some sequence holds: SHARED, or OWN + row."""
    labels = {segment.id: OWN + row for row, segment in ledger.sole_segments()}
    return labels | dict.fromkeys((segment.id for segment in ledger.shared), SHARED)


def marks(labels: np.ndarray, width: int, height: int) -> tuple[int, list[str]]:
    """Labels, int32 `[n]`, as at most `height` lines of `width` marks; before them, how many labels a mark
    stands for. It shows what most of them are."""
    per_mark = -(-len(labels) // (width * height))
    drawn = []
    for start in range(0, len(labels), per_mark):
        found, counts = np.unique(labels[start : start + per_mark], return_counts=True)
        drawn.append(_mark(int(found[counts.argmax()])))
    text = "".join(drawn)
    return per_mark, [text[start : start + width] for start in range(0, len(text), width)]


def legend(counts: Counts, slots_per_mark: int) -> list[str]:
    """What the marks of a drawing mean, and how many slots are of each kind: three lines."""
    slots = "one slot" if slots_per_mark == 1 else f"{slots_per_mark:,} slots"
    return [
        f"a mark is {slots}, of {counts.capacity:,}",
        f"{_MARKS[FREE]} free {counts.num_free:,}   {_MARKS[CACHED]} cached {counts.num_cached:,}   "
        f"{_MARKS[SHARED]} shared {counts.num_shared:,}   0-Z one sequence's own {counts.num_own:,}",
        f"longest free run {counts.longest_free_run:,}; {_fragmentation(counts):.0%} of the free are not in it",
    ]


def _fragmentation(counts: Counts) -> float:
    return 1 - counts.longest_free_run / counts.num_free if counts.num_free else 0.0


def _mark(label: int) -> str:
    return _MARKS[label] if label < OWN else _OWNERS[(label - OWN) % len(_OWNERS)]
