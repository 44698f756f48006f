"""Encoder-decoders through Hugging Face's generate: the same texts as with its own cache, and the encoder's K/V
held once for all beams of a request."""

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    EncoderDecoderCache,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation import GenerationMixin

from lightkv import OutOfRows, OutOfTokens, SequenceTooLong
from lightkv.errors import UnsupportedModel
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.integrations.model.hf_model import switch_attention
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from tests.support.combinations import each_value, slow

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 97
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
LAYERS = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
WHISPER = {
    **LAYERS,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 48,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
T5 = {"d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MAKERS: dict[str, Any] = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, d_model=32, **T5, **ENDS)),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY,
            tie_word_embeddings=False,
            d_model=64,
            max_position_embeddings=64,
            **LAYERS,
            **ENDS,
        )
    ),
    "whisper": lambda: WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=VOCABULARY, d_model=64, **WHISPER, **ENDS)
    ),
}
CAPACITY = 400
ROWS = [[5, 6, 7, 8, 9], [11, 40, 3, 90, 22, 61, 17], [4, 33, 2]]
WHISPER_WIDTH = 20
NEW = 12
# Without the rule against pairs that repeat, models this small say the same token again and again.
GREEDY: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": NEW,
    "eos_token_id": None,
    "no_repeat_ngram_size": 2,
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "end": {**GREEDY, "max_new_tokens": 30, "eos_token_id": list(range(3, VOCABULARY, 6))},
    "beams": {**GREEDY, "num_beams": 4, "num_return_sequences": 2},
    "beams-end": {**GREEDY, "num_beams": 3, "eos_token_id": [3, 50, 20], "early_stopping": True},
    "sampled": {"do_sample": True, "max_new_tokens": NEW, "eos_token_id": None, "temperature": 0.8},
    "several": {"do_sample": True, "max_new_tokens": NEW, "eos_token_id": None, "num_return_sequences": 3},
    "beam-sampled": {"do_sample": True, "max_new_tokens": 8, "num_beams": 3},
}


