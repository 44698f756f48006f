"""What every kind of weight offers to the layers that multiply with it."""

from typing import Protocol

import torch
from torch import Tensor


class Weight(Protocol):
    """The weight `[N, K]` of linear layers of one input, one below the other. `dtype`: that of its products.
    `nbytes`: of the weight as it is held, with its biases `[N]`."""

    shape: torch.Size
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int: ...

    def dense(self) -> Tensor:
        """Returns the weight as `[N, K]` of `dtype`."""

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns x · weight^T + bias of x `[..., K]`: `[..., N]`, in `out` if that is given."""
