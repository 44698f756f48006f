"""Adds up a tensor of every rank, in the way that is the fastest for its size.

On a GPU there are three: one shot (each rank reads all the others' and adds), two shots (each rank adds a
part, and reads the sums of the other parts), both over memory that all ranks have mapped, and NCCL. Small
tensors are bound by latency, for which one shot has a single exchange; large ones by the bytes over the
links. No way uses multicast. On a CPU there is gloo alone.

The operators are those of torch (`torch.ops.symm_mem`). They read a buffer, so x is copied into it first. They
take no float16, which NCCL adds up in every size.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .symmetric import all_agree, map_memory

Way = Callable[[Tensor], Tensor]

# The most bytes of a tensor for each way, from measurements on two H100 and two H200 (docs/measured.md).
_LIMITS = {"one shot": 64 << 10, "two shots": 8 << 20}
BUFFER_BYTES = max(_LIMITS.values())  # of mapped memory
_SUMMED = (torch.bfloat16, torch.float32)  # by the operators
_ROW_BYTES = 16  # the operators take whole vectors of so many bytes from each rank


class AllReduce:
    """Sums over all ranks. `ways`: all that there are here, by name; the first is the library's."""

    def __init__(self, ways: dict[str, Way]) -> None:
        self.ways = ways
        self._library = next(iter(ways))
        self._limits = {name: limit for name, limit in _LIMITS.items() if name in ways}

    @classmethod
    def on(cls, device: torch.device) -> "AllReduce":
        """Makes the ways that work on every rank's `device`."""
        if device.type != "cuda":
            return cls({"gloo": _by_library})
        return cls({"NCCL": _by_library, **_symmetric_ways(device)})

    @property
    def lines(self) -> list[str]:
        """What to report."""
        bounded = [f"{name} up to {told_bytes(limit)}" for name, limit in self._limits.items()]
        last = f"{self._library} above" if bounded else self._library
        return [f"sums over ranks: {', '.join([*bounded, last])}"]

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x; x itself may be overwritten."""
        x = x.contiguous()
        limits = self._limits if x.dtype in _SUMMED else {}
        fitting = (name for name, limit in limits.items() if x.nbytes <= limit)
        return self.ways[next(fitting, self._library)](x)


def told_bytes(num_bytes: int) -> str:
    """Returns a size in words."""
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"


def _by_library(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _symmetric_ways(device: torch.device) -> dict[str, Way]:
    """Returns the ways over mapped memory; none where they do not give the right sum on every rank."""
    mapped = map_memory(BUFFER_BYTES, device)
    if mapped is None:
        return {}
    buffer, group = mapped.own, dist.group.WORLD.group_name  # type: ignore[union-attr]
    ways: dict[str, Way] = {
        "one shot": lambda x: _one_shot(x, buffer, group),
        "two shots": lambda x: _two_shots(x, buffer, group),
    }
    try:
        probe = torch.ones(1024, dtype=torch.bfloat16, device=device)
        works = all(bool((way(probe.clone()) == dist.get_world_size()).all()) for way in ways.values())
    except (AttributeError, RuntimeError):  # torch lacks the operators, or the links
        works = False
    return ways if all_agree(works) else {}


def _in_buffer(x: Tensor, buffer: Tensor) -> Tensor:
    """Copies x to the begin of the buffer, padded to what the operators take, and returns the copy, flat."""
    step = _ROW_BYTES * dist.get_world_size() // x.element_size()
    num = -(-x.numel() // step) * step
    copy = buffer[: num * x.element_size()].view(x.dtype)
    copy[: x.numel()].copy_(x.view(-1))
    return copy


def _one_shot(x: Tensor, buffer: Tensor, group: str) -> Tensor:
    out: Tensor = torch.ops.symm_mem.one_shot_all_reduce(_in_buffer(x, buffer), "sum", group)
    return out[: x.numel()].view(x.shape)


def _two_shots(x: Tensor, buffer: Tensor, group: str) -> Tensor:
    copy = _in_buffer(x, buffer)
    torch.ops.symm_mem.two_shot_all_reduce_(copy, "sum", group)
    return x.copy_(copy[: x.numel()].view(x.shape))
