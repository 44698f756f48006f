"""Hugging Face models on lightkv's attention, compared with their own forward pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from lightkv import KVSpec
from lightkv.attention import AttentionOptions, Batch, LayerShape, Step, make_backends
from lightkv.errors import UnsupportedModel
from lightkv.integrations.model import model_shape
from lightkv.integrations.model.hf_model import bind, forward, undo_binding
from lightkv.integrations.model.probe import probe
from lightkv.memory.kv_memory import KVMemory
from lightkv.router.model.model_config import position_limit
from lightkv.triton_kernels.attention.variants import Chunk, SinkLogits, Softcap, Window
from tests.support.combinations import slow
from tests.support.eager_models import SMALL, VOCABULARY, make_model

PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
WINDOWED = {**SMALL, "sliding_window": 6}
MIXED = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA4 = Llama4TextConfig(
    **SMALL,
    attention_chunk_size=8,
    no_rope_layers=[1, 0],
    floor_scale=4,
    num_local_experts=2,
    intermediate_size_mlp=48,
)

CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-window": Qwen2Config(**MIXED, use_sliding_window=True),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**WINDOWED),
    "phi3": Phi3Config(**WINDOWED),
    "gemma2": Gemma2Config(**MIXED, query_pre_attn_scalar=24, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**MIXED, query_pre_attn_scalar=24),
    "gpt-oss": GptOssConfig(**MIXED, num_local_experts=2, num_experts_per_tok=1),
    "llama4": LLAMA4,
}


@torch.no_grad()
def assert_packed_equals_own_forward(
    config: PreTrainedConfig, name: str, steps: list[tuple[list[int], list[int], int]], device: torch.device
) -> None:
    """Runs `steps` (rows, counts, num_prefills) packed, and compares every token's logits with the model's."""
    model = make_model(config, device)
    shape = probe(model)
    total: dict[int, int] = {}
    for rows, counts, _ in steps:
        total.update({row: total.get(row, 0) + count for row, count in zip(rows, counts, strict=True)})
    tokens = {row: torch.randint(3, VOCABULARY, (length,), device=device) for row, length in total.items()}
    expected = {row: model(ids[None], use_cache=False).logits[0] for row, ids in tokens.items()}

    lengths = dict.fromkeys(total, 0)
    memory = KVMemory(shape.spec, 200, 4, 64, device)
    for layer_idx in range(shape.spec.num_layers):
        memory.pool.kv(layer_idx)[1:] = float("nan")
    free = (1 + torch.randperm(199)).to(device, torch.int32)
    backends = make_backends(name, device, shape.layers)
    bind(model)
    for rows, counts, num_prefills in steps:
        starts = [lengths[row] for row in rows]
        entries = torch.from_numpy(memory.table.entries(rows, starts, counts)).to(device)
        memory.table.req_to_token.view(-1).index_copy_(0, entries, free[: len(entries)])
        free = free[len(entries) :]
        step = Step.of(Batch.of(rows, starts, counts, num_prefills), memory)
        parts = [(row, start, start + n) for row, start, n in zip(rows, starts, counts, strict=True)]
        input_ids = torch.cat([tokens[row][start:end] for row, start, end in parts])
        wanted = torch.arange(len(input_ids), device=device).flip(0)  # in another order than the tokens
        logits = forward(model, input_ids, step, backends, wanted).flip(0)
        own = torch.cat([expected[row][start:end] for row, start, end in parts])
        torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
        lengths.update((row, end) for row, _, end in parts)
    assert lengths == total


STEPS = [
    ([1, 2], [9, 4], 2),
    ([3, 1, 2], [13, 7, 1], 2),
    ([1, 2, 3], [1, 1, 1], 0),
    ([2, 3, 1], [5, 1, 1], 1),
    ([3, 2, 1], [1, 1, 1], 0),
]
SHORT_STEPS = [([1, 2], [5, 2], 2), ([3, 1, 2], [3, 2, 1], 2), ([1, 2, 3], [1, 1, 1], 0)]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_forward_on_torch(name: str, device: torch.device) -> None:
    assert_packed_equals_own_forward(CONFIGS[name], "torch", STEPS, device)


@pytest.mark.parametrize("name", ["llama", *slow("gemma2")])
@pytest.mark.parametrize("steps", [SHORT_STEPS, *slow(STEPS)], ids=len)
def test_packed_forward_on_triton(name: str, steps: Any, device: torch.device) -> None:
    assert_packed_equals_own_forward(CONFIGS[name], "triton", steps, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_forward_on_gpu(name: str, device: torch.device) -> None:
    assert_packed_equals_own_forward(CONFIGS[name], "triton", STEPS, device)


def test_only_the_selected_tokens_get_logits(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    shape = probe(model)
    memory = KVMemory(shape.spec, 20, 2, 16, device)
    slots = torch.arange(1, 6, dtype=torch.int32, device=device)
    memory.table.req_to_token.view(-1).index_copy_(0, torch.arange(16, 21, device=device), slots)
    step = Step.of(Batch.of([1], [0], [5], 1), memory)
    tokens, wanted = torch.arange(3, 8, device=device), torch.tensor([4], device=device)
    with torch.no_grad():
        everything = model(tokens[None]).logits[0]
        bind(model)
        backends = make_backends("torch", device, shape.layers)
        logits = forward(model, tokens, step, backends, wanted)
        all_logits = forward(model, tokens, step, backends, None)
    torch.testing.assert_close(logits, everything[4:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(all_logits, everything, rtol=1e-4, atol=1e-4)


def test_probe_finds_the_options_that_each_layer_passes(device: torch.device) -> None:
    shape = probe(make_model(CONFIGS["gemma2"], device))
    options = AttentionOptions(scale=pytest.approx(24**-0.5))  # type: ignore[arg-type]
    assert shape.spec == KVSpec(2, 2, 16, 16, torch.float32)
    assert shape.layers == (
        LayerShape(4, 16, 2, options.plus(Window(6), Softcap(5.0)), 16),
        LayerShape(4, 16, 2, options.plus(Softcap(5.0)), 16),
    )


@pytest.mark.parametrize("training", [False, True])
def test_probe_leaves_the_model_as_it_was(training: bool, device: torch.device) -> None:
    model = make_model(CONFIGS["mistral"], device).train(training)
    tokens = torch.arange(3, 20, device=device)[None]
    with torch.no_grad():
        before = model(tokens).logits
        probe(model)
        after = model(tokens).logits
    assert torch.equal(before, after)
    assert model.config._attn_implementation == "eager"
    assert model.training is training
    assert all(module.training is training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_probe_takes_the_dtype_from_k_and_v(dtype: torch.dtype, device: torch.device) -> None:
    assert probe(make_model(CONFIGS["llama"], device).to(dtype)).spec.dtype == dtype


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(
            FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
            "AttentionInterface",
            id="no-interface",
        ),
        pytest.param(NemotronConfig(**SMALL), "do not hand keyword arguments on", id="no-arguments"),
        pytest.param(DogeConfig(**SMALL), "changes its attention mask", id="own-mask"),
    ],
)
def test_probe_refuses_attention_that_lightkv_does_not_compute(
    config: PreTrainedConfig, reason: str, device: torch.device
) -> None:
    model = make_model(config, device)
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        probe(model)
    assert raised.value.architecture == type(model).__name__
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
def test_probe_finds_a_small_difference_in_every_type(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-4's tuning changes q by 7 % at 10,000 tokens, which is less than the root of bfloat16's epsilon.
    Its layers are not given the tokens' positions here."""
    config = Llama4TextConfig(
        **{**SMALL, "max_position_embeddings": 10_000},
        layer_types=["full_attention", "full_attention"],
        no_rope_layers=[1, 0],
        num_local_experts=2,
        intermediate_size_mlp=48,
    )
    model = make_model(config, device).to(dtype)
    probe(model)
    monkeypatch.setattr(model_shape, "fix_positions", lambda model: None)
    reason = r"of a token after 9992 others depends on more than its position \(q of layer 1 differ"
    with pytest.raises(UnsupportedModel, match=reason):
        probe(model)


