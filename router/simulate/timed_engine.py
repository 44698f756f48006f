"""An engine whose steps take the time that a model says, in place of a device. It plans when the service plans,
with two steps in flight on a GPU: the next step is planned shortly before the one before it ends, without its
tokens."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lightkv.router.engine.loop import Engine
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import StepPlan, StepResult, TokenEvent
from lightkv.router.engine.step_time import StepTime

DEPTH = 2  # steps in flight
END, MORE = 2, 1  # sampled: the last token of an answer, any other
# Seconds that the device waits for the next step where no other one is in flight, as after a preemption: those
# of the router's step with 1,000 requests, of which one begins and one ends (docs/measured.md, "A step of the
# router").
HOST_SECONDS = 0.00074


class _Flight(NamedTuple):
    """A step in flight, from `begun` to `end`."""

    result: StepResult
    begun: float
    end: float


class TimedEngine(Engine):
    """An engine and a device that computes nothing: each step takes what `step_time` says, and each answer ends
    after the tokens in `left`. `host_seconds`: as HOST_SECONDS.

    The caller has the clock: it calls `complete_due` and `plan_due` whenever a request arrives, and at the
    times that `plan_due` returns.
    """

    def __init__(self, scheduler: Scheduler, step_time: StepTime, host_seconds: float = HOST_SECONDS) -> None:
        super().__init__(scheduler)
        # By a request's seed: the tokens of its answer that are still to be sampled, in a list of one.
        self.left: dict[int, list[int]] = {}
        self._rows: dict[int, list[int]] = {}  # the list of the request that a row has
        self._step_time = step_time
        self._host_seconds = host_seconds
        self._flights: deque[_Flight] = deque()

    def complete_due(self, now: float) -> Sequence[TokenEvent]:
        """Completes the steps that have ended by `now`. Returns their events."""
        events: list[TokenEvent] = []
        while self._flights and self._flights[0].end <= now:
            events += self.complete(self._flights.popleft().result)
        return events

    def plan_due(self, now: float) -> float:
        """Plans the steps that the service would have planned by `now`. Returns when it plans the next one or a
        step ends, whichever is sooner; infinity where no step is in flight."""
        flights, due = self._flights, math.inf
        while self.can_plan:
            if flights and flights[-1].begun + self.spare_seconds > now:
                due = flights[-1].begun + self.spare_seconds
                break
            plan = self.plan()
            if plan is None:
                break
            begun = max(now + self._host_seconds, flights[-1].end if flights else 0.0)
            result = StepResult(plan.step, self._sample(plan), plan.num_free, 0)
            flights.append(_Flight(result, begun, begun + self._step_time.seconds(plan.work)))
        return min(due, flights[0].end) if flights else math.inf

    def _sample(self, plan: StepPlan) -> list[int]:
        """Returns the tokens of a step. A request whose last token is in the step before gets one more, which
        the engine drops."""
        for new in plan.new_rows:
            self._rows[new.row] = self.left[new.seed]
        tokens = []
        for part in plan.sample:
            left = self._rows[plan.rows[part]]
            left[0] -= 1
            tokens.append(MORE if left[0] > 0 else END)
        return tokens
