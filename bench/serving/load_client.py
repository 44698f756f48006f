"""Streams completions from an OpenAI-compatible server, and records when each piece arrived.

Each request opens a connection of its own, so the time to the first token includes it, as for a new client.
The parser handles HTTP/1.1 (a body in chunks, of a given length, or up to the end) and server-sent events. It
is fed from `asyncio.Protocol` directly, without a task per request, so that one core handles ten thousand
pieces a second.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from bench.serving.workload import Ask

MAX_HEAD_BYTES = 64 * 2**10


class RequestFailed(Exception):
    """Raised when a request is refused, cut off, or answered with something else than it asked for."""


class ResponseParser:
    """Parses one HTTP/1.1 response as it arrives. Raises RequestFailed for anything else.

    `status` is 0 and `headers` (names in lower case) is empty until the head has arrived. `done`: the body is
    complete.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._buffer = b""
        self._left: int | None = (
            None  # bytes of the chunk or the body; None: the body ends with the connection
        )
        self._chunked = False
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Parses `data`, and returns the bytes of the body in it."""
        self._buffer += data
        if not self.status and not self._read_head():
            return b""
        return self._read_chunks() if self._chunked else self._read_plain()

    def end(self) -> None:
        """Ends the response, after the connection closed. Raises RequestFailed if the body is not complete."""
        if self.status and not self._chunked and self._left is None:
            self.done = True
        if not self.done:
            raise RequestFailed("the connection closed before the answer was complete")

    def _read_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise RequestFailed(f"{len(self._buffer)} bytes without the end of a response's head")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise RequestFailed(f"no HTTP/1.1 response: {first[:80]!r}")
        self._buffer = rest
        if words[1].startswith("1"):  # an interim status such as "100 Continue": the response follows
            return self._read_head()
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = self.headers.get("content-length", "")
        self._left = 0 if self._chunked else int(length) if length.isdigit() else None
        return True

    def _read_plain(self) -> bytes:
        body, self._buffer = self._buffer, b""
        if self._left is not None:
            body = body[: self._left]
            self._left -= len(body)
            self.done = not self._left
        return body

    def _read_chunks(self) -> bytes:
        """Parses chunks of `size CRLF data CRLF`, then a size of 0 and trailers."""
        parts = []
        data, at, left = self._buffer, 0, self._left or 0
        while not self.done:
            if left > 2:
                parts.append(data[at : min(at + left - 2, len(data))])
            taken = min(left, len(data) - at)
            left -= taken
            at += taken
            if left:
                break
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            line, at = data[at:end], end + 2
            if self._in_trailer:
                self.done = not line
                continue
            try:
                size = int(line.split(b";", 1)[0], 16)
            except ValueError as error:
                raise RequestFailed(f"no chunk size: {line[:40]!r}") from error
            self._in_trailer = size == 0
            left = size + 2 if size else 0  # with the CRLF after the data
        self._buffer, self._left = data[at:], left
        return b"".join(parts)


class EventParser:
    """Parses server-sent events as the body arrives."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, body: bytes) -> Iterator[bytes]:
        """Yields the `data` of each event that is complete now; several data lines are joined by line feeds."""
        self._buffer = (self._buffer + body).replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


class Reply(NamedTuple):
    """A server's answer to one request. `events`: the data of server-sent events. `body`: any other body."""

    status: int
    body: bytes
    events: list[bytes]


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


STOP_ID = 7  # ends an answer that states more tokens than it gets; no prompt of `workload.py` has it

