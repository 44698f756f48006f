"""Texts in Lark's form, and the patterns of JSON schemas as regexes of whole texts."""

import json
import re

_GROUP = re.compile(r"\((?:\?:|(?!\?))")
_IN_PATTERN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)


def quoted(text: str) -> str:
    """Returns a text as Lark writes it, which is as in JSON, but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


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
