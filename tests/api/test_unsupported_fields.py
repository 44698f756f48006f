"""Every field that would change an answer is supported or refused by name, as docs/api.md says."""

import re
from pathlib import Path
from typing import Any

import pytest

from lightkv.router.api.requests import refused as refused_fields
from lightkv.router.api.requests.chat import ChatRequest
from lightkv.router.api.requests.completion import CompletionRequest
from lightkv.router.api.requests.refused import Unsupported
from tests.support import refused_examples
from tests.support.fake_router import (
    CHAT,
    COMPLETIONS,
    HELLO,
    LIMITS,
    TEXT,
    ApiUnderTest,
    ids_of,
    service,
    stream_texts,
)

DOCUMENT = Path(__file__).parents[2] / "docs/api.md"
PATHS = (COMPLETIONS, CHAT)
Row = tuple[str, list[Any], Any, str]


def table(heading: str) -> list[list[str]]:
    """Returns the cells of the rows below a heading of the document."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"### {heading}\n")[1].split("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def refused(known: tuple[Unsupported, ...], examples: dict[str, Any]) -> list[Row]:
    """Returns the fields with the values that pass, one that does not, and what to give."""
    return [(field, list(passes), examples[field], give) for field, passes, give in known]


EVERYWHERE = refused(refused_fields.UNSUPPORTED, refused_examples.EVERYWHERE)
ON_CHAT = refused(refused_fields.UNSUPPORTED_ON_CHAT, refused_examples.ON_CHAT)
ON_COMPLETIONS = refused(refused_fields.UNSUPPORTED_ON_COMPLETIONS, refused_examples.ON_COMPLETIONS)
IN_MESSAGES = refused(refused_fields.UNSUPPORTED_IN_MESSAGES, refused_examples.IN_MESSAGES)
IGNORED = list(refused_examples.IGNORED.items())


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = HELLO if path == CHAT else {"prompt": "a"}
    return {**prompt, "max_tokens": 5, **fields}


def text_of(api: ApiUnderTest, path: str, **fields: Any) -> str:
    """Returns the answer's text, which has to be the same in a stream."""
    choice = api.post(path, body(path, **fields))["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert stream_texts(api.stream(path, body(path, **fields))) == {0: text}
    return str(text)


# Refused fields


@pytest.mark.parametrize(
    ("heading", "rows"),
    [
        ("Refused on completions and chat", EVERYWHERE),
        ("Refused on chat", ON_CHAT),
        ("Refused on completions", ON_COMPLETIONS),
        ("Refused in a message of a chat", IN_MESSAGES),
    ],
    ids=["everywhere", "chat", "completions", "messages"],
)
def test_the_document_has_every_field_of_the_code(heading: str, rows: list[Row]) -> None:
    shown = {field: give for fields, give in table(heading) for field in re.findall(r"`(\w+)`", fields)}
    assert shown == {field: give for field, _, _, give in rows}


def test_the_document_has_every_field_that_changes_nothing() -> None:
    shown = {field for fields, _ in table("Ignored") for field in re.findall(r"`(\w+)`", fields)}
    assert shown == set(refused_examples.IGNORED)


def test_the_document_has_every_other_name() -> None:
    shown = {}
    for own, names in table("Other names"):
        shown |= dict.fromkeys(re.findall(r"`(\w+)`", names), own.strip("`"))
    assert shown == refused_fields.RENAMED


@pytest.mark.parametrize("path", PATHS)
def test_a_refused_field_is_named_and_nothing_is_computed(api: ApiUnderTest, path: str) -> None:
    for field, _, example, give in EVERYWHERE + (ON_CHAT if path == CHAT else ON_COMPLETIONS):
        error = api.post(path, body(path, **{field: example}), 400)["error"]
        assert (error["param"], error["code"]) == (field, 400)
        assert error["message"].startswith(f"{field} is ")
        assert error["message"].endswith(f"; give {give}")
    assert not api.router.submits


@pytest.mark.parametrize("path", PATHS)
def test_harmless_values_are_accepted(api: ApiUnderTest, path: str) -> None:
    rows = EVERYWHERE + (ON_CHAT if path == CHAT else ON_COMPLETIONS)
    for field, passes, _, _ in rows:
        for value in (None, *passes):
            assert api.post(path, body(path, **{field: value}))["choices"], (field, value)
    together = {field: passes[0] for field, passes, _, _ in rows if passes}
    assert text_of(api, path, **together) == TEXT


@pytest.mark.parametrize("path", PATHS)
def test_ignored_fields_change_nothing(api: ApiUnderTest, path: str) -> None:
    plain = body(path, seed=1)
    api.post(path, plain)
    api.post(path, plain | dict(IGNORED) | {"no_such_field": 1})
    first, second = api.router.submits
    assert second.what == first.what


def test_no_field_is_both_supported_and_refused() -> None:
    for carried, known in (
        (ChatRequest, refused_fields.CHAT),
        (CompletionRequest, refused_fields.COMPLETIONS),
    ):
        ignored = {field for field, _ in IGNORED} - {"user"}  # which has a type, and no effect
        assert not set(carried.model_fields) & (set(known) | ignored)
        assert not set(known) & ignored


def test_values_that_another_field_makes_harmless(api: ApiUnderTest) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for path in PATHS:
        assert api.post(path, body(path, tools=tools, tool_choice="none"))["choices"]
    error = api.post(COMPLETIONS, body(COMPLETIONS, tools=tools, tool_choice="auto"), 400)["error"]
    assert error["param"] == "tools"


def test_true_is_not_one_and_zero_is_not_false(api: ApiUnderTest) -> None:
    wrong = (("length_penalty", True), ("use_beam_search", 0), ("best_of", True), ("return_token_ids", 1))
    for field, value in wrong:
        assert api.post(CHAT, body(CHAT, **{field: value}), 400)["error"]["param"] == field
    assert api.post(CHAT, body(CHAT, length_penalty=1.0))["choices"]


def test_unsupported_fields_of_messages_are_refused(api: ApiUnderTest) -> None:
    for field, passes, example, _ in IN_MESSAGES:
        for value in (None, *passes):
            message: dict[str, Any] = {"role": "user", "content": "Hi", field: value}
            assert api.post(CHAT, {"messages": [message], "max_tokens": 1})
        message[field] = example
        for path in (CHAT, "/tokenize"):
            assert api.post(path, {"messages": [message]}, 400)["error"]["param"] == field
    for part in ({"type": "input_audio"}, {"type": "file"}, {"type": "refusal", "refusal": "a"}):
        message = {"role": "user", "content": [part]}
        assert api.post(CHAT, {"messages": [message]}, 400)["error"]["param"] == "messages"


def test_an_unsupported_stream_option_is_refused(api: ApiUnderTest) -> None:
    for value, status in ((True, 400), (False, 200), (None, 200)):
        options = {"include_obfuscation": value}
        assert api.send("POST", CHAT, body(CHAT, stream=True, stream_options=options))[0] == status


def test_tokenize_refuses_the_fields_that_a_chat_refuses(api: ApiUnderTest) -> None:
    for field, example in (("chat_template", "{{ 1 }}"), ("documents", [{"text": "a"}])):
        assert api.post("/tokenize", {**HELLO, field: example}, 400)["error"]["param"] == field


# Supported fields


@pytest.mark.parametrize("path", PATHS)
def test_min_tokens_reach_the_router_and_are_bounded(api: ApiUnderTest, path: str) -> None:
    api.post(path, body(path, min_tokens=3))
    assert api.router.submits[0].params.min_tokens == 3
    for value in (-1, 6, True):
        assert api.post(path, body(path, min_tokens=value), 400)["error"]["param"] == "min_tokens"
    too_many = {**HELLO, "min_tokens": LIMITS.max_model_len}  # more than the rest of the context
    assert api.post(CHAT, too_many, 400)["error"]["param"] == "min_tokens"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("min_tokens", "stop", "text"),
    [
        (0, " three", " one two"),
        (2, " three", " one two"),  # the third token may end it
        (3, " three", TEXT),
        (3, "three f", " one two "),  # the stop string begins before min_tokens and ends after
        (2, ["two", "four"], " one two three "),
        (2, ["two thr", "o"], " one "),  # the "o" of "two" comes before min_tokens
    ],
)
def test_stop_strings_do_not_end_an_answer_before_min_tokens(
    api: ApiUnderTest, path: str, min_tokens: int, stop: Any, text: str
) -> None:
    assert text_of(api, path, min_tokens=min_tokens, stop=stop) == text


