"""Tests which attention modules get the fused forward pass, and that it does not change the logits.

The reference is the same bound model with transformers' own modules. That these equal the plain model is tested
in test_integration_transformers.py, where every model runs with the modules that `bind` fuses.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Ministral3Config,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.llama import modeling_llama

from lightkv.attention import Batch, BatchShape, RotaryEmbedding, StaticStep, Step, make_backends
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.model.attention_call import AttentionCall, compute
from lightkv.integrations.model.fused_rotary import fused_forwards, set_fused_forwards
from lightkv.integrations.model.hf_model import bind, bound, forward
from lightkv.integrations.model.linears import prepare_linears
from lightkv.integrations.model.probe import probe
from lightkv.integrations.streaming import Ring, Stream
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.write.inputs import Rotation
from lightkv.triton_kernels.write.write_kv import rotate_reference
from tests.support.combinations import each_value, slow
from tests.support.eager_models import SMALL, fused_layers, make_model

BOTH = [0, 1]
# Without head_dim, a head has 32 / 4 = 8 dimensions.
SPLIT_HEADS = {name: value for name, value in SMALL.items() if name != "head_dim"}
LLAMA = LlamaConfig(**SMALL)


def scaled(rope_type: str, **parameters: Any) -> LlamaConfig:
    return LlamaConfig(
        **SMALL, rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, **parameters}
    )


MODELS: dict[str, tuple[PreTrainedConfig, list[int]]] = {
    "llama": (LLAMA, BOTH),
    "linear": (scaled("linear"), BOTH),
    "dynamic": (scaled("dynamic"), BOTH),
    "yarn": (scaled("yarn", original_max_position_embeddings=64, attention_factor=1.3), BOTH),
    "llama3": (
        scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        BOTH,
    ),
    "longrope": (
        Phi3Config(
            **SPLIT_HEADS,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.5] * 4,
                "long_factor": [4.0] * 4,
            },
        ),
        BOTH,
    ),
    "qwen2": (Qwen2Config(**SMALL), BOTH),
    "qwen3": (Qwen3Config(**SMALL), BOTH),
    "gemma": (GemmaConfig(**SMALL), BOTH),
    "gemma3": (  # each type of layer has its own frequencies
        Gemma3TextConfig(**SMALL, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
        BOTH,
    ),
    "phi": (PhiConfig(**SPLIT_HEADS, partial_rotary_factor=0.5), BOTH),
    "phi3": (Phi3Config(**SMALL), BOTH),
    "gpt-neox": (
        GPTNeoXConfig(
            vocab_size=SMALL["vocab_size"],
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
        ),
        BOTH,
    ),
    "glm": (GlmConfig(**SMALL), BOTH),
    "cohere": (CohereConfig(**SMALL), BOTH),
    "cohere-norms": (CohereConfig(**SMALL, use_qk_norm=True), BOTH),
    "positions-on-some": (SmolLM3Config(**SMALL, no_rope_layers=[0, 1]), [1]),
    "cohere2": (
        Cohere2Config(**SMALL, sliding_window=6, layer_types=["full_attention", "sliding_attention"]),
        [1],
    ),
    "clipped": (OlmoConfig(**SMALL, clip_qkv=8.0), []),
    "unclipped": (OlmoConfig(**SMALL), BOTH),
    "norm-over-heads": (Olmo2Config(**SMALL), BOTH),
    "norm-over-heads-and-windows": (
        Olmo3Config(**SMALL, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
        BOTH,
    ),
    "q-grows-with-positions": (
        Ministral3Config(
            **SMALL,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.1,
            },
        ),
        [],
    ),
    "learned": (GPT2Config(vocab_size=SMALL["vocab_size"], n_embd=32, n_layer=2, n_head=4), []),
}
# The rows of each step, their tokens, and how many of them are prefills: two, one beside a decode, and none.
STEPS = [([1, 2], [3, 1], 2), ([2, 1], [2, 1], 1), ([2, 1], [1, 1], 0)]


class Steps:
    """Runs `STEPS` on a bound model, from an empty pool each time."""

    def __init__(self, model: PreTrainedModel, backend: str) -> None:
        self.model = model
        shape = probe(model)
        self.memory = KVMemory(shape.spec, 80, 2, 32, model.device)
        self.backends = make_backends(backend, model.device, shape.layers)
        slots = 1 + torch.randperm(64, generator=torch.Generator().manual_seed(0))
        self.memory.table.req_to_token[1:] = slots.view(2, 32).to(model.device, torch.int32)

    @torch.no_grad()
    def run(self) -> list[torch.Tensor]:
        """Returns the logits of every token, step by step."""
        memory, device = self.memory, self.memory.device
        for layer_idx in range(memory.pool.spec.num_layers):
            memory.pool.kv(layer_idx).fill_(float("nan"))[0] = 0.0
        lengths = {1: 0, 2: 0}
        logits = []
        for rows, counts, num_prefills in STEPS:
            step = Step.of(Batch.of(rows, [lengths[row] for row in rows], counts, num_prefills), memory)
            input_ids = torch.arange(3, 3 + sum(counts), device=device)
            logits.append(forward(self.model, input_ids, step, self.backends, None))
            for row, count in zip(rows, counts, strict=True):
                lengths[row] += count
        return logits


def assert_unfused_agrees(model: PreTrainedModel, backend: str, own_backend: str = "torch") -> None:
    """Compares the fused modules on `backend` with the model's own on `own_backend`."""
    ours = Steps(model, backend).run()
    set_fused_forwards(model, {})
    assert not fused_layers(model)
    for logits, own in zip(ours, Steps(model, own_backend).run(), strict=True):
        torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_right_modules_are_fused_and_the_logits_stay(name: str, device: torch.device) -> None:
    config, fused = MODELS[name]
    model = make_model(config, device)
    bind(model)
    assert fused_layers(model) == fused
    assert_unfused_agrees(model, "torch")


