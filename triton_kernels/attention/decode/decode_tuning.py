"""How decode is launched: tiles, programs and their shares, by device and shape."""

from typing import NamedTuple

from lightkv.triton_kernels.tuning import REDUCTION_BYTES, DeviceClass, Launch, padded_dim

DECODE_UNIT = 32  # keys; every part of a request except its last has a multiple of it
MOST_DECODE_ROWS = 256  # of a tile; more do not fit in registers


def decode_launch(
    device: DeviceClass,
    num_rows: int,
    several: bool,
    key_dim: int,
    value_dim: int,
    element_size: int,
    element_bits: int = 16,
    mask_size: int = 0,
    grouped: bool = False,
) -> Launch:
    """Returns the tiles of decode for `num_rows` query rows that read the same keys: query heads that share a
    K/V head, times queries, times requests that share a prefix. `several`: there is more than one query or
    request. `element_bits`: of K and V as stored; 16 stands for `element_size`. `mask_size`: bytes of an
    element of a mask, whose tiles take room beside those of K and V. `grouped`: heads have several scales.

    A tile has at most 32 KiB of K and V, so that several programs share a multiprocessor. `decode_workers` says
    how many programs there are; each reads an equal share, so all of them should run at once.
    """
    rows = padded_dim(num_rows)
    key_width, value_width = padded_dim(key_dim), padded_dim(value_dim)
    bits = element_bits if element_bits < 16 else 8 * element_size
    bytes_per_key = (key_width + value_width) * bits // 8
    if several and element_size < 4:
        launch = Launch(max(64, rows), 64, 4 if rows <= 64 else 8, 3)  # as the matrix units of Hopper want it
    elif element_bits < 16 and element_size < 4:
        num_warps = quantised_decode(num_rows, several, key_dim, value_dim, element_bits, grouped).num_warps
        # A tile of 8 rows is the narrow side of the products, so half as many rows are padding.
        is_narrow = num_rows <= 8 and num_warps == 1 and not grouped
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
    num_rows: int, several: bool, key_dim: int, value_dim: int, element_bits: int, grouped: bool
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
    if element_bits == 4 and not grouped:
        return QuantisedDecode(1, 8, max_registers=160)
    return QuantisedDecode(1, 8)


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
