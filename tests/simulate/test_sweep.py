"""Several allocations and seeds in one run: what is simulated, printed, written and compared."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightkv.router.cli.app import app
from lightkv.router.simulate.config import InvalidSimulation, SimulationConfig, page_of
from lightkv.router.simulate.report.page import render
from lightkv.router.simulate.report.tables import policies
from lightkv.router.simulate.result import Figures, SimulationResult, encode_all, load_all, series_csv
from lightkv.router.simulate.simulator import simulate
from lightkv.router.simulate.sweep import Repeats, is_above, repeats_of, sweep
from tests.support.combinations import slow
from tests.support.simulation_results import SMALL, Parsed, nothing, without_charts

TOKEN, PAGED = SMALL, replace(SMALL, allocation="paged:48")


@pytest.fixture(scope="module")
def swept() -> list[SimulationResult]:
    """Two allocations with three seeds each."""
    return sweep("chat", [TOKEN, PAGED], 3, lambda what, done: None)


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, args)], prog_name="lightkv")
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


# --------------------------------------------------------------------------------
# What is simulated


def test_a_sweep_is_each_simulation_by_itself(swept: list[SimulationResult]) -> None:
    alone = [simulate("chat", replace(config, seed=seed)) for config, seed in ((TOKEN, 2), (PAGED, 0))]
    assert [result.to_json() for result in swept[2:4]] == [result.to_json() for result in alone]
    assert len({result.figures.goodput for result in swept[:3]}) == 3


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


def test_several_allocations_and_seeds_in_one_run(tmp_path: Path) -> None:
    out, report, series = (tmp_path / name for name in ("out.json", "out.html", "out.csv"))
    options = ("chat", "--requests", 6, "--rate", 5, "--allocation", "token, paged:48,token", "--seeds", 2)
    code, printed, _ = run(*options, "--out", out, "--report", report, "--series", series)
    assert code == 0
    *lines, last = printed.splitlines()
    runs = json.loads(last)["runs"]
    assert [(one["allocation"], one["seed"]) for one in runs] == [
        ("token", 0), ("token", 1), ("paged:48", 0), ("paged:48", 1),
    ]  # fmt: skip
    results = load_all(out)
    assert [json.loads(result.line()) for result in results] == runs
    assert all(f"{name} · guaranteed" in report.read_text() for name in ("token", "paged:48"))
    assert series.read_text() == series_csv(results)
    heading, mean, spread = (re.split(r"  +", line.strip()) for line in lines[:3])
    assert (heading[:2], mean[0], spread[0]) == (
        ["policy", "goodput/s"],
        "token · guaranteed",
        "seeds 0 to 1",
    )
    goodputs = sorted(one["goodput"] for one in runs[:2])
    assert mean[1] == f"{sum(goodputs) / 2:.2f}"
    assert spread[1] == f"{goodputs[0]:.2f}-{goodputs[1]:.2f}"
    assert len({len(line) for line in lines[:5]}) == 1  # the columns are aligned, and none is cut
    assert "what a page costs or saves in attention" in lines[-1]


def test_one_seed_says_that_it_has_no_spread() -> None:
    _, printed, _ = run("chat", "--requests", 6, "--rate", 5, "--allocation", "token,contiguous")
    assert "one seed: --seeds 5 shows how far these figures spread" in printed
    assert "seeds 0 to" not in printed


def test_files_of_one_run_are_different_ones(tmp_path: Path) -> None:
    code, printed, notes = run("chat", "--out", tmp_path / "x", "--series", tmp_path / "." / "x")
    assert (code, printed) == (2, "")
    assert "--out and --series are both" in notes
    assert not list(tmp_path.iterdir())


def test_a_report_of_several_files_puts_seeds_together(swept: list[SimulationResult], tmp_path: Path) -> None:
    one, several, report = (tmp_path / name for name in ("one.json", "several.json", "x.html"))
    results = [*map(without_charts, swept)]
    one.write_bytes(encode_all(results[:1]))
    several.write_bytes(encode_all(results[1:]))
    args = ["simulate-report", str(one), str(several), "--report", str(report)]
    result = CliRunner().invoke(app, args, prog_name="lightkv")
    assert (result.exit_code, "6 results drawn" in result.stderr) == (0, True)
    assert report.read_text() == render(results)
    empty = tmp_path / "empty.json"
    empty.write_text('{"results": []}')
    result = CliRunner().invoke(
        app, ["simulate-report", str(empty), "--report", str(report)], prog_name="lightkv"
    )
    assert (result.exit_code, "the list of results is empty" in result.stderr) == (2, True)


def test_series_have_a_line_for_each_interval(swept: list[SimulationResult]) -> None:
    rows = list(csv.DictReader(series_csv(swept[2:4]).splitlines()))
    first, second = swept[2].series, swept[3].series
    assert len(rows) == len(first.used) + len(second.used)
    row, idx = rows[len(first.used) + 3], 3
    assert (row["allocation"], row["admission"], row["seed"]) == ("paged:48", "guaranteed", "0")
    assert float(row["seconds"]) == idx * second.width
    for name in ("used", "padding", "cached", "running", "waiting"):
        assert float(row[name]) == getattr(second, name)[idx]


# --------------------------------------------------------------------------------
# Means and spreads


def with_goodput(*values: float, **settings: object) -> list[SimulationResult]:
    """Results with seeds from 0 on, and these goodputs."""
    empty = nothing()
    return [
        replace(
            empty, settings={**empty.settings, **settings, "seed": seed},
            figures=replace(empty.figures, goodput=value, num_preemptions=seed),
        )
        for seed, value in enumerate(values)
    ]  # fmt: skip


def test_results_that_differ_in_their_seed_alone_are_repeats(swept: list[SimulationResult]) -> None:
    assert [group.seeds for group in repeats_of(swept)] == [[0, 1, 2], [0, 1, 2]]
    assert [len(group.results) for group in repeats_of([swept[0], swept[0]])] == [1, 1]
    slower = [replace(swept[1], step_time={**swept[1].step_time, "base": 1.0})]
    assert len(repeats_of([swept[0], *slower])) == 2
    group = Repeats(tuple(with_goodput(2.0, 4.0, 9.0)))
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
    groups = [
        Repeats(tuple(with_goodput(*first))),
        Repeats(tuple(with_goodput(*second, allocation="paged:48"))),
    ]
    table, _ = policies(groups, ["a", "b"], comparable=True)
    (cells,) = (cells for heading, cells in table.rows if heading == "goodput /s")
    assert [cell.best for cell in cells] == [is_best, False]
    spread = f"{first[0]:.2f} – {first[-1]:.2f}" if len(first) > 1 else ""
    assert cells[0].spread == spread


def test_other_seeds_are_compared_by_their_spread() -> None:
    def goodput(figures: Figures) -> float:
        return figures.goodput

    two, three = Repeats(tuple(with_goodput(5.0, 6.0))), Repeats(tuple(with_goodput(3.0, 4.0, 5.0)))
    assert not is_above(two, three, goodput)
    assert is_above(Repeats(tuple(with_goodput(5.1, 6.0))), three, goodput)


def test_a_lower_latency_is_better_outside_its_spread() -> None:
    groups = [Repeats(tuple(with_goodput(1.0, 1.0, allocation=name))) for name in ("token", "paged:48")]
    low, high = (0.1, 0.2), (0.3, 0.4)
    for group, values in zip(groups, (high, low), strict=True):
        for result, value in zip(group.results, values, strict=True):
            object.__setattr__(result.figures, "ttft_p50", value)
    table, _ = policies(groups, ["a", "b"], comparable=True)
    (cells,) = (cells for heading, cells in table.rows if heading == "TTFT p50, s")
    assert [cell.best for cell in cells] == [False, True]


def test_the_report_says_what_it_leaves_out_and_shows_the_spread(swept: list[SimulationResult]) -> None:
    page = Parsed(render([*map(without_charts, swept)]))
    text = page.all_text()
    assert "What a page costs or saves in attention" in text
    assert "means over the seeds 0, 1, 2" in text
    low, high = sorted(result.figures.goodput for result in swept[:3])[::2]
    assert f"{low:.2f} – {high:.2f}" in page.text["small"]
    alone = Parsed(render([*map(without_charts, (swept[0], swept[3]))]))
    assert "Each figure is of one seed" in alone.all_text()
    assert "small" not in alone.text
