"""One client's connection to the API: its time limits, how much of it is read in a turn of the event loop, what
it leaves unread of its answers, and how it is closed."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lightkv.router.service.api_settings import ApiSettings

from .guard import error_response, path_of
from .owner import network_of
from .parser import HttpConnection
from .turns import Turns

# Parts of a request that are parsed when they arrive, and further ones each time the connection has its turn.
FIRST_EVENTS, EVENTS_PER_TURN = 8, 64
PARSING_SECONDS = 0.002  # in one turn of the event loop, for all connections that wait for theirs


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


class OpenConnections:
    """The connections from their accept to their end, with the limits that they have in common."""

    def __init__(self, limits: ApiSettings, max_connections: int) -> None:
        self.limits = limits
        self.max_connections = max_connections  # further ones are answered 503
        self.unsent = UnsentBytes(limits.max_unsent_bytes)
        self.parsing = Turns(seconds=PARSING_SECONDS)
        self.protocols: set[asyncio.Protocol] = set()


class _Transport:
    """The transport of a connection, which closes it by `close`. While it `is_held` nothing is read, even if
    reading is resumed."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.is_held = False
        self._transport = transport
        self._close: Callable[[], None] | None = close

    def end(self) -> None:
        """Notes that the connection has ended, so that nothing is left to close."""
        self._close = None

    def is_closing(self) -> bool:
        return self._close is None or self._transport.is_closing()

    def close(self) -> None:
        if self._close is not None and not self._transport.is_closing():
            self._close()

    def resume_reading(self) -> None:
        if not self.is_held:
            self._transport.resume_reading()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Lingering(asyncio.Protocol):
    """Takes a connection over after its last answer, while its client may still be sending. What arrives is
    dropped, because closing at once would reset the connection before the client has read the answer. Ends when
    the client closes, after the seconds for headers, or after as many bytes as a body may have."""

    def __init__(self, transport: asyncio.Transport, connections: OpenConnections) -> None:
        self._transport = transport
        self._connections = connections
        self._num_left = connections.limits.max_body_bytes
        connections.protocols.add(self)
        transport.set_protocol(self)
        if transport.can_write_eof():  # TLS cannot
            transport.write_eof()
        transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(connections.limits.header_seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._num_left -= len(data)
        if self._num_left < 0:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._connections.protocols.discard(self)


class Connection(H11Protocol):
    """One client's connection, with time limits for headers and body. It counts in `connections` from its
    accept on, before any TLS handshake, and answers 503 if it is beyond their limit.

    The time for headers begins with the connection, or with the first byte of a later request; the time for the
    body begins at the end of the headers. When a limit has passed, the connection is closed, with a 408 unless
    nothing was sent or the answer has begun. Between requests uvicorn's timeout_keep_alive applies.

    While an answer waits for its client, the client has to take some bytes of it in every `write_seconds`.
    """

    conn: HttpConnection

    def __init__(
        self, connections: OpenConnections, config: uvicorn.Config, server_state: ServerState
    ) -> None:
        super().__init__(config, server_state, {})
        limits = connections.limits
        self.conn = HttpConnection(limits.max_header_bytes)
        self._connections = connections
        connections.protocols.add(self)
        if len(connections.protocols) > connections.max_connections:
            self.app = _TooManyConnections(self.app, connections)
        self._seconds = {"headers": limits.header_seconds, "body": limits.body_seconds}
        self._write_seconds = limits.write_seconds
        self._write_timer: asyncio.TimerHandle | None = None
        self.is_made = False  # whether a client is connected, and its TLS handshake done
        self._awaited: str | None = None  # what the timer runs for: "headers", "body" or nothing
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.is_made = True
        self._connections.protocols.add(self)
        self._client = transport
        self._guarded = _Transport(transport, self._close)
        super().connection_made(self._guarded)  # type: ignore[arg-type]
        self._network = network_of("" if self.client is None else self.client[0])
        self._await("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.protocols.discard(self)
        self._await(None)
        self._stop_waiting()
        self._guarded.end()
        super().connection_lost(exc)

    def _close(self) -> None:
        """Closes the connection, at once unless its client may still be sending a request."""
        if self.conn.their_state in (h11.SEND_BODY, h11.ERROR):
            _Lingering(self._client, self._connections)
            self.connection_lost(ConnectionAbortedError())
        else:
            self._client.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_client(None)
        self._connections.unsent.add(self.transport)

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
        self._connections.unsent.remove(self.transport)

    def handle_events(self) -> None:
        if self._connections.parsing.may_go_first(self._network):
            self._parse(FIRST_EVENTS)
        else:
            self._hold()

    def _hold(self) -> None:
        """Waits for a turn. Until then nothing is read."""
        if not self._guarded.is_held:
            self._guarded.is_held = True
            self._client.pause_reading()
            self._connections.parsing.add(self._network, self._go_on)

    def _parse(self, num_events: int) -> None:
        """Parses some parts of a request. Further ones wait for a turn."""
        self.conn.begin_turn(num_events)
        super().handle_events()
        if self.transport.is_closing():
            return
        if self.conn.is_turn_over:
            self._hold()
        if self.conn.their_state is h11.SEND_BODY:
            self._await("body")
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._await("headers")
        elif self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._await(None)

    def _go_on(self) -> None:
        """Parses more of what has arrived, and reads on when nothing is left."""
        self._guarded.is_held = False
        if self.transport.is_closing():
            return
        self._parse(EVENTS_PER_TURN)
        if not self._guarded.is_held and not self.flow.read_paused:
            self._guarded.resume_reading()

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
        """Answers a request that is no HTTP, or that the parser refused, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(400, self.conn.refusal or msg)
        self.transport.close()

    def _send_error(self, status: int, text: str) -> None:
        """Sends an error as the last answer of the connection, of which none may have begun."""
        error = error_response(status, text, headers={"Connection": "close"})
        path = unquote(self.conn.target.partition(b"?")[0].decode("latin-1"))
        error.take_form_of(path_of({"path": path, "root_path": self._connections.limits.root_path}))
        reason = HTTPStatus(status).phrase.encode()
        response = h11.Response(status_code=error.status_code, headers=error.raw_headers, reason=reason)
        for event in (response, h11.Data(data=bytes(error.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # stops the route, which may wait for the body, or answer, too


class _TooManyConnections:
    """The application of connections beyond the limit: it answers /health, and 503 to all other requests."""

    def __init__(self, app: Any, connections: OpenConnections) -> None:
        self._app = app
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._connections.limits.root_path
        if path_of(scope) == "/health":
            await self._app(scope, receive, send)
            return
        most = self._connections.max_connections
        text = f"the service has {most} open connections, its limit; try again in a moment"
        await error_response(503, text, headers={"Connection": "close"})(scope, receive, send)
