"""Counts the workers that died, and says when another one would die, too."""

import time
from collections import deque

MAX_CRASHES = 3  # within CRASH_SECONDS, or without a step between them
CRASH_SECONDS = 60.0


class Restarts:
    """The deaths of one router's workers."""

    def __init__(self) -> None:
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        self._without_step = 0  # in a row

    def note_step(self) -> None:
        """Notes that a worker has completed a step."""
        self._without_step = 0

    def note_crash(self) -> str:
        """Notes that a worker has died. Returns why no other one is started; empty if one is."""
        self._crashes.append(time.monotonic())
        self._without_step += 1
        is_quick = self._crashes[-1] - self._crashes[0] < CRASH_SECONDS
        if self._without_step == MAX_CRASHES or (len(self._crashes) == MAX_CRASHES and is_quick):
            when = "within a minute" if is_quick else "before a step was done"
            return f"{MAX_CRASHES} workers died {when}"
        return ""
