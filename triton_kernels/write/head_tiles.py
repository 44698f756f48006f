"""How a kernel quantises and writes a tile of heads, and what it has to know of the stored elements. Their
reference is `quantise`."""

import triton
import triton.language as tl

from lightkv.triton_kernels.quantised.kv_format import Elements
from lightkv.triton_kernels.quantised.quantise_reference import (
    LARGEST_SCALE,
    LARGEST_WITH_ZERO_POINT,
    SMALLEST_SCALE,
)

_SMALLEST, _LARGEST = tl.constexpr(SMALLEST_SCALE), tl.constexpr(LARGEST_SCALE)
_MOST = tl.constexpr(LARGEST_WITH_ZERO_POINT)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # a float32 that is added to this is rounded to an integer, to even


def constants_of(elements: Elements, dim: int) -> tuple[int, bool, int, bool, bool, int]:
    """Returns what kernels know of the elements of a head of `dim`, as constants: bits, whether they are fp8,
    the elements of a group (0: all of the head), whether there is a zero point, whether scales are static, and
    the logarithm of the Hadamard transform's block (0: none).

    Raises ValueError where a head does not fit them: groups have to be a power of 2, and of 4 bits at least 2
    elements.
    """
    elements.check("K or V", dim)
    group = elements.group if elements.is_quantised else 0
    if group & (group - 1) or (group == 1 and elements.bits == 4):
        raise ValueError(
            f"groups of {group} elements of {elements.bits} bits; the kernels take powers of 2, of 4 bits at "
            "least 2: choose another format, or the torch backend"
        )
    log_block = (dim & -dim).bit_length() - 1 if elements.has_hadamard else 0
    return (
        elements.bits,
        bool(elements.is_float),
        group,
        bool(elements.has_zero_point),
        bool(elements.is_static),
        log_block,
    )


@triton.constexpr_function
def _power_of_2(exponent):
    return 1 << exponent


@triton.jit
def _apply_hadamard(tile, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, LOG_BLOCK: tl.constexpr):
    """Multiplies each row by `hadamard`: each turn replaces neighbours by their sum and their difference, and
    puts all sums before all differences."""
    BLOCK: tl.constexpr = _power_of_2(LOG_BLOCK)
    ROWS: tl.constexpr = BLOCK_T * BLOCK_D // BLOCK
    tile = tl.reshape(tile, [ROWS, BLOCK])
    for _ in tl.static_range(LOG_BLOCK):
        first, second = tl.split(tl.reshape(tile, [ROWS, BLOCK // 2, 2]))
        both = tl.join(first + second, first - second)  # [ROWS, BLOCK // 2, 2]
        tile = tl.reshape(tl.permute(both, (0, 2, 1)), [ROWS, BLOCK])
    return tl.reshape(tile * (BLOCK**-0.5), [BLOCK_T, BLOCK_D])


@triton.jit
def write_elements(
    tile,  # [BLOCK_T, BLOCK_D] float32
    target,  # [BLOCK_T, 1] pointers to the head of each token
    scales,  # [BLOCK_T, 1] pointers to its scales; to those of every token, if they are static
    valid,  # [BLOCK_T]
    ELEMENTS,  # of `constants_of`, constants
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Writes a head of each token as it is stored, and its scales, where it has some of its own."""
    BITS: tl.constexpr = ELEMENTS[0]
    IS_FLOAT: tl.constexpr = ELEMENTS[1]
    GROUP: tl.constexpr = ELEMENTS[2]
    HAS_ZERO_POINT: tl.constexpr = ELEMENTS[3]
    IS_STATIC: tl.constexpr = ELEMENTS[4]
    LOG_BLOCK: tl.constexpr = ELEMENTS[5]
    dims = tl.arange(0, BLOCK_D)
    if BITS == 16:
        element = target.dtype.element_ty
        tl.store(target + dims[None, :], tile.to(element), mask=valid[:, None] & (dims < D)[None, :])
    else:
        LARGEST: tl.constexpr = 448.0 if IS_FLOAT else 127.0 if BITS == 8 else 7.0
        BLOCK_GROUP: tl.constexpr = GROUP if GROUP > 0 else BLOCK_D
        GROUPS: tl.constexpr = D // GROUP if GROUP > 0 else 1
        BLOCK_GROUPS: tl.constexpr = BLOCK_D // BLOCK_GROUP
        if LOG_BLOCK > 0:
            tile = _apply_hadamard(tile, BLOCK_T, BLOCK_D, LOG_BLOCK)
        if HAS_ZERO_POINT:
            tile = tl.minimum(tl.maximum(tile, -_MOST), _MOST)
        groups = tl.arange(0, BLOCK_GROUPS)
        scales += groups[None, :]
        in_scales = valid[:, None] & (groups < GROUPS)[None, :]
        scale_type = scales.dtype.element_ty
        grouped = tl.reshape(tile, [BLOCK_T, BLOCK_GROUPS, BLOCK_GROUP])
        if IS_STATIC:
            scale = tl.load(scales, mask=in_scales, other=1.0).to(tl.float32)  # [BLOCK_T, BLOCK_GROUPS]
        else:
            if HAS_ZERO_POINT:
                in_head = (dims < D)[None, :]
                shape: tl.constexpr = [BLOCK_T, BLOCK_GROUPS, BLOCK_GROUP]
                low = tl.min(tl.reshape(tl.where(in_head, tile, float("inf")), shape), 2)
                high = tl.max(tl.reshape(tl.where(in_head, tile, float("-inf")), shape), 2)
                scale = (high - low) * (1.0 / 15)
            else:
                scale = tl.max(tl.abs(grouped), 2) * (1.0 / LARGEST)
            stored_scale = tl.minimum(tl.maximum(scale, _SMALLEST), _LARGEST).to(scale_type)
            tl.store(scales, stored_scale, mask=in_scales)
            scale = stored_scale.to(tl.float32)
            if HAS_ZERO_POINT:
                zero_point = (low + scale * 8.0).to(scale_type)
                tl.store(scales + GROUPS, zero_point, mask=in_scales)
                grouped -= zero_point.to(tl.float32)[:, :, None]
        inverse = tl.div_rn(tl.full([BLOCK_T, BLOCK_GROUPS], 1.0, tl.float32), scale)
        numbers = tl.reshape(grouped * inverse[:, :, None], [BLOCK_T, BLOCK_D])
        LOWEST: tl.constexpr = -8.0 if HAS_ZERO_POINT else -LARGEST
        numbers = tl.minimum(tl.maximum(numbers, LOWEST), LARGEST)
        if IS_FLOAT:
            stored = numbers.to(tl.float8e4nv)
        else:
            # The lowest bits of the rounded sum are the integer in two's complement.
            bits = (numbers + _ROUNDING).to(tl.int32, bitcast=True)
            if BITS == 4:
                low_nibble, high_nibble = tl.split(tl.reshape(bits & 15, [BLOCK_T, BLOCK_D // 2, 2]))
                stored = (low_nibble | (high_nibble << 4)).to(tl.uint8)
            else:
                stored = (bits & 255).to(tl.uint8).to(tl.int8, bitcast=True)
        WIDTH: tl.constexpr = D * BITS // 8
        places = tl.arange(0, BLOCK_D * BITS // 8)
        tl.store(target + places[None, :], stored, mask=valid[:, None] & (places < WIDTH)[None, :])
