"""The families of models, by how they write tool calls, and which of them a chat template is of."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.nodes

from lightkv.router.text.tokenizer import template_sandbox

from . import deepseek, harmony, hermes, llama3, mistral, qwen3_coder
from .forms import Format
from .source import Source, Steps

THINK_BEGIN, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Family:
    """How one family of models writes calls.

    `marks`: the texts by which its calls are found, some of which are special tokens. `read`: reads an answer;
    it gets the schema of each function's arguments. `form`: returns the form of an answer that is calls, of
    these schemas and whether there may be several. `begin`: what such an answer begins with, if it is always
    the same. `has_messages`: an answer has several messages, of which one may be reasoning. `is_bare`: a call
    is JSON without a mark.
    """

    marks: tuple[str, ...]
    read: Callable[[Source, Mapping[str, Any]], Steps[None]]
    form: Callable[[Mapping[str, Any], bool], Format]
    begin: str = ""
    id_length: int | None = None  # of a call's id, where templates insist on one
    has_messages: bool = False
    is_bare: bool = False


FAMILIES = {
    "hermes": Family(hermes.MARKS, hermes.read, hermes.form, hermes.MARKS[0]),
    "qwen3_coder": Family(qwen3_coder.MARKS, qwen3_coder.read, qwen3_coder.form, qwen3_coder.MARKS[0]),
    "llama3": Family(llama3.MARKS, llama3.read, llama3.form, is_bare=True),
    "mistral": Family(mistral.MARKS, mistral.read, mistral.form, mistral.MARKS[0], id_length=9),
    "deepseek": Family(deepseek.MARKS, deepseek.read, deepseek.form, deepseek.MARKS[0]),
    "gpt_oss": Family(harmony.MARKS, harmony.read, harmony.form, has_messages=True),
}
# A template is of the first family that has all of its texts in it.
_SIGNS = (
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", "parameters")),
)
_OTHER_SIGNS = ("<arg_key>",)  # of GLM, which begins its calls as Hermes does
_ADDED_TEXT = re.compile(r"\+\s*\w+(?:\.function|\[.function.\])?(?:\.arguments|\[.arguments.\])(?!\s*\|)")


def family_of(template: str) -> str | None:
    """Returns the name of the family whose calls a chat template writes; None if it writes none, or writes
    them in another way."""
    if any(sign in template for sign in _OTHER_SIGNS):
        return None
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)


def reasoning_of(template: str) -> str | None:
    """Returns the name of the parser for the reasoning that a chat template knows, or None."""
    if all(sign in template for sign in _SIGNS[0][1]):
        return "gpt_oss"
    return "qwen3" if THINK_BEGIN in template or THINK_END in template else None


def variables_of(template: str) -> frozenset[str]:
    """Returns the names of the variables that a chat template reads; none if it does not parse."""
    try:
        names = template_sandbox().parse(template).find_all(jinja2.nodes.Name)
        return frozenset(node.name for node in names if node.ctx == "load")
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


def wants_text(template: str) -> bool:
    """Returns whether a chat template adds the arguments of earlier calls to a text, so that they have to be
    JSON. Other templates write the JSON themselves, of an object."""
    return _ADDED_TEXT.search(template) is not None
