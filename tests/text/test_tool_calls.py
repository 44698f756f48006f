"""Each format of tool calls and of reasoning, whole and cut at every place."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightkv.router.config import REASONING_PARSERS, TOOL_PARSERS
from lightkv.router.text.answer_reader import AnswerReader, joined, think
from lightkv.router.text.tool_calls.closed_schema import closed_schema
from lightkv.router.text.tool_calls.constrained import read_named, read_required, required_schema
from lightkv.router.text.tool_calls.families import (
    FAMILIES,
    family_of,
    reasoning_of,
    variables_of,
    wants_text,
)
from lightkv.router.text.tool_calls.json_call import EndFinder
from lightkv.router.text.tool_calls.source import Arguments, CallBegins, Source, Steps
from tests.support.written_calls import WRITTEN

TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    "get.time-2": {"type": "object"},
}
Stage = Callable[[Source], Steps[None]]
Read = tuple[str, str, list[tuple[str, str]]]
CALL = '{"name": "f", "arguments": {"a": 1, "s": "}\\"{"}}'
ARGUMENTS = '{"a": 1, "s": "}\\"{"}'
F = ("f", ARGUMENTS)
DEEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEP_END = "<｜tool▁calls▁end｜>"


def stage(family: str) -> Stage:
    return lambda source: FAMILIES[family].read(source, TOOLS)


def read(stages: list[Stage], *pieces: str, max_calls: int | None = None) -> Read:
    reader = AnswerReader(stages, max_calls)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined([*parts, *reader.finish()])


def read_in_every_split(stages: list[Stage], text: str) -> Read:
    """Returns what is read, which has to be the same however the text is cut."""
    whole = read(stages, text)
    assert read(stages, *text) == whole
    for cut in range(1, len(text)):
        assert read(stages, text[:cut], text[cut:]) == whole, text[:cut]
    return whole


CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    # family, text, content, calls
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [F]),
    ("hermes", f"Let me see.\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [F]),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "", [F, F]),
    ("hermes", f"<tool_call>{CALL}</tool_call> and so", " and so", [F]),
    ("hermes", '<tool_call>{"arguments": {"a": 2}, "name": "f"}</tool_call>', "", [("f", '{"a": 2}')]),
    ("hermes", '<tool_call>{"name": "get.time-2"}</tool_call>', "", [("get.time-2", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 3}"}', "", [("f", '{"a": 3}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {', "", [("f", '{"a": [1, {')]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": 1}', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ("hermes", '<tool_call> {"name": "f"', None, []),
    ("hermes", "a < b <tool call> <tool_cal", None, []),
    ("hermes", "<tool_call>what?</tool_call>\n", None, []),
    ("hermes", "  plain text \n\n", None, []),
    ("hermes", "", None, []),
    ("llama3", CALL.replace("arguments", "parameters"), "", [F]),
    ("llama3", f"<|python_tag|>{CALL}; {CALL}", "", [F, F]),
    ("llama3", f" \n{CALL}\n", "", [F]),
    ("llama3", f'{{"type": "function", "name": "f", "parameters": {ARGUMENTS}}}', "", [F]),
    ("llama3", f"I look it up. <|python_tag|>{CALL}", "I look it up.", [F]),
    ("llama3", f'{{"type": "function", "function": {CALL}}}', "", [F]),
    ("llama3", '{"answer": {"name": "f"}}', None, []),
    ("llama3", '<|python_tag|>brave.call(query="x")', None, []),
    ("llama3", f"an object: {CALL}", None, []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [F, F]),
    (
        "mistral",
        f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]get.time-2[ARGS]{{}}",
        "",
        [F, ("get.time-2", "{}")],
    ),
    ("mistral", f"Yes.[TOOL_CALLS]f[CALL_ID]ab12[ARGS]{ARGUMENTS}", "Yes.", [F]),
    ("mistral", f"[TOOL_CALLS]f{ARGUMENTS}", "", [F]),
    ("mistral", "[TOOL_CALLS]g[ARGS]{}", None, []),
    ("mistral", "[TOOL_CALLS] [1, 2]", None, []),
    ("mistral", "[TOOL_CALLS]f and so on", None, []),
    ("mistral", "[TOOL] [ARGS]", None, []),
    ("deepseek", f"{DEEP[0]}{DEEP[1]}f{DEEP[2]}{ARGUMENTS}{DEEP[3]}{DEEP_END}", "", [F]),
    (
        "deepseek",
        f"Well.{DEEP[0]}{DEEP[1]}function{DEEP[2]}f\n```json\n{ARGUMENTS}\n```{DEEP[3]}\n"
        f"{DEEP[1]}function{DEEP[2]}get.time-2\n```json\n{{}}\n```{DEEP[3]}{DEEP_END}",
        "Well.",
        [F, ("get.time-2", "{}")],
    ),
    ("deepseek", f"{DEEP[0]}{DEEP[1]}g{DEEP[2]}{{}}", None, []),
    ("deepseek", f"{DEEP[0]} nothing", None, []),
    (
        "qwen3_coder",
        "Hm.\n\n<tool_call>\n<function=f>\n"
        "<parameter=a>\n12\n</parameter>\n<parameter=s>\n1 < 2\n\n</parameter>\n"
        "</function>\n</tool_call>\n",
        "Hm.",
        [("f", '{"a": 12, "s": "1 < 2\\n"}')],
    ),
    ("qwen3_coder", "<function=get.time-2>\n</function>", "", [("get.time-2", "{}")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get.time-2>\n<parameter=x>\n[1, 2]\n</parameter>\n<parameter=y>NaN</parameter>",
        "",
        [("get.time-2", '{"x": [1, 2], "y": "NaN"}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>", None, []),
    ("qwen3_coder", "<tool_call>\n{}", None, []),
    (
        "gpt_oss",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + ARGUMENTS + "<|call|>",
        "",
        [F],
    ),
    (
        "gpt_oss",
        f" to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}",
        "",
        [F],
    ),
    ("gpt_oss", "<|channel|>final<|message|>Hello < you", "Hello < you", []),
    ("gpt_oss", "just text", "just text", []),
    ("gpt_oss", "<|channel|>commentary to=functions.g<|message|>{}", "{}", []),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_a_format_is_read_the_same_in_every_split(
    family: str, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    """Content None: the whole text stays content."""
    found = read_in_every_split([stage(family)], text)
    assert found == ("", text if content is None else content, calls)


def test_gpt_oss_reasons_calls_and_answers() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        f"<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}"
    )
    assert read_in_every_split([stage("gpt_oss")], text) == ("Think.", "I look.", [F])
    text = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>4"
    assert read_in_every_split([stage("gpt_oss")], text) == ("Think.", "4", [])


@pytest.mark.parametrize(
    ("is_inside", "text", "reasoning", "content"),
    [
        (False, "<think>\nWhy?\n\n</think>\n\nSo. ", "Why?", "So. "),
        (True, "Why?\n</think>So", "Why?", "So"),
        (True, "<think>Why?</think>So", "Why?", "So"),
        (True, "Why", "Why", ""),
        (False, "<think>Why </thin", "Why </thin", ""),
        (False, " So </think>", "", " So </think>"),
        (False, "<thin", "", "<thin"),
        (False, "<think>\n\n</think>\n\nSo", "", "So"),
    ],
)
def test_reasoning_ends_at_its_tag(is_inside: bool, text: str, reasoning: str, content: str) -> None:
    stages: list[Stage] = [partial(think, is_inside=is_inside)]
    assert read_in_every_split(stages, text) == (reasoning, content, [])


def test_calls_follow_reasoning() -> None:
    stages: list[Stage] = [partial(think, is_inside=False), stage("hermes")]
    text = f"<think>\n<tool_call>?\n</think>\n\nYes.\n<tool_call>\n{CALL}\n</tool_call>"
    assert read_in_every_split(stages, text) == ("<tool_call>?", "Yes.", [F])


def test_calls_beyond_the_limit_are_left_out() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 3
    assert read([stage("hermes")], text, max_calls=1) == ("", "", [F])
    assert read([stage("hermes")], *text, max_calls=2) == ("", "", [F, F])


@pytest.mark.parametrize(
    ("family", "unit"),
    [
        ("hermes", '<tool_call>{"name":'),
        ("hermes", '<tool_call>{"name":"'),
        ("llama3", '<|python_tag|>{"name":'),
        ("mistral", '[TOOL_CALLS][{"name":'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>"),
    ],
)
def test_broken_calls_cost_no_more_than_their_length(family: str, unit: str) -> None:
    """If every call were searched to the end of the text, this would take more than the limit."""
    for text in (unit * 4000, unit * 4000 + "}" * 4000):
        begin = time.process_time()
        read([stage(family)], text)
        assert time.process_time() - begin < 3, "the time grows faster than the text"


def test_arguments_are_passed_on_while_they_arrive() -> None:
    reader = AnswerReader([stage("hermes")])
    assert reader.push('<tool_call>\n{"name": "f", "argu') == []
    assert reader.push('ments": {') == [CallBegins("f"), Arguments("{")]
    assert reader.push('"a": ') == [Arguments('"a": ')]
    assert reader.push("1}") == [Arguments("1}")]
    assert reader.push("}\n</tool_call>") == reader.finish() == []


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f'[{{"name": "f", "parameters": {ARGUMENTS}}}]', "", [F]),
        (f' [ {{"name": "f", "parameters": {ARGUMENTS}}} , {CALL} ]\n', "", [F, F]),
        (f'[{{"name": "f", "parameters": {ARGUMENTS}}}', "", [F]),
        # Cut by the length of the answer
        (f'[{CALL}, {{"name": "f", "para', "", [F]),
        (f"[{CALL},", "", [F]),
        (f"[{CALL}, [1]]", ", [1]]", [F]),
        ("[]", "[]", []),
        ("Sorry [", "Sorry [", []),
        ('[{"name": "g", "parameters": {}}]', '[{"name": "g", "parameters": {}}]', []),
    ],
)
def test_a_required_answer_is_a_list_of_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    stages: list[Stage] = [partial(read_required, tools=TOOLS)]
    assert read_in_every_split(stages, text) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f" {ARGUMENTS}\n", "", [F]),
        ('{"a": ', "", [("f", '{"a": ')]),
        ("Sorry", "Sorry", []),
        ("[1]", "[1]", []),
    ],
)
def test_a_named_answer_is_the_arguments(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    stages: list[Stage] = [partial(read_named, name="f")]
    assert read_in_every_split(stages, text) == ("", content, calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text("abcdefgh_", min_size=1, max_size=6)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    arguments=st.dictionaries(KEYS, VALUES, max_size=3),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    indent=st.sampled_from([None, 1]),
)
def test_what_a_family_writes_is_read_again(
    family: str, arguments: dict[str, Any], cuts: list[int], indent: int | None
) -> None:
    written = json.dumps(arguments, indent=indent)
    text = WRITTEN[family]("get.time-2", written)
    edges = [0, *sorted(cuts), len(text)]
    reasoning, content, calls = read([stage(family)], *(text[start:end] for start, end in pairwise(edges)))
    assert (reasoning, content, [name for name, _ in calls]) == ("", "", ["get.time-2"])
    if family != "qwen3_coder":  # whose tags cannot say whether 1 is a text
        assert calls[0][1] == written


PIECES = st.sampled_from(
    [
        *(mark for family in FAMILIES.values() for mark in family.marks),
        *(
            "<think>",
            "</think>",
            "function",
            "f",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ",",
            ":",
            ";",
            " ",
            "\n",
            "```json",
        ),
        *(CALL, ARGUMENTS, '"name"', '"arguments": ', "<function=f>", "<parameter=a>", "</parameter>", "é"),
        *("analysis", "commentary to=functions.f", "final", "<", "|>"),
    ]
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(pieces=st.lists(PIECES, max_size=14), is_inside=st.booleans())
def test_any_text_is_read_the_same_in_pieces(family: str, pieces: list[str], is_inside: bool) -> None:
    text = "".join(pieces)
    for stages in ([stage(family)], [partial(think, is_inside=is_inside), stage(family)]):
        whole = read(stages, text)
        assert read(stages, *text) == whole
        assert read(stages, *pieces) == whole


def test_the_end_of_an_object_is_found_in_any_piece() -> None:
    text = '{"a\\\\": "}\\"]", "b": [{}, "\\\\"]} rest'
    end = text.index(" rest")
    for cut in range(len(text)):
        finder = EndFinder()
        first = finder.find(text[:cut])
        assert (first if first is not None else cut + (finder.find(text[cut:]) or 0)) == end


@pytest.mark.parametrize(
    ("template", "family", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes", None),
        ("{% if tools %}<tool_call>{% endif %}<think>", "hermes", "qwen3"),
        ("{% if tools %}<tool_call><function=x>{% endif %}", "qwen3_coder", None),
        ("{%- if tools is not none %}[AVAILABLE_TOOLS]{{ '[TOOL_CALLS]' }}{% endif %}", "mistral", None),
        ("{% for tool in tools %}<|python_tag|>{% endfor %}", "llama3", None),
        ("{% if tools %}<|channel|>x<|message|>{% endif %}", "gpt_oss", "gpt_oss"),
        ("{% if tools %}{% endif %}<｜tool▁call▁begin｜></think>", "deepseek", "qwen3"),
        ("{% if tools %}{{ tools }}{% endif %}", None, None),
        ("{% if tools %}<tool_call>{{ name }}<arg_key>{% endif %}", None, None),
        ("{{ tools }}<|start_header_id|>{{ 'parameters' }}", "llama3", None),
        ("", None, None),
    ],
)
def test_the_template_shows_its_family(template: str, family: str | None, reasoning: str | None) -> None:
    assert (family_of(template), reasoning_of(template)) == (family, reasoning)


def test_templates_that_add_arguments_to_a_text_are_known() -> None:
    added = "{{ '```json' + '\\n' + tool['function']['arguments'] + '\\n```' }}"
    assert wants_text(added)
    assert not wants_text("{{ '```json' + tool['function']['arguments'] | tojson }}")
    assert not wants_text("{%- if tool_call.arguments is string %}{{ tool_call.arguments }}{% else %}")


def test_the_variables_of_a_template_are_known() -> None:
    template = """{%- if not tools is defined %}{% set tools = none %}{% endif %}
    {{- "thinking and enable_thinking" }}
    {%- for message in messages %}{% generation %}{{ message.thinking }}{% endgeneration %}{% break %}
    {%- endfor %}
    {{- x["reasoning_effort"] | tojson }} reasoning_effort"""
    assert variables_of(template) == {"tools", "messages", "message", "x"}
    assert variables_of("{% if %}") == variables_of("") == variables_of("{{ 'a' }}") == frozenset()


def test_the_options_name_every_family() -> None:
    assert set(TOOL_PARSERS) == {"none", *FAMILIES}
    assert set(REASONING_PARSERS) == {"none", "qwen3", "deepseek_r1", "gpt_oss"}


def resolve(schema: Mapping[str, Any], reference: str) -> Any:
    found: Any = schema
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found[key.replace("~1", "/").replace("~0", "~")]
    return found


def test_the_schema_of_required_calls_keeps_references() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "root": {"$ref": "#"}}}
    tools = {
        "a/b": {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    }
    schema = json.loads(required_schema(tools | TOOLS, 1))
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    first, second, _ = schema["items"]["anyOf"]
    assert second["properties"]["parameters"] == TOOLS["f"] | {"additionalProperties": False}
    assert second["properties"]["name"]["enum"] == ["f"]
    moved = resolve(schema, first["properties"]["parameters"]["$ref"])
    assert resolve(schema, moved["properties"]["n"]["$ref"]) == moved["$defs"]["node"]
    inner = moved["$defs"]["node"]["properties"]
    assert resolve(schema, inner["next"]["$ref"]) == moved["$defs"]["node"]
    assert resolve(schema, inner["root"]["$ref"]) == moved
    assert "maxItems" not in json.loads(required_schema(TOOLS))


A = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED_A = A | {"additionalProperties": False}


@pytest.mark.parametrize(
    "around",
    [
        lambda one: one,
        lambda one: {"properties": {"b": one}, "required": ["b"]},
        lambda one: {"properties": {"properties": one}},
        lambda one: {"properties": {"b": {"anyOf": [one, {"type": "null"}]}}},
        lambda one: {"properties": {"b": {"items": one}}},
        lambda one: {"properties": {"b": {"$ref": "#/$defs/c"}}, "$defs": {"c": one}},
    ],
)
def test_objects_of_arguments_have_only_the_properties_that_they_list(around: Callable[[Any], Any]) -> None:
    schema = around(A)
    assert closed_schema(schema) == around(CLOSED_A) | {"additionalProperties": False}
    assert schema == around(A)


def test_a_function_without_parameters_gets_none() -> None:
    schema = {"type": "object", "properties": {}}
    assert closed_schema(schema) == schema | {"additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        A | {"additionalProperties": True},
        A | {"additionalProperties": {"type": "string"}},
        A | {"required": ["b"]},
        A | {"minProperties": 2},
        A | {"allOf": [{"properties": {"b": {}}}]},
        A | {"anyOf": [{"required": ["a"]}]},
        A | {"$ref": "#/$defs/c", "$defs": {"c": {"properties": {"b": {}}}}},
        {"required": ["b"], "anyOf": [A]},
        {"anyOf": [A], "oneOf": [A]},
        {"type": "object"},
        {"type": "object", "properties": 1},
        {"properties": {}, "required": 1},
        {"properties": {}, "required": [[]]},
        True,
        1,
    ],
)
def test_objects_that_have_to_have_others_stay_open(schema: Any) -> None:
    assert closed_schema(schema) == schema


def test_an_object_of_any_properties_within_arguments_stays_open() -> None:
    schema = {"properties": {"b": {"type": "object", "properties": {}}}}
    assert closed_schema(schema)["properties"] == schema["properties"]
