"""Qwen3-Coder's parameters by their schema: the reader and the grammar of required calls agree on them."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from lightkv.router.sampling_params import Grammar
from lightkv.router.text.answer_reader import AnswerReader, joined
from lightkv.router.text.grammars import InvalidGrammar
from lightkv.router.text.schemas.parameters import ParameterReader
from lightkv.router.text.tool_calls import qwen3_coder
from lightkv.router.text.tool_calls.closed_schema import closed_schema
from tests.support.grammars import compile_grammar

TEXT, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
LIST = {"type": "array", "items": TEXT}
DEFINITIONS = {
    "Mode": {"enum": ["1", "2"], "type": "string"},
    "Point": {"type": "object", "properties": {"x": INTEGER, "next": {"$ref": "#/$defs/Point"}}},
    "Chain": {"$ref": "#/$defs/Mode"},
}


def call(**parameters: str) -> str:
    rows = [f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters.items()]
    return f"<tool_call>\n<function=f>\n{''.join(rows)}</function>\n</tool_call>"


def json_call(**parameters: Any) -> str:
    arguments = json.dumps(parameters, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def function_of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"o": schema}, "required": ["o"], "$defs": DEFINITIONS}


def read(parameters: Any, *pieces: str) -> list[tuple[str, Any]]:
    """Returns the calls that are read, with their arguments parsed. No content may be left."""
    reader = AnswerReader([lambda source: qwen3_coder.read(source, {"f": parameters})])
    parts = [part for piece in pieces for part in reader.push(piece)]
    _, content, calls = joined([*parts, *reader.finish()])
    assert content == ""
    return [(name, json.loads(arguments)) for name, arguments in calls]


def value_of(schema: Any, text: str) -> Any:
    """Returns the value of a parameter, which has to be the same in every split."""
    whole = call(o=text)
    ((_, arguments),) = read(function_of(schema), whole)
    for cut in range(1, len(whole)):
        assert read(function_of(schema), whole[:cut], whole[cut:]) == [("f", arguments)]
    assert read(function_of(schema), *whole) == [("f", arguments)]
    return arguments["o"]


@pytest.mark.parametrize(
    "text",
    ["\nfoo", "\n\n\nfoo", "\n", "\n\n", "", "foo\n\n", "\tfoo\n", "\n  if x:\n    y\n", "\r\nfoo", "\n1"],
)
def test_a_text_keeps_its_own_line_ends(text: str) -> None:
    assert value_of(TEXT, text) == text


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [TEXT, NULL]}, "007", "007"),
        ({"anyOf": [TEXT, NULL]}, "null", None),
        ({"oneOf": [NULL, TEXT]}, "[1, 2]", "[1, 2]"),
        ({"type": ["null", "string"]}, "-1.5", "-1.5"),
        ({"$ref": "#/$defs/Mode"}, "2", "2"),
        ({"$ref": "#/$defs/Chain"}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/Mode"}, NULL], "default": None}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Mode"}], "description": "a mode"}, "1", "1"),
        ({"const": "5"}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"enum": ["true", "false"]}, "true", "true"),
        ({"enum": ["auto", 1, None, True]}, "1", 1),
        ({"enum": ["auto", 1, None, True]}, "auto", "auto"),
        ({"enum": ["auto", 1, None, True]}, "True", True),
        ({"enum": ["auto", 1, "None"]}, "None", "None"),
        ({"enum": ["a", "b"]}, '"a"', "a"),
        ({"anyOf": [INTEGER, TEXT]}, "5", 5),
        ({"anyOf": [INTEGER, TEXT]}, "5.5", "5.5"),
        ({"anyOf": [INTEGER, TEXT]}, "True", "True"),
        ({"anyOf": [{"type": "integer", "maximum": 9}, TEXT]}, "12345", "12345"),
        ({"anyOf": [{"type": "boolean"}, TEXT]}, "False", False),
        ({"anyOf": [LIST, TEXT]}, '["a"]', ["a"]),
        ({"anyOf": [LIST, TEXT]}, "[1]", "[1]"),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, TEXT]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, TEXT]}, '{"x": "a"}', '{"x": "a"}'),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "1e999", "1e999"),
        (INTEGER, "many", "many"),
        (INTEGER, " 7 ", 7),
        ({"type": "boolean"}, "true", True),
        (NULL, "None", None),
        ({"type": "object"}, "{'a': None, \"b\": 'it\\'s \"so\"'}", {"a": None, "b": 'it\'s "so"'}),
        ({"type": "array"}, "[True, 'None']", [True, "None"]),
        ({"type": "object"}, "{'a':", "{'a':"),
        (TEXT, '"quoted"', '"quoted"'),
        (TEXT, "None", "None"),
        ({}, "12", 12),
        ({}, "twelve", "twelve"),
        (True, "[1]", [1]),
        ({"$ref": "#/$defs/Missing"}, "12", 12),
        ({"type": "string", "enum": ["a"]}, "5", "5"),
        ({"minLength": 2}, "5", 5),
    ],
)
def test_a_value_is_one_that_its_schema_takes(schema: Any, text: str, value: Any) -> None:
    found = value_of(schema, text)
    assert (found, type(found)) == (value, type(value))


def grammar_of(parameters: Any) -> Any:
    format = qwen3_coder.form({"f": closed_schema(parameters)}, False)
    text = json.dumps({"type": "structural_tag", "format": format})
    return compile_grammar(Grammar("structural_tag", text), LLTokenizer("byte"))


def accepts(matcher: Any, text: str) -> bool:
    copy = matcher.deep_copy()
    return bool(copy.try_consume_tokens(list(text.encode())) == len(text.encode()) and copy.is_accepting())


@pytest.mark.parametrize(
    ("schema", "taken", "others"),
    [
        ({"type": ["string", "null"]}, ["ab", "null", "\na\n"], ["a</parameter>b"]),
        ({"enum": ["on", 1, None]}, ["on", "1", "null"], ["off", '"on"', "2"]),
        ({"const": "x y"}, ["x y"], ["x"]),
        ({"$ref": "#/$defs/Mode"}, ["1", "2"], ["3", '"1"']),
        ({"oneOf": [{"$ref": "#/$defs/Mode"}, {"type": "boolean"}]}, ["1", "true"], ["True", "3"]),
        ({"$ref": "#/$defs/Point"}, ['{"x": 1, "next": {"x": 2}}'], ['{"x": "a"}', "x"]),
        ({"anyOf": [INTEGER, LIST]}, ["1", '["a"]'], ["a", "[1]"]),
        ({}, ["1", "any text", "[1, 2"], ["a</parameter>\nb"]),
    ],
)
def test_the_grammar_takes_the_texts_of_a_schema(schema: Any, taken: list[str], others: list[str]) -> None:
    matcher = grammar_of(function_of(schema))
    for text in taken:
        assert accepts(matcher, call(o=text)), text
    for text in others:
        assert not accepts(matcher, call(o=text)), text
    assert not accepts(matcher, call())


@pytest.mark.parametrize(
    ("schema", "taken", "others"),
    [
        ({"type": "string", "pattern": "^[0-9]{3}$"}, ["123"], ["12", "1234", "abc", ""]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "\n\n"], ["a", "abcd"]),
        ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-02-30", "2024-2-1", "soon"]),
        ({"anyOf": [{"type": "string", "maxLength": 2}, NULL]}, ["ab", "", None], ["abc", 1]),
        ({"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, INTEGER]}, ["ab", 12], ["A", "1a", 1.5]),
        ({"allOf": [{"type": "string"}, {"enum": ["a", "b", 1]}]}, ["a", "b"], [1, "c"]),
        ({"enum": ["a", "bb"], "maxLength": 1}, ["a"], ["bb"]),
    ],
)
def test_what_else_a_schema_says_of_texts_is_followed_as_json(
    schema: Any, taken: list[Any], others: list[Any]
) -> None:
    matcher = grammar_of(function_of(schema))
    for value in taken:
        written = json_call(o=value)
        assert accepts(matcher, written), value
        assert read(function_of(schema), written) == [("f", {"o": value})]
    for value in others:
        assert not accepts(matcher, json_call(o=value)), value
    assert not accepts(matcher, call(o="ab"))


@pytest.mark.parametrize(
    ("parameters", "taken", "others"),
    [
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": INTEGER}}}},
            [{"a": "1"}, {}],
            [{"a": "x"}, {"b": "1"}],
        ),
        (
            {"type": "object", "additionalProperties": INTEGER},
            [{}, {"a": "1", "b": "2"}],
            [{"a": "x"}],
        ),
        (
            {
                "type": "object",
                "properties": {"a": INTEGER},
                "required": ["b"],
                "additionalProperties": INTEGER,
            },
            [{"b": "2"}, {"a": "1", "b": "2"}],
            [{"a": "1"}, {"b": "x"}],
        ),
        ({"type": "object", "properties": {"a": False, "b": True}}, [{}, {"b": "x"}], [{"a": "1"}]),
        ({"type": "object", "properties": {}}, [{}], [{"a": "1"}]),
    ],
)
def test_the_parameters_follow_the_schema_of_all(
    parameters: Any, taken: list[dict[str, str]], others: list[dict[str, str]]
) -> None:
    matcher = grammar_of(parameters)
    for given in taken:
        assert accepts(matcher, call(**given)), given
        assert [*read(parameters, call(**given))[0][1]] == [*given]
    for given in others:
        assert not accepts(matcher, call(**given)), given


@pytest.mark.parametrize(
    ("parameters", "taken", "others"),
    [
        (
            {
                "anyOf": [
                    {"properties": {"a": INTEGER}, "required": ["a"]},
                    {"properties": {"b": TEXT}, "required": ["b"]},
                ],
                "type": "object",
            },
            [{"a": 1}, {"b": "x"}],
            [{}, {"a": "x"}, {"a": 1, "c": "x"}],
        ),
        (
            {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "minProperties": 1},
            [{"a": "x"}, {"b": ""}],
            [{}, {"a": 1}],
        ),
        ({"type": "object", "minProperties": 1}, [{"a": "x"}], [{}]),
        ({"type": "object", "patternProperties": {"^a": TEXT}}, [{"a": "x"}], [{"a": 1}]),
    ],
)
def test_what_else_a_schema_says_of_all_parameters_is_followed_as_json(
    parameters: Any, taken: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    matcher = grammar_of(parameters)
    for given in taken:
        assert accepts(matcher, json_call(**given)), given
        assert read(parameters, json_call(**given)) == [("f", given)]
    for given in others:
        assert not accepts(matcher, json_call(**given)), given


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (function_of({"type": "string", "format": "colour"}), "colour"),
        (function_of({"type": "string", "not": {"const": "a"}}), "not"),
        (function_of({"type": "string", "minLength": 3, "maxLength": 2}), "'o' is unsatisfiable"),
        (function_of({"$ref": "#/$defs/Missing"}), "Missing"),
        (function_of(False), "Unsatisfiable"),
        (function_of({"type": 5}), "type"),
        ({"type": "object", "properties": {"a": TEXT}, "not": {"required": ["a"]}}, "not"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused(parameters: Any, says: str) -> None:
    with pytest.raises(InvalidGrammar) as error:
        grammar_of(parameters)
    assert says in str(error.value)


def test_a_structural_tag_says_what_has_no_form_as_texts() -> None:
    for schema, says in (
        (function_of({"type": "string", "pattern": "a"}), "the parameter 'o'"),
        ({"type": "object", "minProperties": 1}, "minProperties of all parameters"),
        ({"type": "array"}, "no object"),
    ):
        tag = {"type": "structural_tag", "format": {"type": "qwen_xml_parameter", "json_schema": schema}}
        with pytest.raises(InvalidGrammar) as error:
            compile_grammar(Grammar("structural_tag", json.dumps(tag)), LLTokenizer("byte"))
        assert says in str(error.value)


def test_schemas_without_an_end_cost_little() -> None:
    """Each of these refers twice to the next one, and the last to the first."""
    chain = {f"n{at}": {"anyOf": [{"$ref": f"#/$defs/n{(at + 1) % 99}"}] * 2} for at in range(99)}
    parameters = {"type": "object", "properties": {"o": {"$ref": "#/$defs/n0"}}, "$defs": chain}
    assert read(parameters, call(o="5")) == [("f", {"o": 5})]
    assert qwen3_coder.form({"f": parameters}, False)


@pytest.mark.parametrize("quote", ['"', "'", '\\"', "\\'"])
def test_quotes_without_an_end_cost_little(quote: str) -> None:
    """8,000 of them took more than a second when each was looked through to the end of the text."""
    text = quote * 200_001
    assert ParameterReader({"properties": {"n": {"type": "integer"}}}).value("n", text) == text


Follows = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("schema", "follows"),
    [
        ({"type": "string", "maxLength": 4}, lambda x: isinstance(x, str) and len(x) <= 4),
        ({"anyOf": [{"type": "string", "maxLength": 4}, NULL]}, lambda x: x is None or len(x) <= 4),
        ({"type": "string", "pattern": "^[<a-c/>\n]{2,6}$"}, lambda x: re.fullmatch("[<a-c/>\n]{2,6}", x)),
        ({"type": ["string", "integer"], "pattern": "^[0-9x]$"}, lambda x: isinstance(x, int) or len(x) == 1),
        ({"type": "string", "format": "ipv6"}, lambda x: x.count(":") >= 2),
        ({"enum": ["", "null", "1", 2]}, lambda x: x in ("", "null", "1", 2)),
        ({"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 3}, lambda x: set(x) <= {"a", 1}),
    ],
)
def test_what_the_grammar_lets_a_model_write_is_read_as_a_value_of_the_schema(
    schema: Any, follows: Follows
) -> None:
    matcher = grammar_of(function_of(schema))
    rng = np.random.default_rng(0)
    for _ in range(8):
        row, written = matcher.deep_copy(), b""
        while not row.is_stopped():
            bits = np.unpackbits(np.frombuffer(row.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [one for one in np.flatnonzero(bits).tolist() if one < 128]
            token = int(rng.choice(allowed)) if allowed else int(np.flatnonzero(bits)[0])
            if not row.consume_token(token):
                raise AssertionError(row.get_error())
            written += bytes([token]) if token < 256 else b""
            assert len(written) < 2000
        ((_, arguments),) = read(function_of(schema), written.decode("utf-8", "replace"))
        assert follows(arguments["o"]), arguments
