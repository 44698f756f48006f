"""Structural tags: texts that are free in some places and follow a grammar in others. A tree of formats, in the
JSON that xgrammar defined and vLLM and SGLang take, becomes grammars of llguidance.

A free text ends where the constant text after it begins. So a format that has one is either the last of all, or
stands before a constant text, such as the end of its tag.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from lightkv.router.sampling_params import Grammar
from lightkv.router.text.schemas.parameters import ENDS_IN_TEXT, Parameter, listed
from lightkv.router.text.schemas.parts import has_reference, moved
from lightkv.router.text.tool_calls.forms import Format

# Of an object's parts, where the schema does not say: some models would write spaces without an end.
WHITESPACE = r"[ \n\r\t]{1,32}"
_ANY_TEXT = "/(?s:.*)/"
_MISPLACED = "a free text has to stand before a constant text, or at the end of all"
# The keys of each type of format. Any other that has a value is refused, since it would be ignored.
_KEYS = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "any_order"),
    "qwen_xml_parameter": ("json_schema",),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": ("excludes", "max_chars", "max_tokens"),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "repeat": ("content", "min", "max"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "excludes", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "structural_tag": ("format", "structures", "triggers"),
    "structures": ("begin", "schema", "end"),
}
_PARAMETER_END = "\n</parameter>\n"
_IN_PARAMETER = f"~(/(?s:.*)/ /{regex_to_lark(ENDS_IN_TEXT, 'dw')}/ /(?s:.*)/)"


class Constant(NamedTuple):
    """One of `texts`, each without a special token within it."""

    texts: tuple[str, ...]


class Token(NamedTuple):
    """A special token."""

    id: int


class Free(NamedTuple):
    """Any text. `terminal`: the name of its regex."""

    terminal: str


class Ends(NamedTuple):
    """One of several constant texts, of which some have special tokens: the parts of each."""

    each: tuple[tuple[Constant | Token, ...], ...]


class Rule(NamedTuple):
    """What a Lark expression matches. `is_open`: it may end with a free text."""

    expression: str
    is_open: bool = False


Part = Constant | Token | Ends | Free | Rule


def quoted(text: str) -> str:
    """Returns a text as Lark writes it, which is as in JSON, but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def lark_of_ebnf(text: str) -> str:
    """Returns a grammar in Lark's form, of one in that form or in GBNF. Raises ValueError."""
    if "::=" not in text:
        return text
    try:
        return any_to_lark(text)
    except (IndexError, KeyError, RecursionError, TypeError) as error:
        raise ValueError("it is not a grammar in GBNF, ends too early or nests too deeply") from error
    except Exception as error:  # the converter's own, which is no class of errors
        raise ValueError(f"it is not a grammar in GBNF ({str(error)[:200]})") from error


def with_whitespace(schema: Any) -> str:
    """Returns a JSON schema as text, with a limit on white space and `oneOf` taken as `anyOf`, unless it says
    otherwise itself. Raises ValueError."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ValueError("a JSON schema is an object, or true")
    given = schema.get("x-guidance", {})
    if not isinstance(given, Mapping):
        raise ValueError("x-guidance is not an object")
    usual = {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}
    return json.dumps({**schema, "x-guidance": {**usual, **given}})


def grammars_of(text: str, special: Mapping[str, int]) -> str:
    """Returns llguidance's grammars of a structural tag. Raises ValueError if it is none.

    `text`: the tag as JSON. `special`: the ids of the special tokens by their texts. Where one of these is a
    part of a constant text, it stands for the token.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise ValueError('a structural tag is an object of the type "structural_tag"')
    _check_keys(tag, "structural_tag")
    return _Writer(special).whole(_format_of(tag))


def format_of_grammar(grammar: Grammar) -> Format:
    """Returns a grammar that is no structural tag as a format of one. Raises ValueError for a text that is not
    JSON where it has to be."""
    match grammar.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "choice":
            texts = json.loads(grammar.text)
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    return {"type": "grammar", "grammar": grammar.text}


