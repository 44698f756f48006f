"""Anthropic's own client: messages whole and streamed, classes, tools and results, errors, and an agent of
thirty turns, each of which finds all but its new tokens in the cache."""

import secrets
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from checks import (
    ANSWERS,
    CHOICE,
    MAX_TOKENS,
    QUESTION,
    RESULT,
    SEARCH,
    WEATHER,
    City,
    Forecast,
    Service,
    main,
)

ASK: Any = [{"role": "user", "content": QUESTION}]
NUM_TURNS = 30
CALL: Any = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "weather", "arguments": ',
    "content": {"type": "regex", "pattern": '\\{"city": "(Paris|Oslo)"\\}'},
    "end": "}\n</tool_call>",
}
GAP: Any = {"type": "const_string", "value": "\n"}
YES: Any = {"type": "const_string", "value": "Yes."}


def written(form: dict[str, Any]) -> Any:
    """Returns the fields for an answer of this form: a random model would write a text or calls without end."""
    tag = {"type": "structural_tag", "format": form}
    return {"extra_body": {"structured_outputs": {"structural_tag": tag}}}


def connect(service: Service, **options: Any) -> Anthropic:
    options = options or {"api_key": service.key}
    return Anthropic(base_url=service.url.removesuffix("/v1"), max_retries=0, **options)


def tool_of(described: dict[str, Any]) -> Any:
    function = described["function"]
    return {"name": function["name"], "input_schema": function["parameters"]} | (
        {"description": function["description"], "cache_control": {"type": "ephemeral"}}
    )


def whole_and_streamed(service: Service) -> None:
    client = connect(service)
    fields: Any = {"model": service.model, "messages": ASK, "max_tokens": 20, "extra_body": CHOICE}
    message = client.messages.create(system="Be brief.", **fields)
    (block,) = message.content
    assert block.type == "text"
    assert block.text in ANSWERS
    assert (message.stop_reason, message.role) == ("end_turn", "assistant")
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    assert text in ANSWERS
    kinds = [event.type for event in client.messages.create(stream=True, **fields)]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])


def tokens_are_counted(service: Service) -> None:
    client = connect(service)
    fields: Any = {
        "model": service.model,
        "messages": ASK,
        "tools": [tool_of(WEATHER)],
        "system": "Be brief.",
    }
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(max_tokens=1, **fields).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.beta.messages.count_tokens(**fields).input_tokens == counted


def a_class(service: Service) -> None:
    message = connect(service).messages.parse(
        model=service.model, messages=ASK, max_tokens=MAX_TOKENS, output_format=Forecast
    )
    assert type(message.parsed_output) is Forecast


def tools_in_two_turns(service: Service) -> None:
    client = connect(service)
    fields: Any = {"model": service.model, "tools": [tool_of(WEATHER)], "max_tokens": MAX_TOKENS}
    chosen = {"type": "tool", "name": "weather"}
    with client.messages.stream(messages=ASK, tool_choice=chosen, **fields) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (call,) = message.content
    assert call.type == "tool_use"
    assert message.stop_reason == "tool_use"
    assert City.model_validate_json("".join(pieces)) == City.model_validate(call.input)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]
    messages: Any = [*ASK, message.to_param(), {"role": "user", "content": results}]
    none = {"type": "none"}
    second = client.messages.create(messages=messages, tool_choice=none, extra_body=CHOICE, **fields)
    assert second.content[0].text in ANSWERS


def errors_have_anthropics_types(service: Service) -> None:
    fields: Any = {"model": service.model, "messages": ASK, "max_tokens": 1}
    picture = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    pictured = {"messages": [{"role": "user", "content": [picture]}]}
    for expected, kind, client, changed in (
        (anthropic.AuthenticationError, "authentication_error", connect(service, api_key="wrong"), {}),
        (anthropic.NotFoundError, "not_found_error", connect(service), {"model": "none"}),
        (anthropic.BadRequestError, "invalid_request_error", connect(service), {"max_tokens": 0}),
        (anthropic.BadRequestError, "invalid_request_error", connect(service), pictured),
    ):
        found = None
        try:
            client.messages.create(**fields | changed)
        except anthropic.APIStatusError as error:
            found = error
        assert type(found) is expected
        assert found.type == kind
        assert found.request_id
    assert connect(service, auth_token=service.key).messages.create(**fields).usage.output_tokens == 1


