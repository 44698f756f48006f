"""Hugging Face's generate with lightkv as its cache: the same results as with its own, for less memory."""

import doctest
import gc
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from lightkv import OutOfRows, OutOfTokens, SequenceTooLong
from lightkv.errors import UnsupportedModel
from lightkv.integrations import hf_cache
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.router import EngineConfig
from lightkv.router.model_files import resolve
from tests.support.combinations import each_value, slow
from tests.support.eager_models import SMALL, VOCABULARY
from tests.support.generating import GREEDY, assert_same, generate, padded

MIXED = {**SMALL, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mistral-window": MistralConfig(**{**SMALL, "sliding_window": 6}),
    "gemma2": Gemma2Config(**MIXED, query_pre_attn_scalar=24, attn_logit_softcapping=5.0),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256),
}
PROMPTS = [[5, 6, 7, 8, 5, 6], [11, 40, 3, 90, 22, 61, 17, 4, 33, 8, 70, 5], [9], [11, 40, 3, 90, 22, 64]]
CALLS: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "greedy": (PROMPTS[1:2], GREEDY),
    "batch": (PROMPTS, GREEDY),
    "end": (PROMPTS, {**GREEDY, "max_new_tokens": 30, "eos_token_id": list(range(3, VOCABULARY, 6))}),
    "sampled": (PROMPTS, {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "temperature": 0.8}),
    "several": (PROMPTS[:2], {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}),
    "beams": (PROMPTS, {**GREEDY, "num_beams": 4, "num_return_sequences": 2}),
    "beams-end": (PROMPTS, {**GREEDY, "num_beams": 3, "eos_token_id": [3, 50, 20], "early_stopping": True}),
    "beam-sampled": (PROMPTS[:2], {"do_sample": True, "max_new_tokens": 8, "num_beams": 3}),
    "assisted": (PROMPTS[:1], {**GREEDY, "max_new_tokens": 40, "prompt_lookup_num_tokens": 4}),
    "chunked": (PROMPTS[1:2], {**GREEDY, "prefill_chunk_size": 5}),
}


def make_model(config: PreTrainedConfig, device: torch.device, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for parameter in model.parameters():  # large, so that some tokens are much likelier than others
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device).eval()


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(hf_cache)
    assert result.attempted > 8
    assert not result.failed


# Each of the other calls does what one of these does, too.
QUICK = ["batch", "end", "sampled", "beams", "beam-sampled", "assisted", "chunked"]


