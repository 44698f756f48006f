"""Huge input is refused before anything is computed, and the API answers other requests meanwhile."""

import asyncio
import http.client
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from lightkv.router.api import app
from lightkv.router.api.http.body import (
    FREE_BYTES,
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    SHORT_BODY,
    BodyRoom,
    Room,
    parse,
)
from lightkv.router.api.requests.prompts import convert, num_characters
from tests.support.api_process import start_api_process, until_closed
from tests.support.fake_router import (
    CHAT,
    COMPLETIONS,
    HELLO,
    LIMITS,
    ApiUnderTest,
    error_of,
    idle,
    service,
    wait_until,
)

MIB = 2**20
LATENCY = 1.5  # seconds of the processor; without the limits it is 3 to 100, and with them about 0.1
LONG = [4096, 5000, 60_000]  # characters: around the length from which a thread converts them, and more


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("router"), max_body_bytes=4 * MIB).running() as under_test:
        yield under_test


@pytest.fixture
def api(router: ApiUnderTest) -> ApiUnderTest:
    return idle(router)


class Process:
    """The API in its own process, so that the test measures its silence and not that of the test."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.pid = process.pid
        self.port = port

    def post(self, path: str, body: bytes) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def seconds_of_health(self) -> float:
        """Returns the seconds of the processor that the API uses, for whatever it does, until it has answered
        /health with any status."""
        begun = self._cpu_seconds()
        with self._connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert until_closed(connection).startswith(b"HTTP/1.1 ")
        return self._cpu_seconds() - begun

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Returns the resident bytes of the process."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096

    def begin(self, num_bytes: int) -> socket.socket:
        """Sends a request whose body lacks its last byte."""
        connection = self._connect()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        body = b'{"prompt": "' + b"a" * num_bytes
        connection.sendall(f"{head}Content-Length: {len(body) + 2}\r\n\r\n".encode() + body)
        return connection

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


@pytest.fixture
def process(router: ApiUnderTest) -> Iterator[Process]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        started = start_api_process(router, listener)
        port = listener.getsockname()[1]
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        yield Process(started, port)
    finally:
        started.kill()
        started.wait()


def answered(connections: list[socket.socket]) -> list[socket.socket]:
    waiting = select.poll()
    for connection in connections:
        waiting.register(connection, select.POLLIN)
    ready = {number for number, _ in waiting.poll(0)}
    return [connection for connection in connections if connection.fileno() in ready]


def text_body(num_bytes: int) -> bytes:
    return json.dumps({"prompt": ("hello world " * (num_bytes // 12 + 1))[:num_bytes]}).encode()


def role_body(num_bytes: int) -> bytes:
    return json.dumps({"messages": [{"role": "user " * (num_bytes // 5), "content": "a"}]}).encode()


def list_body(item: bytes, num_bytes: int) -> bytes:
    return b'{"prompt": [' + b",".join([item] * (num_bytes // (len(item) + 1))) + b"]}"


HUGE = {
    "prompt": (COMPLETIONS, lambda: text_body(12 * MIB)),
    "prompts": (COMPLETIONS, lambda: b'{"prompt": [' + b",".join([b'"%s"' % (b"a b " * MIB)] * 3) + b"]}"),
    "role": (CHAT, lambda: role_body(MIB)),
    "nested-lists": (COMPLETIONS, lambda: list_body(b"[]", 16 * MIB)),
    "lists-of-ids": (COMPLETIONS, lambda: list_body(b"[1,2,3]", 16 * MIB)),
    "ids": (COMPLETIONS, lambda: list_body(b"7", 2 * MAX_VALUES - 100)),
    "long-numbers": (COMPLETIONS, lambda: list_body(b"9" * 4000, 16 * MIB)),
    "escapes": (COMPLETIONS, lambda: b'{"prompt": "' + b"\\\\" * 8 * MIB + b'"}'),
    "messages": (CHAT, lambda: b'{"messages": ' + list_body(b'{"role":"user","content":""}', MIB)[11:]),
    "tokenize": ("/tokenize", lambda: text_body(12 * MIB)),
    "wrong": (CHAT, lambda: b'{"messages": ' + list_body(b"1", MIB)[11:]),
}


def test_the_api_answers_while_huge_input_arrives(process: Process) -> None:
    for name, (path, body) in HUGE.items():
        data = body()
        slowest = 0.0
        with ThreadPoolExecutor(1) as sender:
            sending = sender.submit(process.post, path, data)
            while not sending.done():
                slowest = max(slowest, process.seconds_of_health())
                time.sleep(0.01)
        assert slowest < LATENCY, (name, slowest)
        status, content = sending.result()
        assert status in (400, 413), (name, content)
        assert len(content["error"]["message"]) < 400


async def test_other_tasks_run_between_short_texts() -> None:
    """A request may have hundreds of texts that are too short for a thread."""
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    for _ in range(50):
        await convert(10, lambda: None)
    counting.cancel()
    assert num_turns >= 50


def test_unfinished_bodies_share_one_limit(process: Process) -> None:
    assert process.post("/tokenize", b'{"prompt": "a"}')[0] == 200
    before = process.memory()
    begun = [process.begin(MIB) for _ in range(300)]
    try:
        wait_until(lambda: len(answered(begun)) >= 300 - 35)  # 32 MiB, one client's, hold the other bodies
        assert {connection.recv(12) for connection in answered(begun)} == {b"HTTP/1.1 503"}
        assert process.memory() - before < 160 * MIB
        # Short requests are served all the same, and long ones get a Retry-After.
        assert process.post(COMPLETIONS, b'{"prompt": "a", "max_tokens": 1}')[0] == 200
        status, content = process.post(COMPLETIONS, text_body(MIB))
        assert (status, content["error"]["type"]) == (503, "service_unavailable_error")
    finally:
        for one in begun:
            one.close()
    wait_until(
        lambda: process.post(COMPLETIONS, text_body(MIB))[0] == 400
    )  # too long for the model, but short enough to be tokenised


# Texts that are too long


def test_the_length_of_a_text_is_checked_before_it_is_tokenised(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = LIMITS.max_model_len * api.tokenizer.longest_token
    tokenised: list[str] = []
    monkeypatch.setattr(type(api.tokenizer), "encode", lambda self, text, special: tokenised.append(text))
    long = "a" * (most + 1)
    message = {"role": "user", "content": "a"}
    for path, body in (
        (COMPLETIONS, {"prompt": long}),
        (COMPLETIONS, {"prompt": [long]}),
        (CHAT, {"messages": [message | {"content": long}]}),
        (CHAT, {"messages": [message | {"role": long}]}),
        (CHAT, {"messages": [message | {"name": long}]}),
        (CHAT, {"messages": [message | {"tool_calls": [{"function": {"arguments": long}}]}]}),
        (CHAT, {"messages": [message | {long: 1}]}),
        (CHAT, {"messages": [message], "chat_template_kwargs": {"x": [long]}}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": [message | {"content": long}]}),
    ):
        error = api.post(path, body, 400)["error"]
        assert f"more than {most} characters" in error["message"]
    assert not tokenised
    assert not api.router.submits


def test_the_limit_on_characters_refuses_no_text_that_fits(api: ApiUnderTest) -> None:
    longest = max(api.tokenizer._tokenizer.get_vocab(), key=len)
    text = "\n" + " " * (len(longest) - 1)
    count = api.tokenizer.encode(text).size
    assert len(text) == api.tokenizer.longest_token * count
    tokens = api.post("/tokenize", {"prompt": text * (LIMITS.max_model_len // count)})
    assert tokens["count"] <= LIMITS.max_model_len


def test_a_chat_that_the_template_makes_too_long_is_refused(tmp_path: Path) -> None:
    under_test = service(tmp_path)
    under_test.tokenizer._template_source = "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}"
    with under_test.running() as api:
        assert "the chat has more than" in api.post(CHAT, HELLO, 400)["error"]["message"]


@pytest.mark.parametrize("length", LONG)
def test_long_and_short_texts_are_converted_alike(api: ApiUnderTest, length: int) -> None:
    text = ("Grüße 🙂 <|im_start|>\n  x" * length)[:length]
    ids = api.tokenizer._tokenizer.encode(text).ids
    assert api.tokenizer.encode(text).tolist() == ids
    assert api.tokenizer.decode(ids, False) == api.tokenizer._tokenizer.decode(ids, skip_special_tokens=False)
    assert api.tokenizer.decode(ids) == api.tokenizer._tokenizer.decode(ids)
    broken = api.tokenizer.encode(text + "\ud83d").tolist()
    assert broken == api.tokenizer._tokenizer.encode(text + "\ufffd").ids


def test_ids_are_counted_before_they_are_converted(api: ApiUnderTest) -> None:
    error = api.post(COMPLETIONS, {"prompt": [2**40] * 2000}, 400)["error"]
    assert "2000 prompt tokens" in error["message"]


def test_characters_are_counted_in_nested_values() -> None:
    assert num_characters("abc", 10) == 3
    assert num_characters([{"ab": ["c", 1, None]}, ("d",)], 100) == 4 + 6  # plus one for each other value
    assert num_characters(["a" * 50] * 10**6, 100) == 101


# JSON with many values


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2.5e3, True, None, "x"], "b\\": '"', 'c"[,': "\\"},
        ["\\" * n + '",[{' for n in range(9)],
        [[], {}, [[{}]], ["a,b"] * 5],
        "é[🙂" * 100_000,
        ["\\\\\"'" * 70_000, {"k": "v" * 300_000}],
        list(range(100_000)),
    ],
    ids=["mixed", "escapes", "nested", "text", "long", "ids"],
)
def test_a_long_body_is_read_as_json(value: Any) -> None:
    for ascii_only in (True, False):
        body = json.dumps(value, ensure_ascii=ascii_only).encode() + b" " * SHORT_BODY
        assert parse(body) == value


@pytest.mark.parametrize(
    "body",
    [
        b' {"a": [1, -0, -0.0, 1e2, 0.1, 5e-324, "\\u00e9\\n"], "a": [true, null, {}]} ',
        b"[1e999, NaN, -Infinity]",
        b'["\\ud83d\\ude42", NaN, "\\u00e9\\n", 123456789.123456789123456789, 123456789012345678901234567890]',
        b"",
        b"01",
        b'"a\tb"',
        b'{"a": 1} x',
        b"\xff",
        b"\xef\xbb\xbf1",
    ],
)
def test_a_short_body_is_parsed_as_pythons_own_parser_does(body: bytes) -> None:
    """Two parsers share the work, and every value and every error is that of the one that accepts more."""

    def outcome(function: Callable[[bytes], Any]) -> str:
        try:
            return repr(function(body))
        except ValueError as error:
            return f"{type(error).__name__}: {error}"

    assert outcome(parse) == outcome(lambda text: json.loads(text.decode()))


@pytest.mark.parametrize("more", [b"", b', "\\ud800"', b", NaN"], ids=["strict", "surrogate", "NaN"])
@pytest.mark.parametrize("blank", [b"", b" " * SHORT_BODY], ids=["short", "long"])
def test_values_that_nest_too_deeply_are_no_json(more: bytes, blank: bytes) -> None:
    """Also where only Python's own parser reads them."""
    assert len(parse(b"[" * 100 + b"]" * 99 + more + b"]" + blank)) == 1 + bool(more)
    with pytest.raises(json.JSONDecodeError, match="its values nest too deeply"):
        parse(b"[" * 4000 + b"]" * 3999 + more + b"]" + blank)


