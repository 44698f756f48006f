"""Times the products of a layer with experts beside their floor, and the layer beside transformers' own code.

    python -m bench.kernels.experts --out bench/results/experts-h200.json

The layers have random weights in bfloat16, and each side runs as a CUDA graph with an empty L2 cache.
"grouped_mm" is PyTorch's product over all experts, twice, on rows that are in order, with a copy of half a row
in the place of the activation. "kernels" are lightkv's products, with the order and the activation, where the
layer takes them. The floor is the bytes of the experts that have rows, or the products' operations. "vLLM" is
its `fused_experts` with the sum, where it can be imported and has the layout of the weights.
"""

import gc
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from bench.common.device_clock import DEVICE, CapturedStep, Ceiling, Clock, measure_ceiling
from bench.common.model_shapes import with_layers
from bench.common.published_shapes import PUBLISHED
from bench.common.random_model import random_model
from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.integrations.model.experts.mixture import experts_of, fuse_experts, gate_of, kernel_weights
from lightkv.integrations.model.plans.layer_plans import RouterPlan, planned_layers
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layers.expert_order import expert_order
from lightkv.triton_kernels.layers.expert_products import (
    Load,
    down_product,
    expert_launch,
    order_rows,
    up_product,
)
from lightkv.triton_kernels.layers.expert_rows import rows_by_expert

SHAPES = "qwen3-30b-a3b", "gpt-oss-20b"
COLUMNS = "floor", "kernels", "grouped_mm", "vLLM", "transformers", "lightkv"
TOLERANCE = 0.05  # of a token's largest number, for all but a few tokens, whose experts' scores are close


def block_of(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Any, RouterPlan | None]:
    """Returns the module of a layer that has the experts, with random weights, the experts, and the router's
    plan."""
    model: Any = random_model(with_layers(config, 1), device, dtype)
    for layer, plan in planned_layers(model).items():
        for module in layer.modules():
            if (experts := experts_of(module)) is not None:
                return module, experts, plan.router
    raise ValueError(f"a layer of {config.model_type} has no experts")


def output(block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    return y[0] if isinstance(y, tuple) else y


def grouped_products(experts: Any, x: Tensor, offsets: Tensor) -> Tensor:
    """Computes the products of rows that are in order, with a copy in the place of the activation."""
    weights = experts.gate_up_proj, experts.down_proj
    up, down = (weight if experts.is_transposed else weight.transpose(1, 2) for weight in weights)
    inner = functional.grouped_mm(x, up, offs=offsets)
    return functional.grouped_mm(inner.narrow(1, 0, inner.shape[1] // 2).contiguous(), down, offs=offsets)


def kernel_products(experts: Any, x: Tensor, ids: Tensor) -> Callable[[], Tensor] | None:
    """Returns lightkv's products of x for the experts `ids`; None for quantised experts."""
    weights = kernel_weights(experts, gate_of(experts))
    load = Load(ids.numel(), experts.num_experts, x.dtype, experts.is_transposed)
    launch = expert_launch(tuning.device_class(x.device), load)
    if weights is None:
        return None

    def run() -> Tensor:
        rows = order_rows(ids, experts.num_experts, launch)
        return down_product(up_product(x, weights[0], rows, launch), weights[1], rows, launch)

    return run


def vllm_products(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Tensor] | None:
    """Returns vLLM's products and their sum; None without vLLM, or for weights that it does not take."""
    if find_spec("vllm") is None or experts.is_transposed or experts.has_bias:
        return None
    from vllm.model_executor.layers.fused_moe import fused_experts

    matrices = experts.gate_up_proj.detach(), experts.down_proj.detach()
    return partial(fused_experts, x, *matrices, weights.float(), ids.int())


def floor_us(experts: Any, ids: Tensor, ceiling: Ceiling) -> float:
    """Returns the least microseconds of both products for the experts `ids`."""
    each = (experts.gate_up_proj[0].numel(), experts.down_proj[0].numel())
    size, num = experts.down_proj.element_size(), int(ids.unique().numel())
    return ceiling.floor_us(num * sum(each) * size, 2 * ids.numel() * sum(each))


@torch.no_grad()
def measure(
    config: PreTrainedConfig, num_tokens: list[int], clock: Clock, ceiling: Ceiling
) -> dict[int, dict[str, float]]:
    """Returns the microseconds of each side by the number of tokens. Refuses figures of a wrong output."""
    torch.manual_seed(0)
    block, experts, router = block_of(config, DEVICE, torch.bfloat16)
    xs = {num: torch.randn(1, num, config.hidden_size, device=DEVICE).bfloat16() for num in num_tokens}
    chosen: list[tuple[Tensor, Tensor]] = []
    handle = experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1:3]))
    owns = {num: output(block, x) for num, x in xs.items()}
    handle.remove()
    graphs: dict[int, dict[str, CapturedStep]] = {}
    for (num, x), (ids, _) in zip(xs.items(), chosen, strict=True):
        order = expert_order(ids.contiguous(), experts.num_experts)
        grouped = partial(grouped_products, experts, rows_by_expert(x[0], order), order.offsets)
        grouped()
        graphs[num] = {
            "grouped_mm": CapturedStep(grouped),
            "transformers": CapturedStep(partial(output, block, x)),
        }
    if why_not := fuse_experts(block, router, xs[num_tokens[0]]):
        refuse(f"not fused: {why_not}")
    for (num, x), (ids, weights) in zip(xs.items(), chosen, strict=True):
        error = ((output(block, x) - owns[num]).abs() / owns[num].abs().amax(-1, keepdim=True)).amax(-1)
        if (error > TOLERANCE).float().mean() > 0.05:
            refuse(f"{num} tokens are off by {error.max():.3f}")
        graphs[num]["lightkv"] = CapturedStep(partial(output, block, x))
        peers = {
            "kernels": kernel_products(experts, x[0], ids),
            "vLLM": vllm_products(experts, x[0], ids, weights),
        }
        for side, run in peers.items():
            if run is not None:
                run()
                graphs[num][side] = CapturedStep(run)
    return {
        num: {side: timing.median for side, timing in clock.replay_in_turns(sides).items()}
        | {"floor": floor_us(experts, ids, ceiling)}
        for (num, sides), (ids, _) in zip(graphs.items(), chosen, strict=True)
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 2048])
    options = arguments.parse_args()
    print_machine()
    rows, results, clock = [], dict[str, Any](), Clock(40)
    ceiling, found = measure_ceiling(clock)
    for shape in options.shapes:
        results[shape] = measure(PUBLISHED[shape], options.tokens, clock, ceiling)
        for num, us in results[shape].items():
            rows.append([shape, str(num), *(f"{us[one]:.1f}" if one in us else "-" for one in COLUMNS)])
        gc.collect()
        torch.cuda.empty_cache()
    print_table(["shape", "tokens", *COLUMNS], rows)
    print_json("experts", {"ceiling": found, "us": results}, options.out)


if __name__ == "__main__":
    main()
