"""What the answers to one request may have together, at each bound and just beyond it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightkv.router.api.answers import extras as answer_room
from tests.support.combinations import each_value
from tests.support.fake_router import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ApiUnderTest,
    error_of,
    service,
    wait_until,
)

MAX_ANSWERS = 16
PROMPT = list(range(511, 521))
TOKENS = {"max_tokens": 1}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api"), max_answers=MAX_ANSWERS).running() as under_test:
        yield under_test


def fits(api: ApiUnderTest, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Returns None for a request that is answered, or the error of one that never reached the router."""
    num_before = len(api.router.submits)
    status, _, _ = found = api.send("POST", path, body)
    if status == 200:
        return None
    error: dict[str, Any] = api.post(path, body, 400)["error"]
    assert len(api.router.submits) == num_before, found
    return error


# Each request has the log-probabilities that stand beside it: of 10 prompt tokens, or of those of the answers.
@each_value(
    asked=[
        (180, "prompt_logprobs", {"prompt": [PROMPT] * 3, "prompt_logprobs": 5, **TOKENS}),
        (180, "prompt_logprobs", {"prompt": [PROMPT], "n": 3, "prompt_logprobs": 5, **TOKENS}),
        (186, "logprobs", {"prompt": [PROMPT], "n": 1, "echo": True, "logprobs": 5, "max_tokens": 21}),
        (66, "logprobs", {"prompt": [PROMPT], "echo": True, "logprobs": 5, "max_tokens": 0}),
        (132, "logprobs", {"prompt": [PROMPT] * 2, "echo": True, "logprobs": 5, "stream": True, **TOKENS}),
        (160, "logprobs", {"prompt": [PROMPT] * 2, "n": 4, "logprobs": 1, "max_tokens": 10}),
        (90, "logprobs", {**HELLO, "n": 3, "logprobs": True, "top_logprobs": 2, "max_tokens": 10}),
    ]
)
def test_the_log_probabilities_of_a_request_have_a_bound(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch, asked: tuple[int, str, dict[str, Any]]
) -> None:
    total, field, body = asked
    path = CHAT if "messages" in body else COMPLETIONS
    monkeypatch.setattr(answer_room, "MAX_SCORES", total)
    assert fits(api, path, body) is None
    monkeypatch.setattr(answer_room, "MAX_SCORES", total - 1)
    error = fits(api, path, body)
    assert error is not None
    assert error["param"] == field
    assert f"have {total} log-probabilities, and {total - 1} are allowed" in error["message"]
    assert "give fewer" in error["message"]


TEXT = "one two é"
ALL = {"prompt": [TEXT] * 2, "n": 3, "echo": True, "return_token_ids": True, "max_tokens": 4}


def test_the_bytes_of_an_answer_have_a_bound(api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and ids of prompts count once for each answer that repeats them."""
    num_ids = len(api.tokenizer.encode(TEXT))
    total = 6 * (len(TEXT.encode()) + 8 * num_ids + 4 * 16)
    monkeypatch.setattr(answer_room, "MAX_ANSWER_BYTES", total)
    assert fits(api, COMPLETIONS, ALL) is None
    monkeypatch.setattr(answer_room, "MAX_ANSWER_BYTES", total - 1)
    error = fits(api, COMPLETIONS, ALL)
    assert error is not None
    assert f"some {total} bytes, and {total - 1} are allowed" in error["message"]
    assert error["param"] == "n"


@each_value(limit=[("MAX_SCORES", 90), ("MAX_ANSWER_BYTES", 2 * 5 * (9 * 64 + 8))])
def test_answers_without_a_stated_length_are_as_long_as_there_is_room_for(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    monkeypatch.setattr(answer_room, *limit)
    body = {**HELLO, "n": 2, "logprobs": True, "top_logprobs": 8}
    answer = api.post(CHAT, body)
    assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [5, 5]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert not api.router.submits[-1].states_length


def test_the_defaults_let_the_longest_prompt_be_scored(api: ApiUnderTest) -> None:
    assert answer_room.MAX_SCORES >= 131_072 * 21  # a context of 128k tokens
    assert answer_room.MAX_SCORES * answer_room.SCORE_BYTES <= answer_room.MAX_ANSWER_BYTES


def test_answers_to_one_request_have_a_bound(api: ApiUnderTest) -> None:
    body = {"prompt": [PROMPT] * 4, "max_tokens": 1}
    assert fits(api, COMPLETIONS, {**body, "n": MAX_ANSWERS // 4}) is None
    error = fits(api, COMPLETIONS, {**body, "n": MAX_ANSWERS // 4 + 1})
    assert error is not None
    assert f"1 to {MAX_ANSWERS} prompts" in error["message"]


def test_log_probabilities_of_prompts_take_room_until_they_are_read(tmp_path: Path) -> None:
    """The room is shared with bodies, of which 16 KiB are free. One client takes half of it."""
    body = {"prompt": [PROMPT] * 8, "prompt_logprobs": 20, **TOKENS}
    num_bytes = 8 * len(PROMPT) * 21 * 8
    limits = {"max_body_bytes": 2 * num_bytes, "max_open_bytes": 4 * num_bytes}
    with service(tmp_path, **limits).running() as api:

        def refusal(client: str) -> str:
            status, _, content = api.send("POST", COMPLETIONS, body, {"X-Forwarded-For": client})
            assert status == 503
            return str(error_of(content)["message"])

        api.router.hold = True
        waiting = []
        for client in ("10.0.0.1", "10.0.0.2"):
            for _ in range(2):
                waiting.append(connection := api.connect())
                headers = {"Content-Type": "application/json", "X-Forwarded-For": client}
                connection.request("POST", COMPLETIONS, json.dumps(body), headers)
            wait_until(lambda: len(api.router.submits) == 8 * len(waiting))
            if client == "10.0.0.1":
                assert f"the {2 * num_bytes} bytes that one client may take" in refusal(client)
        assert f"log-probabilities of their prompts, fill the {4 * num_bytes} bytes" in refusal("10.0.0.3")
        for connection in waiting:
            connection.close()
        wait_until(lambda: api.client.num_open == 0)
        api.router.hold = False
        for _ in range(3):
            assert len(api.post(COMPLETIONS, body)["choices"]) == 8