def test_a_body_that_nests_too_deeply_is_answered_400(api: ApiUnderTest) -> None:
    for nested in (b"[" * 4000 + b"]" * 4000, b'{"x":' * 4000 + b"1" + b"}" * 4000):
        status, _, content = api.send("POST", COMPLETIONS, b'{"prompt": "a", "metadata": ' + nested + b"}")
        assert status == 400
        assert "the body is not JSON (its values nest too deeply" in error_of(content)["message"]


@pytest.mark.parametrize("blank", [b"", b" " * SHORT_BODY], ids=["short", "long"])
def test_half_a_surrogate_pair_becomes_a_character_that_utf8_has(blank: bytes) -> None:
    body = b'{"\\uDC00": ["a\\ud800", "\\ud83d\\ude42", 123456789012345678901234567890, 1.5, NaN]}' + blank
    assert repr(parse(body)) == repr(
        {"\ufffd": ["a\ufffd", "\U0001f642", 123456789012345678901234567890, 1.5, float("nan")]}
    )


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (list_body(b"1", 2 * MAX_VALUES + 10), "values"),
        (list_body(b"[       ]", 10 * MAX_CONTAINERS + 50), "lists and objects"),
        (list_body(b"{       }", 10 * MAX_CONTAINERS + 50), "lists and objects"),
        (list_body(b'""', 3 * MAX_STRINGS + 10), "strings"),
        (list_body(rb'"\\"', 5 * MAX_STRINGS + 10), "strings"),
        (b"[" + rb'"\\\"",[],' * MAX_CONTAINERS + b"1]", "lists and objects"),
    ],
    ids=["values", "lists", "objects", "strings", "backslashes", "quotes"],
)
def test_json_of_too_many_values_is_refused_before_it_is_parsed(
    api: ApiUnderTest, body: bytes, what: str
) -> None:
    status, _, content = api.send("POST", COMPLETIONS, body)
    assert status == 413
    assert error_of(content)["message"].startswith("the body has more than ")
    assert what in error_of(content)["message"]


