"""Gives routers, which map tokens to logits, weights and ids of experts, a forward pass in one product and one
kernel."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightkv.integrations.model.plans.layer_plans import RouterPlan
from lightkv.integrations.model.plans.own_pass import (
    LARGE,
    NotFusable,
    is_equal,
    noise,
    own_forward,
    relative_error,
    run_own,
)
from lightkv.triton_kernels.layers.expert_choice import (
    MAX_EXPERTS,
    Choice,
    expert_choice,
    expert_choice_reference,
    scores_of,
    weights_of,
)

_NUM_TOKENS = 64  # enough that one is sure to choose otherwise where groups of experts limit the choice
_LEAST = 1e-4  # scores and weights below it are compared as if they were as large


class Router(NamedTuple):
    """The logits of a router, and how it chooses by them.

    `weight`, `bias`: `[E, C]` and `[E]` or None, of the product. `is_wide`: the product is computed in float32.
    `dtype`: of the logits.
    """

    weight: Tensor
    bias: Tensor | None
    is_wide: bool
    dtype: torch.dtype
    choice: Choice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the logits, the weights and the ids for x, `[..., C]`: `[T, E]` and twice `[T, top_k]`."""
        logits = self.logits(x)
        choose = expert_choice if x.is_cuda else expert_choice_reference
        return logits, *choose(logits, self.choice)

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits of x."""
        rows, weight, bias = x.reshape(-1, x.shape[-1]), self.weight, self.bias
        if self.is_wide:
            rows, weight, bias = rows.float(), weight.float(), None if bias is None else bias.float()
        return functional.linear(rows, weight, bias).to(self.dtype)


def router_forward(module: nn.Module, router: Router, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of a router."""
    if len(args) != 1 or kwargs:
        return type(module).forward(module, *args, **kwargs)
    return router.forward(args[0])


def find_router(module: nn.Module, plan: RouterPlan, like: Tensor) -> Router:
    """Returns the router of `module`, which computes what `plan` says, from a run on noise of the dtype and on
    the device of `like`. Raises NotFusable where it computes anything else: the logits have to be the same bit
    for bit, the choice but for equal scores, and the weights to rounding."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or len(weight) > MAX_EXPERTS:
        raise NotFusable("it has no weight of its own with a row for each expert")
    x = noise((_NUM_TOKENS, weight.shape[1]), like)
    x[1::2] *= LARGE
    output = run_own(own_forward(module), x)
    if not isinstance(output, tuple) or [type(one) for one in output] != [Tensor] * 3:
        raise NotFusable("it does not return logits, weights and ids")
    logits, weights, ids = output
    is_choice = weights.shape == ids.shape and weights.is_floating_point() and ids.dtype == torch.int64
    if logits.shape != (_NUM_TOKENS, len(weight)) or not is_choice or len(ids) != _NUM_TOKENS:
        raise NotFusable("it does not return logits, weights and ids of each token")
    scales = (getattr(module, name, None) for name in ("routed_scaling_factor", "router_scaling_factor"))
    choice = Choice(
        ids.shape[1],
        plan.scoring,
        getattr(module, "norm_topk_prob", plan.is_normalised),
        getattr(module, "e_score_correction_bias", None),
        next((scale for scale in scales if scale is not None), 1.0),
        weights.dtype,
    )
    router = Router(weight, module._parameters.get("bias"), plan.is_wide, logits.dtype, choice)
    if not is_equal(router.logits(x), logits):
        raise NotFusable("its logits are not the product of its input and its weight")
    # The kernel itself, too: this is what will run.
    if not _is_choice(choice, logits, weights, ids) or not _is_choice(choice, *router.forward(x)):
        raise NotFusable(f"it does not choose by the {plan.scoring} of its logits alone")
    return router


def _is_choice(choice: Choice, logits: Tensor, weights: Tensor, ids: Tensor) -> bool:
    """Returns whether `choice` chooses `ids` with these weights, to rounding: of experts with equal scores
    others may be chosen."""
    scores = scores_of(logits.float(), choice)
    by = scores if choice.bias is None else scores + choice.bias
    best, wanted = by.topk(choice.top_k).values, weights_of(scores, ids, choice)
    chosen = by.gather(1, ids).sort(dim=-1, descending=True).values
    return (
        relative_error(chosen, best, best.abs().clamp(min=_LEAST), 4) <= 1.0
        and relative_error(weights, wanted, wanted.abs().clamp(min=_LEAST), 4) <= 1.0
    )
