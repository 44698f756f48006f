"""The connections of the HTTP server: how they are counted, TLS handshakes, and how one ends before its client
has sent all of a request."""

import asyncio
import errno
import json
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from lightkv.router.api.http import server as http_server
from lightkv.router.api.http import turns as http_turns
from lightkv.router.api.http.connection import EVENTS_PER_TURN, PARSING_SECONDS
from lightkv.router.api.http.parser import FREE_CHUNKS, MAX_LINES
from lightkv.router.api.http.server import make_server
from lightkv.router.api.http.turns import FIRST_ARRIVALS, Turns
from lightkv.router.service.api_settings import ApiSettings, ServeSettings
from tests.support.api_process import until_closed
from tests.support.fake_router import error_of, wait_until

MAX_BODY = 2**20
READS = ("/read", "/v1/messages", "/llm/v1/messages")
CHUNKED = b"POST /read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSED = CHUNKED.replace(b"/read", b"/refuse")
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HANDSHAKE = b"\x16"  # the type of a record of a handshake
ANONYMOUS = "aNULL:@SECLEVEL=0"  # TLS without certificates


class Application:
    """Answers a POST to one of READS with the length of the body, and /refuse with 401 before it reads any.
    `parts`: the lengths in which bodies arrived; None where the client disconnected."""

    def __init__(self) -> None:
        self.parts: list[int | None] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = 0
        is_open = scope["path"] in READS and scope["method"] == "POST"
        while is_open:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.parts.append(None)
                return
            self.parts.append(len(message["body"]))
            length += len(message["body"])
            is_open = message["more_body"]
        answer = PlainTextResponse(str(length), 401 if scope["path"] == "/refuse" else 200)
        await answer(scope, receive, send)


class Serving:
    """A server in a thread, with its application."""

    def __init__(self, server: uvicorn.Server, application: Application, port: int) -> None:
        self.application = application
        self.port = port
        self._server: Any = server

    @property
    def num_open(self) -> int:
        return len(self._server._connections.protocols)

    @property
    def num_begun(self) -> int:
        """The number of TLS handshakes that have begun."""
        return len(self._server._handshakes)

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), 20, (source, 0))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def begin_tls(self, source: str = "127.0.0.1") -> socket.socket:
        """Sends the first byte of a handshake, and nothing more."""
        connection = self.connect(source)
        connection.sendall(HANDSHAKE)
        return connection

    def connect_tls(self) -> ssl.SSLSocket:
        return client_context().wrap_socket(self.connect())


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return anonymous(context)


def anonymous(context: ssl.SSLContext) -> ssl.SSLContext:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(ANONYMOUS)
    return context


