"""The K/V of every slot, in one buffer per lane, and the plan of how many slots fit a device.

Slot 0 is padding: it is zero at first, and safe to read and to write.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lightkv.counts import checked_count
from lightkv.errors import OutOfMemory
from lightkv.layer_groups import Lane
from lightkv.triton_kernels.quantised.kv_format import Elements, KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import dequantise, hadamard, split_scales
from lightkv.triton_kernels.write.inputs import StoredKV

from .device import usable_device
from .kv_spec import KVSpec

# A container's limit and its use: cgroup version 2, then 1.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

CPU_TOKENS = 32_768  # the default on a CPU, where a pool that fills the memory would starve everything else


@dataclass(frozen=True)
class PoolPlan:
    """How many tokens a pool will hold, its size in bytes, and the calculation in words. Where layers have
    groups, `num_tokens` are slots, of which a token takes several."""

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
    per_slot = spec.bytes_per_slot
    if num_tokens is not None:
        if num_tokens < 1:
            raise ValueError(f"a pool of {num_tokens} tokens; ask for at least one")
        num_slots = num_tokens * spec.groups.num_groups
        # Checked first, because a CPU's allocation succeeds without memory, and the process is killed later.
        free = free_bytes(device)
        if (num_slots + 1) * per_slot > free:
            raise OutOfMemory(free, per_slot * spec.groups.num_groups, num_tokens)
        return PoolPlan(num_slots, (num_slots + 1) * per_slot, f"{num_tokens} tokens were asked for")
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
        free = free_bytes(device)
        available = free // 4 - reserve
        limit = min(available, (CPU_TOKENS * spec.groups.num_groups + 1) * per_slot)
        why = (
            f"the default of a CPU, {CPU_TOKENS} tokens"
            if limit < available
            else f"a quarter of {_gib(free)} free memory"
        )
    num_slots = limit // per_slot
    if num_slots <= spec.groups.num_groups:  # slot 0 holds no token
        raise OutOfMemory(max(available, 0), per_slot * spec.groups.num_groups)
    unit = "token" if spec.groups.is_uniform else "slot"
    return PoolPlan(num_slots - 1, num_slots * per_slot, f"{why}, at {per_slot} bytes a {unit}")


class KVPool:
    """`num_slots` slots of `spec` on `device`.

    Where layers are one group, layer `i` is one buffer `[num_slots, row_width]`: a slot's K heads, then its V
    heads, so that they are adjacent in memory. Layers in the same lane of different groups share it, and those
    in the same lane of one group have their rows beside one another there. Layers that read another one's K/V
    have none of their own. Where they are quantised, a second buffer holds the scales of each slot and head,
    except for static ones, which are the same for all slots.
    These have to be set first: `scales`, `write` and `read` raise ValueError for a layer that lacks them.
    Raises OutOfMemory, with nothing allocated, if the device has no room.
    """

    def __init__(self, spec: KVSpec, num_slots: int, device: torch.device | str) -> None:
        num_slots = checked_count("num_slots", num_slots, least=2)  # slot 0 is padding
        if not isinstance(spec, KVSpec):
            raise TypeError(f"spec is {spec!r} ({type(spec).__name__}); give a KVSpec")
        device = usable_device(device)
        self.spec = spec
        self.num_slots = num_slots
        self.device = device
        layers = range(spec.num_layers)
        lanes = spec.groups.lanes
        buffers: list[torch.Tensor] = []
        rows: dict[int, torch.Tensor] = {}
        scales: dict[int, torch.Tensor] = {}
        try:
            for lane in lanes:
                buffers.append(self._make_lane(lane, rows))
            for lane in lanes:
                buffers += self._make_scales(lane, scales)
        except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator raises the bare type
            buffers.clear()
            rows.clear()
            scales.clear()
            raise OutOfMemory(free_bytes(device), spec.bytes_per_slot, num_slots - 1) from error
        for buffer in (*buffers, *scales.values()):
            # Padding is read under a mask, and a weight of 0 does not mask a NaN: 0 * NaN is NaN.
            buffer[:1].zero_()
        self._buffers = buffers
        self._rows = [rows[spec.holder(layer)] for layer in layers]
        self._static_scales = {layer: one for layer, one in scales.items() if spec.format_of(layer).is_static}
        self._unset = set(self._static_scales)
        heads = [spec.heads(layer) for layer in layers]
        dims = {dim for one in heads for dim in one[1:]} if spec.format.elements.has_hadamard else set()
        self._hadamard = {dim: hadamard(dim, device) for dim in dims}
        self._k, self._v = zip(*map(spec.split, self._rows, layers), strict=True)
        self._scales = [self._by_head(scales.get(spec.holder(layer)), layer) for layer in layers]

    def __repr__(self) -> str:
        return f"KVPool({self.num_slots} slots, {self.num_bytes:,} bytes on {self.device}; {self.spec})"

    def _make_lane(self, lane: Sequence[Lane], rows: dict[int, torch.Tensor]) -> torch.Tensor:
        """Makes the buffer of a lane, of which `lane` has the layers in each group, and adds their views to
        `rows`. The buffer is of bytes where they have several types."""
        spec = self.spec
        types = {spec.row_dtype(layer) for layers in lane for layer in layers}
        dtype = types.pop() if len(types) == 1 else torch.uint8
        width = max(sum(spec.lane_bytes[layer] for layer in layers) for layers in lane)
        buffer = self._make(width // dtype.itemsize, dtype)
        for layers in lane:
            begin = 0
            for layer in layers:
                end = begin + spec.row_width(layer) * spec.row_dtype(layer).itemsize
                view = buffer[:, begin // dtype.itemsize : end // dtype.itemsize]
                rows[layer] = view.view(spec.row_dtype(layer))
                begin += spec.lane_bytes[layer]
        return buffer

    def _make_scales(self, lane: Sequence[Lane], scales: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Makes the buffer of a lane's scales, likewise; none where none of them stands by slot. Static ones
        are in a row of their own."""
        spec, dtype = self.spec, self.spec.format.scale_dtype
        width = max(sum(map(spec.num_scales, layers)) for layers in lane)
        buffers = [self._make(width, dtype)] if width else []
        for layers in lane:
            begin = 0
            for layer in layers:
                if spec.format_of(layer).is_static:
                    num = 2 * spec.heads(layer).num_kv_heads  # one for K and one for V of each head
                    scales[layer] = torch.empty(1, num, dtype=dtype, device=self.device)
                elif num := spec.num_scales(layer):
                    scales[layer] = buffers[0][:, begin : begin + num]
                    begin += num
        return buffers

    def _make(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        # Entries that a window has passed are read under a mask, too, and may be slots that were never written.
        make = torch.empty if self.spec.groups.is_uniform else torch.zeros
        return make((self.num_slots, width), dtype=dtype, device=self.device)

    def _by_head(self, scales: torch.Tensor | None, layer_idx: int) -> torch.Tensor | None:
        """Returns a layer's scales, `[num_slots or 1, n]`, as `[num_slots, num_kv_heads, num_scales]`."""
        if scales is None:
            return None
        num_kv_heads = self.spec.heads(layer_idx).num_kv_heads
        return scales.expand(self.num_slots, -1).unflatten(1, (num_kv_heads, -1))

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers that have a row for each slot."""
        return self.num_slots * self.spec.bytes_per_slot

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All that is stored by slot, `[num_slots, ...]`: to copy a token is to copy its row of each."""
        return list(self._buffers)

    def format(self, layer_idx: int) -> KVFormat:
        """Returns how a layer is stored."""
        return self.spec.format_of(layer_idx)

    def kv(self, layer_idx: int) -> torch.Tensor:
        """Returns the stored K and V of a layer together, `[num_slots, row_width]`: contiguous, unless layers
        have groups or rows of several widths, where rows may be apart."""
        return self._rows[layer_idx]

    def k(self, layer_idx: int) -> torch.Tensor:
        """Returns the stored K of a layer, `[num_slots, num_kv_heads, k_dim]` (half the dims, where two share a
        byte), a strided view."""
        return self._k[layer_idx]

    def v(self, layer_idx: int) -> torch.Tensor:
        """Returns the stored V of a layer, `[num_slots, num_kv_heads, v_dim]`, likewise."""
        return self._v[layer_idx]

    def scales(self, layer_idx: int) -> torch.Tensor | None:
        """Returns what stands beside the heads of a layer, `[num_slots, num_kv_heads, num_scales]`: the scales
        and the zero points of K, then those of V. Static ones have a stride of 0. None where nothing is
        quantised."""
        if self.spec.holder(layer_idx) in self._unset:
            raise ValueError(
                f"the static scales of layer {layer_idx} are not set: call set_static_scales first "
                "(set_kv_scales with those of a checkpoint), or choose a format with a scale for each token, "
                "such as int8"
            )
        return self._scales[layer_idx]

    def apply_hadamard(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns heads `[..., dim]`, multiplied by the Hadamard matrix of a format that has one, in their own
        type; doing it twice gives them back. Raises KeyError for dims that no head of the pool has."""
        return heads @ self._hadamard[heads.shape[-1]].to(heads.dtype)

    def set_static_scales(self, layer_idx: int, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        """Sets the scales of a layer whose format has static ones: float `[1]` or `[num_kv_heads]` each.

        Raises ValueError for a layer without static scales, and for scales that are not finite and positive.
        """
        of_layer, num_kv_heads = self.format(layer_idx), self.spec.heads(layer_idx).num_kv_heads
        scales = torch.stack(
            [one.float().flatten().expand(num_kv_heads) for one in (k_scale, v_scale)], dim=1
        )
        if not of_layer.is_static:
            raise ValueError(f"layer {layer_idx} has no static scales; its format is {of_layer}")
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise ValueError(
                f"the scales of layer {layer_idx} are {scales.tolist()}; give finite, positive ones, or choose "
                "a format with a scale for each token, such as int8"
            )
        self._static_scales[self.spec.holder(layer_idx)].copy_(scales.flatten()[None])
        self._unset.discard(self.spec.holder(layer_idx))

    def stored(self, layer_idx: int) -> StoredKV:
        """Returns where a layer's K and V are stored, and how. Raises ValueError as `scales`."""
        return StoredKV(
            self._k[layer_idx], self._v[layer_idx], self.scales(layer_idx), self.format(layer_idx)
        )

    def write(self, layer_idx: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes K `[n, num_kv_heads, k_dim]` and V to slots, int64 `[n]`, quantised in plain torch."""
        self.stored(layer_idx).write(slots, k, v)

    def read(self, layer_idx: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of slots, int64 `[...]`, in the type they are computed in: `[..., num_kv_heads,
        k_dim]` and `[..., num_kv_heads, v_dim]`."""
        of_layer = self.format(layer_idx)
        rows = self._rows[layer_idx].index_select(0, slots.flatten()).unflatten(0, slots.shape)
        k, v = self.spec.split(rows, layer_idx)
        scales = self.scales(layer_idx)
        if scales is None:
            return k, v
        of_k, of_v = split_scales(scales[slots], of_layer, self.spec.heads(layer_idx).k_dim)
        return self._restored(k, of_k, of_layer.elements), self._restored(v, of_v, of_layer.elements)

    def _restored(self, stored: torch.Tensor, scales: torch.Tensor, elements: Elements) -> torch.Tensor:
        heads = dequantise(stored, scales, elements)
        return (self.apply_hadamard(heads) if elements.has_hadamard else heads).to(self.spec.dtype)


def free_bytes(device: torch.device) -> int:
    """Returns the bytes that are left on a device: on a CPU, to this process and its container."""
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
