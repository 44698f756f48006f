"""The calls of Mistral: [TOOL_CALLS] before a JSON list of calls or, in newer models, before each name[ARGS]
and its arguments. Several calls after one mark are read in either form."""

import re
from collections.abc import Mapping
from typing import Any

from .forms import Format, arguments_of, calls, either, tag
from .json_call import NAME, begins_arguments, read_arguments, read_calls
from .source import Arguments, CallBegins, Content, Source, Steps

MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_NAMED = re.compile(rf"({NAME})(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\]|\s{{0,8}}(?=\{{))")
_MAX_NAMED = 512


def read(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads an answer. `tools`: the schema of each function's arguments."""
    while (yield from source.pass_until(Content, MARKS[0])) is not None:
        space = yield from source.take_space()
        if not (yield from read_calls(source, tools)) and not (yield from _read_named(source, tools)):
            yield Content(MARKS[0] + space)


def _read_named(source: Source, tools: Mapping[str, Any]) -> Steps[bool]:
    """Reads calls that begin with a name, one after the other. Returns whether there is any."""
    has_call, between = False, ""
    while (found := (yield from source.match(_NAMED, _MAX_NAMED))) is not None:
        if found[1] not in tools:
            break
        space = yield from source.take_space()
        if (yield from begins_arguments(source)):
            yield CallBegins(found[1])
            yield from read_arguments(source)
        elif (yield from source.starts_with(MARKS[0])) or not source.text:
            yield from (CallBegins(found[1]), Arguments("{}"))
        else:
            source.give_back(space)
            break
        has_call, between = True, (yield from source.take_space())
        if (yield from source.skip(",")):
            between += "," + (yield from source.take_space())
        if (yield from source.starts_with(MARKS[0])):
            return True
    source.give_back(between + ("" if found is None else found[0]))
    return has_call


def form(tools: Mapping[str, Any], is_parallel: bool) -> Format:
    """Returns the form of an answer that is calls. `tools`: the schema of each function's arguments."""
    listed = [
        tag(f'{{"name": "{name}", "arguments": ', arguments_of(schema), "}") for name, schema in tools.items()
    ]
    named = [tag(f"{MARKS[0]}{name}{MARKS[2]}", arguments_of(schema), "") for name, schema in tools.items()]
    in_list = tag(f"{MARKS[0]}[", calls(listed, ", ", is_parallel), "]")
    return either([in_list, calls(named, "", is_parallel)])
