"""Prompts for text between a prefix and a suffix, for tokenizers that have the tokens for it."""

from typing import NamedTuple

import numpy as np

from lightkv.router.sampling_params import InvalidParams

from .tokenizer import Tokenizer


class _Format(NamedTuple):
    """The tokens before the prefix, before the suffix, and before the text between. `suffix_first`: the suffix
    stands before the prefix, and nothing before the text between."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


# The first format counts of which the tokenizer has every token.
_FORMATS = (
    _Format("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Format("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


def infilling_ids(tokenizer: Tokenizer, prefix: str, suffix: str) -> np.ndarray:
    """Returns the tokens of a prompt whose continuation is the text between `prefix` and `suffix`, int32 [n].

    They begin with the token that begins a text, if the tokenizer puts one there. Raises InvalidParams.
    """
    before = tokenizer.encode("")
    for form in _FORMATS:
        marks = [[tokenizer.token_id(text)] for text in form[:3] if text]
        if [None] in marks:
            continue
        texts = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
        parts = [np.array(marks[0] + texts[0].tolist()), np.array(marks[1] + texts[1].tolist())]
        if form.suffix_first:
            parts.reverse()
        return np.concatenate([before, *parts, *map(np.array, marks[2:])]).astype(np.int32)
    allowed = "none: this model's tokenizer has no tokens that mark a prefix and a suffix"
    raise InvalidParams("suffix", suffix, allowed)
