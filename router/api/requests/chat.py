"""POST /v1/chat/completions: the body of a chat, and how it is answered."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from lightkv.router.api.answers.chat_writer import ChatWriter
from lightkv.router.api.answers.message_writer import MessageWriter
from lightkv.router.api.answers.response_writer import ResponseWriter
from lightkv.router.sampling_params import MAX_LOGPROBS, InvalidParams
from lightkv.router.text.completion import AnswerForm
from lightkv.router.text.grammars import InvalidGrammar

from .dialect import ChatDialect
from .generation import Desk, GenerationRequest
from .prompts import Chat, PromptReader
from .refused import CHAT, MESSAGES, refuse_unsupported
from .tools import RequestPart, ToolFields

# The arguments of transformers' apply_chat_template. Requests set them by other fields, or not at all.
RESERVED_VARIABLES = (
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)


class TextPart(RequestPart):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _only_text(content: Any) -> Any:
    """Raises PydanticCustomError for a part of a content that is an image or the like."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            said = "a part of type {kind}, and this service takes text only; send parts of type text"
            raise PydanticCustomError("text_only", said, {"kind": kind[:100]})
    return content


class ChatMessage(BaseModel):
    """One message of a chat. Further fields (name, tool_calls …) go unchanged to the chat template, but fields
    that no template supports are refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)] | None, BeforeValidator(_only_text)
    ] = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates expect it, with one text as its content. Raises
        InvalidParams."""
        if self.model_extra:
            refuse_unsupported(self.model_extra, MESSAGES)
        if self.role == "function":
            raise InvalidParams("messages", "a message of role function", "role tool, with a tool_call_id")
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content or ())
        return {**(self.model_extra or {}), "role": self.role, "content": content}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]


class ChatFields(ToolFields):
    """How a chat becomes a text, for an answer or to be counted."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="Add the tokenizer's special tokens to the prompt. By default they are added to a text, "
        "and not to a chat, whose template writes them.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the model's chat template, by name."
    )
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message, whatever its role."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin an assistant's message; on by default, but for continue_final_message."
    )

    @property
    def begins_answer(self) -> bool:
        """Whether the text ends with the words that begin an assistant's answer. Raises InvalidParams."""
        if not self.continue_final_message:
            return self.add_generation_prompt is not False
        if self.add_generation_prompt:
            allowed = "it without add_generation_prompt: the answer continues the last message"
            raise InvalidParams("continue_final_message", True, allowed)
        return False

    def chat(self) -> Chat:
        """Returns the input of the chat template, as the request says it. Raises InvalidParams."""
        variables = self.chat_template_kwargs or {}
        for name in RESERVED_VARIABLES:
            if name in variables:
                allowed = f"it without {name}, which cannot be set as a variable of the template"
                raise InvalidParams("chat_template_kwargs", variables, allowed)
        return Chat(
            messages=[message.plain() for message in self.messages or ()],
            add_generation_prompt=self.begins_answer,
            add_special_tokens=self.add_special_tokens is True,
            variables=variables,
            continues_last=self.continue_final_message is True,
            effort=self.reasoning_effort,
        )


class ChatRequest(ChatFields, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    refused: ClassVar = CHAT

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None,
        description="How many of the likeliest tokens to return with each token, 0 to 20; needs logprobs.",
    )


class Chats:
    """Answers chats. `dialect`: how the model writes calls and reasoning."""

    def __init__(self, desk: Desk, prompts: PromptReader, dialect: ChatDialect) -> None:
        self._desk = desk
        self.sampling_defaults = desk.sampling_defaults
        self._prompts = prompts
        self._dialect = dialect

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions: answer a chat."""
        return await self.answer(body, request)

    async def answer(
        self,
        body: ChatRequest,
        request: Request,
        wrap: Callable[[str, ChatWriter], ResponseWriter | MessageWriter] | None = None,
    ) -> Response:
        """Answers a chat. `wrap`: returns what writes the answer in another form, for the model's name."""
        if body.top_logprobs and not body.logprobs:
            raise InvalidParams("top_logprobs", body.top_logprobs, "it together with logprobs: true")
        if not 0 <= (body.top_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidParams("top_logprobs", body.top_logprobs, f"0 to {MAX_LOGPROBS}")
        accepted = self._desk.accept(body, request, (body.top_logprobs or 0) if body.logprobs else None)
        if body.reasoning_effort is not None and not self._dialect.takes_effort:
            request.state.record.ignored_fields.append("reasoning_effort")
        grammar, field = accepted.grammar, accepted.spec.grammar_field
        use = body.tool_use() if body.tools or body.tool_choice else None
        prepared = self._dialect.prepared(body.chat(), use, grammar is not None)
        prompt_ids, boundary = await self._prompts.prompt_of_chat(
            prepared, accepted.context, accepted.finds_boundary
        )
        if grammar is not None:  # it may become a part of another one
            accepted.check_fits(prompt_ids.size)
            await self._desk.check_grammar(grammar, field, request)
        reading = self._dialect.reading(use, prompt_ids, grammar, body.include_reasoning is not False)
        grammar = self._dialect.grammar(use, grammar)
        prompts = [prompt_ids.tobytes()]
        form = AnswerForm(continues=prepared.continues_last)
        if reading is not None:
            form = form._replace(shown_ids=reading.shown_ids, new_reader=reading.new_reader)
        extras = replace(accepted.extras, prompts=prompts)
        writer = ChatWriter(accepted.model, self._prompts.tokenizer, reading, extras)
        spec = replace(
            accepted.spec,
            prompts=prompts,
            boundary=boundary,
            form=form,
            grammar_field=field if use is None else "tools",
        )
        asked = replace(accepted, spec=spec, grammar=grammar, extras=extras)
        written = writer if wrap is None else wrap(accepted.model, writer)
        return await self._desk.answer(asked, written, body, request)

    async def count(self, body: ChatRequest, request: Request) -> int:
        """Returns how many tokens the prompt of a chat has."""
        self._desk.model(body.model)
        refuse_unsupported(body.model_extra or {}, body.refused)
        self._desk.take_request(request)
        prepared = self._dialect.prepared(body.chat(), body.tool_use(), body.structure()[1] is not None)
        prompt_ids, _ = await self._prompts.prompt_of_chat(prepared, self._desk.max_model_len)
        return int(prompt_ids.size)


def chat_request(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """Returns a request of another API as a chat; None is a field that it leaves out. `names`: what that API
    calls the chat's fields, where it differs. Raises InvalidParams."""
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        allowed = f"it as the API has it ({first['msg']})"
        raise InvalidParams(names.get(name, name), "of the wrong form", allowed) from error


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Raises an error of the chat with the name that the field has in the other API's request."""
    try:
        yield
    except InvalidParams as error:
        field, dot, key = error.field.partition(".")
        name = names.get(field)
        if name is None:
            raise
        name += dot + key.removeprefix("json_schema.")  # whose keys stand in the format itself
        if isinstance(error, InvalidGrammar):
            raise InvalidGrammar(name, error.reason) from error
        raise InvalidParams(name, error.value, error.allowed) from error
