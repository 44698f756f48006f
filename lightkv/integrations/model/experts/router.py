"""Finds out how a router chooses experts, and gives it a forward pass in one product and one kernel.

A router is a module that maps tokens to logits, weights and ids of experts. It is compared with `Router` on
noise, so no class is known here.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightkv.integrations.model.proofs.own_pass import (
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
    SCORINGS,
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


def set_router_forward(module: nn.Module, router: Router) -> None:
    """Gives `module` the forward pass `router_forward`."""
    cast(Any, module).forward = partial(router_forward, module, router)


def find_router(module: nn.Module, like: Tensor) -> Router:
    """Returns how `module` computes, from a run on noise of the dtype and on the device of `like`. Raises
    NotFusable if no Router gives the same: the logits bit for bit, the choice but for equal scores, and the
    weights to rounding."""
    own = [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]
    weight = next((one for one in own if one.dim() == 2), None)
    if weight is None or len(weight) > MAX_EXPERTS:
        raise NotFusable("it has no weight of its own with a row for each expert")
    x = noise((_NUM_TOKENS, weight.shape[1]), like)
    x[1::2] *= LARGE
    output = run_own(own_forward(module), x)
    if (
        not isinstance(output, tuple)
        or len(output) != 3
        or not all(isinstance(one, Tensor) for one in output)
    ):
        raise NotFusable("it does not return logits, weights and ids")
    logits, weights, ids = output
    num_experts = len(weight)
    is_choice = weights.shape == ids.shape and weights.is_floating_point() and ids.dtype == torch.int64
    if logits.shape != (_NUM_TOKENS, num_experts) or not is_choice or len(ids) != _NUM_TOKENS:
        raise NotFusable("it does not return logits, weights and ids of each token")
    # A bias that noise hardly shows counts, too: so none comes last.
    vectors = [*(one for one in own if one.shape == (num_experts,)), None]
    choice = Choice(ids.shape[1], "softmax", True, None, 1.0, weights.dtype)
    biases = [one for one in vectors if one is None or one.dtype == weight.dtype]
    for bias, is_wide in product(biases, (False, True)):
        router = Router(weight, bias, is_wide, logits.dtype, choice)
        if is_equal(router.logits(x), logits):
            break
    else:
        raise NotFusable("its logits are not the product of its input and its weight")
    for form in _forms(module, choice, [one for one in vectors if one is None or one is not router.bias]):
        found = router._replace(choice=form)
        # The kernel itself, too: this is what will run.
        if _is_choice(form, logits, weights, ids) and _is_choice(form, *found.forward(x)):
            return found
    raise NotFusable("it does not choose by the softmax or the sigmoid of its logits alone")


def _forms(module: nn.Module, choice: Choice, biases: list[Any]) -> Iterator[Choice]:
    """Yields what the choice of a router may be, likely ones first. One of its numbers may be the scale."""
    scales = [value for value in vars(module).values() if isinstance(value, float) and value != 1.0]
    for scale, bias, scoring, normalised in product((1.0, *scales), biases, SCORINGS, (True, False)):
        if bias is None or bias.dtype == torch.float32:
            yield choice._replace(scale=scale, bias=bias, scoring=scoring, normalised=normalised)


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
