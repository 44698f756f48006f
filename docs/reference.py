"""Writes the Python part of docs/api.md, the public names, from their docstrings: `make reference`.

The part of the page above the line `MARK` is written by hand and stays. griffe reads the sources without
importing them, so the page does not depend on what is installed.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import griffe
from griffe import ParameterKind as Kind
from msgspec import Meta

from lightkv.router.config import bounds

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
MARK = "<!-- `make reference` writes everything below this line. -->\n"
# The packages and modules whose public names the page has: all of `__all__`, or these.
MODULES: dict[str, tuple[str, ...]] = {
    "lightkv": (),
    "lightkv.ledger": (),
    "lightkv.edits": ("encode", "decode"),
    "lightkv.attention": (),
    "lightkv.attention.forms": ("gaps.with_gaps", "rings.over_rings"),
    "lightkv.router": (),
    "lightkv.integrations.cached_model": ("CachedModel",),
    "lightkv.integrations.hf_cache": ("LightKVCache",),
    "lightkv.integrations.prompt_lookup": ("generate",),
    "lightkv.integrations.streaming": ("Stream",),
}
# The packages whose names are an item of a list each: their files say the rest.
LISTED = ("lightkv.ledger", "lightkv.edits", "lightkv.attention", "lightkv.attention.forms")
# Classes that `KVCache` and `LLM` call. The page has the first sentence of each member of the first ones, and
# the members' names alone of the others.
BRIEF = {"KVPool", "KVSpec", "KVFormat", "Step", "StaticStep", "Ring", "Batch", "CachedModel", "LightKVCache"}
NAMED = {"TokenLedger", "TokenAllocator", "TokenTable", "Engine", "LocalEngine", "Scheduler", "Request"}
_FIELD = re.compile(r"(`?\w+`?(?:, `?\w+`?)*): ")
# Types with ranges that have a name of their own.
_NAMED = {
    "Flag": "bool",
    "Biases": "dict[int, float]",
    "Stops": "str | Sequence[str]",
    "StopIds": "Sequence[int]",
    "BadWords": "Sequence[str]",
    "BadWordsIds": "Sequence[Sequence[int]]",
}
_ANNOTATED = re.compile(r"Annotated\[(\w+), Meta\([^()]*\)\]")
_RAISES = re.compile(r"Raises .*?\.(?=\s|$)")


def page() -> str:
    """Returns the text of the page: what is written by hand, and the reference."""
    package: Any = griffe.load("lightkv", search_paths=[str(ROOT)], resolve_aliases=True)
    parts, seen = [PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK], set()
    told: dict[str, str] = {}
    for path, given in MODULES.items():
        module = package[path.removeprefix("lightkv.")] if path != "lightkv" else package
        parts.append(f"## {path}\n")
        names = given or _public(module)
        items = [one.final_target if one.is_alias else one for one in (module[name] for name in names)]
        new = [one for one in items if one.path not in seen]
        seen |= {one.path for one in new}
        if path in LISTED:
            parts.append("\n".join(map(_line, new)) + "\n")
        else:
            for item in new:
                parts += _entry(item, told)
    return "\n".join(parts)


def _public(module: Any) -> list[str]:
    """Returns the names that a package offers: those that it lists, or those of its lazy exports."""
    if module.exports:
        return sorted(map(str, module.exports))
    return sorted(chain.from_iterable(ast.literal_eval(str(module["_NAMES"].value)).values()))


def _file(item: Any) -> Path:
    return Path(item.filepath).resolve().relative_to(ROOT.resolve())


def _line(item: Any) -> str:
    """Returns an item of a list: a name, its parameters' names, its file and its first sentence."""
    if item.is_attribute:
        return _item(f"`{item.name} = {item.value}` (`{_file(item)}`)")
    return _item(f"`{_short(item)}` (`{_file(item)}`): {_first_sentence(item)}")


