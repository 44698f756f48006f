"""The calls of Hermes, Qwen 2.5 and Qwen 3: a JSON object between <tool_call> and </tool_call>. Several objects
or a list of them between the two are read as well."""

from collections.abc import Mapping
from typing import Any

from .forms import Format, arguments_of, calls, tag
from .json_call import read_calls, skip_end
from .source import Content, Source, Steps

MARKS = ("<tool_call>", "</tool_call>")


def read(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads an answer. `tools`: the schema of each function's arguments."""
    is_open = False  # whether text stands between a call and its end
    while (mark := (yield from source.pass_until(Content, *MARKS[: 1 + is_open]))) is not None:
        is_open = False
        if mark == MARKS[1]:
            continue
        space = yield from source.take_space()
        if (yield from read_calls(source, tools)):
            is_open = not (yield from skip_end(source, MARKS[1]))
        else:
            yield Content(MARKS[0] + space)


def form(tools: Mapping[str, Any], is_parallel: bool) -> Format:
    """Returns the form of an answer that is calls. `tools`: the schema of each function's arguments."""
    return calls([call_tag(name, schema) for name, schema in tools.items()], "\n", is_parallel)


def call_tag(name: str, schema: Any) -> Format:
    """Returns the form of a call. `schema`: that of its arguments."""
    return tag(f'{MARKS[0]}\n{{"name": "{name}", "arguments": ', arguments_of(schema), f"}}\n{MARKS[1]}")
