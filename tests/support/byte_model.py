"""A model of two random layers over bytes and a few longer tokens, in which steps are fast on a CPU."""

from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, pre_tokenizers

from bench.common.random_model import random_model

from .chat_templates import FamilyTemplate
from .tiny_files import tiny_config

VOCABULARY = 300  # of the logits; the tokenizer has fewer tokens
MERGES = [("{", '"'), ('"', ":"), ("a", "b"), ("ab", "c"), ("1", "2"), (",", '"')]


def save_byte_model(directory: Path, context: int = 512) -> tuple[Path, int]:
    """Saves the model with its tokenizer. Returns the directory and the end token."""
    tokenizer = _byte_tokenizer(MERGES)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    end = _save(tokenizer, directory, context, "<|end|>")
    return directory, end


def save_model_of_family(directory: Path, template: FamilyTemplate, context: int = 8192) -> Path:
    """Saves the model with a family's tokens and chat template. Its other tokens are single bytes, so that a
    text has one row of tokens only."""
    tokenizer = _byte_tokenizer([])
    special = dict.fromkeys([template.end, *template.special])
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in special])
    tokenizer.add_tokens([AddedToken(one, special=False) for one in template.added])
    _save(tokenizer, directory, context, template.end)
    (directory / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    return directory


def _byte_tokenizer(merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _save(tokenizer: tokenizers.Tokenizer, directory: Path, context: int, end_token: str) -> int:
    """Saves a random model with this tokenizer. Returns the id of the end token."""
    torch.manual_seed(0)
    end = int(tokenizer.token_to_id(end_token))
    config = tiny_config(vocab_size=VOCABULARY, max_position_embeddings=context, eos_token_id=end)
    random_model(config, torch.device("cpu"), torch.float32).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return end
