"""How large the tiles are and how many splits a launch has: pure functions of the device and the shapes.

Knows no tensor's contents: every answer follows from numbers that the host has before the launch, so a
launch captured in a CUDA graph stays right when lengths change between replays. Nothing here is searched
for at run time.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton


class DeviceClass(NamedTuple):
    """What of a device the choices depend on."""

    num_multiprocessors: int
    shared_memory: int  # bytes one program may use
    major: int  # of its compute capability


class Launch(NamedTuple):
    """Tile sizes (query rows, keys) and launch options of one kernel; `block_m` is 0 where it has none."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The interpreter poses as a small GPU, so that its tests see several tiles and several splits.
_INTERPRETER = DeviceClass(num_multiprocessors=4, shared_memory=64 * 1024, major=8)

DECODE_UNIT = 32  # keys: every part of a request but its last has a multiple of it

# Largest first.
_PREFILL_LAUNCHES = (
    Launch(128, 128, 8, 3),
    Launch(128, 64, 8, 3),
    Launch(128, 64, 8, 2),
    Launch(64, 64, 4, 3),
    Launch(64, 32, 4, 3),
    Launch(64, 32, 4, 2),
)
# Of `prefill_hopper`, by head dim: 12 warps, and as many stages of K and V as fit beside q.
_HOPPER_LAUNCHES = {64: Launch(128, 128, 12, 4), 128: Launch(128, 128, 12, 3), 256: Launch(128, 64, 12, 2)}
_REDUCTION_BYTES = 2048  # shared memory that the softmax's reductions take beside the tiles


# A block's free slots are found by reading its bits, the block by reading the count of every block.
_MIN_BLOCK_SLOTS, _MAX_BLOCK_SLOTS = 1024, 4096
_SCAN_BLOCKS = 8192  # counts that one program holds at a time
_SCAN_GROUPS = 2048  # of groups, where one program takes: it has nothing else to do meanwhile
_MAX_GROUP_BLOCKS = 64


@cache
def device_class(device: torch.device) -> DeviceClass:
    """The class of a CUDA device, or of Triton's interpreter for any other."""
    if device.type != "cuda":
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceClass(properties.multi_processor_count, shared_memory, properties.major)


def padded_dim(head_dim: int) -> int:
    """The tile width that holds a head of `head_dim`: a power of two, and at least the 16 of `tl.dot`."""
    return max(16, triton.next_power_of_2(head_dim))


def has_early_launch(device: DeviceClass) -> bool:
    """Can a kernel be launched while the one before it still runs (programmatic dependent launch)?"""
    return device.major >= 9


class DecodeLaunch(NamedTuple):
    """Keys of a tile and launch options of decode, and how many programs share a multiprocessor."""

    block_n: int
    num_warps: int
    num_stages: int
    waves: int


def decode_launch(num_requests: int, key_dim: int, value_dim: int, element_size: int) -> DecodeLaunch:
    """Tiles of decode: at most 32 KiB of K and V at a time, so that several programs share a processor."""
    # Of one or two requests each program has little to read: fewer of them, which read more at once.
    launch = DecodeLaunch(64, 4, 3, 2) if num_requests <= 2 else DecodeLaunch(32, 4, 3, 4)
    bytes_per_key = (padded_dim(key_dim) + padded_dim(value_dim)) * element_size
    block_n = launch.block_n
    while block_n > 16 and block_n * bytes_per_key > 32 * 1024:
        block_n //= 2
    return launch._replace(block_n=block_n)


