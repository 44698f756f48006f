"""The commands `lightkv top` and `lightkv map`, clients that show a service's counts and its memory pool."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightkv.router.engine.step import PoolMap
from lightkv.router.service.access.key_usage import KeyUsage
from lightkv.router.service.messages import WAITS_FOR, Load

from . import latencies
from .http_client import DEFAULT_URL, ServiceClient, ServiceRefused, ServiceUnreachable
from .options import ApiKey, CaCert, Url

_BAR_CHARS = 60
_NAME_CHARS = 11  # of the longest name of a row, so that the tables stand in line
_WINDOW_SECONDS = 60.0  # of the latencies; latencies.py says "in the last minute"
MAP_EXAMPLES = (
    "lightkv map",
    "lightkv map --watch --interval 0.5",
    "lightkv map --json | jq .longest_free_run",
)
TOP_EXAMPLES = ("lightkv top", "lightkv top --once --url unix:/run/lightkv.sock")
_ASCII_MARKS = str.maketrans({"·": ".", "░": "=", "█": "#", "…": "..."})
_MAP_LINES = 16  # lines of marks if the output is not a terminal
_LEGEND_LINES = 3
_MAX_OWNERS = _MAX_KEYS = 10


# --------------------------------------------------------------------------------
# top


class LoadReport(Load, frozen=True):
    """The answer of /load: the router's counts and its state."""

    state: str = ""
    detail: str = ""
    kv_dtype: str | None = None


def top(
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    cacert: CaCert = None,
    interval: Annotated[float, typer.Option(help="Seconds between frames.", min=0.1)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, with rates over one interval.")
    ] = False,
) -> None:
    """Watch a service: its pool, its requests, its latencies and its rates.

    Latencies are of the last minute that this command has seen or, without answers in it, since the service's
    start. The requests listed are those that alone hold the most tokens.
    In a terminal each frame replaces the one before; otherwise the frames are printed one below the other.
    """
    console = Console(highlight=False)
    frames = _frames(ServiceClient(url, api_key, cacert), interval, url, console)
    if once:
        console.print(next(frames))
    else:
        _show(frames, console)


def _show(frames: Iterator[RenderableType], console: Console) -> None:
    """Shows frames until Ctrl-C, in a terminal each in the place of the one before."""
    is_live = console.is_terminal and not console.is_dumb_terminal
    live = Live(console=console, auto_refresh=False) if is_live else None
    with suppress(KeyboardInterrupt), live or nullcontext():
        for shown in frames:
            if live is not None:
                live.update(shown, refresh=True)
            else:
                console.print(shown)


def _frames(client: ServiceClient, interval: float, url: str, console: Console) -> Iterator[RenderableType]:
    """Yields a frame every `interval` seconds. While the service cannot be reached, the frame says so."""
    glyphs = "█▒░" if _has_block_glyphs(console) else "#=."
    before, then = _report(client), time.monotonic()
    seen: deque[tuple[float, latencies.Observed]] = deque([(then, _observed(client))])
    while True:
        time.sleep(interval)
        try:
            report, now = _report(client), time.monotonic()
            seen.append((now, _observed(client)))
            owners = _owners(client)
        except ServiceUnreachable as error:
            yield Text(f"lightkv: {error}")
            continue
        while seen[1][0] < now - _WINDOW_SECONDS:
            seen.popleft()
        shown = frame(url, report, before, now - then, glyphs)
        yield Group(shown, _answers(seen[0][1], seen[-1][1]), *map(Text, owners))
        before, then = report, now


def _observed(client: ServiceClient) -> latencies.Observed:
    return latencies.observed(client.get("/metrics").decode())


def _owners(client: ServiceClient) -> list[str]:
    """Returns the lines of the requests that alone hold the most tokens; none while there is no worker."""
    from lightkv.memory_map import owner_lines

    try:
        return owner_lines(msgspec.json.decode(client.get("/map"), type=PoolMap).owners, _MAX_OWNERS)
    except ServiceRefused:
        return []


