"""The changes that the router's loop has handed over and that the publisher's thread has not taken yet.

Nothing here waits. The queue is bounded in bytes: when it overflows, all that is in it is dropped, and what the
ledger holds by then stands in its place, from which the thread begins again.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lightkv.ledger.changes import SegmentAdded, SegmentGrew, TreeChange

MAX_QUEUED_BYTES = 32 * 2**20
_CHANGE_BYTES = 128  # of a change, beside its tokens


@dataclass(frozen=True)
class Restart:
    """What came before does not count: the ledger holds `contents`."""

    contents: list[SegmentAdded]


class ChangeQueue:
    """A queue between two threads. `wake_fd` can be read from (polled) while the queue has something to take.

    Attributes:
        num_overflows: how often everything queued was dropped.
    """

    def __init__(self, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.num_overflows = 0
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._items: list[list[TreeChange] | Restart] = []
        self._num_bytes = 0
        self._is_ended = False

    def put(self, changes: list[TreeChange], contents: Callable[[], list[SegmentAdded]]) -> None:
        """Queues changes. `contents`: returns what the ledger holds after them, if they do not fit."""
        num_bytes = sum(map(_num_bytes, changes))
        with self._lock:
            fits = self._num_bytes + num_bytes <= self._max_bytes
            if fits:
                self._items.append(changes)
                self._num_bytes += num_bytes
        if fits:
            os.eventfd_write(self.wake_fd, 1)
        else:
            self.num_overflows += 1
            self.restart(contents())

    def restart(self, contents: list[SegmentAdded]) -> None:
        """Drops what is queued and begins again with `contents`. These do not count among the bytes: the ledger
        holds the same tokens."""
        with self._lock:
            self._items = [Restart(contents)]
            self._num_bytes = 0
        os.eventfd_write(self.wake_fd, 1)

    def end(self) -> None:
        """Lets the thread take what is queued and then end."""
        with self._lock:
            self._is_ended = True
        os.eventfd_write(self.wake_fd, 1)

    def take(self) -> tuple[list[list[TreeChange] | Restart], bool]:
        """Takes everything that is queued, and whether nothing follows it."""
        with suppress(BlockingIOError):  # nothing has come since the last time
            os.eventfd_read(self.wake_fd)
        with self._lock:
            items, self._items = self._items, []
            self._num_bytes = 0
            return items, self._is_ended

    def close(self) -> None:
        """Frees the descriptor. Neither side may use the queue any more."""
        os.close(self.wake_fd)


def _num_bytes(change: TreeChange) -> int:
    if isinstance(change, SegmentAdded | SegmentGrew):
        return _CHANGE_BYTES + len(change.tokens)
    return _CHANGE_BYTES
