"""Tiny random models of families whose layers keep states."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedConfig, PreTrainedModel

from .byte_model import VOCABULARY as BYTES
from .byte_model import save_model_of_family
from .chat_templates import THINKING

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
}
_CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}

# By the name of the class of the model: its configuration, and what is given to it beside the sizes.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", {"head_dim": 8, **_LINEAR}),
    "Lfm2ForCausalLM": ("Lfm2Config", _CONVOLUTIONS),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", {"head_dim": 8, **_LINEAR, **_EXPERTS}),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", {"head_dim": 8, **_LINEAR, **_EXPERTS}),
    "OlmoHybridForCausalLM": ("OlmoHybridConfig", _LINEAR),
    "Lfm2MoeForCausalLM": (
        "Lfm2MoeConfig",
        {
            **_CONVOLUTIONS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
        },
    ),
    "Lfm3ForCausalLM": ("Lfm3Config", _CONVOLUTIONS),
    "FalconH1ForCausalLM": ("FalconH1Config", _MAMBA | {"mamba_d_ssm": 64}),
    "MiniMaxForCausalLM": (
        "MiniMaxConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention"],
        },
    ),
}


def hybrid_config(name: str, **fields: Any) -> PreTrainedConfig:
    """Returns the configuration of a family's tiny model."""
    config, own = HYBRIDS[name]
    return getattr(transformers, config)(**{**_SIZES, **own, **fields})  # type: ignore[no-any-return]


def hybrid(name: str, **fields: Any) -> PreTrainedModel:
    """Returns a family's tiny model, whose weights are the same each time, and large enough that greedy tokens
    depend on the tokens before them."""
    make: Callable[[PreTrainedConfig], PreTrainedModel] = getattr(transformers, name)
    torch.manual_seed(0)
    model = make(hybrid_config(name, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def save_hybrid(directory: Path, name: str = "Qwen3_5ForCausalLM", context: int = 8192) -> Path:
    """Saves a family's tiny model with single bytes as tokens, and a chat template as Qwen3.5's."""
    save_model_of_family(directory, THINKING, context)
    end = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(THINKING.end)
    model = hybrid(name, vocab_size=BYTES, eos_token_id=end, max_position_embeddings=context)
    model.save_pretrained(directory)
    return directory


def greedy(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Returns, in the place of each token of `answer`, the likeliest one after those before it, by
    transformers' own forward pass: the answer itself, if it is the greedy one."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]  # type: ignore[operator]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens
