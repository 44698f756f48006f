"""Tests the report of simulations: its contents, and that hostile names stay text in its page."""

import math
import re
from dataclasses import replace

import msgspec
import pytest

from lightkv.router.simulate.report.page import render
from lightkv.router.simulate.result import Series, SimulationResult
from lightkv.router.simulate.simulator import simulate
from lightkv.router.simulate.sweep import Repeats
from tests.support.combinations import slow
from tests.support.simulation_results import HOSTILE, SMALL, Parsed, hostile, nothing, without_charts


def page_of(*results: SimulationResult) -> str:
    """Returns the report of policies of one seed."""
    return render([Repeats((result,)) for result in results])


@pytest.fixture(scope="module")
def page_of_one(one: SimulationResult) -> str:
    return page_of(one)


@pytest.fixture(scope="module")
def page_of_all(found: dict[str, SimulationResult]) -> str:
    return page_of(*found.values())


def test_one_result_has_its_figures_charts_and_settings(one: SimulationResult, page_of_one: str) -> None:
    page = Parsed(page_of_one)
    text, figures = page.all_text(), one.figures
    headings = ["In short", "Latencies", "paged:64 · watermark", "What is left out", "Settings"]
    assert page.text["h2"] == headings
    assert page.text["h3"] == [
        "Time to the first token (TTFT)", "Time per token after it (TPOT)", "Memory", "Requests",
    ]  # fmt: skip
    for words in (
        f"{figures.goodput:.2f} requests a second, {figures.met_share:.1%} of them",
        f"{figures.memory_padding_share:.2%} padding",
        f"{figures.num_preemptions:,}",
        "target 10 s",
        "target 100 ms",
        "of the pool's 9,984",
        "step_time.source.median_relative_error",
        f"{one.step_time['source']['median_relative_error']:g}",
        "waste: ends of pages",
    ):
        assert words in text, words
    for name in one.settings:
        assert name in page.text["th"], name


def test_several_results_are_compared(found: dict[str, SimulationResult], page_of_all: str) -> None:
    page = Parsed(page_of_all)
    names = ["token · timely", "paged:64 · watermark", "contiguous · sum", "token · past-future"]
    assert [name for name in page.text["h2"] if "·" in name] == names
    for name in names:
        assert page.text["th"].count(name) == 3  # two policy tables, settings
    best = max(result.figures.goodput for result in found.values())
    assert f"{best:.2f}" in page.text["strong"]
    assert "waste: reserved, without a token" in page.all_text()


def test_the_report_says_which_waiting_requests_are_not_counted(one: SimulationResult) -> None:
    words = "only the next ones are counted as waiting"
    one = without_charts(one)
    at_once = without_charts(simulate("chat", replace(SMALL, load=None, rate=math.inf)))
    assert words in Parsed(page_of(at_once)).all_text()
    assert words not in Parsed(page_of(one)).all_text()


def test_a_step_time_that_was_given_has_no_fit(one: SimulationResult) -> None:
    one, source = without_charts(one), {"given": "base=0.01"}
    text = Parsed(page_of(replace(one, step_time={**one.step_time, "source": source}))).all_text()
    assert "how well they fit a device is not known" in text


def test_the_same_results_are_the_same_bytes(
    found: dict[str, SimulationResult], one: SimulationResult, page_of_one: str
) -> None:
    again = [
        msgspec.json.decode(result.to_json(), type=SimulationResult) for result in (one, *found.values())
    ]
    assert page_of(again[0]) == page_of_one
    assert page_of(*map(without_charts, again[1:])) == page_of(*map(without_charts, found.values()))


@pytest.mark.parametrize("num", [1, *slow(2), 12])
def test_the_report_says_that_there_is_nothing_to_draw(num: int, one: SimulationResult) -> None:
    page = Parsed(page_of(*[nothing()] * num))
    assert "nothing to draw" in page.all_text()
    assert not [svg for svg in page.of("svg") if svg.get("role") == "img"]
    if num > 1:
        Parsed(page_of(*[nothing()] * num, one))


def test_a_result_of_one_point_and_no_time_is_drawn() -> None:
    result = replace(nothing(), series=Series(1.0, 100, [0.0], [0.0], [0.0], [0.0], [0.0], [0.0]))
    page = page_of(result)
    assert "nan" not in " ".join(path["d"] for path in Parsed(page).of("path"))


NAMESPACES = ("http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg")


def assert_self_contained(page: str) -> None:
    parsed = Parsed(page)
    known = {
        "html", "head", "meta", "link", "title", "style", "body", "header", "main", "footer", "section", "h1",
        "h2", "h3", "p", "div", "figure", "figcaption", "small", "svg", "defs", "g", "path", "text", "rect",
        "use", "clippath", "table", "thead", "tbody", "tr", "th", "td", "strong",
    }  # fmt: skip
    assert {tag for tag, _ in parsed.tags} <= known
    for tag, attributes in parsed.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            is_namespace = tag == "svg" and name.startswith("xmlns") and value in NAMESPACES
            assert is_namespace or not re.search(r"https?:|url\((?!#)", value), (tag, name, value)
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert value.startswith(("data:", "#")), (tag, name, value)
    styles = re.findall(r"<style.*?>(.*?)</style>", page, re.S)
    assert styles
    assert not any(re.search(r"url\(|@import|http", style) for style in styles)
    (policy,) = (meta for meta in parsed.of("meta") if meta.get("http-equiv"))
    assert policy["content"].startswith("default-src 'none'")


def test_it_is_self_contained(page_of_one: str, page_of_all: str) -> None:
    assert_self_contained(page_of_all)
    assert_self_contained(page_of_one)


@pytest.mark.parametrize("num", [*slow(1), 2])
def test_names_stay_text(num: int, one: SimulationResult) -> None:
    page = page_of(*hostile(one)[:num])
    assert_self_contained(page)
    assert "&lt;script&gt;" in page
    assert "49" not in Parsed(page).text["title"][0]
    assert HOSTILE in " ".join(Parsed(page).text["h1"])
