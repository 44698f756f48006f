"""The tables of simulations: the summary, policies side by side, replicas, settings and step times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightkv.router.simulate.result import Figures, SimulationResult
from lightkv.router.simulate.sweep import Repeats, is_above


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `best`: of its policies. `spread`: the least and the greatest over the seeds."""

    text: str
    best: bool = False
    spread: str = ""


@dataclass(frozen=True)
class Table:
    """A table. A row has a heading and cells. `numeric`: the cells are numbers, aligned right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    numeric: bool = True


@dataclass(frozen=True)
class _Row:
    """A row of a policy table. `better`: 1 for higher values, -1 for lower ones, 0 for neither."""

    heading: str
    value: Callable[[Figures], float]
    form: str
    better: int = 0


_SERVICE = (
    _Row("arrivals /s", lambda f: f.offered_rate, ",.2f"),
    _Row("load", lambda f: f.load, ".2f"),
    _Row("goodput /s", lambda f: f.goodput, ",.2f", 1),
    _Row("in time", lambda f: f.met_share, ".1%", 1),
    _Row("served /s", lambda f: f.served_rate, ",.2f", 1),
    _Row("TTFT p50, s", lambda f: f.ttft_p50, ",.2f", -1),
    _Row("TTFT p99, s", lambda f: f.ttft_p99, ",.2f", -1),
    _Row("TPOT p50, ms", lambda f: 1e3 * f.tpot_p50, ",.1f", -1),
    _Row("TPOT p99, ms", lambda f: 1e3 * f.tpot_p99, ",.1f", -1),
)
_MEMORY = (
    _Row("memory used", lambda f: f.memory_used_share, ".1%", 1),
    _Row("waste", lambda f: f.memory_padding_share, ".2%", -1),
    _Row("cached", lambda f: f.memory_cached_share, ".1%"),
    _Row("running", lambda f: f.mean_running, ",.0f"),
    _Row("preemptions", lambda f: f.num_preemptions, ",", -1),
    _Row("requests preempted", lambda f: f.preempted_share, ".2%", -1),
    _Row("recomputed", lambda f: f.recomputed_tokens, ",", -1),
)


def summary(result: SimulationResult) -> dict[str, str]:
    """Returns the most important figures in words, each by its name."""
    f = result.figures
    settings = result.settings
    arriving = "all at the start" if not f.offered_rate else f"{f.offered_rate:.2f} a second"
    load = f", {f.load:.2f} of saturation ({f.saturation_rate:.2f})" if f.load else ""
    targets = f"first token in {settings['ttft_target']:g} s, then {settings['tpot_target'] * 1e3:g} ms each"
    within = ""
    if settings["itl_target"]:
        within = f"; steps of at most {settings['itl_target'] * 1e3:g} ms beside decodes"
    padding = f", {f.memory_padding_share:.2%} padding" if f.memory_padding_share else ""
    return {
        "policy": f"{settings['allocation']}, {settings['admission']}; {settings['capacity']:,} tokens{within}",
        "requests": f"{f.num_requests:,}, {arriving}{load}"
        + (f"; {f.num_skipped:,} too large" if f.num_skipped else ""),
        "served": f"{f.served_rate:.2f} requests a second while loaded, {f.output_rate:,.0f} tokens a second",
        "goodput": f"{f.goodput:.2f} requests a second, {f.met_share:.1%} of them ({targets})",
        "first token": f"p50 {f.ttft_p50:.2f} s, p90 {f.ttft_p90:.2f} s, p99 {f.ttft_p99:.2f} s",
        "per token": f"p50 {f.tpot_p50 * 1e3:.1f} ms, p90 {f.tpot_p90 * 1e3:.1f} ms, "
        f"p99 {f.tpot_p99 * 1e3:.1f} ms",
        "memory": f"{f.memory_used_share:.1%} used{padding}, {f.memory_cached_share:.1%} cached",
        "preempted": f"{f.num_preemptions:,} times, {f.preempted_share:.2%} of requests; "
        f"{f.recomputed_tokens:,} tokens computed again",
        "running": f"{f.mean_running:.0f} at once in the mean, {f.max_running} at most",
    }  # fmt: skip


def summary_table(result: SimulationResult) -> Table:
    """Returns the summary as a table."""
    rows = [(name, [Cell(words)]) for name, words in summary(result).items()]
    return Table("The most important figures", ["", "value"], rows, numeric=False)


def policies(groups: Sequence[Repeats]) -> tuple[Table, Table]:
    """Returns the tables of service and of memory, with a column per policy. Several policies have the same
    requests, and the best of each row is marked."""
    marked = " The best of each row is marked." if len(groups) > 1 else ""
    if len(groups[0].results) > 1:
        if marked:
            marked = marked[:-1] + ", if it is better than the others with every seed."
        marked = f" Means over the seeds, with the least and the greatest below.{marked}"
    service = "Service. In time: requests that met both targets. Served: until the last admission."
    memory = (
        "Memory: means while loaded, as shares of the pool's capacity. Waste: slots held without a token. "
        "Recomputed: tokens computed again after preemptions."
    )
    return _policies(service + marked, _SERVICE, groups), _policies(memory + marked, _MEMORY, groups)


def _policies(caption: str, wanted: Sequence[_Row], groups: Sequence[Repeats]) -> Table:
    rows = []
    for row in wanted:
        values = [row.value(group.mean.figures) for group in groups]
        if row.heading in ("arrivals /s", "load") and not any(values):
            continue
        best = _best(row, groups)
        texts = [format(value, row.form) for value in values]
        cells = [
            Cell(text, text == best, _spread(row, group)) for text, group in zip(texts, groups, strict=True)
        ]
        rows.append((row.heading, cells))
    return Table(caption, ["", *(group.name for group in groups)], rows)


def _best(row: _Row, groups: Sequence[Repeats]) -> str | None:
    """Returns the best value as it is shown; None where there is none, or another is as good with some seed."""
    ordered = sorted(groups, key=lambda group: -row.better * row.value(group.mean.figures))
    texts = [format(row.value(group.mean.figures), row.form) for group in ordered]
    if not row.better or texts[0] == texts[-1]:
        return None
    others = [group for group, text in zip(ordered, texts, strict=True) if text != texts[0]]
    is_best = all(is_above(ordered[0], group, lambda f: row.better * row.value(f)) for group in others)
    return texts[0] if is_best else None


def _spread(row: _Row, group: Repeats) -> str:
    low, high = (format(end, row.form) for end in group.spread(row.value))
    return "" if low == high else f"{low} – {high}"


def replica_table(result: SimulationResult) -> Table:
    """Returns the figures of each replica, and of all together."""
    columns = ["", "requests", "computed", "hit %", "first p50 s", "first p99 s", "waiting", "preempted"]
    rows = []
    for idx, f in enumerate([*result.replicas, result.figures]):
        texts = [
            f"{f.num_requests:,}", f"{f.prompt_tokens - f.hit_tokens:,}",
            f"{100 * f.hit_tokens / max(f.prompt_tokens, 1):.1f}", f"{f.ttft_p50:.2f}", f"{f.ttft_p99:.2f}",
            f"{f.mean_waiting:.1f}", f"{f.num_preemptions:,}",
        ]  # fmt: skip
        name = f"replica {idx}" if idx < len(result.replicas) else "together"
        rows.append((name, list(map(Cell, texts))))
    caption = f"{result.settings['routing']}, seed {result.settings['seed']}"
    return Table(caption, columns, rows)


def settings(results: Sequence[SimulationResult], columns: Sequence[str]) -> Table:
    """Returns the settings of each result, and the parameters of its step-time model with their source."""
    each = [
        result.settings | {f"step_time.{name}": value for name, value in _flat(result.step_time).items()}
        for result in results
    ]
    keys = list(dict.fromkeys(key for one in each for key in one))
    rows = [(key, [Cell(in_words(one.get(key))) for one in each]) for key in keys]
    caption = "The settings of each simulation; times of steps are in seconds."
    return Table(caption, ["setting", *columns], rows, numeric=False)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a dictionary with the entries of the dictionaries in it as its own."""
    inner = {name: value for name, value in values.items() if isinstance(value, dict)}
    flat = {name: value for name, value in values.items() if name not in inner}
    return flat | {f"{name}.{key}": one for name, value in inner.items() for key, one in value.items()}


def in_words(value: Any) -> str:
    """Formats a setting."""
    if value is None or value == "":
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)
