"""Requests that are longer than the context: every endpoint says so in the words that clients look for."""

from collections.abc import Iterator
from typing import Any

import pytest

from lightkv.router.engine.request import NeverFits
from lightkv.router.service.messages import Refused, Submit
from tests.support.fake_router import CAPACITY, CHAT, COMPLETIONS, LIMITS, ApiUnderTest, service

RESPONSES = "/v1/responses"
CONTEXT = LIMITS.max_model_len
# What the clients look for in the lower case of an error, where they do not read its code.
LITELLM = "this model's maximum context length is"
CREWAI = ("maximum context length", "context_length_exceeded")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api"), max_body_bytes=2_000_000).running() as under_test:
        yield under_test


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def check(error: dict[str, Any], longest: int) -> None:
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    text = str(error).lower()
    assert LITELLM in error["message"].lower()
    assert all(words in text for words in CREWAI)
    assert f"maximum context length is {longest} tokens" in error["message"]


LONG, ENDLESS = "long " * CONTEXT, "long " * 100 * CONTEXT  # the second has too many characters to be read


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": ENDLESS}),
        (COMPLETIONS, {"prompt": [5] * CONTEXT}),
        (COMPLETIONS, {"prompt": [5] * (CONTEXT + 1)}),
        (COMPLETIONS, {"prompt": ["a", LONG], "stream": True}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": CONTEXT}),
        (CHAT, chat(LONG)),
        (CHAT, chat(LONG) | {"stream": True}),
        (CHAT, chat(ENDLESS)),
        (CHAT, chat("a") | {"max_tokens": CONTEXT}),
        (RESPONSES, {"input": LONG}),
        (RESPONSES, {"input": ENDLESS}),
        (RESPONSES, {"input": "a", "max_output_tokens": CONTEXT, "stream": True}),
        ("/tokenize", {"prompt": ENDLESS}),
    ],
)
def test_a_request_beyond_the_context_is_named_as_one(
    api: ApiUnderTest, path: str, body: dict[str, Any]
) -> None:
    check(api.post(path, body, 400)["error"], CONTEXT)
    assert not api.router.submits


def test_a_request_that_just_fits_is_answered(api: ApiUnderTest) -> None:
    for num_prompt in (CONTEXT - 1, CONTEXT - 2):
        api.post(COMPLETIONS, {"prompt": [5] * num_prompt, "max_tokens": CONTEXT - num_prompt})


def test_a_request_beyond_the_pool_is_named_as_one_too(api: ApiUnderTest) -> None:
    def refuse(submit: Submit) -> Refused:
        return Refused(submit.request_id, "never_fits", str(NeverFits(10, CAPACITY, CAPACITY, "pool")))

    api.router.refuse = refuse
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, chat("a")), (RESPONSES, {"input": "a"})):
        check(api.post(path, body, 400)["error"], CAPACITY + 1)


def test_other_errors_keep_their_codes(api: ApiUnderTest) -> None:
    assert api.post(COMPLETIONS, {"prompt": []}, 400)["error"]["code"] == 400
    assert api.post(COMPLETIONS, {"prompt": "a", "model": "none"}, 404)["error"]["code"] == 404
