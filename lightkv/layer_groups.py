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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from .counts import checked_count

FULL_WEIGHT = 4  # of a token that stays, beside one that a window passes, where waste is weighed
GROUP_PRICE = 0.005  # of the bytes of a token, for each group
SLACK = 64  # positions that a sequence can go back, and that a prompt may diverge before a tail's end


@dataclass(frozen=True)
class Lifetime:
    """How long a layer's tokens are seen: always, by the next `size - 1` tokens (a window), or by those of
    their chunk of `size`. `size` is 0 for "full"."""

    sees: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    def check(self) -> None:
        """Raises ValueError or TypeError unless layers can see so."""
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

    def __str__(self) -> str:
        sees = {
            "full": "all tokens",
            "window": f"the last {self.lifetime.size:,} tokens",
            "chunk": f"chunks of {self.lifetime.size:,} tokens",
        }
        slots = "1 slot" if self.num_groups == 1 else f"{self.num_groups} slots"
        num_layers = sum(map(len, self.groups))
        layers = "1 layer sees" if num_layers == 1 else f"{num_layers} layers see"
        return f"{layers} {sees[self.lifetime.sees]} ({slots} a token)"


@dataclass(frozen=True)
class LayerGroups:
    """The classes of a model, the full one first. `num_lanes`: the layers that a slot has room for."""

    classes: tuple[LayerClass, ...]
    num_lanes: int

    @classmethod
    def of(cls, lifetimes: Sequence[Lifetime]) -> "LayerGroups":
        """Cuts layers, whose rows have equal bytes, into groups.

        Layers of one lifetime stay together, and so do all layers where none sees everything, since nothing
        would then limit what the prefix tree knows. Otherwise the cut is that of the least waste: the lanes
        that have no layer in a group. Tokens of layers that see everything count `FULL_WEIGHT` times, since
        they stay, and each group costs a little, for its table and its slots.
        """
        layers: dict[Lifetime, list[int]] = {}
        for layer, lifetime in enumerate(lifetimes):
            layers.setdefault(lifetime, []).append(layer)
        if len(layers) == 1 or FULL not in layers:
            return one_group(len(lifetimes))
        order = sorted(layers, key=lambda one: (one != FULL, one.sees, one.size))
        cuts = []
        for num_lanes in range(1, max(map(len, layers.values())) + 1):
            classes = [LayerClass(one, _batched(layers[one], num_lanes)) for one in order]
            cuts.append(cls(tuple(classes), num_lanes))
        return min(cuts, key=lambda cut: cut.waste(FULL_WEIGHT) + GROUP_PRICE * cut.num_groups)

    def waste(self, full_weight: int = 1) -> float:
        """Returns how many lanes of a token's slots have no layer, as a share of those that have one.
        `full_weight`: how many times the class counts that sees everything."""
        taken = needed = 0
        for one in self.classes:
            weight = full_weight if one.lifetime == FULL else 1
            taken += weight * one.num_groups * self.num_lanes
            needed += weight * sum(map(len, one.groups))
        return taken / needed - 1

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each group, of all classes in their order."""
        return tuple([group for one in self.classes for group in one.groups])

    @property
    def places(self) -> list[tuple[int, int]]:
        """The group and the lane of each layer."""
        found = {
            layer: (number, lane)
            for number, group in enumerate(self.groups)
            for lane, layer in enumerate(group)
        }
        return [found[layer] for layer in range(len(found))]

    @property
    def is_uniform(self) -> bool:
        """Whether each token takes one slot for as long as it is held."""
        return self.num_groups == 1

    @property
    def num_groups(self) -> int:
        """Groups of all classes: the slots of a token that every layer still sees."""
        return sum(one.num_groups for one in self.classes)

    @property
    def widths(self) -> tuple[int, ...]:
        """The slots that a token takes in each class."""
        return tuple([one.num_groups for one in self.classes])

    @property
    def slices(self) -> list[slice]:
        """Where the groups of each class are, of the groups of all classes."""
        ends = list(accumulate(self.widths))
        return [slice(end - width, end) for end, width in zip(ends, self.widths, strict=True)]

    def slots(self, length: int) -> int:
        """Returns how many slots a sequence of `length` tokens keeps that shares none."""
        return sum(one.num_groups * (length - one.lifetime.first_kept(length)) for one in self.classes)


def one_group(num_layers: int) -> LayerGroups:
    """Returns the one group of a model whose layers hold every token for as long as any of them does."""
    return LayerGroups((LayerClass(FULL, (tuple(range(num_layers)),)),), num_layers)


def _batched(layers: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(layers[start : start + size]) for start in range(0, len(layers), size)])


ONE_GROUP = one_group(1)  # for counting where no layers are known
