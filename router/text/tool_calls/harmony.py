"""The messages of gpt-oss, each with a header: reasoning on the channel analysis, calls to functions.NAME, and
the answer on the channel final."""

import re
from collections.abc import Mapping
from typing import Any

from .forms import ANY_TEXT, Format, arguments_of, constant, either, optional, row, tag
from .json_call import NAME, begins_arguments, read_arguments
from .source import Arguments, CallBegins, Content, Reasoning, Source, Steps

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", *_ENDS)
_HEADER = re.compile(r"((?:[^<]|<(?!\|message\|>)){0,480})<\|message\|>")
_MAX_HEADER = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(rf"to=\s?({NAME})")


def read(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads an answer. `tools`: the schema of each function's arguments."""
    while (yield from _has_text(source)):
        header = yield from source.match(_HEADER, _MAX_HEADER)
        if header is None:
            break
        recipient, channel = _RECIPIENT.search(header[1]), _CHANNEL.search(header[1])
        # The function that it goes to, whose name has functions. before it or not.
        names = () if recipient is None else (recipient[1], recipient[1].removeprefix("functions."))
        name = next((one for one in names if one in tools), None)
        if name is not None and (yield from _has_arguments(source)):
            yield CallBegins(name)
            if (yield from begins_arguments(source)):
                yield from read_arguments(source)
            else:
                yield Arguments("{}")
            yield from source.take_space()
            for end in _ENDS[:3]:
                yield from source.skip(end)
        else:
            is_reasoning = recipient is None and channel is not None and channel[1] == "analysis"
            mark = yield from source.pass_until(Reasoning if is_reasoning else Content, *_ENDS, MARKS[0])
            if mark == MARKS[0]:
                source.give_back(mark)  # the message has no end, and the next one begins
    while (yield from source.pass_until(Content, *MARKS)) is not None:
        pass  # a text without a header is shown without its marks


def _has_text(source: Source) -> Steps[bool]:
    while not source.text and not source.ended:
        yield None
    return bool(source.text)


def _has_arguments(source: Source) -> Steps[bool]:
    """Returns whether arguments follow: an object, or null or nothing, as for a function without parameters."""
    yield from source.take_space()
    if (yield from begins_arguments(source)):
        return True
    for end in _ENDS:
        if (yield from source.starts_with(end)):
            return True
    return not source.text


def form(tools: Mapping[str, Any], is_parallel: bool) -> Format:
    """Returns the form of a call, which ends an answer. `tools`: the schema of each function's arguments."""
    begins = (
        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
        " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.{}<|channel|>commentary json<|message|>",
    )
    return either(
        row(either(constant(begin.format(name)) for begin in begins), arguments_of(schema))
        for name, schema in tools.items()
    )


def whole_form(call: Format | None, answer: Format | None) -> Format:
    """Returns the form of reasoning, which may be left out, and then `call`, or `answer` on the channel final.
    At least one of the two is given."""
    last = [] if call is None else [call]
    if answer is not None:
        finals = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")
        last.append(row(either(map(constant, finals)), answer))
    reasoning = tag("<|channel|>analysis<|message|>", ANY_TEXT, "<|end|><|start|>assistant")
    return row(optional(reasoning), either(last))
