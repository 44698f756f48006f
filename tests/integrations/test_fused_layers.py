"""Tests what `fuse_layers` finds in a model's layers, what it changes in them, and what it leaves alone.

That a fused model gives the same texts is tested in tests/model/test_models.py, where every model runs fused.
"""

import gc
import weakref
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Glm4Config,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from lightkv.integrations.model.attention_call import AttentionCall, compute
from lightkv.integrations.model.decoder_layer import layer_forward
from lightkv.integrations.model.fused_layers import FusedLayers, find_mlp, fuse_layers, unfuse_layers
from lightkv.integrations.model.fused_norm import Carry, find_norm
from lightkv.integrations.model.fused_rotary import layout_of
from lightkv.integrations.model.hf_model import PackedStep, bind, bound
from lightkv.integrations.model.plans.layer_plans import LayerPlan
from lightkv.integrations.model.plans.own_pass import NotFusable
from lightkv.integrations.weights import onednn
from lightkv.integrations.weights.weight_part import WeightPart
from lightkv.triton_kernels.layers.gated_activation import ACTIVATIONS
from lightkv.triton_kernels.norms import Norm
from tests.support.eager_models import SMALL, fused_layers, make_model

LLAMA = LlamaConfig(**SMALL)
FUSED = "fused 2 of 2 layers"
NO_GATED_MLP = "it has no gate_proj, up_proj, down_proj, or another activation than those that are known"
CONFIGS: dict[str, tuple[PreTrainedConfig, list[str]]] = {
    "llama": (LLAMA, [FUSED]),
    "biases": (Qwen2Config(**SMALL), [FUSED]),
    "norms-of-heads": (Qwen3Config(**SMALL), [FUSED]),
    "joined-already": (Phi3Config(**SMALL), [FUSED]),
    "residual-multiplier": (GraniteConfig(**SMALL, residual_multiplier=0.3), [FUSED]),
    "norms-on-both-sides": (Glm4Config(**SMALL), [FUSED]),
    "one-plus-weight": (
        Gemma2Config(**SMALL),
        [FUSED],
    ),
    "norms-afterwards": (Olmo2Config(**SMALL), [FUSED]),
    "layer-norm": (
        Starcoder2Config(**SMALL),
        [
            FUSED,
            f"unfused: Starcoder2MLP: {NO_GATED_MLP} (2 layers)",
        ],
    ),
    "experts": (
        MixtralConfig(**SMALL, num_local_experts=4),
        [FUSED],
    ),
    "experts-with-their-weights": (  # what its MLP returns beside the output
        GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
        [FUSED],
    ),
    "parallel": (
        CohereConfig(**SMALL),
        [
            "fused 0 of 2 layers",
            "unfused: CohereDecoderLayer: its plan fuses its parts alone (2 layers)",
        ],
    ),
    "learned-positions": (
        GPT2Config(vocab_size=SMALL["vocab_size"], n_embd=32, n_layer=2, n_head=4),
        ["fused 0 of 2 layers", "unfused: GPT2Block: it has no plan (2 layers)"],
    ),
}


def varied_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Makes a model in which no norm's weight is only ones or zeros, and no bias only zeros."""
    model = make_model(config, device)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model.requires_grad_(False)


def quiet(line: str) -> None:
    pass


class MeanValues:
    """A handler whose attention is the mean of the tokens' v so far, with q and k added, so that all of them
    reach the next layer."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        call = call.rotated()
        groups = call.q.shape[1] // call.k.shape[1]
        mixed = call.v + call.k.mean(-1, keepdim=True)
        mixed = mixed.repeat_interleave(groups, dim=1) + call.q.mean(-1, keepdim=True)
        counts = torch.arange(1, mixed.shape[2] + 1, device=mixed.device)[:, None]
        return (mixed.cumsum(2) / counts).to(mixed.dtype).transpose(1, 2).contiguous()


class SampledValues(PackedStep):
    """The handler of a step that samples some of its tokens; its attention is that of MeanValues."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return MeanValues().attend(call)


