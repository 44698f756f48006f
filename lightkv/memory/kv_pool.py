"""The K/V of every slot, in one buffer per layer, and the plan of how many slots fit a device.

Slot 0 is padding: it is zero at first, and safe to read and to write.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lightkv.counts import checked_count
from lightkv.errors import OutOfMemory

from .kv_spec import KVSpec

# A container's limit and its use: cgroup version 2, then 1.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

CPU_TOKENS = 32_768  # the default on a CPU, where a pool that fills the memory would starve everything else


@dataclass(frozen=True)
class PoolPlan:
    """How many tokens a pool will hold, its size in bytes, and the calculation in words."""

    num_tokens: int
    num_bytes: int
    why: str

    @property
    def num_slots(self) -> int:
        """Slots to make: one per token, and slot 0."""
        return self.num_tokens + 1


def plan_pool(
    spec: KVSpec,
    device: torch.device,
    *,
    num_tokens: int | None = None,
    fraction: float = 0.9,
    reserve: int = 0,
) -> PoolPlan:
    """Plans the pool for `device` once the weights are loaded: `num_tokens` if given, else as many as fit.

    On CUDA: `fraction` of the device's memory, less what is in use now and `reserve` bytes (activations,
    graphs, buffers made later). On a CPU: `CPU_TOKENS`, in at most a quarter of the free memory. Raises
    OutOfMemory when not one token fits, ValueError for a count below one or a fraction outside (0, 1].
    """
    per_token = spec.bytes_per_token
    if num_tokens is not None:
        if num_tokens < 1:
            raise ValueError(f"a pool of {num_tokens} tokens; ask for at least one")
        # Checked first, because a CPU's allocation succeeds without memory, and the process is killed later.
        free = _free_bytes(device)
        if (num_tokens + 1) * per_token > free:
            raise OutOfMemory(free, per_token, num_tokens)
        return PoolPlan(num_tokens, (num_tokens + 1) * per_token, f"{num_tokens} tokens were asked for")
    if not 0 < fraction <= 1:
        raise ValueError(f"a memory fraction of {fraction}; it lies above 0 and at most at 1")

    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch caches without using it counts as free
        free, total = torch.cuda.mem_get_info(device)
        available = int(total * fraction) - (total - free) - reserve
        why = (
            f"{fraction:g} of {_gib(total)} on the device, less {_gib(total - free)} in use"
            f"{f' and {_gib(reserve)} reserved' if reserve else ''}: {_gib(max(available, 0))}"
        )
        limit = available
    else:
        free = _free_bytes(device)
        available = free // 4 - reserve
        limit = min(available, (CPU_TOKENS + 1) * per_token)
        why = (
            f"the default of a CPU, {CPU_TOKENS} tokens"
            if limit < available
            else f"a quarter of {_gib(free)} free memory"
        )
    num_slots = limit // per_token
    if num_slots < 2:  # slot 0 holds no token
        raise OutOfMemory(max(available, 0), per_token)
    return PoolPlan(num_slots - 1, num_slots * per_token, f"{why}, at {per_token} bytes a token")


class KVPool:
    """`num_slots` slots of `spec` on `device`.

    Layer `i` is one buffer `[num_slots, num_kv_heads * (k_dim + v_dim)]`: a slot's K heads, then its V heads,
    so that they are adjacent in memory. Raises OutOfMemory, with nothing allocated, if the device has no room.
    """

    def __init__(self, spec: KVSpec, num_slots: int, device: torch.device) -> None:
        num_slots = checked_count("num_slots", num_slots, least=2)  # slot 0 is padding
        self.spec = spec
        self.num_slots = num_slots
        self.device = device
        buffers: list[torch.Tensor] = []
        try:
            for _ in range(spec.num_layers):
                buffers.append(torch.empty(num_slots, spec.width, dtype=spec.dtype, device=device))
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises the bare type
            buffers.clear()
            raise OutOfMemory(_free_bytes(device), spec.bytes_per_token, num_slots - 1) from error
        for buffer in buffers:
            # Padding is read under a mask, and a weight of 0 does not mask a NaN: 0 * NaN is NaN.
            buffer[0].zero_()
        self._buffers = buffers
        self._k, self._v = zip(*map(spec.split, buffers), strict=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_slots * self.spec.bytes_per_token

    def kv(self, layer_idx: int) -> torch.Tensor:
        """Returns K and V of a layer together, `[num_slots, num_kv_heads * (k_dim + v_dim)]`, contiguous."""
        return self._buffers[layer_idx]

    def k(self, layer_idx: int) -> torch.Tensor:
        """Returns K of a layer, `[num_slots, num_kv_heads, k_dim]`, a strided view."""
        return self._k[layer_idx]

    def v(self, layer_idx: int) -> torch.Tensor:
        """Returns V of a layer, `[num_slots, num_kv_heads, v_dim]`, a strided view."""
        return self._v[layer_idx]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        # Free memory, and caches that can be dropped at once.
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for limit, used in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # no such group, or "max"
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(free, 0)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
