"""Several allocations and seeds in one run: what is simulated, printed, written and compared."""

import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from lightkv.router.cli.app import app
from lightkv.router.simulate.config import InvalidSimulation, SimulationConfig, page_of
from lightkv.router.simulate.report import page as report_page
from lightkv.router.simulate.report.page import render
from lightkv.router.simulate.report.tables import policies
from lightkv.router.simulate.result import SimulationResult, encode_all
from lightkv.router.simulate.simulator import simulate
from lightkv.router.simulate.sweep import Repeats, sweep
from tests.support.combinations import slow
from tests.support.simulation_results import SMALL, Parsed, nothing, without_charts

TOKEN, PAGED = SMALL, replace(SMALL, allocation="paged:48")


@pytest.fixture(scope="module")
def swept() -> list[Repeats]:
    """Two allocations with three seeds each."""
    return sweep("chat", [TOKEN, PAGED], 3, lambda what, done: None)


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, args)], prog_name="lightkv")
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


# --------------------------------------------------------------------------------
# What is simulated


def test_a_sweep_is_each_simulation_by_itself(swept: list[Repeats]) -> None:
    alone = [simulate("chat", replace(config, seed=seed)) for config, seed in ((TOKEN, 2), (PAGED, 0))]
    assert [group.seeds for group in swept] == [[0, 1, 2], [0, 1, 2]]
    found = [swept[0].results[2], swept[1].results[0]]
    assert [result.to_json() for result in found] == [result.to_json() for result in alone]
    assert len({result.figures.goodput for result in swept[0].results}) == 3


@pytest.mark.parametrize("size", [17, *slow(2, 1000)])
def test_pages_of_any_size_are_simulated(size: int) -> None:
    assert page_of(f"paged:{size}") == size
    figures = simulate("chat", replace(SMALL, allocation=f"paged:{size}")).figures
    assert figures.num_finished == SMALL.requests
    assert figures.memory_padding_share > 0


@pytest.mark.parametrize(
    "name", ["paged:1", "paged:0", "paged:-2", "paged:", "paged:x", "paged:٣", "pages:16", ""]
)
def test_what_is_no_allocation_is_refused(name: str) -> None:
    with pytest.raises(InvalidSimulation, match=r"give token, contiguous, or paged:N"):
        SimulationConfig(allocation=name)
    code, printed, notes = run("chat", "--requests", 5, "--allocation", f"token,{name}")
    assert (code, printed) == (2, "")
    assert "give token, contiguous, or paged:N" in notes


# --------------------------------------------------------------------------------
# The command


def test_several_policies_and_seeds_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Repeats] = []
    monkeypatch.setattr(report_page, "render", lambda groups: drawn.extend(groups) or "the page")
    out, report = tmp_path / "out.json", tmp_path / "out.html"
    options = ("chat", "--requests", 6, "--rate", 5, "--allocation", "token, paged:48,token", "--seeds", 2)
    admissions = ("--admission", "guaranteed,watermark")
    code, printed, _ = run(*options, *admissions, "--out", out, "--report", report)
    assert code == 0
    *lines, last = printed.splitlines()
    runs = json.loads(last)["runs"]
    assert [(one["allocation"], one["admission"], one["seed"]) for one in runs] == [
        (allocation, admission, seed)
        for allocation in ("token", "paged:48")
        for admission in ("guaranteed", "watermark")
        for seed in (0, 1)
    ]
    results = msgspec.json.decode(out.read_bytes(), type=dict[str, list[SimulationResult]])["results"]
    assert [json.loads(result.line()) for result in results] == runs
    assert encode_all(results) == out.read_bytes()
    assert report.read_text() == "the page"
    assert drawn == [Repeats(tuple(results[i : i + 2])) for i in range(0, 8, 2)]
    names = ["token · guaranteed", "token · watermark", "paged:48 · guaranteed", "paged:48 · watermark"]
    assert re.split(r"  +", lines[1].strip()) == names
    heading, first, *_ = next(re.split(r"  +", line) for line in lines if line.startswith("goodput"))
    goodputs = sorted(one["goodput"] for one in runs[:2])
    assert heading == "goodput /s"
    assert first == f"{sum(goodputs) / 2:.2f} ({goodputs[0]:.2f} – {goodputs[1]:.2f})"
    (waste,) = (re.split(r"  +", line)[1:] for line in lines if line.startswith("waste  "))
    assert [cell.startswith("* 0.00%") for cell in waste] == [True, True, False, False]
    memory = next(idx for idx, line in enumerate(lines) if line.startswith("Memory"))
    assert len({len(line) for line in lines[1:memory]}) == 1  # the columns are aligned, and none is cut
    assert "what a page costs or saves in attention" in lines[-1]


