"""The floor of a decode step: which weights of a model a step has to read."""

from typing import Any

import pytest
import torch

from bench.common.model_shapes import SHAPES, with_layers
from bench.serving.decode_step import weight_bytes
from lightkv.router.model.loader import random_model

# Billions of parameters outside the embedding, and those of the LM head.
PARAMETERS = {"llama-3-8b": 7.5, "llama-3.2-3b": 3.21, "llama-3-70b": 69.5, "qwen3-moe": 30.2}


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
