"""The HTTP server of the API process: uvicorn, with connections that are counted from their accept on, and a
time limit for TLS handshakes. It handles no signals, because the process ends with its router."""

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from lightkv.router.service.api_settings import ServeSettings

from .connection import Connection, OpenConnections

MAX_REFUSED = 1024  # connections beyond the limit that are answered 503; further ones are closed
MAX_HANDSHAKES = 512  # some 50 KB each
_ACCEPTS_PER_TURN = 64
_NO_DESCRIPTOR_SECONDS = 0.1


class _Server(uvicorn.Server):
    """A server which ends when `should_exit` is set, and not by signals.

    Connections beyond the limit are answered 503, and those beyond `max_refused` more are closed at once. When
    as many TLS handshakes as may be are under way, a new one ends the oldest.
    """

    def __init__(self, config: uvicorn.Config, connections: OpenConnections, max_refused: int) -> None:
        super().__init__(config)
        self._connections = connections
        self._most_open = connections.max_connections + max_refused
        self._max_handshakes = max(min(MAX_HANDSHAKES, connections.max_connections // 2), 1)
        # The sockets of connections that are not made yet, the oldest first.
        self._opening: dict[Connection, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # keeps those that make them
        self._listeners: list[socket.socket] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes connections from `sockets`, which are bound."""
        await super().startup(sockets=[])
        self._listeners = sockets or []
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._listen(listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more connections, and lets the open ones finish."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        self._listeners = []
        while self._opening:
            self._end_oldest()
        await super().shutdown(sockets)

    def _listen(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                client, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:  # no descriptor is left
                loop.remove_reader(listener)
                loop.call_later(_NO_DESCRIPTOR_SECONDS, self._listen, listener)
                return
            self._take(client)

    def _take(self, client: socket.socket) -> None:
        if len(self._connections.protocols) >= self._most_open:
            client.close()
            return
        if self.config.ssl is not None and len(self._opening) >= self._max_handshakes:
            self._end_oldest()
        client.setblocking(False)
        connection = Connection(self._connections, self.config, self.server_state)
        self._opening[connection] = client
        task = asyncio.get_running_loop().create_task(self._open(client, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_oldest(self) -> None:
        """Ends the oldest TLS handshake."""
        connection = next(iter(self._opening))
        with suppress(OSError):  # the client has closed already
            self._opening[connection].shutdown(socket.SHUT_RDWR)  # which `_open` notices
        self._leave(connection)

    def _leave(self, connection: Connection) -> None:
        """Notes that a connection is made, or never will be."""
        self._opening.pop(connection, None)
        if not connection.is_made:
            self._connections.protocols.discard(connection)

    async def _open(self, client: socket.socket, connection: Connection) -> None:
        """Makes the accepted `client` a connection, with TLS if the server has a certificate."""
        seconds = None if self.config.ssl is None else self._connections.limits.header_seconds
        try:
            with suppress(OSError):  # the handshake failed, or took too long
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, client, ssl=self.config.ssl, ssl_handshake_timeout=seconds
                )
        finally:
            self._leave(connection)


def make_server(app: ASGIApp, settings: ServeSettings) -> uvicorn.Server:
    """Returns a server of `app`, which needs a bound socket. Raises OSError for an unreadable certificate."""
    limits = settings.api
    num_descriptors = raise_descriptor_limit()
    # An eighth of the descriptors is left for connections that are refused, and for this process.
    max_connections = min(limits.max_connections, num_descriptors * 7 // 8)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_timeout,
        ssl_certfile=settings.certfile,
        ssl_keyfile=settings.keyfile,
    )
    config.load()
    max_refused = min(MAX_REFUSED, num_descriptors // 16)
    return _Server(config, OpenConnections(limits, max_connections), max_refused)


def raise_descriptor_limit() -> int:
    """Raises this process's limit of open descriptors to the hard limit. Returns that limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
