"""The fields that say what an answer has to be: which grammar they make, and which of them are refused."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from starlette.requests import Request

from lightkv.router.api.http.owner import owner_of
from lightkv.router.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from tests.support.fake_router import (
    CHAT,
    COMPLETIONS,
    HELLO,
    LIMITS,
    ApiUnderTest,
    service,
    wait_until,
)
from tests.support.grammars import compile_grammar
from tests.support.hard_grammars import SLOW
from tests.support.loop_time import longest_turn

TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "é"}}
TAG_TEXT = '{"type":"structural_tag","format":{"type":"const_string","value":"é"}}'
SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}
JSON = '{"type":"object","properties":{"é":{"type":"string"}}}'
CLOSED_JSON = JSON[:-1] + ',"additionalProperties":false}'
# Converting it from GBNF takes some seconds.
MANY_RULES = "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(9000)) + 'a9000 ::= "x"'
# Others that were made to take long, or too much memory.
ADVERSARIAL: dict[str, dict[str, Any]] = {
    "slow": {"structured_outputs": {"json": SLOW}},
    "deep": {"structured_outputs": {"json": '{"type":"array","items":' * 2000 + "{}" + "}" * 2000}},
    "large": {"structured_outputs": {"json": json.dumps({"enum": [f"{i:020}" for i in range(50_000)]})}},
    "exponential regex": {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}},
    "large regex": {
        "structured_outputs": {"regex": "(" + "|".join("a" * i + "b" for i in range(900)) + "){1,500}"}
    },
    "recursion": {
        "structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}
    },
    "no text": {"structured_outputs": {"grammar": "start: start"}},
    "slow GBNF": {"structured_outputs": {"grammar": "root ::= " + '"a" ' * 60_000}},
    "large GBNF": {"structured_outputs": {"grammar": "root ::= " + '"a" ' * 500_000}},
    "many rules": {"structured_outputs": {"grammar": MANY_RULES}},
    "deep tag": {
        "structured_outputs": {
            "structural_tag": '{"format":' + '{"type":"optional","content":' * 5000 + "{}" + "}" * 5000 + "}"
        }
    },
    "large tag": {
        "structured_outputs": {
            "structural_tag": {
                "format": {
                    "type": "any_text",
                    "excludes": [f"{i:08}" for i in range(500)],
                    "max_chars": 10**6,
                }
            }
        }
    },
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiUnderTest]:
    with service(tmp_path_factory.mktemp("api"), max_body_bytes=4 * 2**20).running() as under_test:
        yield under_test


def body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    prompt: dict[str, Any] = HELLO if path == CHAT else {"prompt": "a"}
    return {**prompt, "max_tokens": 5, **fields}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_object", "schema": None}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Grammar("json_schema", JSON),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar("json_schema", JSON),
        ),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", JSON)),
        ({"structured_outputs": {"json": JSON, "regex": None}}, Grammar("json_schema", JSON)),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"regex": "[0-9]+"}}, Grammar("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["é", "b"]}}, Grammar("choice", '["é", "b"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        (
            {"structured_outputs": {"json": {"type": "null"}, "disable_any_whitespace": True}},
            Grammar("json_schema", '{"type":"null","x-guidance":{"whitespace_pattern":""}}'),
        ),
        (
            {"structured_outputs": {"json": True, "disable_any_whitespace": True}},
            Grammar("json_schema", '{"x-guidance":{"whitespace_pattern":""}}'),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            Grammar("json_schema", CLOSED_JSON),
        ),
        (
            {"structured_outputs": {"json": JSON, "disable_additional_properties": True}},
            Grammar("json_schema", CLOSED_JSON),
        ),
        ({"structured_outputs": {"json": JSON}}, Grammar("json_schema", JSON)),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        (
            {"structured_outputs": {"json": {"type": "null"}, "whitespace_pattern": " ?"}},
            Grammar("json_schema", '{"type":"null","x-guidance":{"whitespace_pattern":" ?"}}'),
        ),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("lark", 'root ::= "a"')),
        ({"structured_outputs": {"structural_tag": TAG}}, Grammar("structural_tag", TAG_TEXT)),
        ({"structured_outputs": {"structural_tag": TAG_TEXT}}, Grammar("structural_tag", TAG_TEXT)),
        ({"response_format": TAG}, Grammar("structural_tag", TAG_TEXT)),
    ],
)
def test_a_field_makes_a_grammar(
    api: ApiUnderTest, path: str, fields: dict[str, Any], expected: Grammar | None
) -> None:
    api.post(path, body(path, fields))
    (submit,) = api.router.submits
    assert submit.params.grammar == expected


def test_a_grammar_in_gbnf_is_converted() -> None:
    for text in ('start: "a" /[0-9]+/', 'root ::= "a" b\nb ::= [0-9]+'):
        matcher = compile_grammar(Grammar("lark", text), LLTokenizer("byte"))
        assert matcher.try_consume_tokens(list(b"a12b")) == 3
        assert matcher.is_accepting()


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "\ud800a"}},
        {"structured_outputs": {"choice": ["\ud800a"]}},
        {"structured_outputs": {"grammar": 'start: "\ud800"'}},
        {"structured_outputs": {"grammar": 'root ::= "\ud800"'}},
        {"structured_outputs": {"json": {"type": "object", "properties": {"\ud800": {"type": "null"}}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "\ud800"}}}},
    ],
)
def test_half_a_surrogate_pair_is_replaced(api: ApiUnderTest, fields: dict[str, Any]) -> None:
    api.post(COMPLETIONS, body(COMPLETIONS, fields))
    (submit,) = api.router.submits
    assert submit.params.grammar is not None
    assert "\ufffd" in submit.params.grammar.text


def test_choices_may_have_any_character() -> None:
    choice = "".join(map(chr, range(256))) + "\u2028\u20ac\U0001f642"
    tokenizer = LLTokenizer("byte")
    matcher = compile_grammar(Grammar("choice", json.dumps([choice])), tokenizer)
    tokens = list(choice.encode())
    assert matcher.try_consume_tokens(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": "json"}, "response_format", "dictionary"),
        ({"response_format": {"type": ["text"]}}, "response_format", "json_schema"),
        *(
            ({"response_format": form}, f"response_format.{key}", says)
            for form, key, says in (
                ({"type": "json_object", "schema": SCHEMA}, "schema", '{"type": "json_schema"'),
                ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "json_schema", "json_schema"),
                ({"type": "json_object", "strict": True}, "strict", "null"),
                ({"type": "text", "schema": SCHEMA}, "schema", "json_schema"),
                ({"schema": SCHEMA}, "schema", "json_schema"),
                ({"type": "text", "grammar": 'start: "a"'}, "grammar", "null"),
                ({"type": "json_schema", "schema": SCHEMA}, "schema", "json_schema"),
                (
                    {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}, "strict": True},
                    "strict",
                    "json_schema",
                ),
                (
                    {"type": "json_schema", "json_schema": {"schema": SCHEMA, "any_order": True}},
                    "json_schema.any_order",
                    "name, description, schema, strict",
                ),
                (
                    {"type": "json_schema", "json_schema": SCHEMA},
                    "json_schema.type",
                    '"json_schema": {"name"',
                ),
                ({"type": "json_schema", "name": "a", "schema": SCHEMA}, "name", '"json_schema": {"name"'),
                (TAG | {"triggered": ["a"]}, "triggered", "triggers"),
            )
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text", "exclude": ["a"]}}},
            "response_format",
            "'exclude' of any_text",
        ),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "xml"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of them"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "one or more"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "Expecting"),
        ({"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs", "Invalid type"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs", "unknown name"),
        ({"structured_outputs": {"grammar": "root ::= ((("}}, "structured_outputs", "grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a" b'}}, "structured_outputs", "GBNF"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "Expecting"),
        (
            {"structured_outputs": {"structural_tag": "[]"}},
            "structured_outputs",
            "structural tag is an object",
        ),
        (
            {"structured_outputs": {"structural_tag": {"type": "structural_tag"}}},
            "structured_outputs",
            "format",
        ),
        ({"response_format": TAG | {"format": {"type": "xml"}}}, "response_format", "const_string"),
        ({"structured_outputs": {"structural_tag": 1}}, "structured_outputs", "structural tag"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "it without response_format",
        ),
        (
            {"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}},
            "structured_outputs",
            f"at most {MAX_GRAMMAR_BYTES}",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "grammar"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else None,
)
def test_a_grammar_that_cannot_be_is_refused_by_the_fields_name(
    api: ApiUnderTest, fields: dict[str, Any], param: str, says: str
) -> None:
    for path in (COMPLETIONS, CHAT):
        error = api.post(path, body(path, fields), 400)["error"]
        assert error["param"] == param
        assert says in error["message"]
    assert not api.router.submits


def test_half_surrogates_in_a_grammar_do_no_harm(api: ApiUnderTest) -> None:
    for fields in (
        {"structured_outputs": {"regex": "\ud800"}},
        {"structured_outputs": {"choice": ["\ud800"]}},
        {"structured_outputs": {"structural_tag": {"format": {"type": "const_string", "value": "\ud800"}}}},
    ):
        api.post(COMPLETIONS, body(COMPLETIONS, fields))
        assert "\ufffd" in str(api.router.submits[-1].params.grammar)


def test_adversarial_grammars_are_refused_and_streams_go_on(api: ApiUnderTest) -> None:
    api.post(
        COMPLETIONS, body(COMPLETIONS, {"structured_outputs": {"regex": "a"}})
    )  # starts the child process
    api.router.delay = 0.02
    num_lines, turns = 0, []
    done = threading.Event()

    def stream() -> None:
        nonlocal num_lines
        connection = api.connect()
        asked = {"prompt": "a", "max_tokens": LIMITS.max_model_len - 100, "stream": True}
        connection.request("POST", COMPLETIONS, json.dumps(asked), {"Content-Type": "application/json"})
        response = connection.getresponse()
        while not done.is_set() and response.readline():
            num_lines += 1
        connection.close()

    api.call(lambda: turns.append(asyncio.ensure_future(longest_turn(done.is_set))))
    reading = threading.Thread(target=stream)
    reading.start()
    wait_until(lambda: num_lines > 0)
    num_during = 0
    try:
        for name, fields in ADVERSARIAL.items():
            before = num_lines
            error = api.post(COMPLETIONS, body(COMPLETIONS, fields), 400)["error"]
            num_during += num_lines - before
            assert error["param"] == next(iter(fields)), name
    finally:
        done.set()
        reading.join()
    assert num_during > 5 * len(ADVERSARIAL)  # a check takes up to half a second of the processor
    wait_until(turns[0].done)
    assert turns[0].result() < 0.2


def test_the_router_gets_the_hash_of_the_key_with_a_grammar(tmp_path: Path) -> None:
    """By it the keys take turns, from whatever address; a request without a grammar needs none."""
    keys = ("first-secret", "second-secret")
    with service(tmp_path, api_key=keys).running() as api:
        for key in (*keys, keys[0]):
            for path in (COMPLETIONS, CHAT):
                sent = body(path, {"structured_outputs": {"regex": "a"}})
                headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": f"192.0.2.{len(path)}"}
                assert api.send("POST", path, sent, headers)[0] == 200
        owners = [asked.submit.grammar_owner for asked in api.router.submits]
        assert owners[:2] == owners[4:]
        assert [len(set(owners[i : i + 2])) for i in (0, 2)] == [1, 1]
        assert len(set(owners)) == 2
        assert {len(owner) for owner in owners} == {32}


# Of addresses as uvicorn reports them: those of two clients, or of one.
ADDRESSES = {
    "two of IPv4": ("192.0.2.1", "192.0.2.2", 2),
    "one of IPv4": ("192.0.2.1", "192.0.2.1", 1),
    "mapped": ("192.0.2.1", "::ffff:192.0.2.1", 1),
    "two mapped": ("::ffff:192.0.2.1", "::ffff:192.0.2.2", 2),
    "two networks": ("2001:db8:0:1::1", "2001:db8:0:2::1", 2),
    "one network": ("2001:db8:0:1::1", "2001:db8:0:1:ffff:ffff:ffff:ffff", 1),
    "links": ("fe80::1%eth0", "fe80::2%eth0", 1),
    "names": ("one", "other", 2),
    "what the client itself claims": ("192.0.2.7, 192.0.2.1", "192.0.2.8, 192.0.2.1", 1),
    "no name": ("\udc80", "", 2),
}


@pytest.mark.parametrize(("first", "second", "num_clients"), ADDRESSES.values(), ids=ADDRESSES)
def test_without_keys_clients_are_told_apart_by_their_addresses(
    api: ApiUnderTest, first: str, second: str, num_clients: int
) -> None:
    for address in (first, second):
        sent = body(COMPLETIONS, {"structured_outputs": {"regex": "a"}})
        headers = {"X-Forwarded-For": address.encode("latin-1", "surrogateescape").decode("latin-1")}
        assert api.send("POST", COMPLETIONS, sent, headers)[0] == 200
    owners = [asked.submit.grammar_owner for asked in api.router.submits]
    assert len(set(owners)) == num_clients
    assert {len(owner) for owner in owners} == {32}


def test_clients_of_a_unix_socket_have_no_address() -> None:
    scope = {"type": "http", "headers": [], "client": None, "state": {"api_key": None}}
    assert owner_of(Request(scope)) == hashlib.sha256(b"").digest()
