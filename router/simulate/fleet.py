"""One simulated engine, or several behind one router, on one clock.

Each replica is a simulation of its own, with the real ledger, scheduler and engine. The router sends it a
request when that arrives (`routing.py`), and never moves it afterwards.

    arrivals ──► router ──► engine 0      events in the order of their times: arrivals, plans and ends of
                        ──► engine 1      steps; at one time arrivals come first, then replicas by number
                        ──► engine 2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from .arrivals import Arrivals, Numbered, prompt_ids
from .record import Distribution, Timeline
from .result import Figures, Series, SimulationResult
from .routing import Policy, View, known_tokens
from .simulation import Simulation

PROGRESS_EVERY = 100
# How the figures of replicas become those of all: these are of the replica where they are greatest, or means;
# all others are sums. Latencies are those of all requests.
_GREATEST = (
    "seconds", "loaded_seconds", "peak_held_share", "most_preemptions", "max_running", "max_waiting",
)  # fmt: skip
_MEAN = (
    "load", "memory_held_share", "memory_used_share", "memory_cached_share", "memory_padding_share",
)  # fmt: skip


class Fleet:
    """Replicas and the router before them. `choose`: the routing policy."""

    def __init__(self, replicas: Sequence[Simulation], choose: Policy) -> None:
        self.replicas = replicas
        self._choose = choose
        self._sent = [0] * len(replicas)

    def run(self, arrivals: Arrivals, progress: Callable[[int], None]) -> None:
        """Runs all requests, and recounts every replica at the end. `progress`: takes the number of requests
        that have ended."""
        told = 0
        while (
            at := min([coming := self._next(arrivals), *(one.next_time for one in self.replicas)])
        ) < math.inf:
            if at == coming:
                self._receive(arrivals, at)
            else:
                for simulation in self.replicas:
                    if simulation.next_time == at:
                        simulation.move_to(at)
            if (num := sum(one.num_finished for one in self.replicas)) >= told + PROGRESS_EVERY:
                told = num
                progress(num)
        end = max(simulation.clock for simulation in self.replicas)
        for simulation in self.replicas:
            simulation.pass_time(end)
            simulation.engine.check()

    def _next(self, arrivals: Arrivals) -> float:
        """Returns when requests are received next. Of those that all wait at the start, a single replica is
        sent a few at a time, so that few are in memory."""
        (first, *others) = self.replicas
        if others or not arrivals.all_at_start or arrivals.exhausted:
            return arrivals.next_time
        return first.clock if first.has_room else math.inf

    def _receive(self, arrivals: Arrivals, at: float) -> None:
        """Sends all requests that arrive at one time, to replicas that take them at once."""
        reached: set[int] = set()
        while self._next(arrivals) <= at and (taken := arrivals.take(at)) is not None:
            idx = self._route(taken) if len(self.replicas) > 1 else 0
            reached.add(idx)
            self.replicas[idx].pass_time(at)
            self.replicas[idx].put(*taken)
            self._sent[idx] += taken[1].prompt
        if arrivals.exhausted:
            for simulation in self.replicas:
                simulation.is_closed = True
        for idx in sorted(reached):
            # An engine that runs takes those that wait at the start when it plans its next step.
            if not arrivals.all_at_start or not self.replicas[idx].engine.has_work:
                self.replicas[idx].move_to(at)

    def _route(self, numbered: Numbered) -> int:
        ids = prompt_ids(*numbered)
        replicas = self.replicas
        width = replicas[0].ledger.groups.num_groups
        return self._choose(
            View(
                number=numbered[0],
                num_prompt=numbered[1].prompt,
                loads=[one.ledger.num_held + one.waiting_tokens * width for one in replicas],
                sent=self._sent,
                capacity=replicas[0].ledger.capacity,
                known=lambda: [known_tokens(simulation.ledger, ids) for simulation in replicas],
            )
        )


def together(
    replicas: Sequence[Simulation], settings: dict[str, Any], offered: float, saturated: float
) -> SimulationResult:
    """Returns one result for all replicas, with the figures of each."""
    parts = [simulation.result(0.0, 0.0) for simulation in replicas]
    each = [replace(part.figures, load=0.0) for part in parts]
    values: dict[str, Any] = {}
    for name in asdict(each[0]):
        column = [getattr(figures, name) for figures in each]
        values[name] = max(column) if name in _GREATEST else fmean(column) if name in _MEAN else sum(column)
    finished = values["num_finished"]
    ttft, tpot = Distribution(), Distribution()
    timeline = Timeline(6)
    for simulation in replicas:
        ttft.seconds += simulation.ttft.seconds
        tpot.seconds += simulation.tpot.seconds
        timeline.merge(simulation.timeline)
    values |= {
        **ttft.summary("ttft"),
        **tpot.summary("tpot"),
        "offered_rate": offered,
        "saturation_rate": saturated,
        "load": settings["load"] or (offered / saturated if saturated else 0.0),
        "met_share": sum(f.met_share * f.num_finished for f in each) / finished if finished else 0.0,
        "preempted_share": values["num_preempted"] / finished if finished else 0.0,
    }
    capacity = sum(part.series.capacity for part in parts)
    series = Series(timeline.width, capacity, *timeline.means())
    return SimulationResult(
        settings, parts[0].step_time, Figures(**values), series, ttft.curve(), tpot.curve(), each,
        [part.series for part in parts],
    )  # fmt: skip
