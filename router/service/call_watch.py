"""Decides when a call to the worker is overdue. Its clock runs while a call waits and this process is running.

begin ──► waiting ──► end            overdue: longer than the limit since the call began, since
             │                       the worker last reported slow work, or since this process
             └── postpone            continued after it had been stopped itself
"""

import time
from collections.abc import Callable

TICK_SECONDS = 0.25  # between two calls of `look`
STOPPED_SECONDS = 2.0  # if `look` comes later than this, beyond a tick, this process itself was stopped
COMPILE_SECONDS = 600.0  # for a worker that reports that it is compiling
GPU_STEP_SECONDS, CPU_STEP_SECONDS = 60.0, 600.0


class CallWatch:
    """Watches one call at a time. `limit`: seconds that a call may take. `clock`: returns the time in seconds.

    `allowed`: seconds that the waiting call may take; without one, those of the last call.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self.allowed = limit
        self._begun: float | None = None
        self._looked = clock()

    @property
    def tick_seconds(self) -> float:
        """The interval at which `look` has to be called."""
        return min(TICK_SECONDS, self.limit / 4)

    def begin(self) -> None:
        """Notes that a call was sent."""
        self._begun, self.allowed = self._clock(), self.limit

    def end(self) -> None:
        """Notes that the call was answered, or never will be."""
        self._begun = None

    def postpone(self, seconds: float | None = None) -> None:
        """Lets the waiting call take `seconds` from now on, but at least the limit."""
        if self._begun is not None:
            self._begun, self.allowed = self._clock(), max(self.limit, seconds or 0.0)

    def look(self) -> bool:
        """Returns whether a call is overdue."""
        now = self._clock()
        # The seconds in which this process did not run.
        stopped = max(now - self._looked - self.tick_seconds, 0.0)
        self._looked = now
        if self._begun is None:
            return False
        if stopped > STOPPED_SECONDS:  # the answer may have arrived meanwhile, or the worker was stopped, too
            self._begun = now
        self._begun = min(self._begun + stopped, now)
        return now - self._begun > self.allowed
