"""The whole service under a crowd of streams, and in a storm of clients that disconnect or send nonsense.

The clients write raw HTTP with asyncio, because no HTTP library would send these requests. Token counts come
from the service, and the memory of its processes from the kernel.
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.serving.load_client import EventParser, ResponseParser
from lightkv.router.service.router import RECOUNT_SECONDS
from tests.support.served import COMPLETIONS, Served, own_text, save_tiny_model, wait_until

NUM_STREAMS = 256
NUM_CONNECTS = 500
MAX_TOKENS = 24
SECONDS = 100.0  # for a whole crowd
# How much a process may grow from one crowd to the next.
STEADY_MIB = {"router_process": 2.0, "api": 2.0, "worker": 24.0}
# Caches of libraries would hide growth: malloc keeps free blocks, oneDNN the code that it made for each shape.
WITHOUT_CACHES = {
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
}

STORY = "the old keeper climbs up to the lamp at dusk and counts every step on the way"
WORDS = STORY.split()


@pytest.fixture(scope="module", params=["", "gemma3", "gpt-oss", "Qwen3_5ForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; two have layers with windows, and one layers with states."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", family=request.param)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("storm")
    served = Served(model, directory / "log", env=WITHOUT_CACHES)
    try:
        yield served.wait_ready()
        served.process.terminate()
        assert served.wait() == 0, served.log.read_text()
    finally:
        served.close()


@dataclass
class Reply:
    """The answer on one connection. `status`: 0 if there was none. `events`: of a stream, without "data: "."""

    status: int = 0
    events: list[str] = field(default_factory=list)
    body: bytes = b""


def asked(i: int, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """Returns the i-th of many requests, with prompts of many lengths, some of which share prefixes."""
    words = [WORDS[(i * i + j) % len(WORDS)] for j in range(i % 60)]
    return {
        "prompt": " ".join([*WORDS[: i % 7], *words, str(i)]),
        "max_tokens": max_tokens,
        "seed": i,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def http_post(body: bytes, path: str = COMPLETIONS, length: int | None = None) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def sound(i: int) -> bytes:
    return http_post(json.dumps(asked(i)).encode())


MALFORMED = (
    http_post(b'{"prompt": "a", "max_tokens": '),
    http_post(b'{"prompt": {"a": 1}, "max_tokens": "many", "stream": 3}'),
    http_post(b"\xff\xfe\x00"),
    http_post(b"[" * 50_000),
    http_post(b'{"prompt": [[-1]], "stream": true}'),
    http_post(b'{"messages": [{"role": 7}]}', "/v1/chat/completions"),
    b"BREW /coffee\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",  # an HTTPS client
    http_post(b"{}", length=-5),
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
)
UNFINISHED = (  # the client disconnects after these bytes
    b"POST /v1/completions HTT",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le",
    http_post(b'{"prompt": "a', length=5000),
    b"",
)


async def send(url: str, data: bytes, num_events: int | None = None, *, is_rude: bool = False) -> Reply:
    """Sends `data` and returns the answer, or the first `num_events` of a stream, after which the connection is
    closed, or reset if the client `is_rude`."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    reply = Reply()
    try:
        writer.write(data)
        if num_events is None or num_events > 0:
            await _read(reader, reply, num_events)
        if is_rude:
            writer.transport.abort()
    except ConnectionError:  # the service may close a connection whose bytes are not HTTP
        pass
    finally:
        writer.close()
    return reply


async def _read(reader: asyncio.StreamReader, reply: Reply, num_events: int | None) -> None:
    response, events = ResponseParser(), EventParser()
    while not response.done and (num_events is None or len(reply.events) < num_events):
        data = await reader.read(2**16)
        if not data:
            return
        body = response.feed(data)
        reply.status = response.status
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            reply.events += [event.decode() for event in events.feed(body)]
        else:
            reply.body += body


async def crowd(url: str, num_streams: int) -> list[Reply]:
    """Sends all requests at once and reads each answer to its end."""
    return await asyncio.gather(*(send(url, sound(i)) for i in range(num_streams)))


