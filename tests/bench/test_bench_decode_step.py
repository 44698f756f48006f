"""The floor of a decode step: which weights of a model a step has to read. The choices that are compared."""

from typing import Any

import pytest
import torch

from bench.common.model_shapes import SHAPES, with_layers
from bench.common.random_model import random_model
from bench.serving.decode_step import output_tokens, same_choices, weight_bytes

# Billions of parameters outside the embedding, and those of the LM head.
PARAMETERS = {"llama-3-8b": 7.5, "llama-3.2-3b": 3.21, "llama-3-70b": 69.5, "qwen3-moe": 30.2}
PARAMETERS |= {"qwen3-8b": 7.57, "olmo-2-7b": 6.89}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_published_models(name: str) -> None:
    config = SHAPES[name]
    layers = [
        sum(
            parameter.numel()
            for parameter in random_model(
                with_layers(config, num), torch.device("meta"), torch.bfloat16
            ).parameters()
        )
        for num in (1, 2)
    ]
    a_layer = layers[1] - layers[0]
    embedding = config.vocab_size * config.hidden_size
    total = layers[0] + (config.num_hidden_layers - 1) * a_layer
    read = total if config.tie_word_embeddings else total - embedding
    assert read / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)


def tiny(name: str, **changed: Any) -> torch.nn.Module:
    config = with_layers(SHAPES[name], 1)
    config.hidden_size = 64
    for key, value in {"vocab_size": 100, "intermediate_size": 32, **changed}.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return random_model(config, torch.device("cpu"), torch.float32)


def test_a_step_reads_the_head_but_no_separate_embedding() -> None:
    for name, tied in (("llama-3-8b", False), ("llama-3.2-3b", True)):
        model = tiny(name)
        everything = sum(parameter.nbytes for parameter in model.parameters())
        assert weight_bytes(model, 4) == everything - (0 if tied else 100 * 64 * 4)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    model = tiny("qwen3-moe", moe_intermediate_size=16, num_experts=16, num_experts_per_tok=4)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert experts >= 3 * 16 * 64 * 16 * 4
    every = weight_bytes(model, 10_000)
    assert every - weight_bytes(model, 1) == pytest.approx(experts * 12 / 16)
    assert every - weight_bytes(model, 2) == pytest.approx(experts * (12 / 16) ** 2)


def test_a_text_is_compared_up_to_its_first_difference() -> None:
    texts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert same_choices(texts, texts, 3) == 1.0
    assert same_choices([[1, 2, 3, 4], [5, 6, 9, 9]], texts, 4) == 6 / 7
    assert same_choices([[1, 2, 3, 4], [5, 6, 9, 9]], texts, 2) == 2 / 3
    assert same_choices([[1, 2, 3, 4], [9, 6, 7, 8]], texts, 2) == 2 / 3  # it counts once
    assert same_choices([[0, 2, 3, 4], [0, 6, 7, 8]], texts, 3) == 0.0


def test_the_first_sequence_outlives_the_prefill_of_the_last() -> None:
    """A chunk of 8,192 tokens holds 4 prompts of 2,048, or fewer beside decodes: the last of 256 comes after
    64 steps, of which the first request gets a token each."""
    assert output_tokens(256, 2048, 30) >= 256 * 2048 // 8192 + 8 + 30
    assert output_tokens(1, 512, 100) >= 1 + 8 + 100
