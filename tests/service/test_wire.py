"""What is sent once for all answers of a request, and the bounds of what waits between the processes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from lightkv.errors import CheckFailed
from lightkv.ledger import TokenLedger
from lightkv.router.engine.request import MAX_SCORES, Request, take_all
from lightkv.router.engine.step import NewRow, PromptLogprobs, StepPlan, TokenEvent, TokenLogprobs
from lightkv.router.sampling_params import Grammar, SamplerKind, SamplingParams
from lightkv.router.service import loop_stream, router_client, submitted
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.service.loop_stream import LoopStream
from lightkv.router.service.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Accepted,
    Events,
    FrameStream,
    Mapped,
    NewAnswer,
    NewPrompt,
    Refused,
    Submit,
    ToApi,
    ToRouter,
)
from lightkv.router.service.router_client import MAX_TAKEN, AnswerStream, RequestRefused, RouterClient
from lightkv.router.service.submitted import (
    MAX_REQUEST_BYTES,
    Client,
    NoRoom,
    SubmittedRequests,
    request_bytes,
    requests_of,
)
from tests.support.fake_router import LIMITS, FakeRouter
from tests.support.router_service import assert_idle, is_idle, service

VOCABULARY = 49152
encode = msgspec.msgpack.encode


def submit_of(num_answers: int, num_prompts: int = 1, name: str = "a", **params: Any) -> Submit:
    prompts = [
        NewPrompt(bytes([1, 0, 0, 0]) * 8, [NewAnswer(f"{name}{i}.{k}", k) for k in range(num_answers)])
        for i in range(num_prompts)
    ]
    return Submit(prompts, SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **params}), [2])


# What is shared is sent once


def test_all_answers_of_a_request_share_its_token_set() -> None:
    """128 answers over the whole vocabulary were 128 lists of 150 kB."""
    submit = submit_of(128, allowed_token_ids=list(range(VOCABULARY)))
    assert len(encode(submit)) < VOCABULARY // 8 + 128 * 24 + 512
    requests = requests_of(msgspec.msgpack.decode(encode(submit), type=Submit))
    assert len({request.id for request in requests}) == 128
    assert len({id(request.params) for request in requests}) == 1
    assert len({id(request.prompt_ids) for request in requests}) == 1
    assert requests[0].params == submit.params


def test_the_first_answer_to_each_prompt_alone_scores_the_prompt() -> None:
    requests = requests_of(submit_of(3, num_prompts=2, prompt_logprobs=1))
    assert [request.params.prompt_logprobs for request in requests] == [1, None, None] * 2


def plan_with(new_rows: list[NewRow]) -> StepPlan:
    return StepPlan(1, b"", [], [], [], 0, b"", [], SamplerKind.EDITED, {}, new_rows, 0)


def test_stop_strings_stay_in_the_api_process() -> None:
    requests = requests_of(submit_of(2, stop=["x" * 1000] * 16, seed=3))
    assert all(request.params == submit_of(1, seed=3).params for request in requests)


def test_the_largest_plan_fits_a_message() -> None:
    """256 rows, each with parameters of its own that are as large as the limits on requests allow."""
    largest = {
        "allowed_token_ids": list(range(256_000)),
        "bad_words_ids": [[255_999] * 16] * 128,
        "logit_bias": {255_000 + i: 0.5 for i in range(512)},
    }
    rows = [NewRow(row, SamplingParams(seed=row, **largest), row) for row in range(1, 9)]
    assert len(encode(plan_with(rows))) / 8 * 256 < MAX_FRAME_BYTES / 2


# The router's memory


def test_the_room_for_requests_is_taken_returned_and_recounted() -> None:
    one = submit_of(4, name="one", allowed_token_ids=list(range(VOCABULARY)), logit_bias={1: 1.0, 2: 2.0})
    two = submit_of(4, name="two", allowed_token_ids=list(range(VOCABULARY)), logit_bias={1: 1.0, 2: 2.0})
    submitted, client = SubmittedRequests(2 * request_bytes(one) + 100), cast(Client, object())
    for submit in (one, two):
        submitted.add(client, requests_of(submit), submitted.require_room(submit))
    with pytest.raises(NoRoom, match=r"have taken \d+; try again"):
        submitted.require_room(one)
    submitted.check()
    for name in one.request_ids[:3]:
        assert submitted.forget(name)
        assert not submitted.forget(name)
    submitted.check()
    with pytest.raises(NoRoom):
        submitted.require_room(one)
    submitted.forget(one.request_ids[3])
    assert submitted.require_room(one) == submitted.num_bytes
    submitted.num_bytes += 1
    with pytest.raises(CheckFailed, match="and 4 answers; a recount"):
        submitted.check()
    submitted.num_bytes -= 1
    for name in two.request_ids:
        submitted.forget(name)
    assert submitted.num_bytes == 0
    with pytest.raises(NoRoom, match="fewer prompts") as refused:
        SubmittedRequests(request_bytes(one) - 1).require_room(one)
    assert refused.value.is_too_large


def test_a_request_is_counted_with_all_that_it_brings() -> None:
    plain = request_bytes(submit_of(1))
    assert request_bytes(submit_of(2)) - plain == 2**11
    text = Grammar("regex", "a" * 1000)
    assert request_bytes(submit_of(1, grammar=text)) - plain == 4000
    assert request_bytes(submit_of(1, prompt_logprobs=19)) - plain >= 8 * 20 * 8
    assert request_bytes(submit_of(1, allowed_token_ids=[8 * 1000 - 1])) - plain == 1000


async def test_requests_beyond_the_routers_memory_are_refused(tmp_path: Path) -> None:
    async with service(tmp_path, pause=0.01) as made:
        client = await made.connect()
        room = made.router._submitted
        room.max_bytes = 2 * request_bytes(submit_of(2))
        for name in "ab":
            client.stream.send(submit_of(2, name=name, max_tokens=50))
        client.stream.send(submit_of(2, name="c"))
        answers: list[Any] = []
        while len(answers) < 3:
            if (message := await client.take()) is not None:
                answers.append(message)
        assert answers[:2] == [Accepted("a0.0"), Accepted("b0.0")]
        assert (answers[2].request_id, answers[2].kind) == ("c0.0", "queue_full")
        await client.until_ended("a0.0", "a0.1", "b0.0", "b0.1")
        assert room.num_bytes == 0
        assert isinstance(await client.submit("next", [1]), Accepted)
        room.max_bytes = 10
        refused = await client.submit("never", [1])
        assert isinstance(refused, Refused)
        assert refused.kind == "never_fits"


async def test_answers_are_queued_together_or_not_at_all(tmp_path: Path) -> None:
    async with service(tmp_path, max_queued=3) as made:
        client = await made.connect()
        same = submit_of(2)
        same.prompts[0].answers[1] = same.prompts[0].answers[0]
        for submit, kind in (
            (submit_of(4), "queue_full"),
            (same, "invalid"),
            (submit_of(2, max_tokens=10**6), "never_fits"),
            (submit_of(2, logit_bias={10**6: 1.0}), "invalid"),
        ):
            client.stream.send(submit)
            while (answer := await client.take()) is None:
                pass
            assert isinstance(answer, Refused)
            assert (answer.request_id, answer.kind) == ("a0.0", kind)
            assert made.router._submitted.ids() == []
            assert made.router._submitted.num_bytes == 0
        client.stream.send(submit_of(3))
        await client.until_ended("a0.0", "a0.1", "a0.2")
        assert_idle(await client.until(is_idle))


# A slow API process


async def test_an_api_process_that_does_not_read_is_refused_work_and_stays_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightkv.router.service.router.MAX_UNREAD_BYTES", 2**18)
    monkeypatch.setattr(submitted, "MAX_KEPT_BYTES", 2**21)
    async with service(tmp_path, pause=0.01) as made:
        client = await made.connect()
        assert isinstance(await client.submit("long", [1, 2], 80), Accepted)
        (ours,) = made.router._clients
        ours.send(Mapped(None, "x" * 2**20))  # is not read yet
        client.stream.send(submit_of(1, name="late"))
        while ours.num_unread < 2**18 or "long" not in made.router._submitted:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert made.router._submitted.ids() == ["long"]
        ours.send(Mapped(None, "x" * 2**21))
        for _ in range(1000):
            if not made.router._submitted.ids():
                break
            await asyncio.sleep(0.005)
        answers = []
        while len(answers) < 3:
            if (message := await client.take()) is not None:
                answers.append(message)
        (refused,) = [one for one in answers if isinstance(one, Refused)]
        assert (refused.request_id, refused.kind) == ("late0.0", "unavailable")
        end = (await client.until_ended("long"))["long"]
        assert end.finish_reason == "lost"
        assert "bytes unread" in str(end.error)
        assert isinstance(await client.submit("next", [1]), Accepted)  # over the same connection
        await client.until_ended("next")
        assert_idle(await client.until(is_idle))


async def test_log_probabilities_of_several_prompts_come_in_messages_of_their_own() -> None:
    """Two prompts of four million scores in one message would have been beyond the limit of a message."""
    scores = PromptLogprobs(b"\0" * 2**19, b"", b"", b"")
    one, other = socket.socketpair()
    ours = FrameStream[ToRouter](*await asyncio.open_unix_connection(sock=one), ToRouter)
    theirs = FrameStream[ToApi](*await asyncio.open_unix_connection(sock=other), ToApi)
    requests = SubmittedRequests()
    submit = submit_of(2)
    requests.add(ours, requests_of(submit), requests.require_room(submit))
    events = [TokenEvent(name, 1, "stop", None, None, 0, scores) for name in submit.request_ids]
    requests.send(events)
    for _ in range(2):
        message: Any = await theirs.receive()
        assert len(message.events) == 1
    assert requests.ids() == []
    assert requests.num_bytes == 0
    ours.close()
    theirs.close()


# The API's end


@asynccontextmanager
async def over_fake_router(tmp_path: Path) -> AsyncIterator[tuple[FakeRouter, RouterClient]]:
    router = FakeRouter()
    listener = await asyncio.start_unix_server(router.serve, tmp_path / "router")
    client = await RouterClient.connect(tmp_path / "router")
    await client.became_ready.wait()
    try:
        yield router, client
        assert client.status.state == "ready"  # the connection has survived
    finally:
        await client.close()
        listener.close()


async def test_requests_that_the_router_does_not_read_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(FrameStream.frame(FakeStream(), submit_of(1, name="1")))
    monkeypatch.setattr(router_client, "MAX_UNANSWERED_BYTES", 2 * size)

    async with over_fake_router(tmp_path) as (router, client):
        router.mute = True
        waiting = [asyncio.create_task(client.submit(submit_of(1, name=name))) for name in "12"]
        await asyncio.sleep(0.01)
        with pytest.raises(RequestRefused, match="bytes of requests to read") as refused:
            await client.submit(submit_of(1, name="3"))
        assert refused.value.kind == "unavailable"
        with pytest.raises(RequestRefused, match="fewer prompts") as refused:
            await client.submit(submit_of(1, num_prompts=9))
        assert refused.value.kind == "never_fits"
        assert client.num_open == 2
        assert router._stream is not None
        for name in "12":
            router._stream.send(Accepted(f"{name}0.0"))
        for answers in await asyncio.gather(*waiting):
            answers.close()
        router.mute = False
        (await client.submit(submit_of(1, name="4"))).close()
        assert client.num_open == 0


class FakeStream(FrameStream[ToRouter]):
    """A stream that only makes frames."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()