async def the_asynchronous_client(service: Service) -> None:
    base = service.url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=base, api_key=service.key, max_retries=0) as client:
        async with client.beta.messages.stream(
            model=service.model, messages=ASK, max_tokens=20, extra_body=CHOICE, betas=["unknown-2026-01-01"]
        ) as stream:
            message = await stream.get_final_message()
    assert message.content[0].text in ANSWERS


class Agent:
    """A coding agent: its system prompt begins with a line that changes, and it answers each call of a tool."""

    def __init__(self, service: Service) -> None:
        self._client = connect(service)
        self._model = service.model
        self._system = f"You are agent {secrets.token_hex(8)}."  # in no cache
        self.messages: list[Any] = [{"role": "user", "content": "What do the notes say of São Paulo?"}]
        self.num_known = 0

    def fields(self, **more: Any) -> Any:
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={secrets.token_hex(3)};"
        system = [
            {"type": "text", "text": billing},
            {"type": "text", "text": self._system, "cache_control": {"type": "ephemeral"}},
        ]
        return {
            "model": self._model,
            "system": system,
            "messages": self.messages,
            "tools": [tool_of(SEARCH), tool_of(WEATHER)],
            "max_tokens": 300,
            "extra_headers": {"anthropic-beta": "claude-code-20250219"},
            **more,
        }

    def ask(self, streams: bool, **more: Any) -> Any:
        """Returns the message of one call. The prompt begins with the last one and its answer, whose last token
        was never computed."""
        fields = self.fields(**more)
        if streams:
            with self._client.messages.stream(**fields) as stream:
                message = stream.get_final_message()
        else:
            message = self._client.messages.create(**fields)
        found = message.usage.cache_read_input_tokens
        if self.num_known:
            assert found == self.num_known - 1, f"{found} cached of {self.num_known - 1}"
        self.num_known = message.usage.input_tokens + found + message.usage.output_tokens
        return message

    def interrupt(self, **more: Any) -> None:
        """Closes the stream of a call after its first events. Its prompt is computed by then."""
        with self._client.messages.stream(**self.fields(**more)) as stream:
            for event in stream:
                if event.type == "content_block_start":
                    break
        counted = self._client.messages.count_tokens(
            **{name: self.fields()[name] for name in ("model", "system", "messages", "tools")}
        )
        self.num_known = counted.input_tokens  # the last of which is computed in any case

    def answer(self, message: Any, number: int) -> None:
        """Adds a message, and a result for each of its calls: every fifth is an error."""
        results: list[Any] = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": f"{number}: {RESULT}"}],
                "is_error": number % 5 == 0,
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        text = {"type": "text", "text": "And then?"}
        added = {"role": "user", "content": results if results and number % 3 else [*results, text]}
        self.messages += [message.to_param(), added]


def an_agent_of_thirty_turns(service: Service) -> None:
    agent = Agent(service)
    num_parallel = 0
    for number in range(NUM_TURNS):
        one = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        if number == 10:
            agent.interrupt(**one)
        if number % 10 == 7:  # a text
            more: Any = written(YES)
        elif number % 10 == 4:  # calls side by side
            more = written({"type": "sequence", "elements": [CALL, GAP, CALL]})
        else:
            more = one
        message = agent.ask(streams=number % 2 == 1, **more)
        calls = [block for block in message.content if block.type == "tool_use"]
        num_parallel += len(calls) > 1
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        agent.answer(message, number)
    assert num_parallel == 3


main(
    {
        "tiny": [
            whole_and_streamed,
            tokens_are_counted,
            a_class,
            tools_in_two_turns,
            errors_have_anthropics_types,
            the_asynchronous_client,
        ],
        "bytes": [an_agent_of_thirty_turns],
    }
)
