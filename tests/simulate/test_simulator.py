"""Tests the simulator: its figures against brute force, its admissions, and the same bytes for a seed."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from lightkv.router.cli.app import app
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step_time import StepTime, Work
from lightkv.router.simulate import simulation, simulator
from lightkv.router.simulate.config import (
    ALLOCATIONS,
    SIMULATED_ADMISSIONS,
    InvalidSimulation,
    SimulationConfig,
)
from lightkv.router.simulate.record import Distribution, Timeline
from lightkv.router.simulate.report.tables import summary
from lightkv.router.simulate.result import SERIES_POINTS, Figures, SimulationResult
from lightkv.router.simulate.simulator import saturation, simulate
from lightkv.router.simulate.timed_engine import HOST_SECONDS
from tests.support.combinations import each_value, slow

STEP_TIME = "base=0.01,per_decode=1e-4,per_kv=1e-6,prefill=0.002,per_prompt=1e-4,per_pair=1e-7"
SMALL = SimulationConfig(capacity=3000, max_new=200, prefill_chunk=64, max_num_seqs=24, step_time=STEP_TIME)
PREFIXED = '{{"timestamp": {}, "input_length": {}, "output_length": {}, "hash_ids": {}}}\n'


def write_trace(path: Path, seed: int, num: int = 150, gap: float = 0.05) -> str:
    """Writes a trace in Azure's format, with random lengths and times. Returns its path."""
    rng = random.Random(seed)
    lines, at = ["TIMESTAMP,ContextTokens,GeneratedTokens"], 0.0
    for _ in range(num):
        at += rng.expovariate(1 / gap)
        prompt, output = rng.choice((rng.randint(1, 60), rng.randint(1, 600))), rng.randint(1, 150)
        lines.append(f"2023-11-16 18:{int(at // 60):02}:{at % 60:09.6f},{prompt},{output}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write_trace(tmp_path / "trace.csv", 0)


def test_the_times_of_one_request_are_the_sums_of_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("ContextTokens,GeneratedTokens\n100,4\n")
    result = simulate(str(path), replace(SMALL, rate=math.inf))
    model = StepTime.parse(STEP_TIME)
    first = model.seconds(Work(0, 0, 64, 64 * 65 // 2))
    second = model.seconds(Work(0, 0, 36, 36 * 64 + 36 * 37 // 2))
    # The last step was planned before the last token was known, and is computed for nothing.
    decodes = [model.seconds(Work(1, 101 + i, 0, 0)) for i in range(4)]
    figures = result.figures
    assert figures.ttft_max == pytest.approx(HOST_SECONDS + first + second)
    assert figures.tpot_max == pytest.approx(sum(decodes[:3]) / 3)
    assert figures.seconds == pytest.approx(HOST_SECONDS + first + second + sum(decodes))
    assert (figures.num_steps, figures.output_tokens, figures.prompt_tokens) == (6, 4, 100)
    assert figures.peak_held_share == 104 / 3000
    assert figures.goodput == pytest.approx(1 / figures.seconds)


def test_the_device_waits_for_the_host_where_no_step_is_in_flight(trace: str) -> None:
    """Before the first step, and where a preemption waits for the steps in flight."""

    def waits(capacity: int) -> tuple[float, int]:
        config = replace(SMALL, rate=math.inf, admission="watermark", step_time="base=0.01")
        found = simulate(trace, replace(config, requests=60, capacity=capacity)).figures
        return (found.seconds - 0.01 * found.num_steps) / HOST_SECONDS, found.num_preemptions

    assert waits(50_000) == (pytest.approx(1), 0)
    num_waits, num_preemptions = waits(2000)
    assert num_waits == pytest.approx(round(num_waits))
    assert num_waits > num_preemptions / 2 > 2  # one wait may be for several


@each_value(seed=range(3), allocation=["token", "contiguous", "paged:16", *slow(*ALLOCATIONS[3:])])
def test_guaranteed_requests_are_never_preempted(tmp_path: Path, seed: int, allocation: str) -> None:
    """`simulate` recounts everything at its end."""
    name = write_trace(tmp_path / "trace.csv", seed, num=120, gap=0.01)
    config = replace(SMALL, allocation=allocation)
    if allocation != "contiguous":
        found = simulate(name, config).figures
        assert (found.num_finished, found.num_preempted_guaranteed) == (120, 0)
        # No proof counts the ends of pages, so there none is guaranteed.
        assert (found.mean_guaranteed > 1) == (allocation == "token")
        config = replace(config, admission="reserved")  # all of them are guaranteed
    found = simulate(name, config).figures
    assert found.num_finished == 120
    assert (found.num_preemptions, found.num_preempted, found.recomputed_tokens) == (0, 0, 0)
    assert found.max_waiting > 50  # the pool was short
    assert found.memory_used_share > (0.05 if allocation == "contiguous" else 0.15)


@pytest.mark.parametrize("allocation", ["token", "paged:32", "contiguous"])
def test_a_target_bounds_the_steps_and_never_preempts(tmp_path: Path, allocation: str) -> None:
    """Without the target a step takes 36 ms and more."""
    name = write_trace(tmp_path / "trace.csv", 5, num=80, gap=0.08)
    config = replace(SMALL, allocation=allocation, prefill_chunk=256, itl_target=0.02, capacity=6000)
    config = replace(config, admission="sum" if allocation == "contiguous" else "reserved")
    found = simulate(name, config)
    assert found.figures.num_preemptions == 0
    free = simulate(name, replace(config, itl_target=0.0)).figures
    assert found.figures.tpot_p99 < free.tpot_p99
    assert found.settings["itl_target"] == 0.02
    assert "; steps of at most 20 ms beside decodes" in summary(found)["policy"]


@each_value(patience=[None, 2.0], allocation=["token", "paged:32"], stated=[0.0, 0.5])
def test_requests_without_a_limit_are_estimated(
    tmp_path: Path, stated: float, allocation: str, patience: float | None
) -> None:
    """None with a limit is preempted, and the pool is fuller than if all have one."""
    name = write_trace(tmp_path / "trace.csv", 5, num=120, gap=0.04)
    config = replace(SMALL, allocation=allocation, patience=patience, reserve=0.0)
    config = replace(config, admission="reserved")
    figures = simulate(name, replace(config, stated=stated)).figures
    assert (figures.num_finished, figures.num_preempted_stated) == (120, 0)
    assert stated or figures.num_preemptions > 0
    assert figures.memory_used_share > simulate(name, config).figures.memory_used_share


@pytest.mark.parametrize("admission", SIMULATED_ADMISSIONS)
def test_a_seed_gives_the_same_bytes(admission: str) -> None:
    config = SimulationConfig(requests=6, load=1.2, admission=admission, capacity=4000, max_new=64, seed=7)
    first = simulate("chat", config).to_json()
    assert first == simulate("chat", config).to_json()
    assert first != simulate("chat", replace(config, seed=8)).to_json()


@pytest.fixture(scope="module")
def crowded() -> Callable[..., Figures]:
    """A function that returns the figures of 60 requests at once, under an admission and a reserve."""

    @cache
    def run_crowded(admission: str, reserve: float | None = None) -> Figures:
        config = SimulationConfig(requests=60, rate=math.inf, capacity=5000, max_new=512)
        return simulate("chat", replace(config, admission=admission, reserve=reserve)).figures

    return run_crowded


@pytest.mark.slow
def test_estimates_use_more_memory_than_exact_and_the_oracle_preempts_none(
    crowded: Callable[..., Figures],
) -> None:
    found = {name: crowded(name) for name in SIMULATED_ADMISSIONS}
    used = {name: figures.memory_used_share for name, figures in found.items()}
    assert used["sum"] < used["reserved"] < used["quantile"] < used["watermark"]
    assert used["reserved"] < used["moving-average"]
    assert used["reserved"] < used["past-future"]
    for name in ("sum", "reserved", "oracle"):
        assert found[name].num_preemptions == 0
    assert found["oracle"].served_rate > 1.2 * found["reserved"].served_rate
    assert found["watermark"].num_preemptions > found["quantile"].num_preemptions


def test_a_reserve_lowers_preemptions(crowded: Callable[..., Figures]) -> None:
    own, more = crowded("watermark"), crowded("watermark", 0.2)
    assert own == crowded("watermark", 0.01)
    assert more.num_preemptions < own.num_preemptions
    assert more.memory_used_share < own.memory_used_share
    loaded = SimulationConfig(requests=6, load=1.0, capacity=8000, max_new=64)
    rates = {
        simulate("chat", replace(loaded, reserve=reserve)).figures.saturation_rate for reserve in (None, 0.4)
    }
    assert len(rates) == 1  # the rate of an oracle, which has no reserve


def test_requests_that_are_all_admitted_at_once_have_a_saturation(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "20,5\n" * 3)
    config = replace(SMALL, requests=3)
    all_at_once = simulate(str(path), replace(config, rate=math.inf, admission="oracle")).figures
    assert saturation(str(path), config) == pytest.approx(3 / all_at_once.seconds)


@pytest.mark.slow
def test_timely_admits_requests_first_that_can_meet_the_target() -> None:
    config = SimulationConfig(requests=400, load=1.5, capacity=10_000, ttft_target=5.0)
    config = replace(config, saturation=saturation("chat", config))  # once for both
    first_come = simulate("chat", replace(config, admission="guaranteed")).figures
    timely = simulate("chat", replace(config, admission="timely")).figures
    assert timely.num_finished == first_come.num_finished == 400
    assert timely.met_share > 1.3 * first_come.met_share
    assert timely.ttft_max > first_come.ttft_p50


@pytest.mark.parametrize(
    ("allocation", "hits"), [("token", 1023), ("paged:64", 1024 - 64), ("paged:256", 768)]
)
def test_prefix_blocks_are_hit(tmp_path: Path, allocation: str, hits: int) -> None:
    path = tmp_path / "m.jsonl"
    lines = [PREFIXED.format(0, 1024, 3, [4, 5]), PREFIXED.format(9000, 1024, 3, [4, 5])]
    path.write_text("".join([*lines, PREFIXED.format(20_000, 1024, 3, [5, 4])]))
    config = replace(SMALL, allocation=allocation, time_unit="ms")
    assert simulate(str(path), config).figures.hit_tokens == hits


def test_requests_that_never_fit_are_refused_or_left_out(trace: str) -> None:
    small = replace(SMALL, capacity=400)
    with pytest.raises(InvalidSimulation, match=r"pool of 400; give a larger --capacity, .*--skip-too-large"):
        simulate(trace, small)
    found = simulate(trace, replace(small, skip_too_large=True)).figures
    fitting = [one for one in simulator.open_trace(trace) if one.prompt <= 400]
    assert (found.num_finished, found.num_skipped) == (len(fitting), 150 - len(fitting))
    # Limits that the pool cannot hold are cut, as in the service.
    answers = [min(one.output, SMALL.max_new, 401 - one.prompt) for one in fitting]
    assert found.num_cut == sum(count < one.output for count, one in zip(answers, fitting, strict=True)) > 0
    assert found.output_tokens == sum(answers)


def test_answers_are_cut_at_max_new(trace: str) -> None:
    found = simulate(trace, replace(SMALL, max_new=50)).figures
    outputs = [request.output for request in simulator.open_trace(trace)]
    assert found.output_tokens == sum(min(output, 50) for output in outputs)
    assert found.num_cut == sum(output > 50 for output in outputs)


def test_a_load_is_a_share_of_the_rate_that_an_oracle_serves(trace: str) -> None:
    config = replace(SMALL, requests=40)
    saturated = saturation(trace, config)
    found = simulate(trace, replace(config, load=0.5)).figures
    assert found.saturation_rate == saturated
    assert found.offered_rate == pytest.approx(saturated / 2)
    given = simulate(trace, replace(config, load=0.5, saturation=saturated))
    assert given.figures == found


def test_memory_over_time_adds_up(trace: str) -> None:
    result = simulate(trace, replace(SMALL, allocation="paged:32", admission="quantile"))
    series, figures = result.series, result.figures
    assert 0 < len(series.used) <= SERIES_POINTS
    for name in ("padding", "cached", "running", "waiting"):
        assert len(getattr(series, name)) == len(series.used)
    for held in zip(series.used, series.padding, series.cached, strict=True):
        assert sum(held) <= series.capacity + 0.01  # they are rounded
    assert (len(series.used) - 1) * series.width < figures.seconds <= len(series.used) * series.width
    assert max(series.running) <= figures.max_running
    loaded = int(figures.loaded_seconds / series.width)
    mean = sum(series.used[:loaded]) / loaded / series.capacity
    assert mean == pytest.approx(figures.memory_used_share, rel=0.02)


def test_a_result_comes_back_from_its_json(trace: str) -> None:
    result = simulate(trace, SMALL)
    assert msgspec.json.decode(result.to_json(), type=SimulationResult) == result
    assert list(result.ttft.seconds) == sorted(result.ttft.seconds)


def test_few_requests_are_held_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    class Watched(Scheduler):
        def plan(self):  # type: ignore[no-untyped-def]
            nonlocal most
            most = max(most, self.num_waiting)
            return super().plan()

    monkeypatch.setattr(simulation, "Scheduler", Watched)
    config = SimulationConfig(requests=150, rate=math.inf, capacity=20_000, max_new=512)
    simulate("chat", replace(config, admission="reserved"))  # which preempts none
    assert most <= simulation.QUEUE < 150


# --------------------------------------------------------------------------------
# Recorded figures


def test_quantiles_and_mean_are_exact() -> None:
    values = np.random.default_rng(0).permutation(np.arange(1, 1001)) / 8
    distribution = Distribution()
    for value in values.tolist():
        distribution.add(value)
    wanted = (0.0, 0.0101, 0.5, 0.999, 1.0)
    assert distribution.quantiles(wanted) == [number / 8 for number in (1, 11, 500, 999, 1000)]
    found = distribution.summary("x")
    assert found == {"x_mean": 500.5 / 8, "x_p50": 62.5, "x_p90": 112.5, "x_p99": 123.75, "x_max": 125.0}
    assert Distribution().quantiles((0.5, 1.0)) == [0.0, 0.0]


@pytest.mark.parametrize("longest", [0.1, *slow(30.0)])
def test_a_timeline_is_the_mean_of_every_interval(longest: float) -> None:
    rng = random.Random(1)
    timeline, parts, at = Timeline(1), [], 0.0
    for _ in range(1000):
        end = at + rng.random() * longest
        parts.append((at, end, rng.random()))
        timeline.add(at, end, (parts[-1][2],))
        at = end
    (means,) = timeline.means()
    assert len(means) <= SERIES_POINTS
    width = timeline.width
    for i, mean in enumerate(means):
        low, high = i * width, min((i + 1) * width, at)
        total = sum(v * max(min(e, high) - max(s, low), 0.0) for s, e, v in parts)
        assert mean == pytest.approx(total / (high - low), abs=2e-3)


# --------------------------------------------------------------------------------
# The command


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *args], prog_name="lightkv")
    return result.exit_code, result.stdout, result.stderr


def test_the_last_line_has_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, printed, notes = run("chat", "--requests", "10", "--rate", "5", "--out", str(out))
    assert code == 0
    line = msgspec.json.decode(printed.splitlines()[-1])
    result = msgspec.json.decode(out.read_bytes(), type=SimulationResult)
    assert line == {**result.settings, **msgspec.to_builtins(result.figures)}
    assert {"memory_padding_share", "memory_used_share", "num_preemptions", "goodput"} <= line.keys()
    assert "10 requests in" in notes
    again = run("chat", "--requests", "10", "--rate", "5")
    assert again[1] == printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing.csv"], "no file, and no workload"),
        (["--allocation", "paged:1"], "token, contiguous, or paged:N"),
        (["--allocation", "contiguous", "--admission", "reserved"], "leave --admission out"),
        (["--admission", "best"], "guaranteed, reserved"),
        (["--load", "1", "--rate", "2"], "give one"),
        (["--load", "0"], "--load is 0.0; give a number above 0"),
        (["--capacity", "0"], "give a whole number of at least 1"),
        (["--reserve", "1"], "give a share of at least 0 and below 1"),
        (["--stated", "1.5"], "--stated is 1.5; give a share from 0 to 1"),
        (["--step-time", "base=x"], "names being base"),
        (["--step-time", "per_kv=1e-9"], "base is 0 seconds"),
        (["--step-time", "nothing.json"], "nothing.json"),
        (["--capacity", "500", "--rate", "inf", "--requests", "50"], "--skip-too-large"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_says_what_to_do(args: list[str], words: str) -> None:
    code, printed, notes = run(*args)
    assert (code, printed) == (2, "")
    assert words in " ".join(notes.split())


def test_every_setting_is_an_option() -> None:
    code, printed, _ = run("--help")
    assert code == 0
    for field in fields(SimulationConfig):
        assert "--" + field.name.replace("_", "-") in printed


@pytest.mark.slow
def test_a_million_requests_take_bounded_memory() -> None:
    import tracemalloc

    peaks = []
    for num in (5_000, 50_000):
        tracemalloc.start()
        simulate("azure-code", SimulationConfig(requests=num, rate=math.inf, admission="oracle"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 2**20


def test_every_pair_of_policies_runs() -> None:
    config = SimulationConfig(requests=6, rate=math.inf, capacity=4096, max_new=32)
    for allocation, admission in itertools.product(ALLOCATIONS, SIMULATED_ADMISSIONS):
        if allocation != "contiguous" or admission == "sum":
            chosen = replace(config, allocation=allocation, admission=admission)
            assert simulate("chat", chosen).figures.num_finished == 6


def test_a_reserved_run_is_filled_even_if_no_other_slot_is_free(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n5000,5\n")
    config = replace(SMALL, capacity=5009, max_new=10, allocation="contiguous", rate=math.inf)
    figures = simulate(str(path), config).figures
    # The last step was planned before it was known that the answer had ended.
    assert figures.num_steps == math.ceil(5000 / SMALL.prefill_chunk) + 5


def test_a_trace_with_a_single_time_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.5,50,5\n")
    assert simulate(str(path), replace(SMALL, load=None)).figures.num_finished == 1


def test_a_pool_in_which_nothing_fits_is_refused() -> None:
    config = replace(SMALL, capacity=20, max_new=10, skip_too_large=True, requests=50)
    with pytest.raises(InvalidSimulation, match="no request of decode-heavy fits --capacity 20"):
        saturation("decode-heavy", config)
    with pytest.raises(InvalidSimulation, match="--ttft-target is inf"):
        replace(SMALL, ttft_target=math.inf)
    for target in (-0.1, math.nan, math.inf):
        with pytest.raises(InvalidSimulation, match=f"--itl-target is {target}"):
            replace(SMALL, itl_target=target)