def make_model(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return random_model(MAKERS[name](), device, dtype)


def random_model(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Gives a model random weights."""
    for name_of, parameter in model.named_parameters():  # large, so that some tokens are much likelier
        if not ("norm" in name_of and name_of.endswith("weight")):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device, dtype).eval()


def inputs(name: str, rows: list[list[int]], model: PreTrainedModel, left: bool = False) -> dict[str, Any]:
    """Returns the encoder's input: texts with padding, or random features, of which each row has its own."""
    if name == "whisper":
        generator = torch.Generator().manual_seed(len(rows))
        features = torch.randn(len(rows), 8, 2 * WHISPER_WIDTH, generator=generator)
        return {"input_features": features.to(model.device, model.dtype)}
    width = max(map(len, rows))
    padding = [[0] * (width - len(row)) for row in rows]
    ids = [pad + row if left else row + pad for row, pad in zip(rows, padding, strict=True)]
    mask = [
        [0] * len(pad) + [1] * len(row) if left else [1] * len(row) + [0] * len(pad)
        for row, pad in zip(rows, padding, strict=True)
    ]
    tensors = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return {name: tensor.to(model.device) for name, tensor in tensors.items()}


def num_tokens(name: str, rows: list[list[int]]) -> int:
    """Returns how many tokens the encoder has of these rows, without their padding."""
    return len(rows) * WHISPER_WIDTH if name == "whisper" else sum(map(len, rows))


def generate(model: PreTrainedModel, cache: Any, given: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(1)
    # Whisper's own generate prepares the features of long recordings; it is tested below.
    return GenerationMixin.generate(
        model,  # type: ignore[arg-type]
        **given,
        past_key_values=cache,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **options,
    )


def assert_same(found: Any, expected: Any, tolerance: float = 1e-3) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    if "sequences_scores" in expected:
        torch.testing.assert_close(
            found.sequences_scores, expected.sequences_scores, rtol=tolerance, atol=tolerance
        )


def assert_empty(cache: LightKVCache) -> None:
    kv = cache.kv
    assert (kv.num_free, kv.num_cached, kv.num_held, kv.num_open) == (kv.capacity, 0, 0, 0)
    assert (cache.num_encoder_tokens, cache.get_seq_length(), cache.num_columns) == (0, 0, 0)
    kv.check()


SLOW = ("beams-end", "several", "beam-sampled")  # each is like two of the others


@each_value(name=list(MAKERS), call=[*(call for call in CALLS if call not in SLOW), *slow(*SLOW)])
def test_results_are_those_of_transformers_own_cache(name: str, call: str, device: torch.device) -> None:
    model, options = make_model(name, device), CALLS[call]
    cache = LightKVCache(model, CAPACITY)
    assert isinstance(cache, EncoderDecoderCache)
    # The second time with the same cache, and other rows: a batch of one.
    for rows in (ROWS, ROWS[:1]):
        given = inputs(name, rows, model)
        expected = generate(model, None, given, **options)
        assert rows is not ROWS or len(expected.sequences.unique()) > 4
        found = generate(model, cache, given, **options)
        assert_same(found, expected)
        assert found.past_key_values is cache
        per_request = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
        assert cache.num_encoder_tokens == num_tokens(name, rows)
        num_steps = cache.num_columns
        assert cache.kv.num_held <= num_tokens(name, rows) + len(rows) * per_request * num_steps
        if call == "greedy":
            assert cache.kv.num_held == num_tokens(name, rows) + len(rows) * num_steps
            assert (num_steps, cache.kv.num_open) == (NEW, 2 * len(rows))
        cache.kv.check()
    cache.reset()
    assert_empty(cache)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_on_the_left_and_rows_that_are_alike(name: str, device: torch.device) -> None:
    """Rows beside each other with the same input hold its K/V once, whatever request they are of."""
    model = make_model(name, device)
    given = inputs(name, [ROWS[0], ROWS[0], ROWS[1]], model, left=True)
    expected = generate(model, None, given, **CALLS["beams"])
    cache = LightKVCache(model, CAPACITY)
    assert_same(generate(model, cache, given, **CALLS["beams"]), expected)
    assert cache.num_encoder_tokens == len(ROWS[0]) + len(ROWS[1])


@pytest.mark.parametrize("name", MAKERS)
def test_the_pool_at_every_step_of_a_beam_search(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the beams read of the encoder is allocated once, and written once in every layer."""
    model = make_model(name, device)
    cache = LightKVCache(model, CAPACITY)
    held: list[tuple[int, int]] = []
    written: list[int] = []
    allocated: list[int] = []
    write = cache.kv.memory.pool.write

    def count(layer_idx: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        written.append(len(slots))
        held.append((cache.num_encoder_tokens, cache.kv.num_held))
        write(layer_idx, slots, k, v)

    monkeypatch.setattr(cache.kv.memory.pool, "write", count)
    cache.kv.on_edits = lambda edits, kept: allocated.extend(
        sum(edit.counts) for edit in edits if hasattr(edit, "counts")
    )
    generate(model, cache, inputs(name, ROWS, model), **CALLS["beams"])
    tokens, beams = num_tokens(name, ROWS), 4 * len(ROWS)
    # The beams of a request begin with the same token, which they hold once.
    assert sorted(set(allocated)) == sorted({*held_lengths(name), 1, beams})
    assert sum(allocated) == tokens + len(ROWS) + (NEW - 1) * beams
    assert sum(written) == 2 * sum(allocated)  # in two layers
    assert {encoder for encoder, _ in held} == {tokens}
    assert held[0][1] == tokens + len(ROWS)
    assert all(all_held <= tokens + NEW * beams for _, all_held in held)


def held_lengths(name: str) -> list[int]:
    return [WHISPER_WIDTH] if name == "whisper" else [len(row) for row in ROWS]


def test_the_encoder_alone_takes_nothing(device: torch.device) -> None:
    model = make_model("t5", device)
    cache = LightKVCache(model, CAPACITY)
    given = inputs("t5", ROWS, model)
    encoded = model.get_encoder()(**given)
    assert_empty(cache)
    # Its output, given instead of the input, is the same.
    expected = generate(model, None, given, **GREEDY)
    mask = {"attention_mask": given["attention_mask"]}
    assert_same(generate(model, cache, mask | {"encoder_outputs": encoded}, **GREEDY), expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"return_dict_in_generate": True}], ids=str)
def test_whispers_own_generate(options: dict[str, Any], device: torch.device) -> None:
    model: Any = make_model("whisper", device)
    given = inputs("whisper", ROWS, model)
    call = {"max_new_tokens": NEW, "do_sample": False, **options}
    expected = model.generate(**given, **call)
    cache = LightKVCache(model, CAPACITY)
    found = model.generate(**given, past_key_values=cache, **call)
    if options.get("return_dict_in_generate"):
        for half in ("self_attention_cache", "cross_attention_cache"):
            ours, theirs = (getattr(one["past_key_values"], half) for one in (found, expected))
            for a, b in zip(ours.layers, theirs.layers, strict=True):
                torch.testing.assert_close(a.keys, b.keys, rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(a.values, b.values, rtol=1e-3, atol=1e-3)
        found, expected = found["sequences"], expected["sequences"]
    assert torch.equal(found, expected)
    assert cache.num_encoder_tokens == len(ROWS) * WHISPER_WIDTH


@pytest.mark.parametrize("name", ["t5", *slow("bart"), "whisper"])
def test_prompts_of_the_decoder_with_padding(name: str, device: torch.device) -> None:
    model = make_model(name, device)
    prompts = torch.tensor([[0, 0, 3, 5], [3, 7, 8, 9], [0, 3, 6, 6]], device=device)
    given = inputs(name, ROWS, model)
    given |= {"decoder_input_ids": prompts, "decoder_attention_mask": (prompts != 0).long()}
    cache = LightKVCache(model, CAPACITY)
    for call in ("greedy", "beams"):
        expected = generate(model, None, given, **CALLS[call])
        assert_same(generate(model, cache, given, **CALLS[call]), expected)
    cache.reset()
    assert_empty(cache)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant": True}], ids=str)
def test_assisted_decoding(options: dict[str, Any], device: torch.device) -> None:
    model = make_model("t5", device)
    if options.pop("assistant", False):
        options["assistant_model"] = make_model("t5", device)
        torch.nn.init.normal_(options["assistant_model"].lm_head.weight, std=0.3)
    given = inputs("t5", ROWS[:1], model)
    expected = generate(model, None, given, **GREEDY)
    cache = LightKVCache(model, CAPACITY)
    assert torch.equal(generate(model, cache, given, **GREEDY, **options).sequences, expected.sequences)
    cache.reset()
    assert_empty(cache)


@each_value(name=list(MAKERS), kv_format=["int8", "int4"])
def test_quantised(name: str, kv_format: str, device: torch.device) -> None:
    model = make_model(name, device)
    given = inputs(name, ROWS, model)
    cache = LightKVCache(model, CAPACITY, kv_format=KVFormat.parse(kv_format))
    found = generate(model, cache, given, **CALLS["beams"])
    assert found.sequences.shape == (6, NEW + 1)
    expected = generate(model, None, given, **CALLS["beams"])
    if kv_format == "int8":  # the first step has the same prompt
        torch.testing.assert_close(found.logits[0], expected.logits[0], rtol=0.1, atol=0.2)
    cache.reset()
    assert_empty(cache)


def test_rows_are_selected_and_repeated(device: torch.device) -> None:
    """A request that no row continues gives its encoder's tokens back at once."""
    model: Any = make_model("t5", device)
    given = inputs("t5", ROWS, model)
    cache = LightKVCache(model, CAPACITY)
    ids = torch.tensor([[3, 5], [3, 6], [3, 7]], device=device)
    with torch.no_grad():
        full = model(**given, decoder_input_ids=torch.cat((ids, ids[:, :1]), 1)).logits[:, -1]
        encoded = model.get_encoder()(**given)[0]
        model(encoder_outputs=(encoded,), attention_mask=given["attention_mask"], decoder_input_ids=ids,
              past_key_values=cache)  # fmt: skip
        order = torch.tensor([2, 0], device=device)
        cache.batch_select_indices(order)
        assert cache.num_encoder_tokens == len(ROWS[2]) + len(ROWS[0])
        assert cache.kv.num_held == cache.num_encoder_tokens + 2 * 2
        cache.batch_repeat_interleave(2)
        assert cache.num_encoder_tokens == len(ROWS[2]) + len(ROWS[0])
        order = order.repeat_interleave(2)
        output = model(
            encoder_outputs=(encoded[order],),
            attention_mask=given["attention_mask"][order],
            decoder_input_ids=ids[order, :1],
            past_key_values=cache,
        )
    torch.testing.assert_close(output.logits[:, -1], full[order], rtol=1e-3, atol=1e-3)
    assert cache.kv.num_held == cache.num_encoder_tokens + 2 * 2 + 4
    cache.kv.check()
    cache.crop(-3)  # the whole text, but not what is read of the encoder
    assert cache.kv.num_held == cache.num_encoder_tokens
    cache.reset()
    assert_empty(cache)


def test_a_call_that_fails_leaves_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_model("bart", device)
    given = inputs("bart", ROWS, model)
    cache = LightKVCache(model, CAPACITY)
    expected = generate(model, None, given, **CALLS["beams"])
    last = model.get_decoder().layers[1]
    for failing in (0, 4):
        calls = iter(range(100))

        def fail(module: Any, args: Any, calls: Any = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise RuntimeError("the device is gone")

        handle = last.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="gone"):
            generate(model, cache, given, **CALLS["beams"])
        handle.remove()
        with pytest.raises(ValueError, match=r"call reset\(\)"):
            model(**given, decoder_input_ids=torch.tensor([[3]] * 3, device=device), past_key_values=cache)
        cache.reset()
        assert_empty(cache)
    assert_same(generate(model, cache, given, **CALLS["beams"]), expected)


def test_pools_that_are_too_small(device: torch.device) -> None:
    model = make_model("t5", device)
    given = inputs("t5", ROWS, model)
    tokens = num_tokens("t5", ROWS)
    for capacity in (tokens - 1, tokens + 2):  # the encoder's tokens do not fit, or the first of the decoder
        cache = LightKVCache(model, capacity)
        with pytest.raises(OutOfTokens):
            generate(model, cache, given, **GREEDY)
        assert_empty(cache)
    cache = LightKVCache(model, tokens + 3 * NEW)
    generate(model, cache, given, **GREEDY)
    assert cache.kv.num_free == 0
    cache = LightKVCache(model, CAPACITY, max_sequences=3)
    with pytest.raises(OutOfRows):
        generate(model, cache, given, **CALLS["beams"])
    assert_empty(cache)
    assert_same(generate(model, cache, given, **GREEDY), generate(model, None, given, **GREEDY))
    cache = LightKVCache(model, CAPACITY, max_entries=6)
    with pytest.raises(SequenceTooLong):
        generate(model, cache, given, **GREEDY)
    assert_empty(cache)


def test_what_cannot_run_is_refused(device: torch.device) -> None:
    model: Any = make_model("bart", device)
    given = inputs("bart", ROWS, model)
    cache = LightKVCache(model, CAPACITY)
    ids = torch.tensor([[3, 5]] * 3, device=device)
    blank = given | {"attention_mask": given["attention_mask"].clone()}
    blank["attention_mask"][1] = 0
    with pytest.raises(ValueError, match=r"\[5, 0, 3\] tokens in the encoder's mask"):
        model(**blank, decoder_input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match="token ids"):
        model(**given, decoder_inputs_embeds=torch.zeros(3, 1, 64, device=device), past_key_values=cache)
    with pytest.raises(ValueError, match="without an encoder's output"):
        model.get_decoder()(input_ids=ids, past_key_values=cache)
    assert_empty(cache)
    model(**given, decoder_input_ids=ids, past_key_values=cache)
    other = inputs("bart", [[*row, 7] for row in ROWS], model)
    with pytest.raises(ValueError, match="3 rows and 8 columns, where the batch reads one of 3 rows and 7"):
        model(**other, decoder_input_ids=ids[:, :1], past_key_values=cache)
    with pytest.raises(OutOfRows):
        cache.batch_repeat_interleave(6)
    cache.reset()
    assert_empty(cache)
    switch_attention(model, "lightkv")
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model.get_decoder()(input_ids=ids, encoder_hidden_states=torch.zeros(3, 2, 64), past_key_values=cache)
    assert_empty(cache)


def test_a_decoder_of_another_shape_is_refused(device: torch.device) -> None:
    """Its cross attention has heads of its own."""
    model: Any = make_model("bart", device)
    for layer in model.get_decoder().layers:
        layer.encoder_attn.head_dim, layer.encoder_attn.num_heads = 8, 8
    with pytest.raises(UnsupportedModel, match="layers' K/V differ"):
        LightKVCache(model, CAPACITY)
    assert not model.get_decoder()._forward_hooks


def test_a_model_that_replaces_the_cache_is_refused() -> None:
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32,
                             "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
                             "num_key_value_heads": 2}  # fmt: skip
    decoder = {**small, "cross_attention_hidden_size": 32}
    model = transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(encoder=small, decoder=decoder, vocab_size=VOCABULARY)
    )
    with pytest.raises(UnsupportedModel, match="puts a cache of its own in place"):
        LightKVCache(model, CAPACITY)


T5_LIKE = {"d_model": 32, **T5, **ENDS}
BART_LIKE = {"d_model": 64, **LAYERS, **ENDS, "forced_eos_token_id": None}
PROPHET = {
    "hidden_size": 64,
    **{f"num_{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"num_{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
}
OTHERS: dict[str, dict[str, Any]] = {
    "MT5": T5_LIKE,
    "UMT5": T5_LIKE,
    "LongT5": T5_LIKE | {"local_radius": 4},
    **dict.fromkeys(("MBart", "Pegasus", "Blenderbot", "M2M100", "Marian"), BART_LIKE),
    "LED": BART_LIKE | {"attention_window": [4, 4], "max_encoder_position_embeddings": 64},
    "ProphetNet": {**PROPHET, **ENDS},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str, device: torch.device) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, **OTHERS[family])
    model = random_model(transformers.AutoModelForSeq2SeqLM.from_config(config), device)
    cache = LightKVCache(model, CAPACITY)
    for left in (False, True):
        given = inputs("text", ROWS, model, left)
        for call in ("greedy", "beams"):
            expected = generate(model, None, given, **CALLS[call])
            assert_same(generate(model, cache, given, **CALLS[call]), expected)
            assert len(expected.sequences.unique()) > 4
            assert cache.num_encoder_tokens == num_tokens("text", ROWS)


def test_an_unused_cache_is_freed_with_its_hooks(device: torch.device) -> None:
    model = make_model("t5", device)
    cache = LightKVCache(model, CAPACITY)
    generate(model, cache, inputs("t5", ROWS, model), **GREEDY)
    found = weakref.ref(cache)
    del cache
    gc.collect()
    assert found() is None
    assert not model.get_decoder()._forward_pre_hooks


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["greedy", "beams", "several"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", MAKERS)
def test_half_precision(name: str, dtype: torch.dtype, call: str, device: torch.device) -> None:
    """The logits of the first step are transformers', up to rounding, and the first token is the same. Later
    tokens are not compared: scores of two tokens may be equal in these types, and then either may follow."""
    model, options = make_model(name, device, dtype), CALLS[call]
    given = inputs(name, ROWS, model)
    cache = LightKVCache(model, CAPACITY)
    expected = generate(model, None, given, **options)
    found = generate(model, cache, given, **options)
    assert cache.num_encoder_tokens == num_tokens(name, ROWS)
    scale = expected.logits[0].float().abs().max().item()
    torch.testing.assert_close(
        found.logits[0].float(), expected.logits[0].float(), rtol=0, atol=scale * 8 * torch.finfo(dtype).eps
    )
    assert torch.equal(found.sequences[:, :2], expected.sequences[:, :2])
    cache.reset()
    assert_empty(cache)