@each_value(call=[*QUICK, *slow(*(call for call in CALLS if call not in QUICK))])
def test_results_are_those_of_transformers_own_cache(call: str, device: torch.device) -> None:
    prompts, options = CALLS[call]
    model = make_model(CONFIGS["llama"], device)
    expected = generate(model, None, prompts, **options)
    cache = LightKVCache(model, 1000)
    # The prompts are computed, then hit; then they are padded differently, which changes no text.
    for repeat in range(3):
        found = generate(model, cache, prompts, **options, extra=repeat // 2 * 3)
        if repeat == 2:
            found.sequences = found.sequences[:, 3:]
        assert_same(found, expected)
        assert found.past_key_values is cache
        cache.kv.check()
        num_hit = cache.num_hit
        if call != "chunked":
            # All but the last token of each row, or of the first row with each text, is hit.
            assert num_hit == 0 or repeat or call in ("batch", "end", "sampled", "beams", "beams-end")
            assert repeat == 0 or num_hit >= sum(len(prompt) - 1 for prompt in prompts) - 4
        cache.reset()
        assert (cache.kv.num_held, cache.kv.ledger.num_open, cache.get_seq_length()) == (0, 0, 0)
        cache.kv.check()


@each_value(name=[name for name in CONFIGS if name != "llama"], call=["batch", "beams", "assisted"])
def test_other_models(name: str, call: str, device: torch.device) -> None:
    prompts, options = CALLS[call]
    # sdpa has no softcap.
    model = make_model(CONFIGS[name], device, "eager" if name == "gemma2" else "sdpa")
    # transformers cannot crop a windowed cache, so the reference keeps everything.
    expected = generate(model, DynamicCache(), prompts, **options)
    cache = LightKVCache(model, 1000)
    for _ in range(2):
        assert_same(generate(model, cache, prompts, **options), expected)
        cache.kv.check()
        cache.reset()


def computed_by(model: PreTrainedModel, cache: LightKVCache) -> list[int]:
    """Returns a list to which every call of the model appends the number of tokens it computes."""
    computed: list[int] = []
    inner = model.model  # type: ignore[attr-defined]
    inner.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return computed


def test_beams_hold_what_they_share_once(device: torch.device) -> None:
    prompt = list(range(10, 50))
    model = make_model(CONFIGS["llama"], device)
    cache = LightKVCache(model, 400)
    allocated, held = [], []

    def watch(edits: list[Any], kept: list[torch.Tensor]) -> None:
        allocated.extend(sum(edit.counts) for edit in edits if hasattr(edit, "counts"))
        held.append(cache.kv.num_held)

    cache.kv.on_edits = watch
    computed = computed_by(model, cache)
    generate(model, cache, [prompt], **{**GREEDY, "num_beams": 4, "max_new_tokens": 9})
    # The prompt is written once, then every step writes one token for each beam.
    assert allocated == [40] + [4] * 8
    assert max(held) <= 40 + 4 * 8
    assert computed == [4 * 40] + [4] * 8
    cache.reset()
    computed.clear()
    generate(model, cache, [prompt], **{**GREEDY, "num_beams": 4, "max_new_tokens": 2})
    assert computed == [4, 4]


def test_rows_share_a_common_start_in_the_step_that_computes_it(device: torch.device) -> None:
    start = list(range(10, 30))
    prompts = [[*start, 3, 4, 5], [*start, 6], [*start, 3, 4, 5], [*start, 3, 4, 8]]
    model = make_model(CONFIGS["llama"], device)
    expected = generate(model, None, prompts, **GREEDY)
    cache = LightKVCache(model, 400)
    computed = computed_by(model, cache)
    assert_same(generate(model, cache, prompts, **{**GREEDY, "max_new_tokens": 1}), first_of(expected))
    assert cache.kv.num_held == len(start) + 3 + 1 + 1
    assert computed == [4 * 23]
    cache.reset()
    assert_same(generate(model, cache, prompts, **GREEDY), expected)


def first_of(output: Any) -> Any:
    """Returns what a call for one token would have returned, given the output of a longer call."""
    width = output.sequences.shape[1] - len(output.logits) + 1
    return type(output)(sequences=output.sequences[:, :width], logits=output.logits[:1])


@each_value(call=[*slow("greedy"), "batch", "assisted"])
def test_a_conversation_hits_what_came_before(call: str, device: torch.device) -> None:
    prompts, options = CALLS[call]
    model = make_model(CONFIGS["llama"], device)
    output = generate(model, None, prompts, **options).sequences.tolist()
    width = max(map(len, prompts))
    answers = [row[width:] for row in output]
    longer = [[*prompt, *answer, 30, 31, 32] for prompt, answer in zip(prompts, answers, strict=True)]
    expected = generate(model, None, longer, **GREEDY)
    cache = LightKVCache(model, 400)
    generate(model, cache, prompts, **options)
    assert_same(generate(model, cache, longer, **GREEDY), expected)
    # All is hit but the answer's last token, which was never computed, and the three new tokens.
    assert cache.num_hit >= sum(len(text) - 4 for text in longer)
    generate(model, cache, longer, **GREEDY)
    assert cache.num_hit == sum(len(text) - 1 for text in longer)


def test_calls_of_the_model_itself(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    batch = padded(PROMPTS, device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        expected = generate_free_forward(model, ids, mask)
        cache = LightKVCache(model, 400)
        logits = []
        for start, end in ((0, 12), (12, 13), (13, 16)):
            new = expected["ids"][:, start:end]
            seen = expected["mask"][:, :end]
            logits.append(model(new, attention_mask=seen, past_key_values=cache).logits)
    real = expected["mask"].bool()
    torch.testing.assert_close(torch.cat(logits, 1)[real], expected["logits"][real], rtol=1e-4, atol=1e-4)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    cache.crop(-3)
    with torch.no_grad():
        again = model(
            expected["ids"][[0, 1, 2], 13:], attention_mask=expected["mask"][[0, 1, 2]], past_key_values=cache
        ).logits
    torch.testing.assert_close(again, expected["logits"][[0, 1, 2], 13:], rtol=1e-4, atol=1e-4)
    cache.kv.check()


def generate_free_forward(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Appends four columns to `ids` and `mask`, and computes the logits in a pass without any cache."""
    more = torch.arange(20, 36, device=ids.device).view(4, 4)
    ids, mask = torch.cat((ids, more), 1), torch.cat((mask, torch.ones_like(more)), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return {"ids": ids, "mask": mask, "logits": logits}


def test_the_model_is_as_before_for_every_other_call(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    expected = generate(model, None, PROMPTS, **GREEDY)
    cache, other = LightKVCache(model, 400), LightKVCache(model, 400)
    generate(model, cache, PROMPTS[:1], **GREEDY)
    assert_same(generate(model, None, PROMPTS, **GREEDY), expected)
    assert_same(generate(model, DynamicCache(), PROMPTS, **GREEDY), expected)
    assert_same(generate(model, other, PROMPTS, **GREEDY), expected)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 2
    del cache
    gc.collect()
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"capacity": 20}, OutOfTokens),
        ({"capacity": 40, "max_entries": 99}, OutOfTokens),
        ({"capacity": 400, "max_sequences": 3}, OutOfRows),
        ({"capacity": 400, "max_entries": 20}, SequenceTooLong),
    ],
)
def test_too_little_room_raises_and_leaves_the_cache_intact(
    sizes: dict[str, int], error: type[Exception], device: torch.device
) -> None:
    model = make_model(CONFIGS["llama"], device)
    cache = LightKVCache(model, **sizes)
    with pytest.raises(error):
        generate(model, cache, PROMPTS, **GREEDY)
    cache.kv.check()
    cache.reset()
    assert cache.kv.num_held == 0
    expected = generate(model, None, PROMPTS[:1], **GREEDY)
    assert_same(generate(model, cache, PROMPTS[:1], **GREEDY), expected)


def test_a_failed_call_leaves_nothing_to_be_hit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(CONFIGS["llama"], device)
    expected = generate(model, None, PROMPTS, **GREEDY)
    cache = LightKVCache(model, 400)
    layer = model.model.layers[1]  # type: ignore[attr-defined]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail)
        with pytest.raises(RuntimeError, match="gone"):
            generate(model, cache, PROMPTS, **GREEDY)
        with pytest.raises(ValueError, match=r"the last call of the model failed.*reset"):
            model(torch.tensor([[5]], device=device), past_key_values=cache)
    cache.reset()
    assert (cache.kv.num_held, cache.kv.num_cached) == (0, 0)
    cache.kv.check()
    assert_same(generate(model, cache, PROMPTS, **GREEDY), expected)


def test_every_generate_is_a_text_of_its_own(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    longer = [*range(20, 70)]
    calls = [PROMPTS[:1], PROMPTS[1:2], [longer], PROMPTS[2:3], PROMPTS, [longer[:30]], PROMPTS[:1]]
    expected = [generate(model, None, prompts, **GREEDY) for prompts in calls]
    cache = LightKVCache(model, 400)
    for prompts, own in zip(calls, expected, strict=True):
        assert_same(generate(model, cache, prompts, **GREEDY), own)
        cache.kv.check()
    assert cache.num_hit == len(PROMPTS[0]) - 1


def test_a_call_that_does_not_continue_the_batch_is_refused(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    cache = LightKVCache(model, 400)
    first = padded(PROMPTS[:2], device)
    model(**first, past_key_values=cache)
    one_row = torch.tensor([[5]], device=device)
    for wrong in (first, {"input_ids": one_row}, {"input_ids": one_row.new_empty(2, 0)}):
        with pytest.raises(ValueError, match=r"call reset\(\) before another text"):
            model(**wrong, past_key_values=cache)
    cache.kv.check()
    cache.reset()
    model(one_row, past_key_values=cache)
    assert cache.kv.num_held == 1


def test_arguments_that_cannot_be_cached_are_refused(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    cache = LightKVCache(model, 400)
    ids = torch.tensor([[5, 6, 7]], device=device)
    embedded = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="pass input_ids"):
        model(inputs_embeds=embedded, past_key_values=cache)
    with pytest.raises(ValueError, match="logits_to_keep as a number"):
        model(ids, logits_to_keep=torch.tensor([1], device=device), past_key_values=cache)
    for mask in ([[1, 1, 0]], [[1, 0, 1]], [[0, 0, 0]]):
        with pytest.raises(ValueError, match="than on the left"):
            model(ids, attention_mask=torch.tensor(mask, device=device), past_key_values=cache)
    with pytest.raises(ValueError, match="calls of the whole model"):
        model.model(ids, past_key_values=cache)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="as a negative one"):
        cache.crop(2)
    assert (cache.kv.num_held, cache.kv.ledger.num_open) == (0, 0)


def test_a_crop_longer_than_a_row_changes_nothing(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    cache = LightKVCache(model, 400)
    batch = padded(PROMPTS[1:3], device)  # of 12 tokens and of 1
    model(**batch, past_key_values=cache)
    lengths = [sequence.length for sequence in cache._batch.sequences]
    with pytest.raises(ValueError, match=r"crop\(-2\).*the shortest row has 1 tokens"):
        cache.crop(-2)
    assert [sequence.length for sequence in cache._batch.sequences] == lengths == [12, 1]
    assert (cache.get_seq_length(), cache.kv.num_held) == (12, 13)
    cache.crop(-1)
    assert (cache.get_seq_length(), cache.kv.num_held) == (11, 11)
    cache.kv.check()


def test_a_mask_or_positions_that_would_be_ignored_are_refused(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    batch = padded(PROMPTS[:2], device)  # of 6 tokens, behind 6 columns of padding, and of 12
    more = torch.tensor([[5], [6]], device=device)
    seen = torch.cat((batch["attention_mask"], torch.ones_like(more)), 1)
    own = DynamicCache()
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**batch, position_ids=positions[:, :-1], past_key_values=own)
        expected = model(
            more, attention_mask=seen, position_ids=positions[:, -1:], past_key_values=own
        ).logits
    cache = LightKVCache(model, 400)
    with pytest.raises(ValueError, match=r"position_ids .*leave them out"):
        model(**batch, position_ids=torch.arange(12, device=device)[None], past_key_values=cache)
    assert (cache.kv.num_held, cache.kv.ledger.num_open) == (0, 0)
    with torch.no_grad():
        model(**batch, position_ids=positions[:, :-1], past_key_values=cache)
    hole, unpadded = seen.clone(), torch.ones_like(seen)
    hole[1, 4] = 0
    last_hidden = seen.clone()
    last_hidden[0, -1] = 0
    held = cache.kv.num_held
    for mask in (hole, unpadded, last_hidden):
        with pytest.raises(ValueError, match=r"is not that of the \[6, 0\] columns of padding"):
            model(more, attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="continue without a mask"):
        model(more, past_key_values=cache)
    for wrong in (positions[:, -1:] + 1, positions[:1, -1:], positions, positions[0, -1:]):
        with pytest.raises(ValueError, match="leave them out"):
            model(more, attention_mask=seen, position_ids=wrong, past_key_values=cache)
    assert (cache.kv.num_held, cache.get_seq_length()) == (held, 12)
    with torch.no_grad():
        found = model(more, attention_mask=seen, position_ids=positions[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    cache.kv.check()


@pytest.mark.slow
def test_smollm2(device: torch.device) -> None:
    directory = resolve(EngineConfig.model, print)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    prompts = [tokenizer(text).input_ids for text in ("The capital of France is", "one two one two one")]
    calls = {
        "greedy": (prompts, {**GREEDY, "max_new_tokens": 6}),
        "beams": (prompts[:1], {**GREEDY, "max_new_tokens": 5, "num_beams": 4}),
        "assisted": (prompts[1:], {**GREEDY, "max_new_tokens": 10, "prompt_lookup_num_tokens": 4}),
    }
    expected = {name: generate(model, None, texts, **options) for name, (texts, options) in calls.items()}
    cache = LightKVCache(model, 300)
    for name, (texts, options) in calls.items():
        assert_same(generate(model, cache, texts, **options), expected[name])
        cache.kv.check()
        cache.reset()


@pytest.mark.parametrize("capacity", ["4", 1.5, True])
def test_a_capacity_that_is_no_integer_is_refused(capacity: Any, device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"capacity is .*; give an integer"):
        LightKVCache(make_model(LlamaConfig(**SMALL), device), capacity=capacity)


def test_latent_attention_is_refused_when_the_cache_is_made(device: torch.device) -> None:
    sizes = {name: size for name, size in SMALL.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    model = make_model(DeepseekV3Config(**sizes, n_routed_experts=4, n_group=1, topk_group=1), device)
    with pytest.raises(UnsupportedModel, match=r"layer 0 caches .* where its attention takes K and V as"):
        LightKVCache(model, capacity=100)
    assert not model._forward_hooks
