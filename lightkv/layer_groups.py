"""Which layers hold their tokens equally long, and how they share slots.

Layers whose tokens live and die together are a class: those that see everything, those that see a window, those
that see a chunk. A class is cut into groups of layers that share slots, each layer of a group in a lane of its
own, or beside others whose rows are narrower than the lane:

    slot      lane 0     lane 1     lane 2
    ├─ of group 0 (full):      layer 5    layer 11   layer 17
    ├─ of group 1 (window):    layer 0    layer 1    layer 2
    └─ of group 2 (window):    layer 3    layer 4    layer 6     …

    where rows of full layers have half the bytes of the others
    ├─ of group 0 (full):      5 and 11   17 and 23
    └─ of group 1 (window):    layer 0    layer 1

A token takes a slot in each group of each class that still sees it. This file needs no torch: the ledger counts
with it, and the memory makes its lanes of it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Literal

from lightkv.classes.all import All
from lightkv.classes.chunk import Chunk
from lightkv.classes.state import State
from lightkv.classes.window import Window

from .counts import checked_count

FULL_WEIGHT = 4  # of a token that stays, beside one that a window passes, where waste is weighed
GROUP_PRICE = 0.005  # of the bytes of a token, for each group
SLACK = 64  # positions that a sequence can go back, and that a prompt may diverge before a tail's end


@dataclass(frozen=True)
class Lifetime:
    """How long a layer's tokens are seen: always, by the next `size - 1` tokens (a window), or by those of
    their chunk of `size`. `size` is 0 for "full". Its `rule` is a file in `lightkv/classes`."""

    sees: Literal["full", "window", "chunk"] = "full"
    size: int = 0

    def check(self) -> None:
        """Raises ValueError or TypeError unless layers can see so."""
        if self.sees not in _RULES:
            raise ValueError(f"layers see {self.sees!r}; give 'full', 'window' or 'chunk'")
        checked_count("size", self.size, least=0 if self.sees == "full" else 1)
        if self.sees == "full" and self.size:
            raise ValueError(f"a layer that sees everything has no size; got {self.size}")

    @cached_property
    def rule(self) -> All | Window | Chunk:
        """What answers for layers of this lifetime."""
        return _RULES[self.sees](self.size, self.slack)

    @property
    def slack(self) -> int:
        """How many positions a sequence may go back and still have all that it then sees."""
        return min(SLACK, self.size)

    @property
    def distance(self) -> int:
        """How many entries before the newest one the entry is whose slot that one takes, if it takes one."""
        return self.size + self.slack

    def most_kept(self, length: int, chunk: int) -> int:
        """Returns the most tokens that a sequence of up to `length` holds at any time, whatever it hits and
        however its prompt is cut into chunks of up to `chunk` tokens: a tail is held as a whole until it has
        passed, beside a chunk."""
        return min(length, 2 * (self.size - 1 + self.slack) + chunk) if self.size else length


Rule = All | Window | Chunk | State
_RULES: dict[str, type[All | Window | Chunk]] = {"full": All, "window": Window, "chunk": Chunk}
FULL = Lifetime()
Lane = tuple[int, ...]  # the layers whose rows stand beside one another in a lane of a group


@dataclass(frozen=True)
class LayerClass:
    """The layers of one lifetime, by groups: the layers in each lane."""

    lifetime: Lifetime
    groups: tuple[tuple[Lane, ...], ...]

    @property
    def num_groups(self) -> int:
        """Slots that a token takes in this class."""
        return len(self.groups)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers of the class."""
        return tuple(chain.from_iterable(chain.from_iterable(self.groups)))

    def __str__(self) -> str:
        slots = "1 slot" if self.num_groups == 1 else f"{self.num_groups} slots"
        num_layers = len(self.layers)
        layers = "1 layer sees" if num_layers == 1 else f"{num_layers} layers see"
        return f"{layers} {self.lifetime.rule} ({slots} a token)"


