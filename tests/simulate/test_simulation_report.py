"""The report of simulations: what it says and draws, that nothing gets out of its page, and a browser on it."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightkv.router.cli import simulate as simulate_cli
from lightkv.router.cli.app import app
from lightkv.router.simulate.config import SimulationConfig
from lightkv.router.simulate.output_file import UnwritableFile, check_writable, write_whole
from lightkv.router.simulate.report import chart
from lightkv.router.simulate.report.charts import in_seconds
from lightkv.router.simulate.report.page import labels, render
from lightkv.router.simulate.result import CURVE_QUANTILES, Curve, Figures, Series, SimulationResult
from lightkv.router.simulate.simulator import simulate
from tests.support.headless_browser import Page, browser

SMALL = SimulationConfig(requests=60, load=1.2, capacity=10_000, max_new=2048)
HOSTILE = (
    """</title></style><script>alert("x")</script><img src=http://localhost/x onerror='x'>{{ 7 * 7 }}&amp;"""
)


@pytest.fixture(scope="module")
def found() -> dict[str, SimulationResult]:
    """Results of the same requests by several policies."""
    policies = (
        ("token", "timely"), ("paged:64", "watermark"), ("contiguous", "sum"), ("token", "past-future"),
    )  # fmt: skip
    configs = [replace(SMALL, allocation=name, admission=admission) for name, admission in policies]
    return {config.allocation + " " + config.counted: simulate("chat", config) for config in configs}


@pytest.fixture(scope="module")
def one(found: dict[str, SimulationResult]) -> SimulationResult:
    return found["paged:64 watermark"]


def nothing() -> SimulationResult:
    """A simulation in which nothing ever happened."""
    figures = {field.name: 0 if field.type is int else 0.0 for field in fields(Figures)}
    settings = {**asdict(SMALL), "trace": "nothing", "admission": "exact"}
    empty = Curve(list(CURVE_QUANTILES), [0.0] * len(CURVE_QUANTILES))
    series = Series(1.0, 100, [], [], [], [], [])
    return SimulationResult(settings, {"source": {}}, Figures(**figures), series, empty, empty)  # type: ignore[arg-type]


