"""Tile sizes, numbers of splits and launch options: pure functions of the device and the shapes.

Every result follows from numbers that the host has before the launch, so a launch captured in a CUDA graph
stays right when lengths change between replays. There is no search at run time; `bench.kernels.tune` finds the
values.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton


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


# Largest first.
_PREFILL_LAUNCHES = (
    Launch(128, 128, 8, 3),
    Launch(128, 64, 8, 3),
    Launch(128, 64, 8, 2),
    Launch(64, 64, 4, 3),
    Launch(64, 32, 4, 3),
    Launch(64, 32, 4, 2),
)
# Launches of `prefill_hopper`, by key and value dims: 12 warps, and as many stages of K and V as fit beside q.
_HOPPER_LAUNCHES = {
    (64, 64): Launch(128, 128, 12, 6),
    (80, 80): Launch(128, 128, 12, 5),
    (96, 96): Launch(128, 128, 12, 4),
    (128, 128): Launch(128, 128, 12, 3),
    (192, 128): Launch(128, 128, 12, 2),
    (256, 256): Launch(128, 64, 12, 2),
}
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


def has_early_launch(device: DeviceClass) -> bool:
    """Returns whether a kernel can be launched while the one before it still runs (programmatic dependent
    launch)."""
    return device.major >= 9


def hopper_prefill_launch(
    device: DeviceClass, key_dim: int, value_dim: int, element_size: int
) -> Launch | None:
    """Returns the tiles of `prefill_hopper` and its stages of K and V; None where it cannot run."""
    if device.major != 9 or element_size != 2:
        return None
    return _HOPPER_LAUNCHES.get((key_dim, value_dim))


def fp8_prefill_launch(head_dim: int) -> Launch:
    """Returns the tiles of `prefill_fp8_hopper`, which are those of `prefill_hopper`, with its stages of K and
    V in e4m3."""
    return _HOPPER_LAUNCHES[head_dim, head_dim]._replace(num_stages=6)


# Prefill on Hopper computes some K/V heads after the others: as many as have so many bytes of K and V together,
# which then stay in the L2 cache.
SECTION_BYTES = 32 * 2**20


def masked_prefill_launch(launch: Launch) -> Launch:
    """Returns `launch` of general prefill for a call with a mask, whose tiles take registers, and room to
    change their layout beside the tiles of K and V: so there are fewer keys and stages."""
    if launch.block_m < 64:
        return launch
    has_room = launch.block_m >= 128 and launch.block_n >= 128
    return launch._replace(block_n=min(launch.block_n, 64), num_stages=3 if has_room else 2)


class PrefillShares(NamedTuple):
    """How prefill shares out keys where its tiles are too few to fill the device (`prefill_plan`).

    `num_workers`: equal shares for each K/V head; 0 if tiles are never cut.
    `num_programs`: programs that the device runs at once, for all K/V heads.
    `unit`: keys; tiles are cut at multiples of it. The key tiles of `prefill_hopper` have to divide it.
    `least_units`: of a share.
    `least_gain`: units by which cutting has to shorten the longest program's work, beside a sixteenth of what
    is left of it, since partial outputs have to be written and combined.
    """

    num_workers: int
    num_programs: int
    unit: int
    least_units: int
    least_gain: int


NO_SHARES = PrefillShares(0, 1, 1, 1, 1)  # without workers, the other numbers say nothing


def prefill_shares(device: DeviceClass, launch: Launch, num_kv_heads: int) -> PrefillShares:
    """Returns how prefill with these tiles shares out keys. Each program computes one share, or several if
    otherwise many programs had none, because the K/V heads do not divide them."""
    interpreted = device is INTERPRETER
    # Tiles of 8 warps, and those of `prefill_hopper`, have a multiprocessor to themselves.
    num_programs = device.num_multiprocessors * (2 if launch.num_warps <= 4 or interpreted else 1)
    num_workers = num_programs // num_kv_heads
    for turns in range(2, 5):
        if num_workers * num_kv_heads >= 0.94 * (turns - 1) * num_programs:
            break
        num_workers = turns * num_programs // num_kv_heads
    if num_workers < 2:
        return NO_SHARES
    # Tests in the interpreter have few keys.
    return PrefillShares(num_workers, num_programs, *((32, 1, 1) if interpreted else (128, 2, 3)))


def prefill_combine_launch(num_kv_heads: int) -> Launch:
    """Returns the launch of `prefill_combine`: rows of a tile per program in `block_m`, fewer where few K/V
    heads have many parts each, and parts that are loaded at a time in `block_n`."""
    if num_kv_heads >= 8:
        return Launch(block_m=16, block_n=4, num_warps=8, num_stages=1)
    return Launch(block_m=8, block_n=4, num_warps=4, num_stages=1)


def prefill_launch(
    device: DeviceClass,
    num_requests: int,
    num_kv_heads: int,
    num_rows: int,
    key_dim: int,
    value_dim: int,
    element_size: int,
) -> Launch:
    """Returns the tiles of prefill: the largest that fit in shared memory and still give every multiprocessor
    work.

    `num_rows` is the number of queries of all requests times the query heads that share a K/V head. Hopper's
    tiles are taken for any number: where they are few, their keys are shared out, and empty rows cost nothing,
    since reading the keys takes longer.
    """
    # An exact float32 dot is unrolled into multiply-adds, and large tiles would take minutes to compile.
    candidates = _PREFILL_LAUNCHES if element_size < 4 else (Launch(32, 32, 4, 2),)
    key_width, value_width = padded_dim(key_dim), padded_dim(value_dim)
    hopper = hopper_prefill_launch(device, key_dim, value_dim, element_size) is not None
    for launch in candidates:
        block_m, block_n, num_warps, num_stages = launch
        tiles = block_m * key_width + num_stages * block_n * (key_width + value_width)
        programs = num_kv_heads * triton.cdiv(num_rows, block_m)
        fits = tiles * element_size + REDUCTION_BYTES <= device.shared_memory
        # Too few: multiprocessors would idle, or tiles would be empty. Too wide: with more than 128
        # accumulators per thread, registers spill.
        few = programs < device.num_multiprocessors or num_rows < block_m * num_requests
        too_few = block_m > 64 and few and not hopper
        too_wide = block_m * value_width > 128 * 32 * num_warps
        if fits and not too_few and not too_wide:
            return launch
    return Launch(block_m=16, block_n=16, num_warps=4, num_stages=2)


def restore_launch(width: int) -> Launch:
    """Returns the launch of `restore_kv`, with the tokens of a program in `block_m`, for heads that are padded
    to `width`: each thread has 64 elements, so that several of its loads are on their way at once."""
    return Launch(block_m=max(8, 8192 // width), block_n=0, num_warps=4, num_stages=1)
