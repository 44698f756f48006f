"""Anthropic's Messages API as types: the bodies of POST /v1/messages and /v1/messages/count_tokens, and how
they become chats.

Fields that a chat has, too, are passed on to `ChatRequest`, which carries them out or refuses them.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

from fastapi import Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from lightkv.router.api.answers.message_writer import MessageWriter
from lightkv.router.sampling_params import InvalidParams

from .chat import ChatRequest, Chats, chat_request, renamed
from .generation import RequestBody, Texts, json_response

Object = dict[str, Any]
Content = str | Annotated[list[Object], Field(fail_fast=True)]
_NO_TEXT = {"type": "text", "text": ""}
# This line differs in each call of an agent, and everything behind it would be another prefix.
_BILLING = "x-anthropic-billing-header:"
_NAMES = {  # of the chat's fields
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "thinking",
}
_NUMBERS = ("n", "num_return_sequences")  # of answers
_PLACELESS = "null: a message has no place for them; /v1/chat/completions has"
_REFUSED = {
    "mcp_servers": "none: the service calls no servers; give their tools as tools",
    "container": "null: the service runs no code",
    "n": "1: the answer is one message",
    "num_return_sequences": "1: the answer is one message",
    "max_completion_tokens": "null, and use max_tokens",
    "response_format": "null, and use output_config.format",
    "reasoning_effort": "null, and use thinking and output_config.effort",
    "stream_options": "null: the events of a message always have its usage",
    "logprobs": _PLACELESS,
    "top_logprobs": _PLACELESS,
    "prompt_logprobs": _PLACELESS,
    "return_token_ids": _PLACELESS,
}


class MessagesInput(RequestBody):
    """The body of POST /v1/messages/count_tokens, and the part of a message that becomes the prompt."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Object], Field(fail_fast=True, min_length=1)] = Field(
        description="The conversation: each message has a role and a content, which is a text or blocks of "
        "the types text, thinking, tool_use and tool_result. An answer continues a last one of the assistant."
    )
    system: Content | None = None
    tools: Annotated[list[Object], Field(fail_fast=True)] | None = Field(
        None, description="Tools of one's own, with an input_schema."
    )
    tool_choice: Object | None = None
    thinking: Object | None = Field(
        None, description="disabled switches the model's reasoning off where its chat template can."
    )
    output_config: Object | None = Field(None, description="effort of the reasoning, format of the answer.")

    def chat(self) -> ChatRequest:
        """Returns the same request as a chat completion. Raises InvalidParams."""
        extras = dict(self.model_extra or {})
        for name, allowed in _REFUSED.items():
            value = extras.pop(name, None)
            if value is not None and value not in ((1,) if name in _NUMBERS else (False, [])):
                raise InvalidParams(name, value, allowed)
        messages = self._chat_messages()
        own: Object = {
            "model": self.model,
            "messages": messages,
            "continue_final_message": messages[-1]["role"] == "assistant"
            and "tool_calls" not in messages[-1],
            "reasoning_effort": self._effort(),
        }
        if self.tools:
            own |= {"tools": list(map(_chat_tool, self.tools)), **_chat_choice(self.tool_choice or {})}
        elif (choice := (self.tool_choice or {}).get("type", "auto")) not in ("auto", "none"):
            raise InvalidParams("tool_choice.type", choice, "auto or none where there are no tools")
        form = (self.output_config or {}).get("format") or extras.pop("output_format", None)
        if isinstance(form, dict) and form.get("type") == "json_schema":
            described = {"name": "answer", "schema": form.get("schema")}
            own["response_format"] = {"type": "json_schema", "json_schema": described}
        elif form is not None:
            raise InvalidParams("output_config.format", form, 'null, or the type "json_schema" with a schema')
        own |= self._options()
        return chat_request(extras | {name: own[name] for name in own if own[name] is not None}, _NAMES)

    def _options(self) -> Object:
        """Returns the chat's fields that say how the answer is generated."""
        return {}

    def _effort(self) -> str | None:
        kind = (self.thinking or {}).get("type", "adaptive")
        if kind not in ("adaptive", "enabled", "disabled", "between_tools"):
            raise InvalidParams("thinking.type", kind, "enabled, disabled or adaptive")
        effort = (self.output_config or {}).get("effort")
        if kind == "disabled":
            return "none"
        if effort not in (None, "low", "medium", "high", "xhigh", "max"):
            raise InvalidParams("output_config.effort", effort, "low, medium, high, xhigh or max")
        return "xhigh" if effort == "max" else effort or ("medium" if kind == "enabled" else None)

    def _chat_messages(self) -> list[Object]:
        messages: list[Object] = []
        texts = [_text("system", block) for block in _blocks("system", self.system or [])]
        if texts and texts[0].startswith(_BILLING):
            texts[0] = texts[0].partition("\n")[2]
            texts = texts[0 if texts[0] else 1 :]
        if texts:
            messages.append({"role": "system", "content": "\n".join(texts)})
        # Messages of one role in a row are one turn: there are templates that want the roles to alternate.
        for role, turn in groupby(self.messages, lambda message: message.get("role")):
            blocks = [block for one in turn for block in _blocks("messages", one.get("content"))]
            if role == "assistant":
                messages.append(_assistant(blocks))
            elif role in ("user", "system"):
                _add_user(messages, role, blocks)
            else:
                raise InvalidParams("messages.role", role, "user, assistant or system")
        return messages


