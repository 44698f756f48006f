"""POST /v1/messages and /v1/messages/count_tokens over a fake router: Anthropic's forms, whole and streamed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lightkv.router.api.requests.messages import MessageRequest
from lightkv.router.sampling_params import InvalidParams
from lightkv.router.service.messages import Refused
from tests.support.chat_templates import TEMPLATES
from tests.support.fake_router import CHAT, MODEL, TEXT, ApiUnderTest, ids_of, service
from tests.support.served import API_KEY

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: Any = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello!"}]}
TOOL: Any = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
ANSWER = (
    "<think>\nParis, then.\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
CITIES = [{"city": "Paris"}, {"city": "Oslo"}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    """A service whose template has tools and reasoning, and which reports cached tokens."""
    made = service(tmp_path_factory.mktemp("thinking"), report_cached_tokens=True, tool_parser="hermes")
    made.tokenizer._template_source = TEMPLATES["qwen3"].source
    with made.running():
        yield made


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a stream's events make, as Anthropic's clients put it together."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    is_open = False
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            block, is_open, arguments = event["content_block"], True, ""
            message["content"].append(block)
        elif event["type"] == "content_block_stop":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments)
        else:
            delta = event["delta"]
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] += delta["signature"]
                case "input_json_delta":
                    arguments += delta["partial_json"]
    assert not is_open
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def both(api: ApiUnderTest, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a whole message and the one of its stream."""
    whole = api.post(MESSAGES, asked)
    status, headers, content = api.send("POST", f"{MESSAGES}?beta=true", asked | {"stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = []
    for block in content.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return [whole, message_of(events)]


def test_a_message_has_anthropics_form(api: ApiUnderTest) -> None:
    for message in both(api, HELLO):
        assert message.pop("id").startswith("msg_")
        assert message == {
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": TEXT}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {"input_tokens": len(ids_of(api.router.submits[0])), "output_tokens": 5},
        }


def test_the_prompt_is_that_of_the_same_chat_and_is_counted(api: ApiUnderTest) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;\nBe brief."},
        {"type": "text", "text": "x-anthropic-billing-header: stays", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "user", "content": "More"},
    ]
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 3, "cache_salt": "s"}
    asked = {"max_tokens": 2, "system": system, "messages": messages, "stop_sequences": ["four"], **fields}
    api.post(MESSAGES, asked | {"metadata": {"user_id": "u"}, "context_management": {"edits": []}})
    chat = [
        {"role": "system", "content": "Be brief.\nx-anthropic-billing-header: stays"},
        {"role": "user", "content": "Hi\nyou"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "More"},
    ]
    api.post(CHAT, {"messages": chat, "max_tokens": 2, "stop": ["four"], **fields})
    of_message, of_chat = api.router.submits
    assert ids_of(of_message) == ids_of(of_chat)
    assert of_message.params == of_chat.params
    assert of_message.namespace == of_chat.namespace
    counted = api.post(COUNT, {"system": system, "messages": messages})
    assert counted == {"input_tokens": len(ids_of(of_message))}


def test_the_billing_line_is_left_out_only_where_it_stands_first() -> None:
    line = "x-anthropic-billing-header: a"

    def system(given: Any) -> Any:
        return MessageRequest(**HELLO, system=given).chat().messages[0].content

    assert system(f"{line}\nBe {line}") == f"Be {line}"
    assert system([{"type": "text", "text": line}, {"type": "text", "text": "Be."}]) == "Be."
    for kept in (f"Be.\n{line}", f" {line}"):
        assert system(kept) == kept
    assert MessageRequest(**HELLO, system=line).chat().messages[0].role == "user"


def test_an_answer_ends_by_its_turn_or_a_sequence_that_is_named(api: ApiUnderTest) -> None:
    for message in both(api, HELLO | {"stop_sequences": ["three", " four"]}):
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "three")
        assert message["content"] == [{"type": "text", "text": " one two "}]
    api.router.script = [*api.router.script[:2], min(api.tokenizer.eos_ids)]
    for message in both(api, HELLO | {"stop_sequences": ["three"]}):
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


