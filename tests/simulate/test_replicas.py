"""Tests several replicas on one clock: one equals a single engine, counts are exact, prefixes are found."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lightkv.router.cli.app import app
from lightkv.router.engine.step_time import StepTime
from lightkv.router.simulate.arrivals import arrange
from lightkv.router.simulate.config import InvalidSimulation, SimulationConfig
from lightkv.router.simulate.fleet import Fleet, together
from lightkv.router.simulate.record import Distribution, Timeline
from lightkv.router.simulate.result import SimulationResult
from lightkv.router.simulate.routing import ROUTINGS
from lightkv.router.simulate.simulation import Simulation, settings_of
from lightkv.router.simulate.simulator import simulate
from lightkv.router.simulate.traces import open_trace
from tests.support.multi_turn import BLOCK, write_conversations

STEP_TIME = "base=0.004,per_decode=1e-4,per_kv=1e-7,per_prompt=2e-5"
SMALL = SimulationConfig(
    capacity=12_000, max_new=50, prefill_chunk=512, max_num_seqs=24, step_time=STEP_TIME, block_tokens=BLOCK
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_conversations(tmp_path_factory.mktemp("trace") / "conversations.jsonl")


def computed(result: SimulationResult) -> int:
    """Returns the prompt tokens that were computed."""
    return result.figures.prompt_tokens - result.figures.hit_tokens + result.figures.recomputed_tokens


def fleet_of(trace_name: str, config: SimulationConfig) -> tuple[list[Simulation], SimulationResult]:
    """Runs a fleet, whose figures are put together even for one replica."""
    trace = open_trace(trace_name, config.requests, config.seed, config.reading)
    model = StepTime.parse(config.step_time)
    arrivals, offered, saturated = arrange(trace, config)
    replicas = [
        Simulation(trace, replace(config, seed=config.seed + idx), model, arrivals.all_at_start)
        for idx in range(config.replicas)
    ]
    fleet = Fleet(replicas, ROUTINGS[config.routing])
    fleet.run(arrivals, lambda done: None)
    return replicas, together(replicas, settings_of(trace, config), offered, saturated)


@pytest.mark.parametrize(
    "other",
    [
        {"routing": "round-robin"},
        {"rate": math.inf},
        {"rate": 40.0, "allocation": "paged:32", "admission": "watermark"},
        {"stated": 0.5, "rate": 30.0, "capacity": 6000, "routing": "least-tokens"},
    ],
)
def test_a_fleet_of_one_has_the_figures_of_a_single_engine(trace: str, other: dict[str, float | str]) -> None:
    config = replace(SMALL, requests=40, **other)  # type: ignore[arg-type]
    single = simulate(trace, config)
    _, one = fleet_of(trace, config)
    assert asdict(one.figures) == pytest.approx(asdict(single.figures), rel=1e-12)
    assert asdict(one.series) == asdict(single.series)
    assert (one.ttft, one.tpot) == (single.ttft, single.tpot)
    assert one.settings == single.settings


def test_one_replica_tells_nothing_of_replicas(trace: str) -> None:
    result = simulate(trace, replace(SMALL, routing="round-robin", requests=20))
    assert result.to_json() == simulate(trace, replace(SMALL, requests=20)).to_json()
    assert result.replicas == result.each == []
    assert "replica" not in result.line()
    assert "routing" not in result.line()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_counts_of_all_ledgers_are_exact_and_figures_are_sums(trace: str, routing: str) -> None:
    config = replace(SMALL, requests=120, replicas=4, routing=routing, rate=20.0, capacity=6000, stated=0.5)
    replicas, result = fleet_of(trace, config)
    for replica in replicas:
        replica.engine.check()
        ledger = replica.ledger
        assert (ledger.num_held, ledger.num_open) == (0, 0)
        assert ledger.num_free + ledger.num_cached == ledger.capacity
        assert replica.clock == result.figures.seconds
        assert replica.waiting_tokens == 0
    assert isinstance(result.replicas, list)
    figures = result.figures
    assert figures.num_finished == 120 == sum(f.num_finished for f in result.replicas)
    assert figures.hit_tokens == sum(f.hit_tokens for f in result.replicas)
    requests = list(open_trace(trace, config.requests, config.seed, config.reading))
    assert figures.prompt_tokens == sum(request.prompt for request in requests)
    assert figures.output_tokens == sum(request.output for request in requests)
    assert figures.ttft_max == max(f.ttft_max for f in result.replicas)
    assert min(f.num_finished for f in result.replicas) > 15
    assert result.series.capacity == 4 * 6000
    if routing == "round-robin":
        assert {f.num_finished for f in result.replicas} == {30}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_seed_gives_the_same_bytes(trace: str, routing: str) -> None:
    config = replace(SMALL, replicas=3, routing=routing, requests=20)
    first = simulate(trace, config)
    assert first.to_json() == simulate(trace, config).to_json()
    assert msgspec.json.decode(first.to_json(), type=SimulationResult) == first
    assert first.to_json() != simulate(trace, replace(config, seed=7)).to_json()


def test_prefix_routing_computes_hardly_more_than_one_cache_of_all_pools(trace: str) -> None:
    times = dict(part.split("=") for part in STEP_TIME.split(","))
    model = ",".join(f"{name}={float(seconds) / 4}" for name, seconds in times.items())  # four times as fast
    config = replace(SMALL, requests=100, capacity=20_000)
    large = computed(simulate(trace, replace(config, capacity=4 * 20_000, step_time=model)))
    found = {name: computed(simulate(trace, replace(config, replicas=4, routing=name))) for name in ROUTINGS}
    assert found["prefix"] <= 1.1 * large
    assert found["round-robin"] > 1.5 * large
    assert found["least-tokens"] > 1.5 * large


def test_load_is_a_multiple_of_what_all_replicas_serve(trace: str) -> None:
    config = replace(SMALL, load=0.5, requests=60)
    single = simulate(trace, config).figures
    three = simulate(trace, replace(config, replicas=3)).figures
    assert three.saturation_rate == 3 * single.saturation_rate
    assert three.offered_rate == pytest.approx(3 * single.offered_rate)


def test_merged_records_are_those_of_all_numbers() -> None:
    parts, whole = [Distribution(), Distribution()], Distribution()
    lines, total = [Timeline(1), Timeline(1)], Timeline(1)
    for i in range(200):
        parts[i % 2].add(0.01 * i)
        whole.add(0.01 * i)
    for i in range(60):  # the second is wider, because it was added to until later
        lines[0].add(i * 0.1, i * 0.1 + 0.1, [i])
        total.add(i * 0.1, i * 0.1 + 0.1, [i + 2])
    lines[1].add(0.0, 60.0, [2])
    total.add(6.0, 60.0, [2])
    parts[0].seconds += parts[1].seconds
    lines[0].merge(lines[1])
    assert parts[0].quantiles((0.1, 0.5, 1.0)) == whole.quantiles((0.1, 0.5, 1.0))
    assert parts[0].summary("ttft") == whole.summary("ttft")
    assert lines[0].width == total.width
    assert lines[0].means()[0] == pytest.approx(total.means()[0], abs=0.002)


def test_the_command_tells_each_replica_and_all(trace: str, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    arguments = ["simulate", trace, "--block-tokens", str(BLOCK), "--capacity", "12000", "--max-new", "50",
                 "--requests", "20", "--replicas", "2", "--routing", "least-tokens",
                 "--out", str(out), "--report", str(page)]  # fmt: skip
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    names = [line.split("  ")[0].strip() for line in lines]
    start = names.index("least-tokens, seed 0")
    assert names[start + 2 : start + 5] == ["replica 0", "replica 1", "together"]
    line = json.loads(lines[-1])
    assert (line["replicas"], line["routing"]) == (2, "least-tokens")
    assert sum(each["num_finished"] for each in line["per_replica"]) == line["num_finished"] == 20
    assert page.stat().st_size > 1000


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(
        InvalidSimulation, match="--routing is 'random'; give one of round-robin, least-tokens"
    ):
        replace(SMALL, replicas=2, routing="random")
