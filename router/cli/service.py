"""The commands around a service: `lightkv serve` starts one, `chat` talks to one, `top` and `map` watch one.

Knows typer, the terminal and the service's addresses; all but `serve` are clients as any other, over HTTP.
What starts processes is imported inside the command.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightkv.errors import LightKVError
from lightkv.router.config import API_KEY_VARIABLE, EngineConfig, ServiceConfig
from lightkv.router.service.messages import Load, OwnedMap
from lightkv.router.terminal import say, usage

from .http_client import DEFAULT_URL, ServiceClient, ServiceRefused, ServiceUnreachable, Usage

Takes = Callable[[Callable[..., None]], Callable[..., None]]
Url = Annotated[str, typer.Option(help="Where the service is; unix:PATH for a socket.")]
ApiKey = Annotated[str | None, typer.Option(help="Its key, if it asks for one.", envvar=API_KEY_VARIABLE)]

_BAR_CHARS = 60
_SERVE_EXAMPLES = (
    "lightkv serve",
    "lightkv serve ./my-model --port 9000 --max-total-tokens 200000",
    "LIGHTKV_API_KEY=… lightkv serve --host 0.0.0.0 --ssl-certfile cert.pem --ssl-keyfile key.pem",
    """curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Hi"}'""",
)
_CHAT_EXAMPLES = (
    "lightkv chat",
    "lightkv chat --system 'Answer in one sentence.' --temperature 0",
    "echo 'Name three rivers.' | lightkv chat --url http://127.0.0.1:9000 > rivers.txt",
)
_MAP_EXAMPLES = (
    "lightkv map",
    "lightkv map --watch --interval 0.5",
    "lightkv map --json | jq .longest_free_run",
)
_ASCII_MARKS = str.maketrans({"·": ".", "░": "=", "█": "#", "…": "..."})
_MAP_LINES = 16  # of marks, where there is no terminal that says how many lines it has
_LEGEND_LINES = 3
_MAX_OWNERS = 10
_TOP_EXAMPLES = ("lightkv top", "lightkv top --once --url unix:/run/lightkv.sock")


def add_service_commands(app: typer.Typer, takes_engine: Takes, takes_service: Takes) -> None:
    """Add them to `app`. `takes_engine` and `takes_service` turn settings into options (`app.py`)."""
    app.command(epilog=_examples(_SERVE_EXAMPLES))(takes_engine(takes_service(serve)))
    app.command(epilog=_examples(_CHAT_EXAMPLES))(chat)
    app.command(epilog=_examples(_TOP_EXAMPLES))(top)
    app.command("map", epilog=_examples(_MAP_EXAMPLES))(pool_map)


def _examples(lines: tuple[str, ...]) -> str:
    return "\n\n".join(("[bold]Examples[/]", *lines))


def serve(
    served: Annotated[
        str | None, typer.Argument(help="The same as --model.", show_default=False, metavar="MODEL")
    ] = None,
    *,
    config: EngineConfig,
    service: ServiceConfig,
) -> None:
    """Serve a model over HTTP, as OpenAI speaks it, until Ctrl-C.

    One line with the URL goes to standard output once it is ready. The first Ctrl-C (or SIGTERM) lets what
    runs finish, within --shutdown-timeout; a second one ends it at once.
    """
    if served is not None:
        if config.model not in (EngineConfig.model, served):
            raise typer.BadParameter(
                f"MODEL is {served} and --model is {config.model}; leave one of them out"
            )
        config = replace(config, model=served)
    if not service.api_key and (key := os.environ.get(API_KEY_VARIABLE)):
        service = replace(service, api_key=(key,))
    from lightkv.router.service import launch

    raise typer.Exit(launch.serve(config, service, Console(stderr=True, highlight=False)))


# --------------------------------------------------------------------------------
# chat


def chat(
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Default: the service's own.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all else.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer at most. Default: what the context leaves.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token. Default: the service's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the same answers come again.")] = None,
) -> None:
    """Talk to a model that is served, a line at a time.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer. At the end of a pipe each
    line is a message, and standard output carries the answers alone.
    """
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    client = ServiceClient(url, api_key)
    conversation = Conversation(client, system, options)
    notes = Console(stderr=True, highlight=False)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        client.get("/v1/models")  # is it there, and the key right? before anybody types
        say(notes, f"connected to {url}; /reset forgets the conversation, /exit ends it")
    for line in _lines(is_interactive):
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            say(notes, "forgotten")
        elif text:
            try:
                say(notes, conversation.ask(text, _write))
            except LightKVError as error:
                if not is_interactive:
                    raise
                say(notes, f"lightkv: {error}")
            except KeyboardInterrupt:
                _write("\n")
                if not is_interactive:
                    raise
                say(notes, "interrupted")