def test_one_seed_says_that_it_has_no_spread() -> None:
    _, printed, _ = run("chat", "--requests", 6, "--rate", 5, "--allocation", "token,contiguous")
    assert "one seed: --seeds 5 shows how far these figures spread" in printed
    assert "Means over the seeds" not in printed


@pytest.mark.parametrize("names", ["timely,", "timely,fifo"])
def test_what_is_no_admission_is_refused(names: str) -> None:
    code, printed, notes = run("chat", "--requests", 5, "--admission", names)
    assert (code, printed) == (2, "")
    assert f"--admission is '{names.partition(',')[2]}'; give one of" in notes


# --------------------------------------------------------------------------------
# Means and spreads


def with_goodput(*values: float, **settings: object) -> Repeats:
    """Results with seeds from 0 on, and these goodputs."""
    empty = nothing()
    return Repeats(tuple(
        replace(
            empty, settings={**empty.settings, **settings, "seed": seed},
            figures=replace(empty.figures, goodput=value, num_preemptions=seed),
        )
        for seed, value in enumerate(values)
    ))  # fmt: skip


def test_repeats_have_a_mean_and_a_spread() -> None:
    group = with_goodput(2.0, 4.0, 9.0)
    assert group.mean.figures.goodput == 5.0
    assert group.mean.figures.num_preemptions == 1
    assert group.spread(lambda figures: figures.goodput) == (2.0, 9.0)


@pytest.mark.parametrize(
    ("first", "second", "is_best"),
    [
        ((5.0, 6.0), (3.0, 4.0), True),
        ((5.0, 6.0), (3.0, 5.0), True),
        ((5.0, 6.0), (5.0, 4.0), False),
        ((5.0,), (4.99,), True),
        ((5.0,), (5.0,), False),
    ],
    ids=["apart", "with each seed", "with one seed not", "one seed", "equal"],
)
def test_the_best_is_marked_if_the_spread_allows_it(
    first: tuple[float, ...], second: tuple[float, ...], is_best: bool
) -> None:
    table, _ = policies([with_goodput(*first), with_goodput(*second, allocation="paged:48")])
    (cells,) = (cells for heading, cells in table.rows if heading == "goodput /s")
    assert [cell.best for cell in cells] == [is_best, False]
    spread = f"{first[0]:.2f} – {first[-1]:.2f}" if len(first) > 1 else ""
    assert cells[0].spread == spread


def test_a_lower_latency_is_better_outside_its_spread() -> None:
    groups = [with_goodput(1.0, 1.0, allocation=name) for name in ("token", "paged:48")]
    low, high = (0.1, 0.2), (0.3, 0.4)
    for group, values in zip(groups, (high, low), strict=True):
        for result, value in zip(group.results, values, strict=True):
            object.__setattr__(result.figures, "ttft_p50", value)
    table, _ = policies(groups)
    (cells,) = (cells for heading, cells in table.rows if heading == "TTFT p50, s")
    assert [cell.best for cell in cells] == [False, True]


def test_the_report_says_what_it_leaves_out_and_shows_the_spread(swept: list[Repeats]) -> None:
    swept = [Repeats(tuple(map(without_charts, group.results))) for group in swept]
    page = Parsed(render(swept))
    text = page.all_text()
    assert "What a page costs or saves in attention" in text
    assert "means over the seeds 0, 1, 2" in text
    low, high = sorted(result.figures.goodput for result in swept[0].results)[::2]
    assert f"{low:.2f} – {high:.2f}" in page.text["small"]
    alone = Parsed(render([Repeats(group.results[:1]) for group in swept]))
    assert "Each figure is of one seed" in alone.all_text()
    assert "small" not in alone.text
