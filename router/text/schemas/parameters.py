"""The parameters that Qwen3-Coder writes as texts: which texts a parameter may have, and the value of its text.

The grammar of required calls (`structural_tags.py`) allows the texts whose value, as it is read here, follows
the parameter's schema. A schema that says more of a text than which ones it may be has no such form.
"""

import json
import math
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .parts import resolved

# Of parts of values against parts of schemas, in the parameters of a function; later parts are taken as right.
MAX_CHECKS = 20_000
MAX_PARTS, MAX_DEPTH = 256, 100  # schemas within one that are of the same value, and levels of a value
# Strings of Python, and its words for what JSON writes otherwise. A string without an end matches, too, so that
# none is looked through twice.
_PYTHON = re.compile(r"'((?:[^'\\\n]|\\.)*)('?)|\"(?:[^\"\\\n]|\\.)*\"?|\b(?:True|False|None)\b")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
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
# Keywords that say nothing of values.
_WORDS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "nullable"}
_WORDS |= {"$defs", "definitions", "$schema", "$id", "$comment", "discriminator", "x-guidance"}
_COMBINE = ("anyOf", "oneOf", "allOf")
_SIZES = {  # keyword → how a number, or the length of another value, compares with it
    "number": {
        "minimum": operator.ge,
        "exclusiveMinimum": operator.gt,
        "maximum": operator.le,
        "exclusiveMaximum": operator.lt,
    },
    "string": {"minLength": operator.ge, "maxLength": operator.le},
    "array": {"minItems": operator.ge, "maxItems": operator.le},
}


class Parameter(NamedTuple):
    """What a parameter's text may be: one of `texts`, or any where these are None, or the JSON of a value that
    follows one of the schemas `others`."""

    texts: list[str] | None
    others: list[Any]


class Listed(NamedTuple):
    """The parameters of a call: those that the schema lists, in order, and the names of those that have to be
    there. `others`: any others, where it lists none; None allows none."""

    schemas: dict[str, Parameter]
    required: frozenset[str]
    others: Parameter | None


def listed(schema: Any) -> Listed:
    """Returns the parameters of a function by its schema. Raises ValueError for a schema that a row of texts
    cannot follow."""
    one = schema
    for _ in range(MAX_PARTS):
        said = _said(one)
        if said.keys() != {"$ref"}:
            break
        one = resolved(said["$ref"], schema)
    properties, required = said.get("properties", {}), said.get("required", [])
    others = said.get("additionalProperties", True)
    is_object = said.get("type", "object") == "object" and isinstance(properties, Mapping)
    if not is_object or not isinstance(required, list):
        raise ValueError("the parameters are no object by their schema")
    if more := said.keys() - {"type", "properties", "required", "additionalProperties"}:
        raise ValueError(f"{min(more)} of all parameters has no form as texts")
    schemas = {name: kind for name, kind in properties.items() if kind is not False}
    for name in required:
        if not isinstance(name, str) or (name not in schemas and (name in properties or others is False)):
            raise ValueError(f"the parameter {str(name)[:100]!r} is required, and its schema allows no value")
        schemas.setdefault(name, others)
    own = {name: _parameter(name, kind, schema) for name, kind in schemas.items()}
    is_free = not own and others is not False
    return Listed(own, frozenset(required), _parameter("", others, schema) if is_free else None)


def _parameter(name: str, kind: Any, root: Any) -> Parameter:
    texts: list[str] | None = []
    others: list[Any] = []
    waiting, num_left = [kind], MAX_PARTS
    while waiting and num_left:
        one, num_left = waiting.pop(), num_left - 1
        if one is False:
            continue
        said = _said(one)
        kinds = _kinds(said)
        may_be_text = not kinds or "string" in kinds
        values = [said["const"]] if "const" in said else said.get("enum")
        if said.keys() == {"$ref"}:
            waiting.append(resolved(said["$ref"], root))
        elif said.keys() in ({"anyOf"}, {"oneOf"}) and isinstance(parts := said.popitem()[1], list):
            waiting += reversed(parts)
        elif isinstance(values, list) and said.keys() <= {"type", "enum", "const"}:
            own = [value for value in values if isinstance(value, str) and may_be_text]
            texts = None if texts is None else texts + own
            if any(not isinstance(value, str) for value in values) and kinds != ["string"]:
                others.append(said | {"enum": [value for value in values if not isinstance(value, str)]})
        elif not may_be_text:
            others.append(said)
        elif said.keys() <= {"type"}:
            texts = None
        else:
            raise ValueError(f"the parameter {name[:100]!r} has a schema that has no form as texts")
    if waiting:
        raise ValueError(f"the parameter {name[:100]!r} has more than {MAX_PARTS} alternatives")
    if not texts and not others and texts is not None:
        raise ValueError(f"the schema of the parameter {name[:100]!r} allows no value")
    return Parameter(texts, [] if texts is None else others)  # every text is one of the others, too


