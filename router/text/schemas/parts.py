"""The parts of a JSON schema, and its references."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects of a schema, however deep they are, itself included."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def has_reference(schema: Any) -> bool:
    """Returns whether a schema refers to another one."""
    return any(isinstance(one.get("$ref"), str) for one in objects_in(schema))


def moved(value: Any, root: str) -> Any:
    """Returns a copy of a schema whose references to itself start at `root`."""
    if isinstance(value, list):
        return [moved(one, root) for one in value]
    if not isinstance(value, dict):
        return value
    copied = {key: moved(one, root) for key, one in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copied["$ref"] = root + reference[1:]
    return copied


def escaped(name: str) -> str:
    """Returns a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolved(reference: Any, root: Any) -> Any:
    """Returns the schema that a $ref within `root` names. Raises ValueError if there is none."""
    head, *names = str(reference).split("/")
    found = root
    for name in (unquote(name).replace("~1", "/").replace("~0", "~") for name in names):
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            head = ""
            break
    if head != "#":
        raise ValueError(f"$ref {str(reference)[:100]!r} names no part of the schema")
    return found