class Conversation:
    """What was said so far, and the way to say more.

    `options`: further fields of every request; None leaves one out.
    """

    def __init__(self, client: ServiceClient, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._options = {name: value for name, value in options.items() if value is not None}
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._first)

    def reset(self) -> None:
        """Forget all but the system's message."""
        self.messages = list(self._first)

    def ask(self, text: str, write: Callable[[str], None]) -> str:
        """Say `text`, and `write` the answer as it comes, and an end of line. Returns what it took, in a line.

        An answer that is interrupted stays as far as it came; of one that fails neither it nor `text` stays.
        """
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        taken = Usage(0, None, 0)
        started = time.perf_counter()
        try:
            with closing(self._client.chat([*self.messages, question], self._options)) as answer:
                for piece in answer:
                    if isinstance(piece, Usage):
                        taken = piece
                    else:
                        pieces.append(piece)
                        write(piece)
        except LightKVError:
            if pieces:
                write("\n")
            raise
        except KeyboardInterrupt:
            self._keep(question, pieces)
            raise
        self._keep(question, pieces)
        write("\n")
        return usage(taken.num_prompt, taken.num_cached, taken.num_new, time.perf_counter() - started)

    def _keep(self, question: dict[str, str], pieces: list[str]) -> None:
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def _lines(is_interactive: bool) -> Iterator[str]:
    """What is typed or piped in, until it ends."""
    if not is_interactive:
        try:
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"standard input is no UTF-8 text ({error}); convert it first") from None
        return
    import readline  # noqa: F401  # gives `input` a history and its keys

    while True:
        try:
            yield input("> ")
        except EOFError:
            _write("\n")
            return


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


# --------------------------------------------------------------------------------
# top


class LoadReport(Load, frozen=True):
    """The answer of /load: the router's counts, and its state."""

    state: str = ""
    detail: str = ""


def top(
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    interval: Annotated[float, typer.Option(help="Seconds between frames.", min=0.1)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, with rates over one interval.")
    ] = False,
) -> None:
    """Watch a service: its pool, its requests and its rates.

    In a terminal the frame stays in place; elsewhere each is printed below the last.
    """
    console = Console(highlight=False)
    frames = _frames(ServiceClient(url, api_key), interval, url, console)
    if once:
        console.print(next(frames))
    else:
        _show(frames, console)


def _show(frames: Iterator[RenderableType], console: Console) -> None:
    """One after the other, until Ctrl-C: in the same place where that can be."""
    is_live = console.is_terminal and not console.is_dumb_terminal
    live = Live(console=console, auto_refresh=False) if is_live else None
    with suppress(KeyboardInterrupt), live or nullcontext():
        for shown in frames:
            if live is not None:
                live.update(shown, refresh=True)
            else:
                console.print(shown)


def _frames(client: ServiceClient, interval: float, url: str, console: Console) -> Iterator[RenderableType]:
    """A frame each `interval` seconds, from the second report on. A service that goes away is waited for."""
    glyphs = "█▒░" if _takes_blocks(console) else "#=."
    before, then = _report(client), time.monotonic()
    while True:
        time.sleep(interval)
        try:
            report, now = _report(client), time.monotonic()
        except ServiceUnreachable as error:
            yield Text(f"lightkv: {error}")
            continue
        yield frame(url, report, before, now - then, glyphs)
        before, then = report, now


def _takes_blocks(console: Console) -> bool:
    return "utf" in console.encoding.lower()


def _report(client: ServiceClient) -> LoadReport:
    return msgspec.json.decode(client.get("/load"), type=LoadReport)


