"""Tools and reasoning over HTTP: prompts, answers and streams, as OpenAI's client sends and reads them.

The fake router writes the answers.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from llguidance import LLTokenizer

from lightkv.router.api.grammars import check_process, checker
from lightkv.router.api.requests.chat import ChatRequest
from lightkv.router.api.requests.dialect import ChatDialect
from lightkv.router.api.requests.tools import Function, ToolUse
from lightkv.router.config import InvalidConfig, ServiceConfig
from lightkv.router.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.text.grammars import InvalidGrammar, ModelTokens
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.fake_router import CHAT, MODEL, ApiUnderTest, ids_of, service
from tests.support.grammars import compile_grammar

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them with <tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
SCHEMA = WEATHER["function"]["parameters"]
HELLO: Any = [{"role": "user", "content": "Is it raining?"}]
PARIS = '{"city": "Paris \\u2603"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
BOTH = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'

ROOT = Path(__file__).parents[2]


class ChecksHere:
    """Checks grammars as the process of a service does (`test_grammar_checker.py`), but in this process, which
    has the tokens of the only model already."""

    def __init__(self, directory: Path, vocab_size: Callable[[], int]) -> None:
        self._of_model = directory, vocab_size

    async def ask(self, grammar: Grammar) -> check_process.Checked:
        directory, vocab_size = self._of_model
        wrong, num_bytes = check_process.check(grammar, model_tokens(directory, vocab_size()))
        return check_process.Checked(wrong, num_bytes=num_bytes)

    async def close(self) -> None:
        """No process is to be ended."""


model_tokens = cache(ModelTokens.load)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ApiUnderTest]]:
    """Services by their model: one whose template has tools and reasoning, the default model with its own
    template and with deploy/chat_with_tools.jinja, and one whose template shows neither format."""
    made: dict[str, tuple[str | None, dict[str, Any]]] = {
        "qwen": (TEMPLATE, {}),
        "plain": (None, {}),
        "given": ((ROOT / "deploy" / "chat_with_tools.jinja").read_text(encoding="utf-8"), {}),
        "unknown": ("{{ tools }}{{ messages[0].content }}", {}),
        "off": (TEMPLATE, {"tool_parser": "none", "reasoning_parser": "none"}),
        "llama": ("{{ tools }}{{ messages }}<|im_start|>", {"tool_parser": "llama3"}),
        "r1": ("{{ messages[0].content }}", {"reasoning_parser": "deepseek_r1"}),
        "mistral": ("{{ tools }}[TOOL_CALLS]{{ messages[1:] }}", {}),
        "gpt": ("{{ reasoning_effort }}{{ tools }}<|channel|><|message|>", {}),
    }
    with ExitStack() as stack:
        changed = stack.enter_context(pytest.MonkeyPatch.context())
        changed.setattr(checker, "_CheckProcess", ChecksHere)
        running = {}
        for name, (template, settings) in made.items():
            under_test = service(tmp_path_factory.mktemp(name), **settings)
            if template is not None:
                under_test.tokenizer._template_source = template
            running[name] = stack.enter_context(under_test.running())
        yield running


@pytest.fixture
def qwen(services: dict[str, ApiUnderTest]) -> ApiUnderTest:
    return services["qwen"]


def script(api: ApiUnderTest, text: str, ends: bool = True) -> None:
    """Lets every answer be `text`."""
    end = [min(api.tokenizer.eos_ids)] if ends else []
    api.router.script = [*api.tokenizer.encode(text).tolist(), *end]
    api.router.submits.clear()


def prompt_of(api: ApiUnderTest) -> str:
    return api.tokenizer.decode(ids_of(api.router.submits[-1]), skip_special_tokens=False)


def connect(api: ApiUnderTest) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0)


def both(api: ApiUnderTest, **fields: Any) -> tuple[Any, Any]:
    """Returns the choice of a whole answer and that of its stream, put together by the openai client."""
    with connect(api) as client:
        fields = {"model": MODEL, "messages": HELLO, "max_tokens": 400, **fields}
        whole = client.chat.completions.create(**fields)
        with client.chat.completions.stream(**fields) as stream:
            list(stream)
            streamed = stream.get_final_completion()
    (first,), (second,) = whole.choices, streamed.choices
    assert (first.message.content or "") == (second.message.content or "")
    assert first.finish_reason == second.finish_reason
    return first, second


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def test_calls_are_answered_whole_and_streamed(qwen: ApiUnderTest) -> None:
    script(qwen, BOTH)
    for choice in both(qwen, tools=[WEATHER | {"function": WEATHER["function"]}, CLOCK]):
        assert calls_of(choice) == [("weather", PARIS), ("clock", "{}")]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2
        assert all(one.startswith("call_") for one in ids)
    prompt = prompt_of(qwen)
    assert '"description": "The weather of a city."' in prompt
    assert "strict" not in prompt


def test_the_chunks_are_those_that_clients_expect(qwen: ApiUnderTest) -> None:
    script(qwen, CALL)
    body = {
        "messages": HELLO,
        "tools": [WEATHER],
        "max_tokens": 400,
        "stream_options": {"include_usage": True},
    }
    events = qwen.stream(CHAT, body)
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"]["completion_tokens"] == len(qwen.router.script)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    calls = [delta["tool_calls"][0] for delta in deltas[1:-1]]
    assert set(calls[0]) == {"index", "id", "type", "function"}
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in calls[1:])
    assert len(calls) > 3  # the arguments come in pieces
    assert "".join(call["function"]["arguments"] for call in calls[1:]) == PARIS
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["tool_calls"]


def test_content_is_null_beside_calls_alone(qwen: ApiUnderTest) -> None:
    script(qwen, "\n" + CALL)
    message = qwen.post(CHAT, {"messages": HELLO, "tools": [WEATHER], "max_tokens": 400})["choices"][0][
        "message"
    ]
    assert message["content"] is None
    assert "reasoning_content" not in message


def test_a_text_without_calls_is_content(qwen: ApiUnderTest) -> None:
    text = ' <tool_call>{"name": "other", "arguments": {}}</tool_call> \n'
    script(qwen, text)
    for choice in both(qwen, tools=[WEATHER]):
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert not choice.message.tool_calls


def test_an_answer_that_is_cut_keeps_its_reason(qwen: ApiUnderTest) -> None:
    script(qwen, CALL)
    fields = {"messages": HELLO, "tools": [WEATHER], "max_tokens": len(qwen.router.script) - 12}
    choice = qwen.post(CHAT, fields)["choices"][0]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert PARIS.startswith(call["function"]["arguments"])


def test_each_answer_has_its_own_calls(qwen: ApiUnderTest) -> None:
    script(qwen, CALL)
    body = {"messages": HELLO, "tools": [WEATHER], "max_tokens": 400, "n": 2, "logprobs": True}
    done = qwen.post(CHAT, body)
    assert [len(choice["message"]["tool_calls"]) for choice in done["choices"]] == [1, 1]
    assert len(done["choices"][0]["logprobs"]["content"]) == len(qwen.router.script) - 1
    texts, num_scored = {0: "", 1: ""}, 0
    for event in qwen.stream(CHAT, body)[:-1]:
        for choice in event["choices"]:
            num_scored += len((choice["logprobs"] or {"content": []})["content"])
            for call in choice["delta"].get("tool_calls", ()):
                texts[choice["index"]] += call["function"].get("arguments", "")
    assert texts == {0: PARIS, 1: PARIS}
    assert num_scored == 2 * (len(qwen.router.script) - 1)


def test_one_call_at_a_time(qwen: ApiUnderTest) -> None:
    script(qwen, BOTH)
    for choice in both(qwen, tools=[WEATHER, CLOCK], parallel_tool_calls=False):
        assert calls_of(choice) == [("weather", PARIS)]


CALLS = [("weather", '{"city": "Paris ☃"}'), ("clock", "{}")]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_required_call_is_constrained_and_read(qwen: ApiUnderTest) -> None:
    text = "\n".join(hermes(name, arguments) for name, arguments in CALLS)
    script(qwen, text)
    for choice in both(qwen, tools=[WEATHER, CLOCK], tool_choice="required"):
        assert calls_of(choice) == CALLS
        assert choice.finish_reason == "tool_calls"
    assert allows(qwen, text)
    assert not allows(qwen, f"I look. {text}")
    assert not allows(qwen, text.replace('"city": ', '"city":'))  # templates dump JSON with spaces
    assert not allows(qwen, text.replace("☃", "\\u2603"))
    assert not allows(qwen, hermes("weather", "{}"))  # the schema requires a city
    assert not allows(qwen, hermes("clock", '{"city": "Rome"}'))
    assert prompt_of(qwen).endswith("</think>\n\n")  # the grammar leaves no room for reasoning
    both(qwen, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False)
    assert not allows(qwen, text)
    assert allows(qwen, hermes("clock", "{}"))


def test_a_named_call_is_constrained_and_read(qwen: ApiUnderTest) -> None:
    text = hermes(*CALLS[0])
    script(qwen, text)
    for choice in both(
        qwen, tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "weather"}}
    ):
        assert calls_of(choice) == CALLS[:1]
        assert choice.finish_reason == "tool_calls"
    assert allows(qwen, text)
    assert not allows(qwen, f"{text}\n{text}")  # a named function is called once
    assert not allows(qwen, hermes("clock", "{}"))


def test_arguments_without_a_type_are_an_object(qwen: ApiUnderTest) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"description": "any"}}}
    script(qwen, hermes("f", "{}"))
    both(qwen, tools=[tool], tool_choice="required")
    assert allows(qwen, hermes("f", '{"a": 1}'))
    assert not allows(qwen, hermes("f", "1"))


def test_calls_of_an_unknown_form_are_json(services: dict[str, ApiUnderTest]) -> None:
    """The template shows no family, so a required answer is a list of calls and a named one the arguments."""
    unknown = services["unknown"]
    script(
        unknown, '[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "clock", "parameters": {}}]'
    )
    for choice in both(unknown, tools=[WEATHER, CLOCK], tool_choice="required"):
        assert calls_of(choice) == [("weather", '{"city": "Rome"}'), ("clock", "{}")]
    grammar = unknown.router.submits[-1].params.grammar
    assert grammar is not None
    names = [item["properties"]["name"]["enum"] for item in json.loads(grammar.text)["items"]["anyOf"]]
    assert names == [["weather"], ["clock"]]
    both(unknown, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    grammar = unknown.router.submits[-1].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text)["maxItems"] == 1
    script(unknown, PARIS)
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in both(unknown, tools=[WEATHER, CLOCK], tool_choice=named):
        assert calls_of(choice) == [("weather", PARIS)]
    assert unknown.router.submits[-1].params.grammar == Grammar(
        "json_schema", json.dumps(SCHEMA | {"additionalProperties": False})
    )


def test_auto_and_none_are_not_constrained(qwen: ApiUnderTest) -> None:
    script(qwen, CALL)
    qwen.post(CHAT, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "auto", "max_tokens": 400})
    done = qwen.post(CHAT, {"messages": HELLO, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 400})
    assert done["choices"][0]["message"] == {"role": "assistant", "content": CALL}
    assert "weather" not in prompt_of(qwen)
    assert [submit.params.grammar for submit in qwen.router.submits] == [None, None]
    for fields in ({"tools": []}, {"tool_choice": "auto"}):
        assert qwen.post(CHAT, {"messages": HELLO, "max_tokens": 1, **fields})


def test_the_history_reaches_the_template(qwen: ApiUnderTest) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "assistant", "content": "Yes.", "tool_calls": None},
    ]
    body = {"messages": messages, "tools": [WEATHER]}
    qwen.post(CHAT, {**body, "max_tokens": 1})
    assert '<tool_call>{"city": "Paris ☃"}</tool_call><|im_end|>\n<|im_start|>tool\nrain' in prompt_of(qwen)
    ids = qwen.post("/tokenize", body)["tokens"]
    assert ids == ids_of(qwen.router.submits[-1])
    call["function"]["arguments"] = '{"city'  # type: ignore[index]
    qwen.post(CHAT, {**body, "max_tokens": 1})
    assert '<tool_call>"{\\"city"</tool_call>' in prompt_of(qwen)
    for odd in (5, "a", [5], [{"function": 5}], {}):
        message = {"role": "assistant", "content": "a", "tool_calls": odd}
        status, _, _ = qwen.send("POST", CHAT, {"messages": [message], "max_tokens": 1})
        assert status in (200, 400)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "é\ud800"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}),
    ("tools", {"tools": [CLOCK, CLOCK]}),
    ("tools", {"tools": [CLOCK] * 1025}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": "any"}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "g"}}}),
    ("messages", {"messages": [{"role": "function", "name": "f", "content": "a"}]}),
    ("parallel_tool_calls", {"tools": [CLOCK], "parallel_tool_calls": "yes"}),
    ("reasoning_effort", {"reasoning_effort": "enormous"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"tools": []}}),
]


@pytest.mark.parametrize(("field", "fields"), WRONG)
def test_wrong_fields_are_named(qwen: ApiUnderTest, field: str, fields: dict[str, Any]) -> None:
    qwen.router.submits.clear()
    error = qwen.post(CHAT, {"messages": HELLO, "max_tokens": 1, **fields}, 400)["error"]
    assert error["param"] == field
    assert not qwen.router.submits


def test_deep_schemas_are_refused_or_used(qwen: ApiUnderTest) -> None:
    deep: Any = {"$ref": "#"}
    for _ in range(300):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": HELLO, "max_tokens": 1, "tools": [tool], "tool_choice": choice}
        assert qwen.send("POST", CHAT, body)[0] in (200, 400)


def test_half_surrogates_in_tools_do_no_harm(qwen: ApiUnderTest) -> None:
    schema = {"type": "object", "properties": {"a\ud800": {"enum": ["\ud800"]}}}
    tool = {"type": "function", "function": {"name": "f", "description": "\udc00", "parameters": schema}}
    script(qwen, '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>')
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        body = {"messages": HELLO, "max_tokens": 60, "tools": [tool], "tool_choice": choice}
        assert qwen.post(CHAT, body)["choices"]
    assert calls_of(both(qwen, tools=[{"type": "function", "function": {"name": "f"}}])[0])[0][0] == "f"


# Reasoning


def test_reasoning_is_apart_from_content(qwen: ApiUnderTest) -> None:
    script(qwen, f"<think>\nHm, hm.\n</think>\n\nYes.\n{CALL}")
    body = {"messages": HELLO, "tools": [WEATHER], "max_tokens": 400}
    message = qwen.post(CHAT, body)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, hm.", "Yes.")
    assert message["reasoning"] == "Hm, hm."
    assert len(message["tool_calls"]) == 1
    deltas = [event["choices"][0]["delta"] for event in qwen.stream(CHAT, body)[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    without = qwen.post(CHAT, body | {"include_reasoning": False})["choices"][0]["message"]
    assert set(without) == {"role", "content", "tool_calls"}
    deltas = [
        event["choices"][0]["delta"] for event in qwen.stream(CHAT, body | {"include_reasoning": False})[:-1]
    ]
    assert not any("reasoning" in delta for delta in deltas)
    assert without["content"] == "Yes."


def test_an_answer_of_reasoning_alone(services: dict[str, ApiUnderTest]) -> None:
    script(services["r1"], "Hm")
    message = services["r1"].post(CHAT, {"messages": HELLO, "max_tokens": 9})["choices"][0]["message"]
    assert message == {"role": "assistant", "content": None, "reasoning": "Hm", "reasoning_content": "Hm"}
    script(services["r1"], "Hm</think>\nSo")
    message = services["r1"].post(CHAT, {"messages": HELLO, "max_tokens": 9})["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("So", "Hm")


def test_the_effort_sets_the_templates_variable(services: dict[str, ApiUnderTest]) -> None:
    qwen, gpt = services["qwen"], services["gpt"]
    for effort, is_off in (("none", True), ("high", False), (None, False)):
        qwen.post(CHAT, {"messages": HELLO, "max_tokens": 1, "reasoning_effort": effort})
        assert prompt_of(qwen).endswith("</think>\n\n") == is_off
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    qwen.post(CHAT, {"messages": HELLO, "max_tokens": 1, "reasoning_effort": "none", **on})
    assert not prompt_of(qwen).endswith("</think>\n\n")
    gpt.post(CHAT, {"messages": HELLO, "max_tokens": 1, "reasoning_effort": "low"})
    assert prompt_of(gpt).startswith("low")
    plain = services["plain"]
    prompts = set()
    for given in ("none", "low", None):
        plain.post(CHAT, {"messages": HELLO, "max_tokens": 1, "reasoning_effort": given})
        prompts.add(prompt_of(plain))
    assert len(prompts) == 1  # it is a hint
    error = plain.post(CHAT, {"messages": HELLO, "max_tokens": 1, "include_reasoning": False}, 400)["error"]
    assert error["param"] == "include_reasoning"


def test_parsers_can_be_switched_off(services: dict[str, ApiUnderTest]) -> None:
    off = services["off"]
    script(off, "<think>a</think>b")
    assert (
        off.post(CHAT, {"messages": HELLO, "max_tokens": 60})["choices"][0]["message"]["content"][:3] == "<th"
    )
    assert off.post(CHAT, {"messages": HELLO, "tools": [WEATHER]}, 400)["error"]["param"] == "tools"


def test_an_answer_that_follows_a_grammar_is_content(qwen: ApiUnderTest) -> None:
    """Such an answer has no reasoning, and may have calls where there are tools."""
    settings = ApiSettings(served_model_name=(MODEL,))
    dialect = ChatDialect(qwen.tokenizer, settings)
    body = ChatRequest.model_validate({"messages": HELLO, "tools": [WEATHER]})
    chat = body.chat()
    required = ToolUse([Function(name="f")], is_required=True)
    ids = np.zeros(1, np.int32)
    for use in (None, body.tool_use()):
        assert dialect.reading(use, ids) is not None
        assert (dialect.reading(use, ids, Grammar("json_object")) is None) == (use is None)
        assert dialect.prepared(chat, use, is_constrained=True).variables == {"enable_thinking": False}
        assert dialect.prepared(chat, use).variables == {}
    assert dialect.reading(required, ids, Grammar("json_object")) is not None


def test_unknown_parsers_are_refused() -> None:
    for name, option in (("tool_parser", "--tool-parser"), ("reasoning_parser", "--reasoning-parser")):
        with pytest.raises(InvalidConfig, match=f"{option} is 'gpt9'; give one of none, "):
            ServiceConfig(**{name: "gpt9"})


# Other models


def test_a_template_without_tools_needs_another_one(services: dict[str, ApiUnderTest]) -> None:
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": choice}
        error = services["plain"].post(CHAT, body, 400)["error"]
        assert error["param"] == "tools"
        assert "--chat-template" in error["message"]
    error = services["unknown"].post(CHAT, {"messages": HELLO, "tools": [WEATHER]}, 400)["error"]
    assert "does not show" in error["message"]


def test_the_template_of_deploy_describes_tools_in_the_system_message(
    services: dict[str, ApiUnderTest],
) -> None:
    given = services["given"]
    script(given, BOTH)
    for choice in both(given, tools=[WEATHER, CLOCK]):
        assert calls_of(choice) == [("weather", PARIS), ("clock", "{}")]
    prompt = prompt_of(given)
    assert prompt.index("<|im_start|>system\nYou can call functions") < prompt.index('{"name": "FUNCTION"')
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    prompts = set()
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("auto", "required", named):
        asked = {"messages": messages, "tools": [WEATHER], "max_tokens": 1, "tool_choice": choice}
        given.post(CHAT, asked)
        prompts.add(prompt_of(given))
    (prompt,) = prompts  # one choice after another finds the prompt in the cache
    assert "<|im_start|>system\nBe brief.\n\nYou can call functions" in prompt
    assert prompt.count("<|im_start|>system") == 1
    assert '<tool_call>\n{"name": "FUNCTION", "arguments"' in prompt
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nI look.\n{text}\n{text}<|im_end|>" in prompt
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in prompt
    given.post(CHAT, {"messages": messages[:2], "max_tokens": 1})
    assert "functions" not in prompt_of(given)


def test_the_option_chooses_the_format(services: dict[str, ApiUnderTest]) -> None:
    llama = services["llama"]
    script(llama, f'{{"name": "weather", "parameters": {PARIS}}}')
    for choice in both(llama, tools=[WEATHER]):
        assert calls_of(choice) == [("weather", PARIS)]


def test_ids_are_as_the_model_insists(services: dict[str, ApiUnderTest]) -> None:
    mistral = services["mistral"]
    script(mistral, f"[TOOL_CALLS]weather[ARGS]{PARIS}")
    for choice in both(mistral, tools=[WEATHER]):
        (call,) = choice.message.tool_calls
        assert len(call.id) == 9
        assert call.id.isalnum()
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"},
    ]
    mistral.post(CHAT, {"messages": messages, "max_tokens": 1})
    assert prompt_of(mistral).count("'123456789'") == 2


def test_special_tokens_are_shown_to_the_parser_alone(tmp_path: Path) -> None:
    under_test = service(tmp_path)
    under_test.tokenizer = Tokenizer(under_test.tokenizer.directory)  # which no other service shares
    under_test.tokenizer._template_source = "{{ tools }}<|python_tag|>{{ messages }}"
    special = under_test.tokenizer._tokenizer
    special.add_special_tokens(["<|python_tag|>"])
    under_test.tokenizer.special_ids |= {special.token_to_id("<|python_tag|>")}
    with under_test.running() as api:
        script(api, f'<|im_start|>I look.<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}')
        for choice in both(api, tools=[WEATHER]):
            assert calls_of(choice) == [("weather", PARIS)]
            assert choice.message.content == "I look."


# Calls or a format


ANSWER = '{"is_raining": true}'
FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "a",
        "schema": {
            "type": "object",
            "properties": {"is_raining": {"type": "boolean"}},
            "required": ["is_raining"],
        },
    },
}


def allows(api: ApiUnderTest, text: str) -> bool:
    """Returns whether the grammar of the last request takes a text, and may end after it."""
    grammar = api.router.submits[-1].params.grammar
    assert grammar is not None
    matcher = compile_grammar(grammar, LLTokenizer("byte"))
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", ["qwen", "given", "llama", "mistral", "gpt"])
def test_an_answer_is_calls_or_of_the_format(services: dict[str, ApiUnderTest], name: str) -> None:
    api = services[name]
    clock = json.dumps({})
    calls, answer = {
        "qwen": (f'<tool_call>\n{{"name": "clock", "arguments": {clock}}}\n</tool_call>', ANSWER),
        "given": (f'<tool_call>\n{{"name": "clock", "arguments": {clock}}}\n</tool_call>', ANSWER),
        "llama": (f'{{"name": "clock", "parameters": {clock}}}', ANSWER),
        "mistral": (f"[TOOL_CALLS]clock[ARGS]{clock}", ANSWER),
        "gpt": (
            f"<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{clock}",
            f"<|channel|>final <|constrain|>json<|message|>{ANSWER}",
        ),
    }[name]
    script(api, calls)
    for choice in both(api, tools=[WEATHER, CLOCK], response_format=FORMAT):
        assert calls_of(choice) == [("clock", clock)]
        assert (choice.message.content or "", choice.finish_reason) == ("", "tool_calls")
    script(api, answer)
    for choice in both(api, tools=[WEATHER, CLOCK], tool_choice="auto", response_format=FORMAT):
        assert not choice.message.tool_calls
        assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert allows(api, calls)
    assert allows(api, answer)
    assert not allows(api, "It is raining.")
    assert not allows(api, calls[:-1])
    assert not allows(api, calls.replace("clock", "watch"))
    assert not allows(api, answer.replace("true", "1"))


def test_a_call_within_the_format_stays_text(qwen: ApiUnderTest) -> None:
    text = json.dumps({"is_raining": True, "why": "<tool_call>{}"})
    script(qwen, text)
    for choice in both(qwen, tools=[WEATHER], response_format=FORMAT):
        assert not choice.message.tool_calls
        assert choice.message.content == text


def test_a_structural_tag_says_itself_where_calls_are(qwen: ApiUnderTest) -> None:
    begin, end = '<tool_call>\n{"name": "clock", "arguments": ', "}\n</tool_call>"
    one = {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": {}}, "end": end}
    form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [one]}
    tag = {"type": "structural_tag", "format": form}
    text = f"I look.\n{begin}{{}}{end}"
    script(qwen, text)
    for choice in both(
        qwen, tools=[WEATHER, CLOCK], extra_body={"structured_outputs": {"structural_tag": tag}}
    ):
        assert calls_of(choice) == [("clock", "{}")]
        assert choice.message.content == "I look."
    assert allows(qwen, text)
    assert not allows(qwen, text.replace("clock", "weather"))


def test_at_most_one_call_or_the_format(qwen: ApiUnderTest) -> None:
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    for is_parallel in (True, False):
        script(qwen, call)
        asked = {"tools": [CLOCK], "response_format": FORMAT, "parallel_tool_calls": is_parallel}
        qwen.post(CHAT, {"messages": HELLO, "max_tokens": 40, **asked})
        assert allows(qwen, f"{call}\n{call}") == is_parallel


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "yes|no"}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
        {"structured_outputs": {"structural_tag": {"format": {"type": "const_string", "value": "yes"}}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen", "gpt"])
def test_every_format_goes_with_tools(
    services: dict[str, ApiUnderTest], fields: dict[str, Any], name: str
) -> None:
    api = services[name]
    answer = "{}" if "response_format" in fields else "yes"
    is_message = name == "gpt" and "structural_tag" not in str(fields)
    begin = "<|channel|>final<|message|>" if is_message else ""
    script(api, begin + answer)
    for choice in both(api, tools=[CLOCK], extra_body=fields):
        assert (choice.message.content, choice.message.tool_calls) == (answer, None)
    assert allows(api, begin + answer)
    assert not allows(api, begin + "perhaps")


def test_calls_without_a_mark_go_with_json_and_choices(services: dict[str, ApiUnderTest]) -> None:
    llama = services["llama"]
    body = {"messages": HELLO, "max_tokens": 40, "tools": [CLOCK]}
    for fields, taken in (
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
        ({"structured_outputs": {"json": True}}, "[1]"),
        ({"response_format": {"type": "json_object"}}, '{"name": "watch"}'),
    ):
        llama.post(CHAT, body | fields)
        assert allows(llama, taken)
        assert allows(llama, '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}')
    for fields in (
        {"structured_outputs": {"regex": "yes|no"}},
        {"structured_outputs": {"choice": ["{", "no"]}},
        {"structured_outputs": {"json": {"type": "array"}, "whitespace_pattern": ""}},
    ):
        error = llama.post(CHAT, body | fields, 400)["error"]
        assert error["param"] == "tools"
        assert "look like others" in error["message"]


def test_what_cannot_be_compiled_is_named(qwen: ApiUnderTest) -> None:
    wrong = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    body = {"messages": HELLO, "max_tokens": 5}
    asked = body | {"tools": [tool], "response_format": FORMAT}
    assert qwen.post(CHAT, asked, 400)["error"]["param"] == "tools"
    asked = body | {
        "tools": [CLOCK],
        "response_format": {"type": "json_schema", "json_schema": {"schema": wrong}},
    }
    assert qwen.post(CHAT, asked, 400)["error"]["param"] == "response_format"


def test_more_tools_than_a_grammar_holds_are_refused(qwen: ApiUnderTest) -> None:
    dialect = ChatDialect(qwen.tokenizer, ApiSettings(served_model_name=(MODEL,)))
    parameters = {"type": "object", "properties": {"a" * 1000: {"type": "string"}}}
    use = ToolUse([Function(name=f"f{i}", parameters=parameters) for i in range(300)])
    assert dialect.grammar(use, None) is None
    with pytest.raises(InvalidGrammar, match=f"tools cannot be used: .* at most {MAX_GRAMMAR_BYTES}"):
        dialect.grammar(use, Grammar("json_object"))


REASONS = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_gpt_oss_calls_in_its_own_form_after_its_reasoning(
    services: dict[str, ApiUnderTest], choice: Any
) -> None:
    gpt = services["gpt"]
    call = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
    script(gpt, REASONS + call)
    for found in both(gpt, tools=[WEATHER, CLOCK], tool_choice=choice):
        assert calls_of(found) == [("clock", "{}")]
        assert found.message.reasoning_content == "I look."
        assert found.finish_reason == "tool_calls"
    assert allows(gpt, REASONS + call)
    assert allows(gpt, " to=functions.clock<|channel|>commentary json<|message|>{}")
    assert not allows(gpt, "<|channel|>final<|message|>{}")
    other = call.replace("clock", "weather").replace("{}", '{"city": "Rome"}')
    assert allows(gpt, other) == (choice == "required")


def test_gpt_oss_answers_a_format_on_its_channel(services: dict[str, ApiUnderTest]) -> None:
    gpt = services["gpt"]
    script(gpt, f"{REASONS}<|channel|>final<|message|>{ANSWER}")
    for choice in both(gpt, response_format=FORMAT):
        assert (choice.message.content, choice.message.reasoning_content) == (ANSWER, "I look.")
    assert allows(gpt, f"{REASONS}<|channel|>final<|message|>{ANSWER}")
    assert not allows(gpt, ANSWER)
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    script(gpt, "<|channel|>final<|message|>x")
    both(gpt, extra_body={"structured_outputs": {"structural_tag": tag}})
    assert allows(gpt, "x")  # a structural tag says itself where the messages are


def test_responses_have_calls_or_a_format_too(qwen: ApiUnderTest) -> None:
    asked = {
        "input": "Is it raining?",
        "max_output_tokens": 60,
        "tools": [{"type": "function", **CLOCK["function"]}],
        "text": {"format": {"type": "json_schema", **FORMAT["json_schema"]}},
    }
    script(qwen, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    (call,) = qwen.post("/v1/responses", asked)["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "clock", "{}")
    script(qwen, ANSWER)
    (message,) = qwen.post("/v1/responses", asked)["output"]
    assert message["content"][0]["text"] == ANSWER
    assert allows(qwen, ANSWER)
    assert not allows(qwen, "It is raining.")
