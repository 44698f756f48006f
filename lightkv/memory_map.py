"""The map of the pool: what every slot is used for, as a drawing and in numbers.

Knows labels of slots; knows neither a tensor nor who made them.
"""

from dataclasses import dataclass

import numpy as np

FREE, CACHED, SHARED, OWN = range(4)  # labels of a slot; from OWN on they name the row that alone holds it

_MARKS = "·░█"  # free, cached, shared
_OWNERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


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
        return 1 - self.longest_free_run / self.num_free if self.num_free else 0.0

    def draw(self, width: int = 80, height: int = 16) -> str:
        """The pool in at most `height` lines of `width` marks, then a legend.

        A mark stands for as many slots as it takes, and shows what most of them are.
        """
        per_mark = -(-self.capacity // (width * height))
        marks = []
        for start in range(0, self.capacity, per_mark):
            labels, counts = np.unique(self.labels[start : start + per_mark], return_counts=True)
            marks.append(_mark(int(labels[counts.argmax()])))
        text = "".join(marks)
        lines = [text[start : start + width] for start in range(0, len(text), width)]
        slots = "one slot" if per_mark == 1 else f"{per_mark:,} slots"
        lines.append(f"a mark is {slots}, of {self.capacity:,}")
        lines.append(
            f"{_MARKS[FREE]} free {self.num_free:,}   {_MARKS[CACHED]} cached {self.num_cached:,}   "
            f"{_MARKS[SHARED]} shared {self.num_shared:,}   0-Z one sequence's own {self.num_own:,}"
        )
        lines.append(
            f"longest free run {self.longest_free_run:,}; {self.fragmentation:.0%} of the free are not in it"
        )
        return "\n".join(lines)


def _mark(label: int) -> str:
    return _MARKS[label] if label < OWN else _OWNERS[(label - OWN) % len(_OWNERS)]