@pytest.mark.parametrize("path", PATHS)
def test_special_tokens_can_be_shown(api: ApiUnderTest, path: str) -> None:
    start = api.tokenizer.encode("<|im_start|>").tolist()
    assert start[0] in api.tokenizer.special_ids
    api.router.script = [*api.tokenizer.encode("né").tolist(), *start, *api.tokenizer.encode(" b").tolist()]
    count = len(api.router.script)
    assert text_of(api, path, max_tokens=count) == "né b"
    assert text_of(api, path, max_tokens=count, skip_special_tokens=False) == "né<|im_start|> b"
    api.router.script = [*api.tokenizer.encode("a").tolist(), *sorted(api.tokenizer.eos_ids)]
    assert text_of(api, path, skip_special_tokens=False) == "a"  # the token that ends it is not shown


def test_special_tokens_around_a_prompt(tmp_path: Path) -> None:
    """The tokenizer puts one special token before each text."""
    from tokenizers import Tokenizer as Tokens
    from tokenizers import processors

    from lightkv.router.model_files import DEFAULT_MODEL, resolve
    from lightkv.router.text.tokenizer import Tokenizer

    source = resolve(DEFAULT_MODEL, lambda line: None)
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            (tmp_path / name).write_bytes((source / name).read_bytes())
    tokens = Tokens.from_file(str(source / "tokenizer.json"))
    bos = tokens.token_to_id("<|im_start|>")
    tokens.post_processor = processors.TemplateProcessing("<|im_start|> $0", None, [("<|im_start|>", bos)])
    tokens.save(str(tmp_path / "tokenizer.json"))
    under_test = service(tmp_path)
    under_test.tokenizer = Tokenizer(tmp_path)
    with under_test.running() as api:
        for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            api.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields})
            api.post(CHAT, {**HELLO, "max_tokens": 1, **fields})
        counts = [ids_of(submit)[:2].count(bos) for submit in api.router.submits]
        assert counts == [1, 1, 1, 2, 0, 1]  # the template writes one, too
        assert api.post("/tokenize", {**HELLO, "add_special_tokens": True})["tokens"][:2] == [bos, bos]


