"""The configuration of a model with two small layers, on which benchmarks run in a test."""

from transformers import LlamaConfig

TWO_LAYERS = LlamaConfig(
    vocab_size=1000,
    hidden_size=192,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=512,
)