async def storm(url: str, num_connects: int) -> dict[str, list[Reply]]:
    """Sends all requests at once: a tenth is malformed, a third disconnects within its stream, the others read
    to the end."""
    sent: dict[str, list[Any]] = {"malformed": [], "unfinished": [], "cut": [], "whole": []}
    for i in range(num_connects):
        if i % 20 == 0:
            sent["malformed"].append(send(url, MALFORMED[i // 20 % len(MALFORMED)]))
        elif i % 20 == 10:
            data = UNFINISHED[i // 20 % len(UNFINISHED)]
            sent["unfinished"].append(send(url, data, 0, is_rude=i % 40 == 10))
        elif i % 3 == 1:
            sent["cut"].append(send(url, sound(i), i % 5, is_rude=i % 2 == 0))
        else:
            sent["whole"].append(send(url, sound(i)))
    flat = await asyncio.gather(*(request for requests in sent.values() for request in requests))
    replies = iter(flat)
    return {kind: [next(replies) for _ in requests] for kind, requests in sent.items()}


def check_whole(reply: Reply) -> None:
    """Asserts that a stream has reached its end, with all requested tokens."""
    assert reply.status == 200, reply
    *chunks, counts, done = reply.events
    assert done == "[DONE]"
    assert json.loads(counts)["usage"]["completion_tokens"] == MAX_TOKENS
    ends = [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends[-1] == "length"
    assert set(ends[:-1]) <= {None}


def resident_mib(served: Served) -> dict[str, float]:
    """Returns the memory of each process."""
    return {name: _resident(pid) for name, pid in served.processes().items() if name != "cli"}


def _resident(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def num_descriptors(served: Served) -> int:
    """Returns the number of descriptors that the API process has open."""
    return len(list(Path(f"/proc/{served.processes()['api']}/fd").iterdir()))


@pytest.mark.slow
def test_a_crowd_of_streams_completes_in_steady_memory(served: Served) -> None:
    def wave() -> tuple[dict[str, Any], dict[str, float]]:
        replies = asyncio.run(asyncio.wait_for(crowd(served.url, NUM_STREAMS), SECONDS))
        assert len(replies) == NUM_STREAMS
        for reply in replies:
            check_whole(reply)
        return served.at_rest(), resident_mib(served)

    first_load, first = wave()
    second_load, second = wave()
    assert set(first) == set(second) == set(STEADY_MIB)
    assert second_load["generated_tokens"] - first_load["generated_tokens"] == NUM_STREAMS * MAX_TOKENS
    for name, allowed in STEADY_MIB.items():
        assert second[name] - first[name] < allowed, (name, first, second)


@pytest.mark.slow
def test_a_storm_loses_no_token_and_causes_no_server_error(served: Served, model: Path) -> None:
    text = own_text(model, STORY, MAX_TOKENS)
    assert served.complete(STORY, MAX_TOKENS) == text
    before = served.at_rest()["generated_tokens"]
    pids, descriptors = served.processes(), num_descriptors(served)
    replies = asyncio.run(asyncio.wait_for(storm(served.url, NUM_CONNECTS), SECONDS))
    assert sum(map(len, replies.values())) == NUM_CONNECTS
    assert len(replies["malformed"]) + len(replies["unfinished"]) == NUM_CONNECTS // 10
    assert len(replies["cut"]) >= 0.3 * NUM_CONNECTS
    for reply in replies["whole"]:
        check_whole(reply)
    for reply in replies["malformed"]:
        assert reply.status == 400, reply
    for reply in replies["cut"]:
        assert reply.status in (0, 200), reply
        assert not any("error" in json.loads(event) for event in reply.events)
    load = served.at_rest()
    generated = load["generated_tokens"] - before
    # The requests of clients that disconnected were aborted.
    assert generated < MAX_TOKENS * (len(replies["whole"]) + len(replies["cut"]) / 2)
    wait_until(lambda: num_descriptors(served) <= descriptors + 1)  # plus the connection of this test
    assert served.complete(STORY, MAX_TOKENS) == text
    time.sleep(1.5 * RECOUNT_SECONDS)  # a recount that failed would end the service
    assert served.processes() == pids
    assert "Traceback" not in served.log.read_text()
