"""The charts of the report: ticks, scales and paths."""

import math

import pytest

from lightkv.router.simulate.report import chart
from lightkv.router.simulate.report.charts import in_seconds
from lightkv.router.simulate.report.page import render
from lightkv.router.simulate.result import CURVE_QUANTILES, SimulationResult
from tests.support.simulation_results import Parsed


@pytest.mark.parametrize(
    ("low", "high", "log", "labels"),
    [
        (0, 91.8, False, "0 20 40 60 80"),
        (0, 1.05, False, "0 0.2 0.4 0.6 0.8 1"),
        (0, 126_000, False, "0 50000 100000"),
        (0, 3e-5, False, "0 5e-06 1e-05 1.5e-05 2e-05 2.5e-05 3e-05"),
        (0.008, 13, True, "0.01 0.1 1 10"),
        (0.006, 0.13, True, "0.01 0.02 0.05 0.1"),
        (0.0163, 0.0187, True, "0.017 0.018"),
    ],
)
def test_ticks_are_round(low: float, high: float, log: bool, labels: str) -> None:
    ticks = chart.Scale(low, high, 0, 100, log).ticks(lambda value: f"{value:g}")
    assert " ".join(tick.label for tick in ticks) == labels
    assert all(0 <= tick.at <= 100 for tick in ticks)


def test_scales_map_their_ends_to_the_ends_of_the_axis() -> None:
    log = chart.Scale(0.01, 100, 200, 0, log=True)
    assert [log.at(value) for value in (0.0, 0.01, 1, 100, 1e9)] == pytest.approx([200, 200, 100, 0, 0])
    places = [chart.nines(quantile) for quantile in CURVE_QUANTILES]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (chart.LEFT, chart.PLOT_RIGHT)
    assert chart.nines(0.99) - chart.nines(0.9) == pytest.approx(chart.nines(0.999) - chart.nines(0.99))


def test_an_interval_is_drawn_at_its_mean() -> None:
    scales = chart.Scale(0, 10, 0, 100), chart.Scale(0, 10, 100, 0)
    assert chart.steps(scales, [0, 2, 3], [5, 1]) == "M0 50H20V90H30"
    assert chart.between(scales, [0, 2, 3], [0, 0], [5, 1]) == "M0 50H20V90H30L30 100H20V100H0Z"


@pytest.mark.slow
def test_the_series_is_drawn_to_its_end(one: SimulationResult) -> None:
    """Its last interval is cut short; the last step ends at the plot's edge."""
    paths = [path["d"] for path in Parsed(render([one])).of("path") if "line" in path.get("class", "")]
    drawn = [path for path in paths if path.count("H") == len(one.series.used)]
    assert len(drawn) == 3  # held, in flight, waiting
    assert all(path.endswith(f"H{chart.PLOT_RIGHT}") for path in drawn)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (12e-6, "12 µs"),
        (0.0195, "19.5 ms"),
        (1.0, "1 s"),
        (7.934, "7.93 s"),
        (1234.0, "1234 s"),
    ],
)
def test_latencies_have_a_suitable_unit(seconds: float, text: str) -> None:
    assert in_seconds(seconds) == text


def test_latency_curves_keep_their_order() -> None:
    scale = chart.log_scale([0.0, 0.5, 2.0])
    assert scale is not None
    assert scale.at(0.0) == scale.start
    assert scale.at(0.5) > scale.at(2.0) > chart.TOP
    assert chart.log_scale([0.0]) is None
    assert math.isclose(scale.high / scale.low, 4 * 1.3**2)