def test_thinking_texts_and_calls_are_blocks_that_are_taken_back(thinking: ApiUnderTest) -> None:
    router = thinking.router
    router.script = [*thinking.tokenizer.encode(ANSWER).tolist(), min(thinking.tokenizer.eos_ids)]
    router.num_cached = 20
    asked = HELLO | {"max_tokens": 400, "tools": [TOOL]}
    found = both(thinking, asked)
    num_prompt = len(ids_of(router.submits[0]))
    for message in found:
        thought, text, *calls = message["content"]
        assert thought == {"type": "thinking", "thinking": "Paris, then.", "signature": "lightkv"}
        assert text["text"].strip() == "Let me see."
        assert [(call["type"], call["name"]) for call in calls] == [("tool_use", "weather")] * 2
        assert [call["input"] for call in calls] == CITIES
        assert message["stop_reason"] == "tool_use"
        assert message["usage"] == {
            "input_tokens": num_prompt - 20,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 20,
            "output_tokens": len(router.script),
        }
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "Rain."},
        {
            "type": "tool_result",
            "tool_use_id": calls[1]["id"],
            "is_error": True,
            "content": [{"type": "text", "text": "No such city."}, picture],
        },
        {"type": "text", "text": "And now?"},
    ]
    content = [thought | {"signature": "another"}, {"type": "redacted_thinking", "data": "x"}, text, *calls]
    turns = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    thinking.post(MESSAGES, asked | {"messages": [*HELLO["messages"], *turns]})
    prompt = thinking.tokenizer.decode(ids_of(router.submits[-1]), skip_special_tokens=False)
    assert prompt.count('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}') == 1
    assert "<tool_response>\nRain.\n</tool_response>" in prompt
    assert "Error: No such city.\n[image: left out, because this service takes text only]" in prompt
    assert prompt.index("text only]") < prompt.index("And now?")


def test_a_call_that_is_cut_has_no_arguments(thinking: ApiUnderTest) -> None:
    script = thinking.tokenizer.encode(ANSWER).tolist()
    thinking.router.script = script
    (cut,) = [i for i in range(len(script)) if thinking.tokenizer.decode(script[:i]).endswith('"city": "P')][
        :1
    ] or [len(script) // 2]
    message = thinking.post(MESSAGES, HELLO | {"max_tokens": cut, "tools": [TOOL]})
    assert message["stop_reason"] == "max_tokens"
    assert [block["input"] for block in message["content"] if block["type"] == "tool_use"] == [{}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required", "parallel_tool_calls": True}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"reasoning_effort": "medium"}),
        ({"thinking": {"type": "adaptive"}}, {"reasoning_effort": None}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "xhigh"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        ({"messages": [{"role": "assistant", "content": "I"}]}, {"continue_final_message": True}),
        ({"n": 1, "logprobs": False, "mcp_servers": [], "container": None}, {"n": None}),
        ({"stop": ["a"]}, {"stop": ["a"]}),
    ],
)
def test_fields_become_those_of_a_chat(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    chat = MessageRequest(**HELLO | {"tools": [TOOL]} | fields).chat()
    assert {name: getattr(chat, name) for name in expected} == expected


def test_a_named_tool_is_chosen() -> None:
    chosen = {"type": "tool", "name": "weather"}
    use = MessageRequest(**HELLO, tools=[TOOL], tool_choice=chosen).chat().tool_use()
    assert use is not None
    assert use.name == "weather"
    assert use.schemas == {"weather": TOOL["input_schema"]}


IMAGE = {"type": "image", "source": {}}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "image"),
        ({"system": [IMAGE]}, "system", "image"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages",
            "server_",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "role"),
        ({"messages": [{"role": "user"}]}, "messages", "NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages", "tool_use_id"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": []}]}]},
            "messages",
            "input",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "web_search_20250305"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools", "pattern"),
        ({"tools": [TOOL, TOOL]}, "tools", "name of its own"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type", "some"),
        ({"thinking": {"type": "much"}}, "thinking.type", "much"),
        ({"output_config": {"effort": "some"}}, "output_config.effort", "some"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format", "text"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 1}}},
            "output_config.format",
            "schema",
        ),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers", "calls no servers"),
        ({"container": "c"}, "container", "no code"),
        ({"n": 2}, "n", "one message"),
        ({"num_return_sequences": 2}, "num_return_sequences", "one message"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "no tools"),
        ({"logprobs": True}, "logprobs", "no place"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop"),
        ({"best_of": 2}, "best_of", "n answers"),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "stop_sequences", "leave out"),
        ({"max_new_tokens": 9}, "max_new_tokens", "leave out"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(
    api: ApiUnderTest, fields: dict[str, Any], field: str, said: str
) -> None:
    body = api.post(MESSAGES, HELLO | fields, 400)
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]
    assert said in body["error"]["message"]
    assert not api.router.submits


@pytest.mark.parametrize("field", ["tools", "stop_sequences"])
def test_a_list_of_wrong_items_is_one_error(field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        MessageRequest.model_validate(HELLO | {field: [1] * 1000})
    assert caught.value.error_count() == 1


def test_an_empty_message_is_an_empty_text() -> None:
    (message,) = MessageRequest(max_tokens=1, messages=[{"role": "user", "content": []}]).chat().messages
    assert (message.role, message.content) == ("user", "")


# As Mistral's do, but for calls and results.
ALTERNATES = (
    "{% set ns = namespace(num=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.num % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.num = ns.num + 1 %}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_messages_of_one_role_in_a_row_are_one_turn(tmp_path: Path) -> None:
    under_test = service(tmp_path)
    under_test.tokenizer._template_source = ALTERNATES
    turns = [("user", "a"), ("user", [{"type": "text", "text": "b"}]), ("assistant", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in [*turns, ("user", "e")]]
    with under_test.running() as api:
        api.post(CHAT, {"messages": messages}, 400)
        api.post(MESSAGES, HELLO | {"messages": messages})
        prompt = api.tokenizer.decode(ids_of(api.router.submits[-1]))
        assert prompt == "<user>a\nb<assistant>cd<user>e"
        call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        results = [{"type": "tool_result", "tool_use_id": "a", "content": text} for text in "12"]
        turns = [("user", "q"), ("assistant", [call] * 2), ("user", results), ("user", "r"), ("user", "s")]
        messages = [{"role": role, "content": content} for role, content in turns]
        api.post(MESSAGES, HELLO | {"messages": messages})
        prompt = api.tokenizer.decode(ids_of(api.router.submits[-1]))
    assert prompt == "<user>q<assistant><tool>1<tool>2\nr\ns"


def test_an_agents_answer_and_results_may_be_several_messages() -> None:
    calls = [{"type": "tool_use", "id": name, "name": "weather", "input": {}} for name in "ab"]
    answer = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "So."}, *calls]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "text", "text": "Wait."},
        {"type": "text", "text": "No."},
        {"type": "tool_result", "tool_use_id": "b", "content": "2"},
        {"type": "text", "text": "Go on."},
    ]
    whole = [{"role": "assistant", "content": answer}, {"role": "user", "content": results}]
    split = [{"role": turn["role"], "content": [block]} for turn in whole for block in turn["content"]]
    found = [
        MessageRequest(**HELLO | {"messages": HELLO["messages"] + turns}).chat().messages
        for turns in (whole, split)
    ]
    assert found[0] == found[1]
    assert [(one.role, one.content) for one in found[0][1:]] == [
        ("assistant", "So."),
        ("tool", "1"),
        ("user", "Wait.\nNo."),
        ("tool", "2"),
        ("user", "Go on."),
    ]


def test_an_error_names_the_field_as_it_is_called_here() -> None:
    with pytest.raises(InvalidParams) as caught:
        MessageRequest(**HELLO, cache_salt=3).chat()
    assert caught.value.field == "cache_salt"


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("queue_full", 529, "overloaded_error"),
        ("unavailable", 529, "overloaded_error"),
        ("never_fits", 400, "invalid_request_error"),
    ],
)
def test_errors_have_anthropics_form(api: ApiUnderTest, kind: Any, status: int, error: str) -> None:
    api.router.refuse = lambda submit: Refused(submit.request_id, kind, "no")
    found, headers, content = api.send("POST", MESSAGES, HELLO)
    assert found == status
    assert json.loads(content) == {
        "type": "error",
        "error": {"type": error, "message": "prompt is too long: no" if kind == "never_fits" else "no"},
        "request_id": headers["request-id"],
    }
    assert headers["content-length"] == str(len(content))
    assert (headers["retry-after"] is not None) == (status == 529)


