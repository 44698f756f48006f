"""The map of the pool: what every slot is used for, as a drawing and in numbers, from an array of labels."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .holdings import Holdings

FREE, CACHED, SHARED, OWN = range(4)  # a slot's label; OWN + row: only that row holds it

_MARKS = "·░█"  # free, cached, shared
_OWNERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Counts(NamedTuple):
    """How many slots of a pool are free, cached, shared and private."""

    capacity: int
    num_free: int
    num_cached: int  # held by no sequence, kept because a prompt may hit them
    num_shared: int  # held by several sequences
    num_own: int  # held by one sequence
    longest_free_run: int  # the most free slots in a row


@dataclass(frozen=True)
class Owner:
    """A row that alone holds `num_tokens` slots. `request_id`: its request; empty if that is not known, or if
    the request has ended and a step in flight still uses the row."""

    row: int
    num_tokens: int
    request_id: str = ""


@dataclass(frozen=True)
class MemoryMap:
    """What each slot of a pool is used for.

    labels: int32 `[capacity]`, of slots 1 and up: FREE, CACHED (held by no sequence, may be hit), SHARED (held
    by several sequences), or OWN + row (held by one).
    """

    labels: np.ndarray

    @cached_property
    def counts(self) -> Counts:
        """How many slots have each label."""
        free, cached, shared = (int(count) for count in self._label_counts[:OWN])
        own = len(self.labels) - free - cached - shared
        edges = np.flatnonzero(np.diff(self.labels == FREE, prepend=False, append=False))
        longest = int((edges[1::2] - edges[::2]).max(initial=0))
        return Counts(len(self.labels), free, cached, shared, own, longest)

    @cached_property
    def owners(self) -> list[Owner]:
        """The rows that hold slots alone, the one with the most first."""
        own = self._label_counts[OWN:]
        return in_order([Owner(int(row), int(own[row])) for row in np.flatnonzero(own)])

    def draw(self, width: int = 80, height: int = 16, max_owners: int = 10) -> str:
        """Draws the pool in at most `height` lines of `width` marks, followed by a legend of three lines and a
        line for each of the `max_owners` rows that hold the most slots alone."""
        slots_per_mark, lines = marks(self.labels, width, height)
        return "\n".join(
            [*lines, *legend(self.counts, slots_per_mark), *owner_lines(self.owners, max_owners)]
        )

    @cached_property
    def _label_counts(self) -> np.ndarray:
        return np.bincount(self.labels, minlength=OWN)


def owners(holdings: Holdings, widths: Sequence[int]) -> list[Owner]:
    """Returns the rows that hold slots alone, the one with the most first. `widths`: the slots of a token in
    each class."""
    segments, own_entries = slot_labels(holdings)
    own = Counter[int]()
    for cls, row, start, end in own_entries:
        own[row] += (end - start) * widths[cls] if cls < len(widths) else 0  # a state takes no slot
    for cls, of_class in enumerate(segments[: len(widths)]):
        for segment, label in of_class.items():
            if label >= OWN:
                own[label - OWN] += holdings.lengths(cls)[segment] * widths[cls]
    return in_order([Owner(row, count) for row, count in own.items() if count])


def slot_labels(holdings: Holdings) -> tuple[list[dict[int, int]], list[tuple[int, int, int, int]]]:
    """Returns the labels of held segments by class: SHARED, or OWN + the row, where that alone holds it.
    Returns the entries that a row alone holds, too, by class, row, start and end."""
    segments: list[dict[int, int]] = [{} for _ in (holdings.segments, *holdings.parts)]
    own: list[tuple[int, int, int, int]] = []
    for row in holdings.rows:
        for cls, (held, _, start, end) in enumerate(row.holds):
            for segment in held:
                segments[cls][segment] = SHARED if segment in segments[cls] else OWN + row.row
            if start < end:
                own.append((cls, row.row, start, end))
    return segments, own


def in_order(owners: list[Owner]) -> list[Owner]:
    """Returns `owners` by their number of tokens, the most first; of equals, the lowest row first."""
    return sorted(owners, key=lambda owner: (-owner.num_tokens, owner.row))


def marks(labels: np.ndarray, width: int, height: int) -> tuple[int, list[str]]:
    """Draws labels, int32 `[n]`, as at most `height` lines of `width` marks.

    Returns how many labels a mark stands for (it shows the most frequent of them), and the lines.
    """
    per_mark = -(-len(labels) // (width * height))
    drawn = []
    for start in range(0, len(labels), per_mark):
        found, counts = np.unique(labels[start : start + per_mark], return_counts=True)
        drawn.append(_mark(int(found[counts.argmax()])))
    text = "".join(drawn)
    return per_mark, [text[start : start + width] for start in range(0, len(text), width)]


def legend(counts: Counts, slots_per_mark: int) -> list[str]:
    """Returns three lines that tell what the marks of a drawing mean and how many slots there are of each
    kind."""
    slots = "one slot" if slots_per_mark == 1 else f"{slots_per_mark:,} slots"
    scattered = 1 - counts.longest_free_run / counts.num_free if counts.num_free else 0.0
    return [
        f"a mark is {slots}, of {counts.capacity:,}",
        f"{_MARKS[FREE]} free {counts.num_free:,}   {_MARKS[CACHED]} cached {counts.num_cached:,}   "
        f"{_MARKS[SHARED]} shared {counts.num_shared:,}   0-Z one sequence's own {counts.num_own:,}",
        f"longest free run {counts.longest_free_run:,}; {scattered:.0%} of the free are not in it",
    ]


def owner_lines(owners: Sequence[Owner], most: int) -> list[str]:
    """Returns a heading, a line for each of the first `most` owners, and a line with the number of the others.

    Returns no line if there is no owner or `most` is 0.
    """
    if not owners or not most:
        return []
    lines = [f"mark{'row':>6}{'its own':>12}{'   request' if any(one.request_id for one in owners) else ''}"]
    for one in owners[:most]:
        line = f"{_mark(OWN + one.row):>4}{one.row:>6}{one.num_tokens:>12,}   {one.request_id}"
        lines.append(line.rstrip())
    if len(owners) > most:
        lines.append(f"… and {len(owners) - most:,} more")
    return lines


def _mark(label: int) -> str:
    return _MARKS[label] if label < OWN else _OWNERS[(label - OWN) % len(_OWNERS)]
