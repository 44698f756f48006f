"""The HTTP server of the API process: uvicorn, with connections that are counted from their accept on, and a
time limit for TLS handshakes. It handles no signals, because the process ends with its router."""

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from lightkv.router.service.api_settings import ServeSettings

from .connection import Connection, OpenConnections
from .owner import network_of
from .turns import Turns

MAX_REFUSED = 1024  # connections beyond the limit that are answered 503; further ones are closed
MAX_HANDSHAKES = 256  # that have begun; some 50 KB and 1.4 ms each
HANDSHAKES_PER_TURN = 2  # that begin in a turn of the event loop
_ACCEPTS_PER_TURN = 256
_NO_DESCRIPTOR_SECONDS = 0.1


class _Server(uvicorn.Server):
    """A server which ends when `should_exit` is set, and not by signals.

    Connections beyond the limit are answered 503, and those beyond `max_refused` more are closed at once. A few
    TLS handshakes begin in each turn of the event loop; the others wait, and nothing is read of them. When as
    many as may be have begun, a new one ends the oldest of the network that has the most.
    """

    def __init__(self, config: uvicorn.Config, connections: OpenConnections, max_refused: int) -> None:
        super().__init__(config)
        self._connections = connections
        self._most_open = connections.max_connections + max_refused
        self._max_handshakes = max(min(MAX_HANDSHAKES, connections.max_connections // 2), 1)
        self._turns = Turns(HANDSHAKES_PER_TURN, newest_first=True)  # in which handshakes begin
        self._handshakes: dict[asyncio.Task[None], str] = {}  # those that have begun, with their networks
        self._opening: set[asyncio.Task[None]] = set()
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
        for task in self._opening:
            task.cancel()
        await super().shutdown(sockets)

    def _listen(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                client, address = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:  # no descriptor is left
                loop.remove_reader(listener)
                loop.call_later(_NO_DESCRIPTOR_SECONDS, self._listen, listener)
                return
            if len(self._connections.protocols) >= self._most_open:
                client.close()
                continue
            client.setblocking(False)
            connection = Connection(self._connections, self.config, self.server_state)
            network = network_of(address[0]) if isinstance(address, tuple) else ""
            task = loop.create_task(self._open(client, connection, network))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket, connection: Connection, network: str) -> None:
        """Makes the accepted `client` a connection, with TLS if the server has a certificate."""
        loop, ssl, task = asyncio.get_running_loop(), self.config.ssl, asyncio.current_task()
        assert task is not None
        seconds = None if ssl is None else self._connections.limits.header_seconds
        try:
            with suppress(OSError):  # the handshake failed, or took too long
                async with asyncio.timeout(seconds):
                    if ssl is not None:
                        await self._may_begin(client, network, task)
                    await loop.connect_accepted_socket(
                        lambda: connection, client, ssl=ssl, ssl_handshake_timeout=seconds
                    )
        finally:
            self._handshakes.pop(task, None)
            if not connection.is_made:
                self._connections.protocols.discard(connection)
                client.close()

    async def _may_begin(self, client: socket.socket, network: str, task: asyncio.Task[None]) -> None:
        """Waits until a client begins its handshake, and then for a turn of its network."""
        loop, turn = asyncio.get_running_loop(), asyncio.Event()

        def wait_for_turn() -> None:
            loop.remove_reader(client)
            self._turns.add(network, turn.set)

        loop.add_reader(client, wait_for_turn)
        try:
            await turn.wait()
        finally:
            loop.remove_reader(client)
        if len(self._handshakes) >= self._max_handshakes:
            largest, _ = Counter(self._handshakes.values()).most_common(1)[0]
            oldest = next(task for task, other in self._handshakes.items() if other == largest)
            del self._handshakes[oldest]
            oldest.cancel()
        self._handshakes[task] = network


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
        log_level=limits.log_level,
        timeout_keep_alive=limits.timeout_keep_alive,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_timeout,
        ssl_certfile=limits.ssl_certfile,
        ssl_keyfile=limits.ssl_keyfile,
    )
    config.load()
    max_refused = min(MAX_REFUSED, num_descriptors // 16)
    return _Server(config, OpenConnections(limits, max_connections), max_refused)


def raise_descriptor_limit() -> int:
    """Raises this process's limit of open descriptors to the hard limit. Returns that limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
