"""Writes the parts of an answer (content, reasoning and calls) as OpenAI's messages and deltas."""

import secrets
from collections.abc import Sequence
from typing import cast

from lightkv.router.text.answer_reader import AnswerReader, joined
from lightkv.router.text.tool_calls.source import Arguments, CallBegins, Part, Reasoning

from .dialect import Reading
from .protocol import AssistantMessage, ChatChoice, Delta, FinishReason
from .tools import ToolCall, ToolCallDelta


def divide(choice: ChatChoice, reading: Reading) -> None:
    """Divides the text of a whole answer, which is the content of its message so far."""
    reader = reading.new_reader()
    parts = [*reader.push(choice["message"]["content"] or ""), *reader.finish()]
    choice["message"] = _message(parts, reading)
    choice["finish_reason"] = finish_reason(choice["finish_reason"], reader, reading)


def _message(parts: Sequence[Part], reading: Reading) -> AssistantMessage:
    """Returns the message of a whole answer."""
    reasoning, content, calls = joined(parts)
    message: AssistantMessage = {"role": "assistant", "content": content}
    if not content and (calls or reasoning):
        message["content"] = None
    if reasoning and reading.includes_reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if calls and reading.is_legacy:
        message["function_call"] = {"name": calls[0][0], "arguments": calls[0][1]}
    elif calls:
        message["tool_calls"] = [_call(name, arguments, reading) for name, arguments in calls]
    return message


def deltas_of(parts: Sequence[Part], num_calls: int, reading: Reading) -> list[Delta]:
    """Returns the deltas of a stream for the parts of an answer. `num_calls`: how many calls it had before."""
    deltas: list[Delta] = []
    for part in parts:
        if isinstance(part, CallBegins):
            num_calls += 1
            if reading.is_legacy:
                deltas.append({"function_call": {"name": part.name, "arguments": ""}})
            else:
                begun = cast(ToolCallDelta, {"index": num_calls - 1, **_call(part.name, "", reading)})
                deltas.append({"tool_calls": [begun]})
        elif isinstance(part, Arguments):
            if reading.is_legacy:
                deltas.append({"function_call": {"arguments": part.text}})
            else:
                more: ToolCallDelta = {"index": num_calls - 1, "function": {"arguments": part.text}}
                deltas.append({"tool_calls": [more]})
        elif not isinstance(part, Reasoning):
            deltas.append({"content": part.text})
        elif reading.includes_reasoning:
            deltas.append({"reasoning_content": part.text, "reasoning": part.text})
    return deltas


def _call(name: str, arguments: str, reading: Reading) -> ToolCall:
    identifier = f"call_{secrets.token_hex(12)}"
    if reading.id_length is not None:
        identifier = secrets.token_hex(reading.id_length)[: reading.id_length]
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def finish_reason(reason: str | None, reader: AnswerReader, reading: Reading) -> FinishReason | None:
    """Returns why an answer ended: an answer with calls does not end by "stop"."""
    if reason != "stop" or not reader.num_calls:
        return cast(FinishReason | None, reason)
    return "function_call" if reading.is_legacy else "tool_calls"
