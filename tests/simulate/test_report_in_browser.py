"""The report in a headless browser: it loads nothing, and its charts are within their boxes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightkv.router.simulate.report.page import render
from lightkv.router.simulate.result import SimulationResult
from lightkv.router.simulate.sweep import Repeats
from tests.support.headless_browser import Page, browser
from tests.support.simulation_results import hostile


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


BOXES = """[...document.querySelectorAll("figure svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll("#axes_1 > g > path")].map(line => {
        const mark = line.getBoundingClientRect();
        return {inside: mark.left >= box.left - 1 && mark.right <= box.right + 1
            && mark.top >= box.top - 1 && mark.bottom <= box.bottom + 1};
    });
    const texts = [...svg.querySelectorAll("text")].map(text => {
        const place = text.getBoundingClientRect();
        return {height: place.height, text: text.textContent,
            inside: place.left >= box.left - 1 && place.right <= box.right + 1};
    });
    return {width: box.width, height: box.height, marks, texts};
})"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 360], ids=["wide", "phone"])
@pytest.mark.parametrize("kind", ["one", "several", "hostile"])
def test_the_page_opens_without_an_error_or_a_request(
    page: Page, found: dict[str, SimulationResult], kind: str, width: int, tmp_path: Path
) -> None:
    results = {
        "one": list(found.values())[1:2],
        "several": list(found.values()),
        "hostile": hostile(found["token timely"]),
    }[kind]
    file = tmp_path / "report.html"
    file.write_text(render([Repeats((result,)) for result in results]), encoding="utf-8")
    page.show(width, 800)
    page.open(file.as_uri())
    assert page.faults == []
    assert page.requests == [file.as_uri()]
    charts = page.ask(BOXES)
    assert len(charts) == (4 if len(results) == 1 else 5 + 2 * len(results))
    for box in charts:
        assert box["width"] > 250
        assert box["height"] > 140
        assert box["marks"]
        for mark in box["marks"]:
            assert mark["inside"]
        for text in box["texts"]:
            assert text["inside"], text
            assert text["height"] >= (11 if width > 1000 else 5)
    assert page.ask("document.scrollingElement.scrollWidth") == width, "the page is wider than its window"


@pytest.mark.browser
def test_the_page_is_printed_dark_on_light_and_within_the_paper(
    page: Page, found: dict[str, SimulationResult], tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    groups = [(r, replace(r, settings={**r.settings, "seed": 1})) for r in found.values()]
    groups.append((*hostile(found["token timely"])[:1] * 2,))
    file.write_text(render([Repeats(results) for results in groups]), encoding="utf-8")
    page.show(720, 1000, "dark", media="print")
    page.open(file.as_uri())
    assert page.faults == []
    assert page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.ask("document.scrollingElement.scrollWidth") == 720


@pytest.mark.browser
def test_the_browser_reports_requests_and_errors(page: Page, tmp_path: Path) -> None:
    """Without this the other tests would prove nothing."""
    file = tmp_path / "bad.html"
    picture = "http://127.0.0.1:9/picture.png"
    file.write_text(f"<!DOCTYPE html><img src='{picture}'><script>nowhere()</script>")
    page.open(file.as_uri())
    assert page.requests == [file.as_uri(), picture]
    assert any("not loaded" in fault for fault in page.faults)
    assert any("exception" in fault for fault in page.faults)
    assert page.ask("1 + 1") == 2


@pytest.mark.browser
def test_the_policy_of_the_page_lets_nothing_be_loaded(
    page: Page, one: SimulationResult, tmp_path: Path
) -> None:
    """The policy holds even if something got into the page unescaped."""
    file = tmp_path / "report.html"
    bad = "<img src='http://127.0.0.1:9/x.png'><script>document.title = 'broken into'</script></main>"
    file.write_text(render([Repeats((one,))]).replace("</main>", bad))
    page.open(file.as_uri())
    assert page.ask("document.title").startswith("chat: paged:64")
    assert any("csp" in fault.lower() or "Content Security Policy" in fault for fault in page.faults)
    assert all("csp" in fault or "Content Security Policy" in fault for fault in page.faults)