def _entry(item: Any, told: dict[str, str]) -> Iterator[str]:
    """Yields the lines of a class, a function or a constant. `told`: the classes that have told what a member
    does, by the member's name and text."""
    file = _file(item)
    yield f"### {item.name}\n"
    if item.is_attribute:
        yield f"`{item.name} = {item.value}` (`{file}`)\n"
    else:
        bases = ", ".join(map(str, item.bases)) if item.is_class else ""
        kind = f"class, a subclass of `{bases}`" if bases else "class" if item.is_class else "function"
        yield f"{kind} (`{file}`)\n"
        signature, settings = _signature(item), _settings(item) if item.is_class else ""
        prose, lists_all = _with_defaults(item, _prose(item))
        # The arguments of an error are lightkv's own, and a list of settings or fields says what others take.
        needless = signature.endswith("()") or settings or "Error" in bases or lists_all
        if item.name in NAMED:
            yield _filled(f"`{_short(item)}`: {_first_sentence(item)}") + "\n"
        else:
            if item.is_function or not needless:
                yield _code(signature)
            yield prose
    if item.is_class and settings:
        yield settings
    members = item.members.values() if item.is_class else ()
    shown = [one for one in members if not one.name.startswith("_") and not one.is_alias and one.docstring]
    if shown and item.name in NAMED:
        names = [f"`{one.name}`" if one.is_attribute else f"`{one.name}()`" for one in shown]
        yield _filled(f"Members: {', '.join(names)}.") + "\n"
        return
    same: dict[str, list[str]] = {}
    lines = []
    for one in shown:
        key = f"{one.name}: {_first_sentence(one)}"
        if told.setdefault(key, item.name) == item.name:
            lines.append(_member(one, item.name in BRIEF))
        else:
            same.setdefault(told[key], []).append(f"`{one.name}`")
    lines += [_item(f"{', '.join(names)}: as those of `{other}`.") for other, names in same.items()]
    if lines:
        yield "\n".join(lines) + "\n"


def _member(item: Any, briefly: bool) -> str:
    """Returns an item of a list: how a method is called, or a property's type, and the beginning of its
    docstring."""
    named = f"{item.name}: {item.annotation}" if item.is_attribute else _short(item)
    text = _first_sentence(item) if briefly else " ".join(_summary(item).split())
    return _item(f"`{named}`: {text}")


def _short(item: Any) -> str:
    """Returns how it is called, by the names of its parameters; `=…` marks a default."""
    if _is_record(item):
        return f"{item.name}({', '.join(one.partition(':')[0] for one in _fields(item))})"
    taken = [one for one in item.parameters if one.name not in ("self", "cls", "unknown")]
    stars = {Kind.var_positional: "*", Kind.var_keyword: "**"}
    names = [
        stars.get(one.kind, "") + one.name + ("" if one.default is None or one.kind in stars else "=…")
        for one in taken
    ]
    result = f" -> {item.returns}" if item.is_function and str(item.returns) not in ("None", "") else ""
    return f"{item.name}({', '.join(names)}){result}"


def _first_sentence(item: Any) -> str:
    """Returns the first sentence of a docstring."""
    text = " ".join(re.split(r"\n\s*\n", item.docstring.value.strip())[0].split()) if item.docstring else ""
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", text)[0]


def _item(text: str) -> str:
    """Returns an item of a list."""
    return _filled(f"- {text}", "  ")


