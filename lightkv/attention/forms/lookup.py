"""How a row's index finds the slot of a position, for `PagedKV`."""

from typing import NamedTuple

import torch

from lightkv.triton_kernels.layout.ring import Ring


class Lookup(NamedTuple):
    """`PagedKV`'s fields of the same names."""

    ring: Ring | None = None
    indirection: torch.Tensor | None = None


TABLE = Lookup()
