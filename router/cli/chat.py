"""The command `lightkv chat`, a client that talks to a service line by line."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Annotated, Any

import typer
from rich.console import Console

from lightkv.errors import LightKVError
from lightkv.router.terminal import say, usage

from .http_client import DEFAULT_URL, ServiceClient, Usage
from .options import ApiKey, CaCert, Url

EXAMPLES = (
    "lightkv chat",
    "lightkv chat --system 'Answer in one sentence.' --temperature 0",
    "echo 'Name three rivers.' | lightkv chat --url http://127.0.0.1:9000 > rivers.txt",
)


def chat(
    *,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    cacert: CaCert = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model. Default: the service's first model.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message at the start of the chat.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="The most tokens of an answer. Default: what the context leaves.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token. Default: the service's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the answers repeatable.")] = None,
) -> None:
    """Chat with a served model, one line at a time.

    /reset forgets the conversation, /exit or Ctrl-D leaves the chat, Ctrl-C interrupts an answer. If standard
    input is a pipe, each line is a message, and standard output carries the answers alone.
    """
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    client = ServiceClient(url, api_key, cacert)
    conversation = Conversation(client, system, options)
    notes = Console(stderr=True, highlight=False)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        client.get("/v1/models")  # finds a wrong address or key before the user types
        say(notes, f"connected to {url}; /reset forgets the conversation, /exit ends it")
    for line in _lines(is_interactive):
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            say(notes, "the conversation is forgotten")
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
    """The messages of a chat so far.

    `options`: further fields of every request; fields that are None are left out.
    """

    def __init__(self, client: ServiceClient, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._options = {name: value for name, value in options.items() if value is not None}
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._first)

    def reset(self) -> None:
        """Forgets every message except the system message."""
        self.messages = list(self._first)

    def ask(self, text: str, write: Callable[[str], None]) -> str:
        """Sends `text` and passes the answer to `write` as it arrives, then a line end.

        Returns one line with the token counts and the time. If the answer is interrupted, the conversation
        keeps the part that arrived; if it fails, the conversation keeps neither the answer nor `text`.
        """
        message = {"role": "user", "content": text}
        pieces: list[str] = []
        counts = Usage(0, None, 0)
        started = time.perf_counter()
        try:
            with closing(self._client.chat([*self.messages, message], self._options)) as answer:
                for piece in answer:
                    if isinstance(piece, Usage):
                        counts = piece
                    else:
                        pieces.append(piece)
                        write(piece)
        except LightKVError:
            if pieces:
                write("\n")
            raise
        except KeyboardInterrupt:
            self._keep(message, pieces)
            raise
        self._keep(message, pieces)
        write("\n")
        return usage(counts.num_prompt, counts.num_cached, counts.num_new, time.perf_counter() - started)

    def _keep(self, message: dict[str, str], pieces: list[str]) -> None:
        self.messages += [message, {"role": "assistant", "content": "".join(pieces)}]


def _lines(is_interactive: bool) -> Iterator[str]:
    """Yields the lines that are typed or piped in, until the input ends."""
    if not is_interactive:
        try:
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise typer.BadParameter(
                f"standard input is not UTF-8 text ({error}); convert it first"
            ) from None
        return
    import readline  # noqa: F401  # gives `input` a history and line editing

    while True:
        try:
            yield input("> ")
        except EOFError:
            _write("\n")
            return


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