class MessageRequest(MessagesInput):
    """The body of POST /v1/messages. Further fields are those of a chat completion."""

    max_tokens: int
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def _options(self) -> Object:
        same = ("max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k")
        return {name: getattr(self, name) for name in same}


class Messages:
    """Answers messages, each as the chat that it is."""

    def __init__(self, chats: Chats) -> None:
        self._chats = chats

    async def create(self, body: MessageRequest, request: Request) -> Response:
        """POST /v1/messages: answer a chat, in the form of Anthropic's Messages API."""
        with renamed(_NAMES):
            return await self._chats.answer(body.chat(), request, MessageWriter)

    async def count_tokens(self, body: MessagesInput, request: Request) -> Response:
        """POST /v1/messages/count_tokens: return how many tokens the prompt of such a message has."""
        with renamed(_NAMES):
            return json_response({"input_tokens": await self._chats.count(body.chat(), request)})


def _blocks(field: str, content: Any) -> list[Object]:
    """Returns the blocks of a content, which may be one text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidParams(field, f"content of type {type(content).__name__}", "a text or a list of blocks")
    return content


def _text(field: str, block: Object) -> str:
    """Returns the text of a block of text, or of a document that is one."""
    kind, source = block.get("type"), block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return _string(source, "data")
    if kind != "text":
        raise InvalidParams(f"{field}.content.type", kind, "text: this service takes text only")
    return _string(block, "text")


def _add_user(messages: list[Object], role: str, blocks: Sequence[Object]) -> None:
    """Adds the messages of one of a user's: each result of a tool is one, and so are the texts between them."""
    for is_result, group in groupby(blocks or [_NO_TEXT], lambda block: block.get("type") == "tool_result"):
        if is_result:
            messages += [
                {"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": _result(block)}
                for block in group
            ]
        else:
            texts = [_text("messages", block) for block in group]
            messages.append({"role": role, "content": "\n".join(texts)})


def _result(block: Object) -> str:
    """Returns the text of a tool's result. What is no text becomes a line: a refusal would end the agent's run,
    since it would send the same result again."""
    texts = []
    for one in _blocks("messages", block.get("content") or []):
        try:
            texts.append(_text("messages", one))
        except InvalidParams:
            kind = one.get("type")
            name = kind[:40] if isinstance(kind, str) else "a block"
            texts.append(f"[{name}: left out, because this service takes text only]")
    text = "\n".join(texts)
    return f"Error: {text}" if block.get("is_error") is True else text


def _assistant(blocks: Sequence[Object]) -> Object:
    """Returns an assistant's message: its texts joined as they were written, its thinking and its calls."""
    texts, thinking, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thinking.append(_string(block, "thinking"))
            case "redacted_thinking":  # of another service, which alone can read it
                pass
            case "tool_use":
                given = block.get("input")
                if not isinstance(given, dict):
                    raise InvalidParams("messages.content.input", given, "the arguments as an object")
                function = {"name": _string(block, "name"), "arguments": given}
                calls.append({"id": _string(block, "id"), "type": "function", "function": function})
            case _:
                texts.append(_text("messages", block))
    message: Object = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    return message | ({"tool_calls": calls} if calls else {})


def _string(block: Object, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidParams(f"messages.content.{name}", value, "a text")
    return value


def _chat_tool(tool: Object) -> Object:
    if tool.get("type") not in (None, "custom"):
        raise InvalidParams("tools.type", tool["type"], "custom: the service has no tools of its own")
    function = {name: tool.get(name) for name in ("name", "description")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _chat_choice(choice: Object) -> Object:
    """Returns the chat's fields for a choice of tools."""
    kind = choice.get("type", "auto")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        chosen = "required" if kind == "any" else kind
    else:
        raise InvalidParams("tool_choice.type", kind, "auto, any, tool or none")
    return {"tool_choice": chosen, "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True}
