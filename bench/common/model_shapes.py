"""The shapes of published models, for benchmarks that run a model of random weights."""

import copy

from transformers import (
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

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
LLAMA_3_2_3B = LlamaConfig(
    vocab_size=128256,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=True,
)
LLAMA_3_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)
QWEN2_5_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=False,
)
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=False,
)
OLMO_2_7B = Olmo2Config(
    vocab_size=100352,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=4096,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    tie_word_embeddings=False,
)
QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=False,
)
QWEN3_5_9B = Qwen3_5TextConfig(
    vocab_size=248320,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    mamba_ssm_dtype="float32",
    max_position_embeddings=262144,
    tie_word_embeddings=False,
)
GPT_OSS_20B = GptOssConfig(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_hidden_layers=24,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    num_local_experts=32,
    num_experts_per_tok=4,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)
SHAPES: dict[str, PretrainedConfig] = {
    "llama-3-8b": LLAMA_3_8B,
    "llama-3.2-3b": LLAMA_3_2_3B,
    "llama-3-70b": LLAMA_3_70B,
    "qwen2.5-7b": QWEN2_5_7B,
    "qwen3-8b": QWEN3_8B,
    "olmo-2-7b": OLMO_2_7B,
    "qwen3-moe": QWEN3_30B_A3B,
    "qwen3.5-9b": QWEN3_5_9B,
    "gpt-oss-20b": GPT_OSS_20B,
}


def with_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Returns a copy of `config` with its first `num_layers` layers."""
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = num_layers
    if types := getattr(config, "layer_types", None):
        changed.layer_types = types[:num_layers]
    return changed
