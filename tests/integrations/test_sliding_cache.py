"""LightKVCache on models that mix layers which see everything with layers that see a window or a chunk: results
are those of transformers' own caches, and what is held is what the layers still see."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from lightkv import OutOfTokens
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.integrations.model.model_shape import ModelShape
from lightkv.layer_groups import FULL, SLACK
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from tests.support.combinations import each_value, slow, slow_cases
from tests.support.generating import GREEDY, assert_same, generate
from tests.support.windowed_models import FAMILIES, LONG

pytestmark = pytest.mark.usefixtures("one_thread")

# Rows of the same text, of its start, and of another one.
PROMPTS = [LONG[:70], LONG[:70], LONG[:33], LONG[40:45]]
CALLS: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "greedy": (PROMPTS[:1], {**GREEDY, "max_new_tokens": 30}),
    "batch": (PROMPTS, GREEDY),
    "sampled": (PROMPTS, {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}),
    "beams": (PROMPTS, {**GREEDY, "num_beams": 3, "num_return_sequences": 2}),
    "assisted": ([(LONG[:20] * 3)[:50]], {**GREEDY, "max_new_tokens": 30, "prompt_lookup_num_tokens": 4}),
    "chunked": (PROMPTS[:1], {**GREEDY, "prefill_chunk_size": 16}),
}
# One call each in `make test`: windows, many of them, chunks, and windows alone.
QUICK = ["gemma2", "gemma3", "gpt-oss", "llama4", "cohere2", "ministral-windows"]


@each_value(name=[*QUICK, *slow(*(name for name in FAMILIES if name not in QUICK))], call=list(CALLS))
def test_results_are_those_of_transformers_own_cache(name: str, call: str) -> None:
    prompts, options = CALLS[call]
    model = FAMILIES[name].model()
    expected = generate(model, DynamicCache(config=model.config), prompts, **options)
    cache = LightKVCache(model, 700)
    assert cache.is_sliding == [kind.sees != "full" for kind in FAMILIES[name].layer_kinds]
    for repeat in range(2):  # the prompts are computed, then hit
        assert_same(generate(model, cache, prompts, **options), expected)
        cache.kv.check()
        if repeat and call != "chunked":
            assert cache.num_hit >= len(prompts[0]) - 1
        cache.reset()
        assert cache.kv.num_held == 0
        cache.kv.check()


def held_by_length(model: PreTrainedModel, cache: LightKVCache) -> dict[int, int]:
    """Returns a dictionary to which every call of the model adds how many slots are held after it, by how many
    columns there are then."""
    held: dict[int, int] = {}
    model.register_forward_hook(lambda *_: held.update({cache.get_seq_length(): cache.kv.num_held}))
    return held


def test_what_is_held_is_what_the_layers_still_see() -> None:
    model = FAMILIES["gemma3"].model()
    cache = LightKVCache(model, 200)
    held = held_by_length(model, cache)
    groups = cache.kv.ledger.groups
    windows = groups.classes[1]
    assert (cache.kv.capacity, groups.widths) == (200 * 7, (1, 6))
    generate(model, cache, [LONG[:40]], **{**GREEDY, "max_new_tokens": 25})
    assert held.pop(40) == 40 * groups.num_groups
    for length, slots in held.items():
        before = length - 1  # what has passed is given back when the sequence grows
        if before < windows.lifetime.rule.gone_at(39):  # the prompt's tail is held until all of it has passed
            first = windows.lifetime.rule.first_kept(40)
            assert slots == length + 6 * (length - first)
        else:
            assert slots == groups.slots(before) + groups.num_groups
    assert list(held) == list(range(41, 65))
    assert held[64] < 0.4 * 64 * groups.num_groups


@pytest.mark.parametrize("name", ["gpt-oss", "llama4"])
def test_each_layers_mask_has_the_size_of_that_of_transformers_own_cache(name: str) -> None:
    """For a chunk as much as for a window: with fewer columns than a chunk has, transformers makes no mask."""
    model = FAMILIES[name].model()
    cache, own = LightKVCache(model, 200), DynamicCache(config=model.config)
    for start, end in ((0, 5), (5, 6), (6, 31), (31, 32), (32, 48)):
        for layer in range(4):
            assert cache.get_mask_sizes(end - start, layer) == own.get_mask_sizes(end - start, layer)
        for past in (cache, own):
            with torch.no_grad():
                model(torch.tensor([LONG[start:end]]), past_key_values=past)
    assert [cache.get_mask_sizes(1, layer) for layer in (0, 3)] == [(16, 33), (49, 0)]


def test_a_crop_goes_back_by_the_slack_and_no_further() -> None:
    model = FAMILIES["gpt-oss"].model()
    cache = LightKVCache(model, 400)
    ids = torch.tensor([LONG[:60], LONG[10:70]])
    with torch.no_grad():
        model(ids[:, :59], past_key_values=cache)
        whole = model(ids[:, 59:], past_key_values=cache).logits
        cache.kv.check()
        held, slack = cache.kv.num_held, cache.kv.ledger.groups.classes[1].lifetime.slack
        assert slack == 16 < SLACK
        with pytest.raises(ValueError, match=r"crop\(-18\).* window of 16, .*call reset\(\)"):
            cache.crop(-18)
        assert (cache.kv.num_held, cache.get_seq_length()) == (held, 60)
        cache.crop(-17)  # the token of the last call, and the slack
        again = model(ids[:, 43:], past_key_values=cache).logits[:, -1:]
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-4)
    cache.kv.check()


def test_a_crop_that_one_row_refuses_crops_none() -> None:
    """The shorter row could go back to its first token."""
    model = FAMILIES["gemma3"].model()
    cache = LightKVCache(model, 400)
    ids, mask = torch.tensor([[0] * 45 + LONG[:15], LONG[:60]]), torch.ones(2, 61, dtype=torch.int64)
    mask[0, :45] = 0
    for part in (slice(0, 60), slice(60, 61)):
        new = ids if part.start == 0 else torch.tensor([[5], [6]])
        model(new, attention_mask=mask[:, : part.stop], past_key_values=cache)
    lengths = [sequence.length for sequence in cache._batch.sequences]
    with pytest.raises(ValueError, match="cannot go back to 46 tokens"):
        cache.crop(-15)
    assert [sequence.length for sequence in cache._batch.sequences] == lengths == [16, 61]
    cache.kv.check()


def test_a_prompt_in_chunks_fits_a_pool_that_it_does_not_fit_whole() -> None:
    model = FAMILIES["gemma3"].model()
    cache = LightKVCache(model, 40)
    assert (cache.kv.capacity, cache.max_entries) == (7 * 40, 128)  # the model's context
    expected = generate(model, DynamicCache(config=model.config), [LONG], **GREEDY)
    with pytest.raises(OutOfTokens):
        generate(model, cache, [LONG], **GREEDY)
    cache.kv.check()
    assert_same(generate(model, cache, [LONG], prefill_chunk_size=10, **GREEDY), expected)
    assert cache.get_seq_length() > 80


def test_a_failed_call_leaves_nothing_to_be_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["gpt-oss"].model()
    expected = generate(model, DynamicCache(config=model.config), PROMPTS, **GREEDY)
    cache = LightKVCache(model, 400)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[3], "forward", None)  # type: ignore[attr-defined]
        with pytest.raises(TypeError):
            generate(model, cache, PROMPTS, **GREEDY)
    cache.reset()
    assert (cache.kv.num_held, cache.kv.num_cached) == (0, 0)
    cache.kv.check()
    assert_same(generate(model, cache, PROMPTS, **GREEDY), expected)


@pytest.mark.parametrize(("name", "skipped"), [*slow_cases(("gemma2", [])), ("llama4", [0])])
def test_quantised_layers_in_groups_are_those_of_a_pool_without(
    name: str, skipped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a layer stays as it is computed, so that its slots have had bytes of quantised layers."""
    model = FAMILIES[name].model()
    kv_format = KVFormat.parse("int8", skipped)
    grouped = LightKVCache(model, 120, kv_format=kv_format)
    monkeypatch.setattr(ModelShape, "lifetimes", (FULL,) * 4)
    uniform = LightKVCache(model, 400, kv_format=kv_format)
    options = {**GREEDY, "max_new_tokens": 8}
    assert grouped.kv.ledger.groups.num_groups > uniform.kv.ledger.groups.num_groups == 1
    for start in (0, 20, 40, 0):  # other texts take slots of the first, part of which is then hit
        prompts = [LONG[start : start + length] for length in (36, 20, 6)]
        assert_same(*(generate(model, cache, prompts, **options) for cache in (grouped, uniform)))


def test_a_conversation_hits_what_its_last_turn_left() -> None:
    """To the last token that was computed, though the windows have passed most of it."""
    model = FAMILIES["gemma3"].model()
    cache = LightKVCache(model, 200)
    text = LONG[:40]
    for turn in range(2):
        expected = generate(model, DynamicCache(config=model.config), [text], **GREEDY)
        output = generate(model, cache, [text], **GREEDY)
        assert_same(output, expected)
        assert cache.num_hit == (len(text) - 6 if turn else 0)
        text = output.sequences[0].tolist() + [30 + turn] * 5
        cache.kv.check()
