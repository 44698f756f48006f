"""Dry runs skip fused layers that launch the same kernels as others: which ones, and that they come back."""

from collections.abc import Hashable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightkv.integrations.model.fused_layers import few_layers, fuse_layers
from lightkv.integrations.model.hf_model import bind

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    made = LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    bind(made)
    assert fuse_layers(made, lambda line: None).num_fused == 7
    return made


@pytest.mark.parametrize(
    ("kinds", "run"),
    [
        ("aaaaaaa", [0, 1, 6]),
        ("abababa", [0, 1, 2, 3, 6]),
        ("abcdefg", [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_two_layers_of_each_kind_and_the_last_run(
    kinds: str, run: list[int], model: LlamaForCausalLM
) -> None:
    def kind(layer_idx: int) -> Hashable:
        return kinds[layer_idx]

    layers, x = model.model.layers, torch.ones(1, 1, 32)
    before = [vars(layer)["forward"] for layer in layers]
    with few_layers(model, kind):
        now = [vars(layer)["forward"] for layer in layers]
        assert [idx for idx in range(7) if now[idx] is before[idx]] == run
        assert all(now[idx](x, lightkv=None) is x for idx in range(7) if idx not in run)
    assert [vars(layer)["forward"] for layer in layers] == before


def test_layers_come_back_after_an_error(model: LlamaForCausalLM) -> None:
    before = [vars(layer)["forward"] for layer in model.model.layers]
    with pytest.raises(RuntimeError), few_layers(model, lambda _: ""):
        raise RuntimeError
    assert [vars(layer)["forward"] for layer in model.model.layers] == before
