"""pydantic-ai: classes as output, by a tool and by a schema, and a function, by chats and by responses."""

from typing import Any

from checks import EXAMPLES, LAST, MAX_TOKENS, QUESTION, RESULT, City, Forecast, Report, Service, main
from pydantic_ai import Agent, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

MODELS = {"chats": OpenAIChatModel, "responses": OpenAIResponsesModel}


def agent_of(service: Service, api: str, output: Any, **settings: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=service.url, api_key=service.key)
    model = MODELS[api](service.model, provider=provider)
    settings = {"max_tokens": MAX_TOKENS, "parallel_tool_calls": False, **settings}
    return Agent(model, output_type=output, model_settings=settings, retries=0)


def a_class_by_chats(service: Service) -> None:
    for output in (Forecast, ToolOutput(Forecast, strict=True), NativeOutput(Forecast)):
        assert type(agent_of(service, "chats", output).run_sync(QUESTION).output) is Forecast


def a_class_by_responses(service: Service) -> None:
    for output in (Forecast, ToolOutput(Forecast, strict=True), NativeOutput(Forecast)):
        assert type(agent_of(service, "responses", output).run_sync(QUESTION).output) is Forecast


async def streamed(service: Service) -> None:
    for api in MODELS:
        for output in (Forecast, NativeOutput(Forecast)):
            async with agent_of(service, api, output).run_stream(QUESTION) as result:
                assert type(await result.get_output()) is Forecast


def one_of_two_classes(service: Service) -> None:
    found = agent_of(service, "chats", [Forecast, City]).run_sync(QUESTION).output
    assert type(found) in (Forecast, City)


def call_a_function(service: Service, api: str) -> None:
    """The first step has to call the function, the second has to give the output."""
    asked: list[City] = []

    def settings(context: RunContext[None]) -> Any:
        name = "weather" if context.run_step <= 1 else "final_result"
        return {"max_tokens": MAX_TOKENS, "parallel_tool_calls": False, "tool_choice": [name]}

    agent = agent_of(service, api, Forecast)
    agent.model_settings = settings

    @agent.tool_plain
    def weather(city: City) -> str:
        """Returns the weather of a city."""
        asked.append(city)
        return RESULT

    result = agent.run_sync(QUESTION)
    assert type(result.output) is Forecast
    assert len(asked) == 1
    assert type(asked[0]) is City
    again = agent.run_sync(QUESTION, message_history=result.all_messages())
    assert type(again.output) is Forecast


def a_function_by_chats(service: Service) -> None:
    call_a_function(service, "chats")


def a_function_by_responses(service: Service) -> None:
    call_a_function(service, "responses")


def report(service: Service, output: Any) -> None:
    history: list[Any] = []
    for message in EXAMPLES:
        if message["role"] == "user":
            history.append(ModelRequest([UserPromptPart(message["content"])]))
        else:
            history.append(ModelResponse([TextPart(message["content"])]))
    agent = agent_of(service, "chats", output, max_tokens=100, temperature=0)
    assert type(agent.run_sync(LAST, message_history=history).output) is Report


def a_class_of_free_texts(service: Service) -> None:
    report(service, Report)
    report(service, NativeOutput(Report))


def any_object(service: Service) -> None:
    report(service, PromptedOutput(Report))


main(
    {
        "tiny": [
            a_class_by_chats,
            a_class_by_responses,
            streamed,
            one_of_two_classes,
            a_function_by_chats,
            a_function_by_responses,
        ],
        "default": [a_class_of_free_texts, any_object],
    }
)
