"""The shapes of twenty published text models: widths, heads, vocabularies and kinds of layers."""

from typing import NamedTuple

from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from bench.common.model_shapes import GPT_OSS_20B, LLAMA_3_8B, OLMO_2_7B, QWEN3_8B, QWEN3_30B_A3B


class Width(NamedTuple):
    """The sizes of a dense model's weights."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False

    def of(self, kind: type[PreTrainedConfig]) -> PreTrainedConfig:
        """Returns the configuration of a model of this width, whose other fields are its kind's defaults."""
        return kind(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_hidden_layers=12,
            head_dim=self.head_dim,
            max_position_embeddings=8192,
            tie_word_embeddings=self.tied,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )


def _mistral(width: Width) -> PreTrainedConfig:
    config = width.of(MistralConfig)
    config.sliding_window = None
    return config


def _gemma(width: Width, window: int) -> PreTrainedConfig:
    config = width.of(Gemma3TextConfig)
    config.sliding_window = window
    return config


def _granite(width: Width) -> PreTrainedConfig:
    config = width.of(GraniteConfig)
    config.embedding_multiplier, config.residual_multiplier = 12.0, 0.22
    config.attention_multiplier, config.logits_scaling = 1 / 128, 16.0
    return config


def _phi(width: Width, rotary: float) -> PreTrainedConfig:
    config = width.of(Phi3Config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rotary}
    return config


PUBLISHED: dict[str, PreTrainedConfig] = {
    "qwen2.5-0.5b": Width(151936, 896, 4864, 14, 2, 64, tied=True).of(Qwen2Config),
    "qwen2.5-7b": Width(152064, 3584, 18944, 28, 4, 128).of(Qwen2Config),
    "qwen3-0.6b": Width(151936, 1024, 3072, 16, 8, 128, tied=True).of(Qwen3Config),
    "qwen3-4b": Width(151936, 2560, 9728, 32, 8, 128, tied=True).of(Qwen3Config),
    "qwen3-8b": QWEN3_8B,
    "qwen3-32b": Width(151936, 5120, 25600, 64, 8, 128).of(Qwen3Config),
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "llama-3.2-1b": Width(128256, 2048, 8192, 32, 8, 64, tied=True).of(LlamaConfig),
    "llama-3.1-8b": LLAMA_3_8B,
    "gemma-3-1b": _gemma(Width(262144, 1152, 6912, 4, 1, 256, tied=True), 512),
    "gemma-3-4b": _gemma(Width(262208, 2560, 10240, 8, 4, 256, tied=True), 1024),
    "mistral-7b-v0.3": _mistral(Width(32768, 4096, 14336, 32, 8, 128)),
    "mistral-small-24b": _mistral(Width(131072, 5120, 32768, 32, 8, 128)),
    "phi-4": _phi(Width(100352, 5120, 17920, 40, 10, 128), 1.0),
    "phi-4-mini": _phi(Width(200064, 3072, 8192, 24, 8, 128, tied=True), 0.75),
    "gpt-oss-20b": GPT_OSS_20B,
    "smollm3-3b": Width(128256, 2048, 11008, 16, 4, 128, tied=True).of(SmolLM3Config),
    "glm-4-9b": Width(151552, 4096, 13696, 32, 2, 128).of(Glm4Config),
    "olmo-2-7b": OLMO_2_7B,
    "granite-3.3-8b": _granite(Width(49159, 4096, 12800, 32, 8, 128, tied=True)),
}
