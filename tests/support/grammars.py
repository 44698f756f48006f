"""Compiles grammars for a tokenizer alone, as a worker does for its model's."""

from collections.abc import Mapping
from types import MappingProxyType

from llguidance import LLMatcher, LLTokenizer

from lightkv.router.sampling_params import Grammar
from lightkv.router.text.grammars import ModelTokens

_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def compile_grammar(
    grammar: Grammar, tokenizer: LLTokenizer, special: Mapping[str, int] = _NO_TOKENS
) -> LLMatcher:
    """Returns a matcher at the beginning of a text. `special`: the ids of the special tokens, by their names.
    Raises InvalidGrammar."""
    return ModelTokens(tokenizer, frozenset(), special).compile(grammar)
