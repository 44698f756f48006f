"""The HTTP server of the API process: uvicorn with limits on the number of connections, on the time in which a
request has to arrive, and on the bytes of answers that clients do not take. It handles no signals, because the
process ends with its router."""

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lightkv.router.service.api_settings import ApiSettings, ServeSettings

from .guard import OPEN_PATHS, error_body, error_response

_AMBIGUOUS = (
    "a request with Transfer-Encoding has to be HTTP/1.1 and to have no Content-Length; send one of the two"
)


class _Server(uvicorn.Server):
    """A server which ends when `should_exit` is set, and not by signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, settings: ServeSettings) -> uvicorn.Server:
    """Returns a server of `app`, which needs a listening socket. Raises OSError for an unreadable
    certificate."""
    limits = settings.api
    # An eighth of the descriptors is left for connections that are refused, TLS handshakes and this process.
    max_connections = min(limits.max_connections, raise_descriptor_limit() * 7 // 8)
    config = uvicorn.Config(
        app,
        http=cast(
            "type[asyncio.Protocol]",
            partial(_Connection, limits, max_connections, UnsentBytes(limits.max_unsent_bytes)),
        ),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=limits.max_header_bytes,
        timeout_graceful_shutdown=settings.shutdown_timeout,
        ssl_certfile=settings.certfile,
        ssl_keyfile=settings.keyfile,
    )
    config.load()
    return _Server(config)


def raise_descriptor_limit() -> int:
    """Raises this process's limit of open descriptors to the hard limit. Returns that limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class _HttpConnection(h11.Connection):
    """The state of a server's connection. It refuses requests whose end is ambiguous, and frames the chunks
    of a stream itself, which takes h11 ten times as long."""

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._is_chunked = False
        self.refusal = ""  # why the last request was refused, if that was no mistake of form

    def next_event(self) -> Any:
        """Returns the next part of a request. Raises h11.RemoteProtocolError for a request that is not HTTP, or
        of which a proxy in front could see another end (RFC 9112, section 6.1): the rest of its body would then
        be another client's request."""
        event = super().next_event()
        if type(event) is h11.Request:
            names = {name for name, _ in event.headers}  # in lower case
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                self.refusal = _AMBIGUOUS
                raise h11.RemoteProtocolError(_AMBIGUOUS)
        return event

    def send(self, event: Any) -> Any:
        """Returns the bytes of an event. Raises h11.LocalProtocolError where it may not be sent now."""
        if type(event) is h11.Data and self._is_chunked and self.our_state is h11.SEND_BODY:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # an empty chunk would be the last
        sent = super().send(event)
        if type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


class UnsentBytes:
    """Counts the bytes that wait on connections whose clients take too little. Beyond `max_bytes` the
    connection with the most of them is closed. A connection counts from 64 KiB on, and is not written to then.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._by_transport: dict[asyncio.Transport, int] = {}

    def add(self, transport: asyncio.Transport) -> None:
        """Counts a connection that has been told to wait."""
        num_bytes = self._by_transport[transport] = transport.get_write_buffer_size()
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            slowest = max(self._by_transport, key=lambda one: self._by_transport[one])
            self.remove(slowest)
            slowest.abort()

    def remove(self, transport: asyncio.Transport) -> None:
        """Notes that a connection may write again, or is closed."""
        self.num_bytes -= self._by_transport.pop(transport, 0)


class _Connection(H11Protocol):
    """One client's connection, with time limits for headers and body. Beyond `max_connections` it answers 503.

    The time for headers begins with the connection, or with the first byte of a later request; the time for the
    body begins at the end of the headers. When a limit has passed, the connection is closed, with a 408 unless
    nothing was sent or the answer has begun. Between requests uvicorn's timeout_keep_alive applies.

    While an answer waits for its client, the client has to take some bytes of it in every `write_seconds`.
    """

    conn: _HttpConnection

    def __init__(
        self,
        limits: ApiSettings,
        max_connections: int,
        unsent: UnsentBytes,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _HttpConnection(limits.max_header_bytes)
        self._seconds = {"headers": limits.header_seconds, "body": limits.body_seconds}
        self._max_connections = max_connections
        self._unsent = unsent
        self._write_seconds = limits.write_seconds
        self._write_timer: asyncio.TimerHandle | None = None
        self._awaited: str | None = None  # what the timer runs for: "headers", "body" or nothing
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self.app = _TooManyConnections(self.app, self._max_connections)
        self._await("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client(None)
        self._unsent.add(self.transport)

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def _wait_for_client(self, num_before: int | None) -> None:
        """Closes the connection if none of the bytes that waited `write_seconds` ago was taken. `num_before`:
        how many these were; None begins."""
        num_bytes = self.transport.get_write_buffer_size()
        if num_before is not None and num_bytes >= num_before:
            self.transport.abort()
            return
        self._write_timer = self.loop.call_later(self._write_seconds, self._wait_for_client, num_bytes)

    def _stop_waiting(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._unsent.remove(self.transport)

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:
            self._await("body")
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await("headers")
        elif self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._await(None)

    def _await(self, awaited: str | None) -> None:
        """Restarts the timer if another part of a request is awaited now."""
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaited is not None:
            self._timer = self.loop.call_later(self._seconds[awaited], self._give_up, awaited)

    def _give_up(self, awaited: str) -> None:
        """Closes the connection, because the awaited part did not arrive in time."""
        if self.transport.is_closing():
            return
        is_silent = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if not is_silent and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = f"the {awaited} took more than {self._seconds[awaited]:g} seconds to arrive; try again"
            self._send_error(408, text)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that is no HTTP, or whose end is ambiguous, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(400, self.conn.refusal or msg)
        self.transport.close()

    def _send_error(self, status: int, text: str) -> None:
        """Sends an error as the last answer of the connection, of which none may have begun."""
        body = json.dumps(error_body(status, text)).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        reason = HTTPStatus(status).phrase.encode()
        response = h11.Response(status_code=status, headers=headers, reason=reason)
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # stops the route, which may wait for the body, or answer, too


class _TooManyConnections:
    """The application of connections beyond the limit: it answers /health, and 503 to all other requests."""

    def __init__(self, app: Any, max_connections: int) -> None:
        self._app = app
        self._max_connections = max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        text = f"the service has {self._max_connections} open connections, its limit; try again in a moment"
        await error_response(503, text, headers={"Connection": "close"})(scope, receive, send)
