"""The load client of the benchmarks: traces, arrivals, streams however they are cut, and loops of requests."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from bench.serving import load_client, workload
from bench.serving.load_client import (
    Answer,
    Endpoint,
    EventParser,
    Reply,
    RequestFailed,
    ResponseParser,
    closed_loop,
    open_loop,
)
from bench.serving.workload import Ask, Lengths

# --------------------------------------------------------------------------------
# What is asked

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.68,374,44\r\n2023-11-16 18:15:50.99,396,109\r\n"
)
SHAREGPT = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.32\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500}\n'
    '{"timestamp": 3000, "input_length": 7322, "output_length": 490}\n'
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("azure.csv", AZURE, [(374, 44), (396, 109)]),
        ("sharegpt.csv", SHAREGPT, [(74, 918), (290, 905)]),
        ("mooncake.jsonl", MOONCAKE, [(6758, 500), (7322, 490)]),
        ("azure.csv", "\ufeff" + AZURE + "2023-11-16 18:15:51.00,12,0\n", [(374, 44), (396, 109)]),
    ],
    ids=["azure", "sharegpt", "mooncake", "an empty answer and a byte order mark"],
)
def test_a_trace_is_read_for_its_lengths(
    tmp_path: Path, name: str, text: str, expected: list[tuple[int, int]]
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    assert workload.read_trace(path) == expected


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.csv", "prompt,answer\n1,2\n", "prompt, answer; known are prompt_tokens, output_tokens .*Azure"),
        ("a.csv", "ContextTokens,GeneratedTokens\n1,two\n", "two"),
        ("a.csv", "ContextTokens,GeneratedTokens\n", "has no request"),
        ("a.jsonl", '{"input_length": 1', "delimiter"),
        ("a.jsonl", "[1, 2]\n", "fields are 1, 2"),
    ],
    ids=["unknown fields", "no number", "no request", "no JSON", "no object"],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, match: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(workload.UnreadableTrace, match=match):
        workload.read_trace(path)


def test_a_trace_is_scaled_by_its_longest() -> None:
    trace = [Lengths(1000, 50), Lengths(400, 200), Lengths(1, 1)]
    assert workload.scale(trace, 100, 20) == [(100, 5), (40, 20), (1, 1)]
    assert workload.scale(trace, None, 1000) == trace


def test_no_request_of_a_trace_is_chosen_twice_before_each_was_once() -> None:
    trace = [Lengths(i, 1) for i in range(1, 11)]
    chosen = workload.choose(trace, 25, random.Random(0))
    assert len(chosen) == 25
    assert sorted(chosen[:10]) == sorted(chosen[10:20]) == trace
    assert len(set(chosen[20:])) == 5


def test_mixed_lengths_stay_within_their_bounds_and_favour_no_octave() -> None:
    lengths = workload.mixed(8, 512, 7, 6000, random.Random(0))
    assert {output for _, output in lengths} == {7}
    prompts = [prompt for prompt, _ in lengths]
    assert min(prompts) == 8
    assert max(prompts) == 512
    octaves = [sum(8 * 2**i <= prompt < 16 * 2**i for prompt in prompts) for i in range(6)]
    assert all(abs(count - 1000) < 150 for count in octaves), octaves


def test_prompts_have_their_lengths_and_ids_of_the_vocabulary() -> None:
    asks = workload.fill([Lengths(3, 5), Lengths(2000, 1)], 120, random.Random(0))
    assert [(len(ask.prompt_ids), ask.num_output) for ask in asks] == [(3, 5), (2000, 1)]
    assert set(asks[1].prompt_ids) == set(range(100, 120))


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    arrivals = workload.poisson(50.0, 20_000, random.Random(0))
    assert arrivals == sorted(arrivals)
    assert arrivals == workload.poisson(50.0, 20_000, random.Random(0))
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert deviation == pytest.approx(1 / 50, rel=0.03)  # of an exponential: its mean


# --------------------------------------------------------------------------------
# What comes back


def chunk(text: str = "", finish_reason: str | None = None, num_output: int | None = None) -> bytes:
    """One event of a completion's stream; with `num_output`, its last."""
    body: dict[str, object] = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}
    if num_output is not None:
        usage = {"prompt_tokens": 2, "completion_tokens": num_output, "total_tokens": 2 + num_output}
        body = {"choices": [], "usage": usage}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


