"""The simulator: runs a trace through simulated engines (`simulation.py`), one or several (`fleet.py`)."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from lightkv.router.engine.step_time import StepTime

from .arrivals import arrange
from .config import InvalidSimulation, SimulationConfig
from .fleet import Fleet, together
from .result import SimulationResult
from .routing import ROUTINGS
from .simulation import Simulation, settings_of
from .trace_files import UnreadableTrace
from .traces import is_timed, open_trace, summarise

SATURATION_REQUESTS = 20_000

Progress = Callable[[str, int], None]
"""Takes the name of the current phase, and how many of its requests have ended."""


def simulate(trace_name: str, config: SimulationConfig, progress: Progress | None = None) -> SimulationResult:
    """Runs a trace (`traces.open_trace`) to its end.

    Raises UnreadableTrace, InvalidStepTime, OSError, and InvalidSimulation, also for a request that can never
    run.
    """
    trace = open_trace(trace_name, config.requests, config.seed, config.reading)
    if config.time_unit is not None:
        with suppress(UnreadableTrace):  # without the unit
            next(iter(open_trace(trace_name, reading=config.reading._replace(time_unit=None))))
            raise InvalidSimulation(
                f"--time-unit is {config.time_unit}, and {trace_name} tells the unit of its times itself, or "
                "has no times; leave --time-unit out"
            )
    if config.load is None and config.rate is None and not is_timed(trace):
        config = replace(config, load=1.0)
    if config.load is not None and config.saturation is None:
        config = replace(config, saturation=saturation(trace_name, config, progress))
    step_time = StepTime.parse(config.step_time)
    arrivals, offered, saturated = arrange(trace, config)
    replicas = [  # with random numbers of their own
        Simulation(trace, replace(config, seed=config.seed + idx), step_time, arrivals.all_at_start)
        for idx in range(config.replicas)
    ]
    what = "measuring saturation" if config.rate == math.inf else "simulating"
    Fleet(replicas, ROUTINGS[config.routing]).run(
        arrivals, lambda num: None if progress is None else progress(what, num)
    )
    if config.replicas == 1:
        return replicas[0].result(offered, saturated)
    return together(replicas, settings_of(trace, config), offered, saturated)


def num_requests(trace_name: str, config: SimulationConfig) -> int:
    """Returns how many requests the simulation will run."""
    return config.requests or summarise(open_trace(trace_name, reading=config.reading)).num


def saturation(trace_name: str, config: SimulationConfig, progress: Progress | None = None) -> float:
    """Returns the requests a second that are served if all wait at the start, by token and with an oracle:
    of one replica, times their number."""
    num = min(config.requests, SATURATION_REQUESTS) if config.requests else None
    full = replace(
        config,
        allocation="token",
        admission="oracle",
        reserve=None,
        rate=math.inf,
        load=None,
        saturation=None,
        requests=num,
        replicas=1,
    )
    figures = simulate(trace_name, full, progress).figures
    # Where so few requests wait that all are admitted at once, the rate is that of all of them.
    rate = figures.served_rate or figures.num_finished / max(figures.seconds, 1e-9)
    if not rate:
        raise InvalidSimulation(
            f"no request of {trace_name} fits --capacity {config.capacity}; give a larger one"
        )
    return rate * config.replicas
