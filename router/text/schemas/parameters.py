"""The parameters that Qwen3-Coder writes as texts: which schemas a parameter has, and the value of its text.

The grammar of required calls (`structural_tags.py`) allows the texts whose value, as it is read here, follows
the parameter's schema.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .alternatives import alternatives, as_key, type_of

# Of parts of values against parts of schemas, in the parameters of a function; later parts are taken as right.
MAX_CHECKS = 20_000
# Strings of Python, and its words for what JSON writes otherwise.
_PYTHON = re.compile(r"'((?:[^'\\\n]|\\.)*)'|\"(?:[^\"\\\n]|\\.)*\"|\b(?:True|False|None)\b")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_IN_QUOTES = re.compile(r"\\'|\\.|\"")
# A parameter's text ends at its tag. Where that is missing, it ends before the next parameter that the schema
# lists, or where the function or the call ends and nothing else or another call follows.
_CALL_END = r"</(?:function|tool_call)>[ \n\r\t]{0,32}"
_AFTER_CALL = "</tool_call>|<tool_call>|<function="
TEXT_END = re.compile(
    rf"(</parameter>)|\n?<parameter=([^<>\n]{{1,256}})>|\n?(?={_CALL_END}({_AFTER_CALL}|\Z))"
)
# The regex of what a parameter's text never has in a call that has to follow its schema, so that it ends at its
# tag whatever parameters the schema lists.
ENDS_IN_TEXT = rf"</parameter>|<parameter=[^<>\n]{{1,256}}>|{_CALL_END}(?:{_AFTER_CALL})"
_REFUSED = (
    *("not", "if", "then", "else", "propertyNames", "patternProperties", "unevaluatedProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)


class Listed(NamedTuple):
    """The parameters of one form of a call.

    `schemas`: those of the parameters by their names, in order. `required`: the names of those that have to be
    there. `others`: the schema of parameters that are not listed; False allows none. `num_others`: the least
    number of these.
    """

    schemas: dict[str, Any]
    required: frozenset[str]
    others: Any
    num_others: int


def listed(schema: Any) -> list[Listed]:
    """Returns the forms that the parameters of a function may have by its schema. Raises ValueError for a
    schema of other values than objects, and for what a row of parameters cannot follow."""
    found = [_listed(one) for one in alternatives(schema, schema) if one["type"] == "object"]
    if not found:
        raise ValueError("the parameters are no object by their schema")
    return found


def _listed(one: Mapping[str, Any]) -> Listed:
    properties, required = one.get("properties", {}), one.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError("properties of the parameters is not an object, or required not a list")
    if refused := [key for key in (*_REFUSED, "enum") if key in one]:
        raise ValueError(f"{refused[0]} of all parameters is not supported in the model's form; leave it out")
    others = one.get("additionalProperties", True)
    schemas = {name: kind for name, kind in properties.items() if kind is not False}
    for name in required:
        if not isinstance(name, str) or (name not in schemas and (name in properties or others is False)):
            raise ValueError(f"the parameter {str(name)[:100]!r} is required, and its schema allows no value")
        schemas.setdefault(name, others)
    least, most = one.get("minProperties", 0), one.get("maxProperties", math.inf)
    if not isinstance(least, int) or not isinstance(most, int | float):
        raise ValueError("minProperties or maxProperties of the parameters is not a count")
    num_others = max(least - len(required), 0)
    is_free = not schemas and others is not False
    if (num_others and not is_free) or most < (math.inf if is_free else len(schemas)):
        raise ValueError(
            "minProperties and maxProperties are not supported in the model's form; use required"
        )
    return Listed(schemas, frozenset(required), others, num_others)


class ParameterReader:
    """Reads the values of the parameters of one function. `schema`: that of its arguments."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._num_left = MAX_CHECKS
        self._known: dict[int, list[dict[str, Any]]] = {}  # alternatives by the ids of schemas, which live on
        try:
            self._objects = [one for one in alternatives(schema, schema) if one["type"] == "object"]
        except ValueError:  # an answer that is not constrained may have such a schema
            self._objects = []
        properties = [one.get("properties") for one in self._objects]
        self._properties = [one for one in properties if isinstance(one, Mapping)]

    def knows(self, name: str) -> bool:
        """Returns whether the schema lists a parameter."""
        return any(name in one for one in self._properties)

    def value(self, name: str, text: str) -> Any:
        """Returns the value that a text stands for: JSON (or Python's way to write it) if the schema takes this
        value, else the text itself if the schema takes that, else what is closest to the schema."""
        schemas = [one[name] for one in self._properties if name in one]
        if not schemas:
            others = (one.get("additionalProperties", True) for one in self._objects)
            schemas = [one for one in others if one is not False] or [True]
        parsed = _parsed(text)
        values = [text] if parsed is None else [text, parsed[0]]
        if parsed is not None and not isinstance(parsed[0], str):
            values.reverse()
        for is_exact in (True, False):
            for value in values:
                if any(self._follows(value, schema, is_exact) for schema in schemas):
                    return value
        return values[0]

    def _follows(self, value: Any, schema: Any, is_exact: bool = True) -> bool:
        """Returns whether a value follows a schema, or with `is_exact` False whether its type does."""
        found = self._known.get(id(schema))
        if found is None:
            try:
                found = alternatives(schema, self._schema)
            except ValueError:
                found = alternatives(True, True)
            self._known[id(schema)] = found
        return any(self._is_of(value, one, is_exact) for one in found)

    def _is_of(self, value: Any, one: Mapping[str, Any], is_exact: bool) -> bool:
        kind = type_of(value)
        is_whole = one["type"] == "integer" and kind == "number" and float(value).is_integer()
        if one["type"] != kind and not is_whole:
            return False
        self._num_left -= 1 + len(one.get("enum", ()))
        if not is_exact or self._num_left < 0:
            return True
        if "enum" in one:
            return any(as_key(value) == as_key(other) for other in one["enum"])
        match kind:
            case "number":
                step = one.get("multipleOf")
                is_multiple = not isinstance(step, int) or not step or value % step == 0
                is_inside = _is_within(value, one, "minimum", "maximum")
                outer = one.get("exclusiveMinimum"), one.get("exclusiveMaximum")
                return is_multiple and is_inside and value not in outer and _is_within(value, one, *_OPEN)
            case "string":  # a pattern of a request could take very long in Python
                return _is_within(len(value), one, "minLength", "maxLength")
            case "array":
                items = one.get("items", True)
                has_all = isinstance(items, list) or all(self._follows(item, items) for item in value)
                return has_all and _is_within(len(value), one, "minItems", "maxItems")
            case "object":
                return self._is_object(value, one)
        return True

    def _is_object(self, value: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
        properties, required = one.get("properties", {}), one.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return True
        if any(name not in value for name in required if isinstance(name, str)):
            return False
        others = True if "patternProperties" in one else one.get("additionalProperties", True)
        return all(self._follows(item, properties.get(name, others)) for name, item in value.items())


_OPEN = ("exclusiveMinimum", "exclusiveMaximum")


def _is_within(size: float, one: Mapping[str, Any], least: str, most: str) -> bool:
    low, high = one.get(least), one.get(most)
    is_high = not isinstance(low, int | float) or isinstance(low, bool) or size >= low
    return is_high and (not isinstance(high, int | float) or isinstance(high, bool) or size <= high)


def _parsed(text: str) -> tuple[Any] | None:
    """Returns the value that a text is as JSON, or as a literal of Python; None if it is neither."""
    for one in (text, _PYTHON.sub(_json_of, text)):
        try:
            return (json.loads(one, parse_constant=_refuse, parse_float=_finite),)
        except (ValueError, RecursionError):
            continue
    return None


def _json_of(found: re.Match[str]) -> str:
    if found[1] is None:
        return _WORDS.get(found[0], found[0])
    inner = _IN_QUOTES.sub(lambda one: {"\\'": "'", '"': '\\"'}.get(one[0], one[0]), found[1])
    return f'"{inner}"'


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for JSON")
    return value