def _format_of(tag: Format) -> Format:
    """Returns the format of a structural tag, also of one in the older form with `structures`."""
    if tag.get("structures") is None:
        return _get(tag, "format", Mapping)
    if tag.get("format") is not None:
        raise ValueError("a structural tag has format or structures, and this one has both")
    structures = _all(_get(tag, "structures", list), Mapping)
    for one in structures:
        _check_keys(one, "structures")
    tags = [
        {
            "type": "tag",
            "begin": _get(one, "begin", str),
            "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
            "end": _get(one, "end", str),
        }
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": _get(tag, "triggers", list), "tags": tags}


class _Writer:
    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(filter(None, special), key=len, reverse=True)
        self._special_texts = re.compile("|".join(map(re.escape, names))) if names else None
        self._lines: dict[str, str] = {}  # of a rule, its name
        self._grammars: list[dict[str, Any]] = []
        self._parts_of: dict[str, Callable[[Format], list[Part]]] = {
            "const_string": lambda one: self._constant(_get(one, "value", str)),
            "json_schema": self._json_schema,
            "qwen_xml_parameter": lambda one: self._xml(_get(one, "json_schema", Mapping)),
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._either,
            "optional": lambda one: self._repeated(one, "?"),
            "star": lambda one: self._repeated(one, "*"),
            "plus": lambda one: self._repeated(one, "+"),
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def whole(self, format: Format) -> str:
        """Returns the grammars of a text that is of one format."""
        start = self._expression(self._parts(format), is_last=True)
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._lines.values()])
        return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *self._grammars]})

    def _parts(self, format: Any) -> list[Part]:
        kind = format.get("type") if isinstance(format, Mapping) else None
        write = self._parts_of.get(kind) if isinstance(kind, str) else None
        if write is None or not isinstance(kind, str):
            kinds = ", ".join(self._parts_of)
            raise ValueError(f"a format of a structural tag is {str(kind)[:50]!r}; give one of {kinds}")
        _check_keys(format, kind)
        return write(format)

    def _expression(self, parts: Sequence[Part], is_last: bool = False) -> str:
        """Returns the Lark expression of parts in a row. `is_last`: nothing follows them."""
        merged: list[Part] = []
        for part in parts:
            last = merged[-1] if merged else None
            if (
                isinstance(last, Constant)
                and isinstance(part, Constant)
                and len(last.texts) == len(part.texts) == 1
            ):
                merged[-1] = Constant((last.texts[0] + part.texts[0],))
            else:
                merged.append(part)
        written: list[str] = []
        open_name = ""  # of a free text, which goes on until the next part
        for number, part in enumerate(merged):
            if open_name and not isinstance(part, Constant | Token | Ends):
                raise ValueError(_MISPLACED)
            match part:
                case Free(terminal):
                    open_name = terminal
                    continue
                case Constant(texts):
                    literal = " | ".join(map(quoted, texts))
                    written.append(self._until(open_name, literal) if open_name else f"({literal})")
                case Token(token_id):
                    written.append(f"{open_name} <[{token_id}]>")
                case Ends(each):
                    before = [Free(open_name)] if open_name else []
                    ends = " | ".join(f"({self._expression([*before, *one])})" for one in each)
                    written.append(f"({ends})")
                case Rule(expression, is_open):
                    if is_open and not (is_last and number == len(merged) - 1):
                        raise ValueError(_MISPLACED)
                    written.append(expression)
            open_name = ""
        if open_name and not is_last:
            raise ValueError(_MISPLACED)
        return " ".join([*written, *filter(None, [open_name])]) or '""'

    def _line(self, prefix: str, body: str, options: str = "") -> str:
        """Returns the name of a rule (or of a terminal, whose prefix is upper case) with this body."""
        key = f"{prefix}{options}: {body}"
        if key not in self._lines:
            self._lines[key] = f"{prefix}{len(self._lines)}{options}: {body}"
        return self._lines[key].partition(":")[0].partition("[")[0]

    def _until(self, terminal: str, literal: str) -> str:
        return self._line("until_", f"{terminal} ({literal})", "[lazy]")

    def _constant(self, *texts: str) -> list[Part]:
        """Returns the parts of one of several constant texts."""
        each = [self._divided(text) for text in texts]
        if len(each) == 1:
            return [*each[0]]
        if all(len(one) == 1 and isinstance(one[0], Constant) for one in each):
            return [Constant(texts)]
        return [Ends(tuple(map(tuple, each)))]

    def _divided(self, text: str) -> list[Constant | Token]:
        """Divides a constant text at its special tokens."""
        if self._special_texts is None:
            return [Constant((text,))] if text else []
        parts: list[Constant | Token] = []
        end = 0
        for found in self._special_texts.finditer(text):
            if found.start() > end:
                parts.append(Constant((text[end : found.start()],)))
            parts.append(Token(self._special[found[0]]))
            end = found.end()
        return [*parts, Constant((text[end:],))] if end < len(text) else parts

    def _json_schema(self, one: Format) -> list[Part]:
        if one.get("any_order"):
            raise ValueError("any_order is not supported; leave it out")
        match one.get("style", "json"):
            case "json":
                schema = one.get("json_schema")
                return [Rule(self._line("json_", f"%json {with_whitespace(schema)}"))]
            case "qwen_xml":
                return self._xml(_get(one, "json_schema", Mapping))
        raise ValueError('the style of a json_schema is neither "json" nor "qwen_xml"')

    def _xml(self, schema: Format) -> list[Part]:
        """Returns the parts of parameters that are tags, in the order of the schema: texts as they are, and
        other values as JSON."""
        found, parts = listed(schema), list[Part]()
        for name, parameter in found.schemas.items():
            begin = self._expression([Constant((f"<parameter={name}>\n",))])
            body = self._line("parameter_", f"{begin} {self._parameter(parameter, schema)}")
            parts.append(Rule(body if name in found.required else f"{body}?"))
        if found.others is not None:
            begin = self._line("REGEX_", r"/<parameter=[^<>\n]{1,256}>\n/")
            parts.append(Rule(f"({begin} {self._parameter(found.others, schema)})*"))
        return parts

    def _parameter(self, one: Parameter, root: Format) -> str:
        """Returns the expression of a parameter's text and its end."""
        end, bodies = quoted(_PARAMETER_END), []
        if one.texts or one.texts is None:
            text = self._line("TEXT_", _IN_PARAMETER)
            if one.texts:
                text = self._line("TEXT_", f"{text} & ({' | '.join(map(quoted, one.texts))})")
            bodies.append(self._until(text, end))
        if one.others:
            shown: dict[str, Any] = {"anyOf": one.others}
            if has_reference(shown):
                whole = {key: one for key, one in root.items() if key != "x-guidance"}
                shown = moved(shown | {"$defs": {"root": whole}}, "#/$defs/root")
            shown["x-guidance"] = root.get("x-guidance", {})
            bodies.append(f"{self._expression(self._json_schema({'json_schema': shown}))} {end}")
        return f"({' | '.join(bodies)})"

    def _regex(self, one: Format) -> list[Part]:
        pattern = regex_to_lark(_get(one, "pattern", str), "dw")  # \d and \w are of ASCII, as in JSON schemas
        return [Rule(self._line("REGEX_", f"/{pattern}/"))]

    def _grammar(self, one: Format) -> list[Part]:
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": lark_of_ebnf(_get(one, "grammar", str))})
        return [Rule(f"@{name}")]

    def _any_text(self, one: Format) -> list[Part]:
        if one.get("max_tokens") is not None:
            raise ValueError("max_tokens of any_text is not supported; give max_chars")
        most = one.get("max_chars")
        if most is not None and (type(most) is not int or most < 0):
            raise ValueError("max_chars of any_text is not a count")
        regex = _ANY_TEXT if most is None else f"/(?s:.{{0,{most}}})/"
        for excluded in _all(one.get("excludes", []), str):
            if excluded:
                regex += f" & ~(/(?s:.*)/ {quoted(excluded)} /(?s:.*)/)"
        return [Free(self._line("TEXT_", regex))]

    def _sequence(self, one: Format) -> list[Part]:
        return [part for element in _get(one, "elements", list) for part in self._parts(element)]

    def _either(self, one: Format) -> list[Part]:
        elements = [self._parts(element) for element in _get(one, "elements", list)]
        if not elements:
            raise ValueError("elements of or is an empty list")
        is_open = any(_is_open(parts) for parts in elements)
        each = [f"({self._expression(parts, is_last=True)})" for parts in elements]
        return [Rule(self._line("either_", " | ".join(each)), is_open)]

    def _repeated(self, one: Format, count: str) -> list[Part]:
        parts = self._parts(one.get("content"))
        is_open = count == "?" and _is_open(parts)
        return [Rule(f"{self._line('repeated_', self._expression(parts, is_open))}{count}", is_open)]

    def _repeat(self, one: Format) -> list[Part]:
        least, most = _get(one, "min", int), _get(one, "max", int)
        if least < 0 or (most != -1 and most < least):
            raise ValueError(f"repeat goes from {least} to {most}; give a range, whose end may be -1")
        return self._repeated(one, f"{{{least},{'' if most == -1 else most}}}")

    def _tag(self, one: Format, cut: int = 0) -> list[Part]:
        """`cut`: so many characters of its begin were written."""
        ends = one.get("end")
        ends = [ends] if isinstance(ends, str) else _all(ends, str)
        if not ends:
            raise ValueError("a tag has no end; give a text, or several")
        begin = _get(one, "begin", str)[cut:]
        return [*self._constant(begin), *self._parts(one.get("content")), *self._constant(*ends)]

    def _tags(self, one: Format) -> list[Format]:
        tags = _all(_get(one, "tags", list), Mapping)
        if not tags:
            raise ValueError(f"{one['type']} has no tags; give at least one")
        for tag in tags:
            _check_keys(tag, "tag")
        return tags

    def _separated(self, one: Format) -> list[Part]:
        each = [f"({self._expression(self._tag(tag))})" for tag in self._tags(one)]
        any_tag = self._line("tag_", " | ".join(each))
        between = self._expression(self._constant(_get(one, "separator", str)))
        tags = any_tag if one.get("stop_after_first") else f"{any_tag} ({between} {any_tag})*"
        return [Rule(f"({tags})" if one.get("at_least_one") else f"({tags})?")]

    def _triggered(self, one: Format) -> list[Part]:
        tags = self._tags(one)
        [text] = self._any_text({"excludes": one.get("excludes", [])})
        rests: dict[str, list[str]] = {}
        for tag in tags:
            begin = _get(tag, "begin", str)
            triggers = _all(_get(one, "triggers", list), str)
            trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(
                    f"the tag that begins with {begin[:50]!r} has no trigger; its begin starts with it"
                )
            rests.setdefault(trigger, []).append(f"({self._expression(self._tag(tag, len(trigger)))})")
        found = []
        for trigger, bodies in rests.items():
            head = self._constant(trigger)
            if len(head) > 1 and isinstance(head[0], Constant):
                raise ValueError(
                    f"the trigger {trigger[:50]!r} has a special token within it; begin with the token"
                )
            found.append(f"{self._expression([text, *head])} ({' | '.join(bodies)})")
        later = self._line("triggered_", " | ".join(found))
        first = self._line("first_", " | ".join(f"({self._expression(self._tag(tag))})" for tag in tags))
        assert isinstance(text, Free)
        match bool(one.get("at_least_one")), bool(one.get("stop_after_first")):
            case True, True:
                return [Rule(first)]
            case False, True:
                return [Rule(f"({later} | {text.terminal})", True)]
            case True, False:
                return [Rule(f"{first} {later}*"), text]
        return [Rule(f"{later}*"), text]


def _check_keys(one: Mapping[str, Any], kind: str) -> None:
    for key, value in one.items():
        if key not in ("type", *_KEYS[kind]) and value not in (None, False, []):
            raise ValueError(f"{key[:50]!r} of {kind} is not known; its keys are {', '.join(_KEYS[kind])}")


def _is_open(parts: Sequence[Part]) -> bool:
    """Returns whether parts in a row may end with a free text."""
    return bool(parts) and (
        isinstance(parts[-1], Free) or (isinstance(parts[-1], Rule) and parts[-1].is_open)
    )


def _get(one: Any, name: str, kind: Any) -> Any:
    value = one.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {str: "a text", list: "a list", int: "a number"}
        what = str(one.get("type") or "the structural tag")
        raise ValueError(f"{name} of {what[:50]} is missing or not {names.get(kind, 'an object')}")
    return value


def _all(values: Any, kind: Any) -> list[Any]:
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        names = "texts" if kind is str else "objects"
        raise ValueError(f"a structural tag has a list of other values than {names}")
    return values
