"""Tests of beam search over HTTP, against a router whose tokens never depend on the prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_router import CHAT, COMPLETIONS, HELLO, ApiUnderTest, idle, ids_of, service

PROMPT = [511, 512, 513, 514]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api")).running() as under_test:
        yield under_test


@pytest.fixture
def api(shared: ApiUnderTest) -> ApiUnderTest:
    return idle(shared)


def test_the_best_beams_are_returned(api: ApiUnderTest) -> None:
    """Every round finds the token `one` with -0.5 and the token 2, which ends an answer, with -1.5."""
    body = {"prompt": [PROMPT, PROMPT[:2]], "max_tokens": 3, "use_beam_search": True, "n": 2, "best_of": 3}
    done = api.post(COMPLETIONS, {**body, "return_token_ids": True})
    one = api.router.script[0]
    assert 2 in api.tokenizer.eos_ids
    assert [choice["index"] for choice in done["choices"]] == [0, 1, 2, 3]
    for choice in done["choices"][::2]:
        assert choice["token_ids"] == [one] * 3
        assert choice["finish_reason"] == "length"
        assert choice["text"] == " one one one"
    for choice in done["choices"][1::2]:
        assert choice["token_ids"] == [one, one, 2]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == " one one"
    assert done["usage"]["prompt_tokens"] == 6
    assert done["usage"]["completion_tokens"] == 12
    assert {submit.params.max_tokens for submit in api.router.submits} == {1}
    assert ids_of(api.router.submits[-1])[:2] == PROMPT[:2]


def test_a_chat_and_a_penalty(api: ApiUnderTest) -> None:
    fields: dict[str, Any] = {**HELLO, "max_tokens": 3, "use_beam_search": True, "n": 1, "best_of": 4}
    (choice,) = api.post(CHAT, fields)["choices"]
    assert choice["message"]["content"] == " one one one"
    (choice,) = api.post(CHAT, {**fields, "length_penalty": -3})["choices"]
    assert choice["message"]["content"] == " one one one"[: len(choice["message"]["content"])]


def test_what_a_search_does_not_heed_is_refused(api: ApiUnderTest) -> None:
    for fields, param in (
        ({"stream": True}, "use_beam_search"),
        ({"n": 20}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"stop": "a"}, "stop"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"length_penalty": 1000}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ):
        body = {**HELLO, "use_beam_search": True, "max_tokens": 2, **fields}
        error = api.post(CHAT, body, 400)["error"]
        assert error["param"] == param, (fields, error)
    for fields, param in (
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ):
        assert api.post(CHAT, {**HELLO, **fields}, 400)["error"]["param"] == param
    assert not api.router.submits


def test_more_beams_than_the_queue_holds_are_refused(tmp_path: Path) -> None:
    body = {"prompt": ["a", "b"], "use_beam_search": True, "best_of": 3, "max_tokens": 2}
    with service(tmp_path, max_queued_requests=5).running() as narrow:
        error = narrow.post(COMPLETIONS, body, 400)["error"]
        assert error["param"] == "n"
        assert "max-queued-requests" in error["message"]
        narrow.post(COMPLETIONS, body | {"best_of": 2})


def test_a_failure_in_a_round_is_an_error(api: ApiUnderTest) -> None:
    api.router.fail_after = 0
    body = {**HELLO, "use_beam_search": True, "max_tokens": 2, "n": 2}
    assert api.post(CHAT, body, 500)["error"]["message"]
