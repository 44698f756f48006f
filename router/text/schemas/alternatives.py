"""What a JSON schema says: the schemas within it, its references, and the alternatives that a value may be."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name → schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_ONES = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else")
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_COMBINE = ("$ref", "anyOf", "oneOf", "allOf")
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_WORDS = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable")
_NAMES = ("$defs", "definitions", "$schema", "$id", "$comment", "discriminator", "x-guidance")
MAX_ALTERNATIVES = 256  # of one value; a schema of more is not taken apart


def parts_of(schema: Any) -> Iterator[Any]:
    """Yields the schemas that stand directly within a schema."""
    if not isinstance(schema, Mapping):
        return
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from schema[key].values()
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in _ONES:
        if isinstance(schema.get(key), Mapping):
            yield schema[key]


def has_reference(schema: Any) -> bool:
    """Returns whether a schema refers to another one."""
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


def moved(value: Any, root: str) -> Any:
    """Returns a copy of a schema whose references to itself start at `root`."""
    if isinstance(value, list):
        return [moved(one, root) for one in value]
    if not isinstance(value, dict):
        return value
    copied = {key: moved(one, root) for key, one in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copied["$ref"] = root + reference[1:]
    return copied


def escaped(name: str) -> str:
    """Returns a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolved(reference: Any, root: Any) -> Any:
    """Returns the schema that a $ref within `root` names. Raises ValueError if there is none."""
    head, *names = str(reference).split("/")
    found = root
    for name in (unquote(name).replace("~1", "/").replace("~0", "~") for name in names):
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            head = ""
            break
    if head != "#":
        raise ValueError(f"$ref {str(reference)[:100]!r} names no part of the schema")
    return found


def alternatives(schema: Any, root: Any, seen: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Returns schemas of one type each; a value that follows `schema` follows one of them.

    They have no references, and no combination but `not` and `if`. Values that `enum` or `const` lists are in
    `enum`, of this type only. What is true of several types at once (`{}`) is one alternative for each.

    Args:
        root: the schema that references start from.
        seen: the references that have led here.

    Raises:
        ValueError: it is no schema, refers to itself or to nothing, or has parts that cannot be merged.
    """
    if schema is False:
        return []
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ValueError("a schema is neither an object nor true or false")
    found = _own_alternatives(schema)
    if "$ref" in schema:
        reference = schema["$ref"]
        if reference in seen:
            raise ValueError(f"$ref {str(reference)[:100]!r} leads to itself")
        found = _both(found, alternatives(resolved(reference, root), root, (*seen, reference)))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            each = (alternatives(one, root, seen) for one in _list(schema, key))
            found = _both(found, [one for some in each for one in some])
    for one in _list(schema, "allOf") if "allOf" in schema else ():
        found = _both(found, alternatives(one, root, seen))
    return found


def type_of(value: Any) -> str:
    """Returns the type of a JSON value, "number" also of an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def as_key(value: Any) -> str:
    """Returns a text that two JSON values share if they are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _own_alternatives(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the alternatives of what a schema says beside references and combinations."""
    given = schema.get("type", list(_TYPES))
    own = {
        key: one for key, one in schema.items() if key not in (*_COMBINE, *_WORDS, *_NAMES, "const", "type")
    }
    values = [schema["const"]] if "const" in schema else None
    if "enum" in schema:
        listed = _list(schema, "enum")
        keys = None if values is None else {as_key(one) for one in listed}
        values = listed if keys is None else [one for one in values or () if as_key(one) in keys]
    found = []
    for kind in [given] if isinstance(given, str) else _list(schema, "type") if "type" in schema else given:
        one = own | {"type": kind}
        if values is not None:
            of_kind = "number" if kind == "integer" else kind
            one["enum"] = [value for value in values if type_of(value) == of_kind and _is_whole(value, kind)]
        if values is None or one["enum"]:
            found.append(one)
    return found


def _is_whole(value: Any, kind: str) -> bool:
    return kind != "integer" or isinstance(value, int) or float(value).is_integer()


def _both(first: Iterable[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the alternatives of a value that is one of `first` and one of `second`."""
    found = []
    for one, other in itertools.product(first, second):
        if (merged := _merged(one, other)) is not None:
            found.append(merged)
            if len(found) > MAX_ALTERNATIVES:
                raise ValueError(f"a value has more than {MAX_ALTERNATIVES} alternatives")
    return found


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the alternative that follows two, or None if no value does. Raises ValueError."""
    kinds = {one["type"], other["type"]}
    if len(kinds) > 1 and kinds != {"integer", "number"}:
        return None
    merged = {**one, **other, "type": one["type"] if len(kinds) == 1 else "integer"}
    closed = "additionalProperties" in merged and "properties" in one and "properties" in other
    if closed and one["properties"] != other["properties"]:
        raise ValueError("additionalProperties is given beside the properties of several schemas")
    for key in one.keys() & other.keys() - {"type"}:
        first, second = one[key], other[key]
        if first == second and type(first) is type(second):
            continue
        if key == "enum":
            keys = {as_key(value) for value in second}
            merged[key] = [value for value in first if as_key(value) in keys]
        elif key == "required":
            merged[key] = [*_list(one, key), *(name for name in _list(other, key) if name not in first)]
        elif key == "properties" and isinstance(first, Mapping) and isinstance(second, Mapping):
            shared = {name: {"allOf": [first[name], second[name]]} for name in first.keys() & second.keys()}
            merged[key] = {**first, **second, **shared}
        elif key in (*_LEAST, *_MOST) and isinstance(first, int | float) and isinstance(second, int | float):
            merged[key] = max(first, second) if key in _LEAST else min(first, second)
        else:
            raise ValueError(f"{key} is given twice for the same value; give it once")
    if "enum" in merged:
        merged["enum"] = [value for value in merged["enum"] if _is_whole(value, merged["type"])]
        return merged if merged["enum"] else None
    return merged


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(schema[key], list):
        raise ValueError(f"{key} is not a list")
    return list(schema[key])
