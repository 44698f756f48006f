"""Tests of models whose attention modules are adapted (`lightkv/integrations/model/adapters`): their texts are
those of transformers' own `generate`, and what the adapters change is proved and nothing else."""

import json
import shutil
from array import array
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from lightkv.errors import UnsupportedModel
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.model.adapters import adapt as adapt_module
from lightkv.integrations.model.adapters.adapt import FAMILIES, adapt
from lightkv.integrations.model.model_shape import ModelShape
from lightkv.integrations.model.probe import probe
from lightkv.router import LLM, EngineConfig, InvalidConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import assemble
from lightkv.router.model.info import model_info
from lightkv.router.model_files import resolve
from lightkv.router.simulate.admissions import make_simulated
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.triton_kernels.attention.variants import Alibi, Window
from tests.support.combinations import slow
from tests.support.served import starting
from tests.support.tiny_architectures import NUM_NEW, answers, own_answers, prompts, random_weights, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False}
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}
WIDE = {"hidden_size": 96}  # for 12 heads, which are no power of two

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "falcon-multi-query": ("falcon", {}),
    "falcon-grouped": ("falcon", GROUPED),
    "falcon-alibi": ("falcon", ALIBI),
    "stablelm": ("stablelm", {}),
    "gptj": ("gptj", {}),
    "gpt-neo": ("gpt_neo", {}),
    "nemotron": ("nemotron", {}),
}
# ALiBi, several queries' heads for one of K/V, rotary positions, and a table of positions.
SPREAD = ("bloom", "falcon-multi-query", "falcon-grouped", "gptj", "gpt-neo")
# Fields that change how a layer computes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom-12-heads": ("bloom", {"n_head": 12, **WIDE}),
    "bloom-residual-after-norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "mpt-12-heads": ("mpt", {"n_heads": 12, "d_model": 96}),
    "mpt-clipped-and-scaled": ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2}}),
    "falcon-bias": ("falcon", {"bias": True, "parallel_attn": False}),
    "falcon-every-head": ("falcon", {"multi_query": False}),
    "falcon-grouped-one-norm": ("falcon", {**GROUPED, "num_ln_in_parallel_attn": 1}),
    "falcon-parallel-alibi": ("falcon", {"alibi": True, "multi_query": True}),
    "gpt-neo-global": ("gpt_neo", {"attention_types": [[["global"], 4]]}),
    "gptj-whole-heads": ("gptj", {"rotary_dim": 8}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm-norms": ("stablelm", {"qk_layernorm": True}),
    "big-bird": ("big_bird", {"is_decoder": True, "attention_type": "original_full"}),
    "codegen": ("codegen", {}),
    "diffllama-every-head": ("diffllama", {"num_key_value_heads": 4}),
    "gpt-neox-japanese-whole-heads": ("gpt_neox_japanese", {"rotary_pct": 1.0}),
    "openai-gpt": ("openai-gpt", {}),
    "roformer-rotary-values": ("roformer", {"is_decoder": True, "rotary_value": True}),
    "xglm": ("xglm", {}),
}
# On a GPU, with heads of 32: all cases, and the variants that count positions or halve heads themselves.
GPU_CASES = (*CASES, "codegen", "diffllama-every-head", "xglm")
GPU_SIZES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 16},
    "diffllama-every-head": {"head_dim": 32},
    "gptj": {"rotary_dim": 16},
    "nemotron": {"head_dim": 32},
    "xglm": {"attention_heads": 4},
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)


def config_of(case: str, **changes: Any) -> PreTrainedConfig:
    name, fields = (CASES | VARIANTS)[case]
    small = tiny(name).to_dict()
    return type(tiny(name))(**(small | fields | changes))


def model_of(case: str, **changes: Any) -> PreTrainedModel:
    return random_weights(config_of(case, **changes))


@cache
def expected_of(case: str) -> list[list[int]]:
    return own_answers(model_of(case), prompts())


def make_llm(case: str, directory: Path, **settings: Any) -> LLM:
    """Saves a model and its tokenizer, and loads them as any model is loaded."""
    model_of(case).save_pretrained(directory)
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).save(str(directory / "tokenizer.json"))
    small = {"max_total_tokens": 400, "max_num_seqs": 4, "max_model_len": 100, "kv_dtype": "auto"}
    return LLM(EngineConfig(str(directory), device="cpu", dtype="float32", **(small | settings)))