class Parsed(HTMLParser):
    """A page's tags with their attributes, and its text by the tag that it stands in."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.text.setdefault(self._open[-1], []).append(data.strip())

    def all_text(self) -> str:
        return " ".join(" ".join(" ".join(texts) for texts in self.text.values()).split())

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


# --------------------------------------------------------------------------------
# What it says


def test_one_result_has_its_figures_charts_and_settings(one: SimulationResult) -> None:
    page = Parsed(render([one]))
    text, figures = page.all_text(), one.figures
    headings = [
        "In short",
        "Memory and requests over time",
        "Latencies",
        "Policy",
        "Step-time model",
        "Settings",
    ]
    assert page.text["h2"] == [*headings, "Every figure"]
    assert page.text["h3"] == [
        "Memory", "Requests", "Time to the first token (TTFT)", "Time per token after it (TPOT)",
    ]  # fmt: skip
    for words in (
        f"Goodput: {figures.goodput:.2f} requests a second",
        f"{figures.memory_padding_share:.2%} was lost at the ends of pages",
        f"{figures.num_preemptions:,}",
        "target 10 s",
        "target 100 ms",
        "capacity 9.984k",
        "fit error, median",
        f"{one.step_time['source']['median_relative_error']:.1%}",
        "waste: ends of pages",
    ):
        assert words in text, words
    for name in (*one.settings, *asdict(figures)):
        assert name in page.text["th"], name


def test_several_are_compared(found: dict[str, SimulationResult]) -> None:
    page = Parsed(render(list(found.values())))
    names = ["token · timely", "paged:64 · watermark", "contiguous · sum", "token · past-future"]
    assert labels(list(found.values())) == names
    assert [name for name in page.text["h2"] if "·" in name] == names
    for name in names:
        assert page.text["th"].count(name) == 4  # two policy tables, settings, figures
    best = max(result.figures.goodput for result in found.values())
    assert f"{best:.2f}" in page.text["strong"]
    assert "differ in more than the policy" not in page.all_text()
    assert "waste: reserved, without a token" in page.all_text()


def test_what_differs_in_more_than_the_policy_has_no_best(found: dict[str, SimulationResult]) -> None:
    one, other = list(found.values())[:2]
    page = Parsed(render([one, replace(other, settings={**other.settings, "capacity": 5000})]))
    assert "differ in more than the policy: capacity" in page.all_text()
    assert "strong" not in page.text
    page = Parsed(render([one, replace(other, settings={**other.settings, "reserve": 0.1, "patience": 3.0})]))
    assert "differ in more than the policy" not in page.all_text()
    page = Parsed(render([one, replace(other, step_time={**other.step_time, "base": 1.0})]))
    assert "differ in more than the policy: step_time" in page.all_text()


def test_names_say_what_differs(one: SimulationResult) -> None:
    def varied(**values: Any) -> SimulationResult:
        return replace(one, settings={**one.settings, **values})

    assert labels([varied(load=0.7), varied(load=1.3)]) == [
        "paged:64 · watermark, load 0.7", "paged:64 · watermark, load 1.3",
    ]  # fmt: skip
    assert labels([one, one]) == ["1: paged:64 · watermark", "2: paged:64 · watermark"]


def test_that_not_all_who_wait_from_the_start_are_counted_is_said(one: SimulationResult) -> None:
    words = "the next ones alone are counted as waiting"
    at_once = simulate("chat", replace(SMALL, load=None, rate=math.inf))
    assert words in Parsed(render([at_once])).all_text()
    assert words in Parsed(render([one, at_once])).all_text()
    assert words not in Parsed(render([one])).all_text()


def test_a_step_time_that_was_given_has_no_fit(one: SimulationResult) -> None:
    source = {"given": "base=0.01"}
    text = Parsed(render([replace(one, step_time={**one.step_time, "source": source})])).all_text()
    assert "how well they fit a device is not known" in text


def test_the_same_results_are_the_same_bytes(found: dict[str, SimulationResult]) -> None:
    again = [SimulationResult.from_json(result.to_json()) for result in found.values()]
    assert render(again) == render(list(found.values()))


@pytest.mark.parametrize("num", [1, 2, 12])
def test_nothing_to_draw_is_said(num: int, one: SimulationResult) -> None:
    page = Parsed(render([nothing()] * num))
    assert "nothing to draw" in page.all_text()
    assert not [svg for svg in page.of("svg") if svg.get("role") == "img"]
    Parsed(render([*[nothing()] * num, one]))


def test_a_result_of_one_point_and_no_time_is_drawn() -> None:
    result = replace(nothing(), series=Series(1.0, 100, [0.0], [0.0], [0.0], [0.0], [0.0]))
    page = render([result])
    assert "nan" not in " ".join(path["d"] for path in Parsed(page).of("path"))


# --------------------------------------------------------------------------------
# What it may not


def assert_self_contained(page: str) -> None:
    parsed = Parsed(page)
    known = {
        "html", "head", "meta", "link", "title", "style", "body", "header", "main", "footer", "section", "h1",
        "h2", "h3", "p", "dl", "div", "dt", "dd", "figure", "svg", "desc", "path", "text", "rect", "ul", "li",
        "table", "thead", "tbody", "tr", "th", "td", "strong",
    }  # fmt: skip
    assert {tag for tag, _ in parsed.tags} <= known
    for tag, attributes in parsed.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert not re.search(r"https?:|url\(", value), (tag, name, value)
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                assert value.startswith("data:"), (tag, name, value)
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    assert style is not None
    assert not re.search(r"url\(|@import|http", style[1])
    (policy,) = (meta for meta in parsed.of("meta") if meta.get("http-equiv"))
    assert policy["content"].startswith("default-src 'none'")


def test_it_is_self_contained(found: dict[str, SimulationResult]) -> None:
    assert_self_contained(render(list(found.values())))
    assert_self_contained(render(list(found.values())[:1]))


def hostile(one: SimulationResult) -> list[SimulationResult]:
    """Names that would break out of the page where they could."""
    settings = {**one.settings, "trace": HOSTILE, "admission": HOSTILE, HOSTILE: HOSTILE}
    source = {HOSTILE: HOSTILE, "model": [HOSTILE], "median_relative_error": HOSTILE}
    bad = replace(one, settings=settings, step_time={"base": HOSTILE, "source": source})
    return [bad, replace(bad, settings={**settings, "allocation": HOSTILE})]


@pytest.mark.parametrize("num", [1, 2])
def test_names_stay_text(num: int, one: SimulationResult) -> None:
    page = render(hostile(one)[:num])
    assert_self_contained(page)
    assert "&lt;script&gt;" in page
    assert "49" not in Parsed(page).text["title"][0]
    assert HOSTILE in " ".join(Parsed(page).text["h1"])


# --------------------------------------------------------------------------------
# Charts


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


def test_scales_have_their_ends_where_they_should() -> None:
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
def test_latencies_have_the_unit_that_suits(seconds: float, text: str) -> None:
    assert in_seconds(seconds) == text


# --------------------------------------------------------------------------------
# The commands


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, args)], prog_name="lightkv")
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


SHORT = ("simulate", "chat", "--requests", "20", "--rate", "5")


def test_a_simulation_writes_its_report_and_prints_what_it_did(tmp_path: Path) -> None:
    out, report, again = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "again.html"
    code, printed, _ = run(*SHORT, "--out", out, "--report", report)
    assert (code, printed) == (0, run(*SHORT)[1])
    assert report.read_text() == render([SimulationResult.load(out)])
    assert run("simulate-report", out, "--report", again)[0] == 0
    assert again.read_bytes() == report.read_bytes()
    code, _, notes = run("simulate-report", out, out, "--report", again)
    assert (code, notes) == (0, f"2 results drawn in {again}".replace("\n", ""))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.html", "out.html", "out.json"]


@pytest.mark.parametrize("option", ["--out", "--report"])
@pytest.mark.parametrize(
    ("place", "words"),
    [("none/x", "No such file"), ("", "it is a directory"), ("file/x", "Not a directory")],
    ids=["no-directory", "a-directory", "under-a-file"],
)
def test_what_cannot_be_written_is_refused_before_the_simulation(
    tmp_path: Path, option: str, place: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_cli, "_bar", None)  # the simulation's beginning
    (tmp_path / "file").touch()
    code, printed, notes = run(*SHORT, option, tmp_path / place)
    assert (code, printed) == (2, "")
    assert f"lightkv: {option} {tmp_path / place}: {words}" in notes
    assert "give a file in a directory that can be written" in notes
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_results_of_a_run_are_two_files(tmp_path: Path) -> None:
    code, _, notes = run(*SHORT, "--out", tmp_path / "x", "--report", tmp_path / "." / "x")
    assert code == 2
    assert "give two files" in notes
    result = tmp_path / "a.json"
    result.write_bytes(nothing().to_json())
    assert run("simulate-report", result, "--report", result)[0] == 2
    assert SimulationResult.load(result) == nothing()


BROKEN = {
    "empty": ("", "Input data was truncated"),
    "not-json": ("figures", "malformed"),
    "not-utf-8": (b'{"settings": {"trace": "\xff"}}', "give a file"),
    "another-object": ("{}", "settings"),
    "series-of-two-lengths": ('"used":[1.0],', "give all the same number"),
    "no-admission": ('"admissions"', "no admission"),
    "a-target-of-words": ('"ttft_target":"<b>"', "ttft_target is"),
    "no-width": ('"width":0.0', "width 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_result_is_said(name: str, tmp_path: Path) -> None:
    changes = {
        "series-of-two-lengths": '"used":[],', "no-admission": '"admission"',
        "a-target-of-words": '"ttft_target":10.0', "no-width": '"width":1.0',
    }  # fmt: skip
    given, words = BROKEN[name]
    whole = nothing().to_json().decode()
    if name in changes:
        assert isinstance(given, str)
        assert changes[name] in whole
        given = whole.replace(changes[name], given)
    path, report = tmp_path / "x.json", tmp_path / "x.html"
    path.write_bytes(given if isinstance(given, bytes) else given.encode())
    code, printed, notes = run("simulate-report", path, "--report", report)
    assert (code, printed) == (2, "")
    assert f"{path}: " in notes
    assert words in notes
    assert "that lightkv simulate --out wrote" in notes
    assert not report.exists()


def test_a_report_needs_a_result_and_a_place(tmp_path: Path) -> None:
    assert run("simulate-report", "--report", tmp_path / "x.html")[0] == 2
    assert run("simulate-report", tmp_path / "x.json")[0] == 2
    code, _, notes = run("simulate-report", tmp_path / "x.json", "--report", tmp_path / "x.html")
    assert (code, notes) == (2, f"lightkv: {tmp_path / 'x.json'}: No such file or directory")


# --------------------------------------------------------------------------------
# Files


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"before")
    path.chmod(0o640)

    def interrupted(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Path, "write_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [path]
    write_whole(path, b"after")
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    link, target, pipe = tmp_path / "link", tmp_path / "target", tmp_path / "pipe"
    link.symlink_to(target)
    check_writable(link, "--x")
    write_whole(link, b"data")
    assert link.is_symlink()
    assert target.read_bytes() == b"data"
    os.mkfifo(pipe)
    check_writable(pipe, "--x")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"data")
    assert os.read(reader, 10) == b"data"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritableFile, match="too long"):
        check_writable(tmp_path / ("x" * 300), "--x")


# --------------------------------------------------------------------------------
# In a browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


BOXES = """[...document.querySelectorAll("svg.chart")].map(svg => {
    const box = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll(".line")].map(line => {
        const mark = line.getBoundingClientRect();
        return {width: mark.width, inside: mark.left >= box.left - 1 && mark.right <= box.right + 1
            && mark.top >= box.top - 1 && mark.bottom <= box.bottom + 1,
            drawn: getComputedStyle(line).stroke !== "none"};
    });
    const texts = [...svg.querySelectorAll("text")].map(text => {
        const place = text.getBoundingClientRect();
        return {height: place.height, text: text.textContent,
            inside: place.left >= box.left - 1 && place.right <= box.right + 1};
    });
    return {width: box.width, height: box.height, marks, texts};
})"""


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "scheme"), [(1200, "light"), (360, "dark")], ids=["wide-light", "phone-dark"]
)
@pytest.mark.parametrize("kind", ["one", "several", "hostile"])
def test_it_opens_without_an_error_and_without_a_request(
    page: Page, found: dict[str, SimulationResult], kind: str, width: int, scheme: str, tmp_path: Path
) -> None:
    results = {
        "one": list(found.values())[1:2],
        "several": list(found.values()),
        "hostile": hostile(found["token timely"]),
    }[kind]
    file = tmp_path / "report.html"
    file.write_text(render(results), encoding="utf-8")
    page.show(width, 800, scheme)
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
            assert mark["width"] > 0.2 * box["width"]
            assert mark["inside"]
            assert mark["drawn"]
        for text in box["texts"]:
            assert text["inside"], text
            assert text["height"] >= 11
    assert page.ask("document.scrollingElement.scrollWidth") == width, "the page is wider than its window"
    colours = page.ask("[document.body, document.querySelector('h1')].map(e => getComputedStyle(e))"
                       ".flatMap(s => [s.backgroundColor, s.color])")  # fmt: skip
    page_colour, text_colour = (sum(map(int, re.findall(r"\d+", colours[i])[:3])) for i in (0, 3))
    assert (page_colour > 600 > 300 > text_colour) == (scheme == "light")
    assert (text_colour > 600 > 300 > page_colour) == (scheme == "dark")


@pytest.mark.browser
def test_it_is_printed_dark_on_light_and_within_the_paper(
    page: Page, found: dict[str, SimulationResult], tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    file.write_text(render(list(found.values())[:3]), encoding="utf-8")
    page.show(720, 1000, "dark", media="print")
    page.open(file.as_uri())
    assert page.faults == []
    assert page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.ask("document.scrollingElement.scrollWidth") == 720


@pytest.mark.browser
def test_the_browser_tells_of_requests_and_faults(page: Page, tmp_path: Path) -> None:
    """Or the tests before this one look at nothing."""
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
    """Even where something had got into it unescaped."""
    file = tmp_path / "report.html"
    bad = "<img src='http://127.0.0.1:9/x.png'><script>document.title = 'broken into'</script></main>"
    file.write_text(render([one]).replace("</main>", bad))
    page.open(file.as_uri())
    assert page.ask("document.title").startswith("chat: paged:64")
    assert any("csp" in fault.lower() or "Content Security Policy" in fault for fault in page.faults)
    assert all("csp" in fault or "Content Security Policy" in fault for fault in page.faults)


def test_latency_curves_keep_their_order() -> None:
    scale = chart.log_scale([0.0, 0.5, 2.0])
    assert scale is not None
    assert scale.at(0.0) == scale.start
    assert scale.at(0.5) > scale.at(2.0) > chart.TOP
    assert chart.log_scale([0.0]) is None
    assert math.isclose(scale.high / scale.low, 4 * 1.3**2)
