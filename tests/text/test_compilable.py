"""Schemas that llguidance compiles, and those that it refuses or fails on."""

import json
from functools import cache
from typing import Any

import pytest

from lightkv.router.api.grammars.check_process import check
from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.sampling_params import Grammar
from lightkv.router.text.grammars import ModelTokens, reason_of
from lightkv.router.text.tokenizer import Tokenizer

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
TWO = {"type": "object", "properties": {"kind": TEXT, "x": INTEGER}, "additionalProperties": False}


@cache
def model() -> ModelTokens:
    """Returns the default model's tokens: llguidance's fault shows with words as tokens, not with bytes."""
    directory = resolve(DEFAULT_MODEL, lambda line: None)
    return ModelTokens.load(directory, Tokenizer(directory).vocab_size)


def closed(**properties: Any) -> dict[str, Any]:
    """Returns the schema of an object that has these properties, and may have no others."""
    listed = {"type": "object", "properties": properties, "required": [*properties]}
    return listed | {"additionalProperties": False}


def tagged(kind: str, **more: Any) -> dict[str, Any]:
    return closed(kind={"const": kind}, **more)


CASES: list[tuple[Any, list[Any], list[Any]]] = [
    # schema, values that follow it, values that do not
    (
        closed(a={"type": "integer", "minimum": 3}, b=TEXT)
        | {"patternProperties": {"^(a|c)$": {"type": "integer", "maximum": 5}, "^b$": {"maxLength": 1}}},
        [{"a": 4, "b": "x"}, {"a": 3, "b": "", "c": 1}],
        [{"a": 6, "b": ""}, {"a": 2, "b": ""}, {"a": 4, "b": "xy"}, {"a": 4, "b": "", "d": 1}],
    ),
    (
        {"type": "object", "properties": {"a": INTEGER}, "patternProperties": {"^a$": {"minimum": 3}}},
        [{}, {"a": 3}, {"a": 3, "z": "b"}],
        [{"a": 2}],
    ),
    (
        {"type": "array", "items": closed(a=INTEGER) | {"patternProperties": {"^a$": INTEGER}}},
        [[], [{"a": 1}, {"a": 2}]],
        [[{}], [{"b": 1}]],
    ),
    (
        {"oneOf": [INTEGER, {"$ref": "#/$defs/l"}], "$defs": {"l": {"type": "array", "items": INTEGER}}},
        [1, [1]],
        ["a", ["a"]],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {"a": tagged("a", x=INTEGER), "b": tagged("b", y=TEXT)},
        },
        [{"kind": "a", "x": 1}, {"kind": "b", "y": ""}],
        [{"kind": "a", "y": ""}, {"kind": "c"}],
    ),
    ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]}, [3, 5], [4]),
    (
        {"oneOf": [{"$ref": "#/$defs/e"}, {"enum": ["c", 1]}], "$defs": {"e": {"enum": ["a"]}}},
        ["a", "c", 1],
        ["b"],
    ),
    ({"oneOf": [closed(a=INTEGER), closed(b=INTEGER)]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
    ({"oneOf": [INTEGER, {"type": "number"}]}, [1, 1.5], ["a"]),  # as anyOf
    (
        closed(o={"oneOf": [{"type": ["null", "string"]}, {"$ref": "#/$defs/n"}]})
        | {"$defs": {"n": INTEGER}},
        [{"o": 1}, {"o": None}],
        [{"o": []}],
    ),
    (closed(oneOf=INTEGER, patternProperties=TEXT), [{"oneOf": 1, "patternProperties": ""}], [{}]),
]


@pytest.mark.parametrize(("schema", "taken", "others"), CASES)
def test_a_schema_is_followed(schema: Any, taken: list[Any], others: list[Any]) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    assert check(grammar, model())[0] == ""
    begin = model().compile(grammar)
    for values, is_taken in ((taken, True), (others, False)):
        for value in values:
            matcher = begin.deep_copy()
            ids = model().tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False))
            is_whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert is_whole == is_taken, value
            assert not matcher.is_error()


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (closed(a={"type": "array", "items": {"not": TEXT}}), "not"),
        (closed(a={"type": "string", "pattern": "("}), "unclosed group"),
        (closed(**{"a/b": {"type": "string", "format": "colour"}}), "colour"),
        ({"anyOf": [INTEGER, {"type": "array", "uniqueItems": True}]}, "uniqueItems"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer", "minimum": 10**30}}}, "range"),
        (closed(a={"$ref": "#/$defs/none"}), "does not exist"),
        (closed(a=closed(b={"type": "tuple"})), "tuple"),
        (TWO | {"patternProperties": {"^a": INTEGER, "b$": TEXT}}, "not disjoint"),
        (closed(a={"patternProperties": {"^(?!a)": INTEGER}}), "look-around"),
        (closed(a=INTEGER) | {"patternProperties": {"^a$": INTEGER}}, "no text matches it"),
        (closed(a={"const": 1, "if": TEXT, "then": TEXT}), "if"),
    ],
)
def test_what_is_wrong_is_named(schema: Any, says: str) -> None:
    for grammar in (
        Grammar("json_schema", json.dumps(schema)),
        Grammar("structural_tag", json.dumps({"format": {"type": "json_schema", "json_schema": schema}})),
    ):
        assert says in check(grammar, model())[0]


def test_a_panic_is_no_answer() -> None:
    score = {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}
    tags = {"type": "array", "maxItems": 2, "items": {"type": "string", "minLength": 3, "maxLength": 5}}
    schema = closed(score=score, tags=tags) | {"patternProperties": {"^score$": INTEGER}}
    schema["x-guidance"] = {"whitespace_pattern": ""}
    for grammar in (
        Grammar("json_schema", json.dumps(schema)),
        Grammar("lark", f"start: %json {json.dumps(schema)}"),
    ):
        assert check(grammar, model())[0] == "llguidance fails on it; write it in another way"


@pytest.mark.parametrize("text", ['root ::= "\\', "root ::= [a", "root ::= (" * 3000, 'root ::= "\\x'])
def test_an_error_of_a_library_is_no_answer(text: str) -> None:
    wrong, _ = check(Grammar("lark", text), model())
    assert wrong.startswith("it is not a grammar in GBNF")
    assert "index" not in wrong


def test_a_reason_is_without_the_lines_of_the_grammar() -> None:
    listed = "Unknown format: colour\n  1 | %llguidance {}\n  2 | start: (tag_1)"
    assert reason_of(listed) == "Unknown format: colour"