def test_brackets_and_commas_in_strings_are_not_counted(api: ApiUnderTest) -> None:
    code = 'x = [{"a": [1, 2]}, ["b", {}]]\n' * 10_000
    message = {"role": "user", "content": code}
    assert api.post(CHAT, {"messages": [message]}, 400)["error"]["message"].startswith("the chat has more")


def test_half_surrogate_pairs_in_a_long_body_are_replaced(api: ApiUnderTest) -> None:
    ids = api.post("/tokenize", {"prompt": "a" * SHORT_BODY + "\ud83d"})["tokens"]
    assert api.tokenizer.decode(ids) == "a" * SHORT_BODY + "\ufffd"


# The limit on all bodies together


def refusal(room: Room, owner: bytes, num_bytes: int) -> str:
    num_before = room.num_taken
    with pytest.raises(HTTPException) as caught:
        room.take(owner, num_bytes)
    assert (caught.value.status_code, room.num_taken) == (503, num_before)
    return caught.value.detail


def test_room_is_reserved_and_returned() -> None:
    room = Room(25, 10, "bodies")
    for owner in (b"a", b"b"):
        room.take(owner, 12)
    assert refusal(room, b"c", 2) == "bodies fill the 25 bytes for them; try again in a moment"
    room.take(b"c", 1)
    room.give(b"a", 12)
    room.take(b"d", 12)
    assert room.num_taken == 25
    for owner, num_bytes in ((b"b", 12), (b"c", 1), (b"d", 12)):
        room.give(owner, num_bytes)
    assert (room.num_taken, room._by_owner) == (0, {})
    assert Room(25, 100, "bodies").max_bytes == 100  # one body always fits an empty room


