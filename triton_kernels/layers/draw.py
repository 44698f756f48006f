"""Draws one token per row from scores: temperature, min-p, top-k, top-p and one uniform number.

A token is drawn by inverting the cumulative distribution in vocabulary order. The probabilities become integers
first, weight = floor(2^40 p / max p). Sums of integers are exact in any order, so a draw does not depend on the
batch, on the sampler's kind or on how a device adds up, and a token of weight zero is never drawn. Each token
loses less than 2^-40 of the likeliest token's probability; float32 sums over a large vocabulary lose more and
can even decrease.

On a GPU, programs share a row, because one alone would read it slowly:

    scores   ├── part 0 ──┼── part 1 ──┼── part 2 ──┼─ part 3 ─┤
    best     the largest score of each part, and the lowest id that has it
    sums     the weights of each part, added up
    draw     one program finds the part that the uniform number falls into, and the token within it
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

MAX_VOCAB_SIZE = 2**22  # the sum of so many weights of at most 2^40 stays within int64
_WEIGHT_SCALE = tl.constexpr(2.0**40)
_PART = 2048  # tokens of a program


class Draws(NamedTuple):
    """How the token of each row is drawn: fields of 4 bytes `[B, 1]` with one stride, and int64 `[B]`.

    `temperature`, float32: 0 takes the likeliest token. `min_p`, `top_p`: float32. `top_k`, int32: below 1 for
    all tokens. The uniform number depends on the seed and on the position, which are contiguous.
    """

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor


@triton.jit
def _mixed(state):
    """Returns what `_mix` does."""
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def _load_weights(scores, tokens, inside, top, temperature, min_p, IS_WEIGHTS: tl.constexpr):
    """Returns the weights of a part, float32, as `token_weights_` computes them."""
    values = tl.load(scores + tokens, mask=inside, other=0.0).to(tl.float32)
    if IS_WEIGHTS:
        return values
    weights = tl.exp(tl.div_rn(values - top, tl.where(temperature == 0.0, 1.0, temperature)))
    return tl.where(inside & (weights >= min_p), weights, 0.0)


@triton.jit
def _best_kernel(
    scores,  # [B, V]
    best,  # [B, parts], written
    ids,  # likewise
    num_tokens,
    stride,
    PART: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * PART + tl.arange(0, PART)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tuning.wait_early(EARLY)
    values = tl.load(scores + row * stride + tokens, mask=tokens < num_tokens, other=float("-inf"))
    value, place = tl.max(values.to(tl.float32), 0, return_indices=True)
    tl.store(best + at, value)
    tl.store(ids + at, tl.program_id(0) * PART + place)


@triton.jit
def _weigh_kernel(
    scores,  # [B, V]
    best,  # [B, parts]
    temperature,  # [B]
    min_p,  # [B]
    weights,  # [B, V], written; None where only sums are wanted
    sums,  # [B, parts], written
    num_tokens,
    stride,
    stride_rows,  # of temperature and min_p
    IS_WEIGHTS: tl.constexpr,  # scores are weights already
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    parts = tl.arange(0, PARTS)
    tokens = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = tokens < num_tokens
    first = row * tl.num_programs(0)
    tuning.wait_early(EARLY)
    top = tl.max(tl.load(best + first + parts, mask=parts < tl.num_programs(0), other=float("-inf")), 0)
    warmth, least = tl.load(temperature + row * stride_rows), tl.load(min_p + row * stride_rows)
    found = _load_weights(scores + row * stride, tokens, inside, top, warmth, least, IS_WEIGHTS)
    if weights is not None:
        tl.store(weights + row * num_tokens + tokens, found, mask=inside)
    tl.store(sums + first + tl.program_id(0), tl.sum((found * _WEIGHT_SCALE).to(tl.int64), 0))


@triton.jit
def _draw_kernel(
    scores,  # [B, V]
    best,  # [B, parts]
    ids,  # likewise
    sums,  # likewise; None to take the best token of each row
    temperature,  # [B]
    min_p,  # [B]
    seeds,  # [B]
    positions,  # [B]
    drawn,  # [B], written
    num_tokens,
    num_parts,
    stride,
    stride_rows,  # of temperature and min_p
    stride_seeds,
    IS_WEIGHTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    first = row * num_parts
    is_part = parts < num_parts
    tuning.wait_early(EARLY)
    top, place = tl.max(
        tl.load(best + first + parts, mask=is_part, other=float("-inf")), 0, return_indices=True
    )
    token = tl.load(ids + first + tl.minimum(place, num_parts - 1))
    if sums is not None:
        warmth, least = tl.load(temperature + row * stride_rows), tl.load(min_p + row * stride_rows)
        state = _mixed(tl.load(seeds + row * stride_seeds))
        state = _mixed(state + tl.load(positions + row) * -0x61C8864680B583EB)
        uniform = ((state >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
        of_parts = tl.load(sums + first + parts, mask=is_part, other=0)
        target = (uniform * tl.sum(of_parts, 0).to(tl.float64)).to(tl.int64)
        part = tl.minimum(tl.sum((tl.cumsum(of_parts, 0) <= target).to(tl.int32), 0), num_parts - 1)
        target -= tl.sum(tl.where(parts < part, of_parts, 0), 0)
        tokens = part * PART + tl.arange(0, PART)
        inside = tokens < num_tokens
        weights = _load_weights(scores + row * stride, tokens, inside, top, warmth, least, IS_WEIGHTS)
        ends = tl.cumsum((weights * _WEIGHT_SCALE).to(tl.int64), 0)
        other = part * PART + tl.sum((ends <= target).to(tl.int32), 0)
        token = tl.where(warmth > 0.0, other, token)
    tl.store(drawn + row, tl.minimum(token, num_tokens - 1).to(tl.int64))


def draw_tokens(scores: Tensor, draws: Draws | None = None, is_truncated: bool = False) -> Tensor:
    """Returns a token of each row, int64 `[B]`: the likeliest one, or by `draws` a random one.

    Args:
        scores: `[B, V]` of any float dtype, with contiguous rows; not modified.
        draws: None to take the lowest id among the largest scores of each row.
        is_truncated: top-k and top-p are applied.

    Of a row that holds NaN or +inf, or nothing but -inf, it returns some token. Nothing synchronises, so a CUDA
    graph can capture it. A sampler on a CPU calls the reference.

    Raises:
        ValueError: rows are not contiguous.
    """
    num_rows, num_tokens = scores.shape
    if scores.stride(1) != 1:
        raise ValueError(f"scores with strides {scores.stride()}; give contiguous rows")
    num_parts = triton.cdiv(num_tokens, _PART)
    # Zeros are tokens, too: where kernels are only compiled (`compile_ahead`), something reads these.
    drawn = torch.zeros(num_rows, dtype=torch.int64, device=scores.device)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=scores.device)
    ids = torch.empty_like(best, dtype=torch.int32)
    if not num_rows:
        return drawn
    grid, options = (num_parts, num_rows), {"PART": _PART, "num_warps": 4}
    options |= tuning.early_options(scores.device)
    _best_kernel[grid](scores, best, ids, num_tokens, scores.stride(0), **options)
    options["PARTS"] = tuning.block_for(num_parts)
    if draws is None:
        none = (None,) * 5
        _draw_kernel[(num_rows,)](
            scores, best, ids, *none, drawn, num_tokens, num_parts, 0, 0, 0, IS_WEIGHTS=False, **options
        )
        return drawn
    sums, settings = torch.empty_like(best, dtype=torch.int64), (draws.temperature, draws.min_p)
    stride = draws.temperature.stride(0)

    def weigh(scores: Tensor, weights: Tensor | None, are_weights: bool) -> None:
        sizes = num_tokens, scores.stride(0), stride
        _weigh_kernel[grid](scores, best, *settings, weights, sums, *sizes, IS_WEIGHTS=are_weights, **options)

    if is_truncated:
        weights = torch.empty((num_rows, num_tokens), dtype=torch.float32, device=scores.device)
        weigh(scores, weights, False)
        truncate_(weights, draws.top_k, draws.top_p)
        scores = weights
    weigh(scores, None, is_truncated)
    _draw_kernel[(num_rows,)](
        scores,
        best,
        ids,
        sums,
        *settings,
        draws.seeds,
        draws.positions,
        drawn,
        num_tokens,
        num_parts,
        scores.stride(0),
        stride,
        draws.seeds.stride(0),
        IS_WEIGHTS=is_truncated,
        **options,
    )
    return drawn


def draw_tokens_reference(scores: Tensor, draws: Draws | None = None, is_truncated: bool = False) -> Tensor:
    """Computes `draw_tokens` in plain torch."""
    scores = scores.to(torch.float32, copy=True)
    best_score, best = scores.max(dim=-1, keepdim=True)
    if draws is None:
        return best.squeeze(1)
    weights = token_weights_(scores, best_score, draws.temperature, draws.min_p)
    if is_truncated:
        truncate_(weights, draws.top_k, draws.top_p)
    drawn = pick(weights, uniforms(draws.seeds, draws.positions))
    return torch.where(draws.temperature > 0, drawn, best).squeeze(1)


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
    return weights.mul(_WEIGHT_SCALE.value).long().cumsum_(dim=-1)  # int64 [B, V]