def frame(
    url: str, report: LoadReport, before: LoadReport, seconds: float, glyphs: str = "█▒░"
) -> RenderableType:
    """The counts as people read them, with rates since `before`, which is `seconds` old.

    `glyphs`: of held, cached and free tokens in the bar.
    """

    def rate(name: str) -> float:
        # A router that was started again counts from 0.
        return max(getattr(report, name) - getattr(before, name), 0) / seconds

    steps = rate("num_steps")
    router_ms = 1000 * rate("router_seconds") / steps if steps else 0.0
    share = report.hit_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    pool = (
        f"{report.held:,} held, {report.cached:,} cached, {report.free:,} free of {report.capacity:,} tokens"
    )
    peak = f"{report.forecast_peak:,} tokens forecast, {report.reached_peak:,} reached so far"
    rows = {
        "state": report.state if report.detail == report.state else f"{report.state}: {report.detail}",
        "pool": pool,
        "peak": peak,
        "requests": f"{report.num_running:,} running, {report.num_waiting:,} waiting",
        "tokens": f"{rate('generated_tokens'):,.1f} generated/s, {rate('prompt_tokens'):,.1f} of prompts/s",
        "cache": f"{report.hit_tokens:,} of {report.prompt_tokens:,} prompt tokens hit ({share:.0%})",
        "steps": f"{steps:,.1f}/s, {router_ms:.2f} ms of the router's own time each",
        "checks": f"{report.num_ledger_checks:,} of the device's books, all equal; "
        f"{report.num_worker_starts:,} worker starts, {report.num_preemptions:,} pauses",
        "pauses": f"{report.recomputed_tokens:,} tokens computed again after them",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return Group(Text(f"lightkv at {url}", style="bold"), bar(report, glyphs), table)


def bar(load: Load, glyphs: str) -> Text:
    """The pool as a bar: held, cached, free, and a mark where the forecast peak is."""
    total = max(load.capacity, 1)
    num_held = -(-load.held * _BAR_CHARS // total)  # a single token shows
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
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two drawings of --watch.", min=0.1)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Draw a service's pool: which slots are free, which are cached or shared, and whose the others are.

    The same letter is the same row of the token table: one request's own tokens. Below the drawing are the
    requests that alone hold the most.
    """
    client = ServiceClient(url, api_key)
    if as_json:
        if watch:
            raise typer.BadParameter("--json is one object and --watch goes on; leave one of them out")
        typer.echo(client.get("/map").decode())
        return
    console = Console(highlight=False)
    drawings = _drawings(client, interval, console)
    if watch:
        _show(drawings, console)
    else:
        console.print(next(drawings))


def _drawings(client: ServiceClient, interval: float, console: Console) -> Iterator[RenderableType]:
    """A drawing each `interval` seconds. A service that goes away while it is watched is waited for."""
    found = client.get("/map")
    while True:
        pool = msgspec.json.decode(found, type=OwnedMap)
        height, max_owners = _MAP_LINES, _MAX_OWNERS
        if console.is_terminal:
            height, max_owners = room(console.height - 1, len(pool.owners))  # the last line is the cursor's
        text = drawing(pool, console.width, height, max_owners)
        yield Text(text if _takes_blocks(console) else text.translate(_ASCII_MARKS))
        while True:
            time.sleep(interval)
            try:
                found = client.get("/map")
                break
            except (ServiceUnreachable, ServiceRefused) as error:
                yield Text(f"lightkv: {error}")


def room(num_lines: int, num_owners: int) -> tuple[int, int]:
    """How a terminal's lines are shared out: lines of marks, one at least, and owners, with a third at most."""
    most = min(_MAX_OWNERS, num_owners, max(num_lines // 3 - 2, 0))
    num_below = most + 1 + (most < num_owners) if most else 0  # a heading, and how many more there are
    return max(num_lines - _LEGEND_LINES - num_below, 1), most


def drawing(pool: OwnedMap, width: int, height: int, max_owners: int = _MAX_OWNERS) -> str:
    """The pool in at most `height` lines of `width` marks, a legend of three, and who alone holds the most."""
    import numpy as np

    from lightkv.memory_map import Counts, Owner, legend, marks, owner_lines

    per_mark, lines = marks(np.array(pool.cells, dtype=np.int32), width, height)
    counts = Counts(*(getattr(pool, name) for name in Counts._fields))
    owners = [Owner(one.row, one.num_tokens, one.request_id) for one in pool.owners]
    below = owner_lines(owners, max_owners)
    return "\n".join([*lines, *legend(counts, per_mark * pool.slots_per_cell), *below])
