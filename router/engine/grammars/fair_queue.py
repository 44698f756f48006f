"""A queue in which owners take turns: each has a line of its own, and one with a long line delays no other."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    """What waits. `owner`: who has it wait. Two of them are equal only if they are the same object."""

    owner: bytes


One = TypeVar("One", bound=Owned)


class FairQueue(Generic[One]):
    """What waits, in a line for each owner. `max_waiting`: of all owners; None is no limit."""

    def __init__(self, max_waiting: int | None = None) -> None:
        self._max_waiting = max_waiting
        self._lines: OrderedDict[bytes, deque[One]] = OrderedDict()  # the next owner's first
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[One]:
        """Iterates over all that wait, line by line."""
        return (one for line in self._lines.values() for one in line)

    def num_of(self, owner: bytes) -> int:
        """Returns how many of an owner wait."""
        return len(self._lines.get(owner, ()))

    def push(self, one: One) -> One | None:
        """Adds one. Returns the one that has to leave, if the queue is full: the newest of the owner who has
        the most, which may be `one` itself."""
        line = self._lines.setdefault(one.owner, deque())
        line.append(one)
        self._num += 1
        if self._max_waiting is None or self._num <= self._max_waiting:
            return None
        longest = max(self._lines.values(), key=len)
        left = (line if len(line) == len(longest) else longest)[-1]
        self.remove(left)
        return left

    def share(self, one: One, owner: bytes) -> None:
        """Notes that `owner` waits for one as well: it moves to the end of that line if fewer are before it
        there. Nothing happens if it does not wait."""
        line = self._lines.get(one.owner, deque())
        if one in line and self.num_of(owner) < line.index(one):
            self.remove(one)
            one.owner = owner
            self.push(one)

    def pop(self, may_go: Callable[[One], bool] | None = None) -> One | None:
        """Removes the first that may go, in the order of turns, and returns it; None if there is none."""
        for owner, line in self._lines.items():
            one = line[0] if may_go is None else next(filter(may_go, line), None)
            if one is None:
                continue
            self.remove(one)
            if owner in self._lines:
                self._lines.move_to_end(owner)
            return one
        return None

    def remove(self, one: One) -> bool:
        """Removes one. Returns False if it does not wait."""
        line = self._lines.get(one.owner)
        if line is None or one not in line:
            return False
        line.remove(one)
        self._num -= 1
        if not line:
            del self._lines[one.owner]
        return True
