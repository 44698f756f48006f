"""A model of two random layers over bytes and a few longer tokens, in which steps are fast on a CPU."""

from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, pre_tokenizers

from lightkv.router.model.loader import random_model

from .tiny_files import tiny_config

VOCABULARY = 300  # of the logits; the tokenizer has fewer tokens
MERGES = [("{", '"'), ('"', ":"), ("a", "b"), ("ab", "c"), ("1", "2"), (",", '"')]


def save_byte_model(directory: Path, context: int = 512) -> tuple[Path, int]:
    """Saves the model with its tokenizer. Returns the directory and the end token."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    for pair in MERGES:
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    end = tokenizer.token_to_id("<|end|>")
    config = tiny_config(vocab_size=VOCABULARY, max_position_embeddings=context, eos_token_id=end)
    random_model(config, torch.device("cpu"), torch.float32).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory, int(end)