def test_probe_finds_sinks_and_chunks(device: torch.device) -> None:
    model = make_model(CONFIGS["gpt-oss"], device)
    for found, layer in zip(probe(model).layers, model.model.layers, strict=True):
        sinks = found.options.of(SinkLogits)
        assert sinks is not None
        assert sinks.logits.dtype == torch.float32
        torch.testing.assert_close(sinks.logits, layer.self_attn.sinks)
        size = layer.self_attn.sliding_window
        assert found.options.of(Window) == (Window(size) if size else None)
    model = make_model(LLAMA4, device)
    assert [layer.options.variants for layer in probe(model).layers] == [(Chunk(8),), ()]
    assert [layer.options.variants for layer in probe(model.to("meta")).layers] == [(Chunk(8),), ()]


def test_a_chunk_is_compared_with_the_mask(device: torch.device) -> None:
    def rule(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key // 8 == query // 8)

    mask = model_shape._MaskRule(rule)
    assert [model_shape._is_chunked(mask, chunk, device) for chunk in (4, 8, 9, 16)] == [
        False,
        True,
        False,
        False,
    ]


def test_the_layers_that_count_positions_get_them_until_the_model_is_released(device: torch.device) -> None:
    model = make_model(LLAMA4, device)
    undo = undo_binding(model)
    bind(model)
    bind(model)
    assert [len(layer._forward_pre_hooks) for layer in model.model.layers] == [0, 1]
    undo()
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_probe_accepts_a_model_in_training_mode_and_leaves_it_so(device: torch.device) -> None:
    model = make_model(CONFIGS["llama"], device)
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(
        model.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.5)
    )
    model.train()
    model.model.norm.eval()
    assert probe(model) == probe(make_model(CONFIGS["llama"], device))
    assert model.training
    assert not model.model.norm.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "mixtral", "dynamic"])
