"""When a call to the worker is overdue: a clock that runs while a call waits and this process runs.

begin ──► waiting ──► end            overdue: longer than the limit since the call began,
             │                       since the worker last said what keeps it, or since
             └── postpone            this process went on after it had been stopped itself
"""

import time
from collections.abc import Callable

TICK_SECONDS = 0.25  # between two looks
STOPPED_SECONDS = 2.0  # without a look, beyond a tick: then this process itself was stopped meanwhile
COMPILE_SECONDS = 600.0  # for a worker that says that it compiles or captures
GPU_STEP_SECONDS, CPU_STEP_SECONDS = 60.0, 600.0


class CallWatch:
    """Watches one call at a time. `limit`: seconds that a call may take. `clock`: seconds.

    `allowed`: seconds that the call under way may take, or the last one might.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self.allowed = limit
        self._begun: float | None = None
        self._looked = clock()

    @property
    def tick_seconds(self) -> float:
        """How often `look` is to be called."""
        return min(TICK_SECONDS, self.limit / 4)

    def begin(self) -> None:
        """A call has been sent."""
        self._begun, self.allowed = self._clock(), self.limit

    def end(self) -> None:
        """Its answer has come, or never will."""
        self._begun = None

    def postpone(self, seconds: float | None = None) -> None:
        """The call under way may take `seconds` from now on, and the limit at least (None)."""
        if self._begun is not None:
            self._begun, self.allowed = self._clock(), max(self.limit, seconds or 0.0)

    def look(self) -> bool:
        """Is a call overdue?"""
        now = self._clock()
        pause = max(now - self._looked - self.tick_seconds, 0.0)  # in which this process did not run
        self._looked = now
        if self._begun is None:
            return False
        if pause > STOPPED_SECONDS:  # the answer may have come meanwhile, or the worker was stopped as well
            self._begun = now
        self._begun = min(self._begun + pause, now)
        return now - self._begun > self.allowed
