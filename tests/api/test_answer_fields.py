"""Tests of the fields that change what an answer has beside its text, and how a chat becomes a prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightkv.router.config import EngineConfig, ServiceConfig
from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.api_settings import api_settings
from lightkv.token_set import TokenSet
from tests.support.fake_router import (
    CHAT,
    COMPLETIONS,
    HELLO,
    LIMITS,
    TEXT,
    ApiUnderTest,
    ids_of,
    service,
)

PROMPT = [511, 512, 513, 514]


def choices(api: ApiUnderTest, path: str = COMPLETIONS, **fields: Any) -> list[Any]:
    prompt: dict[str, Any] = HELLO if path == CHAT else {"prompt": PROMPT}
    return list(api.post(path, {**prompt, "max_tokens": 2, **fields})["choices"])


def test_prompt_logprobs(api: ApiUnderTest) -> None:
    first, second = choices(api, prompt_logprobs=1, n=2)
    scores = first["prompt_logprobs"]
    assert second["prompt_logprobs"] == scores
    assert scores[0] is None
    assert [list(entry) for entry in scores[1:]] == [["512", "7"], ["513", "7"], ["514", "7"]]
    assert scores[1]["512"] == {
        "logprob": -1.0,
        "rank": 2,
        "decoded_token": api.tokenizer.token_text(512),
    }
    assert scores[3]["7"]["rank"] == 1
    assert [submit.params.prompt_logprobs for submit in api.router.submits] == [1, None]
    assert first["logprobs"] is None
    chat = api.post(CHAT, {**HELLO, "max_tokens": 1, "prompt_logprobs": 0})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    for value in (-1, 21, "1"):
        error = api.post(COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": value}, 400)["error"]
        assert error["param"] == "prompt_logprobs"
    error = api.post(CHAT, {**HELLO, "prompt_logprobs": 1, "stream": True}, 400)["error"]
    assert error["param"] == "prompt_logprobs"


def test_echo_with_logprobs(api: ApiUnderTest) -> None:
    fields = {"echo": True, "logprobs": 1}
    for one in choices(api, n=2, **fields):
        logprobs = one["logprobs"]
        text = api.tokenizer.decode(PROMPT) + " one two"
        assert one["text"] == text == "".join(logprobs["tokens"])
        assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.5, -0.5]
        assert logprobs["top_logprobs"][0] is None
        assert len(logprobs["top_logprobs"][1]) == 2
        offsets = [len("".join(logprobs["tokens"][:i])) for i in range(6)]
        assert logprobs["text_offset"] == offsets
    (whole,) = choices(api, **fields)
    events = api.stream(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "stream": True, **fields})
    parts = [event["choices"][0]["logprobs"] for event in events if event != "[DONE]"]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts for value in part[name]] == values
    several = {"prompt": PROMPT, "stream": True, "n": 2, **fields}
    assert api.post(COMPLETIONS, several, 400)["error"]["param"] == "echo"


def test_echo_of_the_prompt_alone(api: ApiUnderTest) -> None:
    """As harnesses score texts: `max_tokens` of 0, which is refused without `echo`."""
    text = api.tokenizer.decode(PROMPT)
    asked = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    body = api.post(COMPLETIONS, {**asked, "n": 2, "logprobs": 1, "return_token_ids": True})
    for one in body["choices"]:
        assert (one["text"], one["finish_reason"], one["token_ids"]) == (text, "length", [])
        assert one["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0]
        assert "".join(one["logprobs"]["tokens"]) == text
    assert body["usage"]["completion_tokens"] == 0
    events = api.stream(COMPLETIONS, {**asked, "stream_options": {"include_usage": True}})
    assert [choice["text"] for event in events[:-1] for choice in event["choices"]] == [text]
    assert events[-2]["usage"]["completion_tokens"] == 0
    api.post(COMPLETIONS, {**asked, "echo": False}, 400)


CONTEXT = LIMITS.max_model_len


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"prompt": [7] * CONTEXT}, CONTEXT),
        ({"prompt": [7] * (CONTEXT - 1)}, CONTEXT - 1),
        ({"prompt": " one" * CONTEXT}, CONTEXT),
        ({"prompt": [[7] * CONTEXT, [8] * CONTEXT]}, CONTEXT),
        ({"prompt": [7] * CONTEXT, "logprobs": 1}, CONTEXT),
        ({"prompt": [7] * CONTEXT, "n": 2}, CONTEXT),
        ({"prompt": [7] * CONTEXT, "prompt_logprobs": 0}, CONTEXT),
        ({"prompt": [7] * CONTEXT, "stream": True}, CONTEXT),
        ({"prompt": [7] * CONTEXT, "max_completion_tokens": 0, "max_tokens": None}, CONTEXT),
        ({"prompt": [7] * (CONTEXT + 1)}, None),
        ({"prompt": " one" * (CONTEXT + 1)}, None),
        ({"prompt": [7] * CONTEXT, "max_tokens": 1}, None),
        ({"prompt": [7] * CONTEXT, "echo": False, "max_tokens": 1}, None),
        ({"prompt": [[7], [7] * (CONTEXT + 1)]}, None),
    ],
)
def test_an_echo_of_the_prompt_alone_may_fill_the_context(
    api: ApiUnderTest, fields: dict[str, Any], num_tokens: int | None
) -> None:
    asked = {"echo": True, "max_tokens": 0, **fields}
    status, _, body = api.send("POST", COMPLETIONS, asked)
    if num_tokens is None:
        assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
        assert not api.router.submits
        return
    assert status == 200
    assert {len(ids_of(submit)) for submit in api.router.submits} == {num_tokens}
    assert not any(one.submit.shows_answer for one in api.router.submits)


def test_token_ids(api: ApiUnderTest) -> None:
    (whole,) = choices(api, return_token_ids=True)
    expected = api.tokenizer.encode(TEXT).tolist()[:2]
    assert (whole["token_ids"], whole["prompt_token_ids"]) == (expected, PROMPT)
    chat = api.post(CHAT, {**HELLO, "max_tokens": 2, "return_token_ids": True})
    assert chat["prompt_token_ids"] == ids_of(api.router.submits[-1])
    assert chat["choices"][0]["token_ids"] == expected
    for path, prompt in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, HELLO)):
        body = {**prompt, "max_tokens": 2, "stream": True, "return_token_ids": True}
        events = [event for event in api.stream(path, body) if event != "[DONE]"]
        made = [event["choices"][0].get("token_ids", []) for event in events]
        assert [token for part in made for token in part] == expected
        first = events[0] if path == CHAT else events[0]["choices"][0]
        assert first["prompt_token_ids"] == ids_of(api.router.submits[-1])
    assert "token_ids" not in choices(api)[0]


def test_tokens_as_ids(api: ApiUnderTest) -> None:
    one, two = (f"token_id:{token}" for token in api.tokenizer.encode(TEXT).tolist()[:2])
    (completion,) = choices(api, logprobs=2, return_tokens_as_token_ids=True)
    assert completion["logprobs"]["tokens"] == [one, two]
    assert list(completion["logprobs"]["top_logprobs"][0]) == [one, "token_id:2"]
    (chat,) = choices(api, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == [one, two]


def test_banned_tokens_reach_the_router(api: ApiUnderTest) -> None:
    choices(api, bad_words=["one", " two three"], allowed_token_ids=[5, 6])
    params = api.router.submits[0].params
    assert params.bad_words == ()
    ids = [api.tokenizer.encode(text).tolist() for text in ("one", " one", "two three", " two three")]
    assert set(params.banned) == {one for (one,) in ids[:2]}
    assert tuple(ids[3]) in params.bad_words_ids
    assert params.allowed == TokenSet.of([5, 6])
    for field, value in (("bad_words", [""]), ("bad_words", "a"), ("allowed_token_ids", [])):
        error = api.post(COMPLETIONS, {"prompt": "a", field: value}, 400)["error"]
        assert error["param"] == field


def test_the_last_message_is_continued_as_by_transformers(api: ApiUnderTest) -> None:
    reference = AutoTokenizer.from_pretrained(Path(resolve(DEFAULT_MODEL, print)))
    for content in ("The answer is", "The answer is ", "Line\n", "<|im_end|>"):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
        expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        body = {"messages": messages, "continue_final_message": True}
        api.post(CHAT, {**body, "max_tokens": 1})
        found = api.tokenizer.decode(ids_of(api.router.submits[-1]), skip_special_tokens=False)
        assert found == expected
        tokens = api.post("/tokenize", body)["tokens"]
        assert tokens == ids_of(api.router.submits[-1])
    both = {**HELLO, "continue_final_message": True, "add_generation_prompt": True}
    assert api.post(CHAT, both, 400)["error"]["param"] == "continue_final_message"


def test_a_request_is_sampled_as_the_model_recommends(tmp_path: Path) -> None:
    recommended = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    for defaults, expected in (("model", recommended), ("openai", {})):
        settings = api_settings(EngineConfig(), ServiceConfig(sampling_defaults=defaults), is_local=True)
        under_test = service(tmp_path, sampling_defaults=settings.sampling_defaults)
        under_test.tokenizer.recommended = recommended
        with under_test.running() as api:
            api.post(CHAT, HELLO | {"max_tokens": 1})
            assert api.router.submits[-1].params == SamplingParams(max_tokens=1, **expected)
            api.post(CHAT, HELLO | {"max_tokens": 1, "temperature": 0.5, "top_k": 0})
            stated = expected | {"temperature": 0.5, "top_k": 0}
            assert api.router.submits[-1].params == SamplingParams(max_tokens=1, **stated)
            answer = api.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1})
            assert answer["temperature"] == expected.get("temperature", 1.0)
