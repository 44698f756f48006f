"""The HTTP application over a fake router: every route and its answers, whole and streamed."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lightkv import __version__
from lightkv.router.api.app import create_app
from lightkv.router.api.process import warm_up
from lightkv.router.config import EngineConfig
from lightkv.router.engine.step import TokenEvent
from lightkv.router.model_files import resolve
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.service.messages import Load, NewAnswer, NewPrompt, Submit
from lightkv.router.service.router_client import AnswerStream, RequestRefused
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.fake_router import (
    CAPACITY,
    CHAT,
    COMPLETIONS,
    HELLO,
    INFO,
    LIMITS,
    MODEL,
    TEXT,
    ApiUnderTest,
    error_of,
    ids_of,
    metrics_text,
    stream_texts,
    wait_until,
)


def num_tokens(api: ApiUnderTest, text: str) -> int:
    return len(api.tokenizer.encode(text))


# Completions


def test_a_completion_has_openais_form(api: ApiUnderTest) -> None:
    api.router.num_cached = 2
    body = api.post(COMPLETIONS, {"model": MODEL, "prompt": "The capital of France", "max_tokens": 5})
    assert body.pop("id").startswith("cmpl-")
    assert abs(body.pop("created") - time.time()) < 60
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": num_tokens(api, "The capital of France"),
            "completion_tokens": 5,
            "total_tokens": num_tokens(api, "The capital of France") + 5,
            "prompt_tokens_details": None,  # they would reveal the prompts of other clients
        },
    }


@pytest.mark.parametrize(
    ("path", "asked"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, HELLO)], ids=["completions", "chat"]
)
def test_an_answer_says_how_often_it_was_interrupted(
    api: ApiUnderTest, path: str, asked: dict[str, Any]
) -> None:
    assert "interruptions" not in api.post(path, {**asked, "max_tokens": 5})["usage"]
    api.router.num_interruptions = 1
    assert api.post(path, {**asked, "max_tokens": 5, "n": 2})["usage"]["interruptions"] == 2
    *chunks, end = api.stream(path, {**asked, "max_tokens": 5})
    assert end == "[DONE]"
    assert [chunk.get("interruptions") for chunk in chunks] == [None] * (len(chunks) - 1) + [1]


def test_the_usage_says_to_what_a_limit_was_cut(api: ApiUnderTest) -> None:
    """The pool has 20 tokens, and needs none for the last one."""
    small = msgspec.structs.replace(INFO, capacity=20)
    api.call(lambda: api.router.report("ready", ready=small))
    wait_until(lambda: api.client.status.info == small)
    usage = api.post(COMPLETIONS, {"prompt": [5] * 10, "max_tokens": 11})["usage"]
    assert "max_tokens" not in usage
    assert api.post(COMPLETIONS, {"prompt": [5] * 10, "max_tokens": 12})["usage"]["max_tokens"] == 11


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        pytest.param("Hi there", ["Hi there"], id="text"),
        pytest.param(["Hi", "there"], ["Hi", "there"], id="texts"),
        pytest.param([5, 6, 7], [[5, 6, 7]], id="ids"),
        pytest.param([[5, 6], [7]], [[5, 6], [7]], id="lists-of-ids"),
    ],
)
def test_every_form_of_prompt_reaches_the_router(api: ApiUnderTest, prompt: Any, wanted: list[Any]) -> None:
    body = api.post(COMPLETIONS, {"prompt": prompt})
    ids = [w if isinstance(w, list) else api.tokenizer.encode(w).tolist() for w in wanted]
    assert [ids_of(submit) for submit in api.router.submits] == ids
    assert [choice["index"] for choice in body["choices"]] == list(range(len(wanted)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 16 * len(wanted)  # OpenAI's default


def test_every_parameter_reaches_the_router(api: ApiUnderTest) -> None:
    asked = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 11,
        "stop": ["xyz"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
    }
    extras = {
        "logit_bias": {"5": -2},
        "stop_token_ids": [9],
        "priority": 3,
        "cache_salt": "tenant",
        "user": "u",
        "no_such_field": {"a": 1},
        "frequency_penalty_2": None,
        "logprobs": None,
    }
    api.post(COMPLETIONS, {"prompt": "a", **asked, **extras})
    (submit,) = api.router.submits
    params = msgspec.structs.asdict(submit.params)
    assert {name: params[name] for name in asked} == asked | {"stop": ("xyz",)}
    assert submit.params.logit_bias == {5: -2}
    assert (submit.stop_ids, submit.priority, submit.namespace) == ([9], 3, ("tenant",))
    assert submit.seed == 11
    assert submit.params.n == 1


def test_null_means_the_default(api: ApiUnderTest) -> None:
    names = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "logit_bias", "top_k")
    api.post(COMPLETIONS, {"prompt": "a", **dict.fromkeys(names)})
    assert api.router.submits[0].params == msgspec.structs.replace(
        api.router.submits[0].params, max_tokens=16
    )
    assert api.router.submits[0].params.temperature == 1.0
    assert set(api.router.submits[0].stop_ids) == api.tokenizer.eos_ids


def test_each_of_n_answers_has_its_own_seed(api: ApiUnderTest) -> None:
    body = api.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 3, "seed": 1, "max_tokens": 2})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    seeds = [submit.seed for submit in api.router.submits]
    assert seeds[0] == 1
    assert len(set(seeds)) == 3
    assert seeds[:3] == seeds[3:]
    assert len({submit.request_id for submit in api.router.submits}) == 6
    assert body["usage"]["prompt_tokens"] == num_tokens(api, "a") + num_tokens(api, "b")
    assert body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("prompt", ["Say: ", [28, 29]], ids=["text", "ids"])
def test_echo_puts_the_prompt_first(api: ApiUnderTest, prompt: Any) -> None:
    text = prompt if isinstance(prompt, str) else api.tokenizer.decode(prompt)
    asked = {"prompt": prompt, "echo": True, "max_tokens": 5, "n": 2}
    assert [choice["text"] for choice in api.post(COMPLETIONS, asked)["choices"]] == [text + TEXT] * 2
    assert stream_texts(api.stream(COMPLETIONS, asked)) == {0: text + TEXT, 1: text + TEXT}


@pytest.mark.parametrize(("include", "text"), [(False, " one two"), (True, " one two three")])
def test_a_stop_string_ends_the_answer_and_aborts_the_request(
    api: ApiUnderTest, include: bool, text: str
) -> None:
    api.router.delay = 0.01
    asked = {"prompt": "a", "max_tokens": 500, "stop": " three", "include_stop_str_in_output": include}
    (choice,) = api.post(COMPLETIONS, asked)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    wait_until(lambda: len(api.router.aborts) == 1)
    assert api.router.aborts[0].reason == "stop"
    wait_until(lambda: api.router.num_running == 0)


def test_logprobs_of_a_completion(api: ApiUnderTest) -> None:
    asked = {"prompt": "a", "max_tokens": 2, "logprobs": 3}
    whole = api.post(COMPLETIONS, asked)["choices"][0]["logprobs"]
    two, three = (api.tokenizer.decode([token], skip_special_tokens=False) for token in (2, 3))
    assert whole == {
        "tokens": [" one", " two"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{token: -0.5, two: -1.5, three: -9999.0} for token in (" one", " two")],
        "text_offset": [0, 4],
    }
    chunks = [event["choices"][0]["logprobs"] for event in api.stream(COMPLETIONS, asked)[:-1]]
    for name, values in whole.items():
        assert [value for chunk in chunks for value in chunk[name]] == values


def test_a_stop_token_is_counted_but_has_no_text_and_no_logprobs(api: ApiUnderTest) -> None:
    asked = {"prompt": "a", "logprobs": 0, "stop_token_ids": [api.router.script[1]]}
    body = api.post(COMPLETIONS, asked)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" one", "stop")
    assert choice["logprobs"]["tokens"] == [" one"]
    assert choice["logprobs"]["top_logprobs"] == [{" one": -0.5}]
    assert body["usage"]["completion_tokens"] == 2


def test_a_stream_has_the_same_text_in_chunks(api: ApiUnderTest) -> None:
    api.router.delay = 0.005
    events = api.stream(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 5})
    assert events[-1] == "[DONE]"
    assert stream_texts(events) == dict.fromkeys(range(4), TEXT)
    assert len({event["id"] for event in events[:-1]}) == 1
    assert all("usage" not in event for event in events[:-1])
    ends = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert ends.count("length") == 4
    assert ends.count(None) == len(ends) - 4 >= 8


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_token_counts_are_the_last_chunk_of_a_stream(api: ApiUnderTest, path: str) -> None:
    asked = {**HELLO, "prompt": "a", "max_tokens": 5, "stream_options": {"include_usage": True}}
    *pieces, counts, done = api.stream(path, asked)
    assert done == "[DONE]"
    assert counts["choices"] == []
    assert counts["usage"]["completion_tokens"] == 5
    assert all(event["usage"] is None for event in pieces)


def test_every_chunk_can_have_token_counts(api: ApiUnderTest) -> None:
    api.router.delay = 0.005
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = api.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 5, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 5)


def test_streams_forbid_proxies_to_buffer(api: ApiUnderTest) -> None:
    _, headers, _ = api.send("POST", COMPLETIONS, {"prompt": "a", "stream": True})
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["content-length"] is None


# Chat


def test_a_chat_has_openais_form(api: ApiUnderTest) -> None:
    body = api.post(CHAT, {"model": "alias/of-it", **HELLO, "max_completion_tokens": 5, "max_tokens": 9})
    assert body.pop("id").startswith("chatcmpl-")
    body.pop("created")
    prompt = api.tokenizer.encode_chat(HELLO["messages"])
    assert ids_of(api.router.submits[0]) == prompt.tolist()
    message = {"role": "assistant", "content": TEXT}
    assert body == {
        "object": "chat.completion",
        "model": "alias/of-it",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 5,
            "total_tokens": len(prompt) + 5,
            "prompt_tokens_details": None,
        },
    }


def test_a_chat_may_use_the_rest_of_the_context(api: ApiUnderTest) -> None:
    api.router.script = [*api.router.script, *api.tokenizer.eos_ids]
    assert api.post(CHAT, HELLO)["choices"][0]["finish_reason"] == "stop"
    (submit,) = api.router.submits
    assert submit.params.max_tokens == LIMITS.max_model_len - len(ids_of(submit))
    assert not submit.states_length


def test_the_router_is_told_whether_a_limit_was_stated(api: ApiUnderTest) -> None:
    api.post(CHAT, {**HELLO, "max_tokens": 5})
    api.post(CHAT, {**HELLO, "max_completion_tokens": 5})
    api.post(COMPLETIONS, {"prompt": "a"})  # whose default is 16
    assert [submit.states_length for submit in api.router.submits] == [True, True, True]


def test_parts_of_a_message_are_joined_and_other_fields_reach_the_template(api: ApiUnderTest) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    message = {"role": "user", "content": parts, "name": "x"}
    api.post(CHAT, {"messages": [message], "max_tokens": 1, "add_generation_prompt": False})
    plain = [{"role": "user", "content": "Hel\nlo"}]
    assert ids_of(api.router.submits[0]) == api.tokenizer.encode_chat(plain, False).tolist()


def test_a_chats_stream_begins_with_the_role(api: ApiUnderTest) -> None:
    api.router.delay = 0.005
    events = api.stream(CHAT, {**HELLO, "n": 2, "max_tokens": 5})
    assert events[-1] == "[DONE]"
    assert stream_texts(events) == {0: TEXT, 1: TEXT}
    for index in range(2):
        deltas = [
            event["choices"][0]["delta"] for event in events[:-1] if event["choices"][0]["index"] == index
        ]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in deltas[1:])
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}


def test_logprobs_of_a_chat(api: ApiUnderTest) -> None:
    asked = {**HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    content = api.post(CHAT, asked)["choices"][0]["logprobs"]["content"]
    assert content == [
        {**entry, "top_logprobs": [entry]}
        for text in (" one", " two")
        for entry in [{"token": text, "logprob": -0.5, "bytes": list(text.encode())}]
    ]
    api.post(CHAT, {**HELLO, "max_tokens": 1, "logprobs": True})
    assert api.router.submits[-1].params.logprobs == 0
    chunks = [event["choices"][0]["logprobs"] for event in api.stream(CHAT, asked)[:-1]]
    assert [entry for chunk in chunks if chunk for entry in chunk["content"]] == content


def test_half_a_character_is_never_sent(api: ApiUnderTest) -> None:
    api.router.script = api.tokenizer.encode("né 🦤𓂀 ok").tolist()
    assert "\ufffd" in "".join(api.tokenizer.decode([token]) for token in api.router.script)
    api.router.delay = 0.002
    events = api.stream(COMPLETIONS, {"prompt": "a", "max_tokens": len(api.router.script)})
    assert stream_texts(events) == {0: "né 🦤𓂀 ok"}
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)


# The other routes


def test_models(api: ApiUnderTest) -> None:
    body = json.loads(api.send("GET", "/v1/models")[2])
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == [MODEL, "alias/of-it"]
    assert body["data"][0]["max_model_len"] == LIMITS.max_model_len
    assert body["data"][0]["kv_dtype"] == "float32"
    assert json.loads(api.send("GET", "/v1/models/alias/of-it")[2]) == body["data"][1]


@pytest.mark.parametrize(("age", "status"), [(0.0, 200), (29.0, 200), (31.0, 503)])
def test_health_and_readiness_depend_on_the_age_of_the_last_step(
    api: ApiUnderTest, age: float, status: int
) -> None:
    api.call(lambda: api.router.report("ready", Load(num_running=1, step_age=age)))
    wait_until(lambda: api.client.status.load.step_age == age)
    for path, field in (("/health", "healthy"), ("/ready", "ready")):
        found, _, content = api.send("GET", path)
        assert (found, json.loads(content)[field]) == (status, status == 200)
    assert f'lightkv:ready{{model_name="smol"}} {float(status == 200)}' in metrics_text(api)


def test_a_silent_router_is_not_ready_and_requests_are_refused(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.send("GET", "/health")[0] == api.send("GET", "/ready")[0] == 200
    monkeypatch.setattr("lightkv.router.service.router_client.MAX_STATUS_AGE", 1.0)
    api.router.is_silent = True
    wait_until(lambda: api.client.latest.age > 1.0)
    assert api.send("GET", "/ready")[0] == 503
    assert api.send("GET", "/health")[0] == 200  # a short silence is healthy
    monkeypatch.setattr("lightkv.router.service.router_client.MAX_STEP_AGE", 1.0)
    assert api.send("GET", "/health")[0] == 503
    assert 'lightkv:ready{model_name="smol"} 0.0' in metrics_text(api)
    assert "lightkv:free_tokens{" not in metrics_text(api)
    status, headers, content = api.send("POST", COMPLETIONS, {"prompt": "a"})
    assert (status, headers["Retry-After"]) == (503, "5")
    assert "has not reported for" in error_of(content)["message"]
    assert not api.router.submits
    assert "has not reported" in json.loads(api.send("GET", "/ready")[2])["detail"]
    assert json.loads(api.send("GET", "/load")[2])["router_silence"] > 1
    monkeypatch.undo()
    api.router.is_silent = False
    wait_until(lambda: api.send("GET", "/ready")[0] == 200)
    api.post(COMPLETIONS, {"prompt": "a"})


def test_a_priority_below_0_needs_permission(api: ApiUnderTest, tmp_path: Path) -> None:
    api.post(COMPLETIONS, {"prompt": "a", "priority": 7})
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, HELLO)):
        error = api.post(path, body | {"priority": -1}, 400)["error"]
        assert error["param"] == "priority"
        assert "--allow-priority" in error["message"]
    assert [submit.priority for submit in api.router.submits] == [7]
    settings = ApiSettings(served_model_name=(MODEL,), allow_priority=True)
    with ApiUnderTest(api.tokenizer, tmp_path / "router", settings).running() as allowing:
        allowing.post(COMPLETIONS, {"prompt": "a", "priority": -3})
        assert [submit.priority for submit in allowing.router.submits] == [-3]


def test_load_and_metrics_report_the_same_counts(api: ApiUnderTest) -> None:
    load = Load(capacity=CAPACITY, free=1500, held=2000, cached=500, forecast_peak=3000, num_ledger_checks=9)
    api.call(lambda: api.router.report("ready", load))
    wait_until(lambda: api.client.status.load == load)
    body = json.loads(api.send("GET", "/load")[2])
    assert body.pop("state") == "ready"
    assert body.pop("detail") == "for the test"
    assert body.pop("router_silence") >= 0
    assert body.pop("kv_dtype") == "float32"
    assert body == msgspec.to_builtins(load)
    assert 'vllm:kv_cache_usage_perc{model_name="smol"} 0.5' in metrics_text(api)
    assert 'lightkv:ledger_checks_total{model_name="smol"} 9.0' in metrics_text(api)


def test_metrics_measure_answers(fresh: ApiUnderTest) -> None:
    fresh.post(COMPLETIONS, {"prompt": "a", "n": 2, "max_tokens": 5})
    lines = metrics_text(fresh).splitlines()
    assert 'vllm:time_to_first_token_seconds_count{model_name="smol"} 2.0' in lines
    assert 'vllm:inter_token_latency_seconds_count{model_name="smol"} 8.0' in lines
    assert 'vllm:request_queue_time_seconds_count{model_name="smol"} 2.0' in lines
    assert 'vllm:request_prompt_tokens_sum{model_name="smol"} 2.0' in lines
    assert 'vllm:request_generation_tokens_sum{model_name="smol"} 10.0' in lines
    assert 'vllm:request_params_max_tokens_sum{model_name="smol"} 10.0' in lines
    assert 'vllm:request_success_total{finished_reason="length",model_name="smol"} 2.0' in lines


def test_version(api: ApiUnderTest) -> None:
    assert json.loads(api.send("GET", "/version")[2]) == {"version": __version__}


@pytest.mark.parametrize("text", ["Grüße, 🙂!", "", "long " * 5000], ids=["short", "empty", "in-a-thread"])
def test_tokenize_and_detokenize(api: ApiUnderTest, text: str) -> None:
    body = api.post("/tokenize", {"prompt": text})
    assert body["tokens"] == api.tokenizer.encode(text).tolist()
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), LIMITS.max_model_len)
    assert api.post("/detokenize", {"tokens": body["tokens"]}) == {"prompt": text}


def test_tokenize_a_chat(api: ApiUnderTest) -> None:
    body = api.post("/tokenize", {**HELLO, "add_generation_prompt": False})
    assert body["tokens"] == api.tokenizer.encode_chat(HELLO["messages"], False).tolist()
    assert api.post("/tokenize", {**HELLO, "prompt": "both"}, 400)
    assert api.post("/tokenize", {}, 400)


@pytest.mark.parametrize("tokens", [[-1], [2**31], [2**70], ["a"], 5], ids=str)
def test_detokenize_refuses_invalid_ids(api: ApiUnderTest, tokens: Any) -> None:
    assert api.post("/detokenize", {"tokens": tokens}, 400)["error"]["param"] == "tokens"
    assert api.post("/detokenize", {"tokens": [2**31 - 1]}) == {"prompt": ""}


def test_a_service_without_a_key_documents_none(api: ApiUnderTest) -> None:
    document = json.loads(api.send("GET", "/openapi.json")[2])
    assert "securitySchemes" not in document["components"]
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "401" not in operation["responses"]
            assert "security" not in operation


@pytest.mark.parametrize(
    ("reason", "is_refused"), [("error", False), ("invalid", False), ("lost", True), ("abort", True)]
)
def test_a_request_that_ends_before_it_is_queued(reason: str, is_refused: bool) -> None:
    """A failed step is not a refusal: the other requests are queued all the same, and the answer has the
    error."""
    client: Any = SimpleNamespace(num_event_bytes=0)
    submit = Submit([NewPrompt(b"", [NewAnswer("a", 1), NewAnswer("b", 1)])], SamplingParams(), [])

    async def submitted() -> list[TokenEvent]:
        answers = AnswerStream(client, submit)
        answers.push(TokenEvent("a", None, reason, error="because"))
        answers.accept()
        await answers.accepted()
        return await anext(answers)

    if is_refused:
        with pytest.raises(RequestRefused, match="because") as raised:
            asyncio.run(submitted())
        assert raised.value.kind == "unavailable"
    else:
        assert [event.finish_reason for event in asyncio.run(submitted())] == [reason]


def test_the_requests_before_the_first_one_leave_nothing_behind() -> None:
    statuses: list[int] = []

    async def seen(scope: Any, receive: Any, send: Any) -> None:
        async def watch(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        await made(scope, receive, watch)

    unused: Any = SimpleNamespace(release_session=None)
    tokenizer = Tokenizer(resolve(EngineConfig.model, report=lambda line: None))
    tokenizer.prepare()
    assert tokenizer.encode("Hi").size
    made = create_app(unused, tokenizer, ApiSettings(served_model_name=("m",), api_key=("key",)))
    asyncio.run(warm_up(seen, "key"))
    assert statuses == [404, 404]
