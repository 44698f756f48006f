"""The shape of Llama-3-8B, for benchmarks that run a model of random weights."""

import copy

from transformers import LlamaConfig

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)


def with_layers(config: LlamaConfig, num_layers: int) -> LlamaConfig:
    """Returns a copy of `config` with `num_layers` layers."""
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = num_layers
    return changed
