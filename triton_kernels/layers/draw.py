"""Draws one token per row from scores: temperature, min-p, top-k, top-p and one uniform number.

A token is drawn by inverting the cumulative distribution in vocabulary order. The probabilities become integers
first, weight = floor(2^40 p / max p). Sums of integers are exact in any order, so a draw does not depend on the
batch, on the sampler's kind or on how a device adds up, and a token of weight zero is never drawn. Each token
loses less than 2^-40 of the likeliest token's probability; float32 sums over a large vocabulary lose more and
can even decrease.

On a GPU, programs share a row, because one alone would read it slowly:

    scores   ├── part 0 ──┼── part 1 ──┼── part 2 ──┼─ part 3 ─┤
    best     the largest score of each part, and the lowest id that has it
    weigh    the weights of each part, added up
    cut      one program for each row that has top-k or top-p removes the weights that these leave out
    draw     one program finds the part that the uniform number falls into, and the token within it

Nothing is sorted for top-k and top-p. The weight of the last token that stays is found by bisection of its
bits, which order weights as their values do; once few tokens can be it, these are searched alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

MAX_VOCAB_SIZE = 2**22  # the sum of so many weights of at most 2^40 stays within int64
_WEIGHT_SCALE = tl.constexpr(2.0**40)
_LEAST_BITS = tl.constexpr(0x2B800000)  # of 2^-40; smaller weights are 0 as integers
_ABOVE_ONE = tl.constexpr(0x3F800001)  # the bits of the float32 after 1, the largest weight
_PART = 2048  # tokens of a program
_CUT_BLOCK = 4 * _PART  # tokens that a program of `cut` reads at once
_FEW = 8192  # tokens that a program of `cut` holds in registers


class Settings(NamedTuple):
    """How the token of each row is drawn: `[B, 1]` each, all with one stride, which is not checked.
    `temperature`, float32: 0 takes the likeliest token. `min_p`, `top_p`: float32. `top_k`, int32: below 1 for
    all tokens."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor


class Draws(NamedTuple):
    """The draw of each row. Its uniform number depends on `seeds` and `positions`, int64 `[B]`; positions are
    contiguous."""

    settings: Settings
    seeds: Tensor
    positions: Tensor


@triton.jit
def _mixed(state):
    """Returns what `_mix` does."""
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@triton.jit
def _integers(weights):
    return (weights * _WEIGHT_SCALE).to(tl.int64)


@triton.jit
def _is_cut(settings, at, num_tokens):
    """Returns whether top-k or top-p is applied to a row."""
    top_k = tl.load(settings.top_k + at)
    return ((top_k > 0) & (top_k < num_tokens)) | (tl.load(settings.top_p + at) < 1.0)


@triton.jit
def _weigh(scores, tokens, inside, best, settings, at):
    """Returns the weights of some tokens, float32, as `token_weights_` computes them."""
    values = tl.load(scores + tokens, mask=inside, other=0.0).to(tl.float32)
    temperature = tl.load(settings.temperature + at)
    weights = tl.exp(tl.div_rn(values - best, tl.where(temperature == 0.0, 1.0, temperature)))
    return tl.where(inside & (weights >= tl.load(settings.min_p + at)), weights, 0.0)


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
    settings,
    weights,  # [B, parts * PART], written in rows that are cut
    sums,  # [B, parts], written
    num_tokens,
    stride,
    stride_settings,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    parts = tl.arange(0, PARTS)
    tokens = tl.program_id(0) * PART + tl.arange(0, PART)
    inside = tokens < num_tokens
    first = row * tl.num_programs(0)
    at = row * stride_settings
    tuning.wait_early(EARLY)
    top = tl.max(tl.load(best + first + parts, mask=parts < tl.num_programs(0), other=float("-inf")), 0)
    found = _weigh(scores + row * stride, tokens, inside, top, settings, at)
    if _is_cut(settings, at, num_tokens):
        tl.store(weights + row * (tl.num_programs(0) * PART) + tokens, found)
    tl.store(sums + first + tl.program_id(0), tl.sum(_integers(found), 0))


