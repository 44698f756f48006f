"""The fields with which requests say what an answer has to be: OpenAI's `response_format` and vLLM's
`structured_outputs`."""

import json
from collections.abc import Mapping
from typing import Any

from lightkv.router.sampling_params import MAX_GRAMMAR_BYTES, Grammar, InvalidParams
from lightkv.router.text.grammars import InvalidGrammar
from lightkv.router.text.tool_calls.closed_schema import closed_schema

# The keys of structured_outputs, besides those that each say what an answer is.
_OPTIONS = (
    "disable_additional_properties",
    "disable_any_whitespace",
    "disable_fallback",
    "whitespace_pattern",
)
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# The keys of response_format besides its type, and of the json_schema in it.
_FORMAT_KEYS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}
_SCHEMA_KEYS = ("name", "description", "schema", "strict")
_SCHEMA_PLACE = '{"type": "json_schema", "json_schema": {"name": …, "schema": …}}'


def grammar_of(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None
) -> tuple[str, Grammar | None]:
    """Returns the field that says what the answer has to be, and its grammar; "tools" and None if the text is
    free. Raises InvalidParams, which names the field."""
    formatted, structured = _of_response_format(response_format), _of_structured_outputs(structured_outputs)
    if formatted is not None and structured is not None:
        allowed = "it without response_format; one of them is enough"
        raise InvalidParams("structured_outputs", structured_outputs, allowed)
    field, grammar = (
        ("response_format", formatted) if structured is None else ("structured_outputs", structured)
    )
    if grammar is None:
        return "tools", None
    _check_size(field, grammar.text)
    return field, grammar


def _of_response_format(value: dict[str, Any] | None) -> Grammar | None:
    field, given = "response_format", value or {}
    kind = given.get("type", "text")
    if not isinstance(kind, str) or kind not in _FORMAT_KEYS:
        allowed = 'the type "text", "json_object", "json_schema" or "structural_tag"'
        raise InvalidParams(field, value, allowed)
    _check_keys(field, given, ("type", *_FORMAT_KEYS[kind]))
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object")
        case "structural_tag":
            return _grammar(field, "structural_tag", value, None)
    described = given.get("json_schema")
    if isinstance(described, Mapping):
        _check_keys(f"{field}.json_schema", described, _SCHEMA_KEYS)
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if schema is None:
        raise InvalidParams(field, value, 'it with {"name": …, "schema": …} in json_schema')
    return _grammar(field, "json", schema, None)


def _check_keys(field: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises InvalidParams, which names the key, for a key that would be ignored."""
    is_misplaced = ("schema" in given) != ("schema" in known)  # a schema without a frame, or beside it
    for key, value in given.items():
        if key in known or value is None:
            continue
        is_schema = is_misplaced or key in ("schema", "json_schema")
        allowed = (
            f"it as {_SCHEMA_PLACE}" if is_schema else f"null: the keys of {field} are {', '.join(known)}"
        )
        raise InvalidParams(f"{field}.{key}", value, allowed)


def _of_structured_outputs(value: dict[str, Any] | None) -> Grammar | None:
    field = "structured_outputs"
    given = {key: one for key, one in (value or {}).items() if one is not None and one is not False}
    if unknown := given.keys() - {*_KINDS, *_OPTIONS}:
        raise InvalidParams(field, min(unknown), f"one of {', '.join(_KINDS)}")
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) > 1:
        raise InvalidParams(field, kinds, "one of them")
    if not kinds:
        return None
    spaces = given.get("whitespace_pattern")
    if spaces is not None and not isinstance(spaces, str):
        raise InvalidParams(f"{field}.whitespace_pattern", spaces, "a regex")
    if given.get("disable_any_whitespace"):
        spaces = ""
    value = given[kinds[0]]
    if kinds[0] == "json" and given.get("disable_additional_properties"):
        value = _closed(field, value)
    return _grammar(field, kinds[0], value, spaces)


def _grammar(field: str, kind: str, value: Any, spaces: str | None) -> Grammar:
    """Returns the grammar of one field. `kind`: one of _KINDS; `spaces`: a regex of whitespace within JSON."""
    if kind == "json_object":
        if value is not True:
            raise InvalidParams(field, value, "true or false for json_object")
        if spaces is None:
            return Grammar("json_object")
        return Grammar("json_schema", _schema(field, {"type": "object"}, spaces))
    if kind == "json":
        return Grammar("json_schema", _schema(field, value, spaces))
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise InvalidParams(field, value, "a list of one or more texts")
        return Grammar("choice", json.dumps(value, ensure_ascii=False))
    if kind == "structural_tag":
        if not isinstance(value, str | dict):
            raise InvalidParams(field, value, "a structural tag, which is an object")
        text = value if isinstance(value, str) else _dumped(field, value, "structural tag")
        return Grammar("structural_tag", text)
    if not isinstance(value, str):
        raise InvalidParams(field, value, f"a {kind} as a text")
    return Grammar("regex" if kind == "regex" else "lark", value)


def _check_size(field: str, text: str) -> None:
    """Raises InvalidGrammar for a text that is too long."""
    if len(text) <= MAX_GRAMMAR_BYTES // 4:  # of at most four bytes each
        return
    if (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_GRAMMAR_BYTES:
        raise InvalidGrammar(field, f"it has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")


def _dumped(field: str, value: Any, what: str) -> str:
    """Returns a value as JSON. Raises InvalidGrammar."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise InvalidGrammar(field, f"the {what} is nested too deeply") from error


def _schema(field: str, value: Any, spaces: str | None) -> str:
    """Returns a schema as JSON. Raises InvalidParams."""
    if isinstance(value, str):
        if spaces is None:
            return value
        value = _loaded(field, value)
    if not isinstance(value, dict | bool):
        raise InvalidParams(field, value, "a JSON schema, which is an object")
    if spaces is not None and value is not False:
        value = {**({} if value is True else value), "x-guidance": {"whitespace_pattern": spaces}}
    return _dumped(field, value, "schema")


def _closed(field: str, value: Any) -> Any:
    """Returns a schema whose objects have no properties that it does not list. Raises InvalidParams."""
    try:
        return closed_schema(_loaded(field, value) if isinstance(value, str) else value)
    except RecursionError as error:
        raise InvalidGrammar(field, "the schema is nested too deeply") from error


def _loaded(field: str, text: str) -> Any:
    """Returns the schema that a text is. Raises InvalidGrammar."""
    _check_size(field, text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(field, f"the schema is not JSON ({str(error)[:200]})") from error
