"""Adds up a tensor of every rank, in the way that was measured to be the fastest for its size.

On a GPU there are three: one shot (each rank reads all the others' and adds), two shots (each rank adds a
part, and reads the sums of the other parts), both over memory that all ranks have mapped, and NCCL. Small
tensors are bound by latency, for which one shot has a single exchange; large ones by the bytes over the
links, of which two shots move the least. No way uses multicast. On a CPU there is gloo alone.

The operators are those of torch (`torch.ops.symm_mem`). They read a buffer, so x is copied into it first. They
take no float16, which NCCL adds up in every size.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .symmetric import all_agree, graph_ms, map_memory

Way = Callable[[Tensor], Tensor]

MOST_BYTES = 32 << 20  # of a tensor in symmetric memory; above it NCCL adds up in any case
_SIZES = [8 << 10 << shift for shift in range(0, 13, 2)]  # bytes: 8 KiB, 32 KiB … 32 MiB
_ANY = float("inf")
_SUMMED = (torch.bfloat16, torch.float32)  # by the operators
_ROW_BYTES = 16  # the operators take whole vectors of so many bytes from each rank


class AllReduce:
    """Sums over all ranks. `ways`: all that there are here, by name. `chosen`: the largest number of bytes and
    the way for it, ascending; the last is the library's, and has no limit."""

    def __init__(self, ways: dict[str, Way], chosen: list[tuple[float, str]]) -> None:
        self.ways = ways
        self._chosen = chosen

    @classmethod
    def measured(cls, device: torch.device) -> "AllReduce":
        """Measures the ways on `device`, and agrees with the other ranks on which are used."""
        if device.type != "cuda":
            return cls({"gloo": _by_library}, [(_ANY, "gloo")])
        ways: dict[str, Way] = {"NCCL": _by_library, **_symmetric_ways(device)}
        sums = cls(ways, [(_ANY, "NCCL")])
        if len(ways) > 1:
            fastest = [(size, _fastest(measure_ways(sums, size))) for size in _SIZES]
            following = [*fastest[1:], (_ANY, "NCCL")]
            ends = [one for one, after in zip(fastest, following, strict=True) if one[1] != after[1]]
            sums._chosen = [*ends, (_ANY, "NCCL")]
        return sums

    @property
    def lines(self) -> list[str]:
        """What to report."""
        *bounded, (_, last) = self._chosen
        told = [f"{name} up to {told_bytes(limit)}" for limit, name in bounded]
        return [f"sums over ranks: {', '.join([*told, f'{last} above' if told else last])}"]

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x; x itself may be overwritten."""
        x = x.contiguous()
        fitting = [name for limit, name in self._chosen if x.nbytes <= limit]
        return self.ways[fitting[0] if x.dtype in _SUMMED else fitting[-1]](x)


def told_bytes(num_bytes: float) -> str:
    """Returns a size in words."""
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"


def measure_ways(sums: AllReduce, num_bytes: int) -> dict[str, float]:
    """Returns the milliseconds that each way takes for a tensor of `num_bytes`, in a CUDA graph."""
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
    return {name: graph_ms(partial(way, x)) for name, way in sums.ways.items()}


def _fastest(times: dict[str, float]) -> str:
    return min(times, key=lambda name: times[name])


def _by_library(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _symmetric_ways(device: torch.device) -> dict[str, Way]:
    """Returns the ways over mapped memory; none where they do not give the right sum on every rank."""
    mapped = map_memory(MOST_BYTES, device)
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
