"""Draws one token per row from float32 scores: temperature, min-p, top-k, top-p and one uniform number.

A token is drawn by inverting the cumulative distribution in vocabulary order. The probabilities become integers
first, weight = floor(2^40 p / max p). Sums of integers are exact in any order, so a draw does not depend on the
batch, on the sampler's kind or on how a device adds up, and a token of weight zero is never drawn. Each token
loses less than 2^-40 of the likeliest token's probability; float32 sums over a large vocabulary lose more and
can even decrease.
"""

import torch
from torch import Tensor

MAX_VOCAB_SIZE = 2**22  # the sum of so many weights of at most 2^40 stays within int64
_WEIGHT_SCALE = 2.0**40


def token_weights_(scores: Tensor, best_score: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Turns scores into p / max p, in place; weights below min_p become 0. float32 `[B, V]`, others `[B, 1]`.

    Relative to the likeliest token, min-p is a comparison and needs no sum over the vocabulary. Rows of
    temperature 0 get the weights of temperature 1; the caller takes their argmax instead.
    """
    weights = scores.sub_(best_score).div_(temperature.masked_fill(temperature == 0, 1.0)).exp_()
    return weights.masked_fill_(weights < min_p, 0.0)


def truncate_(weights: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Sets the weights that top-k and then top-p leave out to 0, in place.

    weights: float32 `[B, V]`; top_k: int32 `[B, 1]`, below 1 for all tokens; top_p: float32 `[B, 1]`. Tokens as
    likely as the k-th stay. top-p keeps the smallest set of the tokens that top-k kept whose share is at least
    top_p; among equally likely tokens it keeps the lowest ids.
    """
    vocab_size = weights.shape[1]
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size).long()
    ordered.masked_fill_(ordered < ordered.gather(1, k - 1), 0.0)

    mass = _cumulative(ordered)
    total = mass[:, -1:]
    # Rounded up to an integer. At top_p = 1 the total itself is used: float64 cannot hold every int64.
    enough = torch.where(top_p < 1, (top_p.double() * total).ceil_().long(), total)
    ordered[:, 1:].masked_fill_(mass[:, :-1] >= enough, 0.0)
    # Back to vocabulary order, so that rows with and without truncation are drawn in the same way.
    weights.scatter_(1, ids, ordered)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Returns the first token whose cumulative weight exceeds the share `uniform` of the total; int64 `[B, 1]`.

    weights: float32 `[B, V]`, 0 to 1; uniform: float64 `[B]`, in [0, 1).
    """
    mass = _cumulative(weights)
    # Below the total in float64 too: a uniform is at most 1 - 2^-53, so the product loses a whole ulp.
    target = (uniform[:, None] * mass[:, -1:]).long()
    return torch.searchsorted(mass, target, right=True).clamp_(max=weights.shape[1] - 1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns one number in [0, 1) per row, float64 `[B]`, that depends on seed and position alone.

    This is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Its
    state starts at the mixed seed, so that neighbouring seeds have unrelated streams, and is advanced by
    `position` steps. seeds, positions: int64 `[B]`.
    """
    state = _mix(_mix(seeds) + positions * -0x61C8864680B583EB)
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser. int64 stands for uint64: products wrap, and constants are written as signed."""
    state = (state ^ _shift_right(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ _shift_right(state, 27)) * -0x6B2FB644ECCEEE15
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, num_bits: int) -> Tensor:
    """Shifts logically: int64 shifts copies of its sign in, which are masked away."""
    return (state >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _cumulative(weights: Tensor) -> Tensor:
    return weights.mul(_WEIGHT_SCALE).long().cumsum_(dim=-1)  # int64 [B, V]
