"""The calls of Qwen3-Coder: the function and its parameters as tags within <tool_call>. The schema says which
parameters are texts; the others are JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any

from .forms import Format, arguments_of, calls, tag
from .json_call import NAME, as_json
from .source import Arguments, CallBegins, Content, Source, Steps

MARKS = ("<tool_call>", "</tool_call>")
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER_END = "</parameter>"
_NAME = re.compile(rf"({NAME})\s{{0,8}}>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>\n?")
_MAX_TAG = 300


def read(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads an answer. `tools`: the schema of each function's arguments."""
    while (mark := (yield from source.pass_until(Content, MARKS[0], _FUNCTION))) is not None:
        read_text = mark
        if mark == MARKS[0]:
            read_text += yield from source.take_space()
            if (yield from source.skip(_FUNCTION)):
                read_text += _FUNCTION
        name = (yield from source.match(_NAME, _MAX_TAG)) if read_text.endswith(_FUNCTION) else None
        if name is None or name[1] not in tools:
            source.give_back("" if name is None else name[0])
            yield Content(read_text)
            continue
        yield CallBegins(name[1])
        yield from _read_parameters(source, tools[name[1]])
        for end in (_FUNCTION_END, MARKS[1]):
            yield from source.take_space()
            yield from source.skip(end)


def _read_parameters(source: Source, schema: Any) -> Steps[None]:
    """Reads the parameters that follow, each when it is complete."""
    before = "{"
    while True:
        yield from source.take_space()
        begin = None
        if (yield from source.starts_with("<parameter=")):
            begin = yield from source.match(_PARAMETER, _MAX_TAG)
        if begin is None:
            break
        num_searched = 0
        while (end := source.text.find(_PARAMETER_END, num_searched)) < 0 and not source.ended:
            num_searched = max(len(source.text) - len(_PARAMETER_END), 0)
            yield None
        text = source.take(len(source.text) if end < 0 else end)
        source.take(len(_PARAMETER_END) if end >= 0 else 0)
        value = _value(text.removeprefix("\n").removesuffix("\n"), schema, begin[1])
        yield Arguments(f"{before}{as_json(begin[1])}: {as_json(value)}")
        before = ", "
    yield Arguments("{}" if before == "{" else "}")


def _value(text: str, schema: Any, name: str) -> Any:
    """Returns a parameter's value: the text itself if the schema says so, or if it is no JSON."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    kind = properties.get(name) if isinstance(properties, dict) else None
    if isinstance(kind, dict) and kind.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON; the parameter is read as text")


def write(name: str, arguments: str) -> str:
    """Returns the text of a call."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        values = {"arguments": arguments}  # which a model once left incomplete
    texts = [
        f"<parameter={key}>\n{value if isinstance(value, str) else as_json(value)}\n</parameter>\n"
        for key, value in values.items()
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(texts)}</function>\n</tool_call>"


def form(tools: Mapping[str, Any], is_parallel: bool) -> Format:
    """Returns the form of an answer that is calls. `tools`: the schema of each function's arguments."""
    tags = [
        tag(
            f"{MARKS[0]}\n{_FUNCTION}{name}>\n",
            arguments_of(schema) | {"type": "qwen_xml_parameter"},
            f"{_FUNCTION_END}\n{MARKS[1]}",
        )
        for name, schema in tools.items()
    ]
    return calls(tags, "\n", is_parallel)
