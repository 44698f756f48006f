"""POST /tokenize and /detokenize: texts and chats to tokens, and back."""

from typing import Annotated

from fastapi import Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from lightkv.router.api.answers.pieces import in_pieces
from lightkv.router.api.http.paced import LongResponse
from lightkv.router.engine.request import InvalidPrompt

from .chat import ChatFields
from .dialect import ChatDialect
from .generation import Desk, RequestBody
from .prompts import PromptReader
from .refused import CHAT, refuse_unsupported


class TokenizeRequest(ChatFields, RequestBody):
    """The body of POST /tokenize, with either a prompt or the messages of a chat."""

    model_config = ConfigDict(extra="allow")

    prompt: str | None = None
    add_special_tokens: bool | None = Field(
        None, description="On by default for a prompt, and off for a chat."
    )


class DetokenizeRequest(RequestBody):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]


class Tokens:
    """Converts texts and chats to tokens, and back."""

    def __init__(self, desk: Desk, prompts: PromptReader, dialect: ChatDialect) -> None:
        self._desk = desk
        self._prompts = prompts
        self._dialect = dialect

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """POST /tokenize: return the tokens of a prompt or of a chat, which may have at most as many characters
        as the context could hold."""
        self._desk.model(body.model)
        refuse_unsupported(body.model_extra or {}, CHAT)
        self._desk.take_request(request)
        max_model_len = self._desk.max_model_len
        if body.prompt is not None and body.messages is None:
            ids = await self._prompts.ids_of_text(
                body.prompt, body.add_special_tokens is not False, max_model_len
            )
        elif body.messages is not None and body.prompt is None:
            prepared = self._dialect.prepared(body.chat(), body.tool_use())
            ids, _ = await self._prompts.prompt_of_chat(prepared, max_model_len)
        else:
            raise InvalidPrompt("the request has neither prompt nor messages, or both; give one of them")
        tokens = ids.tolist()
        found = {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
        return LongResponse(in_pieces(found), self._desk.pacer)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """POST /detokenize: return the text of tokens."""
        self._desk.model(body.model)
        self._desk.take_request(request)
        found = {"prompt": await self._prompts.text_of(body.tokens)}
        return LongResponse(in_pieces(found), self._desk.pacer)
