"""Converts the texts, chats and token ids of requests to token ids, and back.

Tokenising takes about a second for a million characters. So the length of a text is checked first, and long
texts are tokenised in a thread, where the tokenizer releases Python's lock.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lightkv.router.engine.request import InvalidPrompt, NeverFits, maximum_length
from lightkv.router.text.detokenizer import closed_text
from lightkv.router.text.infilling import infilling_ids
from lightkv.router.text.stable_boundary import next_turn, stable_boundary
from lightkv.router.text.tokenizer import ChatTemplateError, Tokenizer
from lightkv.token_ids import int32_bytes

T = TypeVar("T")

INLINE_ITEMS = 4096  # so many characters or tokens are converted in about a millisecond, without a thread


@dataclass(frozen=True)
class Chat:
    """The input of a chat template. `variables`: further variables of the template, by name. `tools`: the
    functions that the model may call. `documents`: texts that it may use. `template`: in place of the model's
    own. `continues_last`: the text ends with the last message, to be continued. `effort`: that of the
    reasoning, which a template may know."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    template: str | None = None
    continues_last: bool = False
    effort: str | None = None


@dataclass(frozen=True)
class PromptRoom:
    """The room for a prompt: `max_model_len` tokens. `num_kept`: how many of its last tokens are kept, or with
    `keeps_first` of its first ones; None keeps all. `has_tails`: what the model keeps of a prompt is not there
    at each of its tokens, so that a chat says where it is wanted."""

    max_model_len: int
    num_kept: int | None = None
    keeps_first: bool = False
    has_tails: bool = False


class ChatPrompt(NamedTuple):
    """A chat's token ids, int32 [n]. `boundary`: how many of them the chat's next turn begins with, too; 0 if
    that is not known."""

    ids: np.ndarray
    boundary: int = 0


class PromptTooLong(InvalidPrompt):
    """The text has more characters than the context could hold, whatever its tokens are."""


class PromptReader:
    """Converts texts, chats and token ids of requests. Raises PromptTooLong for a text that is too long."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def ids_of_text(self, text: str, add_special_tokens: bool, room: PromptRoom) -> np.ndarray:
        """Returns the token ids of a text, int32 [n]."""
        self._check_length("prompt", len(text), room)
        ids = await convert(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))
        return _kept(ids, room)

    async def ids_between(self, prefix: str, suffix: str, room: PromptRoom) -> np.ndarray:
        """Returns the token ids of a prompt for the text between two, int32 [n]. Raises InvalidParams."""
        num_chars = len(prefix) + len(suffix)
        self._check_length("prompt and suffix", num_chars, room)
        return await convert(num_chars, lambda: infilling_ids(self.tokenizer, prefix, suffix))

    async def ids_of_ids(self, token_ids: list[int], room: PromptRoom) -> np.ndarray:
        """Returns the ids as int32 [n]. Raises NeverFits if the context cannot hold them."""
        if room.num_kept is None and len(token_ids) > room.max_model_len:  # checked before the conversion
            raise NeverFits(len(token_ids), 1, room.max_model_len)
        kept = _kept(token_ids, room)
        try:
            return np.frombuffer(await convert(len(kept), lambda: int32_bytes(kept)), dtype=np.int32)
        except (TypeError, ValueError) as error:
            raise InvalidPrompt(str(error)) from error

    async def prompt_of_chat(self, chat: Chat, room: PromptRoom) -> ChatPrompt:
        """Returns the token ids of the text that the chat template renders. Raises ChatTemplateError."""
        parts = [chat.messages, chat.variables, chat.tools, chat.documents]
        num_chars = num_characters(parts, INLINE_ITEMS + 1)
        if chat.template is not None:
            num_chars = INLINE_ITEMS + 1  # a request's own template may take long to render
        return await convert(num_chars, lambda: self._encode_chat(chat, room))

    async def text_of(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of token ids, including special tokens."""
        return await convert(len(token_ids), lambda: self.tokenizer.decode(token_ids, False))

    async def closed_text_of(self, token_ids: np.ndarray) -> str:
        """Returns the text of a prompt that its answer continues, as `closed_text` does."""
        return await convert(len(token_ids), lambda: closed_text(self.tokenizer, token_ids.tolist()))

    async def texts_of_each(self, token_ids: list[int]) -> list[str]:
        """Returns the text of each token, where it stands in the text of all."""
        text_of = self.tokenizer.token_text
        return await convert(
            len(token_ids), lambda: [text_of(one, begins=not place) for place, one in enumerate(token_ids)]
        )

    def _encode_chat(self, chat: Chat, room: PromptRoom) -> ChatPrompt:
        most = self.tokenizer.max_characters(room.max_model_len)
        if num_characters([chat.messages, chat.variables, chat.tools, chat.documents], most + 1) > most:
            raise self._too_long("chat", room)
        text = self._render(chat)
        if len(text) > most:
            raise self._too_long("chat", room)
        ids = self.tokenizer.encode(text, chat.add_special_tokens)
        if room.num_kept is not None or not room.has_tails:
            return ChatPrompt(_kept(ids, room))
        try:
            later = self._render(replace(chat, messages=next_turn(chat.messages), continues_last=False))
        except ChatTemplateError:  # a template may refuse what follows
            return ChatPrompt(ids)
        return ChatPrompt(ids, stable_boundary(self.tokenizer, text, ids, later))

    def _render(self, chat: Chat) -> str:
        return self.tokenizer.render_chat(
            chat.messages,
            chat.add_generation_prompt,
            chat.variables,
            chat.tools,
            documents=chat.documents,
            template=chat.template,
            continues_last=chat.continues_last,
        )

    def _check_length(self, what: str, num_chars: int, room: PromptRoom) -> None:
        if num_chars > self.tokenizer.max_characters(room.max_model_len):
            raise self._too_long(what, room)

    def _too_long(self, what: str, room: PromptRoom) -> PromptTooLong:
        most = self.tokenizer.max_characters(room.max_model_len)
        fit = "is not read" if room.num_kept is not None else "cannot fit the context"
        return PromptTooLong(
            f"the {what} has more than {most} characters, and {fit} of {room.max_model_len} tokens with at "
            f"most {self.tokenizer.longest_token} characters each: {maximum_length(room.max_model_len)}; "
            "send a shorter one"
        )


def num_characters(value: Any, most: int) -> int:
    """Returns the number of characters of all strings in plain data, plus one for each other value. Counting
    stops beyond `most`."""
    total = 0
    waiting = [value]
    while waiting and total <= most:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
            continue
        total += 1
        if isinstance(one, Mapping):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return total


def _kept(ids: Any, room: PromptRoom) -> Any:
    if room.num_kept is None:
        return ids
    return ids[: room.num_kept] if room.keeps_first else ids[-room.num_kept :]


async def convert(num_items: int, function: Callable[[], T]) -> T:
    """Returns the result of `function`, which runs in a thread if there are many items, so that other
    requests do not wait for it."""
    if num_items > INLINE_ITEMS:
        return await asyncio.to_thread(function)
    result = function()
    await asyncio.sleep(0)  # a request may have hundreds of short texts: other tasks run between them
    return result
