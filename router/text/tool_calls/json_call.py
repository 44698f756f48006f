"""Reads calls that are written as JSON: an object with the function's name and its arguments.

If the name comes first, as in almost every call, the arguments are passed on while they arrive. From then on
the call is certain. Every other object is read to its end first, and stays text if it is no call.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from .source import Arguments, CallBegins, Source, Steps

NAME = r"[A-Za-z0-9_.:/-]{1,256}"  # of a function
_GAP = r"\s{0,32}"
_KEYS = ("arguments", "parameters")
_HEAD = re.compile(
    rf'\{{{_GAP}"name"{_GAP}:{_GAP}"({NAME})"{_GAP},{_GAP}"(?:{"|".join(_KEYS)})"{_GAP}:{_GAP}(?=\{{)'
)
_FIRST_KEY = re.compile(rf'\{{{_GAP}"([^"\\]{{0,32}})"')
_KNOWN_KEYS = {"name", *_KEYS, "type", "id", "function"}
_STRUCTURE = re.compile(r'["\\{}\[\]]')


class EndFinder:
    """Finds the end of a JSON object or list that arrives in pieces. `depth`: how many are open already."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_inside_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Adds text. Returns how many of its characters belong to the value, or None if it goes on."""
        position = int(self._is_escaped and bool(text))
        self._is_escaped = self._is_escaped and not text
        while (found := _STRUCTURE.search(text, position)) is not None:
            char, position = found[0], found.end()
            if char == "\\":
                if self._is_inside_string:
                    self._is_escaped = position == len(text)
                    position += 1
            elif char == '"':
                self._is_inside_string = not self._is_inside_string
            elif not self._is_inside_string:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return position
        return None


def read_arguments(source: Source, depth: int = 0) -> Steps[None]:
    """Passes on the object that comes first, as arguments, also if the text ends within it."""
    finder = EndFinder(depth)
    while True:
        end = finder.find(source.text)
        if source.text:
            yield Arguments(source.take(len(source.text) if end is None else end))
        if end is not None or source.ended:
            return
        yield None


def read_call(source: Source, names: Collection[str]) -> Steps[bool]:
    """Reads the object that comes first. If it is no call of one of `names`, nothing is read, the result is
    False, and no call is looked for within the object."""
    finder, num_searched = EndFinder(), 0
    while True:
        head = _HEAD.match(source.text)
        if head is not None:
            if head[1] not in names:
                return False
            source.take(head.end())
            yield CallBegins(head[1])
            yield from read_arguments(source)
            yield from _skip_rest(source)
            return True
        if source.text and source.text[0] != "{":
            return False
        key = _FIRST_KEY.match(source.text)
        if key is not None and key[1] not in _KNOWN_KEYS:
            return False
        end = finder.find(source.text[num_searched:])
        if end is not None:
            end += num_searched
            call = parsed_call(source.text[:end], names)
            if call is None:
                source.note_plain(end)
                return False
            source.take(end)
            yield CallBegins(call[0])
            yield Arguments(call[1])
            return True
        if source.ended:
            source.note_plain(len(source.text))
            return False
        num_searched = len(source.text)
        yield None


def read_list(source: Source, names: Collection[str]) -> Steps[bool]:
    """Reads a list of calls. If it does not begin with a call, nothing is read, and the result is False. What
    the end of the text leaves of a further call is dropped."""
    if not (yield from source.skip("[")):
        return False
    space = yield from source.take_space()
    if not (yield from read_call(source, names)):
        source.give_back("[" + space)
        return False
    while True:
        yield from source.take_space()
        if not (yield from source.skip(",")):
            break
        space = yield from source.take_space()
        if not (yield from read_call(source, names)):
            if source.ended and EndFinder().find(source.text) is None:
                source.take(len(source.text))  # a call that the answer's end has cut
            else:
                source.give_back("," + space)
            return True
    yield from source.skip("]")
    return True


def parsed_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Returns the name and the arguments (JSON) of a call, or None if `text` is no call of one of `names`."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(call, dict) and isinstance(call.get("function"), dict):  # as OpenAI writes calls
        call = call["function"]
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments: Any = next((call[key] for key in _KEYS if call.get(key) is not None), {})
    if isinstance(arguments, str):
        try:
            return (name, arguments) if isinstance(json.loads(arguments), dict) else None
        except (ValueError, RecursionError):
            return None
    return (name, as_json(arguments)) if isinstance(arguments, dict) else None


def as_json(value: Any) -> str:
    """Returns `value` as JSON, in characters that UTF-8 has."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value)
    return text


def _skip_rest(source: Source) -> Steps[None]:
    """Removes the rest of an object whose beginning was taken."""
    finder = EndFinder(1)
    while True:
        end = finder.find(source.text)
        source.take(len(source.text) if end is None else end)
        if end is not None or source.ended:
            return
        yield None
