"""Adds up a tensor of every rank, in the way that was measured to be the fastest for its size.

On a GPU there are three: one shot (each rank reads all the others' and adds), two shots (each rank adds a part, and
reads the sums of the other parts), both over symmetric memory, and NCCL. Small tensors are bound by latency, for
which one shot has a single exchange; large ones by the bytes over the links, of which two shots move the least. No
way uses multicast. On a CPU there is gloo alone.

The operators are those of torch (`torch.ops.symm_mem`). They read a buffer that all ranks have mapped, so x is
copied into it first.
"""

from collections.abc import Callable
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

Way = Callable[[Tensor], Tensor]

MOST_BYTES = 32 << 20  # of a tensor in symmetric memory; above it NCCL adds up in any case
_SIZES = [8 << 10 << shift for shift in range(0, 13, 2)]  # bytes: 8 KiB, 32 KiB … 32 MiB
_TIMES = 20
_RUNS_A_GRAPH = 10
_ANY = float("inf")
_ROW_BYTES = 16  # the operators take whole vectors of so many bytes from each rank


class AllReduce:
    """Sums over all ranks. `ways`: all that there are here, by name. `chosen`: the largest number of bytes and the
    way for it, ascending; the last has no limit."""

    def __init__(self, ways: dict[str, Way], chosen: list[tuple[float, str]]) -> None:
        self.ways = ways
        self._chosen = chosen

    @classmethod
    def measured(cls, device: torch.device) -> "AllReduce":
        """Measures the ways on `device`, and agrees with the other ranks on which are used."""
        if device.type != "cuda":
            return cls({"gloo": _by_library}, [(_ANY, "gloo")])
        sums = cls({"NCCL": _by_library}, [(_ANY, "NCCL")])
        buffer = _symmetric_buffer(device)
        if buffer is None:
            return sums
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        sums.ways["one shot"] = lambda x: _one_shot(x, buffer, group)
        sums.ways["two shots"] = lambda x: _two_shots(x, buffer, group)
        fastest = []
        for size in _SIZES:
            times = torch.tensor(list(measure_ways(sums, size).values()))
            dist.all_reduce(times, dist.ReduceOp.MAX)  # of the slowest rank, so that all choose alike
            fastest.append((size, list(sums.ways)[int(times.argmin())]))
        following = [*fastest[1:], (_ANY, "NCCL")]
        ends = [one for one, after in zip(fastest, following, strict=True) if one[1] != after[1]]
        sums._chosen = [*ends, (_ANY, "NCCL")]
        return sums

    @property
    def lines(self) -> list[str]:
        """What to report."""
        *bounded, (_, last) = self._chosen
        told = [f"{name} up to {_told(limit)}" for limit, name in bounded]
        return [f"sums over ranks: {', '.join([*told, f'{last} above' if told else last])}"]

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of every rank's x; x itself may be overwritten."""
        x = x.contiguous()
        way = next(name for limit, name in self._chosen if x.nbytes <= limit)
        return self.ways[way](x)


def _told(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"


def _by_library(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _symmetric_buffer(device: torch.device) -> Tensor | None:
    """Returns memory of `MOST_BYTES` bytes that every rank has mapped; None where the ranks' devices cannot reach
    each other, or torch lacks the operators."""
    buffer = None
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(buffer, cast(Any, dist.group.WORLD))
        probe = torch.ones(1024, dtype=torch.bfloat16, device=device)
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        sums = _one_shot(probe, buffer, group), _two_shots(probe, buffer, group)
        works = all(bool((one == dist.get_world_size()).all()) for one in sums)
    except (ImportError, AttributeError, RuntimeError):
        works, buffer = False, None
    agreed = torch.tensor(int(works))  # all use it, or none: the others would wait for ever
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return buffer if agreed else None


def _in_buffer(x: Tensor, buffer: Tensor) -> Tensor:
    """Copies x to the begin of the buffer, padded to what the operators take, and returns the copy, flat."""
    step = _ROW_BYTES * dist.get_world_size() // x.element_size()
    num = -(-x.numel() // step) * step
    copy = buffer[: num * x.element_size()].view(x.dtype)
    copy[: x.numel()].copy_(x.view(-1))
    return copy


def _one_shot(x: Tensor, buffer: Tensor, group: str) -> Tensor:
    out = torch.ops.symm_mem.one_shot_all_reduce(_in_buffer(x, buffer), "sum", group)
    return out[: x.numel()].view(x.shape)


def _two_shots(x: Tensor, buffer: Tensor, group: str) -> Tensor:
    copy = _in_buffer(x, buffer)
    torch.ops.symm_mem.two_shot_all_reduce_(copy, "sum", group)
    return x.copy_(copy[: x.numel()].view(x.shape))


def measure_ways(sums: AllReduce, num_bytes: int) -> dict[str, float]:
    """Returns the milliseconds that each way takes on this rank for a tensor of `num_bytes`, in a CUDA graph."""
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
    return {name: _time(way, x) for name, way in sums.ways.items()}


def _time(way: Way, x: Tensor) -> float:
    """Returns the milliseconds of one sum of x, as the median of some graphs of several sums each."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        way(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_RUNS_A_GRAPH):
                way(x)
        times = []
        for _ in range(_TIMES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / _RUNS_A_GRAPH)
    return median(times)
