"""litellm: `response_format` as a class, a schema and any object, tools, and responses, whole and streamed; a
prompt over the context is its ContextWindowExceededError, which falls back on another model."""

import json
import os
from functools import partial
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import waits for a file of prices from GitHub

import litellm
from checks import (
    ANSWERS,
    CHOICE,
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

PROVIDERS = ("openai", "hosted_vllm")
ASK: Any = [{"role": "user", "content": QUESTION}]
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "forecast", "schema": FORECAST_SCHEMA, "strict": True},
}


def fields_of(service: Service, provider: str) -> dict[str, Any]:
    return {
        "model": f"{provider}/{service.model}",
        "api_base": service.url,
        "api_key": service.key,
        "max_tokens": MAX_TOKENS,
        "num_retries": 0,
    }


def a_class(service: Service) -> None:
    for provider in PROVIDERS:
        done = litellm.completion(messages=ASK, response_format=Forecast, **fields_of(service, provider))
        Forecast.model_validate_json(done.choices[0].message.content)


def a_schema(service: Service) -> None:
    for provider in PROVIDERS:
        done = litellm.completion(messages=ASK, response_format=SCHEMA, **fields_of(service, provider))
        assert json.loads(done.choices[0].message.content).keys() == {"sky", "degrees"}


def streamed(service: Service) -> None:
    for provider in PROVIDERS:
        chunks = litellm.completion(
            messages=ASK, response_format=Forecast, stream=True, **fields_of(service, provider)
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert len(pieces) > 2
        Forecast.model_validate_json("".join(pieces))


async def asynchronously(service: Service) -> None:
    done = await litellm.acompletion(messages=ASK, response_format=Forecast, **fields_of(service, "openai"))
    Forecast.model_validate_json(done.choices[0].message.content)


def checked_by_litellm(service: Service) -> None:
    litellm.enable_json_schema_validation = True
    try:
        done = litellm.completion(messages=ASK, response_format=Forecast, **fields_of(service, "openai"))
    finally:
        litellm.enable_json_schema_validation = False
    Forecast.model_validate_json(done.choices[0].message.content)


def by_responses(service: Service) -> None:
    fields = fields_of(service, "openai")
    done = litellm.responses(
        input=QUESTION,
        text_format=Forecast,
        max_output_tokens=fields.pop("max_tokens"),
        **fields,
    )
    (message,) = done.output
    Forecast.model_validate_json(message.content[0].text)


def by_anthropics_route(service: Service) -> None:
    fields = fields_of(service, "anthropic") | {
        "api_base": service.url.removesuffix("/v1"),
        "tools": [WEATHER],
    }
    chosen = {"type": "function", "function": {"name": "weather"}}
    whole = litellm.completion(messages=ASK, tool_choice=chosen, **fields)
    chunks = litellm.completion(messages=ASK, tool_choice=chosen, stream=True, **fields)
    for done in (whole, litellm.stream_chunk_builder(list(chunks))):
        message = done.choices[0].message
        (call,) = message.tool_calls
        City.model_validate_json(call.function.arguments)
        assert done.choices[0].finish_reason == "tool_calls"
        assert done.usage.prompt_tokens > done.usage.completion_tokens > 0
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    turns = [*ASK, message, result]
    second = litellm.completion(messages=turns, tool_choice="none", **fields | {"max_tokens": 5})
    assert second.choices[0].message.content
    assert second.usage.completion_tokens == 5
    long = [{"role": "user", "content": "long " * 10_000}]
    is_over = False
    try:
        litellm.completion(messages=long, **fields)
    except litellm.ContextWindowExceededError:
        is_over = True
    assert is_over


def over_the_context(service: Service) -> None:
    text = "long " * 10_000
    long = [{"role": "user", "content": text}]
    for provider in PROVIDERS:
        fields = fields_of(service, provider)
        del fields["max_tokens"]
        for call in (
            partial(litellm.completion, messages=long),
            partial(litellm.completion, messages=long, stream=True),
            partial(litellm.completion, messages=ASK, max_tokens=100_000),
            partial(litellm.text_completion, prompt=text),
            partial(litellm.responses, input=text),
        ):
            message = ""
            try:
                call(**fields)
            except litellm.ContextWindowExceededError as error:
                message = str(error)
            assert "maximum context length is 8192 tokens" in message


def a_fallback_for_long_prompts(service: Service) -> None:
    def deployment(name: str, base: str) -> dict[str, Any]:
        params = {"model": f"openai/{service.model}", "api_base": base, "api_key": service.key}
        return {"model_name": name, "litellm_params": params | {"max_retries": 0}}

    router = litellm.Router(
        model_list=[
            deployment("short", service.url),
            {
                "model_name": "long",
                "litellm_params": {"model": "openai/none", "api_key": "k", "mock_response": "yes"},
            },
        ],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    done = router.completion("short", messages=[{"role": "user", "content": "long " * 10_000}])
    assert done.choices[0].message.content == "yes"


def tools(service: Service) -> None:
    for provider in PROVIDERS:
        fields = fields_of(service, provider) | {"tools": [WEATHER]}
        chosen = {"type": "function", "function": {"name": "weather"}}
        message = litellm.completion(messages=ASK, tool_choice=chosen, **fields).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "weather"
        City.model_validate_json(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        messages = [*ASK, message, result]
        second = litellm.completion(messages=messages, tool_choice="none", extra_body=CHOICE, **fields)
        assert second.choices[0].message.content in ANSWERS


def tools_streamed(service: Service) -> None:
    for provider in PROVIDERS:
        chunks = litellm.completion(
            messages=ASK,
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            stream=True,
            **fields_of(service, provider),
        )
        message = litellm.stream_chunk_builder(list(chunks)).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "weather"
        City.model_validate_json(call.function.arguments)


def ten_turns_hit_all_but_the_newest(service: Service) -> None:
    for provider in PROVIDERS:
        turns = TenTurns()
        fields = fields_of(service, provider) | {"max_tokens": 200, "temperature": 0}
        messages: Any = [{"role": "user", "content": turns.question}]
        for number, choice in enumerate(TURNS):
            done = litellm.completion(
                messages=messages,
                tools=[SEARCH, WEATHER],
                tool_choice=choice,
                parallel_tool_calls=False,
                **fields,
            )
            turns.check(done.usage)
            message = done.choices[0].message
            (call,) = message.tool_calls
            messages += [
                message,
                {"role": "tool", "tool_call_id": call.id, "content": f"{number}: {RESULT}"},
            ]


def a_class_of_free_texts(service: Service) -> None:
    messages = [*EXAMPLES, {"role": "user", "content": LAST}]
    fields = fields_of(service, "openai") | {"max_tokens": 100, "temperature": 0}
    done = litellm.completion(messages=messages, response_format=Report, **fields)
    Report.model_validate_json(done.choices[0].message.content)


def any_object(service: Service) -> None:
    messages = [*EXAMPLES, {"role": "user", "content": LAST}]
    for provider in PROVIDERS:
        fields = fields_of(service, provider) | {"max_tokens": 100, "temperature": 0}
        done = litellm.completion(messages=messages, response_format={"type": "json_object"}, **fields)
        Report.model_validate_json(done.choices[0].message.content)


main(
    {
        "tiny": [
            a_class,
            a_schema,
            streamed,
            asynchronously,
            checked_by_litellm,
            by_responses,
            tools,
            tools_streamed,
            by_anthropics_route,
            over_the_context,
            a_fallback_for_long_prompts,
        ],
        "default": [a_class_of_free_texts, any_object],
        "bytes": [ten_turns_hit_all_but_the_newest],
    }
)
