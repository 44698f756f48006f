"""Structural tags as grammars: which texts each format takes, with a tokenizer of bytes and with one whose
marks are special tokens."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.sampling_params import Grammar
from lightkv.router.text.answer_reader import joined
from lightkv.router.text.grammars import Grammars, InvalidGrammar
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.router.text.tool_calls.constrained import read_calls_or_format
from lightkv.router.text.tool_calls.families import FAMILIES
from lightkv.router.text.tool_calls.source import Reader
from tests.support.grammars import compile_grammar
from tests.support.written_calls import WRITTEN

ANY = {"type": "any_text"}
JSON = {
    "type": "json_schema",
    "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
MARKS = ("<|channel|>", "<|end|>", "[CALLS]", "<tool_call>", "<|message|>", "[TOOL_CALLS]", "<eos>")


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: Any, end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def row(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def triggered(**options: Any) -> dict[str, Any]:
    tags = [tag("<f=a>", JSON, "</f>"), tag("<f=b>", const("x"), "</f>")]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags} | options


def separated(separator: str, **options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [tag("[", JSON, "]")], "separator": separator} | options


PARAMETERS = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"$ref": "#/$defs/n"},
        "e": {"type": "string", "enum": ["u", "v"]},
    },
    "required": ["s"],
    "$defs": {"n": {"type": "integer"}},
}
XML = {"type": "qwen_xml_parameter", "json_schema": PARAMETERS}
CALL = '<f=a>{"a":1}</f>'
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # format, texts that it takes, texts that it does not
    (const('ab\n"é'), ['ab\n"é'], ["", "ab", "abc"]),
    (
        either(const("a\x7f"), row({"type": "any_text", "excludes": ["\x7f"]}, const("!"))),
        ["a\x7f", "b!"],
        ["b\x7f!"],
    ),
    (JSON, ['{"a": 1}', '{ "a" :1}'], ["{}", '{"a":' + " " * 40 + "1}"]),
    ({"type": "json_schema", "json_schema": True}, ["[1]", '"a"'], ["a"]),
    (tag("<t>", ANY, "</t>"), ["<t></t>", "<t>a<b\n</t>"], ["<t>a", "<t>a</t>b", "a</t>"]),
    (tag("<t>", ANY, ["</t>", "!"]), ["<t>a</t>", "<t>a!"], ["<t>a!b"]),
    (tag("<|channel|>a", ANY, "<|end|>"), ["<|channel|>a b<|end|>"], ["<|channel|>a", "<|channel|>b<|end|>"]),
    (tag("[CALLS]", ANY, ["<|end|>", "!"]), ["[CALLS]b<|end|>", "[CALLS]b!"], ["[CALLS]b"]),
    (row(tag("<t>", ANY, "</t>"), JSON), ['<t>a</t>{"a":1}'], ["<t>a</t>", '{"a":1}']),
    (
        row({"type": "optional", "content": tag("<t>", ANY, "</t>")}, JSON),
        ['<t>a</t>{"a":1}', '{"a":1}'],
        [""],
    ),
    (row(const("a: "), ANY), ["a: ", "a: b\nc"], ["b"]),
    (either(const("x"), JSON), ["x", '{"a":1}'], ["", "xx"]),
    (either(row(const("x"), ANY), JSON), ["x", "xyz", '{"a":1}'], ["yx"]),
    (either({"type": "regex", "pattern": "\\d{2}/[a-c]"}), ["12/a"], ["1/a"]),
    ({"type": "grammar", "grammar": 'root ::= "q" b\nb ::= [a-z]+'}, ["qa"], ["q"]),
    ({"type": "grammar", "grammar": 'start: "q" /[a-z]/+'}, ["qa"], ["q"]),
    (row({"type": "star", "content": const("ab")}, const("!")), ["!", "abab!"], ["a!"]),
    ({"type": "plus", "content": const("ab")}, ["ab", "abab"], [""]),
    ({"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": const("ab")}, ["abab", "ababab"], ["ab"]),
    ({"type": "any_text", "excludes": ["foo"], "max_chars": 5}, ["", "abcde"], ["afoo", "abcdef"]),
    (triggered(), ["", "hi", f"hi {CALL} ho <f=b>x</f>"], ["<f=c>", "hi <f=a>", "a <f=", CALL + "<f=b>y"]),
    (triggered(at_least_one=True), [CALL, CALL + " ho"], ["", "hi", f"hi {CALL}"]),
    (triggered(stop_after_first=True), ["", "hi", CALL, f"hi {CALL}"], [f"{CALL}b"]),
    (triggered(at_least_one=True, stop_after_first=True), [CALL], ["", f"hi {CALL}", f"{CALL}b"]),
    (triggered(excludes=["bad"]), ["hi", CALL], ["bad", f"a bad {CALL}"]),
    (tag("<t>", triggered(), "</t>"), ["<t>a</t>", f"<t>a{CALL}b</t>"], ["<t><f=", f"<t>{CALL}"]),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [tag("<tool_call>\n", JSON, "\n</tool_call>")],
        },
        ["hi", 'hi <tool_call>\n{"a":1}\n</tool_call> ho'],
        ["<tool_call>{", "<tool_call>\n"],
    ),
    (separated(","), ["", '[{"a":1}]', '[{"a":1}],[{"a":2}]'], ['[{"a":1}],', '[{"a":1}][{"a":2}]']),
    (separated("", at_least_one=True), ['[{"a":1}]', '[{"a":1}][{"a":2}]'], [""]),
    (separated(",", at_least_one=True, stop_after_first=True), ['[{"a":1}]'], ["", '[{"a":1}],[{"a":2}]']),
    (
        tag("<c>", XML, "</c>"),
        [
            "<c><parameter=s>\na\nb</\n</parameter>\n</c>",
            "<c><parameter=s>\n\n</parameter>\n<parameter=n>\n3\n</parameter>\n<parameter=e>\nu\n</parameter>\n</c>",
        ],
        ["<c></c>", "<c><parameter=s>\na\n</parameter>\n<parameter=n>\nx", "<c><parameter=e>\nw"],
    ),
]


def tokenizer_with_marks() -> tokenizers.Tokenizer:
    """Returns a tokenizer of bytes with MARKS, the last of which ends a text; one is not a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for mark in MARKS:
        token = AddedToken(mark, special=mark != "<tool_call>", normalized=False)
        (tokenizer.add_tokens if mark == "<tool_call>" else tokenizer.add_special_tokens)([token])
    return tokenizer


