"""OpenAI's Responses API as types: the body of POST /v1/responses, and how it becomes a chat.

The service keeps no responses, so a client sends the whole conversation each time, as items. Fields that a chat
has, too, are passed on to `ChatRequest`, which carries them out or refuses them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from lightkv.router.api.answers.response_writer import ResponseWriter
from lightkv.router.sampling_params import InvalidParams

from .chat import ChatRequest, Chats, chat_request, renamed
from .generation import RequestBody, StreamOptions
from .refused import RENAMED

Object = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_STATE = "null: the service keeps no responses; send the whole conversation as input"
# These say the same as other fields here, or mean more than one answer.
_CHAT_ONLY = {
    "messages": "null, and send the conversation as input",
    "response_format": "null, and use text.format",
    "max_tokens": "null, and use max_output_tokens",
    "max_completion_tokens": "null, and use max_output_tokens",
    "logprobs": f"null, and send {LOGPROBS!r} in include",
    "reasoning_effort": "null, and use reasoning.effort",
    "prompt_logprobs": "null: a response has no place for them; /v1/chat/completions has",
    "return_token_ids": "null: a response has no place for them; /v1/chat/completions has",
}
_CHAT_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
_OWN_AND_CHATS = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "stream_options",
    "parallel_tool_calls",
    "store",
)
_LABELS = ("metadata", "max_tool_calls")  # they change no answer, and the response repeats metadata


class ResponseRequest(RequestBody):
    """The body of POST /v1/responses. Further fields are those of a chat completion."""

    model_config = ConfigDict(extra="allow")

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)] = Field(
        description="A user's text, or the conversation as a list of items: messages, function_call, "
        "function_call_output and reasoning."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Object], Field(fail_fast=True)] | None = Field(
        None, description='Tools of the type "function".'
    )
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    text: Object | None = Field(None, description="format: the form of the text, such as a JSON schema.")
    reasoning: Object | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description=f"{LOGPROBS} adds log-probabilities."
    )
    top_logprobs: int | None = None
    store: bool | None = Field(None, description="Without an effect: responses are not kept.")
    previous_response_id: str | None = Field(None, description="null: responses are not kept.")
    background: bool | None = None
    truncation: str | None = None
    metadata: Object | None = None

    def chat(self) -> ChatRequest:
        """Returns the same request as a chat completion. Raises InvalidParams."""
        self._refuse_state()
        extras = dict(self.model_extra or {})
        for name, value in (self.model_extra or {}).items():
            field = RENAMED.get(name, name)
            if field == "n" and value not in (None, 1):
                raise InvalidParams(name, value, "1: a response is one answer")
            if field in _CHAT_ONLY:
                if value is not None and value is not False:
                    raise InvalidParams(name, value, _CHAT_ONLY[field])
                del extras[name]
        fields: dict[str, Any] = {name: extras[name] for name in extras if name not in _LABELS}
        for name in _OWN_AND_CHATS:
            fields[name] = getattr(self, name)
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["messages"] = self.messages()
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
            fields["tool_choice"] = _chat_choice(self.tool_choice)
        elif self.tool_choice not in (None, "auto", "none"):
            raise InvalidParams("tool_choice", self.tool_choice, '"auto" or "none" where there are no tools')
        fields |= self._form()
        if self.reasoning and self.reasoning.get("effort") is not None:
            fields["reasoning_effort"] = self.reasoning["effort"]
        if LOGPROBS in (self.include or ()) or self.top_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return chat_request(fields, _CHAT_NAMES)

    def repeated(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that the response repeats. `defaults`: of sampling."""
        default_temperature, default_top_p = defaults.get("temperature", 1.0), defaults.get("top_p", 1.0)
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": (self.reasoning or {}).get("effort"), "summary": None},
            "temperature": default_temperature if self.temperature is None else self.temperature,
            "text": {"format": {"type": "text"}} | (self.text or {}),
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": default_top_p if self.top_p is None else self.top_p,
        }

    def messages(self) -> list[dict[str, Any]]:
        """Returns the messages of instructions and input. Raises InvalidParams."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            _add_item(messages, item)
        if messages and messages[-1].keys() == {"role", "reasoning_content"}:
            messages.pop()  # a reasoning that no message follows
        if not messages:
            raise InvalidParams("input", "without a message", "at least one message")
        return messages

    def _refuse_state(self) -> None:
        extras = self.model_extra or {}
        for name in ("previous_response_id", "conversation", "prompt"):
            value = getattr(self, name, None) or extras.get(name)
            if value is not None:
                raise InvalidParams(name, value, _STATE)
        if self.background:
            raise InvalidParams("background", self.background, "false: a response is sent as it is made")
        if self.truncation not in (None, "disabled"):
            raise InvalidParams("truncation", self.truncation, '"disabled", and send a shorter input')

    def _form(self) -> dict[str, Any]:
        """Returns the chat's fields for `text`."""
        text = self.text or {}
        fields = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
        form = text.get("format")
        if form is None or form == {"type": "text"}:
            return fields
        if not isinstance(form, dict):
            raise InvalidParams("text.format", form, "an object")
        if form.get("type") == "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": schema}
        return fields | {"response_format": form}


class Responses:
    """Answers responses, each as the chat that it is."""

    def __init__(self, chats: Chats) -> None:
        self._chats = chats

    async def respond(self, body: ResponseRequest, request: Request) -> Response:
        """POST /v1/responses: answer a chat, in the form of OpenAI's Responses API."""
        chat, repeated = body.chat(), body.repeated(self._chats.sampling_defaults)
        with renamed(_CHAT_NAMES):
            return await self._chats.answer(chat, request, partial(ResponseWriter, repeated))


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Adds one item of the input to the messages. An assistant's text and the calls behind it are one
    message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidParams("input", f"a message of role {role!r}", f"one of {', '.join(_ROLES)}")
        message = {"role": "system" if role == "developer" else role, "content": _text(item.get("content"))}
        if role == "assistant" and messages and messages[-1].keys() == {"role", "reasoning_content"}:
            messages[-1] |= message
        else:
            messages.append(message)
    elif kind == "function_call":
        call = {
            "id": _string(item, "call_id"),
            "type": "function",
            "function": {"name": _string(item, "name"), "arguments": _string(item, "arguments")},
        }
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("content", None)
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _text(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id"), "content": output})
    elif kind == "reasoning":
        parts = item.get("content") or []
        if not isinstance(parts, list):
            raise InvalidParams("input", f"a reasoning with content {parts!r}", "a list of parts as content")
        text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if text:
            messages.append({"role": "assistant", "reasoning_content": text})
    else:
        known = "message, function_call, function_call_output or reasoning"
        raise InvalidParams("input", f"item {kind}", known)


def _text(content: Any) -> str:
    """Returns the text of an item, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParams("input", f"content of type {type(content).__name__}", "a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "refusal":
            texts.append(_string(part, "refusal"))
        elif kind in _TEXT_PARTS:
            texts.append(_string(part, "text"))
        else:
            allowed = f"text only, as parts of type {', '.join(_TEXT_PARTS)}"
            raise InvalidParams("input", f"a part of type {kind!r}", allowed)
    return "\n".join(texts)


def _string(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidParams("input", f"an item with {name} {value!r}", f"a text as its {name}")
    return value


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidParams("tools", f"of type {tool.get('type')!r}", 'tools of the type "function"')
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def _chat_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