async def test_events_that_no_consumer_takes_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_client, "MAX_EVENT_BYTES", 200 * 256)

    async with over_fake_router(tmp_path) as (router, client):
        slow = await client.submit(submit_of(2, name="slow", max_tokens=1000, temperature=1.0))
        other = await client.submit(submit_of(1, name="other", max_tokens=300))
        taken = [event async for events in other for event in events]  # this one reads
        assert [event.finish_reason for event in taken[-1:]] == ["length"]
        assert len(taken) == 300
        while len(router.aborts) < 2:
            await asyncio.sleep(0.001)
        assert {abort.request_id for abort in router.aborts} == {"slow0.0", "slow0.1"}
        left = [event async for events in slow for event in events]
        assert [event.finish_reason for event in left] == ["lost"]
        assert "were not read" in str(left[0].error)
        slow.close()
        other.close()
        assert client.num_event_bytes == 0
        assert client.num_open == 0


async def test_a_consumer_that_was_slow_gets_its_events_in_parts() -> None:
    """So their text does not hold up the event loop."""
    client: Any = type("Client", (), {"num_event_bytes": 0})()
    answers = AnswerStream(client, submit_of(1))
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(others())
    for idx in range(2 * MAX_TAKEN + 5):
        top = TokenLogprobs(-1.0, [idx], [-1.0]) if idx % 2 else None
        answers.push(TokenEvent("a0.0", idx, "length" if idx == 2 * MAX_TAKEN + 4 else None, top))
    parts = [[event.token for event in events] async for events in answers]
    assert [len(part) for part in parts] == [MAX_TAKEN, MAX_TAKEN, 5]
    assert [token for part in parts for token in part] == list(range(2 * MAX_TAKEN + 5))
    assert num_turns >= 2
    turning.cancel()
    assert answers.num_bytes == client.num_event_bytes == 0


