"""Checks of how a tensor lies in memory."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the room is read by processes without torch
    from torch import Tensor


def has_unit_stride(tensor: "Tensor") -> bool:
    """Returns whether the elements of the last dim are side by side; a single element is, whatever its
    stride."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1 or tensor.numel() == 0
