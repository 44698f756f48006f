"""Tests of stop strings in the answers of a model that reasons: whole, as a stream, and as a response."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_router import CHAT, HELLO, ApiUnderTest, service

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    under_test = service(tmp_path_factory.mktemp("api"), reasoning_parser="deepseek_r1")
    under_test.tokenizer._template_source = "{{ messages[0].content }}"
    with under_test.running() as running:
        yield running


@pytest.mark.parametrize(
    ("text", "stop", "fields", "expected"),
    [
        ("The Question: is.\n</think>\n\nAnswer: 4", ["Question:"], {}, ("The Question: is.", "Answer: 4")),
        ("a</think>One. Question: two", "Question:", {}, ("a", "One. ")),
        ("Question: a</think>Question: b", "Question:", {}, ("Question: a", None)),
        ("a\n\nb\n</think>\n\nc\n\nd", "\n\n", {}, ("a\n\nb", "c")),
        ("a.b</think>c.d", ".", {"include_stop_str_in_output": True}, ("a.b", "c.")),
        ("a.b</think>c.d", ".", {"min_tokens": 60}, ("a.b", "c.d")),
        ("so</think>yes", "</think>", {}, ("so", "yes")),
        ("so", "so", {}, ("so", None)),
        ("a</think>b", ["x", "y"], {}, ("a", "b")),
        ("</think>b. c", [". ", "c"], {}, (None, "b")),
        ("é🙂</think>é🙂é", "🙂", {}, ("é🙂", "é")),
    ],
)
def test_reasoning_is_not_searched(
    api: ApiUnderTest,
    text: str,
    stop: Any,
    fields: dict[str, Any],
    expected: tuple[str | None, str | None],
) -> None:
    end = min(api.tokenizer.eos_ids)
    api.router.script = [*api.tokenizer.encode(text).tolist(), end]
    asked = {**HELLO, "stop": stop, "max_tokens": 100, **fields}
    (choice,) = api.post(CHAT, asked)["choices"]
    message = choice["message"]
    assert (message.get("reasoning"), message["content"] or None) == expected
    assert choice["finish_reason"] == "stop"
    deltas = [event["choices"][0]["delta"] for event in api.stream(CHAT, asked)[:-1]]
    streamed = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")]
    assert (streamed[0] or None, streamed[1] or None) == expected
    body = {"input": "Hello!", "stop": stop, "max_output_tokens": 100, **fields}
    kinds = {
        item["type"]: "".join(part["text"] for part in item["content"])
        for item in api.post(RESPONSES, body)["output"]
    }
    assert (kinds.get("reasoning"), kinds.get("message") or None) == expected
