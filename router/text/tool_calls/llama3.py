"""The calls of Llama 3: JSON objects, or a list of them, at the beginning of an answer or after
<|python_tag|>."""

from collections.abc import Mapping
from typing import Any

from .forms import Format, call_schemas, calls, constant, json_of, optional, row, tag
from .json_call import read_calls
from .source import Content, Source, Steps

MARKS = ("<|python_tag|>",)


def read(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads an answer. `tools`: the schema of each function's arguments."""
    mark: str | None = ""
    while mark is not None:
        space = yield from source.take_space()
        if not (yield from read_calls(source, tools)) and mark + space:
            yield Content(mark + space)
        mark = yield from source.pass_until(Content, MARKS[0])


def form(tools: Mapping[str, Any], is_parallel: bool) -> Format:
    """Returns the form of an answer that is calls. `tools`: the schema of each function's arguments."""
    items, definitions = call_schemas(tools)
    one = tag("", json_of({"anyOf": items, **definitions}), "")
    return row(optional(constant(MARKS[0])), calls([one], "; ", is_parallel))
