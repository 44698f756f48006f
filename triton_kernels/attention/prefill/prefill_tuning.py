"""Tile sizes, launch options and shares of prefill: pure functions of the device and the shapes, as in
`tuning.py`. `python -m bench.kernels.tune --prefill` finds the values."""

from typing import NamedTuple

import triton

from lightkv.triton_kernels.tuning import INTERPRETER, REDUCTION_BYTES, DeviceClass, Launch, padded_dim

# Largest first.
_PREFILL_LAUNCHES = (
    Launch(128, 128, 8, 3),
    Launch(128, 64, 8, 3),
    Launch(128, 64, 8, 2),
    Launch(64, 64, 4, 3),
    Launch(64, 32, 4, 3),
    Launch(64, 32, 4, 2),
)
# Launches of `prefill_hopper`, by key and value dims: four warps load, and each 64 rows have four warps that
# compute them. There are as many stages of K and V as fit beside q.
_HOPPER_LAUNCHES = {
    (64, 64): Launch(192, 128, 16, 6),  # three warpgroups compute, and not two
    (80, 80): Launch(128, 128, 12, 5),
    (96, 96): Launch(128, 128, 12, 4),
    (128, 128): Launch(128, 128, 12, 3),
    (192, 128): Launch(128, 128, 12, 2),
    (256, 256): Launch(128, 64, 12, 2),
}
_TWO_GROUPS = 128  # rows of a tile that two warpgroups compute
_BARRIER_BYTES = 1024  # that barriers and the item take, and what the compiler adds


def hopper_prefill_launch(
    device: DeviceClass, key_dim: int, value_dim: int, element_size: int, block_m: int | None = None
) -> Launch | None:
    """Returns the tiles of `prefill_hopper` and its stages of K and V; None where it cannot run.

    `block_m`: the rows of a plan's tiles, where it has to compute these; otherwise as many as are fastest.
    """
    if device.major != 9 or element_size != 2:
        return None
    launch = _HOPPER_LAUNCHES.get((key_dim, value_dim))
    if launch is not None and block_m == _TWO_GROUPS:
        return _of_two_groups(launch)
    return launch if launch is not None and block_m in (None, launch.block_m) else None


def _of_two_groups(launch: Launch) -> Launch:
    """Returns a launch on Hopper in which two warpgroups compute."""
    return launch._replace(block_m=_TWO_GROUPS, num_warps=12)


def stages_beside(device: DeviceClass, launch: Launch, key_dim: int, value_dim: int, num_bytes: int) -> int:
    """Returns how many stages of K and V a launch of `prefill_hopper` has where `num_bytes` of shared memory
    are taken by something else than its tiles."""
    left = device.shared_memory - _BARRIER_BYTES - num_bytes - 2 * launch.block_m * key_dim
    return min(launch.num_stages, left // (2 * launch.block_n * (key_dim + value_dim)))


def fp8_prefill_launch(head_dim: int) -> Launch:
    """Returns the tiles of `prefill_fp8_hopper`, in which two warpgroups compute, with its stages of K and V in
    e4m3."""
    return _of_two_groups(_HOPPER_LAUNCHES[head_dim, head_dim])._replace(num_stages=6)


# Prefill on Hopper computes some K/V heads after the others: as many as have so many bytes of K and V together,
# which then stay in the L2 cache, or more where tiles are long beside the whole work (`prefill_plan`).
SECTION_BYTES = 32 * 2**20


def general_rows(block_m: int) -> int:
    """Returns the rows that a program of the general kernel computes of a tile, at most all of them."""
    return block_m & -block_m


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
    `least_gain`: units by which cutting has to shorten the longest program's work, beside a share
    of what is left of it (`prefill_plan.CUT_GAIN`), since partial outputs have to be written and combined.
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


def prefill_launch(
    device: DeviceClass,
    num_requests: int,
    num_kv_heads: int,
    num_rows: int,
    key_dim: int,
    value_dim: int,
    element_size: int,
    is_plain: bool = True,
) -> Launch:
    """Returns the tiles of prefill: the largest that fit in shared memory and still give every multiprocessor
    work.

    `num_rows` is the number of queries of all requests times the query heads that share a K/V head. Hopper's
    tiles are taken for any number: where they are few, their keys are shared out, and empty rows cost nothing,
    since reading the keys takes longer. `is_plain`: whether queries see all keys before them, in 16 bits. Only
    then do three warpgroups pay: a window's masks take registers, and the general kernel, which reads
    quantised keys, would unpack each key for 64 rows alone.
    """
    # An exact float32 dot is unrolled into multiply-adds, and large tiles would take minutes to compile.
    candidates = _PREFILL_LAUNCHES if element_size < 4 else (Launch(32, 32, 4, 2),)
    key_width, value_width = padded_dim(key_dim), padded_dim(value_dim)
    hopper = hopper_prefill_launch(device, key_dim, value_dim, element_size)
    if is_plain and hopper is not None and hopper.block_m > candidates[0].block_m:
        # A call that Hopper's kernel does not take computes such a tile in several programs of the general one.
        return Launch(hopper.block_m, 64, 8, 3)
    for launch in candidates:
        block_m, block_n, num_warps, num_stages = launch
        tiles = block_m * key_width + num_stages * block_n * (key_width + value_width)
        programs = num_kv_heads * triton.cdiv(num_rows, block_m)
        fits = tiles * element_size + REDUCTION_BYTES <= device.shared_memory
        # Too few: multiprocessors would idle, or tiles would be empty. Too wide: with more than 128
        # accumulators per thread, registers spill.
        few = programs < device.num_multiprocessors or num_rows < block_m * num_requests
        too_few = block_m > 64 and few and hopper is None
        too_wide = block_m * value_width > 128 * 32 * num_warps
        if fits and not too_few and not too_wide:
            return launch
    return Launch(block_m=16, block_n=16, num_warps=4, num_stages=2)
