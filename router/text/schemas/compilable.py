"""JSON schemas as llguidance compiles them: what it refuses or fails on, although a text can follow it, is
written in another way."""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from .alternatives import alternatives, as_key, moved, parts_of
from .texts import quoted, searched

_MAX_PAIRS = 10_000  # of alternatives that are compared in one schema


def compilable(text: str) -> str:
    """Returns a JSON schema, as text, that the same texts follow.

    - `oneOf` of alternatives of which no value follows two is `anyOf`.
    - Patterns of `patternProperties` that name listed or required properties alone are parts of these:
      llguidance panics over a name that no text is.
    """
    if not any(f'"{key}"' in text for key in ("oneOf", "patternProperties")):
        return text
    schema = json.loads(text)
    num_pairs = 0
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        each = one.get("oneOf")
        if isinstance(each, list) and len(each) > 1 and "anyOf" not in one:
            num_pairs += len(each) * (len(each) - 1) // 2
            pairs = itertools.combinations(each, 2)
            if num_pairs <= _MAX_PAIRS and all(_are_apart(first, second, schema) for first, second in pairs):
                one["anyOf"] = one.pop("oneOf")
        if isinstance(one.get("patternProperties"), dict):
            _take_patterns_apart(one)
        waiting += [part for _, part in parts_of(one)]
    return json.dumps(schema)


def place_of_fault(schema: Any, is_wrong: Callable[[Any], bool]) -> str:
    """Returns the JSON pointer of the innermost part of a schema that is wrong by itself. `is_wrong`: whether a
    schema is."""
    place, inner = "", schema
    whole = {"root": moved(schema, "#/$defs/root")}
    found: tuple[str, Any] | None = ("", schema)
    while found is not None:
        place, inner = place + found[0], found[1]
        found = next(
            (
                (pointer, part)
                for pointer, part in parts_of(inner)
                if isinstance(part, dict)
                and is_wrong({"$ref": f"#/$defs/root{quote(place + pointer)}", "$defs": whole})
            ),
            None,
        )
    return f"#{place}"


def _are_apart(first: Any, second: Any, root: Any, depth: int = 4) -> bool:
    """Returns whether it is certain that no value follows both schemas."""
    try:
        each = alternatives(first, root), alternatives(second, root)
    except ValueError:
        return False
    return all(_differ(one, other, root, depth) for one, other in itertools.product(*each))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], root: Any, depth: int) -> bool:
    kinds = {one["type"], other["type"]}
    if len(kinds) > 1 and kinds != {"integer", "number"}:
        return True
    if "enum" in one and "enum" in other:
        return not {as_key(value) for value in one["enum"]} & {as_key(value) for value in other["enum"]}
    for least, most in (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems")):
        for low, high in ((one.get(least), other.get(most)), (other.get(least), one.get(most))):
            if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
                return True
    return one["type"] == "object" and depth > 0 and _have_a_tag(one, other, root, depth)


def _have_a_tag(one: Mapping[str, Any], other: Mapping[str, Any], root: Any, depth: int) -> bool:
    """Returns whether a required property tells two objects apart."""
    for this, that in ((one, other), (other, one)):
        listed, theirs = this.get("properties", {}), that.get("properties", {})
        if not isinstance(listed, Mapping) or not isinstance(theirs, Mapping):
            return False
        others = True if "patternProperties" in that else that.get("additionalProperties", True)
        for name in this.get("required", ()):
            kind, their = listed.get(name, True), theirs.get(name, others)
            is_forbidden = their is False
            if is_forbidden or (
                name in that.get("required", ()) and _are_apart(kind, their, root, depth - 1)
            ):
                return True
    return False


def _take_patterns_apart(one: dict[str, Any]) -> None:
    """Moves patterns that name listed or required properties alone into these."""
    listed, required = one.get("properties", {}), one.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return  # llguidance says so
    named = [*listed, *(name for name in required if isinstance(name, str) and name not in listed)]
    for pattern, kind in list(one["patternProperties"].items()):
        names = _found_in(pattern, named)
        if not names or _has_other_names(pattern, names):
            continue
        for name in names:
            listed[name] = {"allOf": [listed[name], kind]} if name in listed else kind
        one["properties"] = listed
        del one["patternProperties"][pattern]
    if not one["patternProperties"]:
        del one["patternProperties"]


def _found_in(pattern: str, names: list[str]) -> list[str]:
    """Returns the names in which a pattern is found."""
    source = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    begin = _matcher(source)
    found = []
    for name in names if not begin.is_error() else ():
        matcher, tokens = begin.deep_copy(), list(json.dumps(name, ensure_ascii=False).encode())
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            found.append(name)
    return found


def _has_other_names(pattern: str, names: list[str]) -> bool:
    """Returns whether a pattern is found in other names than these; True if that is not known."""
    listed = " | ".join(map(quoted, names))
    text = f"start: NAME\nNAME: /{regex_to_lark(searched(pattern), 'dw')}/ & ~({listed})"
    matcher = _matcher(LLMatcher.grammar_from_lark(text))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not matcher.get_error().startswith("NoExtension")


def _matcher(source: str) -> LLMatcher:
    return LLMatcher(LLTokenizer("byte"), source, log_level=0)
