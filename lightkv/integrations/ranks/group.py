"""The ranks that run one model together: what they add up, gather, and agree on.

Every rank makes the same calls in the same order. Tensors of a GPU go through NCCL, and those of a CPU, like
the few numbers that the hosts agree on, through gloo. Inside a decoder layer ranks only ever add up: as a rule
together with the residual and the norm (`term_room.py`), and otherwise by `sum`. A CUDA graph can capture both.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .term_room import TermRoom

# The ranks are on one host, so nothing listens on its network: NCCL would take another interface than the
# loopback one where there is one, and opens a port more for a tool that asks it for its state (RAS). Multicast
# over NVLink is off: a program that ends badly while it uses it can take the GPUs of a host out of service.
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
_DAY = timedelta(days=1)  # the router bounds the time of every call, and kills a rank that takes longer


class RankGroup:
    """The ranks of one model, as the process with number `rank` of `size` sees them.

    `store`: where they find each other, the same for all. A process belongs to one group at most. Blocks until
    every rank has joined. The ranks are on one host, and each has a device of its own, or a CPU. On the meta
    device there are no other ranks: their tensors have shapes alone (`of_shapes`).
    """

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} ranks; ranks are numbered from 0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.device = device
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        backends = {"cuda": "cpu:gloo,cuda:nccl", "meta": "fake"}
        dist.init_process_group(
            backends.get(device.type, "gloo"), store=store, rank=rank, world_size=size, timeout=_DAY
        )
        self.room = TermRoom.on(rank, device)

    @classmethod
    @contextmanager
    def of_shapes(cls, size: int) -> Iterator["RankGroup"]:
        """Yields rank 0 of a group whose other ranks do not exist, for a model on the meta device."""
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

        ranks = cls(0, size, FakeStore(), torch.device("meta"))
        try:
            yield ranks
        finally:
            ranks.leave()

    @property
    def lines(self) -> list[str]:
        """What to report: which sums are joined with what follows them."""
        return [] if self.room is None else self.room.lines

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x, in the memory of x or in other memory. It has the same bits on
        all."""
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Returns the ranks' x, `[..., n]`, side by side: `[..., size · n]`."""
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(parts), x.contiguous())
        return parts.movedim(0, -2).flatten(-2)

    def take_first(self, x: Tensor) -> Tensor:
        """Overwrites x with that of rank 0, and returns it."""
        dist.broadcast(x, 0)
        return x

    def clock_of_first(self) -> float:
        """Returns the seconds on the clock of rank 0, so that what depends on them goes the same way on all."""
        return self.take_first(torch.tensor(time.perf_counter(), dtype=torch.float64)).item()

    def smallest(self, number: int) -> int:
        """Returns the smallest number that a rank has given."""
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def leave(self) -> None:
        """Ends the group. All ranks call this, or end."""
        dist.destroy_process_group()
