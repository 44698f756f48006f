"""What clients can fill in the API process, and what happens when it is full."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lightkv.router.api.http.body import FREE_BYTES
from lightkv.token_set import TokenSet
from tests.support.api_process import start_api_process
from tests.support.fake_router import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ApiUnderTest,
    error_of,
    metrics_text,
    service,
    wait_until,
)

KIB = 2**10


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiUnderTest]:
    with service(
        tmp_path, max_body_bytes=800 * KIB, max_answers=128, max_open_bytes=300 * KIB
    ).running() as api:
        yield api


def chat(num_bytes: int, **fields: object) -> bytes:
    """A short chat whose body has so many bytes, in a field that is kept as long as the request."""
    return json.dumps({**HELLO, "metadata": "x" * num_bytes, **fields}).encode()


@pytest.mark.parametrize("stream", [False, True])
def test_bodies_of_unanswered_requests_have_a_bound(api: ApiUnderTest, stream: bool) -> None:
    """The room is that of one body at least, which is 800 KiB here."""
    api.router.hold = True
    waiting = [api.connect() for _ in range(2)]
    for num_before, connection in enumerate(waiting):
        connection.request("POST", CHAT, chat(390 * KIB, stream=stream), {"Content-Type": "application/json"})
        wait_until(lambda: len(api.router.submits) == num_before + 1)  # noqa: B023 (it is called at once)
    status, headers, content = api.send("POST", CHAT, chat(390 * KIB))
    assert (status, headers["retry-after"]) == (503, "5")
    assert "not answered yet" in error_of(content)["message"]
    assert len(api.router.submits) == 2
    short = api.connect()  # what short requests need is never taken
    short.request("POST", CHAT, chat(FREE_BYTES // 2), {"Content-Type": "application/json"})
    wait_until(lambda: len(api.router.submits) == 3)
    for connection in (*waiting, short):
        connection.close()
    wait_until(lambda: api.client.num_open == 0)
    api.router.hold = False
    for _ in range(4):  # the room was returned, and is returned at the end of every answer
        assert api.send("POST", CHAT, chat(700 * KIB, max_tokens=1, stream=stream))[0] == 200
    assert api.send("POST", CHAT, chat(700 * KIB, n="wrong"))[0] == 400
    assert api.send("POST", CHAT, chat(700 * KIB, max_tokens=1))[0] == 200


def test_a_list_of_the_whole_vocabulary_travels_once_and_as_bits(api: ApiUnderTest) -> None:
    ids = list(range(49152))
    asked = {"prompt": "a", "n": 128, "max_tokens": 1, "allowed_token_ids": ids}
    assert len(api.post(COMPLETIONS, asked)["choices"]) == 128
    assert len({id(one.submit) for one in api.router.submits}) == 1
    assert api.router.submits[0].params.allowed == TokenSet.of(ids)
    assert len(api.router.submits[0].params.allowed.bits) == len(ids) // 8
    for wrong in ([-1], [2**22], [2**70], [True], ["1"], [1.5], 5, []):
        error = api.post(COMPLETIONS, {**asked, "allowed_token_ids": wrong}, 400)["error"]
        assert error["param"] == "allowed_token_ids"


def test_a_client_cannot_add_series_to_the_metrics(api: ApiUnderTest) -> None:
    def series() -> set[tuple[str, str]]:
        families = text_string_to_metric_families(metrics_text(api))
        return {(one.name, str(sorted(one.labels.items()))) for family in families for one in family.samples}

    api.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    before = series()
    for i in range(20):
        assert api.send("POST", f"/unknown/{i}", b"{}")[0] == 404
        assert api.send(f"METHOD{i}", COMPLETIONS)[0] == 405
        api.post(COMPLETIONS, {"prompt": "a", "model": f"model {i}"}, 404)
        api.send(
            "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": str(i)}, {"X-Request-Id": str(i)}
        )
    assert series() == before


WRITE_SECONDS, UNSENT = 2.0, 2**20


@contextmanager
def api_process(api: ApiUnderTest, **limits: Any) -> Iterator[int]:
    """Yields the port of an API process with these limits, which stands before the same router."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = start_api_process(api, listener, {"max_answers": 128, **limits})
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an API process with narrow limits on what clients leave unread, and its own router."""
    with service(tmp_path_factory.mktemp("narrow")).running() as api:
        with api_process(api, write_seconds=WRITE_SECONDS, max_unsent_bytes=UNSENT) as port:
            yield port


def ask(port: int, **fields: object) -> socket.socket:
    """Sends a request for a long answer on a connection that takes few bytes by itself."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", port))
    body = json.dumps({"prompt": "a", "max_tokens": 900, "logprobs": 3, **fields}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def rest_of(connection: socket.socket, pause: float = 0.0) -> bytes:
    """Returns what arrives until the connection is closed or reset."""
    received = b""
    try:
        while data := connection.recv(2**18):
            received += data
            time.sleep(pause)
    except ConnectionResetError:
        pass
    return received


def test_a_header_beyond_the_limit_is_refused(narrow: int) -> None:
    for num_bytes, status in ((60 * KIB, b"200"), (70 * KIB, b"400")):
        with socket.create_connection(("127.0.0.1", narrow), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * num_bytes)
            if status == b"200":
                connection.sendall(b"\r\n\r\n")
            assert connection.recv(2**14).split()[1] == status


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_disconnected(api: ApiUnderTest) -> None:
    """The kernel's buffers take some hundreds of kilobytes; the answer has megabytes."""
    scored = {"prompt": [[511] * 1000] * 8, "echo": True, "logprobs": 20, "max_tokens": 1}
    with api_process(api, write_seconds=WRITE_SECONDS, max_unsent_bytes=UNSENT) as port:
        connection = ask(port, stream=True, **scored)
        wait_until(lambda: len(api.router.submits) == 8)
        wait_until(lambda: api.router.num_running == 0, 20)  # aborted, or complete
        time.sleep(4 * WRITE_SECONDS)
        assert b"[DONE]" not in rest_of(connection)
        connection.close()


def test_a_client_that_reads_slowly_gets_its_answer(narrow: int) -> None:
    connection = ask(narrow, n=2, stream=True)
    received = b""
    while b"[DONE]" not in received[-100:]:
        received += connection.recv(2**14)
        time.sleep(0.01)
    assert received.count(b'"finish_reason":"length"') == 2
    connection.close()


LONG = {"prompt": [[511] * 1000] * 3, "prompt_logprobs": 20, "max_tokens": 1, "logprobs": None}


def body_of(received: bytes) -> bytes:
    """Returns the body of a chunked answer, of which the end may be missing."""
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    body = b""
    while rest:
        length, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(length, 16)], rest[int(length, 16) + 2 :]
    return body