WHOLE = [chunk("a"), chunk("b"), chunk("é", "length"), chunk(num_output=3), b"data: [DONE]\n\n"]


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%X;x=y\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body


BODY = b"".join(WHOLE)
RESPONSES = {
    "chunks": response(chunked(WHOLE), "Transfer-Encoding: chunked"),
    "a length": response(BODY, f"content-length: {len(BODY)}"),
    "up to the end": response(BODY, "Content-Type: text/event-stream"),
    "after a continue": b"HTTP/1.1 100 Continue\r\n\r\n"
    + response(chunked([BODY]), "transfer-encoding:chunked"),
}


@pytest.mark.parametrize("name", RESPONSES)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 10_000])
def test_a_response_is_the_same_however_it_is_cut(name: str, step: int) -> None:
    parser, body = ResponseParser(), b""
    data = RESPONSES[name]
    for at in range(0, len(data), step):
        assert not parser.done
        body += parser.feed(data[at : at + step])
    if name == "up to the end":
        assert not parser.done
        parser.end()
    assert parser.done
    assert parser.status == 200
    assert body == BODY


@pytest.mark.parametrize(
    "data",
    [
        b"",
        RESPONSES["chunks"][:-1],
        RESPONSES["a length"][:-1],
        RESPONSES["chunks"].replace(b"0\r\nTrailer", b"1\r\nTrailer")[:-4],
    ],
    ids=["nothing", "no end of the trailers", "a byte too few", "no last chunk"],
)
def test_a_response_that_is_cut_off_is_no_response(data: bytes) -> None:
    parser = ResponseParser()
    parser.feed(data)
    assert not parser.done
    with pytest.raises(RequestFailed, match="closed before"):
        parser.end()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP"),
        (response(b"xyz\r\n", "transfer-encoding: chunked"), "no chunk size"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "end of a response's head"),
    ],
    ids=["another protocol", "no chunk size", "an endless head"],
)
def test_what_is_no_response_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(RequestFailed, match=match):
        ResponseParser().feed(data)


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_events_are_the_same_however_they_are_cut(step: int) -> None:
    data = b": hello\n\ndata: a\n\nevent: x\r\ndata:b\r\n\r\ndata: c\ndata:  d\nid: 1\n\ndata: not ended"
    parser = EventParser()
    events: list[bytes] = []
    for at in range(0, len(data), step):
        events += parser.feed(data[at : at + step])
    assert events == [b"a", b"b", b"c\n d"]


# --------------------------------------------------------------------------------
# A client and a server

Handle = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def with_server(handle: Handle, use: Callable[[Endpoint], Awaitable[list[Answer]]]) -> list[Answer]:
    """What `use` returns for a server that answers each completion by `handle`."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
        assert "Authorization: Bearer secret\r\n" in head
        length = next(int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:"))
        try:
            await handle(json.loads(await reader.readexactly(length)), writer)
            await writer.drain()
        finally:
            writer.close()

    async def run() -> list[Answer]:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await use(Endpoint(f"http://127.0.0.1:{port}/v1/", "secret", timeout=60.0))

    return asyncio.run(run())


class Clock:
    """Stands in for `time` in the client. It goes on when the server says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_asked = 0

    def perf_counter(self) -> float:
        self.num_asked += 1
        return self.now