@dataclass(frozen=True)
class LayerGroups:
    """The classes of a model, the full one first. `num_lanes`: the lanes of a slot."""

    classes: tuple[LayerClass, ...]
    num_lanes: int

    @classmethod
    def of(cls, lifetimes: Sequence[Lifetime], row_bytes: Sequence[int] | None = None) -> "LayerGroups":
        """Cuts layers into groups.

        `row_bytes`: the bytes of a token's row in each layer, 0 for a layer that holds none; None where they
        are equal. A lane is as wide as the widest row, and has as many narrower ones as fit.

        All layers stay in one group in three cases: they have one lifetime; none of them sees everything,
        because the prefix tree would then grow without a bound; or the slots of a token that stays would take
        as many bytes as the token takes in all layers. Otherwise the cut with the least waste is chosen. Waste
        is the bytes of lanes that belong to no layer. Tokens of layers that see everything count `FULL_WEIGHT`
        times, because they stay, and each group costs `GROUP_PRICE`, for its table and its slots.
        """
        rows = row_bytes or [1] * len(lifetimes)
        layers: dict[Lifetime, list[int]] = {}
        for layer, lifetime in enumerate(lifetimes):
            if rows[layer]:
                layers.setdefault(lifetime, []).append(layer)
        together = one_group(sorted(chain.from_iterable(layers.values())))
        if len(layers) == 1 or FULL not in layers:
            return together
        order = sorted(layers, key=lambda one: (one != FULL, one.sees, one.size))
        lanes = {one: _lanes(layers[one], rows) for one in order}
        cuts = []
        for num_lanes in range(1, max(map(len, lanes.values())) + 1):
            classes = [LayerClass(one, _batched(lanes[one], num_lanes)) for one in order]
            cuts.append(cls(tuple(classes), num_lanes))
        cut = min(cuts, key=lambda cut: cut.waste(row_bytes, FULL_WEIGHT) + GROUP_PRICE * cut.num_groups)
        stays = cut.widths[0] * sum(cut.lane_sizes(rows))
        return cut if stays < sum(rows) else together

    def lane_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Returns how wide each lane is, where the rows of layers have these sizes: as its widest group."""
        return [max(sum(sizes[layer] for layer in layers) for layers in lane) for lane in self.lanes]

    def waste(self, row_bytes: Sequence[int] | None = None, full_weight: int = 1) -> float:
        """Returns how many bytes of a token's slots no layer has, as a share of those that layers have.
        `row_bytes`: as for `of`. `full_weight`: how many times the class counts that sees everything."""
        rows = row_bytes or [1] * (1 + max(chain.from_iterable(one.layers for one in self.classes)))
        slot = sum(self.lane_sizes(rows))
        taken = needed = 0
        for one in self.classes:
            weight = full_weight if one.lifetime == FULL else 1
            taken += weight * one.num_groups * slot
            needed += weight * sum(rows[layer] for layer in one.layers)
        return taken / needed - 1

    @property
    def groups(self) -> tuple[tuple[Lane, ...], ...]:
        """The lanes of each group, of all classes in their order."""
        return tuple([group for one in self.classes for group in one.groups])

    @property
    def lanes(self) -> list[list[Lane]]:
        """For each lane, what the groups have in it that reach so far."""
        return [[group[lane] for group in self.groups if lane < len(group)] for lane in range(self.num_lanes)]

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """The group and the lane of each layer that holds K/V."""
        return {
            layer: (number, lane)
            for number, group in enumerate(self.groups)
            for lane, layers in enumerate(group)
            for layer in layers
        }

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
        return sum(one.num_groups * (length - one.lifetime.rule.first_kept(length)) for one in self.classes)

    def most_slots(self, length: int, chunk: int) -> int:
        """Returns the most slots that a sequence of up to `length` tokens holds at any time, whatever it hits
        and however its prompt is cut into chunks of up to `chunk` tokens."""
        return sum(one.num_groups * one.lifetime.most_kept(length, chunk) for one in self.classes)

    def longest(self, num_slots: int, chunk: int) -> int:
        """Returns how many tokens a sequence may have that runs alone in a pool of `num_slots`, in chunks of
        up to `chunk` tokens, whatever it hits: 0 where none fits."""
        if self.is_uniform:
            return num_slots
        lengths = range(1, num_slots + 1)
        return bisect_right(lengths, num_slots, key=lambda length: self.most_slots(length, chunk))

    def require_import(self, length: int, firsts: Sequence[int]) -> None:
        """Raises ValueError unless a token after `length` ones sees none before the positions `firsts`, one for
        each class after the first."""
        seen = [one.lifetime.rule.first_seen(length) for one in self.classes[1:]]
        if len(firsts) != len(seen) or any(not 0 <= a <= b for a, b in zip(firsts, seen, strict=True)):
            raise ValueError(
                f"K/V of {length} tokens that begins at {list(firsts)} in the classes of layers after the "
                f"first one; the next token sees those from {seen} on"
            )


def one_group(layers: Iterable[int]) -> LayerGroups:
    """Returns the one group of a model whose `layers` hold every token for as long as any of them does, each in
    a lane of its own."""
    lanes = tuple([(layer,) for layer in layers])
    return LayerGroups((LayerClass(FULL, (lanes,)),), len(lanes))


def _lanes(layers: Sequence[int], rows: Sequence[int]) -> list[Lane]:
    """Returns the lanes that layers take, each as wide as the widest of all rows: the layers with the widest
    rows first, and as many to a lane as fit."""
    room, lanes = 0, list[Lane]()
    for layer in sorted(layers, key=lambda layer: -rows[layer]):
        if rows[layer] <= room:
            lanes[-1] = (*lanes[-1], layer)
            room -= rows[layer]
        else:
            lanes.append((layer,))
            room = max(rows) - rows[layer]
    return lanes


def _batched(lanes: Sequence[Lane], size: int) -> tuple[tuple[Lane, ...], ...]:
    return tuple([tuple(lanes[start : start + size]) for start in range(0, len(lanes), size)])


ONE_GROUP = one_group([0])  # for counting where no layers are known
