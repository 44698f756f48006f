"""From what a request holds to token ids, and back: long texts in a thread, without holding Python's lock, and
no text that is too long for the model.

A text is measured before it is tokenised. Tokenising takes about a second for each million characters.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from lightkv.router.engine.request import InvalidPrompt, NeverFits
from lightkv.router.sampling_params import InvalidParams
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.token_ids import int32_bytes

T = TypeVar("T")

INLINE_ITEMS = 4096  # characters or tokens whose conversion takes about a millisecond: not worth a thread
# The arguments of transformers' apply_chat_template: they are no variables, or are set by fields of the
# request.
RESERVED_VARIABLES = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)


@dataclass(frozen=True)
class Chat:
    """What a chat template makes a text of. `variables`: the template's own, by name."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidParams for a variable that is not the template's."""
        for name in RESERVED_VARIABLES:
            if name in self.variables:
                allowed = f"no {name} among them, for it is not a variable of the template's own"
                raise InvalidParams("chat_template_kwargs", self.variables, allowed)


@dataclass(frozen=True)
class PromptRoom:
    """How long a prompt may be, in tokens: no longer than the context, of which `num_kept` at the end are kept,
    or all of them (None)."""

    max_model_len: int
    num_kept: int | None = None


class PromptReader:
    """Converts texts, chats and token ids of requests. Raises InvalidPrompt for what is too long."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def ids_of_text(self, text: str, add_special_tokens: bool, room: PromptRoom) -> np.ndarray:
        """The token ids of a text, int32 [n]."""
        self._check_length("prompt", len(text), room)
        ids = await convert(len(text), lambda: self._tokenizer.encode(text, add_special_tokens))
        return _last(ids, room)

    async def ids_of_ids(self, token_ids: list[int], room: PromptRoom) -> np.ndarray:
        """The same ids as int32 [n]. Raises NeverFits where there are more than the context holds."""
        if room.num_kept is None and len(token_ids) > room.max_model_len:
            # They are counted before they are converted.
            raise NeverFits(
                len(token_ids), 1, room.max_model_len, "the context", "start with a longer --max-model-len"
            )
        kept = _last(token_ids, room)
        try:
            return np.frombuffer(await convert(len(kept), lambda: int32_bytes(kept)), dtype=np.int32)
        except ValueError as error:
            raise InvalidPrompt(str(error)) from error

    async def ids_of_chat(self, chat: Chat, room: PromptRoom) -> np.ndarray:
        """The token ids of what the model's chat template writes, int32 [n]. Raises ChatTemplateError."""
        given = [chat.messages, chat.variables]
        num_chars = num_characters(given, INLINE_ITEMS + 1)
        return _last(await convert(num_chars, lambda: self._encode_chat(chat, room)), room)

    async def text_of(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, special tokens among them."""
        return await convert(len(token_ids), lambda: self._tokenizer.decode(token_ids, False))

    async def texts_of_each(self, token_ids: list[int]) -> list[str]:
        """The text of each token by itself."""
        return await convert(len(token_ids), lambda: self._tokenizer.decode_each(token_ids))

    def _encode_chat(self, chat: Chat, room: PromptRoom) -> np.ndarray:
        most = self._tokenizer.max_characters(room.max_model_len)
        self._check_length("chat", num_characters([chat.messages, chat.variables], most + 1), room)
        text = self._tokenizer.render_chat(chat.messages, chat.add_generation_prompt, chat.variables)
        self._check_length("chat", len(text), room)
        return self._tokenizer.encode(text, chat.add_special_tokens)

    def _check_length(self, what: str, num_chars: int, room: PromptRoom) -> None:
        most = self._tokenizer.max_characters(room.max_model_len)
        if num_chars > most:
            fit = "is not read" if room.num_kept is not None else "cannot fit the context"
            raise InvalidPrompt(
                f"the {what} has more than {most} characters, and {fit}: {room.max_model_len} tokens of at "
                f"most {self._tokenizer.longest_token} characters; send less"
            )


def num_characters(value: Any, most: int) -> int:
    """The characters of all strings in plain data, and one for each value. It stops counting beyond `most`."""
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


def _last(ids: Any, room: PromptRoom) -> Any:
    return ids if room.num_kept is None else ids[-room.num_kept :]


async def convert(num_items: int, function: Callable[[], T]) -> T:
    """What `function` returns; in a thread if it is long, so that nothing else waits for it."""
    if num_items > INLINE_ITEMS:
        return await asyncio.to_thread(function)
    result = function()
    await asyncio.sleep(0)  # a request may have hundreds of short texts: the loop gets a turn after each
    return result
