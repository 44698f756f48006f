"""instructor: its modes of tools, JSON, a JSON schema and responses, whole, in parts and as a list."""

from typing import Any

import instructor
from checks import EXAMPLES, LAST, MAX_TOKENS, QUESTION, Forecast, Report, Service, main
from instructor import Mode
from openai import AsyncOpenAI, OpenAI

ASK: Any = [{"role": "user", "content": QUESTION}]


def connect(service: Service, mode: Mode) -> Any:
    client = OpenAI(base_url=service.url, api_key=service.key, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def ask(service: Service, mode: Mode, **fields: Any) -> Any:
    """Returns the one answer: instructor may not ask again."""
    fields = {"max_tokens": MAX_TOKENS, **fields}
    return connect(service, mode).create(
        model=service.model, messages=ASK, response_model=Forecast, max_retries=0, **fields
    )


def tools(service: Service) -> None:
    assert isinstance(ask(service, Mode.TOOLS), Forecast)


def strict_tools(service: Service) -> None:
    assert isinstance(ask(service, Mode.TOOLS_STRICT), Forecast)


def json_schema(service: Service) -> None:
    assert isinstance(ask(service, Mode.JSON_SCHEMA), Forecast)


def tools_by_responses(service: Service) -> None:
    assert isinstance(ask(service, Mode.RESPONSES_TOOLS), Forecast)


def in_parts(service: Service) -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        parts = connect(service, mode).create_partial(
            model=service.model, messages=ASK, response_model=Forecast, max_retries=0, max_tokens=MAX_TOKENS
        )
        *_, last = parts
        Forecast.model_validate(last.model_dump())


def with_the_completion(service: Service) -> None:
    found, done = connect(service, Mode.TOOLS).create_with_completion(
        model=service.model, messages=ASK, response_model=Forecast, max_retries=0, max_tokens=MAX_TOKENS
    )
    assert isinstance(found, Forecast)
    assert done.usage.completion_tokens > 0


async def asynchronously(service: Service) -> None:
    async with AsyncOpenAI(base_url=service.url, api_key=service.key, max_retries=0) as client:
        found = await instructor.from_openai(client, mode=Mode.TOOLS).create(
            model=service.model, messages=ASK, response_model=Forecast, max_retries=0, max_tokens=MAX_TOKENS
        )
    assert isinstance(found, Forecast)


def report(service: Service, mode: Mode) -> None:
    found = connect(service, mode).create(
        model=service.model,
        messages=[*EXAMPLES, {"role": "user", "content": LAST}],
        response_model=Report,
        max_retries=0,
        max_tokens=100,
        temperature=0,
    )
    assert isinstance(found, Report)


def json_of_free_texts(service: Service) -> None:
    report(service, Mode.JSON)


def tools_of_free_texts(service: Service) -> None:
    report(service, Mode.TOOLS)


def json_schema_of_free_texts(service: Service) -> None:
    report(service, Mode.JSON_SCHEMA)


main(
    {
        "tiny": [
            tools,
            strict_tools,
            json_schema,
            tools_by_responses,
            in_parts,
            with_the_completion,
            asynchronously,
        ],
        "default": [json_of_free_texts, tools_of_free_texts, json_schema_of_free_texts],
    }
)
