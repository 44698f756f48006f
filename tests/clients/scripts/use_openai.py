"""OpenAI's own client: `parse` and `stream` with a class, tools and results, by chats and by responses."""

import json
from typing import Any

from checks import (
    ANSWERS,
    CHOICE,
    CLOCK,
    EXAMPLES,
    FORECAST_SCHEMA,
    LAST,
    MAX_TOKENS,
    QUESTION,
    RESULT,
    SEARCH,
    TURNS,
    WEATHER,
    City,
    Forecast,
    Report,
    Service,
    TenTurns,
    main,
)
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool

ASK: Any = [{"role": "user", "content": QUESTION}]
RESPONSES_WEATHER: Any = {"type": "function", "strict": True, **WEATHER["function"]}


def connect(service: Service) -> OpenAI:
    return OpenAI(base_url=service.url, api_key=service.key, max_retries=0)


def chat_parse(service: Service) -> None:
    done = connect(service).chat.completions.parse(
        model=service.model, messages=ASK, response_format=Forecast, max_tokens=MAX_TOKENS
    )
    message = done.choices[0].message
    assert type(message.parsed) is Forecast
    assert message.parsed == Forecast.model_validate_json(message.content or "")


def chat_parse_of_tools(service: Service) -> None:
    done = connect(service).chat.completions.parse(
        model=service.model,
        messages=ASK,
        tools=[pydantic_function_tool(Forecast, name="forecast"), pydantic_function_tool(City)],
        tool_choice="required",
        max_tokens=MAX_TOKENS,
        parallel_tool_calls=False,
    )
    (choice,) = done.choices
    (call,) = choice.message.tool_calls or ()
    expected = {"forecast": Forecast, "City": City}[call.function.name]
    assert type(call.function.parsed_arguments) is expected
    assert choice.finish_reason in ("tool_calls", "stop")


def chat_stream_of_a_class(service: Service) -> None:
    with connect(service).chat.completions.stream(
        model=service.model, messages=ASK, response_format=Forecast, max_tokens=MAX_TOKENS
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds
    assert type(message.parsed) is Forecast


def chat_stream_of_tools(service: Service) -> None:
    with connect(service).chat.completions.stream(
        model=service.model,
        messages=ASK,
        tools=[pydantic_function_tool(Forecast, name="forecast")],
        tool_choice={"type": "function", "function": {"name": "forecast"}},
        max_tokens=MAX_TOKENS,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls or ()
    assert type(call.function.parsed_arguments) is Forecast
    assert [event.name for event in done] == ["forecast"]


def chat_in_two_turns(service: Service) -> None:
    client = connect(service)
    fields: Any = {"model": service.model, "tools": [WEATHER, CLOCK], "max_tokens": MAX_TOKENS}
    done = client.chat.completions.create(messages=ASK, tool_choice="required", **fields)
    message = done.choices[0].message
    assert message.tool_calls
    assert all(call.function.name in ("weather", "clock") for call in message.tool_calls)
    for call in message.tool_calls:
        assert json.loads(call.function.arguments).keys() == (
            {"city"} if call.function.name == "weather" else set()
        )
    results = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls]
    messages: Any = [*ASK, message, *results]
    second = client.chat.completions.create(
        messages=messages, tool_choice="none", extra_body=CHOICE, **fields
    )
    assert second.choices[0].message.content in ANSWERS


def responses_parse(service: Service) -> None:
    done = connect(service).responses.parse(
        model=service.model, input=QUESTION, text_format=Forecast, max_output_tokens=MAX_TOKENS
    )
    assert done.status == "completed"
    assert type(done.output_parsed) is Forecast


def responses_stream_of_a_class(service: Service) -> None:
    with connect(service).responses.stream(
        model=service.model, input=QUESTION, text_format=Forecast, max_output_tokens=MAX_TOKENS
    ) as stream:
        kinds = [event.type for event in stream]
        done = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert type(done.output_parsed) is Forecast


def responses_in_two_turns(service: Service) -> None:
    client = connect(service)
    fields: Any = {"model": service.model, "tools": [RESPONSES_WEATHER], "max_output_tokens": MAX_TOKENS}
    first = client.responses.create(input=ASK, tool_choice={"type": "function", "name": "weather"}, **fields)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "weather")
    City.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    conversation: Any = [*ASK, *first.output, result]
    second = client.responses.create(input=conversation, tool_choice="none", extra_body=CHOICE, **fields)
    assert second.output_text in ANSWERS