@triton.jit
def _load_weights(weights, begin, size, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Returns weights of a row from `begin` on, a part in a row of a tile, and their bits."""
    parts = tl.arange(0, BLOCK // PART)[:, None]
    places = begin + parts * PART + tl.arange(0, PART)[None, :]
    found = tl.load(weights + places, mask=places < size, other=0.0)
    return found, found.to(tl.int32, bitcast=True)


@triton.jit
def _amounts(weights, is_there, BY_WEIGHT: tl.constexpr):
    """Returns what is counted of each token that `is_there`: its weight, or 1; int64."""
    if BY_WEIGHT:
        return _integers(tl.where(is_there, weights, 0.0))
    return is_there.to(tl.int64)


@triton.jit
def _amount(weights, size, bound, BY_WEIGHT: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Returns what is counted of the tokens of at least the weight whose bits are `bound`, and their number."""
    amounts = tl.zeros([PART], tl.int64)
    counts = tl.zeros([PART], tl.int32)
    for begin in range(0, size, BLOCK):
        found, bits = _load_weights(weights, begin, size, PART, BLOCK)
        amounts += tl.sum(_amounts(found, bits >= bound, BY_WEIGHT), 0)
        counts += tl.sum((bits >= bound).to(tl.int32), 0)
    return tl.sum(amounts, 0), tl.sum(counts, 0)


@triton.jit
def _bisect(
    weights,
    few,
    size,
    low,
    num_low,  # tokens from `low` on
    wanted,
    BY_WEIGHT: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """Returns the bits of the largest bound from `low` on for which the tokens of at least this weight amount
    to `wanted`, and the amount of the tokens above it."""
    high = tl.full([], _ABOVE_ONE, tl.int32)
    num_high = tl.full([], 0, tl.int32)
    above = tl.full([], 0, tl.int64)
    while (high - low > 1) & (num_low - num_high > FEW):
        middle = (low + high) // 2
        amount, count = _amount(weights, size, middle, BY_WEIGHT, PART, BLOCK)
        if amount >= wanted:
            low, num_low = middle, count
        else:
            high, num_high, above = middle, count, amount
    if high - low > 1:
        num_found = tl.full([], 0, tl.int32)
        for begin in range(0, size, BLOCK):
            found, bits = _load_weights(weights, begin, size, PART, BLOCK)
            is_between = ((bits >= low) & (bits < high)).to(tl.int32)
            of_parts = tl.sum(is_between, 1)
            first = num_found + tl.cumsum(of_parts, 0) - of_parts
            places = first[:, None] + tl.cumsum(is_between, 1) - 1
            tl.store(few + places, found, mask=is_between > 0)
            num_found += tl.sum(of_parts, 0)
        tl.debug_barrier()  # all of them are stored before any is read
        places = tl.arange(0, FEW)
        found = tl.load(few + places, mask=places < num_found, other=0.0, volatile=True)
        bits = found.to(tl.int32, bitcast=True)
        larger = above
        while high - low > 1:
            middle = (low + high) // 2
            amount = larger + tl.sum(_amounts(found, bits >= middle, BY_WEIGHT), 0)
            if amount >= wanted:
                low = middle
            else:
                high, above = middle, amount
        tl.debug_barrier()  # before `few` is written again
    return low, above


@triton.jit(do_not_specialize=["num_parts"])  # Triton 3.6 compiles no loop that runs once
def _cut_kernel(
    weights,  # [B, parts * PART], changed in rows that are cut
    sums,  # [B, parts], likewise
    settings,
    few,  # [B, FEW]
    num_tokens,
    num_parts,
    stride_settings,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = row * stride_settings
    size = num_parts * PART
    tuning.wait_early(EARLY)
    if _is_cut(settings, at, num_tokens):
        weights += row * size
        few += row * FEW
        top_k, top_p = tl.load(settings.top_k + at), tl.load(settings.top_p + at)
        bound = tl.full([], _LEAST_BITS, tl.int32)
        most_equal = tl.full([], 1 << 40, tl.int64)  # tokens of the smallest weight that stay
        if (top_k > 0) & (top_k < num_tokens):
            num_all = tl.full([], 1, tl.int32) * size
            bound, _larger = _bisect(weights, few, size, bound, num_all, top_k, False, PART, BLOCK, FEW)
        if top_p < 1.0:
            total, count = _amount(weights, size, bound, True, PART, BLOCK)
            enough = tl.maximum(tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
            bound, larger = _bisect(weights, few, size, bound, count, enough, True, PART, BLOCK, FEW)
            most_equal = tl.cdiv(enough - larger, _integers(bound.to(tl.float32, bitcast=True)))
        before = tl.full([], 0, tl.int64)
        parts = tl.arange(0, BLOCK // PART)
        for begin in range(0, size, BLOCK):
            found, bits = _load_weights(weights, begin, size, PART, BLOCK)
            is_equal = (bits == bound).to(tl.int32)
            of_parts = tl.sum(is_equal, 1)
            stays = bits >= bound
            if before + tl.sum(of_parts, 0) > most_equal:
                first = before + tl.cumsum(of_parts, 0) - of_parts
                ranks = first[:, None] + tl.cumsum(is_equal, 1)
                stays = (bits > bound) | (stays & (ranks <= most_equal))
            before += tl.sum(of_parts, 0)
            found = tl.where(stays, found, 0.0)
            places = begin + parts[:, None] * PART + tl.arange(0, PART)[None, :]
            tl.store(weights + places, found, mask=places < size)
            part = begin // PART + parts
            tl.store(sums + row * num_parts + part, tl.sum(_integers(found), 1), mask=part < num_parts)


@triton.jit
def _draw_kernel(
    scores,  # [B, V]
    best,  # [B, parts]
    ids,  # likewise
    settings,
    weights,  # [B, parts * PART], of rows that are cut
    sums,  # [B, parts]; None to take the best token of each row
    seeds,  # [B]
    positions,  # [B]
    drawn,  # [B], written
    num_tokens,
    num_parts,
    stride,
    stride_settings,
    stride_seeds,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    first = row * num_parts
    is_part = parts < num_parts
    tuning.wait_early(EARLY)
    values = tl.load(best + first + parts, mask=is_part, other=float("-inf"))
    top, place = tl.max(values, 0, return_indices=True)
    token = tl.load(ids + first + tl.minimum(place, num_parts - 1))
    if sums is not None:
        state = _mixed(tl.load(seeds + row * stride_seeds))
        state = _mixed(state + tl.load(positions + row) * -0x61C8864680B583EB)
        uniform = ((state >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
        of_parts = tl.load(sums + first + parts, mask=is_part, other=0)
        target = (uniform * tl.sum(of_parts, 0).to(tl.float64)).to(tl.int64)
        part = tl.minimum(tl.sum((tl.cumsum(of_parts, 0) <= target).to(tl.int32), 0), num_parts - 1)
        target -= tl.sum(tl.where(parts < part, of_parts, 0), 0)
        tokens = part * PART + tl.arange(0, PART)
        inside = tokens < num_tokens
        at = row * stride_settings
        if _is_cut(settings, at, num_tokens):
            found = tl.load(weights + row * (num_parts * PART) + tokens)
        else:
            found = _weigh(scores + row * stride, tokens, inside, top, settings, at)
        other = part * PART + tl.sum((tl.cumsum(_integers(found), 0) <= target).to(tl.int32), 0)
        token = tl.where(tl.load(settings.temperature + at) > 0.0, other, token)
    tl.store(drawn + row, tl.minimum(token, num_tokens - 1).to(tl.int64))


def draw_tokens(scores: Tensor, draws: Draws | None = None) -> Tensor:
    """Returns a token of each row, int64 `[B]`: the likeliest one, or by `draws` a random one.

    Args:
        scores: `[B, V]` of any float dtype, with contiguous rows; not modified.
        draws: None to take the lowest id among the largest scores of each row.

    Of a row that holds NaN or +inf, or nothing but -inf, it returns some token. Nothing synchronises, so a CUDA
    graph can capture it. A sampler on a CPU calls the reference.

    Raises:
        ValueError: rows are not contiguous.
    """
    (num_rows, num_tokens), device = scores.shape, scores.device
    if scores.stride(1) != 1:
        raise ValueError(f"scores with strides {scores.stride()}; give contiguous rows")
    num_parts = triton.cdiv(num_tokens, _PART)
    # Zeros are tokens, too: where kernels are only compiled (`compile_ahead`), something reads these.
    drawn = torch.zeros(num_rows, dtype=torch.int64, device=device)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    ids = torch.empty_like(best, dtype=torch.int32)
    if not num_rows:
        return drawn
    grid, stride = (num_parts, num_rows), scores.stride(0)
    options = {"PART": _PART, "num_warps": 4, **tuning.early_options(device)}
    in_parts = {"PARTS": tuning.block_for(num_parts), **options}
    _best_kernel[grid](scores, best, ids, num_tokens, stride, **options)
    if draws is None:
        none, sizes = (None,) * 5, (num_tokens, num_parts, 0, 0, 0)
        _draw_kernel[(num_rows,)](scores, best, ids, *none, drawn, *sizes, **in_parts)
        return drawn
    settings, seeds, positions = draws
    stride_settings = settings.temperature.stride(0)
    sums = torch.empty_like(best, dtype=torch.int64)
    weights = torch.empty((num_rows, num_parts * _PART), dtype=torch.float32, device=device)
    few = torch.empty((num_rows, _FEW), dtype=torch.float32, device=device)
    _weigh_kernel[grid](
        scores, best, settings, weights, sums, num_tokens, stride, stride_settings, **in_parts
    )
    _cut_kernel[(num_rows,)](
        weights,
        sums,
        settings,
        few,
        num_tokens,
        num_parts,
        stride_settings,
        BLOCK=_CUT_BLOCK,
        FEW=_FEW,
        **options | {"num_warps": 16},
    )
    _draw_kernel[(num_rows,)](
        scores,
        best,
        ids,
        settings,
        weights,
        sums,
        seeds,
        positions,
        drawn,
        num_tokens,
        num_parts,
        stride,
        stride_settings,
        seeds.stride(0),
        **in_parts,
    )
    return drawn


def draw_tokens_reference(scores: Tensor, draws: Draws | None = None) -> Tensor:
    """Computes `draw_tokens` in plain torch."""
    best_score, best = scores.max(dim=-1, keepdim=True)
    if draws is None:
        return best.squeeze(1)
    temperature, min_p, top_k, top_p = draws.settings
    weights = scores.to(torch.float32, copy=True)
    token_weights_(weights, best_score, temperature, min_p)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        truncate_(weights, top_k, top_p)
    drawn = pick(weights, uniforms(draws.seeds, draws.positions))
    return torch.where(temperature > 0, drawn, best).squeeze(1)


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