def tokens_and_positions(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(3, 9, device=device)
    return tokens, tokens * 7


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return compute(model, *tokens_and_positions(model.device), MeanValues(), None)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_fused_is_told_and_computes_the_same(name: str, device: torch.device) -> None:
    config, expected = CONFIGS[name]
    model = varied_model(config, device)
    names = list(model.state_dict())
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    bind(model)
    own = logits(model)
    lines: list[str] = []
    fuse_layers(model, lines.append)
    assert lines == expected
    torch.testing.assert_close(logits(model), own, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.state_dict().items())
    unfuse_layers(model)
    assert not any(
        "forward" in vars(module) for module in model.modules() if not hasattr(module, "layer_idx")
    )
    torch.testing.assert_close(logits(model), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "norms-on-both-sides", "one-plus-weight", "joined-already"])
def test_the_same_is_found_in_bf16(name: str, device: torch.device) -> None:
    config, expected = CONFIGS[name]
    model = varied_model(config, device).to(torch.bfloat16)
    bind(model)
    own = logits(model)
    lines: list[str] = []
    fuse_layers(model, lines.append)
    assert lines == expected
    torch.testing.assert_close(logits(model), own, rtol=0.05, atol=0.05 * own.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "norms-of-heads"])
def test_each_residual_is_added_in_one_pass_with_the_norm_after_it(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightkv.integrations.model import decoder_layer as layers
    from lightkv.integrations.model import fused_norm as norms

    model = varied_model(CONFIGS[name][0], device)
    bind(model)
    fuse_layers(model, quiet)
    passes: list[bool] = []
    own = norms.add_and_norm

    def counted(x: Any, residual: Any, norm: Any, **arguments: Any) -> Any:
        passes.append(residual is not None and norm is not None)
        return own(x, residual, norm, **arguments)

    monkeypatch.setattr(layers, "add_and_norm", counted)
    monkeypatch.setattr(norms, "add_and_norm", counted)
    logits(model)
    # The first layer's own norm, then two for each layer: the last is the model's, with the last addition.
    # Norms of q and k are left to the write.
    assert passes == [False, True, True, True, True]


def test_weights_are_views_of_the_joined_ones(device: torch.device) -> None:
    model = varied_model(CONFIGS["biases"][0], device)
    parameters = dict(model.named_parameters())
    freed = [weakref.ref(parameters[f"model.layers.0.{name}.weight"].untyped_storage()) for name in PARTS]
    bind(model)
    fused = fuse_layers(model, quiet)
    assert dict(model.named_parameters()) == parameters
    assert len(fused.linears.joined) == 4
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for parts in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            end = parts[0].weight.data_ptr()
            for part in parts:
                assert part.weight.data_ptr() == end
                end += part.weight.nbytes
            assert parts[0].weight.untyped_storage().nbytes() == sum(part.weight.nbytes for part in parts)
    assert [storage() for storage in freed] == [None] * len(PARTS)
    # A weight that changes afterwards changes what is computed.
    before = logits(model)
    model.model.layers[0].self_attn.v_proj.weight.mul_(2.0)
    assert (logits(model) - before).abs().max() > 1e-3


PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


def test_fusing_again_moves_no_weight(device: torch.device) -> None:
    model = varied_model(CONFIGS["biases"][0], device)
    bind(model)
    fuse_layers(model, quiet)
    own = logits(model)
    before = {name: parameter.data_ptr() for name, parameter in joined_weights(model).items()}
    bind(model)
    lines: list[str] = []
    fuse_layers(model, lines.append)
    assert lines == CONFIGS["biases"][1]
    assert {name: parameter.data_ptr() for name, parameter in joined_weights(model).items()} == before
    assert torch.equal(logits(model), own)


def joined_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.endswith("_proj.weight") and "o_proj" not in name and "down_proj" not in name
    }


def test_a_weight_that_stands_in_two_layers_is_not_joined(device: torch.device) -> None:
    model = varied_model(LLAMA, device)
    first, second = model.model.layers
    second.self_attn.k_proj.weight = first.self_attn.k_proj.weight
    bind(model)
    own = logits(model)
    lines: list[str] = []
    fuse_layers(model, lines.append)
    assert lines == [FUSED]
    assert [layout_of(one.self_attn).joined for one in (first, second)] == [None, None]  # type: ignore[union-attr]
    assert second.self_attn.k_proj.weight is first.self_attn.k_proj.weight
    torch.testing.assert_close(logits(model), own, rtol=1e-5, atol=1e-5)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def doubled(linear: nn.Linear) -> Doubled:
    made = Doubled(linear.in_features, linear.out_features, bias=False)
    made.weight = linear.weight
    return made