def _answers(earlier: latencies.Observed, later: latencies.Observed) -> RenderableType:
    """Returns the part of a frame that is of the answers: the model's name, the latencies and the ends."""

    def line(name: str) -> str:
        whole = getattr(later, name)
        return latencies.line_of(whole, latencies.since(whole, getattr(earlier, name)))

    ended = ", ".join(f"{count:,.0f} {reason}" for reason, count in sorted(later.finished.items()))
    rows = {
        "model": later.model,
        "first token": line("first_token"),
        "per token": line("between_tokens"),
        "answers": f"ended so far: {ended or 'none'}",
    }
    return _table(rows)


def _has_block_glyphs(console: Console) -> bool:
    return "utf" in console.encoding.lower()


def _report(client: ServiceClient) -> LoadReport:
    return msgspec.json.decode(client.get("/load"), type=LoadReport)


def frame(
    url: str, report: LoadReport, before: LoadReport, seconds: float, glyphs: str = "█▒░"
) -> RenderableType:
    """Returns one frame: the counts of `report`, and rates since `before`, which was read `seconds` earlier.

    `glyphs`: of held, cached and free tokens in the bar.
    """

    def rate(name: str) -> float:
        # A router that was restarted counts from 0 again.
        return max(getattr(report, name) - getattr(before, name), 0) / seconds

    steps = rate("num_steps")
    router_ms = 1000 * rate("router_seconds") / steps if steps else 0.0
    share = report.hit_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    pool = (
        f"{report.held:,} held, {report.cached:,} cached, {report.free:,} free of {report.capacity:,} tokens"
        f"{f', in {report.kv_dtype}' if report.kv_dtype else ''}"
    )
    if report.num_states:
        pool += (
            f"; {report.held_states:,} held, {report.cached_states:,} cached, {report.free_states:,} free of "
            f"{report.num_states:,} states"
        )
    peak = (
        f"{report.forecast_peak:,} tokens forecast, {report.guaranteed_peak:,} guaranteed, "
        f"{report.reached_peak:,} reached so far"
    )
    rows = {
        "state": report.state if report.detail == report.state else f"{report.state}: {report.detail}",
        "pool": pool,
        "peak": peak,
        "requests": f"{report.num_running:,} running ({report.num_guaranteed:,} guaranteed, "
        f"{report.num_provisional:,} provisional), {report.num_waiting:,} waiting",
        "waiting for": WAITS_FOR[report.waits_for] if report.waits_for else "",
        "tokens": f"{rate('generated_tokens'):,.1f} generated/s, {rate('prompt_tokens'):,.1f} of prompts/s",
        "cache": f"{report.hit_tokens:,} of {report.prompt_tokens:,} prompt tokens hit ({share:.0%})",
        "sessions": f"{report.num_sessions:,} protect {report.session_tokens:,} tokens; so far "
        f"{report.session_evicted_tokens:,} evicted, {report.session_over_share_tokens:,} over their share",
        "steps": f"{steps:,.1f}/s, {router_ms:.2f} ms of the router's own time each",
        "checks": f"{report.num_ledger_checks:,} comparisons of the device's free count with the ledger's, "
        "all equal",
        "preempted": f"{report.num_preemptions:,} times, {report.recomputed_tokens:,} tokens computed again",
        "worker": f"{report.num_worker_starts:,} worker starts",
    }
    rows |= {f"key {name}": _used(usage) for name, usage in _first_keys(report)}
    legend = f"{glyphs[0]} held  {glyphs[1]} cached  {glyphs[2]} free  | forecast peak"
    return Group(Text(f"lightkv at {url}", style="bold"), bar(report, glyphs), Text(legend), _table(rows))


def _first_keys(report: LoadReport) -> list[tuple[str, KeyUsage]]:
    """Returns the keys that hold or have used the most tokens."""
    return sorted(
        report.by_key.items(),
        key=lambda one: (one[1].held, one[1].prompt_tokens + one[1].generated_tokens),
        reverse=True,
    )[:_MAX_KEYS]


def _used(usage: KeyUsage) -> str:
    return (
        f"{usage.held:,} tokens held; {usage.num_requests:,} requests, {usage.prompt_tokens:,} prompt tokens "
        f"({usage.cached_tokens:,} cached), {usage.generated_tokens:,} generated, "
        f"{usage.interruptions:,} interruptions"
    )


