"""JSON schemas as llguidance compiles them: what it refuses or fails on, although a text can follow it, is
written in another way."""

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from .parts import parts_of
from .texts import quoted, searched


def compilable(text: str) -> str:
    """Returns a JSON schema, as text, that the same texts follow. Patterns of `patternProperties` that name
    listed or required properties alone become parts of these: llguidance panics over a name that no text is."""
    if '"patternProperties"' not in text:
        return text
    schema = json.loads(text)
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and isinstance(one.get("patternProperties"), dict):
            _take_patterns_apart(one)
        waiting += parts_of(one)
    return json.dumps(schema)


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
