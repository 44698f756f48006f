"""Chooses the experts of each token from a router's logits: scores, top-k and weights, in one kernel."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

SCORINGS = ("softmax", "sigmoid")
MAX_EXPERTS = 4096  # which one program holds in registers
_LEAST = tl.constexpr(-(2**60))  # below the key of any expert
_TINY = tl.constexpr(1e-20)  # added to a sum of scores that may all be 0


class Choice(NamedTuple):
    """How a router chooses `top_k` experts.

    The scores are the softmax or the sigmoid (`scoring`) of the logits in float32. Those experts are chosen
    whose scores plus `bias` are the highest, of equal ones those with the lowest index. Their weights are the
    scores without the bias, divided by their sum if `normalised`, times `scale`, rounded to `dtype`. A softmax
    without a bias chooses by the logits, which its rounding cannot make equal.
    """

    top_k: int
    scoring: str
    normalised: bool
    bias: Tensor | None  # float32 `[E]`
    scale: float
    dtype: torch.dtype


@triton.jit
def _choice_kernel(
    logits,  # [T, E]
    bias,  # [E] or None
    weights,  # [T, K], written
    ids,  # [T, K], written
    scale,
    stride_t,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    within = experts < E
    tuning.wait_early(EARLY)
    x = tl.load(logits + token * stride_t + experts, mask=within, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
        ranked = scores
    else:
        powers = tl.exp(x - tl.max(x, 0))
        scores = powers / tl.sum(powers, 0)
        ranked = x
    if bias is not None:
        ranked = scores + tl.load(bias + experts, mask=within, other=0.0)
    # Integers in the order of the numbers, and of equal numbers the lowest index is the largest: so one maximum
    # finds one expert, whatever the numbers are.
    bits = tl.where(ranked == 0.0, 0.0, ranked).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = bits.to(tl.int64) * BLOCK + (BLOCK - 1 - experts)
    keys = tl.where(within, keys, _LEAST)
    order = tl.full([BLOCK], K, tl.int32)
    for turn in range(K):
        is_next = keys == tl.max(keys, 0)
        order = tl.where(is_next, turn, order)
        keys = tl.where(is_next, _LEAST, keys)
    chosen = order < K
    if NORMALISED:
        scores = scores / (tl.sum(tl.where(chosen, scores, 0.0), 0) + _TINY)
    tl.store(weights + token * K + order, (scores * scale).to(weights.dtype.element_ty), mask=chosen)
    tl.store(ids + token * K + order, experts.to(tl.int64), mask=chosen)


def expert_choice(logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Returns the weights of each token's experts, `[T, top_k]`, and their ids, int64, the highest first.

    `logits`: `[T, E]` of any floating type, the last dim contiguous. Nothing synchronises, so a CUDA graph can
    capture it. A model on a CPU calls the reference.

    Raises:
        ValueError: the last stride is not 1, E is above 4,096 or below `top_k`, or the scoring is unknown.
    """
    num_tokens, num_experts = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("the last stride of the logits must be 1; make them contiguous")
    if not 1 <= choice.top_k <= num_experts <= MAX_EXPERTS or choice.scoring not in SCORINGS:
        raise ValueError(
            f"{choice.top_k} of {num_experts} experts by {choice.scoring!r}; give at most {MAX_EXPERTS}, at "
            f"least as many as are chosen, and one of {', '.join(SCORINGS)}"
        )
    weights = logits.new_empty((num_tokens, choice.top_k), dtype=choice.dtype)
    ids = zeroed_indices(logits, (num_tokens, choice.top_k), torch.int64)
    if num_tokens:
        _choice_kernel[(num_tokens,)](
            logits,
            choice.bias,
            weights,
            ids,
            choice.scale,
            logits.stride(0),
            E=num_experts,
            K=choice.top_k,
            BLOCK=max(32, triton.next_power_of_2(num_experts)),
            SIGMOID=choice.scoring == "sigmoid",
            NORMALISED=choice.normalised,
            num_warps=1 if num_experts <= 512 else 4,  # one warp needs no shared memory for its maxima
            **tuning.early_options(logits.device),
        )
    return weights, ids


def zeroed_indices(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor for indices that a kernel writes, on the device of `like`.

    It is 0 unless a CUDA graph is captured: a rehearsal (`compile_ahead`) launches no kernel of Triton, and
    what PyTorch runs after it must not read outside of a tensor.
    """
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return like.new_empty(shape, dtype=dtype)
    return like.new_zeros(shape, dtype=dtype)


def expert_choice_reference(logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Computes `expert_choice` in plain torch."""
    wide = logits.float()
    scores = scores_of(wide, choice)
    by = wide if choice.scoring == "softmax" else scores
    by = by if choice.bias is None else scores + choice.bias
    ids = by.sort(dim=-1, descending=True, stable=True).indices[:, : choice.top_k]
    return weights_of(scores, ids, choice), ids


def scores_of(logits: Tensor, choice: Choice) -> Tensor:
    """Returns the scores, float32 `[T, E]`, of logits in float32."""
    return logits.sigmoid() if choice.scoring == "sigmoid" else logits.softmax(-1)


def weights_of(scores: Tensor, ids: Tensor, choice: Choice) -> Tensor:
    """Returns the weights of the experts `ids`, `[T, top_k]`."""
    chosen = scores.gather(1, ids)
    if choice.normalised:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _TINY.value)
    return (chosen * choice.scale).to(choice.dtype)
