"""Makes a tiny model's configuration, and its files."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import LlamaConfig

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
