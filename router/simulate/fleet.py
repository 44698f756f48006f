"""Several simulated engines behind one router, on one clock.

Each replica is a simulation of its own, with the real ledger, scheduler and engine. The router sends it a
request when that arrives (`routing.py`), and never moves it afterwards.

    arrivals ──► router ──► inbox ──► engine 0      events in the order of their times: arrivals, plans and
                        ──► inbox ──► engine 1      ends of steps; at one time arrivals come first,
                        ──► inbox ──► engine 2      then replicas by number
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from .arrivals import Arrivals, Inbox, Numbered, prompt_ids
from .record import Distribution, Timeline
from .result import Figures, Series, SimulationResult
from .routing import Policy, View, known_tokens
from .simulation import Simulation

PROGRESS_EVERY = 100
# How the figures of replicas become those of all: these are of the replica where they are greatest, or means;
# all others are sums. Latencies are those of all requests.
_GREATEST = (
    "seconds", "loaded_seconds", "peak_held_share", "most_preemptions", "max_running", "max_waiting",
    "max_overtaken", "large_ttft_max", "low_ttft_max",
)  # fmt: skip
_MEAN = (
    "load", "memory_held_share", "memory_used_share", "memory_cached_share", "memory_padding_share",
    "last_page_waste_share",
)  # fmt: skip


class Fleet:
    """Replicas and the router before them.

    `choose`: the routing policy. `all_at_start`: no request waits for its time.
    """

    def __init__(self, replicas: Sequence[Simulation], choose: Policy, all_at_start: bool) -> None:
        self.replicas = replicas
        self._choose = choose
        self._inboxes = [Inbox(all_at_start) for _ in replicas]
        for simulation, inbox in zip(replicas, self._inboxes, strict=True):
            simulation.follow(inbox)
        self._sent = [0] * len(replicas)

    def run(self, arrivals: Arrivals, progress: Callable[[int], None]) -> None:
        """Runs all requests, and recounts every replica at the end. `progress`: takes the number of requests
        that were sent."""
        self._receive(arrivals, 0.0, progress)
        while (at := min([arrivals.next_time, *(one.next_time for one in self.replicas)])) < math.inf:
            if at == arrivals.next_time:
                self._receive(arrivals, at, progress)
                continue
            for simulation in self.replicas:
                if simulation.next_time == at:
                    simulation.move_to(at)
        end = max(simulation.clock for simulation in self.replicas)
        for simulation in self.replicas:
            simulation.pass_time(end)
            simulation.engine.check()

    def _receive(self, arrivals: Arrivals, at: float, progress: Callable[[int], None]) -> None:
        """Sends all requests that arrive at one time, to replicas that take them at once."""
        reached: set[int] = set()
        arrivals.look(at)
        while (taken := arrivals.take()) is not None:
            idx = self._route(taken)
            reached.add(idx)
            self.replicas[idx].pass_time(at)
            self._inboxes[idx].put(*taken)
            self._sent[idx] += taken[1].prompt
            if not taken[0] % PROGRESS_EVERY:
                progress(taken[0])
        if arrivals.exhausted:
            for inbox in self._inboxes:
                inbox.closed = True
        for idx in sorted(reached):
            self.replicas[idx].move_to(at)

    def _route(self, numbered: Numbered) -> int:
        ids = prompt_ids(*numbered)
        replicas = self.replicas
        width = replicas[0].ledger.groups.num_groups
        loads = [
            simulation.ledger.num_held + (simulation.waiting_tokens + inbox.num_tokens) * width
            for simulation, inbox in zip(replicas, self._inboxes, strict=True)
        ]
        return self._choose(
            View(
                number=numbered[0],
                num_prompt=numbered[1].prompt,
                loads=loads,
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
        ttft.merge(simulation.ttft)
        tpot.merge(simulation.tpot)
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
