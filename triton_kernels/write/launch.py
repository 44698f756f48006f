"""How many tokens and heads a program writes: pure functions of the device and the shapes."""

import math
from typing import NamedTuple

import triton

from lightkv.triton_kernels.tuning import DeviceClass

_BLOCK_T = 16


class WriteLaunch(NamedTuple):
    """Tokens, heads and warps of a program."""

    block_t: int
    heads: int
    num_warps: int


def computed_launch(
    device: DeviceClass, num_tokens: int, num_kv_heads: int, num_heads: int, num_pairs: int
) -> WriteLaunch:
    """Returns the launch where K and V are stored as computed. With rotary positions a program writes several
    heads, since cosines and sines are more bytes than a head, as long as every multiprocessor has several
    programs."""
    heads, blocks = 1, triton.cdiv(num_tokens, _BLOCK_T)
    shared = math.gcd(num_kv_heads, num_heads)
    while num_pairs and heads < 4 and shared % (2 * heads) == 0:
        if blocks * (num_kv_heads + num_heads) // (2 * heads) < 8 * device.num_multiprocessors:
            break
        heads *= 2
    return WriteLaunch(_BLOCK_T, heads, 4)


def quantised_launch(width: int) -> WriteLaunch:
    """Returns the launch where K or V is quantised, for heads that are padded to `width`: a program holds a
    head of each of its tokens as one float32 tile."""
    return WriteLaunch(_BLOCK_T, 1, 4 if width <= 128 else 8)


def token_launch(num_elements: int) -> WriteLaunch:
    """Returns the launch where a program writes all heads of a token, at most `num_elements` numbers."""
    return WriteLaunch(1, 1, 4 if num_elements <= 4096 else 8)
