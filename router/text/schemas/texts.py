"""Regexes, in Lark's form, of the texts that a JSON schema of strings allows, written without quotes."""

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

_DATE = (
    r"[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_HOUR = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_DAYS = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_HOURS = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"(?:{_HEX}:){{7}}{_HEX}", rf"::(?:{_HEX}(?::{_HEX}){{0,6}})?"]
    + [rf"(?:{_HEX}:){{{num}}}(?::{_HEX}){{1,{7 - num}}}" for num in range(1, 7)]
    + [rf"(?:{_HEX}:){{1,7}}:"]
)
_IN_PATH = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
# Every text of these is of the format. A few that are of the format, such as February 29, are not of these.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,30}})?@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*://{_HOST}(?::[0-9]{{1,4}})?(?:/{_IN_PATH})?(?:\?{_IN_PATH})?(?:#{_IN_PATH})?",
}
_CONSTRAINTS = ("pattern", "format", "minLength", "maxLength")
_REFUSED = ("not", "if", "then", "else")
_GROUP = re.compile(r"\((?:\?:|(?!\?))")
_IN_PATTERN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)


def quoted(text: str) -> str:
    """Returns a text as Lark writes it, which is as in JSON, but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def expressions_of(one: Mapping[str, Any]) -> list[str]:
    """Returns the expressions that a text of a schema has to match all, or none for a schema of every text.

    `one`: a schema of the type string alone. Raises ValueError for one that no text follows, or that is not
    supported.
    """
    for key in _REFUSED:
        if key in one:
            raise ValueError(f"{key} of a text is not supported; leave it out")
    if any(key in one for key in _CONSTRAINTS):
        _check(one)
    expressions = []
    if "enum" in one:
        expressions.append(" | ".join(map(quoted, one["enum"])))
    if "pattern" in one:
        expressions.append(f"/{regex_to_lark(searched(one['pattern']), 'dw')}/")
    if "format" in one:
        if one["format"] not in _FORMATS:
            raise ValueError(
                f"the format {one['format']!r} is not supported; give one of {', '.join(_FORMATS)}"
            )
        expressions.append(f"/{regex_to_lark(_FORMATS[one['format']], 'dw')}/")
    if one.get("minLength") or "maxLength" in one:
        expressions.append(f"/(?s:.{{{int(one.get('minLength', 0))},{one.get('maxLength', '')}}})/")
    return expressions


def _check(one: Mapping[str, Any]) -> None:
    """Raises ValueError, with llguidance's words, for keywords that are wrong or that no text follows."""
    source = LLMatcher.grammar_from_json_schema(json.dumps(one))
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())


def searched(pattern: str) -> str:
    """Returns the regex of whole texts in which a pattern is found."""
    depth, begin, branches, first_end = 0, 0, [], -1
    for found in _IN_PATTERN.finditer(pattern):
        if found[0] in ("(", ")"):
            depth += 1 if found[0] == "(" else -1
            if not depth and first_end < 0:
                first_end = found.end()
        elif found[0] == "|" and not depth:
            branches.append(pattern[begin : found.start()])
            begin = found.end()
    group = _GROUP.match(pattern)
    if group is not None and first_end == len(pattern):  # one group around all, which may have the anchors
        return searched(pattern[group.end() : -1])
    branches.append(pattern[begin:])
    return "|".join(f"(?:{_whole(branch)})" for branch in branches)


def _whole(branch: str) -> str:
    """Returns the regex of whole texts in which one branch of a pattern is found."""
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", branch) is not None
    inner = branch.removeprefix("^")
    inner = inner[:-1] if ends else inner
    before = "" if branch.startswith("^") else "(?s:.*)"
    return f"{before}(?:{inner}){'' if ends else '(?s:.*)'}"
