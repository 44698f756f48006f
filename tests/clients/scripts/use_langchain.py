"""langchain-openai: `bind_tools` and `with_structured_output` by each method, by chats and by responses."""

from typing import Any

from checks import (
    ANSWERS,
    CHOICE,
    EXAMPLES,
    FORECAST_SCHEMA,
    LAST,
    MAX_TOKENS,
    QUESTION,
    RESULT,
    City,
    Closed,
    Forecast,
    Report,
    Service,
    main,
)
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool(args_schema=City)
def weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"{city}: {RESULT}"


@tool(args_schema=Closed)
def clock() -> str:
    """Returns the time."""
    return "noon"


def connect(service: Service, **fields: Any) -> ChatOpenAI:
    fields = {"max_tokens": MAX_TOKENS, **fields}
    return ChatOpenAI(base_url=service.url, api_key=service.key, model=service.model, max_retries=0, **fields)


def bind(model: ChatOpenAI, tool_choice: str, **fields: Any) -> Any:
    """Returns the model with both functions. Their schemas allow further properties unless they are strict."""
    return model.bind_tools([weather, clock], tool_choice=tool_choice, strict=True, **fields)


def assert_called(message: AIMessage) -> None:
    (call,) = message.tool_calls
    assert not message.invalid_tool_calls
    assert call["name"] == "weather"
    assert call["id"]
    City.model_validate(call["args"])


def bind_tools(service: Service) -> None:
    assert_called(bind(connect(service), "weather").invoke(QUESTION))


def bind_tools_of_which_any_is_called(service: Service) -> None:
    bound = bind(connect(service), "any", parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] in ("weather", "clock")
    assert call["args"].keys() == ({"city"} if call["name"] == "weather" else set())


def bind_tools_streamed(service: Service) -> None:
    chunks = list(bind(connect(service), "weather").stream(QUESTION))
    assert len(chunks) > 2
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert_called(whole)


async def bind_tools_asynchronously(service: Service) -> None:
    assert_called(await bind(connect(service), "weather").ainvoke(QUESTION))


def two_turns(service: Service) -> None:
    model = connect(service)
    first = bind(model, "weather").invoke(QUESTION)
    (call,) = first.tool_calls
    result = weather.invoke(call)
    assert type(result) is ToolMessage
    bound = model.bind_tools([weather], tool_choice="none")
    second = bound.invoke([HumanMessage(QUESTION), first, result], extra_body=CHOICE)
    assert second.content in ANSWERS
    assert not second.tool_calls


def two_turns_by_responses(service: Service) -> None:
    model = connect(service, use_responses_api=True)
    first = bind(model, "weather").invoke(QUESTION)
    assert_called(first)
    result = weather.invoke(first.tool_calls[0])
    bound = model.bind_tools([weather], tool_choice="none")
    second = bound.invoke([HumanMessage(QUESTION), first, result], extra_body=CHOICE)
    assert second.text in ANSWERS


def structured_output_by_a_function(service: Service) -> None:
    model = connect(service).with_structured_output(Forecast, method="function_calling")
    assert type(model.invoke(QUESTION)) is Forecast


def structured_output_by_a_schema(service: Service) -> None:
    model = connect(service).with_structured_output(Forecast, method="json_schema")
    assert type(model.invoke(QUESTION)) is Forecast


def structured_output_that_is_strict_and_raw(service: Service) -> None:
    for method in ("function_calling", "json_schema"):
        model = connect(service).with_structured_output(
            Forecast, method=method, strict=True, include_raw=True
        )
        found = model.invoke(QUESTION)
        assert type(found["parsed"]) is Forecast
        assert type(found["raw"]) is AIMessage
        assert found["parsing_error"] is None


def structured_output_streamed(service: Service) -> None:
    for method in ("function_calling", "json_schema"):
        model = connect(service).with_structured_output(Forecast, method=method)
        assert type(list(model.stream(QUESTION))[-1]) is Forecast


def structured_output_by_responses(service: Service) -> None:
    for method in ("function_calling", "json_schema"):
        model = connect(service, use_responses_api=True).with_structured_output(Forecast, method=method)
        assert type(model.invoke(QUESTION)) is Forecast


def structured_output_without_a_class(service: Service) -> None:
    schema = {"title": "forecast", "description": "A forecast.", **FORECAST_SCHEMA}
    found = connect(service).with_structured_output(schema, method="json_schema").invoke(QUESTION)
    assert found.keys() == {"sky", "degrees"}


def tools_that_are_not_strict(service: Service) -> None:
    model = connect(service, max_tokens=100, temperature=0)
    message = model.bind_tools([weather, clock], tool_choice="weather").invoke("Is it raining in Oslo?")
    assert_called(message)
    assert message.tool_calls[0]["args"] == {"city": "Oslo"}


def classes_of_free_texts(service: Service) -> None:
    for method in ("function_calling", "json_schema"):
        model = connect(service, max_tokens=100, temperature=0).with_structured_output(Report, method=method)
        assert type(model.invoke([*EXAMPLES, {"role": "user", "content": LAST}])) is Report


def structured_output_of_any_object(service: Service) -> None:
    model = connect(service, max_tokens=100, temperature=0).with_structured_output(Report, method="json_mode")
    assert type(model.invoke([*EXAMPLES, {"role": "user", "content": LAST}])) is Report


main(
    {
        "tiny": [
            bind_tools,
            bind_tools_of_which_any_is_called,
            bind_tools_streamed,
            bind_tools_asynchronously,
            two_turns,
            two_turns_by_responses,
            structured_output_by_a_function,
            structured_output_by_a_schema,
            structured_output_that_is_strict_and_raw,
            structured_output_streamed,
            structured_output_by_responses,
            structured_output_without_a_class,
        ],
        "default": [tools_that_are_not_strict, classes_of_free_texts, structured_output_of_any_object],
    }
)
