"""What the torch backend derives from a step once for all its layers: decodes in padded buckets, and the biases
that hide the padding."""

from typing import NamedTuple

import numpy as np
import torch

from lightkv.memory.staging import upload
from lightkv.triton_kernels.attention.variants.variant import Variant

from .step import Step

# Decode pads sequences to the longest of their bucket. A bucket ends where its padding would exceed a quarter
# of its tokens, unless the padding is so small that the calls for another bucket cost more.
PADDING_FRACTION = 0.25
PADDING_TOKENS = 256


class PaddedBucket(NamedTuple):
    """Decodes that attend together, padded to `width` keys."""

    members: torch.Tensor | None  # int64 [n], which of the decodes; None for all of them, in order
    slots: torch.Tensor  # int64 [n * width], slot 0 where padded
    width: int
    bias: torch.Tensor | None  # [n, 1, 1, width]: 0, and -inf where padded; None if there is no padding


def decode_buckets(
    step: Step, index: torch.Tensor, bounded: tuple[Variant, ...], dtype: torch.dtype
) -> list[PaddedBucket]:
    """Returns the decodes of a step in buckets of similar length. `index`: the layer's (`Step.index_of`);
    `bounded`: what limits the first key that a query sees there (`limits`); `dtype` is that of the queries."""
    lengths = step.host.kv_lens[step.host.num_prefills :]
    newest = np.maximum(lengths - 1, 0).tolist()
    firsts = [max([one.first_key(position) for one in bounded], default=0) for position in newest]
    lengths = lengths - np.array(firsts, dtype=np.int64)
    # A padding row of a static batch has length 0. Attention to no key is NaN, so it attends to slot 0.
    lengths = np.maximum(lengths, 1)
    buckets = bucket_lengths(lengths)
    return [
        _padded_bucket(step, index, lengths, members if len(buckets) > 1 else None, dtype)
        for members in buckets
    ]


def bucket_lengths(lengths: np.ndarray) -> list[np.ndarray]:
    """Returns indices into `lengths` (`[B]`, all at least 1), in buckets to be padded to their longest."""
    order = np.argsort(-lengths, kind="stable")
    cuts = []
    longest = total = count = 0
    for idx, length in enumerate(lengths[order].tolist()):
        padding = (count + 1) * longest - (total + length)
        if count and padding > max(PADDING_FRACTION * (total + length), PADDING_TOKENS):
            cuts.append(idx)
            count = total = 0
        if not count:
            longest = length
        count += 1
        total += length
    return np.split(order, cuts)


def _padded_bucket(
    step: Step, index: torch.Tensor, lengths: np.ndarray, members: np.ndarray | None, dtype: torch.dtype
) -> PaddedBucket:
    host = step.host
    rows = host.rows[host.num_prefills :]
    ends = np.maximum(host.kv_lens[host.num_prefills :], 1)
    if members is not None:
        rows, ends, lengths = rows[members], ends[members], lengths[members]
    width = int(lengths.max())
    offsets = np.arange(width)
    padded = offsets >= lengths[:, None]  # [G, width]
    entries = (ends - lengths)[:, None] + offsets
    entries += rows[:, None] * index.shape[1]
    # Padding reads row 0, hence slot 0, whose K/V is finite. The row's own entries there are stale: a free slot
    # may hold NaN, which no bias masks.
    entries[padded] = 0
    arrays = [entries.reshape(-1), padded.reshape(-1), *([] if members is None else [members])]
    where, hidden, *chosen = upload(arrays, index.device)
    bias = None
    if padded.any():
        bias = torch.zeros(len(rows), 1, 1, width, dtype=dtype, device=index.device)
        bias.masked_fill_(hidden.view(bias.shape), float("-inf"))
    return PaddedBucket(chosen[0] if chosen else None, index.view(-1)[where].long(), width, bias)
