"""A tiny Llama with random weights, for tests that compare lightkv's results with the model's own."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 97


def tiny_llama(
    device: torch.device,
    seed: int = 0,
    *,
    vocabulary: int = VOCABULARY,
    context: int = 256,
    attention: str = "sdpa",
    std: float = 0.2,
) -> PreTrainedModel:
    """Returns a float32 model of two layers, with three heads for each KV head; `seed` determines its weights.

    `std` is that of every weight. It is large, so that attention is not uniform and some tokens are much
    likelier than others.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.to(device).eval()
