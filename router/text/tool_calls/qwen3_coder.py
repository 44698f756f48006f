"""The calls of Qwen3-Coder: the function and its parameters as tags within <tool_call>. The schema says which
parameters are texts; the others are JSON. A call that has to follow a schema which says more of texts is
written as JSON, as Hermes does."""

import re
from collections.abc import Mapping
from typing import Any

from lightkv.router.text.schemas.parameters import TEXT_END, ParameterReader, listed

from .forms import Format, arguments_of, calls, tag
from .hermes import call_tag
from .json_call import NAME, as_json, read_arguments, read_calls, skip_end
from .source import Arguments, CallBegins, Content, Source, Steps

MARKS = ("<tool_call>", "</tool_call>")
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_NAME = re.compile(rf"({NAME})\s{{0,8}}>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>")
_MAX_TAG = 300


def read(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads an answer. `tools`: the schema of each function's arguments."""
    schemas: dict[str, ParameterReader] = {}
    while (mark := (yield from source.pass_until(Content, MARKS[0], _FUNCTION))) is not None:
        read_text = mark
        if mark == MARKS[0]:
            read_text += yield from source.take_space()
            if (yield from source.skip(_FUNCTION)):
                read_text += _FUNCTION
            elif (yield from read_calls(source, tools)):  # as JSON, which the model falls into at times
                yield from skip_end(source, MARKS[1])
                continue
        name = (yield from source.match(_NAME, _MAX_TAG)) if read_text.endswith(_FUNCTION) else None
        if name is None or name[1] not in tools:
            source.give_back("" if name is None else name[0])
            yield Content(read_text)
            continue
        yield CallBegins(name[1])
        if name[1] not in schemas:
            schemas[name[1]] = ParameterReader(tools[name[1]])
        yield from _read_parameters(source, schemas[name[1]])
        for end in (_FUNCTION_END, MARKS[1]):
            yield from source.take_space()
            yield from source.skip(end)


def _read_parameters(source: Source, schema: ParameterReader) -> Steps[None]:
    """Reads the parameters that follow, each when it is complete, or an object of them."""
    before = "{"
    while True:
        yield from source.take_space()
        begin = None
        if (yield from source.starts_with("<parameter=")):
            begin = yield from source.match(_PARAMETER, _MAX_TAG)
        if begin is None:
            break
        text = yield from _read_text(source, schema)
        line_end = "\r\n" if text.startswith("\r\n") else "\n"
        value = schema.value(begin[1], text.removeprefix(line_end).removesuffix(line_end))
        yield Arguments(f"{before}{as_json(begin[1])}: {as_json(value)}")
        before = ", "
    if before == "{" and (yield from source.starts_with("{")):
        yield from read_arguments(source)
    else:
        yield Arguments("{}" if before == "{" else "}")


def _read_text(source: Source, schema: ParameterReader) -> Steps[str]:
    """Removes the text of a parameter and its end tag, and returns the text. Where the tag is missing, the text
    ends before the next parameter that the schema lists, or with the function."""
    num_searched = 0
    while True:
        for found in TEXT_END.finditer(source.text, num_searched):
            is_tag, name, following = found.groups()
            if following == "" and not source.ended:
                break  # what follows shows whether the function ends here
            if is_tag or following is not None or schema.knows(name):
                text = source.take(found.start())
                source.take(len(is_tag or ""))
                return text
        if source.ended:
            return source.take(len(source.text))
        num_searched = max(len(source.text) - _MAX_TAG, 0)
        yield None


def form(tools: Mapping[str, Any], is_parallel: bool) -> Format:
    """Returns the form of an answer that is calls. `tools`: the schema of each function's arguments."""
    return calls([_call_tag(name, schema) for name, schema in tools.items()], "\n", is_parallel)


def _call_tag(name: str, schema: Any) -> Format:
    content = arguments_of(schema) | {"type": "qwen_xml_parameter"}
    try:
        listed(content["json_schema"])
    except ValueError:
        return call_tag(name, schema)
    return tag(f"{MARKS[0]}\n{_FUNCTION}{name}>\n", content, f"{_FUNCTION_END}\n{MARKS[1]}")