NORMALISED = ("qwen3", "gemma3", "cohere-norms", "norm-over-heads", "norm-over-heads-and-windows")


@pytest.mark.parametrize("name", MODELS)
def test_norms_of_heads_are_left_to_the_write(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(MODELS[name][0], device)
    bind(model)
    steps = Steps(model, "torch")  # which probes the model's own forward pass
    heads = [module for name, module in model.named_modules() if name.endswith(("q_norm", "k_norm"))]
    called: list[torch.nn.Module] = []
    for kind in {type(module) for module in heads}:
        own = kind.forward

        def forward(module: Any, *args: Any, own: Any = own) -> Any:
            called.append(module)
            return own(module, *args)

        monkeypatch.setattr(kind, "forward", forward)
    steps.run()
    assert not any(module is one for module in called for one in heads)
    layouts = [cast(Any, forward).args[1] for forward in fused_forwards(model).values()]
    assert [layout.norms is not None for layout in layouts] == [name in NORMALISED] * len(layouts)


def test_weights_of_norms_may_be_replaced(device: torch.device) -> None:
    model = make_model(MODELS["qwen3"][0], device)
    bind(model)
    for layer in model.model.layers:
        norm = layer.self_attn.k_norm
        norm.weight = torch.nn.Parameter(norm.weight.detach() + torch.rand_like(norm.weight))
    assert_unfused_agrees(model, "torch")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_norm_with_a_hook_is_called(when: str, device: torch.device) -> None:
    model = make_model(MODELS["qwen3"][0], device)
    calls: list[bool] = []
    if when == "after":
        bind(model)
    model.model.layers[1].self_attn.k_norm.register_forward_hook(lambda *_: calls.append(True))
    if when == "before":
        bind(model)
    assert fused_layers(model) == BOTH
    steps = Steps(model, "torch")
    calls.clear()
    steps.run()
    assert len(calls) == len(STEPS)


@each_value(
    name=[*slow("phi3", "cohere", "qwen3", "cohere-norms"), "norm-over-heads"],
    own_backend=["torch", *slow("triton")],
)
def test_write_kv_rotates_as_the_modules_do(name: str, own_backend: str, device: torch.device) -> None:
    model = make_model(MODELS[name][0], device)
    bind(model)
    assert fused_layers(model) == BOTH
    assert_unfused_agrees(model, "triton", own_backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", ["qwen3", "phi3", "clipped"])
def test_the_same_modules_are_fused_in_16_bits(name: str, dtype: torch.dtype, device: torch.device) -> None:
    config, fused = MODELS[name]
    model = make_model(config, device).to(dtype)
    bind(model)
    assert fused_layers(model) == fused


OWN_ROTATION, OWN_FORWARD = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward


def neighbours(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    half = cos.shape[-1] // 2
    return tuple(
        rotate_reference(x[0].transpose(0, 1), Rotation(cos[0, :, :half], sin[0, :, :half], True))
        .transpose(0, 1)[None]
        .to(x)
        for x in (q, k)
    )


def backwards(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return OWN_ROTATION(q, k, cos, -sin)


def a_little_longer(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    q, k = OWN_ROTATION(q, k, cos, sin)
    return q * 1.004, k


def k_is_rotated_alone(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return q, OWN_ROTATION(q, k, cos, sin)[1]


@pytest.mark.parametrize(
    ("rotation", "fused"),
    [
        pytest.param(OWN_ROTATION, BOTH, id="own"),
        pytest.param(neighbours, [], id="neighbours"),
        pytest.param(backwards, [], id="backwards"),
        pytest.param(a_little_longer, [], id="a-little-longer"),
        pytest.param(k_is_rotated_alone, [], id="k-alone"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_module_that_rotates_in_another_way_keeps_its_forward_pass(
    rotation: Callable[..., Any],
    fused: list[int],
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotation)
    model = make_model(LLAMA, device).to(dtype)
    bind(model)
    assert fused_layers(model) == fused


def with_a_gate(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    out, weights = OWN_FORWARD(self, hidden_states, *args, **kwargs)
    return out * hidden_states.sigmoid(), weights


def without_positions(self: Any, *args: Any, position_embeddings: Any, **kwargs: Any) -> Any:
    return OWN_FORWARD(self, *args, position_embeddings=(1.0, 0.0), **kwargs)


@pytest.mark.parametrize("own", [with_a_gate, without_positions])
def test_a_module_that_computes_more_or_less_keeps_its_forward_pass(
    own: Callable[..., Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own is without_positions:
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    else:
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", own)
    model = make_model(LLAMA, device)
    bind(model)
    assert not fused_layers(model)


def test_a_forward_pass_that_was_replaced_before_stays(device: torch.device) -> None:
    model = make_model(LLAMA, device)
    hooked = model.model.layers[0].self_attn
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args))
        return OWN_FORWARD(hooked, *args, **kwargs)

    hooked.forward = counted
    bind(model)
    assert fused_layers(model) == [1]
    calls.clear()
    Steps(model, "torch").run()
    assert len(calls) >= len(STEPS)
    assert vars(hooked)["forward"] is counted


class LowRank(torch.nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, base: torch.nn.Module, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = torch.nn.Linear(sizes[0], 2), torch.nn.Linear(2, sizes[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("when", ["before", "after"])
def test_projections_may_be_replaced(when: str) -> None:
    model = make_model(MODELS["qwen2"][0], torch.device("cpu"))
    plain = Steps(model, "torch")

    def replace() -> None:
        prepare_linears(model, packed=True)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj", "o_proj"):
                base = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, LowRank(base, (base.in_features, base.out_features)))

    with bound(model):
        before = plain.run()
    if when == "before":
        replace()
    bind(model)
    if when == "after":
        replace()
    assert fused_layers(model) == BOTH
    assert (Steps(model, "torch").run()[0] - before[0]).abs().max() > 1e-2
    assert_unfused_agrees(model, "torch")


@torch.no_grad()
def test_bound_restores_the_model(device: torch.device) -> None:
    model = make_model(MODELS["dynamic"][0], device)
    tokens = torch.arange(3, 40, device=device)[None]
    before = model(tokens).logits
    with bound(model):
        assert fused_layers(model) == BOTH
        with bound(model):
            assert fused_layers(model) == BOTH
        assert fused_layers(model) == BOTH
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(tokens).logits, before)
    bind(model)
    model.set_attn_implementation("eager")  # without `bound`: the modules notice it themselves
    assert torch.equal(model(tokens).logits, before)
    model.generate(tokens, max_new_tokens=2, do_sample=False)


def test_a_failed_bind_leaves_the_model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(MODELS["dynamic"][0], device)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fails)
    with pytest.raises(torch.OutOfMemoryError):
        bind(model)
    assert model.config._attn_implementation == "eager"
    assert model.model.rotary_emb.rope_type == "dynamic"
    assert not any("forward" in vars(layer.self_attn) for layer in model.model.layers)


class Recorder:
    """A handler that has the positions applied before it looks at the keys."""

    def __init__(self) -> None:
        self.is_fused: list[bool] = []
        self.keys: list[torch.Tensor] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.is_fused.append(call.rotary is not None)
        call = call.rotated()
        assert call.rotary is None
        self.keys.append(call.k)
        return call.q.new_zeros(call.output_shape)


@torch.no_grad()
def test_a_rotated_call_has_the_keys_of_the_unfused_model(device: torch.device) -> None:
    model = make_model(LLAMA, device)
    recorders = Recorder(), Recorder()
    positions = torch.tensor([0, 100], device=device)
    bind(model)
    compute(model, torch.zeros_like(positions), positions, recorders[0], None)
    set_fused_forwards(model, {})
    compute(model, torch.zeros_like(positions), positions, recorders[1], None)
    assert [recorder.is_fused for recorder in recorders] == [[True, True], [False, False]]
    assert all(map(torch.equal, recorders[0].keys, recorders[1].keys))
    assert len(recorders[0].keys) == 2
    assert not torch.equal(recorders[0].keys[0][:, :, 0], recorders[0].keys[0][:, :, 1])


# The backends of the fused modules and of the model's own.
BACKEND_PAIRS = [("torch", "torch"), ("triton", "torch"), *slow(("triton", "triton"))]


@pytest.mark.parametrize("backends", BACKEND_PAIRS, ids="-beside-".join)
def test_sinks_rotate_q_back_from_its_own_position(backends: tuple[str, str], device: torch.device) -> None:
    logits = []
    for fused, backend in zip((True, False), backends, strict=True):
        lm = CachedModel(make_model(LLAMA, device), 40, 1, backend=backend, exact_positions=True)
        assert fused_layers(lm.model) == BOTH
        if not fused:
            set_fused_forwards(lm.model, {})
        flow = Stream(lm, Ring(sinks=2, size=6, stride=3), [5, 6, 7])
        logits.append(torch.cat([*flow.feed(range(10, 16))]))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("num_pairs", [1, 5, 8])
def test_rotate_has_the_bits_of_the_reference(
    num_pairs: int, dtype: torch.dtype, interleaved: bool, device: torch.device
) -> None:
    torch.manual_seed(num_pairs)
    x = torch.randn(7, 3, 2 * 16, device=device).to(dtype)[..., 3:19]  # a view
    cos, sin = (torch.randn(7, num_pairs, device=device).to(dtype) for _ in range(2))
    expected = rotate_reference(x, Rotation(cos, sin, interleaved)).to(dtype)
    RotaryEmbedding(cos, sin, interleaved).rotate(x)
    assert torch.equal(x, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_a_captured_bf16_step_is_the_unfused_one(name: str) -> None:
    device = torch.device("cuda")
    config = MODELS[name][0]
    if name == "phi3":
        config = Phi3Config(**SPLIT_HEADS | {"hidden_size": 64})
    model = make_model(config, device).to(torch.bfloat16)
    shape = probe(model)
    memory = KVMemory(shape.spec, 80, 4, 32, device)
    memory.table.req_to_token[1:3] = 1 + torch.arange(64, device=device, dtype=torch.int32).view(2, 32)
    for layer_idx in range(2):
        memory.pool.kv(layer_idx).normal_()
    backends = make_backends("triton", device, shape.layers)
    bind(model)
    assert fused_layers(model) == BOTH
    input_ids = torch.tensor([5, 9, 0, 0], device=device)

    static = StaticStep(BatchShape.of_decodes(4), memory)
    step = static.load(Batch.empty())

    def run() -> torch.Tensor:
        return forward(model, input_ids, step, backends, None)

    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        step = static.load(Batch.of([1, 2], [5, 30], [1, 1], 0))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            eager = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        keys = [memory.pool.k(layer_idx)[[6, 63]].clone() for layer_idx in range(2)]
        set_fused_forwards(model, {})
        own = run()
        own_keys = [memory.pool.k(layer_idx)[[6, 63]] for layer_idx in range(2)]
    # bf16 keeps 8 bits, and the rounding of the first layer goes through the second.
    bound_to = 0.04 * own.abs().max().item()
    for ours in (captured, eager):
        torch.testing.assert_close(ours[:2], own[:2], rtol=0.02, atol=bound_to)
    torch.testing.assert_close(keys[0], own_keys[0], rtol=0.02, atol=0.02 * own_keys[0].abs().max().item())
    assert not torch.equal(own[0], own[1])
