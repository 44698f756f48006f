"""Makes a tiny model's configuration, and its files."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from bench.common.random_model import random_model


def tiny_config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**{**sizes, **changes})


def save_tiny(directory: Path) -> Path:
    """Saves a complete model of two random layers, and its tokenizer."""
    torch.manual_seed(0)
    random_model(tiny_config(), torch.device("cpu"), torch.float32).save_pretrained(directory)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def byte_tokenizer(*added: str) -> tokenizers.Tokenizer:
    """Returns a tokenizer whose tokens are the bytes, the special tokens <s>, </s> and <end>, and those of
    `added`."""
    bytes_ = {char: token_id for token_id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(bytes_, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<end>", *added])
    return tokenizer


def save_published(directory: Path, **changes: Any) -> Path:
    """Saves a random model as models are published, with a tokenizer and settings of it. `changes`: of its
    configuration. Its weights are large, so that each of its tokens follows from the tokens before."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "max_position_embeddings": 300, "bos_token_id": 256, "eos_token_id": 257}
    model = LlamaForCausalLM(tiny_config(**sizes, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
