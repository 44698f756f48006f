"""Writes earlier calls and their results as a chat template expects them, and describes tools to a model whose
template takes none."""

from collections.abc import Callable, Mapping, Sequence
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


def written_out(
    messages: Sequence[Message], write: Callable[[str, str], str], instructions: str
) -> list[Message]:
    """Returns messages for a template that knows no tools: `instructions` in the system message, calls in the
    assistant's text, and results in the user's. `write`: returns the text of a call."""
    written: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", None)
        last = written[-1] if written else {}
        if isinstance(calls, list):
            texts = [message.get("content"), *(_written(call, write) for call in calls)]
            message["content"] = "\n".join(text for text in texts if text)
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if last.get("is_result"):
                last["content"] += "\n" + text
                continue
            message = {"role": "user", "content": text, "is_result": True}
        elif message["role"] == "system" and len(written) == 1 and last["content"] == instructions:
            written.pop()  # the two become one
            message["content"] = f"{message['content']}\n\n{instructions}"
        written.append(message)
    return [{key: value for key, value in message.items() if key != "is_result"} for message in written]


def instructions_for(tools: Sequence[Mapping[str, Any]], how: str) -> str:
    """Returns the text that describes tools to a model. `how`: says how it calls one."""
    lines = "\n".join(as_json(tool) for tool in tools)
    return (
        "You can call functions to answer the user. They are described between <tools> and </tools>, one in "
        f"each line.\n<tools>\n{lines}\n</tools>\n{how}"
    )


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


def _written(call: Any, write: Callable[[str, str], str]) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return as_json(call)
    return write(str(function.get("name")), _text(function.get("arguments")))


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