@contextmanager
def serving(tls: bool = False, listener: socket.socket | None = None, **limits: Any) -> Iterator[Serving]:
    listener = listener or socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    api = ApiSettings(served_model_name=("m",), **{"max_body_bytes": MAX_BODY, **limits})
    application = Application()
    settings = ServeSettings(
        api=api, model_directory="", router_socket="", listen_fd=listener.fileno(), shutdown_timeout=5
    )
    server = make_server(application, settings)
    if tls:
        server.config.ssl = anonymous(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    thread = threading.Thread(target=lambda: uvloop.run(server.serve([listener])))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Serving(server, application, port)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def answer(connection: socket.socket) -> bytes:
    """Returns an answer with a known length."""
    received = b""
    while b"\r\n\r\n" not in received or b"content-length: " not in received.lower():
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection on which it sent nothing."""
    if not select.select([connection], [], [], 0)[0]:
        return False
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    return True


# The end of a connection


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("keep", [b"", b"Connection: close\r\n"], ids=["keep", "close"])
def test_a_client_that_goes_on_sending_sees_its_refusal(keep: bytes, tls: bool) -> None:
    with serving(tls) as service:
        connection = service.connect_tls() if tls else service.connect()
        connection.sendall(REFUSED.replace(b"\r\n\r\n", b"\r\n" + keep + b"\r\n") + b"1\r\nx\r\n" * 1000)
        received = answer(connection)
        for _ in range(3):
            connection.sendall(b"x" * (MAX_BODY // 4))
        assert received.startswith(b"HTTP/1.1 401")
        assert b"\r\nconnection: close\r\n" in received.lower()
        if not tls:
            assert connection.recv(1) == b""
        connection.close()
        wait_until(lambda: service.num_open == 0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_nothing_is_read_behind_a_refusal_beyond_the_bytes_of_a_body(tls: bool) -> None:
    with serving(tls, header_seconds=60.0) as service:
        connection = service.connect_tls() if tls else service.connect()
        connection.sendall(REFUSED)
        assert answer(connection).startswith(b"HTTP/1.1 401")
        with pytest.raises(OSError, match=r"reset|pipe|EOF"):
            connection.sendall(b"x" * (64 * MAX_BODY))
        wait_until(lambda: service.num_open == 0)
        connection.close()


def test_nothing_is_read_behind_a_refusal_beyond_the_time_for_headers() -> None:
    with serving(header_seconds=0.2) as service:
        connection = service.connect()
        connection.sendall(REFUSED)
        assert answer(connection).startswith(b"HTTP/1.1 401")
        assert connection.recv(1) == b""  # nothing more is sent; what the client sends is dropped
        wait_until(lambda: service.num_open == 0)
        connection.close()


def test_tiny_chunks_are_refused_and_the_application_learns_it() -> None:
    with serving() as service:
        connection = service.connect()
        connection.sendall(CHUNKED + b"1\r\nx\r\n" * 20000)
        head, _, body = until_closed(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert f"after {FREE_CHUNKS} chunks" in error_of(body)["message"]
        wait_until(lambda: service.application.parts[-1:] == [None])
        connection.close()
        wait_until(lambda: service.num_open == 0)


def test_many_lines_of_headers_are_refused() -> None:
    with serving() as service:
        connection = service.connect()
        connection.sendall(HEALTH[:-2] + b"a:\r\n" * 15000)
        head, _, body = until_closed(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert f"more than {MAX_LINES} header lines" in error_of(body)["message"]
        connection.close()


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Host: x\r\nContent-Length: 9\r\n\r\n", b"408"),
        (b"Host: x\r\n", b"408"),
        (b"Host: x\r\n" + b"a:\r\n" * 200, b"400"),
        (b"Host: x\r\na: \x00\r\n\r\n", b"400"),
        (b"Host: x\r\nx-api-key: " + b"k" * 80_000, b"400"),
        (b"Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n", b"400"),
    ],
    ids=["body", "headers", "lines", "character", "bytes", "lengths"],
)
@pytest.mark.parametrize("keeps", [False, True], ids=["first", "later"])
def test_errors_of_a_connection_have_the_form_of_their_path(lines: bytes, status: bytes, keeps: bool) -> None:
    with serving(header_seconds=0.1, body_seconds=0.1, root_path="/llm") as service:
        for path, has_type in (
            (b"/v1/messages?beta=true", True),
            (b"/llm/v1/messages", True),
            (b"/read", False),
        ):
            connection = service.connect()
            if keeps:
                connection.sendall(HEALTH if has_type else HEALTH.replace(b"/health", b"/v1/messages"))
                answer(connection)
            connection.sendall(b"POST %b HTTP/1.1\r\n%b" % (path, lines))
            head, _, body = until_closed(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status)
            assert len(body) == int(head.lower().partition(b"content-length: ")[2].split()[0])
            error = json.loads(body)
            assert error["error"]["type"] == "invalid_request_error"
            assert error.get("type") == ("error" if has_type else None)
            connection.close()


def test_a_connection_too_many_is_an_overload_to_anthropics_clients() -> None:
    with serving(max_connections=1, root_path="/llm") as service:
        connections = [service.connect(), service.connect()]
        for path, status in ((b"/llm/v1/messages", b"529"), (b"/llm/health", b"200")):
            connections.append(service.connect())
            connections[-1].sendall(HEALTH.replace(b"/health", path))
            received = answer(connections[-1])
            assert received.startswith(b"HTTP/1.1 " + status)
            assert (b'"overloaded_error"' in received) == (status == b"529")
        for connection in connections:
            connection.close()


# The turns of the event loop


def test_a_body_in_small_chunks_is_read_in_many_turns() -> None:
    num_chunks, size = 6400, 64
    with serving() as service:
        connection = service.connect()
        connection.sendall(CHUNKED + b"40\r\n%b\r\n" % (b"x" * size) * num_chunks + b"0\r\n\r\n")
        assert answer(connection).endswith(b"\r\n\r\n%d" % (num_chunks * size))
        parts = [part or 0 for part in service.application.parts]
        assert sum(parts) == num_chunks * size
        assert max(parts) <= 2 * EVENTS_PER_TURN * size  # a turn may end one read and begin another
        connection.close()


class Clock:
    """Work that takes 0.6 ms each by a clock of the test, and what was done in each turn of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: list[list[int]] = []
        self._now = 0.0
        monkeypatch.setattr(http_turns, "time", SimpleNamespace(monotonic=lambda: self._now))

    def work(self, number: int) -> None:
        self._now += 0.0006
        self.turns[-1].append(number)

    async def until(self, num_done: int) -> None:
        while sum(map(len, self.turns)) < num_done:
            self.turns.append([])
            await asyncio.sleep(0)


async def test_connections_share_the_time_to_parse_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has parts for three times."""
    clock = Clock(monkeypatch)
    parsing = Turns(seconds=PARSING_SECONDS)

    def go_on(number: int, num_left: int) -> None:
        clock.work(number)
        if num_left:
            parsing.add("", lambda: go_on(number, num_left - 1))
        if number == 7:
            raise RuntimeError("a connection that fails holds up no other")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for number in range(50):
        parsing.add("", lambda number=number: go_on(number, 2))  # type: ignore[misc]
    await clock.until(150)
    assert max(map(len, clock.turns)) == PARSING_SECONDS // 0.0006 + 1
    assert [number for turn in clock.turns for number in turn] == list(range(50)) * 3


async def test_networks_take_turns_however_much_one_of_them_has(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    turns = Turns(seconds=PARSING_SECONDS)
    for number in range(100):
        turns.add("many", lambda number=number: clock.work(number))  # type: ignore[misc]
    clock.turns.append([])
    await asyncio.sleep(0)
    for number, network in ((1000, "one"), (1001, "one"), (1002, "other")):
        turns.add(network, lambda number=number: clock.work(number))  # type: ignore[misc]
    await clock.until(103)
    done = [number for turn in clock.turns for number in turn]
    assert done[:10] == [0, 1, 2, 3, 4, 1000, 1002, 5, 1001, 6]
    assert [number for number in done if number < 1000] == list(range(100))


async def test_the_first_arrivals_of_each_network_in_a_turn_need_not_wait() -> None:
    turns = Turns()
    for _ in range(3):
        arrivals = [turns.may_go_first("many") for _ in range(FIRST_ARRIVALS + 50)]
        assert arrivals == [True] * FIRST_ARRIVALS + [False] * 50
        assert turns.may_go_first("one")
        await asyncio.sleep(0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_requests_that_wait_for_a_turn_are_answered(monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    monkeypatch.setattr(http_turns, "FIRST_ARRIVALS", 0)
    with serving(tls) as service:
        connections = [service.connect_tls() if tls else service.connect() for _ in range(4)]
        for length in (1, 5000, 200_000):
            sent = CHUNKED + b"40\r\n%b\r\n" % (b"x" * 64) * (length // 64) + b"0\r\n\r\n"
            for connection in connections:
                connection.sendall(sent)
            for connection in connections:
                assert answer(connection).endswith(b"\r\n\r\n%d" % (length // 64 * 64))
        for connection in connections:
            connection.close()


def test_requests_in_one_packet_are_answered_in_order() -> None:
    with serving() as service:
        connection = service.connect()
        bodies = [b"x" * length for length in (1, 300, 70_000, 5)]
        requests = [CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) for body in bodies]
        connection.sendall(HEALTH.join(requests) + b"BREW\r\n\r\n")
        received = until_closed(connection)
        answers = received.split(b"HTTP/1.1 ")[1:]
        assert [one[:3] for one in answers] == [b"200"] * 7 + [b"400"]
        assert [one.rpartition(b"\r\n\r\n")[2] for one in answers[:7:2]] == [b"1", b"300", b"70000", b"5"]
        connection.close()


def test_a_body_of_known_length_may_arrive_in_packets_of_one_byte() -> None:
    with serving() as service:
        connection = service.connect()
        connection.sendall(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n")
        for _ in range(2000):
            connection.send(b"x")
        assert answer(connection).endswith(b"\r\n\r\n2000")
        connection.close()


def test_only_a_body_that_is_read_is_asked_for() -> None:
    """A client that expects `100 Continue` sends its body after it."""
    with serving() as service:
        refused, asked = service.connect(), service.connect()
        refused.sendall(REFUSED[:-2] + b"Expect: 100-continue\r\n\r\n")
        assert answer(refused).startswith(b"HTTP/1.1 401")
        asked.sendall(CHUNKED[:-2] + b"Expect: 100-continue\r\n\r\n")
        continued = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert asked.recv(len(continued)) == continued
        asked.sendall(b"1\r\nx\r\n0\r\n\r\n")
        assert answer(asked).endswith(b"\r\n\r\n1")
        refused.close()
        asked.close()


# The number of connections


def test_connections_beyond_those_that_are_refused_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_REFUSED", 2)
    with serving(max_connections=3) as service:
        connections = [service.connect() for _ in range(6)]
        wait_until(lambda: is_closed(connections[5]))
        statuses = []
        for connection in connections[:5]:
            connection.sendall(HEALTH.replace(b"/health", b"/read"))
            statuses.append(answer(connection)[9:12])
        assert statuses == [b"200"] * 3 + [b"503"] * 2
        for connection in connections:
            connection.close()
        wait_until(lambda: service.num_open == 0)
        for _ in range(3):
            connections.append(service.connect())
            connections[-1].sendall(HEALTH)
            assert answer(connections[-1]).startswith(b"HTTP/1.1 200")
        for connection in connections:
            connection.close()


def test_handshakes_count_as_connections_and_the_oldest_ends_beyond_a_number() -> None:
    with serving(tls=True, max_connections=6, header_seconds=60.0) as service:
        silent = service.connect()  # it has not begun its handshake
        begun = []
        for num in range(3):
            begun.append(service.begin_tls())
            wait_until(lambda: service.num_begun == num + 1)  # noqa: B023 (it is called at once)
        assert service.num_open == 4
        client = service.connect_tls()
        wait_until(lambda: is_closed(begun[0]))
        client.sendall(HEALTH)
        assert answer(client).startswith(b"HTTP/1.1 200")
        wait_until(lambda: service.num_open == 4)
        begun += [service.begin_tls() for _ in range(20)]
        wait_until(lambda: sum(map(is_closed, begun)) == 20)
        client.sendall(HEALTH)  # connections whose handshake is done stay
        assert answer(client).startswith(b"HTTP/1.1 200")
        assert not is_closed(silent)
        for connection in (*begun, silent, client):
            connection.close()
        wait_until(lambda: service.num_open == 0)


def test_many_handshakes_of_one_network_end_none_of_another() -> None:
    with serving(tls=True, max_connections=6, header_seconds=60.0) as service:
        slow = [service.begin_tls("127.0.0.2") for _ in range(2)]
        wait_until(lambda: service.num_begun == 2)
        begun = [service.begin_tls() for _ in range(20)]
        wait_until(lambda: sum(map(is_closed, begun)) == 18)
        assert [is_closed(one) for one in slow].count(True) == 1  # each network has half at least
        for connection in (*slow, *begun):
            connection.close()
        wait_until(lambda: service.num_open == 0)


async def test_a_few_handshakes_begin_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    turns = Turns(2, newest_first=True)
    for number in range(7):
        turns.add("many", lambda number=number: clock.work(number))  # type: ignore[misc]
    turns.add("one", lambda: clock.work(100))
    await clock.until(8)
    assert [turn for turn in clock.turns if turn] == [[6, 100], [5, 4], [3, 2], [1, 0]]


@pytest.mark.parametrize("what", ["silent", "begun", "waiting"])
def test_a_handshake_has_the_time_of_headers(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "waiting":
        monkeypatch.setattr(Turns, "_run", lambda self: None)  # no handshake has a turn
    with serving(tls=True, header_seconds=0.3) as service:
        client = service.connect() if what == "silent" else service.begin_tls()
        wait_until(lambda: service.num_open == 1)
        wait_until(lambda: is_closed(client))
        wait_until(lambda: service.num_open == 0)
        client.close()


def test_a_handshake_that_fails_counts_no_longer() -> None:
    with serving(tls=True, header_seconds=60.0) as service:
        for sent in (HEALTH, b""):
            connection = service.connect()
            connection.sendall(sent)
            if not sent:
                wait_until(lambda: service.num_open == 1)
                connection.shutdown(socket.SHUT_WR)
            wait_until(lambda: service.num_open == 0)
            connection.close()


class Exhausted(socket.socket):
    """A listener for which there is no descriptor at first."""

    num_failures = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.num_failures < 2:
            self.num_failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_server_without_descriptors_goes_on_when_there_are_some() -> None:
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    with serving(listener=listener) as service:
        connection = service.connect()
        connection.sendall(HEALTH)
        assert answer(connection).startswith(b"HTTP/1.1 200")
        assert listener.num_failures == 2
        connection.close()