def test_one_client_takes_half_of_a_room_or_one_body() -> None:
    room = Room(25, 10, "bodies")
    room.take(b"a", 7)
    assert "fill the 12 bytes that one client may take" in refusal(room, b"a", 6)
    room.take(b"a", 5)
    assert "12 bytes" in refusal(room, b"a", 1)
    room.give(b"a", 5)
    room.take(b"a", 5)
    room = Room(25, 20, "bodies")
    room.take(b"a", 20)
    assert "20 bytes" in refusal(room, b"a", 1)
    room.take(b"b", 5)


def test_room_is_returned_after_every_end_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[BodyRoom] = []

    def make_room(*sizes: int) -> BodyRoom:
        rooms.append(BodyRoom(*sizes))
        return rooms[-1]

    monkeypatch.setattr(app, "BodyRoom", make_room)
    with service(tmp_path, max_body_bytes=MIB, max_unread_bytes=MIB).running() as api:
        half = text_body(MIB // 2)

        def fill(body: bytes, length: int) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", api.port), timeout=10)
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            before = rooms[0].unread.num_taken
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
            wait_until(lambda: rooms[0].unread.num_taken >= before + len(body) - FREE_BYTES)
            return connection

        with closing(fill(half, len(half) + 1)), closing(fill(half, len(half) + 1)):
            wait_until(lambda: api.send("POST", COMPLETIONS, half)[0] == 503)
            assert api.send("POST", COMPLETIONS, text_body(FREE_BYTES // 2))[0] in (200, 400)
        wait_until(lambda: api.send("POST", COMPLETIONS, half)[0] == 400)  # the room of both was returned
        for body in (half, half[:-1], b"\xff" * len(half), list_body(b"[]", len(half))):
            assert api.send("POST", COMPLETIONS, body)[0] in (400, 413)
        assert api.send("POST", COMPLETIONS, text_body(MIB - 20))[0] == 400


def test_a_request_that_waits_for_its_answer_needs_no_room(tmp_path: Path) -> None:
    with service(tmp_path, max_body_bytes=MIB, max_unread_bytes=MIB).running() as api:
        api.router.hold = True
        body = json.dumps(
            {"messages": [{"role": "user", "content": "a"}], "metadata": "x" * (MIB // 2)}
        ).encode()
        waiting = [api.connect() for _ in range(4)]
        for num_before, connection in enumerate(waiting):
            connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
            wait_until(lambda: len(api.router.submits) == num_before + 1)  # noqa: B023 (it is called at once)
        for connection in waiting:
            connection.close()