def _said(schema: Any) -> dict[str, Any]:
    """Returns what a schema says of values."""
    if schema is not True and not isinstance(schema, Mapping):
        raise ValueError("a schema is neither an object nor true or false")
    return {} if schema is True else {key: one for key, one in schema.items() if key not in _WORDS}


class ParameterReader:
    """Reads the values of the parameters of one function. `schema`: that of its arguments."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._num_left = MAX_CHECKS
        waiting, self._objects = [schema], list[Mapping[str, Any]]()
        while waiting and len(self._objects) < MAX_PARTS:
            one = waiting.pop()
            if isinstance(one, Mapping):
                self._objects.append(one)
                waiting += [part for part, _ in self._combined(one)]

    def knows(self, name: str) -> bool:
        """Returns whether the schema lists a parameter."""
        return bool(self._schemas_of(name))

    def value(self, name: str, text: str) -> Any:
        """Returns the value that a text stands for: JSON (or Python's way to write it) if the schema takes this
        value, else the text itself if the schema takes that, else what is closest to the schema."""
        schemas = self._schemas_of(name)
        if not schemas:
            others = (one.get("additionalProperties", False) for one in self._objects)
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

    def _schemas_of(self, name: str) -> list[Any]:
        found = (one.get("properties") for one in self._objects)
        return [one[name] for one in found if isinstance(one, Mapping) and name in one]

    def _combined(self, schema: Mapping[str, Any]) -> list[tuple[Any, str]]:
        """Returns the schemas that a value of `schema` follows, too, with the keyword of each."""
        found = [(one, key) for key in _COMBINE if isinstance(schema.get(key), list) for one in schema[key]]
        try:
            return [*found, (resolved(schema["$ref"], self._schema), "$ref")] if "$ref" in schema else found
        except ValueError:  # an answer that is not constrained may have such a schema
            return found

    def _follows(self, value: Any, schema: Any, is_exact: bool = True, depth: int = 0) -> bool:
        """Returns whether a value follows a schema, or with `is_exact` False whether its type does. A pattern
        is not looked at: one of a request could take very long in Python."""
        self._num_left -= 1
        if not isinstance(schema, Mapping) or self._num_left < 0 or depth > MAX_DEPTH:
            return schema is not False
        kind, kinds = _type_of(value), _kinds(schema)
        is_whole = kind == "number" and "integer" in kinds and float(value).is_integer()
        if kinds and not is_whole and kind not in kinds:
            return False
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            self._num_left -= len(values)
            same, own = (_as_key, _as_key(value)) if is_exact else (_type_of, kind)
            if own not in map(same, values):
                return False
        taken = dict[str, list[bool]]()
        for one, key in self._combined(schema):
            taken.setdefault(key, []).append(self._follows(value, one, is_exact, depth + 1))
        if not all((all if key in ("allOf", "$ref") else any)(found) for key, found in taken.items()):
            return False
        if not is_exact:
            return True
        for key, compare in _SIZES.get(kind, {}).items():
            limit: Any = schema.get(key)
            if type(limit) in (int, float) and not compare(value if kind == "number" else len(value), limit):
                return False
        if kind == "array":
            items = schema.get("items", True)
            return isinstance(items, list) or all(self._follows(one, items, True, depth + 1) for one in value)
        return kind != "object" or self._is_object(value, schema, depth + 1)

    def _is_object(self, value: Mapping[str, Any], schema: Mapping[str, Any], depth: int) -> bool:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return True
        if any(name not in value for name in required if isinstance(name, str)):
            return False
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(
            self._follows(item, properties.get(name, others), True, depth) for name, item in value.items()
        )


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the types that a schema names; none if it does not say."""
    given = schema.get("type", [])
    return given if isinstance(given, list) else [given]


def _type_of(value: Any) -> str:
    """Returns the type of a JSON value, "number" also of an integer."""
    if isinstance(value, bool):
        return "boolean"
    kinds = {type(None): "null", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _as_key(value: Any) -> str:
    """Returns a text that two JSON values share if they are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _parsed(text: str) -> tuple[Any] | None:
    """Returns the value that a text is as JSON, or as a literal of Python; None if it is neither."""
    for one in (text, _PYTHON.sub(_json_of, text)):
        try:
            return (json.loads(one, parse_constant=_finite, parse_float=_finite),)
        except (ValueError, RecursionError):
            continue
    return None


def _json_of(found: re.Match[str]) -> str:
    if not found[2]:
        return _PYTHON_WORDS.get(found[0], found[0])
    inner = _IN_QUOTES.sub(lambda one: {"\\'": "'", '"': '\\"'}.get(one[0], one[0]), found[1])
    return f'"{inner}"'


def _finite(text: str) -> float:
    """Returns a number. Raises ValueError for those that JSON does not have: NaN, infinities and what is too
    large."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value