@pytest.mark.parametrize("num_top", [0, 20])
def test_the_most_log_probabilities_of_a_request_fit_a_message_and_all_rooms(num_top: int) -> None:
    """MAX_SCORES holds for a request, and so for each of its prompts, whose scores are one event. It and the
    bounds of what waits on the way depend on each other."""
    num = MAX_SCORES // (num_top + 1)
    own, top = bytes(4 * num), bytes(4 * num * num_top)
    event = TokenEvent("a" * 32, 1, "length", prompt_logprobs=PromptLogprobs(own, own, top, top))
    num_bytes = len(FakeStream().frame(Events([event])))
    assert num_bytes <= MAX_FRAME_BYTES
    assert num_bytes <= submitted.MAX_KEPT_BYTES
    assert num_bytes <= MAX_REQUEST_BYTES
    client: Any = type("Client", (), {"num_event_bytes": 0})()
    AnswerStream(client, submit_of(1)).push(event)
    assert client.num_event_bytes <= router_client.MAX_EVENT_BYTES
    assert num_bytes <= ApiSettings(served_model_name=("m",)).max_open_bytes // 2  # one client's


def test_large_events_count_with_what_they_hold() -> None:
    client: Any = type("Client", (), {"num_event_bytes": 0})()
    answers = AnswerStream(client, submit_of(1))
    answers.push(TokenEvent("a0.0", 1))
    plain = answers.num_bytes
    top = TokenLogprobs(-1.0, [1] * 20, [-1.0] * 20)
    answers.push(TokenEvent("a0.0", 1, logprobs=top))
    assert answers.num_bytes - 2 * plain >= 20 * 40
    before = answers.num_bytes
    answers.push(TokenEvent("a0.0", 1, prompt_logprobs=PromptLogprobs(b"x" * 1000, b"y" * 500, b"", b"")))
    assert answers.num_bytes - before >= 1500
    assert client.num_event_bytes == answers.num_bytes


