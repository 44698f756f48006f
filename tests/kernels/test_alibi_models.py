"""Compares attention with ALiBi with that of transformers' own Bloom, MPT and Falcon, from the q, k and v of a
pass over a text to what reaches the output projection."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)

from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention
from lightkv.triton_kernels.attention.variants import Alibi
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes

HEADS, DIM, LENGTH = 6, 16, 40


def make_model(name: str) -> tuple[PreTrainedModel, str, str]:
    """Returns a model of one layer, and the names of its projections before and after attention."""
    sizes: dict[str, Any] = {"vocab_size": 50}
    width = HEADS * DIM
    if name == "bloom":
        config = BloomConfig(hidden_size=width, n_layer=1, n_head=HEADS, **sizes)
        return BloomForCausalLM(config), "query_key_value", "dense"
    if name == "mpt":
        attention = {"alibi_bias_max": 8, "attn_type": "multihead_attention"}
        config = MptConfig(
            d_model=width, n_layers=1, n_heads=HEADS, max_seq_len=64, attn_config=attention, **sizes
        )
        return MptForCausalLM(config), "Wqkv", "out_proj"
    config = FalconConfig(
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        **sizes,
    )
    return FalconForCausalLM(config), "query_key_value", "dense"


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_attention_is_that_of_the_models(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model, before, after = make_model(name)
    model.eval().to(device)
    seen: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if path.endswith(before):
            with torch.no_grad():
                module.weight.normal_(std=0.2)
            module.register_forward_hook(lambda _, __, out: seen.update(qkv=out[0]))
        elif path.endswith((f"attn.{after}", f"attention.{after}")):
            module.register_forward_pre_hook(lambda _, given: seen.update(out=given[0][0]))
    with torch.no_grad():
        model(torch.randint(50, (1, LENGTH), device=device))

    qkv = seen["qkv"]
    parts = (3, HEADS) if name == "mpt" else (HEADS, 3)
    heads = qkv.unflatten(1, (*parts, DIM))
    q, k, v = heads.unbind(1 if name == "mpt" else 2)
    slots = torch.randperm(LENGTH, device=device) + 1
    k_cache, v_cache = torch.full((2, LENGTH + 3, HEADS, DIM), torch.nan, device=device)
    k_cache[slots], v_cache[slots] = k, v
    slopes = alibi_slopes(HEADS, device=device)
    if name == "falcon":  # which scales the bias as it scales the scores
        slopes = slopes * DIM**-0.5
    kv = PagedKV(k_cache, v_cache, slots.int()[None])
    numbers = [0], [0, LENGTH], [LENGTH]
    rows, q_starts, lengths = (torch.tensor(part, dtype=torch.int32, device=device) for part in numbers)
    out = prefill_attention(q, kv, rows, q_starts, lengths, AttentionOptions().plus(Alibi(slopes)))
    torch.testing.assert_close(out.flatten(1), seen["out"], atol=1e-5, rtol=1e-4)