def accepts(format: Mapping[str, Any], text: str, has_marks: bool) -> bool:
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": format}))
    if has_marks:
        tokenizer = tokenizer_with_marks()
        size = tokenizer.get_vocab_size()
        tokens = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[size - 1])
        matcher = compile_grammar(grammar, tokens, {mark: tokenizer.token_to_id(mark) for mark in MARKS})
        ids = tokenizer.encode(text).ids
    else:
        matcher = compile_grammar(grammar, LLTokenizer("byte"))
        ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("has_marks", [False, True], ids=["bytes", "marks"])
@pytest.mark.parametrize(("format", "taken", "others"), CASES)
def test_a_format_takes_its_texts_and_no_others(
    format: dict[str, Any], taken: list[str], others: list[str], has_marks: bool
) -> None:
    for text in taken:
        assert accepts(format, text, has_marks), text
    for text in others:
        assert not accepts(format, text, has_marks), text


@pytest.mark.parametrize("has_marks", [False, True], ids=["bytes", "marks"])
@pytest.mark.parametrize("name_of_family", FAMILIES)
def test_the_form_of_calls_is_that_of_the_family(name_of_family: str, has_marks: bool) -> None:
    """The call that the family writes is of the form, and a text of the form is read as a call."""
    family, write = FAMILIES[name_of_family], WRITTEN[name_of_family]
    tools = {"f": PARAMETERS, "g.h-2": {"type": "object"}}
    for is_parallel in (True, False):
        form = family.form(tools, is_parallel)
        for name, arguments in (("f", '{"s": "a", "n": 3}'), ("g.h-2", "{}"), ("g.h-2", '{"x": "y"}')):
            text = write(name, arguments)
            text = text.removesuffix("<|call|>")  # with which gpt-oss ends an answer
            assert accepts(form, text, has_marks), text
            reader = Reader(partial(read_calls_or_format, family=family, tools=tools))
            parts = [*reader.push(text), *reader.finish()]
            _, content, calls = joined(parts)
            assert (content, [(found, json.loads(given)) for found, given in calls]) == (
                "",
                [(name, json.loads(arguments))],
            )
        assert not accepts(form, write("f", '{"n": 3}').removesuffix("<|call|>"), has_marks)
        assert not accepts(form, write("h", "{}").removesuffix("<|call|>"), has_marks)
        assert not accepts(form, "text", has_marks)


TWO = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("name", TWO)
def test_two_calls_are_of_the_form_if_they_may_be(name: str) -> None:
    family = FAMILIES[name]
    tools = {"f": {"type": "object"}}
    assert accepts(family.form(tools, True), TWO[name], False)
    assert not accepts(family.form(tools, False), TWO[name], False)
    reader = Reader(partial(family.read, tools=tools))
    assert len(joined([*reader.push(TWO[name]), *reader.finish()])[2]) == 2