def _table(rows: Mapping[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=_NAME_CHARS)
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def bar(load: Load, glyphs: str) -> Text:
    """Returns the pool as a bar of held, cached and free tokens, with a mark at the forecast peak."""
    total = max(load.capacity, 1)
    num_held = -(-load.held * _BAR_CHARS // total)  # rounded up, so that a single token shows
    num_cached = min(-(-load.cached * _BAR_CHARS // total), _BAR_CHARS - num_held)
    chars = glyphs[0] * num_held + glyphs[1] * num_cached
    chars += glyphs[2] * (_BAR_CHARS - len(chars))
    text = Text(chars)
    text.stylize("green", 0, num_held)
    text.stylize("cyan", num_held, num_held + num_cached)
    mark = min(load.forecast_peak * _BAR_CHARS // total, _BAR_CHARS - 1)
    if load.forecast_peak:
        text = Text.assemble(text[:mark], ("|", "bold red"), text[mark + 1 :])
    return text


# --------------------------------------------------------------------------------
# map


def pool_map(
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    cacert: CaCert = None,
    watch: Annotated[bool, typer.Option("--watch", help="Draw the map repeatedly, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between drawings with --watch.", min=0.1)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
) -> None:
    """Draw a service's pool: which slots are free, cached, shared, or held by one request alone.

    Slots with the same letter belong to the same row of the token table, and so to the same request. The
    requests that alone hold the most tokens are listed below the drawing.
    """
    client = ServiceClient(url, api_key, cacert)
    if as_json:
        if watch:
            raise typer.BadParameter("--json prints once and --watch repeatedly; leave one of them out")
        typer.echo(client.get("/map").decode())
        return
    console = Console(highlight=False)
    drawings = _drawings(client, interval, console)
    if watch:
        _show(drawings, console)
    else:
        console.print(next(drawings))


def _drawings(client: ServiceClient, interval: float, console: Console) -> Iterator[RenderableType]:
    """Yields a drawing every `interval` seconds. After the first one, errors are shown and tried again."""
    found = client.get("/map")
    while True:
        pool = msgspec.json.decode(found, type=PoolMap)
        height, max_owners = _MAP_LINES, _MAX_OWNERS
        if console.is_terminal:
            height, max_owners = room(console.height - 1, len(pool.owners))  # the last line is the cursor's
        text = drawing(pool, console.width, height, max_owners)
        yield Text(text if _has_block_glyphs(console) else text.translate(_ASCII_MARKS))
        while True:
            time.sleep(interval)
            try:
                found = client.get("/map")
                break
            except (ServiceUnreachable, ServiceRefused) as error:
                yield Text(f"lightkv: {error}")


def room(num_lines: int, num_owners: int) -> tuple[int, int]:
    """Divides a terminal's lines. Returns the lines of marks, at least one, and the number of owners to list,
    which take at most a third of the lines."""
    most = min(_MAX_OWNERS, num_owners, max(num_lines // 3 - 2, 0))
    num_below = most + 1 + (most < num_owners) if most else 0  # a heading, and the number of further owners
    return max(num_lines - _LEGEND_LINES - num_below, 1), most


def drawing(pool: PoolMap, width: int, height: int, max_owners: int = _MAX_OWNERS) -> str:
    """Returns the pool as at most `height` lines of `width` marks, a legend of three lines, and the rows that
    alone hold the most tokens."""
    import numpy as np

    from lightkv.memory_map import legend, marks, owner_lines

    per_mark, lines = marks(np.array(pool.cells, dtype=np.int32), width, height)
    below = owner_lines(pool.owners, max_owners)
    legend_lines = legend(pool.counts, per_mark * pool.slots_per_cell)
    if (states := pool.states) is not None:
        legend_lines[-1] += (
            f"; states: {states.num_own:,} own, {states.num_cached:,} snapshots, {states.num_free:,} free"
        )
    return "\n".join([*lines, *legend_lines, *below])
