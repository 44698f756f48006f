"""Answers that are read by the model's own response template, whole and cut at every place."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from transformers.utils.chat_parsing import parse_response

from lightkv.router.api.requests.dialect import ChatDialect
from lightkv.router.api.requests.tools import Function, ToolUse
from lightkv.router.config import EngineConfig
from lightkv.router.model_files import resolve
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.service.router_client import MAX_TAKEN
from lightkv.router.text import response_template
from lightkv.router.text.answer_reader import AnswerReader, joined
from lightkv.router.text.detokenizer import Detokenizer, StopChecker
from lightkv.router.text.response_template import ResponseTemplate, TimeLimit, UnusableResponseTemplate
from lightkv.router.text.tokenizer import Tokenizer

ANCHOR = "<|im_start|>assistant\n"
QWEN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ANCHOR,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}
XML: dict[str, Any] = {
    **QWEN,
    "fields": {
        **QWEN["fields"],
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
GEMMA: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
    {"type": "function", "function": {"name": "g"}},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "é}"}}\n</tool_call>'
READ = ("f", '{"a": 1, "s": "é}"}')


def template_of(template: Any) -> ResponseTemplate:
    return ResponseTemplate(template, Path("tokenizer_config.json"))


def read(
    template: Any, pieces: Any, prompt: str = ANCHOR, tools: Any = TOOLS, max_calls: int | None = None
) -> Any:
    stage = partial(template_of(template).read, prompt=prompt, tools=tools)
    reader = AnswerReader([stage], max_calls)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined([*parts, *reader.finish()])


def read_in_every_split(template: Any, text: str, prompt: str = ANCHOR, tools: Any = TOOLS) -> Any:
    """Returns what is read, which has to be the same however the text is cut."""
    whole = read(template, [text], prompt, tools)
    assert read(template, text, prompt, tools) == whole
    for cut in range(1, len(text)):
        assert read(template, [text[:cut], text[cut:]], prompt, tools) == whole, text[:cut]
    return whole


CASES = {
    "content": (QWEN, "Hello\n\n world.", ANCHOR, ("", "Hello\n\n world.", [])),
    "reasoning": (QWEN, "<think>\nWhy?\n</think>\n\nSo.", ANCHOR, ("Why?", "So.", [])),
    "opened by the prompt": (QWEN, "Why?\n</think>\n\nSo.", f"{ANCHOR}<think>\n", ("Why?", "So.", [])),
    "closed by the prompt": (QWEN, "So.", f"{ANCHOR}<think>\n\n</think>\n\n", ("", "So.", [])),
    "an older message opens": (QWEN, "So.", f"{ANCHOR}<think>x<|im_end|>\n{ANCHOR}", ("", "So.", [])),
    "no anchor": (QWEN, "So.", "<think>", ("", "So.", [])),
    "calls": (QWEN, f"See.\n{CALL}\n{CALL}\n", ANCHOR, ("", "See.", [READ, READ])),
    "a call between texts": (QWEN, f"See.\n{CALL}\nDone.", ANCHOR, ("", "See.\nDone.", [READ])),
    "all": (QWEN, f"<think>Why?</think>See.{CALL}<|im_end|>", ANCHOR, ("Why?", "See.", [READ])),
    "xml": (
        XML,
        "See.\n<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>",
        ANCHOR,
        ("", "See.", [("f", '{"a": 7}')]),
    ),
    "gemma": (
        GEMMA,
        '<|channel>thought\nWhy?<channel|>See.<|tool_call>call:g{x:<|"|>a, "b"<|"|>}<tool_call|>',
        "<|turn>model\n",
        ("Why?", "See.", [("g", '{"x": "a, \\"b\\""}')]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_read_as_the_template_says(name: str) -> None:
    template, text, prompt, wanted = CASES[name]
    assert read_in_every_split(template, text, prompt) == wanted


@pytest.mark.parametrize("name", ["content", "reasoning", "all", "xml", "gemma"])
def test_it_is_what_transformers_reads(name: str) -> None:
    template, text, prompt, (reasoning, content, calls) = CASES[name]
    message = parse_response(text, template, prefix=prompt, tools=TOOLS)
    told = message.get("reasoning_content") or message.get("thinking") or ""
    assert (told, message.get("content", "")) == (reasoning, content)
    made = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    assert made == [(function, json.loads(arguments)) for function, arguments in calls]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, "See.\n<tool_call>{no JSON}</tool_call> and more"),
        (QWEN, f"{CALL}\n<tool_call>\n[1, 2"),
        (QWEN, 'See.\n<tool_call>{"name": "unknown", "arguments": {}}</tool_call>\nmore'),
        (QWEN, 'See.\n<tool_call>{"name": "f", "arguments": NaN}</tool_call>'),
        (QWEN, "<tool_call>" + "[" * 3000 + "</tool_call>!"),
        (QWEN, "<think>Why?</think>See.<tool_ca"),
        (GEMMA, "See.<|tool_call>call:g{<tool_call|>more"),
    ],
    ids=["no-json", "cut", "unknown-function", "nan", "deep", "cut-mark", "gemma"],
)
def test_no_text_is_lost_where_the_template_fails(template: Any, text: str) -> None:
    pieces = [[text], text, [text[i : i + 5] for i in range(0, len(text), 5)]]
    for reasoning, content, calls in (read(template, cut, "") for cut in pieces):
        rest = text.replace("<think>Why?</think>", "")
        for name, arguments in calls:
            assert (name, arguments) == READ
            rest = rest.replace(CALL, "", 1)
        assert content.split() == rest.split()
        assert reasoning == ("Why?" if "Why?" in text else "")


def test_content_before_white_space_is_kept() -> None:
    """transformers' own message has the last content alone, which is empty here."""
    text = f"See.\n{CALL}\n"
    assert parse_response(text, QWEN, prefix=ANCHOR)["tool_calls"]
    assert "content" not in parse_response(text, QWEN, prefix=ANCHOR)
    assert read(QWEN, [text]) == ("", "See.", [READ])


