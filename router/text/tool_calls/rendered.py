"""Finds out how a chat template writes the calls of earlier messages, so that new calls can be generated in
exactly this form. The next prompt then begins with the tokens that were generated, and hits them in the cache.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightkv.router.text.answer_reader import AnswerReader, joined
from lightkv.router.text.tokenizer import ChatTemplateError

from .families import Family
from .forms import JSON_SEPARATORS, Format, arguments_of, calls, constant, row, tag

Message = dict[str, Any]
# Renders messages, with the words that begin an answer or without. Raises ChatTemplateError.
Render = Callable[[Sequence[Message], bool], str]

_NAMES = ("first_probe", "second_probe")
_IDS = ("probe0001", "probe0002")  # of nine letters and digits, as Mistral's templates insist
_ARGUMENTS = {"b": {"é": [1, 2]}, "a": "x"}
PROBED_TOOLS = {name: {"type": "object", "properties": {"a": {}, "b": {}}} for name in _NAMES}
_COMPACT = (",", ":")


@dataclass(frozen=True)
class CallTexts:
    """The texts around the names and the arguments of a message's calls.

    `begin`: before the first name. `middle`: between a name and its arguments. `joint`: between the arguments
    of a call and the name of the next; None if the template writes one call alone. `end`: after the last
    arguments. `separators`: those of the arguments, between elements and after a key.
    """

    begin: str
    middle: str
    joint: str | None
    end: str
    separators: tuple[str, str]

    def form(self, tools: Mapping[str, Any], is_parallel: bool) -> Format:
        """Returns the form of an answer that is calls. `tools`: the schema of each function's arguments."""
        tags = [
            tag(f"{name}{self.middle}", arguments_of(schema, self.separators), "")
            for name, schema in tools.items()
        ]
        several = calls(tags, self.joint or "", is_parallel and self.joint is not None)
        return row(constant(self.begin), several, constant(self.end))


def call_texts(render: Render, end_texts: Sequence[str], family: Family) -> CallTexts | None:
    """Returns how a template writes calls; None if it does not continue its own prompt with them, writes them
    in a form that the family does not read, or dumps their arguments in another way than JSON in a row.

    `end_texts`: the tokens that end an answer. A call's id, which the model does not write, is left out.
    """
    for num_calls in (2, 1):
        try:
            prompt = render(_asked(), True)
            whole = render([*_asked(), *_called(num_calls)], False)
        except ChatTemplateError:  # some refuse several calls
            continue
        found = _divided(whole[len(prompt) :], num_calls, end_texts) if whole.startswith(prompt) else None
        if found is not None and _is_read(found, family):
            return found
    return None


def takes_text_after_results(render: Render) -> bool:
    """Returns whether a template takes a user's message right after a tool's result, or takes no results: some
    want the roles to alternate but for calls and results."""
    called = [*_asked(), *_called(1)]
    try:
        render(called, True)
    except ChatTemplateError:
        return True
    try:
        render([*called, *_asked()], True)
    except ChatTemplateError:
        return False
    return True


def _asked() -> list[Message]:
    return [{"role": "user", "content": "?"}]


def _called(num_calls: int) -> list[Message]:
    """Returns a message with calls, and a result of each: some templates write their last message otherwise."""
    arguments = json.dumps(_ARGUMENTS, ensure_ascii=False)
    called = [
        {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
        for identifier, name in zip(_IDS[:num_calls], _NAMES, strict=False)
    ]
    results = [
        {"role": "tool", "tool_call_id": identifier, "name": name, "content": "!"}
        for identifier, name in zip(_IDS[:num_calls], _NAMES, strict=False)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": called}, *results]


def _divided(text: str, num_calls: int, end_texts: Sequence[str]) -> CallTexts | None:
    """Divides what follows the prompt at the names and arguments of the calls."""
    for separators in (JSON_SEPARATORS, _COMPACT):
        arguments = json.dumps(_ARGUMENTS, ensure_ascii=False, separators=separators)
        outer, middles, rest = [], [], text
        for name, identifier in zip(_NAMES[:num_calls], _IDS, strict=False):
            before, has_name, rest = rest.partition(name)
            middle, has_arguments, rest = rest.partition(arguments)
            if not has_name or not has_arguments:
                break
            outer.append(before)
            middles.append(middle)
            rest = rest.replace(f', "id": "{identifier}"', "", 1)
        ends = [place for end in end_texts if (place := rest.find(end)) >= 0]
        if len(outer) < num_calls or len(set(middles)) > 1 or not ends:
            continue
        end = rest[: min(ends)]
        texts = [*outer, *middles, end]
        if any(one in piece for piece in texts for one in (*_NAMES, *_IDS)):
            continue
        return CallTexts(outer[0], middles[0], outer[1] if num_calls > 1 else None, end, separators)
    return None


def _is_read(texts: CallTexts, family: Family) -> bool:
    """Returns whether the family reads such calls, and nothing else, out of them."""
    arguments = json.dumps(_ARGUMENTS, ensure_ascii=False, separators=texts.separators)
    names = _NAMES[: 1 if texts.joint is None else 2]
    written = (texts.joint or "").join(f"{name}{texts.middle}{arguments}" for name in names)
    reader = AnswerReader([lambda source: family.read(source, PROBED_TOOLS)])
    parts = reader.push(f"{texts.begin}{written}{texts.end}")
    return joined([*parts, *reader.finish()]) == ("", "", [(name, arguments) for name in names])
