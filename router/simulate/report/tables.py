"""The tables of simulations: policies side by side, settings, step-time models and every figure."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightkv.router.simulate.result import Figures, SimulationResult

PARAMETERS = {
    "base": "every step",
    "per_decode": "for each decoding request, in a step without prompt tokens",
    "per_kv": "for each token that decoding requests attend to",
    "prefill": "a step with prompt tokens, at least",
    "per_prompt": "for each token of a step with prompt tokens",
    "per_pair": "for each prompt token and each token that it attends to",
}
_ERRORS = {
    "steps": "steps measured",
    "median_relative_error": "fit error, median",
    "max_relative_error": "fit error, highest",
}


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `best`: it is the best of its column."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table. A row has a heading and cells. `numeric`: the cells are numbers, aligned right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    numeric: bool = True


@dataclass(frozen=True)
class _Column:
    """A column of a policy table. `better`: 1 for higher values, -1 for lower ones, 0 for neither."""

    heading: str
    value: Callable[[Figures], float]
    form: str
    better: int = 0


_SERVICE = (
    _Column("arrivals /s", lambda f: f.offered_rate, ",.2f"),
    _Column("load", lambda f: f.load, ".2f"),
    _Column("goodput /s", lambda f: f.goodput, ",.2f", 1),
    _Column("in time", lambda f: f.met_share, ".1%", 1),
    _Column("served /s", lambda f: f.served_rate, ",.2f", 1),
    _Column("TTFT p50, s", lambda f: f.ttft_p50, ",.2f", -1),
    _Column("TTFT p99, s", lambda f: f.ttft_p99, ",.2f", -1),
    _Column("TPOT p50, ms", lambda f: 1e3 * f.tpot_p50, ",.1f", -1),
    _Column("TPOT p99, ms", lambda f: 1e3 * f.tpot_p99, ",.1f", -1),
)
_MEMORY = (
    _Column("memory used", lambda f: f.memory_used_share, ".1%", 1),
    _Column("waste", lambda f: f.memory_padding_share, ".2%", -1),
    _Column("waste in a request", lambda f: f.last_page_waste_share, ".2%", -1),
    _Column("cached", lambda f: f.memory_cached_share, ".1%"),
    _Column("running", lambda f: f.mean_running, ",.0f"),
    _Column("preemptions", lambda f: f.num_preemptions, ",", -1),
    _Column("requests preempted", lambda f: f.preempted_share, ".2%", -1),
    _Column("recomputed", lambda f: f.recomputed_tokens, ",", -1),
)


def policies(
    results: Sequence[SimulationResult], names: Sequence[str], comparable: bool
) -> tuple[Table, Table]:
    """Returns the tables of service and of memory, with a row per result. `comparable`: marks the best."""
    bold = " The best of each column is bold." if comparable else ""
    service = "Service. In time: requests that met both targets. Served: until the last admission."
    memory = (
        "Memory: means while loaded, as shares of the pool's capacity. Waste: slots held without a token. "
        "Waste in a request: its share of the request's own slots. Recomputed: tokens computed again after "
        "preemptions."
    )
    return (
        _policies(service + bold, _SERVICE, results, names, comparable),
        _policies(memory + bold, _MEMORY, results, names, comparable),
    )


def _policies(
    caption: str,
    wanted: Sequence[_Column],
    results: Sequence[SimulationResult],
    names: Sequence[str],
    comparable: bool,
) -> Table:
    columns = []
    for column in wanted:
        values = [column.value(result.figures) for result in results]
        if column.heading in ("arrivals /s", "load") and not any(values):
            continue
        texts = [format(value, column.form) for value in values]
        best = format((max if column.better > 0 else min)(values), column.form)
        is_marked = comparable and bool(column.better) and len(set(texts)) > 1
        columns.append((column.heading, [Cell(text, is_marked and text == best) for text in texts]))
    rows = [(name, [cells[i] for _, cells in columns]) for i, name in enumerate(names)]
    return Table(caption, ["policy", *[heading for heading, _ in columns]], rows)


def turned(table: Table) -> Table:
    """Transposes a table of one row."""
    ((name, cells),) = table.rows
    rows = [(column, [cell]) for column, cell in zip(table.columns[1:], cells, strict=True)]
    return Table(table.caption, ["", name], rows)


def all_figures(results: Sequence[SimulationResult], columns: Sequence[str]) -> Table:
    """Returns every figure by its name in the JSON line."""
    values = [asdict(result.figures) for result in results]
    rows = [(name, [Cell(_number(each[name])) for each in values]) for name in values[0]]
    return Table("Figures by name", ["figure", *columns], rows)


def step_times(results: Sequence[SimulationResult], columns: Sequence[str]) -> Table:
    """Returns the parameters of the models and their sources; one column if all models are equal."""
    models = [result.step_time for result in results]
    names = list(columns)
    if all(model == models[0] for model in models):
        models, results, names = models[:1], results[:1], ["value"]
    rows = [
        (f"{name}: {words}", [Cell(_parameter(model.get(name))) for model in models])
        for name, words in PARAMETERS.items()
    ]
    sources = [source_of(result) for result in results]
    for key in dict.fromkeys(key for source in sources for key in source):
        rows.append(
            (_ERRORS.get(key, key), [Cell(_source_value(key, source.get(key))) for source in sources])
        )
    if not any("median_relative_error" in source for source in sources):
        rows.append(("fit error", [Cell("not known") for _ in models]))
    return Table("The time of a step, and the source of the model", ["", *names], rows, numeric=False)


def _source_value(key: str, value: Any) -> str:
    if key in ("median_relative_error", "max_relative_error") and isinstance(value, int | float):
        return f"{value:.1%}"
    return in_words(value)


def _parameter(value: Any) -> str:
    return f"{value * 1e6:,.4g} µs" if isinstance(value, int | float) else "—"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def settings(results: Sequence[SimulationResult], columns: Sequence[str]) -> Table:
    """Returns the settings of each result."""
    keys = list(dict.fromkeys(key for result in results for key in result.settings))
    rows = [(key, [Cell(in_words(result.settings.get(key))) for result in results]) for key in keys]
    return Table("The settings of each simulation.", ["setting", *columns], rows, numeric=False)


def source_of(result: SimulationResult) -> dict[str, Any]:
    """Returns the source of a step-time model; empty if it is unknown."""
    source = result.step_time.get("source")
    return source if isinstance(source, dict) else {}


def in_words(value: Any) -> str:
    """Formats a setting."""
    if value is None or value == "":
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
