"""Tile sizes, numbers of splits and launch options: pure functions of the device and the shapes.

Every result follows from numbers that the host has before the launch, so a launch captured in a CUDA graph
stays right when lengths change between replays. There is no search at run time; `bench.kernels.tune` finds the
values.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class DeviceClass(NamedTuple):
    """The properties of a device that the choices depend on."""

    num_multiprocessors: int
    shared_memory: int  # bytes that one program may use
    major: int  # of the compute capability


class Launch(NamedTuple):
    """Tile sizes (query rows, keys) and launch options of one kernel; `block_m` is 0 if it has no query
    rows."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The interpreter counts as a small GPU, so that tests on a CPU have several tiles and several splits.
INTERPRETER = DeviceClass(num_multiprocessors=4, shared_memory=64 * 1024, major=8)


REDUCTION_BYTES = 2048  # of shared memory, for the softmax's reductions


@cache
def device_class(device: torch.device) -> DeviceClass:
    """Returns the class of a CUDA device; for any other device, that of Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceClass(properties.multi_processor_count, shared_memory, properties.major)


def padded_dim(head_dim: int) -> int:
    """Returns the tile width for heads of `head_dim`: a power of two, at least the 16 that `tl.dot` needs."""
    return max(16, triton.next_power_of_2(head_dim))


def block_for(num: int) -> int:
    """Returns the block of a kernel that handles `num` things at once: 16, 64, 256, or a power of two above.
    Fewer blocks mean fewer kernels to compile at start."""
    if num > 256:
        return triton.next_power_of_2(num)
    return next(block for block in (16, 64, 256) if num <= block)


def early_options(device: torch.device) -> dict[str, Any]:
    """Returns the options that launch a kernel with a constant EARLY while the one before it still runs
    (programmatic dependent launch), where the device can do that."""
    return {"EARLY": True, "launch_pdl": True} if device_class(device).major >= 9 else {"EARLY": False}


@triton.jit
def wait_early(EARLY: tl.constexpr):
    """Lets the next kernel begin, and waits for what the ones before write, in a kernel that begins early."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
