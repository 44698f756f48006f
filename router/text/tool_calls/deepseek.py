"""The calls of DeepSeek: V3 and R1 write the arguments as a block of JSON after the word function and the name,
V3.1 writes the name and the arguments alone."""

import re
from collections.abc import Mapping
from typing import Any

from .forms import Format, arguments_of, calls, either, tag
from .json_call import NAME, begins_arguments, read_arguments
from .source import CallBegins, Content, Source, Steps

_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS = (_ALL_BEGIN, _ALL_END, _BEGIN, _SEPARATOR, _END)
_FENCE = "```"
_HEAD = re.compile(
    rf"\s{{0,8}}(?:function{_SEPARATOR}({NAME})(?![\w.:/-])|({NAME}){_SEPARATOR})"
    rf"\s{{0,8}}(?:{_FENCE}(?:json)?\s{{0,8}})?(?=[{{n])"
)
_MAX_HEAD = 512


def read(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads an answer. `tools`: the schema of each function's arguments."""
    while (mark := (yield from source.pass_until(Content, _ALL_BEGIN, _BEGIN))) is not None:
        read_text = mark
        if mark == _ALL_BEGIN:
            read_text += yield from source.take_space()
            if (yield from source.skip(_BEGIN)):
                read_text += _BEGIN
        name = (yield from _read_head(source, tools)) if read_text.endswith(_BEGIN) else None
        if name is None:
            yield Content(read_text)
        while name is not None:
            yield CallBegins(name)
            yield from read_arguments(source)
            for end in (_FENCE, _END):
                yield from source.take_space()
                yield from source.skip(end)
            yield from source.take_space()
            if (yield from source.skip(_ALL_END)) or (yield from source.starts_with(_BEGIN)):
                break
            name = yield from _read_head(source, tools)  # of another call, without a mark of its own


def _read_head(source: Source, tools: Mapping[str, Any]) -> Steps[str | None]:
    """Reads a call as far as its arguments, and returns its function. Reads nothing if there is no such call,
    and returns None."""
    found = yield from source.match(_HEAD, _MAX_HEAD)
    name = None if found is None else found[1] or found[2]
    if name in tools and (yield from begins_arguments(source)):
        return name
    source.give_back("" if found is None else found[0])
    return None


def form(tools: Mapping[str, Any], is_parallel: bool) -> Format:
    """Returns the form of an answer that is calls. `tools`: the schema of each function's arguments."""
    fenced = [
        tag(f"{_BEGIN}function{_SEPARATOR}{name}\n{_FENCE}json\n", arguments_of(schema), f"\n{_FENCE}{_END}")
        for name, schema in tools.items()
    ]
    plain = [tag(f"{_BEGIN}{name}{_SEPARATOR}", arguments_of(schema), _END) for name, schema in tools.items()]
    both = either([calls(fenced, "\n", is_parallel), calls(plain, "", is_parallel)])
    return tag(_ALL_BEGIN, both, _ALL_END)
