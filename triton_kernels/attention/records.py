"""What the attention kernels take together: named tuples of pointers, strides and constants. Names in capitals
are constants of a compilation."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.quantised.unpack import fields_of, is_packed, kind_of, word_block


class Heads(NamedTuple):
    """Rows of heads, `[T, H, D]`, as of q."""

    data: Any
    stride_token: Any
    stride_head: Any


class Outputs(NamedTuple):
    """What a kernel writes: `out` `[T, H, DV]`; `lse` float32 `[T, H]`, base 2, or None; and of parts that
    another kernel combines, `partial_out` and `partial_lse`, float32, base 2; None where there are none."""

    out: Any
    stride_token: Any
    stride_head: Any
    lse: Any
    partial_out: Any
    partial_lse: Any


class Cache(NamedTuple):
    """K and V of a layer, of int16 words where quantised, and their scales and zero points: those of K, then
    those of V, which may stand apart; None where nothing is quantised. `FORMAT`: of `format_code`."""

    k: Any
    v: Any
    scales: Any
    v_scales: Any
    stride_k_slot: Any
    stride_k_head: Any
    stride_v_slot: Any
    stride_v_head: Any
    stride_scales_slot: Any
    stride_scales_head: Any
    FORMAT: Any


class Index(NamedTuple):
    """`PagedKV.index`, and how it finds a token's slot: `SHIFT` of pages, and `hooks`, `data` and `kept`
    of the lookup (`lookups/lookup.py`)."""

    entries: Any
    stride: Any
    SHIFT: Any
    hooks: Any
    data: Any
    kept: Any


class Sums(NamedTuple):
    """What the running softmax of a tile of queries has so far: the un-normalised output of `start_sums`, the
    sum of the weights and the largest score in base 2, each float32 `[BLOCK_M]`; and the slots, int64
    `[BLOCK_N]`, of the next tile of keys."""

    acc: Any
    total: Any
    peak: Any
    slots: Any


@triton.jit
def start_sums(total, peak, slots, shape):
    """Returns `Sums` of no keys yet, whose output is a tuple of zeros: one tile for each field of a word of V,
    [BLOCK_M, BLOCK_DV / fields], or transposed where BLOCK_M is below 16, as a product wants that."""
    KIND: tl.constexpr = kind_of(shape.FORMAT)
    WIDTH: tl.constexpr = word_block(shape.BLOCK_DV, KIND)
    TILE: tl.constexpr = (WIDTH, shape.BLOCK_M) if shape.BLOCK_M < 16 else (shape.BLOCK_M, WIDTH)
    tiles = ()  # type: tuple
    for _ in tl.static_range(fields_of(KIND)):
        tiles += (tl.zeros(TILE, tl.float32),)
    return Sums(tiles, total, peak, slots)


class Shape(NamedTuple):
    """The constants of a launch. `GROUP`: query heads of a K/V head. `CAUSAL`: a query sees no key after
    itself. `PACKED`: of `is_packed`."""

    GROUP: Any
    DK: Any
    DV: Any
    BLOCK_M: Any
    BLOCK_DK: Any
    BLOCK_DV: Any
    BLOCK_N: Any
    CAUSAL: Any
    FORMAT: Any
    PACKED: Any


class Together(NamedTuple):
    """Which queries a tile holds: `NUM_QUERIES` of each request, of up to `MEMBERS` requests of a prefix.
    `ALIGNED`: whether all items begin at multiples of 16 keys."""

    NUM_QUERIES: Any
    MEMBERS: Any
    ALIGNED: Any


def shape_record(
    q: Tensor, num_kv_heads: int, value_dim: int, block_m: int, block_n: int, causal: bool, layer_format: int
) -> Shape:
    """Returns the constants of a launch over tiles of `block_m` rows and `block_n` keys. `layer_format`: of
    `format_code`."""
    num_heads, key_dim = q.shape[1:]
    numbers = (
        num_heads // num_kv_heads,
        key_dim,
        value_dim,
        block_m,
        tuning.padded_dim(key_dim),
        tuning.padded_dim(value_dim),
        block_n,
        causal,
        layer_format,
        layer_format != 0 and is_packed(q),
    )
    return Shape(*map(tl.constexpr, numbers))


def heads_record(heads: Tensor) -> Heads:
    """Returns rows of heads as kernels take them."""
    return Heads(heads, heads.stride(0), heads.stride(1))
