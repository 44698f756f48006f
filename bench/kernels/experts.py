"""Compares what a layer with experts computes beside its products with transformers' own modules.

    python -m bench.kernels.experts --out bench/results/experts-h100.json

The layers have random weights in bfloat16, and each side runs as a CUDA graph with an empty L2 cache.
"Products" are the two over all experts, on rows that are in order, and between them a copy of half a row, in
the place of the activation. Both sides have to compute these; what they take beyond is routing and dispatch.
"""

import gc
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from bench.common.device_clock import DEVICE, CapturedStep, Clock
from bench.common.model_shapes import with_layers
from bench.common.published_shapes import PUBLISHED
from bench.common.random_model import random_model
from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.integrations.model.experts.mixture import experts_of, fuse_experts
from lightkv.integrations.model.plans.layer_plans import RouterPlan, planned_layers
from lightkv.triton_kernels.layers.expert_rows import expert_rows

SHAPES = "qwen3-30b-a3b", "gpt-oss-20b"
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


def products(experts: Any, x: Tensor, offsets: Tensor) -> Tensor:
    """Computes the products of rows that are in order, with a copy in the place of the activation."""
    weights = experts.gate_up_proj, experts.down_proj
    up, down = (weight if experts.is_transposed else weight.transpose(1, 2) for weight in weights)
    inner = functional.grouped_mm(x, up, offs=offsets)
    return functional.grouped_mm(inner.narrow(1, 0, inner.shape[1] // 2).contiguous(), down, offs=offsets)


@torch.no_grad()
def measure(config: PreTrainedConfig, num_tokens: list[int], clock: Clock) -> dict[int, dict[str, float]]:
    """Returns the microseconds of each side by the number of tokens. Refuses figures of a wrong output."""
    torch.manual_seed(0)
    block, experts, router = block_of(config, DEVICE, torch.bfloat16)
    xs = {num: torch.randn(1, num, config.hidden_size, device=DEVICE).bfloat16() for num in num_tokens}
    ids: list[Tensor] = []
    handle = experts.register_forward_pre_hook(lambda module, args: ids.append(args[1]))
    owns = {num: output(block, x) for num, x in xs.items()}
    handle.remove()
    graphs: dict[int, dict[str, CapturedStep]] = {}
    for (num, x), chosen in zip(xs.items(), ids, strict=True):
        rows = expert_rows(x[0], chosen, experts.num_experts)
        products(experts, rows.x, rows.offsets)
        graphs[num] = {
            "products": CapturedStep(partial(products, experts, rows.x, rows.offsets)),
            "transformers": CapturedStep(partial(output, block, x)),
        }
    if why_not := fuse_experts(block, router, xs[num_tokens[0]]):
        refuse(f"not fused: {why_not}")
    for num, x in xs.items():
        error = ((output(block, x) - owns[num]).abs() / owns[num].abs().amax(-1, keepdim=True)).amax(-1)
        if (error > TOLERANCE).float().mean() > 0.05:
            refuse(f"{num} tokens are off by {error.max():.3f}")
        graphs[num]["lightkv"] = CapturedStep(partial(output, block, x))
    return {
        num: {side: timing.median for side, timing in clock.replay_in_turns(sides).items()}
        for num, sides in graphs.items()
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 2048])
    options = arguments.parse_args()
    print_machine()
    rows, results, clock = [], dict[str, Any](), Clock(40)
    for shape in options.shapes:
        results[shape] = measure(PUBLISHED[shape], options.tokens, clock)
        for num, us in results[shape].items():
            sides = [us["transformers"], us["lightkv"]]
            rest = [side - us["products"] for side in sides]
            rows.append([shape, str(num), *(f"{one:.1f}" for one in (us["products"], *sides, *rest))])
        gc.collect()
        torch.cuda.empty_cache()
    columns = ["products", "transformers", "lightkv", "transformers less products", "lightkv less products"]
    print_table(["shape", "tokens", *columns], rows)
    print_json("experts", {"us": results}, options.out)


if __name__ == "__main__":
    main()