def test_an_answer_has_the_times_of_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(load_client, "time", clock)

    async def send(data: bytes, writer: asyncio.StreamWriter) -> None:
        """Sends a part of the response a second later, and waits until it has arrived."""
        num_asked = clock.num_asked
        clock.now += 1.0
        writer.write(data)
        while clock.num_asked == num_asked:
            await asyncio.sleep(0.001)

    async def handle(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        assert body["prompt"] == [5, 6]
        assert body["max_tokens"] == 3
        assert body["ignore_eos"] is True
        await send(response(b"", "transfer-encoding: chunked"), writer)
        for part in WHOLE:
            await send(b"%x\r\n%s\r\n" % (len(part), part), writer)
        await send(b"0\r\n\r\n", writer)

    async def use(endpoint: Endpoint) -> list[Answer]:
        return [await endpoint.complete("m", Ask([5, 6], 3))]

    (answer,) = with_server(handle, use)
    assert (answer.text, answer.num_prompt, answer.num_output) == ("abé", 2, 3)
    assert answer.arrivals == [2.0, 3.0, 4.0]
    assert answer.ttft == 2.0
    assert answer.gaps == [1.0, 1.0]
    assert answer.per_token == [1.0]
    assert answer.latency == 2.0 + len(WHOLE)


FAILURES = {
    "status 429": (
        response(b'{"error": 1}', "content-length: 12", status="429 Too Many Requests"),
        "429.*error",
    ),
    "an error in the stream": (response(b'data: {"error": {"message": "lost"}}\n\n'), "lost"),
    "no end": (RESPONSES["chunks"][:-9], "closed before"),
    "too few tokens": (response(chunk("a", "length") + chunk(num_output=1)), "1 tokens .* 3 were asked for"),
    "an early end": (response(chunk("a", "stop") + chunk(num_output=3)), "ignore_eos"),
    "no usage": (response(chunk("a", "length")), "include_usage"),
    "no completion": (response(b"data: [1]\n\n"), "no completion"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("loop", ["closed", "open"])
def test_what_is_not_the_whole_answer_fails_the_load(name: str, loop: str) -> None:
    data, match = FAILURES[name]

    async def handle(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    async def use(endpoint: Endpoint) -> list[Answer]:
        asks = [Ask([1], 3)] * 4
        if loop == "closed":
            return await closed_loop(endpoint, "m", asks, 2)
        return await open_loop(endpoint, "m", asks, [0.0] * 4)

    with pytest.raises(RequestFailed, match=match):
        with_server(handle, use)


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_every_request_is_made_once_and_as_many_at_a_time_as_the_loop_says(loop: str) -> None:
    seen: list[int] = []
    running, most = 0, 0

    async def handle(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        seen.extend(cast(list[int], body["prompt"]))
        running += 1
        most = max(most, running)
        if loop == "open":
            while most < 20:
                await asyncio.sleep(0.001)
        else:
            await asyncio.sleep(0.02)
        running -= 1
        writer.write(response(BODY))

    async def use(endpoint: Endpoint) -> list[Answer]:
        asks = [Ask([i], 3) for i in range(20)]
        if loop == "closed":
            return await closed_loop(endpoint, "m", asks, 3)
        return await open_loop(endpoint, "m", asks, [0.0] * 20)

    answers = with_server(handle, use)
    assert len(answers) == 20
    assert sorted(seen) == list(range(20))
    assert most <= 3 if loop == "closed" else most == 20


def test_any_answer_can_be_asked_for_and_a_stream_be_left() -> None:
    replies: list[Reply] = []
    events = b"".join(b"data: %d\n\n" % idx for idx in range(3))

    async def handle(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if body["stream"]:
            writer.write(
                response(chunked([events]), "transfer-encoding: chunked", "Content-Type: text/event-stream")
            )
        else:
            writer.write(response(b"no", "content-length: 2", status="400 Bad Request"))

    async def use(endpoint: Endpoint) -> list[Answer]:
        for body, most in (
            (b'{"stream": true}', None),
            (b'{"stream": true}', 1),
            (b'{"stream": false}', None),
        ):
            replies.append(await endpoint.request("POST", "/v1/completions", body, most))
        return []

    with_server(handle, use)
    whole, left, refused = replies
    assert whole == Reply(200, b"", [b"0", b"1", b"2"])
    assert left.events[0] == b"0"
    assert refused == Reply(400, b"no", [])


def test_no_server_is_a_failure_that_says_so() -> None:
    async def use() -> None:
        await Endpoint("http://127.0.0.1:9", None, 5.0).complete("m", Ask([1], 1))

    with pytest.raises(RequestFailed, match=r"no connection to 127\.0\.0\.1:9"):
        asyncio.run(use())


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not the address of a server"):
        Endpoint("127.0.0.1:8000", None, 5.0)
