"""Brute force for the slots of requests: every step, entry by entry, as a ledger of layer groups does it."""

from collections.abc import Iterable

from lightkv.layer_groups import LayerClass, LayerGroups, Lifetime

Entries = dict[int, object]  # position → whatever holds it; the same object in two rows is the same slot


class Window:
    """What a row has in one class: runs that it holds as a whole, and its own entries."""

    def __init__(self, lifetime: Lifetime, runs: Iterable[Entries], own: Iterable[int]) -> None:
        self.lifetime = lifetime
        self.runs = list(runs)
        self.own: Entries = {position: object() for position in own}

    def entries(self) -> set[int]:
        """Returns the identities of its slots."""
        return {id(one) for run in [*self.runs, self.own] for one in run.values()}

    def settle(self, length: int, points: list[int]) -> None:
        """Keeps tails and gives back what the token at `length` and those soon before it do not see."""
        for point in points:
            if point <= length and (not self.runs or max(self.runs[-1]) + 1 < point):
                tail = {p: one for p, one in self.own.items() if self._sees(point, p) and p < point}
                self.runs = [run for run in self.runs if any(self._sees(point, p) for p in run)]
                self.own = {p: one for p, one in self.own.items() if p >= point}
                self.runs.append(tail)
        self.runs = [run for run in self.runs if any(self._sees(length, p) for p in run)]
        self.own = {p: one for p, one in self.own.items() if self._sees(length, p)}

    def _sees(self, length: int, position: int) -> bool:
        """Returns whether any token from `length`, less the slack, on sees the position."""
        after = max(length - self.lifetime.slack, 0)
        size = self.lifetime.size
        if self.lifetime.sees == "window":
            return position > after - size
        return position // size >= after // size


class Row:
    """One request: it computes its prompt up to `prompt`, then `decodes` tokens one by one."""

    def __init__(
        self,
        groups: LayerGroups,
        length: int,
        windows: list[Window],
        points: list[int],
        prompt: int,
        decodes: int,
    ) -> None:
        self.full: Entries = {position: object() for position in range(length)}
        self.groups = groups
        self.windows = windows
        self.points = points
        self.length = length
        self.prompt = prompt
        self.end = prompt + decodes
        self.freed_in: int | None = None

    def slots(self) -> list[set[int]]:
        """Returns the identities of its slots in each class."""
        return [{id(one) for one in self.full.values()}, *(window.entries() for window in self.windows)]

    def release(self) -> None:
        """Does what comes before it grows."""
        for window in self.windows:
            window.settle(self.length, self.points)
        self.points = [point for point in self.points if point > self.length]

    def take(self, count: int) -> None:
        """Takes the slots of its next tokens."""
        for position in range(self.length, self.length + count):
            self.full[position] = object()
            for window in self.windows:
                window.own[position] = object()
        self.length += count


def num_slots(groups: LayerGroups, rows: Iterable[Row]) -> int:
    """Returns the slots that these rows hold together; those that several hold count once."""
    found: list[set[int]] = [set() for _ in groups.classes]
    for row in rows:
        for into, slots in zip(found, row.slots(), strict=True):
            into |= slots
    return sum(len(slots) * one.num_groups for slots, one in zip(found, groups.classes, strict=True))


def simulate(
    groups: LayerGroups, rows: list[Row], lag: int, chunks: Iterable[dict[int, int]]
) -> tuple[list[int], list[int]]:
    """Runs all rows to their ends. In each step all that decode grow by a token, once what they no longer see
    is released; then the others by the step's chunk (`chunks`: index of a row → tokens; in order).

    Returns the most slots that are held at any time in each step, and those at its end.
    """
    alive, mosts, ends = list(rows), [], []
    chunks = iter(chunks)
    step = 0
    for row in rows:
        if row.length == row.end:
            row.freed_in = lag
    while True:
        alive = [row for row in alive if row.freed_in is None or row.freed_in > step]
        if not alive:
            return mosts, ends
        growing = [row for row in alive if row.freed_in is None and row.length >= row.prompt]
        chunk = next(chunks, {})
        for row in growing:
            row.release()
        for row in growing:
            row.take(1)
        most = num_slots(groups, alive)
        for i, count in chunk.items():
            row = rows[i]
            if row.freed_in is None and count:
                row.release()
                row.take(count)
                growing.append(row)
                most = max(most, num_slots(groups, alive))
        for row in growing:
            if row.length == row.end:
                row.freed_in = step + 1 + lag
        mosts.append(most)
        ends.append(num_slots(groups, alive))
        step += 1


def layers(*classes: tuple[Lifetime, int]) -> LayerGroups:
    """Returns layer groups of one layer each, from the lifetimes and numbers of groups of the classes."""
    found, layer = [], 0
    for lifetime, count in classes:
        found.append(LayerClass(lifetime, tuple(((layer + i,),) for i in range(count))))
        layer += count
    return LayerGroups(tuple(found), 1)
