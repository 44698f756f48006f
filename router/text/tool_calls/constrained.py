"""Answers that a grammar makes calls of: a JSON list of calls where some call is required, the arguments alone
where the function is named, and calls in the model's form where the answer may be calls or of some format. Also
the schemas of these grammars."""

import json
from collections.abc import Mapping
from typing import Any

from .closed_schema import closed_schema
from .families import Family
from .forms import call_schemas
from .json_call import read_arguments, read_calls
from .source import CallBegins, Content, Source, Steps


def read_required(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads a list of calls. A text that is none stays content. `tools`: the schema of each function's
    arguments."""
    yield from source.take_space()
    yield from read_calls(source, tools)
    yield from source.take_space()
    yield from source.pass_until(Content)


def read_named(source: Source, name: str) -> Steps[None]:
    """Reads the arguments of the function `name`. A text that is no object stays content."""
    yield from source.take_space()
    if (yield from source.starts_with("{")):
        yield CallBegins(name)
        yield from read_arguments(source)
        yield from source.take_space()
    yield from source.pass_until(Content)


def read_calls_or_format(source: Source, family: Family, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads calls, or a text of another format, which stays content whatever stands in it."""
    if (yield from source.starts_with(family.begin)):
        yield from family.read(source, tools)
    yield from source.pass_until(Content)


def schema_text(schema: Any) -> str:
    """Returns a JSON schema as text. Half surrogate pairs, which JSON can carry and UTF-8 cannot, become
    U+FFFD."""
    text = json.dumps(schema, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def required_schema(tools: Mapping[str, Any], max_calls: int | None = None) -> str:
    """Returns the JSON schema of a list of at least one call, whose arguments have no properties that their
    schemas do not list. `max_calls`: the most; None is no limit."""
    items, definitions = call_schemas({name: closed_schema(schema) for name, schema in tools.items()})
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if max_calls is not None:
        calls["maxItems"] = max_calls
    return schema_text(calls | definitions)
