"""Formats of structural tags, of which families of models make the form of their calls."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightkv.router.text.schemas.parts import escaped, has_reference, moved

Format = Mapping[str, Any]
ANY_TEXT: Format = {"type": "any_text"}
JSON_SEPARATORS = (", ", ": ")  # between elements and after a key, as chat templates dump JSON
# What says which values a schema allows; a function's arguments are an object where it has none of them.
_SAYS_VALUES = ("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf")


def constant(text: str) -> Format:
    """Returns the form of one text."""
    return {"type": "const_string", "value": text}


def json_of(schema: Any) -> Format:
    """Returns the form of JSON that follows a schema."""
    return {"type": "json_schema", "json_schema": schema}


def arguments_of(schema: Any, separators: tuple[str, str] = JSON_SEPARATORS) -> dict[str, Any]:
    """Returns the form of arguments that follow a schema, with these texts between elements and after a key,
    and no other white space."""
    given = schema.get("x-guidance", {}) if isinstance(schema, Mapping) else None
    if not isinstance(given, Mapping):
        return dict(json_of(schema))  # which the grammar's compiler refuses
    spaces = {
        "whitespace_pattern": "",
        "whitespace_flexible": False,
        "item_separator": separators[0],
        "key_separator": separators[1],
    }
    written = {**schema, "x-guidance": {**given, **spaces}}
    if not any(key in schema for key in _SAYS_VALUES):
        written["type"] = "object"
    return dict(json_of(written))


def row(*elements: Format) -> Format:
    """Returns the form of `elements`, one after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Iterable[Format]) -> Format:
    """Returns the form of one of `elements`."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """Returns the form of `content`, or of nothing."""
    return {"type": "optional", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    """Returns the form of a content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls(tags: Iterable[Format], separator: str, is_parallel: bool) -> Format:
    """Returns the form of at least one of `tags`, and with `is_parallel` of any number."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }


def call_schemas(tools: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the JSON schema of a call of each function, as an object with `name` and `parameters`, and an
    object with the $defs of these schemas, if there are any."""
    definitions: dict[str, Any] = {}
    items = []
    for name, schema in tools.items():
        if has_reference(schema):  # its references start at the root, which is somewhere else now
            definitions[name] = moved(schema, f"#/$defs/{escaped(name)}")
            schema = {"$ref": f"#/$defs/{escaped(name)}"}
        items.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [name]}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    return items, {"$defs": definitions} if definitions else {}