def test_calls_of_a_request_without_tools_are_text() -> None:
    text = f"See.\n{CALL}\nDone."
    assert read_in_every_split(QWEN, text, tools=None) == ("", text, [])


def test_calls_beyond_the_most_are_left_out() -> None:
    assert read(QWEN, [CALL + CALL], max_calls=1) == ("", "", [READ])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f><parameter=a>" + " " * 100_000 + "</function></tool_call>!",
        "<tool_call><function=f>" + "<parameter=a>" * 30_000 + "</function></tool_call>!",
        "See." + " " * 100_000 + "!",
        "See." + "\n" * 100_000,
    ],
    ids=["spaces", "parameters", "held", "held-at-the-end"],
)
def test_patterns_that_take_long_end_the_reading(text: str) -> None:
    begun = time.process_time()
    _, content, calls = read(XML, [text])
    assert time.process_time() - begun < 5.0
    assert content.rstrip() == text.rstrip()
    assert not calls


def test_the_limit_of_time_goes_with_the_services_event_loop() -> None:
    text = "<tool_call><function=f><parameter=a>" + " " * 5000 + "</function></tool_call>!"

    async def serve() -> None:
        for _ in range(3):
            assert read(XML, [text])[1].split() == text.split()
            await asyncio.sleep(0.01)

    uvloop.run(serve())
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) != signal.SIG_DFL  # which would end the process
    signal.raise_signal(signal.SIGVTALRM)  # ends nothing


LATE_SIGNALS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGVTALRM})  # of all threads
from lightkv.router.text.response_template import TimeLimit

def send():
    os.kill(os.getpid(), signal.SIGVTALRM)
    assert signal.SIGVTALRM in signal.sigpending()

def receive():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGVTALRM})
    assert not signal.sigpending()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGVTALRM})
    return signal.getitimer(signal.ITIMER_VIRTUAL)[0]

limit = TimeLimit()
limit.run(send, 1000)
print(receive())
limit.run(send, 1000)
print(0 < TimeLimit().run(receive, 1000) < 0.3)  # the kernel adds a tick
"""


def test_a_signal_that_comes_after_the_work_neither_ends_the_process_nor_later_work() -> None:
    done = subprocess.run([sys.executable, "-c", LATE_SIGNALS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0.0\nTrue\n"), done.stderr


def test_time_of_other_threads_does_not_count() -> None:
    """The timer counts it, so the signal comes early."""
    limit = TimeLimit()
    calls: list[float] = []

    def work() -> None:
        for _ in range(3):
            signal.raise_signal(signal.SIGVTALRM)
            calls.append(signal.getitimer(signal.ITIMER_VIRTUAL)[0])
        while time.thread_time() < begun + 10:
            pass

    begun = time.thread_time()
    with pytest.raises(TimeoutError):
        limit.run(work, 1000)
    assert time.thread_time() - begun >= response_template.MAX_SECONDS
    assert all(0 < left < response_template.MAX_SECONDS + 0.05 for left in calls)  # the kernel adds a tick
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    signal.raise_signal(signal.SIGVTALRM)


def test_what_took_too_long_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_template, "MAX_SECONDS", 0.0)
    assert read(QWEN, ["<think>Why?</think>"])[1] == "<think>Why?</think>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ([], "must be a dict"),
        ({**QWEN, "version": 9}, "version: 9"),
        ({"fields": QWEN["fields"]}, "start_anchor"),
        ({**QWEN, "fields": {"content": {"close_pattern": "("}}}, "invalid close_pattern"),
        ({**QWEN, "fields": {"content": {"content": "yaml"}}}, "unknown content parser"),
    ],
    ids=["list", "version", "anchor", "pattern", "parser"],
)
def test_an_unusable_template_names_the_option_to_use(template: Any, reason: str) -> None:
    with pytest.raises(UnusableResponseTemplate, match=rf"{reason}.*--tool-parser and --reasoning-parser"):
        template_of(template)


def test_transformers_without_a_parser_names_the_option_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    with pytest.raises(UnusableResponseTemplate, match=r"chat_parsing.*--tool-parser"):
        template_of(QWEN)


# --------------------------------------------------------------------------------
# The template of a tokenizer


def model_with(folder: Path, template: Any) -> Path:
    """Makes a directory with the default model's tokenizer, whose tokenizer_config.json has a template."""
    source = resolve(EngineConfig.model, lambda line: None)
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        (folder / name).symlink_to(source / name)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"response_template": template}))
    return folder