def responses_stream_of_tools(service: Service) -> None:
    with connect(service).responses.stream(
        model=service.model,
        input=QUESTION,
        tools=[RESPONSES_WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=MAX_TOKENS,
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert "".join(pieces) == call.arguments
    City.model_validate_json(call.arguments)


def a_schema_without_a_class(service: Service) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": FORECAST_SCHEMA}}
    done = connect(service).chat.completions.create(
        model=service.model, messages=ASK, response_format=form, max_tokens=MAX_TOKENS
    )
    found = json.loads(done.choices[0].message.content or "")
    assert found.keys() == {"sky", "degrees"}
    assert -9 <= found["degrees"] <= 9


async def parse_with_the_asynchronous_client(service: Service) -> None:
    async with AsyncOpenAI(base_url=service.url, api_key=service.key, max_retries=0) as client:
        done = await client.chat.completions.parse(
            model=service.model, messages=ASK, response_format=Forecast, max_tokens=MAX_TOKENS
        )
    assert type(done.choices[0].message.parsed) is Forecast


def ten_turns_hit_all_but_the_newest(service: Service) -> None:
    client, turns = connect(service), TenTurns()
    messages: Any = [{"role": "user", "content": turns.question}]
    for number, choice in enumerate(TURNS):
        fields: Any = {"model": service.model, "temperature": 0, "max_tokens": 200, "tool_choice": choice}
        fields |= {"messages": messages, "tools": [SEARCH, WEATHER], "parallel_tool_calls": False}
        if number % 2:
            options = {"include_usage": True}
            with client.chat.completions.stream(**fields, stream_options=options) as stream:
                list(stream)
                done: Any = stream.get_final_completion()
        else:
            done = client.chat.completions.create(**fields)
        turns.check(done.usage)
        message = done.choices[0].message
        (call,) = message.tool_calls
        json.loads(call.function.arguments)
        called = {"name": call.function.name, "arguments": call.function.arguments}
        made = [{"id": call.id, "type": "function", "function": called}]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": made})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{number}: {RESULT}"})


def a_class_of_free_texts(service: Service) -> None:
    messages: Any = [*EXAMPLES, {"role": "user", "content": LAST}]
    fields: Any = {"model": service.model, "temperature": 0}
    client = connect(service)
    chat = client.chat.completions.parse(messages=messages, response_format=Report, max_tokens=100, **fields)
    assert type(chat.choices[0].message.parsed) is Report
    response = client.responses.parse(input=messages, text_format=Report, max_output_tokens=100, **fields)
    assert response.output_parsed == chat.choices[0].message.parsed


def any_object(service: Service) -> None:
    messages: Any = [*EXAMPLES, {"role": "user", "content": LAST}]
    done = connect(service).chat.completions.create(
        model=service.model,
        messages=messages,
        response_format={"type": "json_object"},
        max_tokens=100,
        temperature=0,
    )
    Report.model_validate_json(done.choices[0].message.content or "")


main(
    {
        "tiny": [
            chat_parse,
            chat_parse_of_tools,
            chat_stream_of_a_class,
            chat_stream_of_tools,
            chat_in_two_turns,
            responses_parse,
            responses_stream_of_a_class,
            responses_in_two_turns,
            responses_stream_of_tools,
            a_schema_without_a_class,
            parse_with_the_asynchronous_client,
        ],
        "default": [a_class_of_free_texts, any_object],
        "bytes": [ten_turns_hit_all_but_the_newest],
    }
)