def test_the_chat_template_gets_its_variables(tmp_path: Path) -> None:
    under_test = service(tmp_path)
    under_test.tokenizer._template_source = (
        "{{ messages[0].content }}|{{ enable_thinking is defined and enable_thinking }}|{{ bos_token }}"
        "|{{ add_generation_prompt }}|{{ tools }}"
    )
    with under_test.running() as api:

        def rendered(**kwargs: Any) -> str:
            asked = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": kwargs or None}
            api.post(CHAT, asked | {"max_tokens": 1})
            text = api.tokenizer.decode(ids_of(api.router.submits[-1]), skip_special_tokens=False)
            ids = api.post("/tokenize", asked)["tokens"]
            assert api.tokenizer.decode(ids, skip_special_tokens=False) == text
            return text

        bos = api.tokenizer._special_tokens["bos_token"]
        assert rendered() == f"Hi|False|{bos}|True|None"
        assert rendered(enable_thinking=True, unused={"a": [1]}) == f"Hi|True|{bos}|True|None"
        assert rendered(bos_token="B", self=1) == "Hi|False|B|True|None"
        for name in ("messages", "add_generation_prompt", "tools", "chat_template"):
            error = api.post(CHAT, {**HELLO, "chat_template_kwargs": {name: 1}}, 400)["error"]
            assert error["param"] == "chat_template_kwargs"
            assert name in error["message"]
        for value in ([], "a", 1):
            error = api.post(CHAT, {**HELLO, "chat_template_kwargs": value}, 400)["error"]
            assert error["param"] == "chat_template_kwargs"


def test_max_completion_tokens_replaces_max_tokens(api: ApiUnderTest) -> None:
    for path in PATHS:
        api.post(path, body(path, max_completion_tokens=2))
        assert api.router.submits[-1].params.max_tokens == 2


# Other names