def _filled(text: str, indent: str = "") -> str:
    """Returns a text in lines of at most 120 characters."""
    return textwrap.fill(
        text, width=120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _summary(item: Any) -> str:
    """Returns the first paragraph of a docstring, and what the others say about errors."""
    first, *others = re.split(r"\n\s*\n", item.docstring.value.strip())
    raised = _RAISES.findall(" ".join(" ".join(others).split()))
    return " ".join([first, *raised])


def _with_defaults(item: Any, prose: str) -> tuple[str, bool]:
    """Returns the text with the types and defaults of the fields that it lists, and whether it lists all."""
    fields = (
        {one.partition(":")[0]: one for one in _fields(item)} if item.is_class and _is_record(item) else {}
    )
    if not fields or any(f"\n- `{name}`: " not in prose for name in fields):
        return prose, False
    for name, field in fields.items():
        prose = prose.replace(f"\n- `{name}`: ", f"\n- `{field}`: ")
    return prose, True


def _signature(item: Any) -> str:
    """Returns how it is called, one parameter a line where the line would be long."""
    if _is_record(item):
        parameters = _fields(item)
    else:
        taken = [one for one in item.parameters if one.name not in ("self", "cls", "unknown")]
        parameters = list(map(_parameter, taken))
        kinds = [one.kind for one in taken]
        if Kind.keyword_only in kinds and Kind.var_positional not in kinds:
            parameters.insert(kinds.index(Kind.keyword_only), "*")
    result = f" -> {item.returns}" if item.is_function and str(item.returns) not in ("None", "") else ""
    line = f"{item.name}({', '.join(parameters)}){result}"
    if len(line) <= 100:
        return line
    return f"{item.name}(\n" + "".join(f"    {one},\n" for one in parameters) + f"){result}"


def _is_record(item: Any) -> bool:
    """Returns whether the fields of a class are its parameters, which griffe knows of dataclasses alone."""
    return item.is_class and any(re.search(r"NamedTuple|Struct", str(base)) for base in item.bases)


def _fields(item: Any) -> list[str]:
    fields = [one for one in item.members.values() if one.is_attribute and "property" not in one.labels]
    return [
        f"{one.name}: {_plain(one.annotation)}" + (f" = {one.value}" if one.value is not None else "")
        for one in fields
        if one.annotation is not None and not one.name.startswith("_")
    ]


def _settings(item: Any) -> str:
    """Returns the settings of a configuration, with their defaults and the help of their options."""
    shown: list[str] = []
    for one in item.members.values():
        if str(getattr(one, "value", "")).startswith("setting("):
            default, text = map(ast.unparse, _call(str(one.value)).args[:2])
            named = f"`{one.name}: {_plain(one.annotation)} = {default}`"
            shown.append(_item(f"{named}: {ast.literal_eval(text)}{_range(one)}"))
    return "\n".join(shown) + "\n" if shown else ""


def _plain(annotation: Any) -> str:
    """Returns a type without the ranges that `Annotated` adds."""
    plain = _ANNOTATED.sub(r"\1", str(annotation))
    return _NAMED.get(plain, plain)


def _range(one: Any) -> str:
    """Returns the range that a setting declares, as the help of its option shows it; "" where there is none."""
    meta = re.search(r"Meta\(.*?\)", str(one.annotation))
    if meta is None:
        return ""
    limits: dict[str, Any] = {}
    for given in _call(meta[0]).keywords:
        if given.arg in ("title", "description"):
            continue
        value = ast.unparse(given.value)
        named = one.module.members.get(value)  # a constant of the file, whose value counts
        limits[str(given.arg)] = ast.literal_eval(str(named.value) if named else value)
    return f" [{bounds(Meta(**limits))}]"


def _parameter(one: Any) -> str:
    """Returns a parameter as it is written, with the default of a setting without its help."""
    stars = {Kind.var_positional: "*", Kind.var_keyword: "**"}.get(one.kind, "")
    annotation = f": {_plain(one.annotation)}" if one.annotation is not None else ""
    if one.default is None or stars:
        return f"{stars}{one.name}{annotation}"
    default = str(one.default)
    if default.startswith("setting("):
        default = ast.unparse(_call(default).args[0])
    return f"{one.name}{annotation} = {default}"


def _call(text: str) -> ast.Call:
    expression = ast.parse(text, mode="eval").body
    assert isinstance(expression, ast.Call)
    return expression


def _prose(item: Any) -> str:
    """Returns a docstring's first paragraph, its lists of fields and its errors, in Markdown."""
    if not item.docstring:
        return "\n"
    paragraphs = list(map(_paragraph, re.split(r"\n\s*\n", item.docstring.value.strip())))
    lists = [
        one for one in paragraphs[1:] if re.match(r"`\w+`(, `\w+`)*:", one) or re.search(r"^- `", one, re.M)
    ]
    raised = [] if "Raises" in paragraphs[0] else _RAISES.findall(" ".join(" ".join(paragraphs[1:]).split()))
    errors = [one for one in raised if not any(one in shown for shown in lists)]
    return "\n\n".join([paragraphs[0], *lists, *map(_filled, errors[:1])]) + "\n"


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines[0].lstrip().startswith(">>>"):
        return _code(textwrap.dedent(text)).rstrip()
    if re.fullmatch(r"[A-Z]\w+:", lines[0].strip()) and len(lines) > 1:  # "Args:" and the like
        return f"{lines[0].strip()}\n\n{_list(textwrap.dedent(chr(10).join(lines[1:])).splitlines())}"
    starts = [line for line in lines if _FIELD.match(line)]
    if len(starts) > 1 and lines[0] in starts:
        return _list(lines)
    return text if not text.startswith(" ") else f"```text\n{textwrap.dedent(text)}\n```"


def _list(lines: list[str]) -> str:
    """Returns a list of what begins with a name and a colon; other lines go on with the one before them."""
    shown: list[str] = []
    for line in lines:
        field = _FIELD.match(line)
        if field is None:
            shown.append(f"  {line.strip()}" if shown else line)
        else:
            names = ", ".join(f"`{name}`" for name in field[1].replace("`", "").split(", "))
            shown.append(f"- {names}: {line[field.end() :]}")
    return "\n".join(shown)


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(None if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE} is old; run make reference")
    PAGE.write_text(page(), encoding="utf-8")