def test_the_older_form_has_structures_and_triggers() -> None:
    structures = [{"begin": "<f>", "schema": JSON["json_schema"], "end": "</f>"}]
    text = json.dumps({"type": "structural_tag", "structures": structures, "triggers": ["<f"]})
    for taken, rest in (('z <f>{"a":1}</f> b', ""), ("z", ""), ("z <f>", '{"b')):
        matcher = compile_grammar(Grammar("structural_tag", text), LLTokenizer("byte"))
        assert matcher.try_consume_tokens(list((taken + rest).encode())) <= len(taken) + 2
        assert matcher.is_accepting() == (rest == "")


@pytest.mark.parametrize(
    "tag",
    [
        {"format": ANY, "excludes": ["a"]},
        {"structures": [{"begin": "<f>", "end": "</f>"}], "triggers": ["<f"], "format": ANY},
        {"structures": [{"begin": "<f>", "end": "</f>", "style": "xml"}], "triggers": ["<f"]},
    ],
)
def test_no_key_of_a_tag_is_ignored(tag: dict[str, Any]) -> None:
    with pytest.raises(InvalidGrammar, match=r"excludes|both|style"):
        compile_grammar(Grammar("structural_tag", json.dumps(tag)), LLTokenizer("byte"))


@pytest.mark.parametrize(
    ("format", "says"),
    [
        ({"type": "dispatch"}, "'dispatch'; give one of const_string"),
        (None, "format of structural_tag is missing"),
        ({"type": "sequence", "elements": [None]}, "'None'; give one of"),
        ({"type": "const_string"}, "value of const_string is missing or not a text"),
        ({"type": "json_schema"}, "a JSON schema is an object"),
        (JSON | {"style": "glm_xml"}, "style"),
        (JSON | {"any_order": True}, "any_order"),
        ({"type": "any_text", "max_tokens": 3}, "max_chars"),
        ({"type": "any_text", "max_chars": -1}, "max_chars"),
        ({"type": "any_text", "excludes": "a"}, "list"),
        (row(ANY, JSON), "free text"),
        (row(either(ANY, const("x")), const("y")), "free text"),
        ({"type": "plus", "content": ANY}, "free text"),
        (row(triggered(stop_after_first=True), const("y")), "free text"),
        (either(), "empty"),
        ({"type": "repeat", "min": 2, "max": 1, "content": ANY}, "range"),
        ({"type": "tag", "begin": "a", "content": ANY}, "list"),
        (tag("a", ANY, []), "end"),
        (triggered(triggers=["<g"]), "has no trigger"),
        (triggered(tags=[]), "no tags"),
        ({"type": "grammar", "grammar": "root ::= ((("}, "GBNF"),
        ({"type": "regex", "pattern": "("}, "unclosed"),
        (const("a") | {"excludes": ["b"]}, "'excludes' of const_string is not known; its keys are value"),
        (triggered(at_most_one=True), "'at_most_one' of triggered_tags"),
        (triggered(tags=[tag("<f=a>", JSON, "</f>") | {"schema": {}}]), "'schema' of tag"),
        ({"type": "repeat", "min": 1, "max": 2, "content": ANY, "separator": ","}, "'separator' of repeat"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_tag_is_said(format: Any, says: str) -> None:
    with pytest.raises(InvalidGrammar, match="cannot be used") as error:
        accepts(format, "", False)
    assert says in str(error.value)


def test_a_trigger_begins_with_its_special_token() -> None:
    tags = {"type": "triggered_tags", "triggers": ["a<|end|>"], "tags": [tag("a<|end|>b", JSON, "!")]}
    assert accepts(tags, 'a<|end|>b{"a":1}!', False)
    with pytest.raises(InvalidGrammar, match="begin with the token"):
        accepts(tags, "", True)


def test_a_row_takes_the_models_special_tokens() -> None:
    """The default model's tokens begin and end a tag. The second is an end token, so the text is over."""
    directory = resolve(DEFAULT_MODEL, lambda line: None)
    tokenizer = Tokenizer(directory)
    begin, end = (tokenizer.token_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert begin is not None
    assert end in tokenizer.eos_ids
    grammars = Grammars(directory, tokenizer.vocab_size)
    form = tag("<|im_start|>", ANY, "<|im_end|>")
    grammars.compile(1, Grammar("structural_tag", json.dumps({"format": form})))
    grammars.set_row(0, 1)
    row = grammars.of(0)
    assert row is not None

    def allowed() -> set[int]:
        masks = np.zeros((1, grammars.mask_words), np.int32)
        assert not grammars.fill(masks, [(0, row)])
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits[: tokenizer.vocab_size]).tolist())

    assert allowed() == {begin}
    for token in (begin, *tokenizer.encode("any text").tolist()):
        assert row.take(token) == token
        assert end in allowed()
        assert begin not in allowed()
    assert row.take(end) == end
    assert row.ready() is None