@pytest.mark.parametrize("part", ["layer", "attention", "norm", "mlp", "linear", "subclass", "forward"])
@pytest.mark.parametrize("changed", [0, 1], ids=["first", "last"])
def test_what_is_changed_in_one_layer_is_left_alone_there(
    part: str, changed: int, device: torch.device
) -> None:
    model = varied_model(LLAMA, device)
    layer = model.model.layers[changed]
    calls: list[str] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(type(module).__name__)

    hooked = {
        "layer": layer,
        "attention": layer.self_attn,
        "norm": layer.post_attention_layernorm,
        "mlp": layer.mlp,
        "linear": layer.mlp.gate_proj,
    }
    if part in hooked:
        hooked[part].register_forward_hook(note)
    elif part == "subclass":
        layer.self_attn.v_proj = doubled(layer.self_attn.v_proj)
    else:
        own_forward = layer.mlp.forward
        layer.mlp.forward = lambda x: own_forward(x) * 3
    bind(model)
    own = logits(model)
    fused = fuse_layers(model, quiet)
    calls.clear()
    torch.testing.assert_close(logits(model), own, rtol=1e-5, atol=1e-5)
    assert len(calls) == (part in hooked)
    is_whole = part != "layer"
    assert is_fused(layer) == is_whole
    assert is_fused(model.model.layers[1 - changed])
    chosen = torch.tensor([4, 1], device=device)
    sampled = compute(model, *tokens_and_positions(device), SampledValues(None, (), chosen), chosen)  # type: ignore[arg-type]
    torch.testing.assert_close(sampled, own[chosen], rtol=1e-5, atol=1e-5)
    expected = {"layer": 4, "attention": 4, "norm": 4}.get(part, 3)
    assert len(fused.linears.joined) == expected


def is_fused(layer: Any) -> bool:
    return getattr(vars(layer).get("forward"), "func", None) is layer_forward


