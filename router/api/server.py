"""The HTTP server of the API process: uvicorn, with bounds on connections and on how slowly a request may come.

Knows connections, descriptors and the bytes of HTTP; knows no route and no router. Signals are left alone: the
process ends with its router.
"""

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from lightkv.router.api.openai.protocol import error_body
from lightkv.router.service.api_settings import ApiSettings, ServeSettings

from .http_guard import OPEN_PATHS, error_response


class _Server(uvicorn.Server):
    """Ends when `should_exit` is set, and not by signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, settings: ServeSettings) -> uvicorn.Server:
    """A server of `app`, to be given its socket. Raises OSError for a certificate that cannot be read."""
    limits = settings.api
    # The eighth left over is for who is told that there are too many, for handshakes, and for this process.
    max_connections = min(limits.max_connections, raise_descriptor_limit() * 7 // 8)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(_Connection, limits, max_connections)),
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
    """Let this process open as many descriptors as the system allows it. Returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class _Connection(H11Protocol):
    """One client's connection. Closes it where headers or a body do not arrive in their time: with a 408,
    unless nothing was sent or the answer has begun. One beyond `max_connections` is answered 503.

    Time runs from the connection, or from the first byte of a later request, to the end of the headers, and
    from there to the end of the body. Between requests it is uvicorn's (timeout_keep_alive).
    """

    def __init__(
        self,
        limits: ApiSettings,
        max_connections: int,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._seconds = {"headers": limits.header_seconds, "body": limits.body_seconds}
        self._max_connections = max_connections
        self._awaited: str | None = None  # what has its time now: "headers", "body" or nothing
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self.app = _TooMany(self.app, self._max_connections)
        self._await("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

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
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaited is not None:
            self._timer = self.loop.call_later(self._seconds[awaited], self._give_up, awaited)

    def _give_up(self, awaited: str) -> None:
        if self.transport.is_closing():
            return
        is_silent = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if not is_silent and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = f"the {awaited} took more than {self._seconds[awaited]:g} seconds to arrive; send it again"
            body = json.dumps(error_body(408, text)).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (
                h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:
                self.cycle.disconnected = True  # it is answered: whoever reads the body need not be
        self.transport.close()


class _TooMany:
    """The application of a connection too many: whether the service lives is answered, all else has to wait."""

    def __init__(self, app: Any, max_connections: int) -> None:
        self._app = app
        self._max_connections = max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        text = f"{self._max_connections} connections are open, as many as may; try again in a moment"
        await error_response(503, text, headers={"Connection": "close"})(scope, receive, send)
