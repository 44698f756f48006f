"""Long answers are written in pieces: others go on meanwhile, and a client that reads slowly gets all of it."""

import asyncio
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightkv.router.api.answers.chat_writer import ChatWriter
from lightkv.router.api.answers.completion_writer import CompletionWriter
from lightkv.router.api.answers.extras import Echo, Extras
from lightkv.router.api.answers.pieces import Long, Scores, encode, in_pieces, long_list
from lightkv.router.api.http.paced import MAX_SENT_BYTES, SENT_BYTES, LongResponse, Pacer
from lightkv.router.engine.step import PromptLogprobs, TokenLogprobs
from lightkv.router.text.detokenizer import Detokenizer
from tests.support.fake_router import default_tokenizer

NUM_TOP = 4


@pytest.mark.parametrize("content", [{"a": 1}, [], {"a": ["é", {"b": None}]}])
def test_json_in_pieces_is_the_same_json(content: Any) -> None:
    long = Long(lambda: long_list([encode(one)] for one in ("x", content, 3)))
    empty = Long(lambda: long_list([]))
    body = {"first": content, "long": long, "more": [long, 5, {"in": long}], "empty": empty, "last": "}"}
    whole = ["x", content, 3]
    expected = {"first": content, "long": whole, "more": [whole, 5, {"in": whole}], "empty": [], "last": "}"}
    assert b"".join(in_pieces(body)) == encode(expected)
    assert b"".join(in_pieces({"out": Long(lambda: in_pieces(body))})) == encode({"out": expected})


def random_scores(num: int) -> tuple[bytes, PromptLogprobs, list[TokenLogprobs]]:
    """Returns a prompt of whole characters with scores for all but its first token, and the same scores one by
    one."""
    draw, text = np.random.default_rng(5), default_tokenizer().token_text
    whole = np.array([one for one in range(20, 4000) if "\ufffd" not in text(one)], np.int32)
    ids = draw.choice(whole, num + 1)
    own, top = -draw.random(num).astype(np.float32), -draw.random((num, NUM_TOP)).astype(np.float32)
    top_ids = np.stack([draw.permutation(whole)[:NUM_TOP] for _ in range(num)])
    top_ids[::3, 1] = ids[1:][::3]  # some of the tokens are among the likeliest
    own[7], top[5:9, 3] = -np.inf, -np.inf
    ranks = draw.integers(1, 50, num).astype(np.int32)
    packed = PromptLogprobs(own.tobytes(), ranks.tobytes(), top_ids.tobytes(), top.tobytes())
    each = [TokenLogprobs(*one) for one in zip(own.tolist(), top_ids.tolist(), top.tolist(), strict=True)]
    return ids.tobytes(), packed, each


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)


def answer_of(prompt: bytes, packed: PromptLogprobs, each: list[TokenLogprobs]) -> Any:
    """Returns an answer that repeats a prompt, token by token, with its scores."""
    ids, scored = np.frombuffer(prompt, np.int32).tolist()[1:], Scores()
    detokenizer = Detokenizer(default_tokenizer())
    for token, found in zip(ids, each, strict=True):
        scored.append(token, found, detokenizer.push_placed(token)[1])
    completion = SimpleNamespace(text="t", finish_reason="length", token_ids=ids, prompt_logprobs=packed)
    answer = SimpleNamespace(
        index=0,
        prompt_idx=0,
        has_logprobs=True,
        scored=scored,
        completion=completion,
        num_cached=0,
        num_interruptions=0,
    )
    return SimpleNamespace(
        answers=[answer],
        num_prompt_tokens=1,
        num_completion_tokens=1,
        num_cached_tokens=None,
        cut_to=None,
    )


