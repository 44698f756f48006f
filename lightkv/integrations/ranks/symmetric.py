"""Memory that every rank of a host has mapped."""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Mapped(NamedTuple):
    """Memory of this rank, uint8, zero at first, and the addresses at which this rank sees that of each
    rank."""

    own: Tensor
    addresses: list[int]


def map_memory(num_bytes: int, device: torch.device) -> Mapped | None:
    """Returns `num_bytes` bytes that all ranks have mapped; None, on all, where one of them cannot.

    Every rank calls this with the same number. It uses no multicast, and keeps the memory until the process
    ends.
    """
    own = mapped = None
    try:
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        own.zero_()
    except (ImportError, AttributeError, RuntimeError):
        pass
    if not all_agree(own is not None) or own is None:
        return None  # before the rendezvous, where each rank would wait for one that does not come
    try:
        handle = symmetric.rendezvous(own, cast(Any, dist.group.WORLD))
        mapped = Mapped(own, list(handle.buffer_ptrs))
        torch.cuda.synchronize()
    except (AttributeError, RuntimeError):
        pass
    return mapped if all_agree(mapped is not None) else None


def all_agree(works: bool) -> bool:
    """Returns whether something works on every rank: all use it, or none, or some would wait for ever."""
    agreed = torch.tensor(int(works))
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)