def test_a_layer_that_differs_keeps_its_forward_pass(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

    own_layer, own_mlp = LlamaDecoderLayer.forward, LlamaMLP.forward
    model = varied_model(LLAMA, device)
    first, second = model.model.layers

    def layer_with_more(self: Any, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        out: torch.Tensor = own_layer(self, x, **arguments)
        return out + 0.01 * x if self is first else out

    def mlp_with_more(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = own_mlp(self, x)
        return out.clamp(-0.5, 0.5) if self is second.mlp else out

    monkeypatch.setattr(LlamaDecoderLayer, "forward", layer_with_more)
    monkeypatch.setattr(LlamaMLP, "forward", mlp_with_more)
    bind(model)
    own = logits(model)
    lines: list[str] = []
    fuse_layers(model, lines.append)
    assert lines == [
        FUSED.replace("2 of", "1 of"),
        "unfused: LlamaDecoderLayer: fused, it returns something else (1 layers); LlamaMLP: fused, it returns "
        "something else (1 layers)",
    ]
    torch.testing.assert_close(logits(model), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("misfit", ["a tensor of its own", "no pair", "three"])
def test_a_layer_that_calls_its_attention_in_another_way_keeps_its_forward_pass(
    misfit: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

    own_attention = LlamaAttention.forward

    def attention(self: Any, hidden_states: torch.Tensor, made_here: Any = None, **arguments: Any) -> Any:
        out, weights = own_attention(self, hidden_states, **arguments)
        out = out if made_here is None else out + made_here
        return {"no pair": out, "three": (out, weights, None)}.get(misfit, (out, weights))

    def layer(self: Any, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        made_here = normed * 2 if misfit == "a tensor of its own" else None
        found = self.self_attn(hidden_states=normed, made_here=made_here, **arguments)
        hidden_states = hidden_states + (found if misfit == "no pair" else found[0])
        out: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return out

    monkeypatch.setattr(LlamaAttention, "forward", attention)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", layer)
    model = varied_model(LLAMA, device)
    bind(model)
    own = logits(model)
    fused = fuse_layers(model, quiet)
    assert fused.num_fused == 0
    torch.testing.assert_close(logits(model), own, rtol=1e-5, atol=1e-5)


def test_a_layer_whose_kernels_compute_something_else_is_not_fused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightkv.integrations.model import decoder_layer as layers

    own_pass = layers.add_and_norm

    def wrong(x: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        hidden, normed = own_pass(x, *args, **arguments)
        return hidden, normed * 1.02

    monkeypatch.setattr(layers, "add_and_norm", wrong)
    model = varied_model(LLAMA, device)
    bind(model)
    own = logits(model)
    fused = fuse_layers(model, quiet)
    assert fused.num_fused == 0
    torch.testing.assert_close(logits(model), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "where",
    [
        "fused_rotary.AttentionLayout.rotary",
        "fused_rotary.AttentionLayout.project",
        "plans.own_pass.NoiseHandler.attend",
        "fused_norm.residual_norm_reference",
        "decoder_layer.gated_activation_reference",
        "decoder_layer.DecoderLayer.forward",
        "fused_norm.relative_error",
        "fused_layers.find_mlp",
        "linears.PlainWeight.join",
    ],
)
def test_a_bug_of_ours_is_raised(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not look as if the model could not be fused."""

    def broken(*args: Any, **arguments: Any) -> Any:
        raise KeyError("planted")

    # It is of lightkv, as the function in whose place it stands.
    planted = FunctionType(broken.__code__, {**broken.__globals__, "__name__": "lightkv.planted"})
    monkeypatch.setattr(f"lightkv.integrations.model.{where}", planted)
    model = varied_model(LLAMA, torch.device("cpu"))

    def prepare() -> None:
        bind(model)
        fuse_layers(model, quiet)

    with pytest.raises(KeyError, match="planted"):
        prepare()


@pytest.mark.parametrize("error", [ZeroDivisionError, AssertionError, NotImplementedError, KeyError, OSError])
@pytest.mark.parametrize("part", ["attention", "mlp", "norm", "layer"])
def test_whatever_a_models_own_code_raises_for_noise_keeps_that_code(
    part: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama as own

    classes = {
        "attention": own.LlamaAttention,
        "mlp": own.LlamaMLP,
        "norm": own.LlamaRMSNorm,
        "layer": own.LlamaDecoderLayer,
    }
    own_forward = classes[part].forward

    def picky(self: Any, hidden_states: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        if hidden_states.abs().max() > 60:  # larger than in any text
            raise error("too large")
        return own_forward(self, hidden_states, *args, **arguments)

    monkeypatch.setattr(classes[part], "forward", picky)
    model = varied_model(LLAMA, torch.device("cpu"))
    bind(model)
    before = logits(model)
    lines: list[str] = []
    fused = fuse_layers(model, lines.append)
    if part in ("layer", "mlp"):
        assert any(f"fails on noise ({error.__name__}: " in line for line in lines)
    if part == "attention":
        assert fused_layers(model) == []
    # Attention and the MLP get what a norm returns, which is never so large in a layer.
    assert fused.num_fused == (2 if part in ("attention", "mlp") else 0)
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_head_computes_sampled_rows_alone(device: torch.device) -> None:
    model = varied_model(LLAMA, device)
    bind(model)
    fuse_layers(model, quiet)
    expected = logits(model)
    shapes: list[torch.Size] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    tokens = torch.arange(3, 9, device=device)
    found = compute(model, tokens, tokens * 7, MeanValues(), torch.tensor([1, 4], device=device))
    assert shapes == [(1, 2, SMALL["hidden_size"])]
    torch.testing.assert_close(found, expected[[1, 4]], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "norms-on-both-sides", "experts"])
def test_the_last_layers_mlp_computes_sampled_rows_alone(name: str, device: torch.device) -> None:
    model = varied_model(CONFIGS[name][0], device)
    bind(model)
    fuse_layers(model, quiet)
    expected = logits(model)
    counts: list[int] = []
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.register_forward_pre_hook(lambda module, args: counts.append(args[0].shape[1]))
    tokens = torch.arange(3, 9, device=device)
    chosen = torch.tensor([4, 1, 0, 0], device=device)  # in any order, and padding samples one token often
    step = SampledValues(None, (), chosen)  # type: ignore[arg-type]
    found = compute(model, tokens, tokens * 7, step, chosen)
    assert counts == [6, 4]
    torch.testing.assert_close(found, expected[chosen], rtol=1e-5, atol=1e-5)


def test_bind_alone_changes_no_layer_and_no_weight(device: torch.device) -> None:
    model = varied_model(LLAMA, device)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with bound(model):
        forwards = [module for module in model.modules() if "forward" in vars(module)]
        assert forwards == [layer.self_attn for layer in model.model.layers]
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


@torch.no_grad()
def test_a_fused_model_still_runs_as_transformers_runs_it(device: torch.device) -> None:
    model = varied_model(LLAMA, device)
    tokens = torch.arange(3, 40, device=device)[None]
    before = model(tokens).logits
    bind(model)
    fuse_layers(model, quiet)
    with bound(model):
        assert fused_layers(model) == [0, 1]
        fused = logits(model)
    torch.testing.assert_close(logits(model), fused, rtol=1e-5, atol=1e-5)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-5, atol=1e-5)
    model.generate(tokens, max_new_tokens=2, do_sample=False)


def test_the_carry_gives_a_norm_its_own_tensor_once() -> None:
    carry, norms = Carry(), (nn.Identity(), nn.Identity())
    hidden, normed = torch.ones(3), torch.zeros(3)
    for norm, x, expected in (
        (norms[0], hidden, normed),
        (norms[0], hidden.clone(), None),
        (norms[1], hidden, None),
    ):
        carry.put(norms[0], hidden, normed)
        assert carry.take(norm, x) is expected
        assert carry.take(norms[0], hidden) is None
    carry.put(norms[0], hidden, normed)
    carry.clear()
    assert carry.take(norms[0], hidden) is None


@torch.no_grad()
def test_nothing_is_held_after_a_pass(device: torch.device) -> None:
    model = varied_model(LLAMA, device)
    bind(model)
    fuse_layers(model, quiet)
    logits(model)
    carries = {module.forward.args[2] for module in model.modules() if is_fused(module)}
    assert len(carries) == 1
    assert all(carry._carried is None for carry in carries)


class OddRMSNorm(nn.Module):
    """Like an RMSNorm, but for its exponent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).pow(-0.45)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.RMSNorm(16, eps=1e-3), Norm(None, None, 1e-3)),
        (nn.LayerNorm(16, eps=1e-6), Norm(None, None, 1e-6, centred=True)),
        (nn.LayerNorm(16, elementwise_affine=False), Norm(None, None, 1e-5, centred=True)),
        (OddRMSNorm(), None),
        (nn.Identity(), None),
        (nn.SiLU(), None),
        (nn.Softmax(-1), None),
    ],
    ids=lambda value: type(value).__name__,
)
@torch.no_grad()
def test_norms_are_told_from_other_modules(
    module: nn.Module, expected: Norm | None, device: torch.device
) -> None:
    module.to(device)
    for parameter in module.parameters():
        parameter.uniform_(0.5, 2.0)
    x = torch.empty(1, 8, 16, device=device)
    if expected is None:
        with pytest.raises(NotFusable):
            find_norm(module, x)
    else:
        found = find_norm(module, x)
        assert (found.eps, found.centred, found.plus_one) == (expected.eps, expected.centred, False)
        assert found.weight is getattr(module, "weight", None)
        assert found.bias is getattr(module, "bias", None)


class Gated(nn.Module):
    """A gated MLP whose parts have names of their own, and which may compute a little more."""

    def __init__(self, activation: Any, more: Any = lambda x: x) -> None:
        super().__init__()
        self.c, self.a, self.b = nn.Linear(24, 16), nn.Linear(16, 24), nn.Linear(16, 24)
        self.activation, self.more = activation, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.c(self.activation(self.b(x)) * self.a(x)))


gelu = nn.functional.gelu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
@pytest.mark.parametrize(
    ("module", "activation"),
    [
        (Gated(nn.functional.silu), "silu"),
        (Gated(gelu), "gelu"),
        (Gated(lambda x: gelu(x, approximate="tanh")), "gelu_tanh"),
        (Gated(torch.relu), None),
        (Gated(torch.sigmoid), None),
        (Gated(nn.functional.silu, lambda x: x * 1.01), None),
        (Gated(lambda x: nn.functional.silu(x.clamp(-20, 20))), None),
    ],
)
@torch.no_grad()
def test_gated_mlps_are_told_from_others(
    module: nn.Module, activation: str | None, dtype: torch.dtype
) -> None:
    module, like = module.to(dtype), torch.empty(0, dtype=dtype)
    for name in ACTIVATIONS:
        plan = LayerPlan(gate_up=("b", "a"), down="c", activation=name)
        if name == activation:
            assert find_mlp(module, plan, like) == (("b", "a"), "c", activation)
        elif activation is None:
            with pytest.raises(NotFusable):
                find_mlp(module, plan, like)


@torch.no_grad()
def test_a_cpu_packs_the_joined_product_and_frees_the_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "LEAST_NUMBERS", 1)
    cpu = torch.device("cpu")
    model = varied_model(CONFIGS["biases"][0], cpu)
    tokens = torch.arange(3, 20)[None]
    own_tokens = model(tokens).logits
    bind(model)
    own = logits(model)
    attention = model.model.layers[0].self_attn
    weight, bias = attention.k_proj.weight.clone(), attention.k_proj.bias.clone()
    freed = [weakref.ref(model.get_submodule(f"model.layers.0.{name}")) for name in PARTS]
    freed += [weakref.ref(part.weight) for part in (one() for one in freed)]
    lines: list[str] = []
    fused: FusedLayers = fuse_layers(model, lines.append, packed=True)
    assert fused.linears.num_placed == 2 * 4 + 1
    assert lines[:1] == CONFIGS["biases"][1]
    assert lines[1].startswith("packed 9 linear layers of 0.1 MiB for the CPU in ")
    gc.collect()
    assert [one() for one in freed] == [None] * len(freed)
    parts = [module for module in model.modules() if isinstance(module, WeightPart)]
    assert len(parts) == 2 * 7 + 1
    assert len({id(part.of) for part in parts}) == 2 * 4 + 1
    assert torch.equal(attention.k_proj.weight, weight)
    assert torch.equal(attention.k_proj.bias, bias)
    torch.testing.assert_close(logits(model), own, rtol=1e-4, atol=1e-5)
    # A second engine packs nothing again, and computes the same.
    bind(model)
    lines.clear()
    again = fuse_layers(model, lines.append, packed=True)
    assert lines == CONFIGS["biases"][1]
    assert again.linears.num_placed == 0
    torch.testing.assert_close(logits(model), own, rtol=1e-4, atol=1e-5)
    unfuse_layers(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(tokens).logits, own_tokens, rtol=1e-4, atol=1e-5)


LARGER = {**SMALL, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "head_dim": 64}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**LARGER),
        Qwen3Config(**LARGER),
        Gemma2Config(**LARGER),
        Glm4Config(**LARGER),
        GraniteConfig(**LARGER, residual_multiplier=0.3),
        Starcoder2Config(**LARGER),
    ],
    ids=lambda config: config.model_type,
)
@pytest.mark.parametrize("num_tokens", [1, 6, 100])
def test_bf16_logits_are_as_close_to_float32_as_transformers_own(
    config: PreTrainedConfig, num_tokens: int
) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    exact = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    for parameter in exact.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        parameter.data = parameter.data.bfloat16().float()
    exact.requires_grad_(False).eval()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device)
    model.load_state_dict(exact.state_dict())
    model.requires_grad_(False).eval()
    tokens = torch.randint(3, 90, (num_tokens,), device=device)

    def run(model: PreTrainedModel) -> torch.Tensor:
        with torch.no_grad():
            return compute(model, tokens, torch.arange(num_tokens, device=device), MeanValues(), None).float()

    bind(exact)
    bind(model)
    reference, own = run(exact), run(model)
    fused = fuse_layers(model, quiet)
    assert fused.num_fused == 2
    ours = run(model)
    own_error, our_error = ((x - reference).pow(2).mean().sqrt() for x in (own, ours))
    # One draw of rounding differs from another by some percent.
    assert our_error <= 1.1 * own_error


@pytest.mark.gpu
@pytest.mark.parametrize("one_block", [False, True], ids=["apart", "one-block"])
def test_memory_is_not_doubled_on_a_gpu(one_block: bool) -> None:
    """In one block, as transformers' loader lays the weights out, they must not leave holes behind."""
    device = torch.device("cuda")
    config = LlamaConfig(**LARGER | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12})
    on_cpu = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False).eval()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    if one_block:
        block = torch.empty(
            sum(one.nbytes for one in on_cpu.parameters()) + 2**21, dtype=torch.uint8, device=device
        )
        del block
    model = on_cpu.to(device)
    bind(model)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    fuse_layers(model, quiet)
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated() - held < 1.5 * layer + 2**26
    assert torch.cuda.memory_allocated() - held < 2**24
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert torch.cuda.memory_reserved() - before < weights + 3 * layer + 2**26
    del model, on_cpu
    gc.collect()
    torch.cuda.empty_cache()