def test_probe_accepts_models_whose_packed_tokens_are_the_same(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    others = {
        "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
        "dynamic": LlamaConfig(**SMALL, rope_parameters=dynamic),
    }
    model = make_model(CONFIGS[name] if name in CONFIGS else others[name], device).to(dtype)
    assert probe(model).spec.dtype == dtype


def test_probe_refuses_a_model_that_mixes_tokens_outside_attention(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlamaMLP.forward

    def with_the_token_before(self: Any, x: torch.Tensor) -> torch.Tensor:
        return own(self, x + x.roll(1, dims=1))

    monkeypatch.setattr(LlamaMLP, "forward", with_the_token_before)
    model = make_model(CONFIGS["llama"], device)
    with pytest.raises(UnsupportedModel, match=r"depends on the token's place in the batch \(q of layer 1"):
        probe(model)


def test_probe_needs_no_memory() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["gemma2"], dtype=torch.float16)
    expected = probe(make_model(CONFIGS["gemma2"], torch.device("cpu")).half())
    assert probe(model) == expected


def test_probe_refuses_bidirectional_attention(device: torch.device) -> None:
    config = BertConfig(**PLAIN)
    with pytest.raises(UnsupportedModel, match="not causal"):
        probe(make_model(config, device))


LLAMA_FORWARD = LlamaForCausalLM.forward


def without_positions(
    self: Any, input_ids: Any, use_cache: bool, logits_to_keep: Any, **arguments: Any
) -> Any:
    arguments.pop("position_ids", None)
    return LLAMA_FORWARD(
        self, input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep, **arguments
    )


def without_logits_to_keep(
    self: Any, input_ids: Any, position_ids: Any, use_cache: bool, lightkv: Any
) -> Any:
    return LLAMA_FORWARD(
        self, input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, lightkv=lightkv
    )


def ignoring_logits_to_keep(self: Any, logits_to_keep: Any, position_ids: Any, **arguments: Any) -> Any:
    return LLAMA_FORWARD(self, position_ids=position_ids, **arguments)


def with_a_count_to_keep(self: Any, logits_to_keep: Any, position_ids: Any, **arguments: Any) -> Any:
    output = LLAMA_FORWARD(self, position_ids=position_ids, **arguments)
    output.logits = output.logits[:, -logits_to_keep:]
    return output


@pytest.mark.parametrize(
    ("model_forward", "reason"),
    [
        (without_positions, "takes no position_ids"),
        (without_logits_to_keep, "takes no logits_to_keep"),
        (ignoring_logits_to_keep, r"logits of 2 tokens of 97, it returns them as \(1, 3, 97\)"),
        (with_a_count_to_keep, "fails when probed"),
    ],
)
def test_probe_refuses_a_model_that_forward_could_not_call(
    model_forward: Callable[..., Any], reason: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(CONFIGS["llama"], device)
    monkeypatch.setattr(LlamaForCausalLM, "forward", model_forward)
    with pytest.raises(UnsupportedModel, match=f"LlamaForCausalLM cannot run on lightkv: .*{reason}"):
        probe(model)
    assert model.config._attn_implementation == "eager"


LIMIT = 19  # the longest row of STEPS
BATCH_WIDE_ROPE = {
    "llama-dynamic": LlamaConfig(
        **{**SMALL, "max_position_embeddings": LIMIT},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "phi3-longrope": Phi3Config(
        **{**SMALL, "head_dim": 8},
        original_max_position_embeddings=LIMIT,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    ),
}


@pytest.mark.parametrize("name", BATCH_WIDE_ROPE)
def test_requests_are_independent_up_to_the_position_limit(name: str, device: torch.device) -> None:
    config = BATCH_WIDE_ROPE[name]
    assert position_limit(config) == LIMIT
    assert_packed_equals_own_forward(config, "torch", STEPS, device)


@pytest.mark.parametrize("name", BATCH_WIDE_ROPE)
def test_requests_disturb_each_other_past_the_position_limit(name: str, device: torch.device) -> None:
    steps = [([1, 2], [12, LIMIT + 1], 2)]
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_packed_equals_own_forward(BATCH_WIDE_ROPE[name], "torch", steps, device)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
    ],
    ids=["gpt2", "opt"],
)
def test_models_with_learned_positions(config: PreTrainedConfig, device: torch.device) -> None:
    assert_packed_equals_own_forward(config, "torch", STEPS, device)