def test_scores_are_written_as_they_are() -> None:
    """Of more tokens than are written at a time."""
    prompt, packed, each = random_scores(700)
    tokenizer = default_tokenizer()
    first, *ids = np.frombuffer(prompt, np.int32).tolist()
    text = tokenizer.token_text
    extras = Extras(
        prompt_logprobs=True,
        echoes_logprobs=True,
        token_ids=True,
        prompts=[prompt],
        echoed=[Echo(tokenizer.decode([first, *ids]))],
    )
    written = CompletionWriter("m", tokenizer, extras).whole(answer_of(prompt, packed, each))
    (choice,) = json.loads(b"".join(written))["choices"]
    assert choice["prompt_token_ids"] == [first, *ids]
    ranks = np.frombuffer(packed.ranks, np.int32).tolist()
    expected: list[Any] = [None]
    for token, rank, one in zip(ids, ranks, each, strict=True):
        entry = {str(token): {"logprob": finite(one.logprob), "rank": rank, "decoded_token": text(token)}}
        for place, (other, logprob) in enumerate(zip(one.top_ids, one.top_logprobs, strict=True), 1):
            fields = {"logprob": finite(logprob), "rank": place, "decoded_token": text(other)}
            entry.setdefault(str(other), fields)
        expected.append(entry)
    assert choice["prompt_logprobs"] == expected
    likeliest = []
    for token, one in zip(ids, each, strict=True):
        by_text = {text(token): finite(one.logprob)}
        for other, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
            by_text.setdefault(text(other), finite(logprob))
        likeliest.append(by_text)
    tokens = [text(token) for token in (first, *ids, *ids)]
    assert choice["logprobs"] == {
        "tokens": tokens,
        "token_logprobs": [None, *[finite(one.logprob) for one in each] * 2],
        "top_logprobs": [None, *likeliest * 2],
        "text_offset": [sum(map(len, tokens[:place])) for place in range(len(tokens))],
    }
    assert [list(one) for one in choice["logprobs"]["top_logprobs"][1:]] == [
        list(one) for one in likeliest * 2
    ]
    chat = json.loads(b"".join(ChatWriter("m", tokenizer).whole(answer_of(prompt, packed, each))))
    content = chat["choices"][0]["logprobs"]["content"]

    def top(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text(token), "logprob": finite(logprob), "bytes": list(text(token).encode())}

    assert content == [
        {**top(token, one.logprob), "top_logprobs": [*map(top, one.top_ids, one.top_logprobs)]}
        for token, one in zip(ids, each, strict=True)
    ]


class Client:
    """A client that takes a part of an answer when it is let, and notes what it got."""

    def __init__(self) -> None:
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.parts: list[bytes] = []
        self.headers: dict[bytes, bytes] = {}
        self.is_there = True

    async def send(self, message: Any) -> None:
        await self.may_take.wait()
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
        else:
            self.parts.append(message["body"])

    async def receive(self) -> Any:
        await asyncio.Event().wait()


def pieces_of(num: int, made: list[int]) -> Iterator[bytes]:
    """Yields pieces of 2 KiB, and notes each that is made."""
    for idx in range(num):
        made.append(idx)
        yield b"%2048d" % idx


async def test_long_answers_take_turns_and_leave_time_to_others() -> None:
    pacer, one, two = Pacer(), Client(), Client()
    turns, num_others = [], 0

    async def other() -> None:
        nonlocal num_others
        while True:
            num_others += 1
            await asyncio.sleep(0)

    async def sent(client: Client, name: str) -> None:
        async def send(message: Any) -> None:
            turns.append(name)
            await client.send(message)

        await pacer.send(pieces_of(1024, []), send, lambda: True)

    others = asyncio.create_task(other())
    await asyncio.gather(sent(one, "one"), sent(two, "two"))
    others.cancel()
    whole = b"".join(pieces_of(1024, []))
    assert b"".join(one.parts) == b"".join(two.parts) == whole
    assert max(map(len, one.parts)) <= SENT_BYTES
    assert len(turns) >= 2 * len(whole) // SENT_BYTES
    longest = max(len(run) for run in "".join(name[0] for name in turns).replace("ot", "o t").split())
    assert longest <= len(turns) // 4  # neither is done before the other begins
    assert num_others >= len(turns) - 2


async def test_no_more_is_made_than_a_client_takes() -> None:
    client, made = Client(), list[int]()
    client.may_take.clear()
    sending = asyncio.create_task(Pacer().send(pieces_of(1024, made), client.send, lambda: client.is_there))
    await asyncio.sleep(0.01)
    assert len(made) <= SENT_BYTES // 2048
    client.may_take.set()
    await asyncio.sleep(0)
    client.is_there = False  # it has gone
    await sending
    assert len(made) < 1024


@pytest.mark.parametrize(
    "num_bytes", [0, 100, SENT_BYTES - 1, SENT_BYTES, 3 * SENT_BYTES, 2 * MAX_SENT_BYTES]
)
@pytest.mark.parametrize("piece", [1000, 3 * MAX_SENT_BYTES])
async def test_a_response_is_whole_whatever_its_pieces_are(num_bytes: int, piece: int) -> None:
    client, content = Client(), random.Random(1).randbytes(num_bytes)
    pieces = (content[start : start + piece] for start in range(0, num_bytes, piece))
    await LongResponse(pieces, Pacer())({"type": "http"}, client.receive, client.send)
    assert b"".join(client.parts) == content
    assert max(map(len, client.parts)) <= MAX_SENT_BYTES
    assert client.headers[b"content-type"] == b"application/json"
    if num_bytes < SENT_BYTES // 2:
        assert client.headers[b"content-length"] == str(num_bytes).encode()
