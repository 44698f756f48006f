"""POST /v1/responses over a fake router: whole, streamed, and by OpenAI's own client."""

import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from lightkv.router.api.answers.response_writer import ResponseWriter
from lightkv.router.api.requests.responses import ResponseRequest
from lightkv.router.sampling_params import InvalidParams
from tests.support.fake_router import CHAT, MODEL, TEXT, ApiUnderTest, error_of, ids_of

RESPONSES = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
SCHEMA = {"name": "s", "schema": {"type": "object"}, "strict": True}


@pytest.fixture
def client(api: ApiUnderTest) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0)


def events_of(content: bytes) -> list[dict[str, Any]]:
    """Returns the events of a stream, whose names are those of their data."""
    events = []
    for block in content.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_a_response_has_openais_form(api: ApiUnderTest) -> None:
    body = api.post(RESPONSES, {"model": MODEL, "input": "Hello!", "max_output_tokens": 5})
    assert (body["object"], body["status"], body["store"], body["error"]) == (
        "response",
        "incomplete",
        False,
        None,
    )
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    (submit,) = api.router.submits
    num_prompt = len(ids_of(submit))
    assert body["usage"]["input_tokens"] == num_prompt
    openai.types.responses.Response.model_validate(body)  # all fields that the client's type requires
    assert (body["usage"]["output_tokens"], body["usage"]["total_tokens"]) == (5, num_prompt + 5)


def test_the_prompt_is_that_of_the_same_chat(api: ApiUnderTest) -> None:
    api.post(
        RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
                },
                {"role": "user", "content": "More"},
            ],
            "max_output_tokens": 2,
            "temperature": 0,
            "top_p": 0.5,
            "seed": 3,
        },
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "More"},
    ]
    chat = {"messages": messages, "max_tokens": 2, "temperature": 0, "top_p": 0.5, "seed": 3}
    api.post(CHAT, chat)
    response, chat_submit = api.router.submits
    assert ids_of(response) == ids_of(chat_submit)
    assert response.params == chat_submit.params


def test_the_events_come_in_openais_order(api: ApiUnderTest) -> None:
    status, headers, content = api.send(
        "POST", RESPONSES, {"input": "Hello!", "max_output_tokens": 5, "stream": True}
    )
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = events_of(content)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    after = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*before, *["output_text.delta"] * len(deltas), *after]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in deltas) == TEXT
    assert events[-4]["text"] == TEXT
    (item,) = events[-1]["response"]["output"]
    assert item == events[-2]["item"]
    assert {event["item_id"] for event in deltas} == {item["id"]}
    assert events[-1]["response"]["usage"]["output_tokens"] == 5
    assert events[0]["response"]["id"] == events[-1]["response"]["id"]


@pytest.mark.parametrize(
    ("reason", "status", "code"), [("error", 500, "server_error"), ("invalid", 400, "invalid_prompt")]
)
def test_an_answer_that_fails_ends_in_response_failed(
    api: ApiUnderTest, reason: str, status: int, code: str
) -> None:
    api.router.fail_after, api.router.fail_reason = 2, reason
    asked = {"input": "Hello!", "max_output_tokens": 5}
    events = events_of(api.send("POST", RESPONSES, asked | {"stream": True})[2])
    assert events[-1]["type"] == "response.failed"
    assert "out of luck" in events[-1]["response"]["error"]["message"]
    assert events[-1]["response"]["error"]["code"] == code
    openai.types.responses.ResponseError.model_validate(events[-1]["response"]["error"])
    assert api.send("POST", RESPONSES, asked)[0] == status


def test_openais_client_reads_both(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=5)
    assert response.output_text == TEXT
    with client.responses.stream(model=MODEL, input="Hello!", max_output_tokens=5) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(pieces) == TEXT


def test_log_probabilities_are_included(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input="Hello!",
        max_output_tokens=5,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    logprobs = response.output[0].content[0].logprobs
    assert [len(one.top_logprobs) for one in logprobs] == [2] * 5
    assert "".join(one.token for one in logprobs) == TEXT


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the service keeps no responses"),
        ({"background": True}, "background", "false"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"n": 2}, "n", "one answer"),
        ({"num_return_sequences": 2}, "num_return_sequences", "one answer"),
        ({"max_tokens": 3}, "max_tokens", "max_output_tokens"),
        ({"max_new_tokens": 3}, "max_new_tokens", "max_output_tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "no place"),
        ({"return_token_ids": True}, "return_token_ids", "no place"),
        ({"top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"tools": [{"type": "web_search"}]}, "tools", "function"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input", "a message of role"),
        ({"input": [{"role": "user"}]}, "input", "NoneType"),
        ({"input": [{"type": "function_call", "call_id": 3}]}, "input", "call_id"),
        ({"stream_options": {}}, "stream_options", "together with stream"),
        ({"text": {"format": 3}}, "text.format", "an object"),
        (
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "foo"}}}},
            "text.format",
            "Invalid type",
        ),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input", "a list of parts"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    api: ApiUnderTest, fields: dict[str, Any], param: str, message: str
) -> None:
    status, _, content = api.send("POST", RESPONSES, {"input": "Hello!"} | fields)
    assert status == 400
    assert error_of(content)["param"] == param
    assert message in error_of(content)["message"]
    assert not api.router.submits


