"""Tiny models of any architecture with eager attention, which applies each model's own mask and softcap."""

from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lightkv.integrations.model.fused_rotary import fused_forwards

VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    # Eager attention is the reference, since it applies the model's mask and softcap.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():  # large, so that attention is far from uniform and biases matter
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device).eval()


def fused_layers(model: PreTrainedModel) -> list[int]:
    """Returns the indices of the layers whose attention has the fused forward pass, ascending."""
    return sorted(cast(int, module.layer_idx) for module in fused_forwards(model))