# A value of each field by another server's name.
OTHER_NAMES: dict[str, Any] = {
    "max_new_tokens": 3,
    "n_predict": 3,
    "num_predict": 3,
    "min_new_tokens": 2,
    "stop_sequences": [" three"],
    "stop_words": " three",
    "random_seed": 7,
    "num_return_sequences": 2,
    "extra_key": "salt",
    "guided_json": {"type": "object"},
    "guided_json_object": True,
    "guided_regex": "[0-9]+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "guided_whitespace_pattern": " ?",
    "json_schema": '{"type": "object"}',
    "regex": "[0-9]+",
    "ebnf": 'root ::= "a"',
    "grammar": 'start: "a"',
    "structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", refused_fields.RENAMED)
def test_another_servers_name_means_the_same(api: ApiUnderTest, path: str, name: str) -> None:
    value = OTHER_NAMES[name]
    field, _, key = refused_fields.RENAMED[name].partition(".")
    other, own = {name: value}, {field: {key: value} if key else value}
    if key == "whitespace_pattern":  # which needs a schema
        other["guided_json"] = own[field]["json"] = {"type": "object"}
    prompt = {**(HELLO if path == CHAT else {"prompt": "a"}), **({} if field == "seed" else {"seed": 1})}
    asked = []
    for fields in (other, own, {}):
        api.post(path, prompt | fields)
        asked.append([submit.what for submit in api.router.submits])
        api.router.submits.clear()
    assert asked[0] == asked[1] != asked[2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_new_tokens": 3, "max_tokens": 3}, "max_new_tokens"),
        ({"n_predict": 3, "max_new_tokens": 3}, "max_new_tokens"),
        ({"guided_regex": "a", "regex": "a"}, "regex"),
        ({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"guided_regex": "["}, "structured_outputs"),
        ({"guided_choice": []}, "structured_outputs"),
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"max_new_tokens": "a"}, "max_tokens"),
        ({"guided_json": 5, "structured_outputs": 5}, "structured_outputs"),
    ],
)
def test_a_field_is_given_by_one_of_its_names(api: ApiUnderTest, fields: dict[str, Any], param: str) -> None:
    for path, prompt in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})):
        assert api.post(path, {**prompt, **fields}, 400)["error"]["param"] == param
    assert not api.router.submits


def test_null_by_another_name_means_nothing(api: ApiUnderTest) -> None:
    nulls = dict.fromkeys(refused_fields.RENAMED)
    for path in PATHS:
        assert text_of(api, path, **nulls) == TEXT


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict"])
def test_a_limit_of_minus_one_is_none(api: ApiUnderTest, field: str) -> None:
    prompt = {"prompt": [5] * 100}
    api.post(COMPLETIONS, prompt | {field: -1})
    api.post(CHAT, HELLO | {field: -1})
    api.post(CHAT, HELLO)
    plain, chat, unsaid = api.router.submits
    assert plain.params.max_tokens == LIMITS.max_model_len - 100
    assert chat.params.max_tokens == unsaid.params.max_tokens
    assert [one.submit.states_length for one in (plain, chat, unsaid)] == [False] * 3
    assert api.post(CHAT, HELLO | {field: -2}, 400)["error"]["param"] == "max_tokens"


def test_documents_and_reasoning_reach_a_template_that_has_a_place_for_them(tmp_path: Path) -> None:
    under_test = service(tmp_path)
    under_test.tokenizer._template_source = (
        "{{ documents }}|{{ enable_thinking }}|{{ reasoning_effort }}|{{ messages[0].content }}"
    )
    with under_test.running() as api:

        def rendered(**fields: Any) -> str:
            asked = {"messages": [{"role": "user", "content": "Hi"}], **fields}
            api.post(CHAT, asked | {"max_tokens": 1})
            text = api.tokenizer.decode(ids_of(api.router.submits[-1]), skip_special_tokens=False)
            ids = api.post("/tokenize", asked)["tokens"]
            assert api.tokenizer.decode(ids, skip_special_tokens=False) == text
            return text

        assert rendered() == "None|||Hi"
        documents = {"documents": [{"text": "a"}]}
        assert rendered(chat_template_kwargs=documents) == "[{'text': 'a'}]|||Hi"
        assert rendered(chat_template_kwargs={"enable_thinking": False}) == "None|False||Hi"
        assert rendered(reasoning_effort="low") == "None||low|Hi"
        error = api.post(CHAT, HELLO | {"reasoning_effort": "endless"}, 400)["error"]
        assert error["param"] == "reasoning_effort"
