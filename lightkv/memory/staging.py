"""Copies several small arrays from host to device in one asynchronous copy.

On CUDA the pinned memory comes from torch's caching host allocator, which reuses a block only after the copies
that read it are done. So a step may stage its numbers while the copy of the step before is still in flight.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

ALIGNMENT = 16  # bytes; Triton compiles a second kernel for pointers that have less


def packed_size(arrays: Sequence[np.ndarray]) -> int:
    """Returns the bytes that `upload` needs for these arrays."""
    return sum(_padded(array.nbytes) for array in arrays)


def upload(
    arrays: Sequence[np.ndarray], device: torch.device, out: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Returns the one-dimensional `arrays` as tensors on `device`, by one copy and without synchronising.

    `out`: uint8 `[packed_size(arrays)]` or longer, on `device`; the tensors are then views of it, at the same
    addresses whenever the sizes are the same. Without it they share newly allocated memory.
    """
    host = torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged = host.numpy()
    offsets = []
    end = 0
    for array in arrays:
        offsets.append(end)
        staged[end : end + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
        end += _padded(array.nbytes)
    if out is not None:
        packed = out[:end]
        packed.copy_(host, non_blocking=True)
    else:
        packed = host if device.type == "cpu" else host.to(device, non_blocking=True)
    return [
        packed[start : start + array.nbytes].view(_torch_dtype(array.dtype))
        for start, array in zip(offsets, arrays, strict=True)
    ]


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