def test_other_errors_have_anthropics_form(api: ApiUnderTest) -> None:
    body = api.post(MESSAGES, HELLO | {"model": "x" * 100_000}, 404)
    assert len(body["error"]["message"]) < 1000
    assert body["error"]["type"] == "not_found_error"
    assert api.post(f"{MESSAGES}/batches", {}, 404)["error"]["type"] == "not_found_error"
    assert "max_tokens" in api.post(MESSAGES, {"messages": HELLO["messages"]}, 400)["error"]["message"]
    status, _, content = api.send("POST", MESSAGES, b"{")
    assert (status, json.loads(content)["error"]["type"]) == (400, "invalid_request_error")
    status, _, content = api.send("POST", MESSAGES, b" " * 300_000)
    assert (status, json.loads(content)["error"]["type"]) == (413, "request_too_large")
    assert "error" in api.post("/v1/messagess", {}, 404)  # OpenAI's form, as of any other path


@pytest.mark.parametrize(
    ("reason", "error"),
    [("error", "api_error"), ("lost", "overloaded_error"), ("invalid", "invalid_request_error")],
)
def test_a_stream_that_fails_ends_in_an_error(api: ApiUnderTest, reason: str, error: str) -> None:
    api.router.fail_after, api.router.fail_reason = 2, reason
    last = api.send("POST", MESSAGES, HELLO | {"stream": True})[2].decode().split("\n\n")[-2]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == error


def test_either_header_has_the_key(tmp_path: Path) -> None:
    with service(tmp_path, api_key=(API_KEY,)).running() as api:
        for headers in (
            {"x-api-key": API_KEY},
            {"Authorization": f"Bearer {API_KEY}"},
            {"x-api-key": API_KEY, "Authorization": "Bearer wrong"},
        ):
            assert api.send("POST", MESSAGES, HELLO, headers)[0] == 200
            assert api.send("POST", CHAT, HELLO, headers)[0] == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": f"Bearer {API_KEY}"}):
            status, _, content = api.send("POST", MESSAGES, HELLO, headers)
            assert (status, json.loads(content)["error"]["type"]) == (401, "authentication_error")
