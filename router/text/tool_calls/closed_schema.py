"""Closes the schemas of a function's arguments: an object that lists its properties has no others.

JSON schema allows others unless `additionalProperties` is false. Many clients leave that out, some take it
away, and a small model then adds properties that the function does not have.
"""

from collections.abc import Mapping
from typing import Any

from lightkv.router.text.schemas.parts import objects_in

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name → schema
_LISTS = ("anyOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalProperties")
# Where one object has to match several schemas, each has to leave room for the properties of the others.
_SEVERAL = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")
_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required", "minProperties")


def closed_schema(schema: Any) -> Any:
    """Returns a copy of a function's schema in which objects have only the properties that they list, unless
    they say themselves what others may be. A schema in which one object has to match several is returned
    unchanged."""
    if _combines(schema):
        return schema
    closed = _closed(schema)
    if isinstance(closed, dict) and closed.get("properties") == {} and not _names_more(closed):
        closed.setdefault("additionalProperties", False)  # a function without parameters
    return closed


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            closed[key] = {name: _closed(one) for name, one in schema[key].items()}
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            closed[key] = [_closed(one) for one in schema[key]]
    for key in _ONES:
        if isinstance(schema.get(key), dict):
            closed[key] = _closed(schema[key])
    if schema.get("properties") and not _names_more(schema):
        closed.setdefault("additionalProperties", False)
    return closed


def _names_more(schema: Mapping[str, Any]) -> bool:
    """Whether an object has to have more properties than it lists."""
    listed = schema.get("properties")
    required, at_least = schema.get("required", []), schema.get("minProperties", 0)
    if not (isinstance(listed, dict) and isinstance(required, list) and isinstance(at_least, int)):
        return True  # not a schema; the grammar's compiler says so
    return not set(map(str, required)) <= listed.keys() or at_least > len(listed)


def _combines(schema: Any) -> bool:
    """Whether an object may have to match several parts of the schema. Properties of these names count, too."""
    for one in objects_in(schema):
        num_alternatives = sum(key in one for key in _ALTERNATIVES)
        num_parts = num_alternatives + any(key in one for key in _OF_OBJECTS)
        if any(key in one for key in _SEVERAL) or (num_alternatives and num_parts > 1):
            return True
    return False
