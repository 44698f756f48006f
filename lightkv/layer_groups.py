"""Which layers hold their tokens equally long, and how they share slots.

Layers whose tokens live and die together are a class: those that see everything, those that see a window, those
that see a chunk. A class is cut into groups of layers that share slots, each layer of a group in a lane of its
own:

    slot      lane 0     lane 1     lane 2
    ├─ of group 0 (full):      layer 5    layer 11   layer 17
    ├─ of group 1 (window):    layer 0    layer 1    layer 2
    └─ of group 2 (window):    layer 3    layer 4    layer 6     …

A token takes a slot in each group of each class that still sees it. This file needs no torch: the ledger counts
with it, and the memory makes its lanes of it.
"""

from dataclasses import dataclass
from typing import Literal

from .counts import checked_count

SLACK = 64  # positions that a sequence can go back, and that a prompt may diverge before a tail's end


@dataclass(frozen=True)
class Lifetime:
    """How long a layer's tokens are seen: always, by the next `size - 1` tokens (a window), or by those of
    their chunk of `size`. `size` is 0 for "full"."""

    sees: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    def __post_init__(self) -> None:
        if self.sees not in ("full", "window", "chunk"):
            raise ValueError(f"layers see {self.sees!r}; give 'full', 'window' or 'chunk'")
        checked_count("size", self.size, least=0 if self.sees == "full" else 1)
        if self.sees == "full" and self.size:
            raise ValueError(f"a layer that sees everything has no size; got {self.size}")

    @property
    def slack(self) -> int:
        """How many positions a sequence may go back and still have all that it then sees."""
        return min(SLACK, self.size)

    def first_seen(self, position: int) -> int:
        """Returns the first position that a query at `position` sees."""
        if self.sees == "full":
            return 0
        if self.sees == "window":
            return max(position - self.size + 1, 0)
        return position // self.size * self.size

    def boundary(self, limit: int) -> int:
        """Returns the highest position, at most `limit`, at which a query sees no earlier one."""
        if self.sees == "chunk":
            return limit // self.size * self.size
        return limit if self.size == 1 else 0

    def first_kept(self, length: int) -> int:
        """Returns the first position that a sequence of `length` tokens keeps before it grows."""
        return self.first_seen(max(length - self.slack, 0))

    def gone_at(self, position: int) -> int:
        """Returns the least length with which a sequence does not keep `position` any more. There is none
        where all is seen."""
        assert self.sees != "full"
        if self.sees == "window":
            return position + self.size + self.slack
        return (position // self.size + 1) * self.size + self.slack


FULL = Lifetime()


@dataclass(frozen=True)
class LayerClass:
    """The layers of one lifetime, by groups: the layers of each, in the order of the lanes."""

    lifetime: Lifetime
    groups: tuple[tuple[int, ...], ...]

    @property
    def num_groups(self) -> int:
        """Slots that a token takes in this class."""
        return len(self.groups)


@dataclass(frozen=True)
class LayerGroups:
    """The classes of a model, the full one first, and how many lanes a slot has."""

    classes: tuple[LayerClass, ...]
    num_lanes: int

    @property
    def is_uniform(self) -> bool:
        """Whether each token takes one slot for as long as it is held."""
        return self.num_groups == 1

    @property
    def num_groups(self) -> int:
        """Groups of all classes: the slots of a token that every layer still sees."""
        return sum(one.num_groups for one in self.classes)

    def slots(self, length: int) -> int:
        """Returns how many slots a sequence of `length` tokens keeps that shares none."""
        return sum(one.num_groups * (length - one.lifetime.first_kept(length)) for one in self.classes)


ONE_GROUP = LayerGroups((LayerClass(FULL, ((0,),)),), 1)  # what the ledger counts with for uniform models
