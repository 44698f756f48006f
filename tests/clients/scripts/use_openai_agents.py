"""openai-agents: agents with a function, run to their end, by chats and by responses."""

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import ANSWERS, CHOICE, MAX_TOKENS, QUESTION, RESULT, City, Forecast, Service, main
from openai import AsyncOpenAI

MAX_TURNS = 50  # after its first turn a model of random weights calls again as often as it answers
MODELS = {"chats": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Desk:
    """An agent and the function that it calls; `asked` has the arguments of each call."""

    def __init__(self, service: Service, api: str, tool_choice: str = "weather", **options: Any) -> None:
        """`options`: those of the agent, and `settings`, which are further settings of the model."""
        self.asked: list[City] = []

        @function_tool
        def weather(where: City) -> str:
            """Returns the weather of a city."""
            self.asked.append(where)
            return RESULT

        self.client = AsyncOpenAI(base_url=service.url, api_key=service.key, max_retries=0)
        settings = {
            "max_tokens": MAX_TOKENS,
            "tool_choice": tool_choice,
            "parallel_tool_calls": False,
            **options.pop("settings", {}),
        }
        self.agent = Agent(
            name="desk",
            instructions="Be brief.",
            model=MODELS[api](model=service.model, openai_client=self.client),
            model_settings=ModelSettings(**settings),
            tools=[weather],
            **options,
        )

    async def __aenter__(self) -> "Desk":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.close()


async def run(service: Service, api: str) -> None:
    """The function is called, as the first turn has to, and a later turn ends with a text."""
    for tool_choice in ("required", "weather"):
        async with Desk(service, api, tool_choice, settings={"extra_body": CHOICE}) as desk:
            result = await Runner.run(desk.agent, QUESTION, max_turns=MAX_TURNS)
            num_calls = len(desk.asked)
            assert num_calls >= 1
            assert result.final_output in ANSWERS
            calls = ["tool_call_item", "tool_call_output_item"] * num_calls
            assert [item.type for item in result.new_items] == [*calls, "message_output_item"]
            again = [*result.to_input_list(), {"role": "user", "content": QUESTION}]
            result = await Runner.run(desk.agent, again, max_turns=MAX_TURNS)
            assert result.final_output in ANSWERS
            assert len(desk.asked) > num_calls


async def run_to_a_class(service: Service, api: str) -> None:
    async with Desk(service, api, output_type=Forecast) as desk:
        result = await Runner.run(desk.agent, QUESTION, max_turns=MAX_TURNS)
    assert type(result.final_output) is Forecast
    assert desk.asked


async def run_streamed(service: Service, api: str) -> None:
    async with Desk(service, api, output_type=Forecast) as desk:
        result = Runner.run_streamed(desk.agent, QUESTION, max_turns=MAX_TURNS)
        events = [event async for event in result.stream_events()]
    names = [event.name for event in events if event.type == "run_item_stream_event"]
    assert names == [*["tool_called", "tool_output"] * len(desk.asked), "message_output_created"]
    assert type(result.final_output) is Forecast
    assert desk.asked


async def run_by_chats(service: Service) -> None:
    await run(service, "chats")


async def run_by_responses(service: Service) -> None:
    await run(service, "responses")


async def run_to_a_class_by_chats(service: Service) -> None:
    await run_to_a_class(service, "chats")


async def run_to_a_class_by_responses(service: Service) -> None:
    await run_to_a_class(service, "responses")


async def run_streamed_by_chats(service: Service) -> None:
    await run_streamed(service, "chats")


async def run_streamed_by_responses(service: Service) -> None:
    await run_streamed(service, "responses")


set_tracing_disabled(True)
main(
    {
        "tiny": [
            run_by_chats,
            run_by_responses,
            run_to_a_class_by_chats,
            run_to_a_class_by_responses,
            run_streamed_by_chats,
            run_streamed_by_responses,
        ]
    }
)
