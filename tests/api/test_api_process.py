"""The API process over a fake router: its start and its end, signals, many connections, and requests that never
arrive completely."""

import json
import re
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from lightkv.router.cli.http_client import UnixConnection
from lightkv.router.service.child_process import signals_held_back
from tests.support.api_process import start_api_process, until_closed
from tests.support.fake_router import COMPLETIONS, ApiUnderTest, error_of, service, wait_until


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[ApiUnderTest]:
    """A service whose fake router the process uses, too."""
    with service(tmp_path).running() as under_test:
        yield under_test


def signal_twice(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT) * 2:
        process.send_signal(number)


def test_the_process_serves_an_inherited_socket_and_no_signal_ends_it(
    fresh: ApiUnderTest, tmp_path: Path
) -> None:
    """A service manager may signal every process of the service; the API process ends only with the router."""
    fresh.router.delay = 0.02
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "http"))
        with signals_held_back():  # as the launcher starts it
            process = start_api_process(fresh, listener)
        signal_twice(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    connection = UnixConnection(str(tmp_path / "http"))
    asked = {"prompt": "a", "max_tokens": 25, "stream": True}
    wait_until(lambda: fresh.client.status.state == "ready")
    connection.request("POST", COMPLETIONS, json.dumps(asked), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    signal_twice(process)
    assert response.read().endswith(b"data: [DONE]\n\n")
    assert status_of_ready(tmp_path / "http") == 200
    fresh.call(fresh.router.die)
    assert process.wait(20) == 1


def status_of_ready(path: Path) -> int:
    connection = UnixConnection(str(path))
    connection.request("GET", "/ready")
    status = connection.getresponse().status
    connection.close()
    return status


def test_the_process_is_not_ready_before_it_knows_that_the_router_is(
    fresh: ApiUnderTest, tmp_path: Path
) -> None:
    """The reader of "ready" sends requests, which were answered 503 if the router's status arrived later."""
    fresh.router.first_state = "starting"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "http"))
        listener.listen()
        process = start_api_process(fresh, listener)
        assert status_of_ready(tmp_path / "http") == 503
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 0.2)[0] == []
    fresh.call(lambda: fresh.router.report("ready"))
    assert process.stdout.readline() == b"ready\n"
    assert status_of_ready(tmp_path / "http") == 200
    fresh.call(fresh.router.die)
    assert process.wait(20) == 1


def test_an_error_at_the_start_of_the_process_is_one_line(fresh: ApiUnderTest, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        process = start_api_process(fresh, listener, {"ssl_certfile": str(tmp_path / "none.pem")})
        assert process.wait(20) == 1
    assert process.stderr is not None
    lines = process.stderr.read().decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("lightkv api: ")


# Limits of the server


HEADER_SECONDS, BODY_SECONDS, MAX_CONNECTIONS = 1.5, 2.0, 12  # enough for a client on a busy machine
Connect = Callable[[], socket.socket]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("router")).running() as under_test:
        yield under_test