_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Answer(NamedTuple):
    """A complete streamed answer. Times are seconds of `time.perf_counter`.

    `sent`: when the connection was begun. `arrivals`: when each piece of the answer arrived; a piece may have
    several tokens, and a token without text arrives with the next one. `ended`: when the last byte arrived. The
    counts of tokens are the server's. `ids`: the tokens, if they were asked for.
    """

    sent: float
    arrivals: list[float]
    ended: float
    num_prompt: int
    num_output: int
    text: str
    ids: Sequence[int] = ()

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive pieces."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def per_token(self) -> list[float]:
        """Mean seconds per token after the first, in a list; the list is empty for an answer of one token."""
        return [(self.arrivals[-1] - self.arrivals[0]) / (self.num_output - 1)] if self.num_output > 1 else []

    @property
    def latency(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.sent


def _length_fields(ask: Ask) -> dict[str, Any]:
    """Returns the fields with which an answer has exactly `ask.num_output` tokens.

    Where the request states more, a token that is barred until then and certain from then on stops the answer.
    """
    if ask.stated is None:
        return {"max_tokens": ask.num_output, "ignore_eos": True}
    return {
        "max_tokens": ask.stated,
        "min_tokens": ask.num_output - 1,
        "stop_token_ids": [STOP_ID],
        "logit_bias": {str(STOP_ID): 100},
        "ignore_eos": True,
    }


class _Stream(asyncio.Protocol):
    """One request on its connection. `result`: the answer, or the error."""

    def __init__(self, request: bytes, ask: Ask, has_ids: bool) -> None:
        self.result: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._request = request
        self._num_output = ask.num_output
        self._ends_in = "length" if ask.stated is None else "stop"
        self._ids: list[int] | None = [] if has_ids else None
        self._response = ResponseParser()
        self._events = EventParser()
        self._sent = time.perf_counter()
        self._arrivals: list[float] = []
        self._texts: list[str] = []
        self._usage: _Usage | None = None
        self._finish_reason: str | None = None
        self._body = b""  # of a response that is not a stream
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            body = self._response.feed(data)
            if self._response.status == 200:
                for event in self._events.feed(body):
                    self._take(event, now)
            else:
                self._body += body
            if self._response.done:
                self._finish(now)
        except RequestFailed as error:
            self._fail(error)
        except msgspec.MsgspecError as error:
            self._fail(RequestFailed(f"an event that is no completion: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.result.done():
            return
        try:
            self._response.end()
            self._finish(time.perf_counter())
        except RequestFailed as error:
            self._fail(RequestFailed(f"{error} ({exc})") if exc else error)

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            return
        chunk = _decode_chunk(event)
        if chunk.error is not None:
            raise RequestFailed(f"an error in the stream: {chunk.error}")
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.text or choice.finish_reason:
                self._arrivals.append(now)
                self._texts.append(choice.text)
            if self._ids is not None:
                self._ids += choice.token_ids or ()
            self._finish_reason = choice.finish_reason or self._finish_reason

    def _finish(self, now: float) -> None:
        """Sets the result of a complete response. Raises RequestFailed if the answer is not as requested."""
        usage = self._usage
        if self._response.status != 200:
            raise RequestFailed(
                f"status {self._response.status}: {self._body[:400].decode(errors='replace')}"
            )
        if usage is None:
            raise RequestFailed(
                "no usage in the stream; the server has to support stream_options.include_usage"
            )
        if self._finish_reason != self._ends_in or usage.completion_tokens != self._num_output:
            raise RequestFailed(
                f"{usage.completion_tokens} tokens that ended in {self._finish_reason!r}, where "
                f"{self._num_output} were asked for, to end in {self._ends_in!r}; the server has to support "
                "ignore_eos, or min_tokens, logit_bias and stop_token_ids where a larger max_tokens is stated"
            )
        if self._ids is not None and len(self._ids) != usage.completion_tokens:
            raise RequestFailed(
                f"{len(self._ids)} token ids of {usage.completion_tokens} tokens; the server has to support "
                "return_token_ids"
            )
        counts = usage.prompt_tokens, usage.completion_tokens
        answer = Answer(self._sent, self._arrivals, now, *counts, "".join(self._texts), self._ids or ())
        if not self.result.done():
            self.result.set_result(answer)

    def _fail(self, error: RequestFailed) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Endpoint:
    """A server. `url`: its root, such as http://127.0.0.1:8000. Raises ValueError for any other text."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url!r} is not the address of a server; give one like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._authority = parts.netloc.rpartition("@")[2]
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._timeout = timeout

    async def get(self, path: str) -> Any:
        """Gets the JSON at `path`. Raises RequestFailed."""
        reply = await self.request("GET", path)
        if reply.status != 200:
            raise RequestFailed(f"{path}: status {reply.status}: {reply.body[:400].decode(errors='replace')}")
        return json.loads(reply.body)

    async def request(
        self, method: str, path: str, body: bytes = b"", max_events: int | None = None
    ) -> Reply:
        """Sends one request and returns its answer with any status. Raises RequestFailed.

        `max_events`: closes the connection after this many events of a stream.
        """
        head = self._head(method, path)
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
                try:
                    writer.write(head.encode() + b"\r\n" + body)
                    return await _read_reply(reader, max_events)
                finally:
                    writer.close()
        except TimeoutError as error:
            raise RequestFailed(f"{path}: no complete answer within {self._timeout:g} s") from error
        except OSError as error:
            raise RequestFailed(f"{path}: no connection to {self._authority}: {error}") from error

    async def complete(self, model: str, ask: Ask, with_ids: bool = False) -> Answer:
        """Streams one greedy completion of exactly `ask.num_output` tokens, `with_ids` with their ids too.

        Raises RequestFailed.
        """
        body = msgspec.json.encode(
            {
                "model": model,
                "prompt": ask.prompt_ids,
                **_length_fields(ask),
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **({"return_token_ids": True} if with_ids else {}),
            }
        )
        head = self._head("POST", "/v1/completions")
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        stream = _Stream(head.encode() + body, ask, with_ids)
        try:
            async with asyncio.timeout(self._timeout):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: stream, self._host, self._port, ssl=self._ssl)
                return await stream.result
        except TimeoutError as error:
            raise RequestFailed(f"no complete answer within {self._timeout:g} s") from error
        except OSError as error:
            raise RequestFailed(f"no connection to {self._authority}: {error}") from error
        finally:
            stream.close()

    def _head(self, method: str, path: str) -> str:
        lines = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._authority}\r\n"
        return f"{lines}Accept: */*\r\nConnection: close\r\n{self._key}"


async def _read_reply(reader: asyncio.StreamReader, max_events: int | None) -> Reply:
    response, parser = ResponseParser(), EventParser()
    body, events = b"", []
    while not response.done and (max_events is None or len(events) < max_events):
        data = await reader.read(2**16)
        if not data:
            response.end()
            break
        part = response.feed(data)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            events += parser.feed(part)
        else:
            body += part
    return Reply(response.status, body, events)


async def closed_loop(endpoint: Endpoint, model: str, asks: Iterable[Ask], concurrency: int) -> list[Answer]:
    """Runs `concurrency` clients, each of which sends its next request when the last one is answered.

    Returns the answers in the order of `asks`. Raises RequestFailed.
    """
    waiting = enumerate(asks)
    answers: dict[int, Answer] = {}

    async def client() -> None:
        for idx, ask in waiting:  # all clients share this iterator
            answers[idx] = await endpoint.complete(model, ask)

    await _all(client() for _ in range(concurrency))
    return [answers[idx] for idx in sorted(answers)]


async def open_loop(
    endpoint: Endpoint, model: str, asks: Iterable[Ask], arrivals: list[float]
) -> list[Answer]:
    """Sends each request at its time in seconds from the start, however many are in flight.

    Returns the answers in the order of `asks`. Raises RequestFailed.
    """
    start = asyncio.get_running_loop().time()
    answers: dict[int, Answer] = {}

    async def client(idx: int, ask: Ask, at: float) -> None:
        await asyncio.sleep(start + at - asyncio.get_running_loop().time())
        answers[idx] = await endpoint.complete(model, ask)

    await _all(client(idx, ask, at) for idx, (ask, at) in enumerate(zip(asks, arrivals, strict=True)))
    return [answers[idx] for idx in sorted(answers)]


async def _all(clients: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs every client to its end. The first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
