"""Simulations of models whose layers do not all see everything: the real scheduler, forecast and ledger count
slots of layer groups."""

from pathlib import Path
from typing import Any

import pytest

from lightkv.router.simulate.config import InvalidSimulation, SimulationConfig, groups_of
from lightkv.router.simulate.result import Figures
from lightkv.router.simulate.simulator import simulate
from tests.support.combinations import slow
from tests.support.multi_turn import write_conversations

GEMMA = "8xfull,40xwindow:256"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations of up to eight turns, each of which repeats the ones before: of at most 6,400 tokens."""
    return write_conversations(Path(tmp_path_factory.mktemp("turns")) / "turns.jsonl", num=16)


def figures(trace: str, **settings: Any) -> Figures:
    chosen = {"capacity": 20_000, "max_new": 64, "max_num_seqs": 16, "block_tokens": 64, **settings}
    return simulate(trace, SimulationConfig(**chosen)).figures


def test_a_pool_has_the_bytes_of_its_tokens_in_all_layers() -> None:
    assert SimulationConfig(capacity=1000).num_slots == 1000
    assert SimulationConfig(capacity=1000, layers="48xfull").num_slots == 1000
    assert SimulationConfig(capacity=1000, layers=GEMMA).num_slots == 6000
    assert groups_of("12xfull, 36xchunk:8192").widths == (1, 3)
    uneven = groups_of("10xfull,52xwindow:1024")  # some lanes of the last group are empty
    assert SimulationConfig(capacity=1000, layers="10xfull,52xwindow:1024").num_slots == (
        1000 * 62 // uneven.num_lanes
    )


def test_layers_that_see_everything_change_nothing(trace: str) -> None:
    assert figures(trace, layers="12xfull", rate=float("inf")) == figures(trace, rate=float("inf"))


def test_more_requests_run_where_layers_see_a_window(trace: str) -> None:
    alike = figures(trace, rate=float("inf"), capacity=8000)
    groups = figures(trace, rate=float("inf"), capacity=8000, layers=GEMMA)
    assert groups.num_finished == alike.num_finished == 128
    assert groups.num_preempted_guaranteed == 0
    assert groups.mean_guaranteed > 1
    assert groups.mean_running > 1.5 * alike.mean_running
    assert groups.seconds < alike.seconds


@pytest.mark.parametrize(
    "admission", ["reserved", "quantile", *slow("past-future", "moving-average", "oracle")]
)
def test_admissions_by_their_peak_count_slots(trace: str, admission: str) -> None:
    found = figures(
        trace, rate=float("inf"), capacity=7000, layers="4xfull,4xwindow:128", admission=admission
    )
    assert found.num_finished == 128
    assert found.peak_held_share <= 1


def test_turns_find_what_the_turns_before_left(trace: str) -> None:
    """In a pool in which the conversations do not fit when every layer holds every token."""
    without_loss = figures(trace, capacity=200_000)
    alike = figures(trace, capacity=30_000)
    groups = figures(trace, capacity=30_000, layers=GEMMA)
    computed = [one.prompt_tokens - one.hit_tokens for one in (without_loss, groups, alike)]
    assert computed[1] <= 1.02 * computed[0]
    assert computed[2] > 1.5 * computed[0]


def test_replicas_have_layers_of_their_own(trace: str) -> None:
    found = simulate(
        trace,
        SimulationConfig(
            capacity=20_000, max_new=64, max_num_seqs=16, block_tokens=64, replicas=2, layers=GEMMA,
            routing="least-tokens", rate=20.0,
        ),
    )  # fmt: skip
    assert found.figures.num_finished == 128
    assert [one.num_finished > 40 for one in found.replicas] == [True, True]


@pytest.mark.parametrize("layers", ["8", "8xfull,", "0xfull", "8xfull:3", "4xwindow", "4xwindow:0", "xfull"])
def test_unreadable_layers_are_refused(layers: str) -> None:
    with pytest.raises(InvalidSimulation, match="give 8xfull,40xwindow:1024"):
        SimulationConfig(layers=layers)


@pytest.mark.parametrize(
    "settings", [{"allocation": "paged:16"}, {"allocation": "contiguous"}, {"admission": "watermark"}]
)
def test_what_counts_tokens_of_all_layers_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidSimulation, match="leave --layers out"):
        SimulationConfig(layers=GEMMA, **settings)


def test_requests_that_never_fit_are_refused_by_their_tokens(trace: str) -> None:
    with pytest.raises(InvalidSimulation, match=r"of a pool of 1\d\d\d; give a larger --capacity"):
        figures(trace, capacity=1000, layers=GEMMA)
