"""How many of a chat prompt's ids the prompt of its next turn begins with: a state is kept there.

    this prompt    <|im_start|>user ⏎ Hi <|im_end|> ⏎ <|im_start|>assistant ⏎ <think> ⏎
    the next one   <|im_start|>user ⏎ Hi <|im_end|> ⏎ <|im_start|>assistant ⏎ Hello <|im_end|> …
                                                                              ^ the boundary

Templates leave out the thinking of earlier turns, and begin it for the answer. So neither the end of the prompt
nor that of the answer is found again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .tokenizer import ChatTemplateError, Tokenizer

_ANSWER = {"role": "assistant", "content": "lightkv"}
_QUESTION = {"role": "user", "content": "lightkv"}
_WINDOW = 1024  # characters before the first difference that are searched for an added token at first
_BEHIND = 256  # characters behind it that are tokenised, too, since they may join what is before it


def next_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a chat with an answer, if it does not end with one, and one further question."""
    answered = bool(messages) and messages[-1].get("role") == "assistant"
    return [*messages, *([] if answered else [_ANSWER]), _QUESTION]


def chat_boundary(
    tokenizer: Tokenizer,
    text: str,
    ids: np.ndarray,
    messages: list[dict[str, Any]],
    render: Callable[[list[dict[str, Any]]], str],
) -> int:
    """Returns the stable boundary of the text that `render` has made of a chat's messages; 0 also where the
    template refuses what follows."""
    try:
        return stable_boundary(tokenizer, text, ids, render(next_turn(messages)))
    except ChatTemplateError:
        return 0


def stable_boundary(tokenizer: Tokenizer, text: str, ids: np.ndarray, later: str) -> int:
    """Returns how many of a prompt's ids also begin the ids of `later`; 0 where no added token is common.

    What is common is not tokenised again, but from its last added token on.

    Args:
        text: what `ids`, int32 [n], are the ids of.
        later: the text of the chat's next turn.
    """
    common = _common(text, later)
    window = _WINDOW
    while True:
        begin = max(common - window, 0)
        start, added = tokenizer.last_added_token(text[begin:common])
        if start >= 0 or not begin:
            break
        window *= 8
    if start < 0:
        return 0
    start += begin
    # An added token always stands for itself, so that its place among the ids is that among the texts.
    place = text.count(added, 0, start)
    places = np.flatnonzero(ids == tokenizer.token_id(added))
    if place >= len(places):
        return 0
    first = int(places[place])
    rest = tokenizer.encode(later[start : common + _BEHIND], add_special_tokens=False)
    known = ids[first : first + len(rest)]
    differs = np.flatnonzero(known != rest[: len(known)])
    return first + (int(differs[0]) if differs.size else len(known))


def _common(one: str, other: str) -> int:
    """Returns how many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
