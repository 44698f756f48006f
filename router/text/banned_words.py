"""Turns texts that an answer may not have into the sequences of tokens that write them."""

from collections.abc import Sequence

from msgspec.structs import replace

from lightkv.router.sampling_params import InvalidParams, SamplingParams

from .tokenizer import Tokenizer


def with_banned_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Returns `params` with the token ids of their `bad_words`, as an engine needs them. Raises
    InvalidParams."""
    found = [*params.bad_words_ids, *token_sequences(params.bad_words, tokenizer)]
    ids = list(dict.fromkeys(tuple(one) for one in found))
    try:
        return replace(params, bad_words=(), bad_words_ids=ids)
    except InvalidParams as error:  # as the request names them
        raise InvalidParams("bad_words", error.value, error.allowed) from error


def token_sequences(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Returns the tokens of each word as it begins a text, and as it follows a space.

    A tokenizer may write a word in further ways, for example in smaller pieces, and those are not banned.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False).tolist())
            if ids and max(ids) < tokenizer.vocab_size:  # else the model never writes it so
                found[ids] = None
    return list(found)
