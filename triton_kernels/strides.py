"""How tensors that are handed to the kernels have to lie in memory."""

from torch import Tensor


def has_unit_stride(tensor: Tensor) -> bool:
    """Whether the numbers of the last dim are side by side: a single one is, whatever the stride says."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1 or tensor.numel() == 0
