"""Converts the texts, chats and token ids of requests to token ids, and back.

Tokenising takes about a second for a million characters. So the length of a text is checked first, and long
texts are tokenised in a thread, where the tokenizer releases Python's lock.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lightkv.router.engine.request import InvalidPrompt, NeverFits, maximum_length
from lightkv.router.text.detokenizer import closed_text
from lightkv.router.text.infilling import infilling_ids
from lightkv.router.text.stable_boundary import chat_boundary
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.token_ids import int32_bytes

T = TypeVar("T")

INLINE_ITEMS = 4096  # so many characters or tokens are converted in about a millisecond, without a thread


@dataclass(frozen=True)
class Chat:
    """The input of a chat template. `variables`: further variables of the template, by name. `tools`: the
    functions that the model may call. `continues_last`: the text ends with the last message, to be continued.
    `effort`: that of the reasoning, which a template may know."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    continues_last: bool = False
    effort: str | None = None


class ChatPrompt(NamedTuple):
    """A chat's token ids, int32 [n]. `boundary`: how many of them the chat's next turn begins with, too; 0 if
    that is not known."""

    ids: np.ndarray
    boundary: int = 0


class PromptTooLong(InvalidPrompt):
    """The text has more characters than the context could hold, whatever its tokens are."""


class PromptReader:
    """Converts texts, chats and token ids of requests. `context`: that of the model, in tokens. Raises
    PromptTooLong for a text that is too long for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def ids_of_text(self, text: str, add_special_tokens: bool, context: int) -> np.ndarray:
        """Returns the token ids of a text, int32 [n]."""
        self._check_length("prompt", len(text), context)
        return await convert(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def ids_between(self, prefix: str, suffix: str, context: int) -> np.ndarray:
        """Returns the token ids of a prompt for the text between two, int32 [n]. Raises InvalidParams."""
        num_chars = len(prefix) + len(suffix)
        self._check_length("prompt and suffix", num_chars, context)
        return await convert(num_chars, lambda: infilling_ids(self.tokenizer, prefix, suffix))

    async def ids_of_ids(self, token_ids: list[int], context: int) -> np.ndarray:
        """Returns the ids as int32 [n]. Raises NeverFits if the context cannot hold them."""
        if len(token_ids) > context:  # checked before the conversion
            raise NeverFits(len(token_ids), 1, context)
        try:
            made = await convert(len(token_ids), lambda: int32_bytes(token_ids))
            return np.frombuffer(made, dtype=np.int32)
        except (TypeError, ValueError) as error:
            raise InvalidPrompt(str(error)) from error

    async def prompt_of_chat(self, chat: Chat, context: int, finds_boundary: bool = False) -> ChatPrompt:
        """Returns the token ids of the text that the chat template renders. `finds_boundary`: the boundary is
        wanted. Raises ChatTemplateError."""
        num_chars = num_characters([chat.messages, chat.variables, chat.tools], INLINE_ITEMS + 1)
        return await convert(num_chars, lambda: self._encode_chat(chat, context, finds_boundary))

    async def text_of(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of token ids, including special tokens."""
        return await convert(len(token_ids), lambda: self.tokenizer.decode(token_ids, False))

    async def closed_text_of(self, token_ids: np.ndarray) -> str:
        """Returns the text of a prompt that its answer continues, as `closed_text` does."""
        return await convert(len(token_ids), lambda: closed_text(self.tokenizer, token_ids.tolist()))

    def _encode_chat(self, chat: Chat, context: int, finds_boundary: bool) -> ChatPrompt:
        most = self.tokenizer.max_characters(context)
        if num_characters([chat.messages, chat.variables, chat.tools], most + 1) > most:
            raise self._too_long("chat", context)
        text = self._render(chat)
        if len(text) > most:
            raise self._too_long("chat", context)
        ids = self.tokenizer.encode(text, chat.add_special_tokens)
        if not finds_boundary:
            return ChatPrompt(ids)
        later = partial(replace, chat, continues_last=False)
        boundary = chat_boundary(
            self.tokenizer, text, ids, chat.messages, lambda messages: self._render(later(messages=messages))
        )
        return ChatPrompt(ids, boundary)

    def _render(self, chat: Chat) -> str:
        return self.tokenizer.render_chat(
            chat.messages,
            chat.add_generation_prompt,
            chat.variables,
            chat.tools,
            continues_last=chat.continues_last,
        )

    def _check_length(self, what: str, num_chars: int, context: int) -> None:
        if num_chars > self.tokenizer.max_characters(context):
            raise self._too_long(what, context)

    def _too_long(self, what: str, context: int) -> PromptTooLong:
        most = self.tokenizer.max_characters(context)
        return PromptTooLong(
            f"the {what} has more than {most} characters, and cannot fit the context of {context} tokens with "
            f"at most {self.tokenizer.longest_token} characters each: {maximum_length(context)}; send a "
            "shorter one"
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


async def convert(num_items: int, function: Callable[[], T]) -> T:
    """Returns the result of `function`, which runs in a thread if there are many items, so that other
    requests do not wait for it."""
    if num_items > INLINE_ITEMS:
        return await asyncio.to_thread(function)
    result = function()
    await asyncio.sleep(0)  # a request may have hundreds of short texts: other tasks run between them
    return result