async def test_calls_that_wait_for_a_reset_share_its_answer(tmp_path: Path) -> None:
    async with over_fake_router(tmp_path) as (_, client):
        calls = [asyncio.create_task(client.reset_cache()) for _ in range(100)]
        await asyncio.sleep(0)
        assert len(client._asked) == 1
        calls[0].cancel()
        assert await asyncio.gather(*calls[1:]) == [500] * 99
        assert not client._asked
        assert await client.reset_cache() == 500


# The worker's end


async def test_a_message_of_the_worker_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_stream, "MAX_MESSAGE_BYTES", 2**17)
    theirs, ours = socket.socketpair()
    ended = asyncio.Event()
    stream = LoopStream(asyncio.get_running_loop(), ours, lambda: None, ended.set)
    theirs.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(theirs, b"\xff\xff\xff\x00\x00" + b"x" * 2**18)
    await asyncio.wait_for(ended.wait(), 60)
    assert len(stream._received) <= 2**17
    stream.close()
    theirs.close()


# What the ledger keeps of names


def test_namespaces_without_tokens_are_forgotten() -> None:
    """A client may send a new cache_salt with every request; a name lives as long as a token of its tree."""
    ledger = TokenLedger(64, 4, 64)
    for i in range(500):
        sequence = ledger.open(b"\1\0\0\0\2\0\0\0", (f"salt {i}",))
        ledger.extend([sequence], [2])
        ledger.publish(sequence)
        ledger.confirm(ledger.step)
        ledger.close(sequence, b"", True)
        ledger.step += 1
        ledger.drain()
    assert len(ledger._state.tree.roots) <= 64


async def test_an_abort_of_an_unknown_request_is_ignored(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client = await made.connect()
        for i in range(100):
            client.stream.send(Abort(str(i)))
        assert isinstance(await client.submit("a", [1]), Accepted)
        await client.until_ended("a")


def test_a_submission_without_answers_is_no_message() -> None:
    for prompts in ([], [[b"\1\0\0\0", []]]):
        data = encode({"type": "Submit", "prompts": prompts, "params": {}, "stop_ids": []})
        with pytest.raises(msgspec.ValidationError, match="without"):
            msgspec.msgpack.decode(data, type=ToRouter)


def test_requests_of_one_submission_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(Request, "validate", lambda self, *_: checked.append(self.id))
    take_all(requests_of(submit_of(128, num_prompts=2)), LIMITS, 100)
    assert checked == ["a0.0", "a1.0"]
