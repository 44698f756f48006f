"""Calls as models write them in practice: with a missing end, several in one mark, and in the history with
arguments that are no object. They are read the same whole and in every split."""

import json
from functools import partial
from typing import Any

import pytest

from lightkv.router.text.answer_reader import AnswerReader, CallReader, joined, think
from lightkv.router.text.tool_calls import history
from lightkv.router.text.tool_calls.constrained import read_required
from lightkv.router.text.tool_calls.families import FAMILIES

TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    "g.x": {"type": "object", "properties": {}},
    "plan_next": {"type": "object", "properties": {}},
}
A, B = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g.x", "arguments": {}}'
F, G = ("f", {"a": 1}), ("g.x", {})
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
COMMENTARY = "<|channel|>commentary to="
MESSAGE = " <|constrain|>json<|message|>"
TO_F = f"{COMMENTARY}functions.f{MESSAGE}"
ROW = "<parameter=a>\n1\n</parameter>\n"

CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    # family, text, content, calls
    ("hermes", f"{OPEN}{A}\n{B}{CLOSE}", "", [F, G]),
    ("hermes", f"{OPEN}{A}{B}{A}{CLOSE}", "", [F, G, F]),
    ("hermes", f"{OPEN}{A},\n{B}{CLOSE}", "", [F, G]),
    ("hermes", f"{OPEN}{A}; {B}{CLOSE} Done.", " Done.", [F, G]),
    ("hermes", f"{OPEN}[{A}, {B}]{CLOSE}", "", [F, G]),
    ("hermes", f"{OPEN}[ {A} {B}{CLOSE}", "", [F, G]),
    ("hermes", f"{OPEN}[{A}]{CLOSE}\n{OPEN}{B}{CLOSE}", "", [F, G]),
    ("hermes", f"{OPEN}{A}", "", [F]),
    ("hermes", f"{OPEN}{A}\n{OPEN}{B}", "", [F, G]),
    ("hermes", f"{OPEN}{A[:-1]}{CLOSE}{OPEN}{B}{CLOSE}", "", [F, G]),
    ("hermes", f"{OPEN}{A[:-2]}{CLOSE}{OPEN}{B}{CLOSE}", "", [F, G]),
    ("hermes", OPEN + '{"arguments": {"a": 1}, "name": "f"' + f"{CLOSE}{OPEN}{B}", "", [F, G]),
    ("hermes", OPEN + '{"name": "g.x", "arguments": null}' + CLOSE, "", [G]),
    ("hermes", OPEN + '{"name": "g.x", "arguments": ""}' + CLOSE, "", [G]),
    ("hermes", OPEN + '{"name": "g.x", "arguments": "null"}' + CLOSE, "", [G]),
    ("hermes", OPEN + '{"name": "g.x", "arguments": []}' + CLOSE, "", [G]),
    ("hermes", f"{OPEN}{A}}}{CLOSE}", "", [F]),
    ("hermes", f"{OPEN}{A}\n}}\n{CLOSE}\n{OPEN}{B}}}{CLOSE} Done.", " Done.", [F, G]),
    ("qwen3_coder", f"{OPEN}{A}}}{CLOSE}", "", [F]),
    ("qwen3_coder", f"{OPEN}<function=f>\r\n{ROW}</function>{CLOSE}".replace("\n1\n", "\r\n1\r\n"), "", [F]),
    ("mistral", "[TOOL_CALLS]g.x[ARGS]null", "", [G]),
    ("mistral", '[TOOL_CALLS]g.x[ARGS]null[TOOL_CALLS]f[ARGS]{"a": 1}', "", [G, F]),
    ("mistral", "[TOOL_CALLS]g.x[ARGS]no", "[TOOL_CALLS]g.x[ARGS]no", []),
    ("deepseek", f"{ALL}{BEGIN}g.x{SEP}null{END}{ALL_END}", "", [G]),
    ("deepseek", f"{ALL}{BEGIN}function{SEP}g.x\n```json\nnull\n```{END}{ALL_END} ok", " ok", [G]),
    ("deepseek", f'{ALL}{BEGIN}f{SEP}{{"a": 1}}{END}\ng.x{SEP}null{END}{ALL_END}', "", [F, G]),
    (
        "deepseek",
        f"{ALL}{BEGIN}function{SEP}plan_next\n```json\n{{}}\n```{END}{ALL_END}",
        "",
        [("plan_next", {})],
    ),
    ("gpt_oss", f"{COMMENTARY}g.x{MESSAGE}null<|call|>", "", [G]),
    ("hermes", f"{OPEN}{A}{CLOSE} I end it with </tool_call>.", " I end it with </tool_call>.", [F]),
    ("hermes", f"{OPEN}{A} Done.{CLOSE} Yes.", "Done.\n Yes.", [F]),
    ("llama3", f"[{A}, {B}]", "", [F, G]),
    ("llama3", f"{A}, {B}", "", [F, G]),
    ("llama3", f"{A}\n{B}", "", [F, G]),
    ("llama3", f"<|python_tag|>[{A}; {B}", "", [F, G]),
    ("llama3", f"<|python_tag|>{A}<|python_tag|>{B}", "", [F, G]),
    ("llama3", "[1, 2]", "[1, 2]", []),
    ("mistral", f"[TOOL_CALLS][{A}, {B}", "", [F, G]),
    ("mistral", f"[TOOL_CALLS][{A}\n{B}]", "", [F, G]),
    ("mistral", f"[TOOL_CALLS]{A}", "", [F]),
    ("mistral", f"[TOOL_CALLS]{A}\n{B}", "", [F, G]),
    ("mistral", f"[TOOL_CALLS]{A}[TOOL_CALLS]{B}", "", [F, G]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}g.x[ARGS]{}', "", [F, G]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}, g.x{} and so', " and so", [F, G]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g.x[ARGS]{}', "", [F, G]),
    ("mistral", "[TOOL_CALLS]g.x[ARGS]", "", [G]),
    ("mistral", '[TOOL_CALLS]g.x[ARGS][TOOL_CALLS]f[ARGS]{"a": 1}', "", [G, F]),
    ("mistral", "[TOOL_CALLS]f[ARGS] nullable", "[TOOL_CALLS]f[ARGS] nullable", []),
    ("deepseek", f'{ALL}{BEGIN}f{SEP}{{"a": 1}}{BEGIN}g.x{SEP}{{}}', "", [F, G]),
    ("deepseek", f'{BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n{END}{BEGIN}g.x{SEP}{{}}', "", [F, G]),
    ("deepseek", f'{ALL}{BEGIN}f{SEP}{{"a": 1}}{END}\ng.x{SEP}{{}}{END}{ALL_END}', "", [F, G]),
    ("deepseek", f'{ALL}{BEGIN}function{SEP}f\n{{"a": 1}}{END}{ALL_END}', "", [F]),
    ("deepseek", f'{ALL}{BEGIN}f{SEP}```json\n{{"a": 1}}\n```{END}{ALL_END} ok', " ok", [F]),
    ("deepseek", f'{ALL}{BEGIN}f{SEP}{{"a": 1{END}{BEGIN}g.x{SEP}{{}}{END}{ALL_END}', "", [F, G]),
    ("qwen3_coder", f"{OPEN}<function=f>\n{ROW}</function>\n<function=g.x>\n</function>{CLOSE}", "", [F, G]),
    ("qwen3_coder", f"{OPEN}<function=f>\n{ROW}{CLOSE}\n{OPEN}<function=g.x>{CLOSE}", "", [F, G]),
    ("qwen3_coder", f"{OPEN}<function=f>\n{ROW}", "", [F]),
    ("qwen3_coder", f"{OPEN}<function=f>\n<parameter=a>\n1\n</function>{CLOSE}", "", [F]),
    ("qwen3_coder", f"{OPEN}<function=f>\n<parameter=a>\n1{CLOSE}", "", [F]),
    ("qwen3_coder", f"{OPEN}<function=f>\n<parameter=a>1</function>{OPEN}{B}{CLOSE}", "", [F, G]),
    (
        "qwen3_coder",
        f"{OPEN}<function=f>\n<parameter=s>\nx\n<parameter=a>\n1\n</parameter>\n</function>{CLOSE}",
        "",
        [("f", {"s": "x", "a": 1})],
    ),
    (
        "qwen3_coder",
        f"{OPEN}<function=f>\n<parameter=s>\n<parameter=z>\n</function>\n</parameter>\n</function>{CLOSE}",
        "",
        [("f", {"s": "<parameter=z>\n</function>"})],
    ),
    ("qwen3_coder", f"{OPEN}{A}\n{B}{CLOSE} Done.", " Done.", [F, G]),
    ("qwen3_coder", f'{OPEN}<function=f>\n{{"a": 1}}\n</function>{CLOSE}', "", [F]),
    ("gpt_oss", f'{COMMENTARY}f{MESSAGE}{{"a": 1}}<|call|>', "", [F]),
    ("gpt_oss", f"{COMMENTARY}g.x{MESSAGE}{{}}<|call|>", "", [G]),
    ("gpt_oss", f'{COMMENTARY} functions.f{MESSAGE}{{"a": 1}}', "", [F]),
    ("gpt_oss", ' to=f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", [F]),
    ("gpt_oss", f'<|channel|>analysis to=f{MESSAGE}{{"a": 1}}<|call|>', "", [F]),
    ("gpt_oss", f"{COMMENTARY}functions.g.x{MESSAGE}<|call|>", "", [G]),
    ("gpt_oss", f"{TO_F}nullable<|call|>", "nullable", []),
    ("gpt_oss", f"{COMMENTARY}functions.g.x{MESSAGE}", "", [G]),
    ("gpt_oss", f'{TO_F}{{"a": 1}}{COMMENTARY}g.x{MESSAGE}{{}}', "", [F, G]),
    ("gpt_oss", f'{TO_F}{{"a": 1<|call|><|start|>assistant{COMMENTARY}g.x{MESSAGE}{{}}', "", [F, G]),
    ("gpt_oss", f'<|channel|>commentary<|message|>I look.{TO_F}{{"a": 1}}', "I look.", [F]),
    ("gpt_oss", f"{COMMENTARY}python{MESSAGE}{{}}<|call|>", "{}", []),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_a_call_is_not_lost(family: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    def read(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
        reader = AnswerReader([lambda source: FAMILIES[family].read(source, TOOLS)])
        parts = [part for piece in pieces for part in reader.push(piece)]
        return joined([*parts, *reader.finish()])[1:]

    whole = read(text)
    assert (whole[0], [(name, json.loads(arguments)) for name, arguments in whole[1]]) == (content, calls)
    assert read(*text) == whole
    for cut in range(1, len(text)):
        assert read(text[:cut], text[cut:]) == whole


def test_reasoning_without_an_end_is_followed_by_a_call() -> None:
    text = f'<|channel|>analysis<|message|>Think.{TO_F}{{"a": 1}}<|call|>'
    reader = AnswerReader([lambda source: FAMILIES["gpt_oss"].read(source, TOOLS)])
    assert joined([*reader.push(text), *reader.finish()]) == ("Think.", "", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>\nHm.\n{OPEN}{A}{CLOSE}", ("Hm.", "", [("f", '{"a": 1}')])),
        (f"<think>Hm.{OPEN}{A}\n{OPEN}{B}", ("Hm.", "", [("f", '{"a": 1}'), ("g.x", "{}")])),
        (f"<think>Hm.{OPEN}{A}{CLOSE} So</think>Yes.", (f"Hm.{OPEN}{A}{CLOSE} So", "Yes.", [])),
        ("<think>I write <tool_call> and", ("I write <tool_call> and", "", [])),
        ("<think>I write <tool_", ("I write <tool_", "", [])),
        (f"<think>{OPEN}?</think>{OPEN}{A}", (f"{OPEN}?", "", [("f", '{"a": 1}')])),
    ],
)
def test_a_call_ends_reasoning_that_has_no_end(text: str, expected: Any) -> None:
    hermes = CallReader("<tool_call>", lambda source: FAMILIES["hermes"].read(source, TOOLS))

    def read(*pieces: str) -> Any:
        reader = AnswerReader([partial(think, is_inside=False, calls=hermes), hermes.read])
        parts = [part for piece in pieces for part in reader.push(piece)]
        return joined([*parts, *reader.finish()])

    assert read(text) == read(*text) == expected
    for cut in range(1, len(text)):
        assert read(text[:cut], text[cut:]) == expected


@pytest.mark.parametrize("text", [f"[{A} {B}]", f"[{A}; {B}", f"{A}\n{B}", f"[{A}, {B},]", f" [{A},{B}] "])
def test_required_calls_need_no_commas(text: str) -> None:
    reader = AnswerReader([lambda source: read_required(source, TOOLS)])
    _, content, calls = joined([*reader.push(text), *reader.finish()])
    assert (content, [name for name, _ in calls]) == ("", ["f", "g.x"])


EMPTY: list[Any] = [None, "", " ", "null", " null\n", "{}", {}, [], "[]", '"{}"', '"null"', '""']


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("arguments", EMPTY)
def test_a_call_without_arguments_has_an_empty_object(arguments: Any, as_text: bool) -> None:
    calls = [{"id": "c", "function": {"name": "f", "arguments": arguments}}]
    message = history.with_calls({"role": "assistant", "content": None, "tool_calls": calls}, as_text, None)
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == ("{}" if as_text else {})


@pytest.mark.parametrize(
    ("arguments", "as_object", "as_text"),
    [
        ('{"a": 1.50}', {"a": 1.5}, '{"a": 1.50}'),
        ('"{\\"a\\": 1}"', {"a": 1}, '{"a": 1}'),
        ({"a": "é"}, {"a": "é"}, '{"a": "é"}'),
        ('{"a": ', '{"a": ', '{"a": '),
        ("[1]", "[1]", "[1]"),
        ("nothing", "nothing", "nothing"),
    ],
)
def test_other_arguments_stay_what_they_are(arguments: Any, as_object: Any, as_text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    for is_text, expected in ((False, as_object), (True, as_text)):
        (found,) = history.with_calls(message, is_text, None)["tool_calls"]
        assert found["function"]["arguments"] == expected
