"""The charts of the report: what is drawn, where, and in which units."""

import re
from dataclasses import replace

import pytest

from lightkv.router.simulate.report.charts import in_seconds, latencies, memory, over_time
from lightkv.router.simulate.result import Series, SimulationResult
from tests.support.simulation_results import Parsed, nothing


def test_what_is_promised_stands_beside_what_is_held(
    one: SimulationResult, found: dict[str, SimulationResult]
) -> None:
    result = found["token timely"]
    assert max(result.series.promised) > 0
    assert max(result.series.promised) <= result.series.capacity
    labels = Parsed(memory(result).svg).text["text"]
    assert {"used", "held", "promised to guaranteed requests", "capacity"} <= set(labels)
    assert not any(one.series.promised)  # a watermark promises nothing
    assert "promised to guaranteed requests" not in Parsed(memory(one).svg).text["text"]


def test_an_interval_is_drawn_at_its_mean_and_the_last_one_to_its_end() -> None:
    """Two intervals of which the second is half as long: the steps are at 5 and at 1 of 10."""
    series = Series(2.0, 10, [5.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0])
    result = nothing()
    result = replace(result, series=series, figures=replace(result.figures, seconds=3.0))
    drawn = [path for path in Parsed(memory(result).svg).of("path") if "clip-path" in path]
    (held,) = [path for path in drawn if "fill: none" in path["style"] and "miter" in path["style"]]
    (capacity,) = [path for path in drawn if "dasharray" in path["style"]]
    _, (x0, y5), (x1, _), (_, y1), (x2, _), _ = points_of(held)
    (_, y10), _ = points_of(capacity)
    assert (x2 - x0) / (x1 - x0) == pytest.approx(3 / 2)
    assert (y5 - y10) / (y1 - y5) == pytest.approx(5 / 4, abs=1e-4)


def points_of(path: dict[str, str]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path["d"])]


def test_each_nine_has_the_same_width(one: SimulationResult) -> None:
    svg = latencies([one], [""])[0].svg
    places = {text: float(x) for x, text in re.findall(r'x="([\d.]+)"[^>]*>(90|99|99\.9)</text>', svg)}
    assert places["99"] - places["90"] == pytest.approx(places["99.9"] - places["99"], abs=1e-3)


def test_charts_are_named_and_described_in_words(one: SimulationResult) -> None:
    for chart in over_time(one):
        (svg,) = Parsed(chart.svg).of("svg")
        assert svg["role"] == "img"
        assert svg["aria-label"] == chart.title
        assert chart.words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (12e-6, "12 µs"),
        (0.0195, "19.5 ms"),
        (1.0, "1 s"),
        (7.934, "7.93 s"),
        (1234.0, "1.23 ks"),
    ],
)
def test_latencies_have_a_suitable_unit(seconds: float, text: str) -> None:
    assert in_seconds(seconds) == text