@pytest.fixture(scope="module")
def narrow(router: ApiUnderTest) -> Iterator[tuple[int, int]]:
    """The port and the process id of a server with narrow limits."""
    limits = {
        "header_seconds": HEADER_SECONDS,
        "body_seconds": BODY_SECONDS,
        "max_connections": MAX_CONNECTIONS,
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = start_api_process(router, listener, limits)
        port = listener.getsockname()[1]
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield port, process.pid
        process.kill()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


@contextmanager
def connecting(port: int) -> Iterator[Connect]:
    """Yields a function that connects to a server. The connections close with the block."""
    opened: list[socket.socket] = []

    def to_it() -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        return opened[-1]

    try:
        yield to_it
    finally:
        for connection in opened:
            connection.close()


@pytest.fixture
def connect(narrow: tuple[int, int]) -> Iterator[Connect]:
    with connecting(narrow[0]) as connect:
        yield connect


def head(path: str, length: int, more: str = "") -> bytes:
    method = "POST" if length else "GET"
    lines = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
    return f"{lines}Content-Length: {length}\r\n\r\n".encode()


def answer(connection: socket.socket) -> bytes:
    """Returns the body of an answer with a known length, on a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    lines, body = received.split(b"\r\n\r\n", 1)
    length = re.search(rb"content-length: (\d+)", lines.lower())
    assert length is not None
    while len(body) < int(length[1]):
        body += connection.recv(65536)
    return body


def check_too_slow(received: bytes, seconds: float) -> None:
    lines, body = received.split(b"\r\n\r\n", 1)
    assert lines.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in lines.lower()
    assert error_of(body)["code"] == 408
    assert f"more than {seconds:g} seconds" in error_of(body)["message"]


class Slow(NamedTuple):
    """What clients have received that are slow in different ways. They wait side by side, for BODY_SECONDS."""

    headers: list[bytes]  # whose request line or headers have no end
    bodies: list[bytes]
    second: bytes  # whose second request on the connection has no end
    nothing: bytes  # that sends nothing
    trickling: list[bytes]  # that send a byte now and then; the first 12 bytes
    answers: list[bytes]  # that send all at once, for answers that take longer than the time limits


@pytest.fixture(scope="module")
def slow(router: ApiUnderTest, narrow: tuple[int, int]) -> Slow:
    whole = head(COMPLETIONS, 1000)
    chunked = whole.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked")
    with connecting(narrow[0]) as connect:
        second = connect()
        for _ in range(2):
            second.sendall(head("/ready", 0))
            assert json.loads(answer(second))["ready"] is True
        second.sendall(head("/ready", 0)[:10])
        router.router.delay = 0.3
        answers = []
        for stream in (False, True):
            answers.append(connect())
            asked = json.dumps({"prompt": "a", "max_tokens": 8, "stream": stream}).encode()
            answers[-1].sendall(head(COMPLETIONS, len(asked), "Connection: close\r\n") + asked)
        line, headers, no_body, body, nothing = (connect() for _ in range(5))
        line.sendall(head(COMPLETIONS, 30)[:20])
        headers.sendall(head(COMPLETIONS, 30)[:-2])
        no_body.sendall(head(COMPLETIONS, 30))
        body.sendall(head(COMPLETIONS, 30) + b'{"prompt": "a')
        pieces = {}
        for begin, piece in ((whole[:-4], b"x"), (whole, b"x"), (chunked, b"1\r\nx\r\n")):
            connection = connect()
            connection.sendall(begin)
            pieces[connection] = piece
        trickled = trickle(pieces)
        received = [until_closed(one) for one in (line, headers, no_body, body, second, nothing, *answers)]
    router.router.delay = 0.0
    starts = [trickled[connection] for connection in pieces]
    return Slow(received[:2], received[2:4], received[4], received[5], starts, received[6:])


def test_an_unfinished_request_is_a_408_and_a_connection_without_one_is_closed(slow: Slow) -> None:
    for received in slow.headers:
        check_too_slow(received, HEADER_SECONDS)
    for received in slow.bodies:
        check_too_slow(received, BODY_SECONDS)
    assert slow.nothing == b""


@pytest.mark.parametrize(
    "headers",
    [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        "transfer-encoding: Chunked\r\ncontent-length: 30\r\n",
    ],
)
def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_read(
    connect: Connect, headers: str
) -> None:
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    connection = connect()
    connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode() + smuggled)
    received = until_closed(connection)
    lines, body = received.split(b"\r\n\r\n", 1)
    assert lines.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"connection: close" in lines.lower()
    assert "no Content-Length" in error_of(body)["message"]
    assert b"HTTP/1.1 2" not in received


def test_chunks_of_an_old_client_and_other_malformed_requests_are_refused(connect: Connect) -> None:
    old = f"POST {COMPLETIONS} HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()
    for sent, said in ((old, "has to be HTTP/1.1"), (b"BREW\r\n\r\n", "Invalid HTTP request")):
        connection = connect()
        connection.sendall(sent)
        lines, body = until_closed(connection).split(b"\r\n\r\n", 1)
        assert lines.startswith(b"HTTP/1.1 400")
        assert said in error_of(body)["message"]


def test_a_body_that_is_no_http_is_answered_once(connect: Connect) -> None:
    """The route answers the headers, of another type than JSON, while the connection has closed already."""
    connection = connect()
    begin = head(COMPLETIONS, 1).replace(b"Content-Length: 1", b"Transfer-Encoding: chunked")
    connection.sendall(begin.replace(b"application/json", b"multipart/form-data") + b"no length\r\n")
    received = until_closed(connection)
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1") == 1


def trickle(pieces: dict[socket.socket, bytes]) -> dict[socket.socket, bytes]:
    """Sends each connection's piece again and again until something arrives on it or it is closed. Returns the
    first 12 bytes of each: none where it is closed, which a piece that was under way turns into a reset."""
    received: dict[socket.socket, bytes] = {}
    begun = time.monotonic()
    while waiting := [connection for connection in pieces if connection not in received]:
        for connection in select.select(waiting, [], [], 0.1)[0]:
            try:
                received[connection] = connection.recv(12)
            except ConnectionResetError:
                received[connection] = b""
        for connection in waiting:
            if connection not in received:
                with suppress(ConnectionResetError, BrokenPipeError):
                    connection.sendall(pieces[connection])
        assert time.monotonic() - begun < 60
    return received


def test_trickling_bytes_do_not_extend_the_time_limit(slow: Slow) -> None:
    assert slow.trickling == [b"HTTP/1.1 408"] * 3


def test_a_second_request_on_a_connection_has_a_time_limit_too(slow: Slow) -> None:
    check_too_slow(slow.second, HEADER_SECONDS)


def test_the_rest_of_a_body_is_not_awaited_after_the_answer(connect: Connect) -> None:
    """The requests are answered before their bodies have arrived completely."""
    pieces = {}
    for sent, answered in (
        (head("/ready", 0).replace(b"Content-Length: 0", b"Content-Length: 9000"), "ready"),
        (head(COMPLETIONS, 2**40), "error"),  # the body is too large
        (head("/nothing", 9000), "error"),
    ):
        connection = connect()
        connection.sendall(sent)
        assert answered in json.loads(answer(connection))
        pieces[connection] = b"x"
    assert list(trickle(pieces).values()) == [b""] * 3


def test_an_answer_may_take_longer_than_the_time_limits(slow: Slow) -> None:
    for received in slow.answers:
        assert received.startswith(b"HTTP/1.1 200")
        assert received.count(b'"finish_reason":"length"') == 1


def test_a_connection_beyond_the_limit_is_a_503(connect: Connect, router: ApiUnderTest) -> None:
    router.router.delay = 0.05
    try:
        asked = json.dumps({"prompt": "a", "max_tokens": 200, "stream": True}).encode()
        streams = []
        for _ in range(MAX_CONNECTIONS):
            connection = connect()  # each sends its head at once: it has HEADER_SECONDS for that
            streams.append(connection)
            connection.sendall(head(COMPLETIONS, len(asked), "Connection: close\r\n") + asked)
            assert connection.recv(12) == b"HTTP/1.1 200"
        further = connect()
        further.sendall(head(COMPLETIONS, len(asked)) + asked)
        lines, body = until_closed(further).split(b"\r\n\r\n", 1)
        assert lines.startswith(b"HTTP/1.1 503")
        assert b"retry-after: " in lines.lower()
        assert error_of(body)["message"].startswith(f"the service has {MAX_CONNECTIONS} open connections")
        health = connect()
        health.sendall(head("/health", 0, "Connection: close\r\n"))
        assert until_closed(health).startswith(b"HTTP/1.1 200")
        streams[0].close()

        def is_let_in() -> bool:
            connection = connect()
            connection.sendall(head("/ready", 0, "Connection: close\r\n"))
            return until_closed(connection).startswith(b"HTTP/1.1 200")

        wait_until(is_let_in)
        router.router.delay = 0.0
        for connection in streams[1:]:
            assert until_closed(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    finally:
        router.router.delay = 0.0


def test_the_process_raises_its_limit_of_descriptors(narrow: tuple[int, int]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{narrow[1]}/limits").read_text())
    assert found is not None
    assert (int(found[1]), int(found[2])) == (hard, hard)


def test_few_descriptors_cause_no_connection_resets(fresh: ApiUnderTest) -> None:
    """With a low hard limit, connections beyond it are answered 503, and no connection is reset."""
    num_descriptors, num_clients = 256, 230
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        process = start_api_process(fresh, listener)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_descriptors, num_descriptors))
        port = listener.getsockname()[1]
    clients: list[socket.socket] = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(num_clients):
            clients.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        statuses = []
        for client in clients:
            client.sendall(head("/ready", 0))
        for client in clients:
            statuses.append(client.recv(65536)[9:12])
        assert set(statuses) == {b"200", b"503"}
        assert statuses.count(b"200") == num_descriptors * 7 // 8
    finally:
        for client in clients:
            client.close()
        process.kill()
        process.wait()


# Imports
