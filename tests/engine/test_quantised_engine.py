"""Engines whose pool holds K and V in 8 and 4 bits: texts, the tokens that fit, and lives with faults."""

import random
from array import array
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.integrations.model.probe import probe
from lightkv.ledger import TokenLedger
from lightkv.memory import kv_pool
from lightkv.memory.kv_pool import PoolPlan
from lightkv.router import EngineConfig, InvalidConfig, SamplingParams
from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import RunnerInfo, TokenEvent
from lightkv.router.model.build import assemble
from lightkv.router.model.parts import AppliedPlan, Sampling
from lightkv.router.model.runner import ModelRunner
from lightkv.router.model.sizes import EngineSizes
from lightkv.router.simulate.admissions import SimulatedAdmission
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import apply_hadamard, dequantise, quantise
from tests.support.combinations import slow
from tests.support.model_worker import assert_idle
from tests.support.scheduled import run, tokens_of
from tests.support.tiny_models import VOCABULARY, tiny_llama

CPU = torch.device("cpu")
NAMES = ("int8", "int4", "int8-g8")


class QuantisedLayer(DynamicLayer):
    """A layer of transformers' own cache that keeps what K and V become by quantising them."""

    def __init__(self, kv_format: KVFormat) -> None:
        super().__init__()
        self.kv_format = kv_format

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        elements = self.kv_format.elements
        for x in (key_states, value_states):
            if elements.is_quantised:
                x = dequantise(*quantise(x, elements, self.kv_format.scale_dtype), elements)
                x = apply_hadamard(x) if elements.has_hadamard else x
            found.append(x)
        return super().update(found[0], found[1], *args, **kwargs)


def their_text(model: PreTrainedModel, prompt: list[int], kv_format: KVFormat, num: int) -> list[int]:
    """Returns transformers' greedy text on K and V that are quantised and dequantised."""
    cache = DynamicCache()
    cache.layers = [QuantisedLayer(kv_format.of_layer(idx)) for idx in range(model.config.num_hidden_layers)]
    cache.layer_class_to_replicate = None
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(  # type: ignore[operator]
            ids,
            past_key_values=cache,
            max_new_tokens=num,
            min_new_tokens=num,
            do_sample=False,
            pad_token_id=0,
        )
    text: list[int] = made[0, len(prompt) :].tolist()
    return text


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, array("i", prompt).tobytes(), params, seed=1)


def build(
    config: EngineConfig, lengths: OutputLengths | None = None
) -> tuple[LocalEngine, ModelRunner, RunnerInfo]:
    runner, info = assemble(tiny_llama(CPU), config, lambda line: None)
    if lengths is None:
        return LocalEngine(make_scheduler(info), runner), runner, info
    ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
    admission = SimulatedAdmission(lengths, guarantees=False, reserve=0.03)
    return LocalEngine(Scheduler(ledger, info.limits, admission=admission), runner), runner, info


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(3, 40))] for _ in range(num)]


@pytest.mark.parametrize(("name", "skipped"), [("int8", ""), ("int4", "0"), ("int8-g8", "")])
def test_the_text_is_that_of_the_same_dequantised_values(name: str, skipped: str) -> None:
    """Prompts in chunks, several requests at once, and prefixes that are hit, too."""
    config = EngineConfig(
        device="cpu", kv_dtype=name, kv_skip_layers=skipped, max_total_tokens=400, prefill_chunk=16
    )
    engine, runner, info = build(config)
    assert (info.kv_dtype, info.kv_type, info.skipped_layers) == (name, name, config.skipped_layers)
    assert info.bytes_per_token == runner._parts.memory.pool.spec.bytes_per_token
    asked = prompts(5)
    asked.append([*asked[0], 7, 8, 9])
    events = []
    for i, prompt in enumerate(asked):
        engine.add(request(str(i), prompt, 12))
        events += engine.step()
    events += run(engine)
    model, chosen = tiny_llama(CPU), KVFormat.parse(name, config.skipped_layers)
    for i, prompt in enumerate(asked):
        assert tokens_of(events, str(i)) == their_text(model, prompt, chosen, 12)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_both_caches_of_transformers_models_take_a_format(name: str) -> None:
    chosen, (prompt,) = KVFormat.parse(name), prompts(1)
    expected = their_text(tiny_llama(CPU), prompt, chosen, 10)
    model = tiny_llama(CPU)
    cache = LightKVCache(model, 100, kv_format=chosen)
    output = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), past_key_values=cache, max_new_tokens=10, min_new_tokens=10, do_sample=False
    )
    assert output[0, len(prompt) :].tolist() == expected
    lm = CachedModel(tiny_llama(CPU), 100, kv_format=chosen)
    sequence, logits = lm.prefill(prompt)
    found: list[int] = []
    for _ in range(10):
        found.append(int(logits.argmax()))
        (logits,) = lm.decode([sequence], found[-1:])
    assert found == expected
    assert lm.cache.memory.pool.spec.format == chosen
    with pytest.raises(ValueError, match="choose another format"):
        CachedModel(tiny_llama(CPU), 100, kv_format=KVFormat.parse("int8-g12"))


