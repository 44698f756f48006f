"""Bans the tokens that a row's mask rules out, by setting their scores to -inf, before the row is sampled."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # tokens of a program


@triton.jit
def _ban_tokens_kernel(
    scores,  # [B, V]
    masks,  # int32 [B, ceil(V / 32)]
    num_tokens,  # V
    stride_scores,
    stride_masks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    bits = tl.load(masks + row * stride_masks + words, mask=words * 32 < num_tokens, other=-1)
    places = tl.arange(0, 32)
    is_banned = (bits[:, None] >> places[None, :]) & 1 == 0
    tokens = words[:, None] * 32 + places[None, :]
    # Nothing is written for tokens that are allowed, so rows without a grammar cost the reading of their masks.
    pointers = scores + row * stride_scores + tokens
    tl.store(pointers, float("-inf"), mask=is_banned & (tokens < num_tokens))


def ban_tokens(scores: Tensor, masks: Tensor) -> None:
    """Sets the scores of tokens that are not allowed to -inf, in place.

    scores: `[B, V]`, any float dtype, with contiguous rows. masks: int32 `[B, ceil(V / 32)]`, with contiguous
    rows; bit t % 32 of word t // 32 is set where token t is allowed. On a CPU call the reference.

    Raises:
        ValueError: the shapes or dtypes are others.
    """
    _check(scores, masks)
    if len(scores):
        grid = len(scores), triton.cdiv(scores.shape[1], _BLOCK)
        _ban_tokens_kernel[grid](
            scores, masks, scores.shape[1], scores.stride(0), masks.stride(0), BLOCK=_BLOCK, num_warps=4
        )


def ban_tokens_reference(scores: Tensor, masks: Tensor) -> None:
    """Computes `ban_tokens` on a CPU."""
    _check(scores, masks)
    # The bytes of a word are little-endian, as the bits within them are.
    bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
    scores.masked_fill_(torch.from_numpy(bits == 0)[:, : scores.shape[1]], -torch.inf)


def _check(scores: Tensor, masks: Tensor) -> None:
    """Raises ValueError if the masks are not those of the scores, as `ban_tokens` says."""
    shape = len(scores), -(-scores.shape[1] // 32)
    if masks.shape != shape or masks.dtype != torch.int32 or masks.stride(1) != 1 or scores.stride(1) != 1:
        raise ValueError(
            f"masks of {masks.dtype} {tuple(masks.shape)} for scores {tuple(scores.shape)}; give int32 "
            f"{list(shape)}, and contiguous rows of both"
        )