def decode_workers(device: DeviceClass, num_requests: int, num_kv_heads: int) -> int:
    """Into how many equal shares decode cuts all its keys together, for each K/V head."""
    waves = decode_launch(num_requests, 128, 128, 2).waves
    return max(1, waves * device.num_multiprocessors // num_kv_heads)


def hopper_prefill_launch(
    device: DeviceClass, key_dim: int, value_dim: int, element_size: int
) -> Launch | None:
    """Tiles of `prefill_hopper`, and its stages of K and V; None where it does not run."""
    if device.major != 9 or element_size != 2 or key_dim != value_dim:
        return None
    return _HOPPER_LAUNCHES.get(key_dim)


def prefill_launch(
    device: DeviceClass,
    num_requests: int,
    num_kv_heads: int,
    num_rows: int,
    key_dim: int,
    value_dim: int,
    element_size: int,
) -> Launch:
    """Tiles of prefill: the largest that fit the shared memory and still give every multiprocessor work.

    `num_rows` is the queries of all requests times the query heads that share a K/V head.
    """
    # An exact float32 dot is unrolled into multiply-adds: large tiles of it take minutes to compile.
    candidates = _PREFILL_LAUNCHES if element_size < 4 else (Launch(32, 32, 4, 2),)
    key_width, value_width = padded_dim(key_dim), padded_dim(value_dim)
    hopper = hopper_prefill_launch(device, key_dim, value_dim, element_size) is not None
    # A multiprocessor that computes with such tiles is worth two with smaller ones.
    least_programs = device.num_multiprocessors // 2 if hopper else device.num_multiprocessors
    for launch in candidates:
        block_m, block_n, num_warps, num_stages = launch
        tiles = block_m * key_width + num_stages * block_n * (key_width + value_width)
        programs = num_kv_heads * triton.cdiv(num_rows, block_m)
        fits = tiles * element_size + _REDUCTION_BYTES <= device.shared_memory
        # Multiprocessors would idle or tiles be empty, or more than 128 accumulators a thread (a spill).
        too_few = block_m > 64 and (programs < least_programs or num_rows < block_m * num_requests)
        too_wide = block_m * value_width > 128 * 32 * num_warps
        if fits and not too_few and not too_wide:
            return launch
    return Launch(block_m=16, block_n=16, num_warps=4, num_stages=2)


def slots_of_block(num_slots: int) -> int:
    """Slots of a block of the allocator, a power of two: so many that all counts are read at once."""
    wanted = triton.next_power_of_2(triton.cdiv(num_slots, _SCAN_BLOCKS))
    return min(max(wanted, _MIN_BLOCK_SLOTS), _MAX_BLOCK_SLOTS)


def blocks_of_group(num_blocks: int) -> int:
    """Blocks of a group, a power of two: one where the blocks' own counts are few enough to be scanned."""
    if num_blocks <= _SCAN_GROUPS:
        return 1
    return min(triton.next_power_of_2(triton.cdiv(num_blocks, _SCAN_GROUPS // 2)), _MAX_GROUP_BLOCKS)


def group_chunks(num_groups: int) -> tuple[int, int]:
    """How many chunks of groups, and groups of a chunk, a search by rank goes through in two steps."""
    bits = (num_groups - 1).bit_length()
    return 1 << (bits // 2), 1 << (bits - bits // 2)


def take_in_one_kernel(block_words: int) -> int:
    """The most slots that one program takes: the bits of a block for each of them fit its registers."""
    return max(1, min(512, 16384 // block_words))


def take_warps(num_ranks: int, read_by_rank: int, num_scanned: int) -> int:
    """Warps of that program, which reads so many numbers at a time for each slot."""
    elements = max(num_ranks * read_by_rank, num_scanned)
    return 4 if elements <= 1024 else 8 if elements <= 4096 else 16


def scan_tile(num_blocks: int) -> int:
    """Counts of blocks that one program sums up at a time: all of them, as far as registers go."""
    return min(triton.next_power_of_2(num_blocks), _SCAN_BLOCKS)


def group_tile(num_groups: int) -> int:
    """Counts of groups that a take in one kernel sums up at a time."""
    return min(triton.next_power_of_2(num_groups), _SCAN_GROUPS)


class Search(NamedTuple):
    """How the programs of a search for a run share out the words of a pool's bits."""

    num_programs: int
    chunk: int  # words whose runs one program answers for
    back: int  # words before them that it reads: a run may begin there
    tile: int  # words it reads at a time


def run_search(device: DeviceClass, num_words: int, word_slots: int, n: int, max_programs: int) -> Search:
    """A search for n consecutive free slots by at most `max_programs`."""
    tile = 32 if device is _INTERPRETER else 2048  # the interpreter's scans take a call an element
    back = triton.cdiv(n, word_slots) + 2
    least = max(tile // 2, triton.cdiv(num_words, max_programs))
    chunk = triton.cdiv(least + back, tile) * tile - back  # so that what is read is a whole number of tiles
    return Search(triton.cdiv(num_words, chunk), chunk, back, tile)


def merge_launch(num_parts: int, value_dim: int) -> Launch:
    """Parts that a program of `merge_states` reads at a time, in `block_n`: a tile that stays in registers."""
    block_parts = min(triton.next_power_of_2(num_parts), max(1, 4096 // padded_dim(value_dim)))
    return Launch(block_m=0, block_n=block_parts, num_warps=1 if num_parts <= 4 else 4, num_stages=2)


def scores_launch(key_dim: int, element_size: int) -> Launch:
    """Tiles of `attention_scores`, query rows and keys; an exact float32 dot is unrolled: small ones."""
    if element_size >= 4:
        return Launch(block_m=16, block_n=32, num_warps=4, num_stages=2)
    wide = padded_dim(key_dim) > 128
    return Launch(block_m=32 if wide else 64, block_n=64, num_warps=4, num_stages=2)