def texts(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Returns the answers to `prompts()`, and how many tokens of each prompt were in the cache."""
    outputs = llm.generate(prompts(), GREEDY)
    llm.check()
    return [one.outputs[0].token_ids for one in outputs], [one.num_cached_tokens for one in outputs]


# --------------------------------------------------------------------------------
# Texts


@pytest.mark.parametrize("case", [*slow("mpt", "falcon-alibi", "stablelm", "nemotron"), *SPREAD])
def test_texts_are_those_of_transformers_in_chunks_of_7_and_after_prefix_hits(
    case: str, tmp_path: Path
) -> None:
    llm = make_llm(case, tmp_path, prefill_chunk=7)
    first, _ = texts(llm)
    again, num_cached = texts(llm)
    assert first == expected_of(case)
    assert again == expected_of(case)
    assert num_cached == [len(prompt) - 1 for prompt in prompts()]


@pytest.mark.parametrize(
    "case", [case if case == "bloom" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_texts_are_those_of_transformers_after_preemptions(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lightkv.router.llm.make_admission", lambda name, ttft_target: make_simulated("watermark", 0, 0)
    )
    num_tokens = 80 if case == "gpt-neo" else 104  # whose windows hold less
    llm = make_llm(case, tmp_path, prefill_chunk=None, max_total_tokens=num_tokens, max_num_seqs=5)
    assert texts(llm)[0] == expected_of(case)
    assert llm.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_texts_are_those_of_transformers_in_unlimited_chunks(case: str, fuse: bool, tmp_path: Path) -> None:
    llm = make_llm(case, tmp_path, prefill_chunk=None, fuse=fuse)
    assert texts(llm)[0] == expected_of(case)
    assert texts(llm)[0] == expected_of(case)


@pytest.mark.parametrize(
    "case",
    [case if case == "bloom-12-heads" else pytest.param(case, marks=pytest.mark.slow) for case in VARIANTS],
)
def test_fields_that_change_a_layer(case: str) -> None:
    for fuse in (True, False):
        assert answers(model_of(case), prompts(), prefill_chunk=7, fuse=fuse) == expected_of(case)


@pytest.mark.parametrize(
    "case",
    [case if case == "falcon-grouped" else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_int8_runs(case: str, tmp_path: Path) -> None:
    llm = make_llm(case, tmp_path, prefill_chunk=7, kv_dtype="int8-g8")
    first, _ = texts(llm)
    again, num_cached = texts(llm)
    assert first == again
    assert all(num_cached)
    own = [token for text in expected_of(case) for token in text]
    ours = [token for text in first for token in text]
    assert sum(a == b for a, b in zip(own, ours, strict=True)) >= len(own) / 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bloom", "falcon-grouped"])
def test_a_service_gives_the_texts_of_transformers(case: str, tmp_path: Path) -> None:
    source = resolve(EngineConfig.model, lambda line: None)
    config = config_of(case, vocab_size=json.loads((source / "config.json").read_text())["vocab_size"])
    directory = tmp_path / "model"
    random_weights(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    tokenizer = Tokenizer(directory)
    with starting(directory, tmp_path / "log", tmp_path / "s") as begin:
        served = begin("--max-model-len", "100", "--prefill-chunk", "7", "--kv-dtype", "auto").wait_ready()
        found = [served.complete("Once upon a time", NUM_NEW) for _ in range(2)]
    ids = tokenizer.encode("Once upon a time").tolist()
    (own,) = own_answers(random_weights(config), [ids])
    assert found == [tokenizer.decode(own)] * 2


@pytest.mark.parametrize("case", ["big-bird", "xglm"])
def test_a_step_may_have_more_tokens_than_a_text_has_positions(case: str, tmp_path: Path) -> None:
    """Both have a table of a text's length, which is not to be replaced: CUDA graphs read it."""
    model: Any = model_of(case, max_position_embeddings=52)
    expected = own_answers(model, prompts())
    model.save_pretrained(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    sizes = {"max_total_tokens": 400, "max_num_seqs": 5, "max_model_len": 52}
    llm = LLM(EngineConfig(str(tmp_path), device="cpu", dtype="float32", kv_dtype="auto", **sizes))
    assert texts(llm)[0] == expected


# --------------------------------------------------------------------------------
# What is changed in a model, and its proof


@pytest.mark.parametrize("case", [*CASES, "gpt-neox-japanese-whole-heads", "openai-gpt", "xglm"])
def test_an_adapted_model_computes_the_same_when_it_is_called_as_before(case: str) -> None:
    model, ids = model_of(case), torch.tensor([prompts()[1]])
    before = model(ids, use_cache=False).logits
    implementation = model.config._attn_implementation
    for _ in range(2):
        adapt(model)
        probe(model)
        assert torch.equal(model(ids, use_cache=False).logits, before)
        assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("case", ["bloom", "falcon-grouped", "gpt-neo", "mpt", "nemotron"])
def test_a_users_model_is_not_adapted(case: str) -> None:
    model = model_of(case)
    with pytest.raises(UnsupportedModel, match=r"AttentionInterface|takes no position_ids|keyword arguments"):
        CachedModel(model, 100)
    assert "forward" not in vars(model)
    assert own_answers(model, prompts()[:2]) == expected_of(case)[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", ["bloom", "falcon-alibi", "mpt"])
def test_a_difference_in_the_slopes_is_found(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(case).to(dtype)
    name = type(model).__name__
    family = FAMILIES[name]
    changed = replace(family, slopes=lambda model: family.slopes(model) * 2)
    monkeypatch.setitem(adapt_module.FAMILIES, name, changed)
    adapt(model)
    with pytest.raises(UnsupportedModel, match="lightkv's attention of layer 0 differs from its own by"):
        probe(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_window_that_is_larger_by_one_is_found(dtype: torch.dtype) -> None:
    model: Any = model_of("gpt-neo").to(dtype)
    adapt(model)
    layer = model.transformer.h[1].attn.attention
    assert probe(model).layers[1].options.of(Window) == Window(8)
    layer.config.window_size = 9  # the module's own mask stays as it was made
    with pytest.raises(UnsupportedModel, match="lightkv's attention of layer 1 differs from its own by"):
        probe(model)


@pytest.mark.parametrize("heads", [4, 12])
def test_slopes_are_those_of_transformers_to_the_bit(heads: int) -> None:
    """12 heads are no power of two."""
    sizes: dict[str, Any] = {"hidden_size": 8 * heads}
    bloom = model_of("bloom", n_head=heads, **sizes)
    mpt = model_of("mpt", n_heads=heads, d_model=8 * heads)
    falcon = model_of("falcon-alibi", num_attention_heads=heads, num_kv_heads=heads, **sizes)
    wanted = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    # Falcon rounds its slopes to bfloat16, and divides the bias by the root of the head dim.
    rounded = wanted.bfloat16().float() / 8**0.5
    of_mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    for model, expected in ((bloom, wanted), (mpt, of_mpt), (falcon, rounded)):
        adapt(model)
        for layer in probe(model).layers:
            bias = layer.options.of(Alibi)
            assert bias is not None
            assert bias.slopes.dtype == torch.float32
            assert torch.equal(bias.slopes, expected)


def test_a_model_that_names_no_context_needs_a_length(tmp_path: Path) -> None:
    """Bloom's configuration has no field for it; its checkpoints have one beside (seq_length)."""
    with pytest.raises(InvalidConfig, match="--max-model-len"):
        make_llm("bloom", tmp_path, max_model_len=None)
    config = config_of("bloom", seq_length=64)
    random_weights(config).save_pretrained(tmp_path)
    llm = LLM(EngineConfig(str(tmp_path), device="cpu", max_total_tokens=100, max_num_seqs=2))
    assert llm.info.limits.max_model_len == 64


@pytest.mark.parametrize("case", ["falcon-alibi", "gptj", "mpt", "stablelm"])
def test_the_sizes_are_known_without_weights(case: str, tmp_path: Path) -> None:
    random_weights(config_of(case)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()  # which has to exist, but is not read
    config = EngineConfig(str(tmp_path), device="cpu", max_total_tokens=100, max_num_seqs=2)
    info = model_info(config, tmp_path)
    shape = probe_of(case).spec
    assert (info["num_layers"], info["num_kv_heads"], info["k_dim"]) == (4, shape.num_kv_heads, shape.k_dim)


def probe_of(case: str) -> ModelShape:
    model = model_of(case)
    adapt(model)
    return probe(model)


# --------------------------------------------------------------------------------
# On a GPU


def gpu_model(case: str, dtype: torch.dtype) -> PreTrainedModel:
    return model_of(case, hidden_size=128, **GPU_SIZES.get(case, {})).to("cuda", dtype)


def run_on_gpu(model: PreTrainedModel, graphs: bool, prompts_in_graphs: bool) -> list[list[int]]:
    config = EngineConfig(
        device="cuda",
        max_num_seqs=4 if prompts_in_graphs else 1,
        max_total_tokens=400,
        max_model_len=100,
        prefill_chunk=16,
        cuda_graphs=graphs,
        kv_dtype="auto",
    )
    runner, info = assemble(model, config, lambda line: None)
    if runner._graphs is not None and not prompts_in_graphs:
        runner._graphs._prompts.clear()
    engine = LocalEngine(make_scheduler(info), runner)
    for idx, prompt in enumerate(prompts()):
        engine.add(Request(str(idx), array("i", prompt).tobytes(), GREEDY, seed=0))
    found: list[list[int]] = [[] for _ in prompts()]
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            if event.token is not None:
                found[int(event.request_id)].append(event.token)
    engine.check()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_graphs_give_the_texts_of_eager_steps_in_bf16(case: str) -> None:
    """Requests run one at a time, prompts eagerly: nothing is padded, and even bf16 rounds in the same way."""
    model = gpu_model(case, torch.bfloat16)
    eager, captured = (run_on_gpu(model, graphs, prompts_in_graphs=False) for graphs in (False, True))
    assert captured == eager


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_graphs_give_the_texts_of_transformers(case: str) -> None:
    """A near-tie may be decided differently when a padded batch uses another matrix kernel."""
    model = gpu_model(case, torch.float32)
    expected = [
        model.generate(
            torch.tensor([prompt], device="cuda"), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]
    found = run_on_gpu(model, graphs=True, prompts_in_graphs=True)
    assert sum(map(list.__eq__, found, expected)) >= len(expected) - 1