def test_a_client_that_reads_a_long_answer_slowly_gets_all_of_it(narrow: int) -> None:
    """The answer has three times the bytes that may wait for all clients."""
    connection = ask(narrow, **LONG)
    received, num_reads = b"", 0
    while not received.endswith(b"\r\n0\r\n\r\n"):
        received += connection.recv(2**16)
        num_reads += 1
        time.sleep(0.05 if num_reads % 50 == 0 else 0)
    connection.close()
    content = body_of(received)
    assert len(content) > 3 * UNSENT
    for choice in json.loads(content)["choices"]:
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [21] * 999


@pytest.mark.slow
def test_answers_that_clients_do_not_take_have_a_bound(api: ApiUnderTest) -> None:
    """The connections that hold the most are closed, and the others get their answers."""
    with api_process(api, write_seconds=300.0, max_unsent_bytes=UNSENT) as port:
        connections = [ask(port, **LONG) for _ in range(24)]
        wait_until(lambda: len(api.router.submits) == 3 * 24)
        wait_until(lambda: api.router.num_running == 0, 20)
        time.sleep(2.0)  # until what the clients' buffers do not take waits
        ends = [rest_until_closed_or_whole(connection) for connection in connections]
        for connection in connections:
            connection.close()
        num_whole = ends.count(True)
        assert 0 < num_whole < 24
        assert num_whole * 2**16 <= UNSENT  # each holds 64 KiB at least
        other = ask(port, max_tokens=2)
        assert b"200 OK" in other.recv(2**14)
        other.close()


def rest_until_closed_or_whole(connection: socket.socket) -> bool:
    """Reads an answer. Returns whether it is whole."""
    received = b""
    try:
        while not received.endswith(b"\r\n0\r\n\r\n"):
            data = connection.recv(2**18)
            if not data:
                return False
            received += data
    except ConnectionResetError:
        return False
    return True
