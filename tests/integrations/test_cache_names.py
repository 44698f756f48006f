"""A model is given its cache by the name that its own forward pass has (`integrations/model/context.py`)."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightkv.integrations.hf_cache import LightKVCache
from lightkv.integrations.model.context import cache_name, given_cache
from lightkv.integrations.model.hf_model import bound

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
OWN = "cache" if "cache" in LlamaForCausalLM.forward.__annotations__ else "past_key_values"


class Newer(LlamaForCausalLM):
    """A model as transformers 5.24 has it, which knows no other name."""

    def forward(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        logits_to_keep: Any = 0,
        **rest: Any,
    ) -> Any:
        assert "past_key_values" not in rest
        own = {OWN: cache}
        return super().forward(
            input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **own, **rest
        )


class Older(LlamaForCausalLM):
    """A model as earlier releases have it, and code that was written for them."""

    def forward(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        logits_to_keep: Any = 0,
        **rest: Any,
    ) -> Any:
        assert "cache" not in rest
        own = {OWN: past_key_values}
        return super().forward(
            input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **own, **rest
        )


@pytest.mark.parametrize(("kind", "name"), [(Newer, "cache"), (Older, "past_key_values")])
def test_a_model_with_either_name_runs_on_a_cache(kind: type[LlamaForCausalLM], name: str) -> None:
    torch.manual_seed(0)
    model, ids = kind(CONFIG).eval(), torch.arange(12)[None]
    assert cache_name(model) == name
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = LightKVCache(model, 40)
        found = []
        for part in ids.split(6, dim=1):
            output = model(part, **{name: cache})
            found.append(output.logits)
            assert given_cache(output) is cache
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-5, atol=1e-5)
        assert (cache.num_hit, cache.kv.num_held) == (0, 12)
        with bound(model), pytest.raises(ValueError, match="runs under LLM and CachedModel"):
            model(ids, **{name: cache})


def test_the_cache_of_a_call_is_found_by_both_names() -> None:
    for name in ("cache", "past_key_values"):
        assert given_cache({name: 1, "use_cache": True}) == 1
    assert given_cache({"cache": None, "past_key_values": 1}) == 1  # some models pass both on
    assert given_cache({"use_cache": True}) is None
