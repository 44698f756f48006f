"""Simulation results to report on: an empty one, one with hostile names, and a parser of report pages."""

from dataclasses import asdict, fields, replace
from html.parser import HTMLParser

from lightkv.router.simulate.config import SimulationConfig
from lightkv.router.simulate.result import CURVE_QUANTILES, Curve, Figures, Series, SimulationResult

SMALL = SimulationConfig(requests=24, load=1.2, capacity=10_000, max_new=512)
HOSTILE = (
    """</title></style><script>alert("x")</script><img src=http://localhost/x onerror='x'>{{ 7 * 7 }}&amp;"""
)


def nothing() -> SimulationResult:
    """Returns the result of a simulation without requests."""
    figures = {field.name: 0 if field.type is int else 0.0 for field in fields(Figures)}
    settings = {**asdict(SMALL), "trace": "nothing", "admission": "guaranteed"}
    empty = Curve(list(CURVE_QUANTILES), [0.0] * len(CURVE_QUANTILES))
    series = Series(1.0, 100, [], [], [], [], [], [])
    return SimulationResult(settings, {"source": {}}, Figures(**figures), series, empty, empty)  # type: ignore[arg-type]


def without_charts(result: SimulationResult) -> SimulationResult:
    """Returns a result with the same settings and figures, of which the report draws nothing."""
    empty = nothing()
    return replace(result, series=empty.series, ttft=empty.ttft, tpot=empty.tpot)


def hostile(one: SimulationResult) -> list[SimulationResult]:
    """Returns two results whose names are markup."""
    settings = {**one.settings, "trace": HOSTILE, "admission": HOSTILE, HOSTILE: HOSTILE}
    source = {HOSTILE: HOSTILE, "model": [HOSTILE], "median_relative_error": HOSTILE}
    bad = replace(one, settings=settings, step_time={"base": HOSTILE, "source": source})
    return [bad, replace(bad, settings={**settings, "allocation": HOSTILE})]


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and its text by the enclosing tag."""

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
