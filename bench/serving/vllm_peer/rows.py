"""Joins the measurements of both engines into the rows that are compared, and prints them as a table.

A measurement is one process of one engine: in process ("offline") or as a service ("http"). A document may have
several of a kind, from several rounds or calls. The values of a row come from all of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from bench.common.report import Spread, print_table, refuse
from bench.serving.lifelike_cells import CELLS, CLOSED, SESSIONS

ENGINES = ("vllm", "lightkv")
BATCHES = CLIENTS = (1, 32, 256)
PROMPTS = (512, 2048, 8192)
PAUSES = (0.0, 0.02)  # seconds before a step that is traced
OFFLINE, HTTP, LIFELIKE = "offline", "http", "lifelike"
FORMS = {
    "ms": ".2f",
    "tokens/s": ",.0f",
    "requests/s": ".2f",
    "requests": ",.0f",
    "s": ".1f",
    "MHz": ".0f",
    "W": ".0f",
}

Measurement = Mapping[str, Any]
Results = dict[str, Any]


class Row(NamedTuple):
    """A figure. `read`: finds its values in a measurement of `kind`, and raises KeyError if there is none."""

    name: str
    unit: str
    kind: str
    read: Callable[[Measurement], Sequence[float]]


def _value(found: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        found = found[key]
    return found


def _start_rows(kind: str) -> Iterator[Row]:
    where = "in process" if kind == OFFLINE else "of the service"
    for caches in product(("empty", "filled"), ("warm", "cold")):

        def read(found: Measurement, caches: tuple[str, str] = caches) -> list[float]:
            is_asked = (found["compile_cache"], found["page_cache"]) == caches
            return [found["start_seconds"]] if is_asked else []

        yield Row(f"start {where}, {caches[0]} compile cache, {caches[1]} page cache", "s", kind, read)


def _offline_rows() -> Iterator[Row]:
    def row(name: str, unit: str, *keys: str) -> Row:
        return Row(name, unit, OFFLINE, lambda found: _value(found, keys))

    for batch in BATCHES:
        yield row(f"decode step, batch {batch}", "ms", "batches", str(batch), "step_ms")
    for batch in BATCHES:
        yield row(f"in process, batch {batch}: tokens/s", "tokens/s", "batches", str(batch), "tokens_per_s")
    for prompt in PROMPTS:
        yield row(f"first token, prompt {prompt:,}", "ms", "first_token_ms", str(prompt))
    for batch, pause in product(BATCHES, PAUSES):
        case = f"batch {batch}, pauses of {pause:g} s"
        for name, unit in (("step_ms", "ms"), ("clock_mhz", "MHz"), ("watts", "W")):

            def read(found: Measurement, case: str = case, name: str = name) -> list[float]:
                return [found["device"][case][name]]

            yield Row(f"device in a step, {case}: {name}", unit, OFFLINE, read)
    yield row("prompts that begin alike", "s", "shared_s")
    yield row("as many prompts that share nothing", "s", "unshared_s")


def _http_rows() -> Iterator[Row]:
    for clients in CLIENTS:
        load = f"{clients} clients"

        def row(name: str, unit: str, *keys: str, load: str = load) -> Row:
            return Row(
                f"HTTP, {load}: {name}", unit, HTTP, lambda found: [_value(found["loads"][load], keys)]
            )

        yield row("tokens/s", "tokens/s", "output_tokens_per_s")
        yield row("first token, median", "ms", "ttft_ms", "p50")
        yield row("first token, p95", "ms", "ttft_ms", "p95")
        yield row("time per output token, mean", "ms", "per_token_ms", "mean")
        yield row("time per output token, median", "ms", "per_token_ms", "p50")
        yield row("between tokens, median", "ms", "between_pieces_ms", "p50")
        yield row("between tokens, p99", "ms", "between_pieces_ms", "p99")


def _lifelike_rows() -> Iterator[Row]:
    def row(name: str, unit: str, *keys: str) -> Row:
        return Row(name, unit, LIFELIKE, lambda found: [_value(found, keys)])

    yield row("saturation", "requests/s", "saturation", "requests_per_s")
    workloads = {cell.name: cell.workload for cell in CELLS} | dict.fromkeys(CLOSED, "")
    for name, workload in workloads.items():
        for what, key in (("first token", "ttft_ms"), ("between tokens", "between_pieces_ms")):
            for percentile in ("p50", "p95", "p99"):
                yield row(f"{name}: {what}, {percentile}", "ms", "cells", name, key, percentile)
        yield row(f"{name}: time per output token, mean", "ms", "cells", name, "per_token_ms", "mean")
        if workload == SESSIONS:
            late = "5 and later"
            yield row(
                f"{name}: first token of turn {late}, p50",
                "ms",
                "cells",
                name,
                "turns",
                late,
                "ttft_ms",
                "p50",
            )
        yield row(f"{name}: goodput", "requests/s", "cells", name, "goodput_per_s")
        yield row(f"{name}: tokens/s", "tokens/s", "cells", name, "output_tokens_per_s")
        for lost in ("failed", "cut_off"):
            yield row(f"{name}: {lost.replace('_', ' ')}", "requests", "cells", name, lost)


ROWS = (*_offline_rows(), *_start_rows(OFFLINE), *_http_rows(), *_start_rows(HTTP), *_lifelike_rows())


def _values(row: Row, engine: str, measurements: Sequence[Measurement]) -> list[float]:
    values: list[float] = []
    for found in measurements:
        if (found["engine"], found["kind"]) == (engine, row.kind):
            try:
                values += row.read(found)
            except (KeyError, TypeError):  # left out, None, or the measurement failed before it
                continue
    return values


def compare(measurements: Sequence[Measurement]) -> list[Results]:
    """Returns each row for which an engine has values: their spread by engine, and the ratio of the medians."""
    rows = []
    for row in ROWS:
        values = {engine: _values(row, engine, measurements) for engine in ENGINES}
        if not any(values.values()):
            continue
        spreads = {engine: Spread.of(own) if own else None for engine, own in values.items()}
        peer, own = spreads["vllm"], spreads["lightkv"]
        rows.append(
            {
                "name": row.name,
                "unit": row.unit,
                **{
                    engine: spread and {**spread._asdict(), "values": values[engine]}
                    for engine, spread in spreads.items()
                },
                "lightkv_over_vllm": own.median / peer.median if own and peer and peer.median else None,
            }
        )
    return rows


def same_first_tokens(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Returns by batch size the share of prompts after which both engines chose the same first token.

    Both have the same random weights. In bf16 near ties fall either way, so it is below 1 for equal models.
    """
    firsts: dict[str, dict[str, list[int]]] = {}
    for found in measurements:
        for batch, own in found.get("batches", {}).items():
            firsts.setdefault(batch, {}).setdefault(found["engine"], own["first_tokens"])
    return {
        batch: sum(a == b for a, b in zip(own["vllm"], own["lightkv"], strict=True)) / len(own["vllm"])
        for batch, own in firsts.items()
        if len(own) == len(ENGINES)
    }


