"""Tests which mixtures of experts run fused, that they compute the same, and what keeps transformers' code.

That a fused model gives the same texts is tested in tests/model/test_models.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    FlexOlmoConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from lightkv.integrations.model.experts import mixture
from lightkv.integrations.model.experts.mixture import fuse_experts, has_fused_experts, unfuse_experts
from lightkv.integrations.model.plans.layer_plans import RouterPlan, planned_layers
from tests.support.eager_models import SMALL

SIZES = {name: value for name, value in SMALL.items() if name != "head_dim"} | {"num_hidden_layers": 1}
EIGHT: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
GLM: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.8,
}  # fmt: skip
GROUPS = "it does not choose by the sigmoid of its logits alone"
# Each with what its router keeps transformers' code for.
FAMILIES: dict[str, tuple[PreTrainedConfig, str]] = {
    "mixtral": (MixtralConfig(**SIZES, **LOCAL), ""),
    "qwen3": (Qwen3MoeConfig(**SIZES, **EIGHT, norm_topk_prob=True), ""),
    "qwen2": (Qwen2MoeConfig(**SIZES, **EIGHT, shared_expert_intermediate_size=16), ""),
    "olmoe": (OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3), ""),
    "flex-olmo": (FlexOlmoConfig(**SIZES, num_experts=8, num_experts_per_tok=3), ""),
    "gpt-oss": (GptOssConfig(**SIZES, **LOCAL), ""),
    "glm4": (Glm4MoeConfig(**SIZES, **GLM), ""),
    "glm4-groups": (Glm4MoeConfig(**SIZES, **GLM, n_group=4, topk_group=2), GROUPS),
    "phi": (PhimoeConfig(**SIZES, **LOCAL), "names no router"),
    "minimax": (MiniMaxM2Config(**SIZES, **LOCAL), "names no router"),
}


def block_of(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns the module that has the experts, with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    blocks = [
        module
        for module in model.modules()
        if any(hasattr(child, "is_transposed") for child in module.children())
    ]
    for tensor in (*blocks[0].parameters(), *blocks[0].buffers()):
        tensor.normal_(std=0.2)
    return blocks[0]


def router_of(config: PreTrainedConfig) -> RouterPlan | None:
    """Returns the plan of the router in the model's decoder layers."""
    with torch.device("meta"):
        (plan,) = planned_layers(AutoModelForCausalLM.from_config(config)).values()
    return plan.router


def output(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    return y[0] if isinstance(y, tuple) else y


def experts_of(block: nn.Module) -> Any:
    return next(child for child in block.children() if hasattr(child, "is_transposed"))


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_and_routers_compute_the_same(name: str, device: torch.device) -> None:
    config, reason = FAMILIES[name]
    block = block_of(config, device)
    x = torch.randn(1, 7, SIZES["hidden_size"], device=device)
    own = output(block, x)
    why_not = fuse_experts(block, router_of(config), x)
    assert has_fused_experts(block)
    assert reason in (why_not or "")
    assert bool(why_not) == bool(reason)
    routed = [child for child in block.children() if "forward" in vars(child)]
    assert len(routed) == (not reason)
    torch.testing.assert_close(output(block, x), own, rtol=1e-5, atol=1e-5)
    assert output(block, x[:, :0]).shape == (1, 0, SIZES["hidden_size"])
    unfuse_experts(block)
    assert not has_fused_experts(block)
    torch.testing.assert_close(output(block, x), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copies_rows", [False, True], ids=["tiles", "copies"])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "glm4"])
def test_kernels_compute_the_same(
    name: str, copies_rows: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on a CPU calls the references, so here the kernels take their places."""
    from lightkv.integrations.model.experts import router

    config, _ = FAMILIES[name]
    block = block_of(config, device)
    x = torch.randn(1, 4, SIZES["hidden_size"], device=device)
    own = output(block, x)
    monkeypatch.setattr(mixture, "_has_kernels", lambda x: True)
    if copies_rows:
        monkeypatch.setattr(mixture, "kernel_weights", lambda *args: None)
    monkeypatch.setattr(router, "_NUM_TOKENS", 8)
    monkeypatch.setattr(router, "expert_choice_reference", router.expert_choice)
    assert not fuse_experts(block, router_of(config), x)
    torch.testing.assert_close(output(block, x), own, rtol=1e-5, atol=1e-5)


def test_experts_of_other_ranks_add_nothing(device: torch.device) -> None:
    block = block_of(FAMILIES["gpt-oss"][0], device)
    experts, x = experts_of(block), torch.randn(5, SIZES["hidden_size"], device=device)
    ids = torch.tensor([[0, 8], [8, 8], [1, 3], [8, 7], [2, 0]], device=device)
    weights = torch.rand(5, 2, device=device)
    fuse_experts(block, router_of(FAMILIES["gpt-oss"][0]), x)
    found = experts(x, ids, weights)
    assert not found[1].any()
    some = experts(x, ids.clamp(max=7), weights * (ids < 8))
    torch.testing.assert_close(found, some, rtol=1e-5, atol=1e-5)


def test_experts_that_compute_something_else_are_left_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, router = block_of(FAMILIES["qwen3"][0], device), router_of(FAMILIES["qwen3"][0])
    experts, x = experts_of(block), torch.randn(5, SIZES["hidden_size"], device=device)
    own = type(experts).forward
    monkeypatch.setattr(type(experts), "forward", lambda *args: own(*args) * 1.01)
    assert "something else" in str(fuse_experts(block, router, x))
    monkeypatch.undo()
    experts.config._experts_implementation = "eager"
    assert "run by eager" in str(fuse_experts(block, router, x))
    experts.config._experts_implementation = "grouped_mm"
    handle = experts.register_forward_hook(lambda *args: None)
    assert "hooks" in str(fuse_experts(block, router, x))
    assert not has_fused_experts(block)
    handle.remove()
    # A gate that is not known is computed by the module; only its biases would not be added.
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, x: x.chunk(2, dim=-1)[0].tanh())
    assert not fuse_experts(block, router, x)
    assert has_fused_experts(block)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "glm4", "mixtral", "qwen2"])
def test_blocks_on_a_gpu(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of few and of many tokens, and in a CUDA graph. Experts whose scores differ by a
    rounding may be chosen otherwise, so all but a few tokens have to agree."""
    config = type(FAMILIES[name][0]).from_dict(FAMILIES[name][0].to_dict() | {"hidden_size": 512})
    torch.backends.cuda.matmul.allow_tf32 = False
    block = block_of(config, device, dtype)
    xs = [torch.randn(1, num, 512, device=device).to(dtype) for num in (1, 32, 2048, 5000)]
    owns = [output(block, x) for x in xs]
    assert not fuse_experts(block, router_of(config), xs[0])
    tolerance = 32 * torch.finfo(dtype).eps  # sums in another order
    for x, own in zip(xs, owns, strict=True):
        found = [output(block, x)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(output(block, x))
        graph.replay()
        for y in found:
            error = ((y - own).abs() / own.abs().amax(-1, keepdim=True)).amax(-1)
            assert (error > tolerance).float().mean() <= 0.002
