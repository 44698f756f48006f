"""smolagents: `ToolCallingAgent` of `OpenAIModel` in ten steps, whole and streamed; a task over the context."""

from typing import Any, ClassVar

from checks import RESULT, Service, TenTurns, main
from rich.console import Console
from smolagents import ActionStep, AgentGenerationError, AgentLogger, OpenAIModel, Tool, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

NUM_STEPS = 10


class Weather(Tool):
    """A tool whose arguments end, of a model that would write on."""

    name = "weather"
    description = "Returns the weather of a city."
    inputs: ClassVar[Any] = {
        "city": {"type": "string", "description": "The city.", "enum": ["Paris", "Oslo", "São Paulo"]}
    }
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"{city}: {RESULT}"


def agent_of(service: Service, streamed: bool = False) -> ToolCallingAgent:
    model = OpenAIModel(
        model_id=service.model,
        api_base=service.url,
        api_key=service.key,
        client_kwargs={"max_retries": 0},
        temperature=0,
        max_tokens=200,
        parallel_tool_calls=False,
    )
    agent = ToolCallingAgent(
        [Weather()],
        model,
        # Its own prompt of thousands of letters would fill the context of a model whose tokens are bytes.
        prompt_templates=EMPTY_PROMPT_TEMPLATES | {"system_prompt": "Use the tools."},
        stream_outputs=streamed,
        logger=AgentLogger(console=Console(quiet=True)),
    )
    del agent.tools["final_answer"]  # with it, a model of random weights could end the loop at any step
    return agent


def steps_of(agent: ToolCallingAgent, question: str) -> list[ActionStep]:
    """Returns the steps of a run, each of which must have called the tool and read its result."""
    agent.run(question, max_steps=NUM_STEPS)
    # One more step follows the last: smolagents asks for a text then, without tools.
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)][:NUM_STEPS]
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step.error is None, step.error
        (call,) = step.tool_calls or ()
        assert call.name == "weather"
        assert step.observations == f"{call.arguments['city']}: {RESULT}"
    return steps


def ten_steps_hit_the_prompt_before(service: Service) -> None:
    """smolagents sends a call back as a text in its own words, so each step hits the whole prompt of the step
    before it, but not the call."""
    num_known = 0
    for step in steps_of(agent_of(service), TenTurns().question):
        usage = step.model_output_message.raw.usage
        assert usage.prompt_tokens > num_known
        if num_known:
            found = usage.prompt_tokens_details.cached_tokens
            assert found == num_known, f"{found} cached of {num_known}"
        num_known = usage.prompt_tokens


def ten_steps_streamed(service: Service) -> None:
    """smolagents keeps no number of cached tokens of a stream."""
    steps = steps_of(agent_of(service, streamed=True), TenTurns().question)
    lengths = [step.token_usage.input_tokens for step in steps]
    assert lengths == sorted(set(lengths))


def over_the_context(service: Service) -> None:
    for streamed in (False, True):
        message = ""
        try:
            agent_of(service, streamed).run("long " * 10_000)
        except AgentGenerationError as error:
            message = str(error)
        assert "maximum context length" in message


main(
    {
        "tiny": [over_the_context],
        "bytes": [ten_steps_hit_the_prompt_before, ten_steps_streamed, over_the_context],
    }
)