def test_a_response_is_never_kept(api: ApiUnderTest) -> None:
    body = api.post(RESPONSES, {"input": "Hello!", "max_output_tokens": 1, "store": True})
    assert body["store"] is False
    assert api.send("GET", f"{RESPONSES}/{body['id']}")[0] == 404


def test_half_a_surrogate_pair_in_what_a_response_repeats_is_replaced(api: ApiUnderTest) -> None:
    fields = {
        "metadata": {"a": "\ud800"},
        "text": {"format": {"type": "text"}, "b": ["\ud800"]},
        "tools": [TOOL | {"description": "\ud800"}],
        "tool_choice": "none",
    }
    body = api.post(RESPONSES, {"input": "Hello!", "max_output_tokens": 1, **fields})
    assert body["metadata"] == {"a": "\ufffd"}
    assert body["text"]["b"] == ["\ufffd"]
    assert body["tools"][0]["description"] == "\ufffd"


def test_harmless_fields_are_accepted(api: ApiUnderTest) -> None:
    harmless = {
        "store": False,
        "previous_response_id": None,
        "metadata": {"a": "b"},
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "reasoning": {},
        "include": ["reasoning.encrypted_content"],
        "user": "u",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    body = api.post(RESPONSES, {"input": "Hello!", "max_output_tokens": 1} | harmless)
    assert body["metadata"] == {"a": "b"}


def test_tools_and_forms_become_fields_of_the_chat() -> None:
    request = ResponseRequest.model_validate(
        {
            "input": [
                {"role": "developer", "content": "d"},
                {"role": "user", "content": "u"},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "r"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {
                    "type": "function_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_text", "text": "2"}],
                },
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {
                "format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
            },
        }
    )
    chat = request.chat().model_dump(exclude_none=True)
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for name in ("c1", "c2")
    ]
    assert chat["messages"] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "reasoning_content": "r", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]
    function = {name: TOOL[name] for name in ("name", "description", "parameters", "strict")}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": SCHEMA}


def test_a_choice_without_tools_is_refused() -> None:
    with pytest.raises(InvalidParams, match="tool_choice"):
        ResponseRequest.model_validate({"input": "a", "tool_choice": "required"}).chat()


class StubWriter:
    """Writes the chunks that a test gives, as `ChatWriter` does for answers with reasoning and calls."""

    def __init__(self, deltas: list[dict[str, Any]]) -> None:
        self._deltas = deltas

    def chunks(self, delta: Any) -> list[Any]:
        reasons = [*[None] * (len(self._deltas) - 1), "tool_calls"]
        choices = [
            {"delta": one, "logprobs": None, "finish_reason": reason}
            for one, reason in zip(self._deltas, reasons, strict=True)
        ]
        return [{"choices": [choice]} for choice in choices]

    def choice(self, answer: Any) -> Any:
        calls = [{"id": name, "function": {"name": "f", "arguments": '{"a": 1}'}} for name in ("c1", "c2")]
        message = {"content": None, "reasoning_content": "I think", "tool_calls": calls}
        return {"message": message, "logprobs": None, "finish_reason": "tool_calls"}


def test_reasoning_and_calls_become_items() -> None:
    usage = {"num_prompt_tokens": 3, "num_completion_tokens": 4, "num_cached_tokens": None, "cut_to": None}
    generation: Any = SimpleNamespace(answers=[SimpleNamespace(num_interruptions=0)], **usage)
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "I "},
        {"reasoning_content": "think"},
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {},
    ]
    stub: Any = StubWriter(deltas)
    writer = ResponseWriter(ResponseRequest(input="a").repeated({}), MODEL, stub)
    stream = writer.events(generation)
    gained: Any = SimpleNamespace(text="x", scored=[], finish_reason="stop")
    events = events_of(b"".join([*stream.begin(), *stream.delta(gained), *stream.end()]))
    kinds = [event["type"].removeprefix("response.") for event in events]
    arguments = "function_call_arguments"
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *(
            "output_item.added",
            f"{arguments}.delta",
            f"{arguments}.delta",
            f"{arguments}.done",
            "output_item.done",
        ),
        *("output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"),
        "completed",
    ]
    whole = json.loads(b"".join(writer.whole(generation)))
    for response in (events[-1]["response"], whole):
        reasoning, first, second = response["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "I think"}]
        assert [(call["call_id"], call["name"], call["arguments"]) for call in (first, second)] == [
            ("c1", "f", '{"a": 1}'),
            ("c2", "f", '{"a": 1}'),
        ]
        assert response["status"] == "completed"
    again = ResponseRequest(input=[*whole["output"], {"role": "user", "content": "u"}]).messages()
    assert [message["role"] for message in again] == ["assistant", "user"]
    assert len(again[0]["tool_calls"]) == 2
