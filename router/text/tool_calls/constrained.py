"""Answers that a grammar makes calls of: a JSON list of calls where some call is required, and the arguments
alone where the function is named. Also the schemas of these grammars."""

import json
from collections.abc import Mapping
from typing import Any

from .closed_schema import closed_schema
from .json_call import read_arguments, read_list
from .source import CallBegins, Content, Source, Steps


def read_required(source: Source, tools: Mapping[str, Any]) -> Steps[None]:
    """Reads a list of calls. A text that is none stays content. `tools`: the schema of each function's
    arguments."""
    yield from source.take_space()
    yield from read_list(source, tools)
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


def schema_text(schema: Any) -> str:
    """Returns a JSON schema as text. Half surrogate pairs, which JSON can carry and UTF-8 cannot, become
    U+FFFD."""
    text = json.dumps(schema, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def named_schema(schema: Any) -> str:
    """Returns the JSON schema of a function's arguments, without properties that it does not list."""
    return schema_text(closed_schema(schema))


def required_schema(tools: Mapping[str, Any], max_calls: int | None = None) -> str:
    """Returns the JSON schema of a list of at least one call, whose arguments have no properties that their
    schemas do not list. `max_calls`: the most; None is no limit."""
    definitions: dict[str, Any] = {}
    items = []
    for name, schema in tools.items():
        schema = closed_schema(schema)
        if _has_reference(schema):  # its references start at the root, which is somewhere else now
            definitions[name] = _moved(schema, f"#/$defs/{_escaped(name)}")
            schema = {"$ref": f"#/$defs/{_escaped(name)}"}
        items.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if max_calls is not None:
        calls["maxItems"] = max_calls
    if definitions:
        calls["$defs"] = definitions
    return schema_text(calls)


def _has_reference(schema: Any) -> bool:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("$ref"), str):
                return True
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return False


def _moved(value: Any, root: str) -> Any:
    """Returns a copy of a schema whose references to itself start at `root`."""
    if isinstance(value, list):
        return [_moved(one, root) for one in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(one, root) for key, one in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
