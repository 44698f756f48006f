"""Keys that a step attends to without writing them: those in the cache, with the step's own behind them."""

import numpy as np
import torch

from lightkv.memory.staging import upload
from lightkv.triton_kernels.attention.lookups import CONTIGUOUS
from lightkv.triton_kernels.attention.paged_kv import PagedKV

from .step import Step


def join_keys(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, step: Step) -> PagedKV:
    """Returns K and V of all keys of a batch, each sequence's in one run: the cached ones, which are copied
    from `kv`, where `table` finds them, and then this step's, k and v `[num_kv_tokens, num_kv_heads,
    head_dim]`. Writes nothing to `kv`, and needs memory for all keys."""
    numbers = step.numbers
    cached, lengths = numbers.cached, numbers.lengths
    begins = np.cumsum(lengths) - lengths
    rows = np.repeat(np.arange(len(cached)), cached)
    positions = _counted(cached)
    arrays = [rows, positions, np.repeat(begins, cached) + positions]
    new = np.repeat(begins + cached, numbers.kv_lens) + _counted(numbers.kv_lens)
    old_rows, old_positions, old_places, new_places, starts = upload(
        [*arrays, new, begins.astype(np.int32)], k.device
    )
    old_k, old_v = kv.read(kv.lookup.slots_reference(kv.index, old_rows, old_positions))
    joined = []
    for old, own in ((old_k, k), (old_v, v)):
        keys = own.new_empty(int(lengths.sum()), *own.shape[1:])
        keys.index_copy_(0, old_places, old.to(own.dtype))
        joined.append(keys.index_copy_(0, new_places, own))
    return PagedKV(joined[0], joined[1], starts[:, None], lookup=CONTIGUOUS)


def _counted(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, 2 … for each of the counts, int64 `[sum(counts)]`."""
    ends = np.cumsum(counts)
    total: int = int(counts.sum())
    return np.arange(total) - np.repeat(ends - counts, counts)