def merge(documents: Sequence[Results]) -> list[Results]:
    """Returns all documents' measurements. Exits if they differ in machine, model, code or settings."""
    measurements: list[Results] = [found for own in documents for found in own["results"]["measurements"]]
    devices = {own["device"] for own in documents}
    if len(devices) > 1:
        refuse(f"the measurements are of different machines: {', '.join(sorted(devices))}")
    models = {own["results"]["settings"]["model"] for own in documents}
    if len(models) > 1:
        refuse(f"the measurements are of different models: {', '.join(sorted(models))}")
    if len({own["quick"] for own in measurements}) > 1:
        refuse("some measurements were made with --quick and others without it")
    loads = {json.dumps(own["load"]) for own in measurements if own["kind"] == LIFELIKE}
    if len(loads) > 1:
        refuse(f"the measurements of {LIFELIKE} are of different loads: {', '.join(sorted(loads))}")
    for engine in ENGINES:
        kinds = {f"{own['version']} {own['settings']}" for own in measurements if own["engine"] == engine}
        if len(kinds) > 1:
            refuse(f"the measurements of {engine} are of different versions or settings: {sorted(kinds)}")
    return measurements


def print_rows(rows: Sequence[Results], measurements: Sequence[Measurement]) -> None:
    """Prints one line for each row: both engines' medians, with their range where there are several values."""

    def cell(row: Results, engine: str) -> str:
        found = row[engine]
        if found is None:
            return ""
        spread, form = Spread(found["median"], found["low"], found["high"]), FORMS[row["unit"]]
        unit = f" {row['unit']}" if row["unit"] in ("ms", "s") else ""
        return (spread.text(form) if len(found["values"]) > 1 else f"{spread.median:{form}}") + unit

    versions = {found["engine"]: found["version"] for found in measurements}
    header = ["", *(f"{engine} {versions.get(engine, '')}".strip() for engine in ENGINES), "lightkv / vllm"]
    cells = [
        [row["name"], *(cell(row, engine) for engine in ENGINES),
         "" if row["lightkv_over_vllm"] is None else f"{row['lightkv_over_vllm']:.3f}"]
        for row in rows
    ]  # fmt: skip
    print()
    print_table(header, cells)
    print()
