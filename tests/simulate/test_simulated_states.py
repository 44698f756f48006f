"""Simulations of models with recurrent layers: requests wait for states, and prompts go on from those that are
kept."""

from pathlib import Path
from typing import Any

import pytest

from lightkv.router.simulate.config import InvalidSimulation, SimulationConfig
from lightkv.router.simulate.result import Figures
from lightkv.router.simulate.simulator import simulate
from tests.support.multi_turn import write_conversations


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations of up to eight turns, each of which repeats the ones before: of at most 6,400 tokens."""
    return write_conversations(Path(tmp_path_factory.mktemp("turns")) / "turns.jsonl", num=16)


def figures(trace: str, **settings: Any) -> Figures:
    chosen = {"capacity": 100_000, "max_new": 64, "max_num_seqs": 16, "block_tokens": 64, **settings}
    return simulate(trace, SimulationConfig(**chosen)).figures


def test_with_states_enough_a_turn_goes_on_where_the_one_before_ends(trace: str) -> None:
    without, found = figures(trace), figures(trace, states=1000)
    assert found.num_finished == without.num_finished == 128
    assert 0.95 * without.hit_tokens < found.hit_tokens <= without.hit_tokens


def test_each_running_request_takes_a_state_and_the_others_are_of_the_cache(trace: str) -> None:
    many, few, two = (figures(trace, states=num, rate=float("inf")) for num in (1000, 20, 2))
    assert many.num_finished == few.num_finished == two.num_finished == 128
    assert (many.max_running, two.max_running) == (16, 2)
    assert two.hit_tokens < few.hit_tokens < many.hit_tokens


def test_pages_and_runs_have_no_states() -> None:
    for allocation in ("paged:16", "contiguous"):
        with pytest.raises(InvalidSimulation, match=f"--states with --allocation {allocation}"):
            SimulationConfig(allocation=allocation, states=1)
