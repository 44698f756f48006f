"""Writes earlier calls and their results as a chat template expects them."""

from collections.abc import Sequence
from typing import Any

from .json_call import as_json, as_object

Message = dict[str, Any]


def with_calls(message: Message, as_text: bool, id_length: int | None) -> Message:
    """Returns a message whose calls are in `tool_calls`, each with its arguments as an object, or with
    `as_text` as JSON. What is no well-formed call stays as it is.

    `id_length`: ids of calls are cut to so many letters and digits.
    """
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "reasoning" in message:
        message.setdefault("reasoning_content", message["reasoning"])
    has_both = bool(message.get("content") and message.get("tool_calls"))
    if "reasoning_content" in message and not has_both:  # gpt-oss's name for it, which it takes beside one
        message.setdefault("thinking", message["reasoning_content"])
    if isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = _cut(message["tool_call_id"], id_length)
    calls = message.get("tool_calls")
    if calls == []:
        del message["tool_calls"]
    elif isinstance(calls, list):
        message["tool_calls"] = [_call(call, as_text, id_length) for call in calls]
    return message


def with_texts_in_results(messages: Sequence[Message]) -> list[Message]:
    """Returns messages of which a user's that follow a tool's result are a part of the result."""
    groups: list[list[Message]] = []
    for message in messages:
        if groups and (groups[-1][0]["role"], message["role"]) == ("tool", "user"):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [
        group[0] | {"content": "\n".join([one["content"] for one in group])} if len(group) > 1 else group[0]
        for group in groups
    ]


def _call(call: Any, as_text: bool, id_length: int | None) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if as_text:
        arguments = _text(arguments)
    elif (found := as_object(arguments)) is not None:  # else the model left them incomplete, for example
        arguments = found
    written = call | {"function": function | {"arguments": arguments}}
    if isinstance(call.get("id"), str):
        written["id"] = _cut(call["id"], id_length)
    return written


def _text(arguments: Any) -> str:
    """Returns a call's arguments as JSON, a text that is no JSON of an object as it is."""
    found = as_object(arguments)
    is_written = isinstance(arguments, str) and (found is None or arguments.lstrip().startswith("{"))
    return str(arguments) if is_written else as_json(arguments if found is None else found)


def _cut(identifier: str, length: int | None) -> str:
    if length is None or (len(identifier) == length and identifier.isalnum()):
        return identifier
    kept = "".join(char for char in identifier if char.isascii() and char.isalnum())
    return kept[-length:].rjust(length, "0")
