"""Rings: which entry of a row a position has, where a new token takes the entry of the oldest one."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any


@dataclass(frozen=True)
class Ring:
    """Rows of a fixed number of entries, in which a new token takes the entry of the oldest one.

        entry     0         sinks                              sinks + size
                  ├─ sinks ──┤ (p - sinks) % size = 0, 1, …, size - 1 ─┤

    Position p is at entry p where p < `sinks`, and these tokens are kept for ever. Any other p is at entry
    `sinks + (p - sinks) % size`. Once `sinks + size` tokens were written, tokens are dropped `stride` at a
    time, so that a query at p sees the sinks and the positions from `first_key(p)` on: the last `size - stride
    + 1` to `size`, itself included. A layer with a window of its own sees that window instead, and no sinks;
    `size` has to hold the windows of all queries of a step. Raises ValueError for numbers that make no ring.
    """

    sinks: int
    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        if not all(isinstance(number, Integral) for number in (self.sinks, self.size, self.stride)):
            raise TypeError(f"{self}: sinks, size and stride are counts of tokens; give integers")
        if self.sinks < 0 or not 1 <= self.stride <= self.size:
            raise ValueError(
                f"{self}: sinks have to be 0 or more, and the stride from 1 to the window's size"
            )

    @property
    def capacity(self) -> int:
        """Entries of a row: the most tokens that are held."""
        return self.sinks + self.size

    def dropped(self, position: int) -> int:
        """Returns how many tokens are dropped by the time the token at `position` is computed."""
        beyond = position - self.capacity
        return 0 if beyond < 0 else self.stride * (1 + beyond // self.stride)

    @property
    def least_held(self) -> int:
        """The fewest tokens after the sinks that a query sees once tokens were dropped, itself included."""
        return self.size - self.stride + 1

    def first_key(self, position: int) -> int:
        """Returns the first key after the sinks that a query at `position` sees."""
        return self.sinks + self.dropped(position)

    def room(self, position: int) -> int:
        """Returns how many tokens from `position` on may be written at once: none takes the entry of a token
        that one of them sees."""
        return self.capacity + self.dropped(position) - position

    def entries(self, positions: Any) -> Any:
        """Returns the entry of each position: integers, alone or in an array of numpy or a tensor."""
        beyond = positions - self.sinks
        return positions - (beyond - beyond % self.size) * (beyond >= 0)

    def positions(self, entries: Any, end: int) -> Any:
        """Returns the newest position at each entry before `end`, the position of the next token. `entries`:
        integers that are in use, alone or in an array of numpy or a tensor."""
        latest = end - 1 - (end - 1 - entries) % self.size
        return entries + (latest - entries) * (entries >= self.sinks)