def admitted(name: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[PoolPlan, int, int]:
    """Returns the pool of a format in so many bytes, its bytes a token, and how many requests of 24 tokens it
    admits at once."""
    model = tiny_llama(CPU)
    sizes = EngineSizes(EngineConfig(device="cpu", kv_dtype=name, max_num_seqs=256), CPU, model.config)
    shape = sizes.with_format(probe(model))
    free = 4 * (num_bytes + sizes.step_bytes(shape))  # a CPU's pool takes a quarter at most
    monkeypatch.setattr(kv_pool, "free_bytes", lambda device: free)
    pool, limits = sizes.memory(shape).pool, sizes.limits
    ledger = TokenLedger(pool.num_tokens, limits.max_num_seqs, limits.max_model_len)
    scheduler = Scheduler(ledger, limits)
    for i in range(limits.max_num_seqs):
        scheduler.add(request(str(i), [3, 3 + i % 90, 3 + i // 90, 3], 21))  # the last token needs no slot
    scheduler.plan()
    return pool, shape.spec.bytes_per_token, scheduler.num_running


@pytest.mark.parametrize("name", NAMES)
def test_the_same_memory_holds_and_admits_more_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 241 * 2 * 2 * 32 * 4  # of 240 tokens in float32, and slot 0
    plain, plain_bytes, plain_running = admitted("auto", num_bytes, monkeypatch)
    more, fewer_bytes, running = admitted(name, num_bytes, monkeypatch)
    assert (plain.num_tokens, plain_running) == (240, 10)
    assert more.num_slots == 241 * plain_bytes // fewer_bytes
    assert more.num_bytes <= num_bytes
    assert f"at {fewer_bytes} bytes a token" in more.why
    assert running >= plain_running * plain_bytes // fewer_bytes - 1
    assert running <= more.num_tokens // 21  # prompts may share their first token


@pytest.mark.parametrize("name", ["int8", *slow("int4")])
def test_a_life_with_preemptions_aborts_and_failed_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer that ends by itself is the one that the request gets alone."""
    lengths = OutputLengths()
    for _ in range(OutputLengths.num_recent):
        lengths.observe(4)
    config = EngineConfig(device="cpu", kv_dtype=name, max_total_tokens=150, max_num_seqs=8, prefill_chunk=16)
    engine, runner, _ = build(config, lengths)
    rng, compute, num_failed = random.Random(1), runner._forward, 0

    def failing(applied: AppliedPlan) -> Sampling:
        nonlocal num_failed
        if rng.random() < 0.02:
            num_failed += 1
            raise RuntimeError("a failed step")
        return compute(applied)

    monkeypatch.setattr(runner, "_forward", failing)
    asked, events, added = prompts(30, seed=2), list[TokenEvent](), 0
    while added < len(asked) or engine.has_work:
        if added < len(asked) and rng.random() < 0.4:
            engine.add(request(str(added), asked[added], rng.randint(5, 40)))
            added += 1
        if added and rng.random() < 0.02:
            engine.abort(str(rng.randrange(added)))
        events += engine.step()
    engine.check()
    assert_idle(engine)
    assert engine.stats().num_preemptions > 3
    ended = [event.request_id for event in events if event.finish_reason == "length"]
    assert len(ended) > 10
    assert num_failed
    alone, _, _ = build(EngineConfig(device="cpu", kv_dtype=name, max_total_tokens=200))
    for name_of in ended[:6]:
        found = tokens_of(events, name_of)
        alone.add(request(name_of, asked[int(name_of)], len(found)))
        assert tokens_of(run(alone), name_of) == found


@pytest.mark.parametrize(
    ("name", "skipped", "told"),
    [
        ("int8-g12", "", r"--kv-dtype int8-g12: heads of 16 K dims .* choose another format"),
        ("int8", "0,2", r"--kv-skip-layers 0,2: layers \[2\] .* the model has 2"),
        ("fp8-static", "", r"no scales for layer 0; choose --kv-dtype int8"),
    ],
)
def test_a_format_that_does_not_fit_the_model_is_a_wrong_setting(name: str, skipped: str, told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        build(EngineConfig(device="cpu", kv_dtype=name, kv_skip_layers=skipped, max_total_tokens=50))


def test_a_format_that_the_kernels_do_not_take_is_refused_before_the_first_step() -> None:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)).eval()
    settings: dict[str, Any] = {"device": "cpu", "kv_dtype": "int8-g12", "max_total_tokens": 50}
    told = "groups of 12 elements .*the torch backend"
    with pytest.raises(InvalidConfig, match=f"--kv-dtype int8-g12: {told}"):
        assemble(model, EngineConfig(attention_backend="triton", **settings), lambda line: None)
    with pytest.raises(ValueError, match=told):
        CachedModel(model, 50, backend="triton", kv_format=KVFormat.parse("int8-g12"))
    assert CachedModel(model, 50, backend="torch", kv_format=KVFormat.parse("int8-g12")).cache.capacity == 50
    skipping = EngineConfig(attention_backend="triton", kv_skip_layers="0,1", **settings)
    assert assemble(model, skipping, lambda line: None)[1].capacity == 50


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"kv_dtype": "int9"}, r"--kv-dtype: 'int9' is no K/V format; choose one of auto, int8"),
        ({"kv_skip_layers": "0;1"}, r"--kv-skip-layers is '0;1'; give layers"),
        ({"kv_skip_layers": "-1"}, "give layers, counted from 0"),
        ({"kv_skip_layers": "1,"}, "give layers, counted from 0"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        EngineConfig(**settings)
    assert EngineConfig(kv_skip_layers=" 3, 0,3").skipped_layers == (0, 3)
