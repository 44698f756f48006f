"""Results of short simulations, which the tests of the report share."""

from dataclasses import replace

import pytest

from lightkv.router.simulate.result import SimulationResult
from lightkv.router.simulate.simulator import simulate
from tests.support.simulation_results import SMALL


@pytest.fixture(scope="session")
def found() -> dict[str, SimulationResult]:
    """Results of the same requests by several policies."""
    policies = (
        ("token", "timely"), ("paged:64", "watermark"), ("contiguous", "sum"), ("token", "past-future"),
    )  # fmt: skip
    configs = [replace(SMALL, allocation=name, admission=admission) for name, admission in policies]
    return {config.allocation + " " + config.counted: simulate("chat", config) for config in configs}


@pytest.fixture(scope="session")
def one(found: dict[str, SimulationResult]) -> SimulationResult:
    return found["paged:64 watermark"]