USE = ToolUse([Function(name="f", parameters=TOOLS[0]["function"]["parameters"], strict=None)])


def test_the_template_of_a_tokenizer_reads_tokens(tmp_path: Path) -> None:
    fields = QWEN["fields"]
    calls = fields["tool_calls"] | {"open": "<jupyter_code>", "close": "<jupyter_output>"}  # special tokens
    del calls["open_pattern"]
    tokenizer = Tokenizer(model_with(tmp_path, QWEN | {"fields": fields | {"tool_calls": calls}}))
    dialect = ChatDialect(tokenizer, ApiSettings(model_names=["m"]))
    reading = dialect.reading(USE, tokenizer.encode(f"{ANCHOR}<think>\n"))
    assert reading is not None
    assert {tokenizer.token_text(one) for one in reading.shown_ids} >= {"<jupyter_code>", "<jupyter_output>"}
    call = '<jupyter_code>{"name": "f", "arguments": {"a": 1}}<jupyter_output>'
    ids = tokenizer.encode(f"Why?\n</think>\n\nSee \u2603.{call}<file_sep>").tolist()
    for pieces in ([ids], [[one] for one in ids]):
        detokenizer = Detokenizer(tokenizer, shown_ids=reading.shown_ids)
        reader = reading.new_reader(StopChecker(()))
        parts = [part for piece in pieces for part in reader.push(detokenizer.push(piece))]
        parts += [*reader.push(detokenizer.finish()), *reader.finish()]
        assert joined(parts) == ("Why?", "See \u2603.", [("f", '{"a": 1}')])


def test_a_turn_of_the_event_loop_has_less_than_half_a_second_of_reading() -> None:
    """A consumer that is late takes MAX_TAKEN events at a time, each of which may be a piece."""
    assert MAX_TAKEN * response_template.PIECE_SECONDS + response_template.MAX_SECONDS < 0.5


def test_the_answers_to_one_request_share_the_limit_of_time(tmp_path: Path) -> None:
    """Each by itself would take MAX_SECONDS of the processor."""
    tokenizer = Tokenizer(model_with(tmp_path, XML))
    reading = ChatDialect(tokenizer, ApiSettings(model_names=["m"])).reading(USE, tokenizer.encode(ANCHOR))
    assert reading is not None
    text = "<tool_call><function=f><parameter=a>" + " " * 2000 + "</function></tool_call>!"
    begun = time.process_time()
    for _ in range(12):
        reader = reading.new_reader(StopChecker(()))
        assert joined([*reader.push(text), *reader.finish()])[1].split() == text.split()
    assert time.process_time() - begun < 6 * response_template.MAX_SECONDS


def test_options_come_before_the_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model_with(tmp_path, "no template"))
    prompt = tokenizer.encode(ANCHOR)
    for given in ({"tool_parser": "none"}, {"reasoning_parser": "none"}):
        dialect = ChatDialect(tokenizer, ApiSettings(model_names=["m"], **given))  # type: ignore[arg-type]
        assert dialect.reading(None, prompt) is None
    with pytest.raises(
        UnusableResponseTemplate, match=rf"{tmp_path}/tokenizer_config.json: its response_temp"
    ):
        ChatDialect(tokenizer, ApiSettings(model_names=["m"]))


def test_transformers_is_imported_for_a_template_alone(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from lightkv.router.api import process
from lightkv.router.api.requests.dialect import ChatDialect
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.text.tokenizer import Tokenizer

tokenizer = Tokenizer(Path({str(model_with(tmp_path, QWEN))!r}))
def heavy(**settings):
    ChatDialect(tokenizer, ApiSettings(model_names=["m"], **settings))
    return sorted({{"torch", "triton", "transformers"}} & set(sys.modules))
print(heavy(tool_parser="none"), end=" ")
template = tokenizer.settings.pop("response_template")
print(heavy(), end=" ")
tokenizer.settings["response_template"] = template
print(heavy(), end="")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[] [] ['transformers']"), done.stderr
