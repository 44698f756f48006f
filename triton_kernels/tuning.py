"""Tile sizes, numbers of splits and launch options: pure functions of the device and the shapes.

Every result follows from numbers that the host has before the launch, so a launch captured in a CUDA graph
stays right when lengths change between replays. There is no search at run time; `bench.kernels.tune` finds the
values.
"""

import math
from collections.abc import Sequence
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

DECODE_UNIT = 32  # keys; every part of a request except its last has a multiple of it
MOST_DECODE_ROWS = 256  # of a tile; more do not fit in registers

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


def decode_launch(
    device: DeviceClass,
    num_rows: int,
    several: bool,
    key_dim: int,
    value_dim: int,
    element_size: int,
    element_bits: Sequence[int] = (16, 16),
    mask_size: int = 0,
    grouped: bool = False,
) -> Launch:
    """Returns the tiles of decode for `num_rows` query rows that read the same keys: query heads that share a
    K/V head, times queries, times requests that share a prefix. `several`: there is more than one query or
    request. `element_bits`: of K and of V as stored; 16 stands for `element_size`. `mask_size`: bytes of an
    element of a mask, whose tiles take room beside those of K and V. `grouped`: heads have several scales.

    A tile has at most 32 KiB of K and V, so that several programs share a multiprocessor. `decode_workers` says
    how many programs there are; each reads an equal share, so all of them should run at once.
    """
    rows = padded_dim(num_rows)
    key_width, value_width = padded_dim(key_dim), padded_dim(value_dim)
    k_bits, v_bits = (bits if bits < 16 else 8 * element_size for bits in element_bits)
    bytes_per_key = (key_width * k_bits + value_width * v_bits) // 8
    if several and element_size < 4:
        launch = Launch(max(64, rows), 64, 4 if rows <= 64 else 8, 3)  # as the matrix units of Hopper want it
    elif min(element_bits) < 16 and element_size < 4:
        num_warps = quantised_decode(num_rows, several, key_dim, value_dim, element_bits, grouped).num_warps
        # A tile of 8 rows is the narrow side of the products, so half as many rows are padding.
        is_narrow = num_rows <= 8 and num_warps == 1 and not grouped and max(element_bits) < 16
        launch = Launch(8 if is_narrow else rows, 32, num_warps, 3)
    else:
        launch = Launch(rows, 64 if bytes_per_key <= 256 else 32, 4 if rows <= 64 else 8, 3)
    if mask_size and several:  # so that several programs still share a multiprocessor
        launch = launch._replace(block_n=32)
    for_queries = launch.block_m * key_width * element_size
    block_n, num_stages = launch.block_n, launch.num_stages
    while block_n > 16 and block_n * bytes_per_key > 32 * 1024:
        block_n //= 2
    bytes_per_key += launch.block_m * mask_size
    while num_stages * block_n * bytes_per_key + for_queries + REDUCTION_BYTES > device.shared_memory:
        if num_stages == 1 and block_n == 16:
            break
        num_stages, block_n = (num_stages - 1, block_n) if num_stages > 1 else (1, block_n // 2)
    return launch._replace(block_n=block_n, num_stages=num_stages)


def decode_programs(num_queries: int, key_bytes: int) -> int:
    """Returns how many programs of decode a multiprocessor runs at once. `num_queries` read the same keys;
    `key_bytes`: of K and V of a token for one K/V head."""
    return max(1, min(2 if num_queries > 1 else 4, 2048 // key_bytes))


class QuantisedDecode(NamedTuple):
    """How programs of decode over quantised K/V run: their warps, how many a multiprocessor runs at once, and
    the most registers of a thread; None for as many as the compiler takes."""

    num_warps: int
    num_programs: int
    max_registers: int | None = None


def quantised_decode(
    num_rows: int, several: bool, key_dim: int, value_dim: int, element_bits: Sequence[int], grouped: bool
) -> QuantisedDecode:
    """Returns how decode over quantised K/V runs; the arguments are those of `decode_launch`, and whether
    heads have several scales.

    One warp has no other to wait for, and unpacks as many keys as its registers hold. A quarter of a
    multiprocessor has 512 registers for each lane: programs of one warp are 8 up to 255 registers a thread, 12
    up to 168, and 16 up to 128.
    """
    rows, dims = padded_dim(num_rows), padded_dim(key_dim) + padded_dim(value_dim)
    if several:
        return QuantisedDecode(4 if rows <= 64 else 8, 2)
    if rows > 16 or dims > 256:
        num_warps = 2 if rows * dims <= 8192 else 4 if rows <= 64 else 8
        return QuantisedDecode(num_warps, max(1, 8 // num_warps))
    if max(element_bits) == 4 and not grouped:
        return QuantisedDecode(1, 8, max_registers=160)
    return QuantisedDecode(1, 8 if max(element_bits) <= 8 else 5)


def decode_workers(device: DeviceClass, num_programs: int, num_kv_heads: int) -> int:
    """Returns the number of equal shares that decode cuts all keys into, for each K/V head: as many as there
    are programs that run at once, `num_programs` on each multiprocessor."""
    return max(1, num_programs * device.num_multiprocessors // num_kv_heads)


def prefix_members(num_queries: int, group: int) -> int:
    """Returns how many requests that share a prefix fit in a tile of decode, with `num_queries` each and
    `group` query heads per K/V head; 1 if reading the prefix together saves nothing."""
    return max(1, 64 // (num_queries * group))


def combine_launch(num_requests: int) -> Launch:
    """Returns the launch of `decode_combine`, with the parts that a program reads at a time in `block_n`. One
    or two requests are cut into many parts, which are read all at once; of more requests each has few parts, so
    the programs are as small as possible."""
    if num_requests <= 2:
        return Launch(block_m=0, block_n=64, num_warps=4, num_stages=1)
    return Launch(block_m=0, block_n=8, num_warps=1, num_stages=1)


def write_launch(
    device: DeviceClass, num_tokens: int, num_kv_heads: int, num_heads: int, num_pairs: int
) -> tuple[int, int]:
    """Returns how many tokens and how many heads a program of `write_kv` writes. With rotary positions it
    writes several heads, since cosines and sines are more bytes than a head, as long as every multiprocessor
    has several programs."""
    block_t, heads = 16, 1
    blocks = triton.cdiv(num_tokens, block_t)
    shared = math.gcd(num_kv_heads, num_heads)
    while num_pairs and heads < 4 and shared % (2 * heads) == 0:
        if blocks * (num_kv_heads + num_heads) // (2 * heads) < 8 * device.num_multiprocessors:
            break
        heads *= 2
    return block_t, heads


def quantised_write_launch(width: int) -> Launch:
    """Returns the launch of `write_quantised_kv`, with the tokens of a program in `block_m`, for heads that are
    padded to `width`: a program holds a head of each of its tokens as one float32 tile."""
    return Launch(block_m=16, block_n=0, num_warps=4 if width <= 128 else 8, num_stages=1)


def merge_launch(num_parts: int, value_dim: int) -> Launch:
    """Returns the launch of `merge_states`, with the parts that a program reads at a time in `block_n`: a tile
    that stays in registers."""
    block_parts = min(triton.next_power_of_2(num_parts), max(1, 4096 // padded_dim(value_dim)))
    return Launch(block_m=0, block_n=block_parts, num_warps=1 if num_parts <= 4 else 4, num_stages=2)


def scores_launch(key_dim: int, element_size: int) -> Launch:
    """Returns the tiles of `attention_scores`: small ones for float32, whose exact dot is unrolled."""
    if element_size >= 4:
        return Launch(block_m=16, block_n=32, num_warps=4, num_stages=2)
    wide = padded_dim(key_dim) > 128
    return Launch(block_m=32 if wide else 64, block_n=64, num_warps=4, num_stages=2)
