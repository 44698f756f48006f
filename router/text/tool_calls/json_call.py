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
_MORE_KEYS = re.compile(rf',{_GAP}(?=")')
_STRUCTURE = re.compile(r'["\\{}\[\]<]')
_CLOSING = {"{": "}", "[": "]"}


class EndFinder:
    """Finds the end of a JSON object or list that arrives in pieces. It ends before a "<" outside of strings,
    too: a mark of the model's format, where the model has left out a bracket.

    `opened`: the brackets that are open already.
    """

    def __init__(self, opened: str = "") -> None:
        self._opened = list(opened)
        self._is_inside_string = False
        self._is_escaped = False

    @property
    def missing(self) -> str:
        """The brackets that close what is open."""
        return "".join(_CLOSING[char] for char in reversed(self._opened))

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
            elif self._is_inside_string:
                continue
            elif char == "<":
                return found.start()
            elif char in _CLOSING:
                self._opened.append(char)
            else:
                self._opened = self._opened[:-1]
                if not self._opened:
                    return position
        return None


def begins_arguments(source: Source) -> Steps[bool]:
    """Returns whether an object comes first, or null, which stands for no arguments."""
    if not (yield from source.starts_with("null")):
        return (yield from source.starts_with("{"))
    while source.text == "null" and not source.ended:  # a longer word may follow
        yield None
    return not source.text[4:5].isalnum()


def read_arguments(source: Source) -> Steps[None]:
    """Passes on the object that comes first, as arguments, also if the text ends within it. Brackets that are
    missing before a mark are added."""
    if (yield from source.skip("null")):
        yield Arguments("{}")
        return
    finder = EndFinder()
    while True:
        end = finder.find(source.text)
        if source.text:
            yield Arguments(source.take(len(source.text) if end is None else end))
        if end is not None and finder.missing:
            yield Arguments(finder.missing)
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
            call = parsed_call(source.text[:end] + finder.missing, names)
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


def read_calls(source: Source, names: Collection[str]) -> Steps[bool]:
    """Reads a list of calls, or calls one after the other, with a comma or a semicolon between them or none. If
    it does not begin with a call, nothing is read, and the result is False. What the end of the text leaves of
    a further call is dropped."""
    is_list = yield from source.skip("[")
    space = (yield from source.take_space()) if is_list else ""
    if not (yield from read_call(source, names)):
        source.give_back("[" + space if is_list else "")
        return False
    while True:
        between = yield from source.take_space()
        for mark in (",", ";"):
            if (yield from source.skip(mark)):
                between += mark + (yield from source.take_space())
                break
        if not (yield from source.starts_with("{")) or not (yield from read_call(source, names)):
            break
    is_more = bool(between.strip()) or source.text.startswith("{")
    if is_list and not (yield from source.skip("]")) and is_more:
        if source.ended and EndFinder().find(source.text) is None:
            source.take(len(source.text))  # a call that the answer's end has cut
        else:
            source.give_back(between)
    return True


def skip_end(source: Source, mark: str) -> Steps[bool]:
    """Removes the mark that ends calls, and a bracket too many before it. Returns whether the mark came."""
    yield from source.take_space()
    if (yield from source.skip("}")):
        yield from source.take_space()
    return (yield from source.skip(mark))


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
    given = next((call[key] for key in _KEYS if call.get(key) is not None), None)
    arguments = as_object(given)
    if arguments is None:
        return None
    return name, given if isinstance(given, str) and given.lstrip().startswith("{") else as_json(arguments)


def as_object(arguments: Any) -> dict[str, Any] | None:
    """Returns the object that a call's arguments are: also of its text, once or twice as JSON. A call without
    arguments has null, an empty text or an empty list at times. Returns None for anything else."""
    for _ in range(2):
        if not isinstance(arguments, str):
            break
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            return None
    if arguments is None or arguments == [] or arguments == "":
        return {}
    return arguments if isinstance(arguments, dict) else None


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
    yield from source.take_space()
    if (yield from source.match(_MORE_KEYS, 34)) is None:
        yield from source.skip("}")
        return
    finder = EndFinder("{")
    while True:
        end = finder.find(source.text)
        source.take(len(source.text) if end is None else end)
        if end is not None or source.ended:
            return
        yield None
