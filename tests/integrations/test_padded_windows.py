"""Padded batches on LightKVCache, of every family with windows or chunks: each call of the model returns the
logits that it returned on transformers' own cache, for the tokens that `generate` chose there."""

from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from lightkv.integrations.hf_cache import LightKVCache
from tests.support.combinations import single_values
from tests.support.generating import GREEDY, record, replay
from tests.support.tiny_architectures import random_weights, tiny
from tests.support.windowed_models import FAMILIES, LONG

pytestmark = pytest.mark.usefixtures("one_thread")

_MIXED = {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "use_sliding_window": True}
# Types of configurations beside those of `FAMILIES`, with the fields by which their layers slide.
OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "beam": {},
    "cohere2_moe": {},
    "cohere_compass_text": _MIXED,
    "cwm": {},
    "dots1": _MIXED,
    "exaone_moe": {},
    "flint": {},
    "gemma4_unified_text": {},
    "granitemoe_swa": {},
    "kolibri1": {},
    "laguna": _MIXED,
    "mellum": _MIXED,
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {"sliding_window": 8},
    "phi3": {},
    "qwen2": _MIXED,
    "qwen2_moe": _MIXED,
    "qwen3": _MIXED,
    "qwen3_moe": {"use_sliding_window": True},
    "smollm3": _MIXED,
    "starcoder2": {},
    "vaultgemma": {},
}
# transformers runs them without sdpa.
NO_SDPA = {"gemma2", "gpt-oss", "granite-swa", "mimo-v2", "flint", "granitemoe_swa", "vaultgemma"}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {**GREEDY, "do_sample": True},
    "beams": {**GREEDY, "num_beams": 3},
    "chunked": GREEDY,  # the prompts are computed in two or more calls
    "assisted": {**GREEDY, "prompt_lookup_num_tokens": 4},  # transformers does it for one row
}
EXTRA = 3  # columns of padding before the longest prompt
# The lengths of prompts, by what a layer sees: neighbours, about that length, all shorter, much shorter.
LENGTHS = {
    "next": lambda span: [2 * span + 4, 2 * span + 3],
    "about": lambda span: [span // 2, span - 1, span, span + 1, 2 * span + 3],
    "short": lambda span: [3, span // 2, span - 2],
    "far": lambda span: [span + 1, 3 * span + 2],
}


def cases() -> list[Any]:
    """Returns all cases. Of every fourth family in `FAMILIES` one is not slow, and of chunks every value."""
    found = []
    for place, name in enumerate([*FAMILIES, *OTHERS]):
        axes = {
            "attention": ["eager"] if name in NO_SDPA else ["sdpa", "eager"],
            "call": list(CALLS),
            "lengths": list(LENGTHS),
        }
        quick = (
            [tuple(values[place % len(values)] for values in axes.values())]
            if name in FAMILIES and place % 4 == 1
            else []
        )
        quick += single_values(**axes) if name == "llama4" else []
        for case in product(*axes.values()):
            found.append(pytest.param(name, *case, marks=() if case in quick else pytest.mark.slow))
    return found


def config_of(name: str) -> PreTrainedConfig:
    """Returns a new configuration of a family or another type."""
    family = FAMILIES.get(name)
    model_type, fields = (name, OTHERS[name]) if family is None else (family.model_type, family.fields)
    return tiny(model_type, fields=fields)


def fill_free_slots(cache: LightKVCache) -> None:
    """Fills free slots with NaN, which they may have and which no mask hides."""
    memory = cache.kv.memory
    for buffer in memory.pool.buffers:
        buffer[memory.allocator.mem_state == 1] = torch.nan


@pytest.mark.parametrize(("name", "attention", "call", "lengths"), cases())
def test_logits_are_those_of_transformers_own_cache(
    name: str, attention: str, call: str, lengths: str
) -> None:
    model = random_weights(config_of(name))
    model.set_attn_implementation(attention)
    cache = LightKVCache(model, 1500)
    span = getattr(model.config, "attention_chunk_size", None) or model.config.sliding_window
    assert True in cache.is_sliding
    options = {**CALLS[call], "max_new_tokens": span // 2 + 3}
    prompts = [LONG[:length] for length in LENGTHS[lengths](span)]
    if call == "assisted":
        prompts = [(LONG[: span - 2] * 4)[: len(prompts[-1])]]
    if call == "chunked":  # no row is padding alone in the first call
        options["prefill_chunk_size"] = EXTRA + max(map(len, prompts)) - min(map(len, prompts)) + 2
    recorded = record(model, prompts, extra=EXTRA, **options)
    model.register_forward_pre_hook(lambda *_: fill_free_slots(cache))  # after the cache's own hook
    for _ in range(2):  # the prompts are computed, then hit
        assert replay(model, cache, recorded) >= len(prompts) * options["max_new_tokens"]
        cache.kv.check()
        cache.reset()
        assert cache.kv.num_held == 0
