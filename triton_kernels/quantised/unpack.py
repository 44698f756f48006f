"""Unpacks quantised K and V in a kernel: words of 16 bits become tiles of numbers, one tile for each field.

A word holds 2 or 4 neighbouring elements of a head. Tiles are loaded as words, because 16 bits are what matrix
units load and transpose, and the elements of one field of all words are a tile of their own:

    8 bits   word i:  ├─ element 2i ─┼─ element 2i + 1 ─┤           field 0: even dims, field 1: odd dims
    4 bits   word i:  ├ 4i ┼ 4i + 1 ┼ 4i + 2 ┼ 4i + 3 ┤             field f: dims 4i + f

So queries are split by their dims in the same way, and the output is put together when it is stored. On
NVIDIA's GPUs two words at a time are converted: bits of an integer are put into the mantissa of a constant, so
that no conversion instruction is needed, and fp8 has one for pairs. All elements are exact in float16, and dot
products with them are in float16. The specification is `unpack` in `quantise_reference.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_format import Elements, KVFormat

AS_COMPUTED, INT8, FP8, INT4 = range(4)
_INT8, _FP8, _INT4 = tl.constexpr(INT8), tl.constexpr(FP8), tl.constexpr(INT4)


def format_code(layer_format: KVFormat, k_dim: int, v_dim: int, *, apart: bool = False) -> int:
    """Returns a layer's format as the number that kernels are compiled for; 0 if nothing is quantised.

    Bits from the lowest: the kind of elements (2), whether they have zero points, whether the scales of V stand
    apart from those of K; from bit 8, groups of a head of K; from bit 20, those of V.
    """
    elements, kind = layer_format.elements, AS_COMPUTED
    if elements.is_quantised:
        kind = INT4 if elements.bits == 4 else FP8 if elements.is_float else INT8
    code = kind | elements.has_zero_point << 2 | apart << 3
    return code | elements.groups(k_dim) << 8 | elements.groups(v_dim) << 20


def as_words(cache: Tensor, elements: Elements) -> Tensor:
    """Returns a cache of elements `[num_slots, heads, dim]` as int16 words; one that is not quantised as it
    is."""
    return cache.view(torch.int16) if elements.is_quantised else cache


def is_packed(q: Tensor) -> bool:
    """Returns whether kernels unpack two words at a time, by NVIDIA's assembly. Dot products with quantised
    elements are in float16 then, whatever the type of q."""
    if q.element_size() != 2 or not q.is_cuda or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 9)  # the first that converts fp8


@triton.constexpr_function
def kind_of(code):
    return code & 3


@triton.constexpr_function
def has_zero_point(code):
    return bool(code >> 2 & 1)


@triton.constexpr_function
def k_groups(code):
    return code >> 8 & 4095


@triton.constexpr_function
def v_groups(code):
    return code >> 20


@triton.constexpr_function
def fields_of(kind):
    """Elements in a word."""
    return (1, 2, 2, 4)[kind]


@triton.constexpr_function
def words_of(dim, kind):
    """Words in `dim` elements."""
    return dim // (1, 2, 2, 4)[kind]


@triton.constexpr_function
def word_block(block, kind):
    """The words of a tile of `block` elements, at least as many as a dot product takes."""
    return max(16, block // (1, 2, 2, 4)[kind]) if kind else block


@triton.constexpr_function
def weight_factor(kind, packed):
    """By what weights are multiplied beside their scale, so that float16 holds small ones precisely and large
    scales at all. A power of 2; 1 where dot products are not in float16."""
    return (1.0, 64.0, 256.0, 4.0)[kind] if packed else 1.0


@triton.constexpr_function
def field_factor(kind, field, packed):
    """By what `unpack` leaves the elements of a field multiplied, if BIASED."""
    return 16.0 if packed and kind == INT4 and field % 2 else 1.0


@triton.constexpr_function
def field_bias(kind, field, packed):
    """What `unpack` leaves added to the elements of a field, if BIASED: the dot product with it is known
    before. In units of the elements, which may be multiplied by `field_factor`."""
    if not packed or kind not in (INT8, INT4):
        return 0.0
    return 1152.0 if kind == INT8 else 1032.0 if field % 2 == 0 else 72.0


@triton.constexpr_function
def is_biased(kind, groups, packed):
    """Whether keys are unpacked BIASED."""
    return packed and groups == 1 and kind in (INT8, INT4)


@triton.constexpr_function
def _assembly(kind, biased):
    """Converts a register of two words to registers of two float16 numbers, one for each field."""
    if kind == FP8:
        return (
            "{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 x, l; "
            "cvt.rn.f16x2.e4m3x2 y, h; prmt.b32 $0, x, y, 0x5410; prmt.b32 $1, x, y, 0x7632; }"
        )
    # The bits of an element, with its sign flipped, are put into the mantissa of 1024, in which a step is 1:
    # 1024 + 128 + element, or 1024 + 8 + element. The high nibble of a byte stays where it is, which makes it
    # 1024 + 16 * (8 + element).
    lines = ["mov.b32 x, $2; shr.b32 y, x, 8;" if kind == INT8 else "mov.b32 x, $4; shr.b32 y, x, 8;"]
    if kind == INT8:
        lines += ["mov.b32 z, 0xE480E480;"]
        for field, source in enumerate("xy"):
            lines += [f"lop3.b32 ${field}, {source}, 0x00FF00FF, 0x64806480, 0x6A;"]
            if not biased:
                lines += [f"add.rn.f16x2 ${field}, ${field}, z;"]
    else:
        lines += [
            "mov.b32 z, 0xE408E408; mov.b32 u, 0x2C002C00; mov.b32 v, 0xD480D480;"
        ]  # -1032, 1 / 16, -72
        for field, source in enumerate("xxyy"):
            mask, base = ("0x00F000F0", "0x64806480") if field % 2 else ("0x000F000F", "0x64086408")
            lines += [f"lop3.b32 ${field}, {source}, {mask}, {base}, 0x6A;"]
            if not biased and field % 2:
                lines += [f"fma.rn.f16x2 ${field}, ${field}, u, v;"]
            elif not biased:
                lines += [f"add.rn.f16x2 ${field}, ${field}, z;"]
    return "{ .reg .b32 x, y, z, u, v; " + " ".join(lines) + " }"


@triton.jit
def _unpack_field(words, FIELD: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the elements in a field of int16 words, as DTYPE."""
    if KIND == _INT8:
        numbers = (words.to(tl.int32) << (24 - 8 * FIELD)) >> 24
    elif KIND == _INT4:
        numbers = (words.to(tl.int32) << (28 - 4 * FIELD)) >> 28
    else:  # the bits of e4m3 in those of float16, times 2 to the difference of the exponents' biases
        byte = words.to(tl.int32) >> (8 * FIELD)
        half = ((byte & 0x80) << 8 | (byte & 0x7F) << 7).to(tl.uint16).to(tl.float16, bitcast=True)
        numbers = half.to(tl.float32) * 256.0
    return numbers.to(tl.float32).to(DTYPE)


@triton.jit
def unpack(words, KIND: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr):
    """Returns a tuple of tiles like int16 words, one for each field, of DTYPE or, if PACKED, of float16; of
    words that are not quantised, one tile of DTYPE. BIASED: with `field_factor` and `field_bias` left in."""
    FIELDS: tl.constexpr = fields_of(KIND)
    if KIND == 0:
        tiles = (words.to(DTYPE),)
    elif PACKED and FIELDS == 2:
        tiles = tl.inline_asm_elementwise(
            _assembly(KIND, BIASED), "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PACKED:
        tiles = tl.inline_asm_elementwise(
            _assembly(KIND, BIASED),
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        tiles = ()  # type: ignore[assignment]
        for field in tl.static_range(FIELDS):
            tiles += (_unpack_field(words, field, KIND, DTYPE),)  # type: ignore[assignment]
    return tiles


@triton.constexpr_function
def _words_of_group(num_words, groups):
    return num_words // groups


@triton.jit
def load_scales(
    scales, slots, valid, stride_slot, GROUPS: tl.constexpr, WIDTH: tl.constexpr, NUM_WORDS: tl.constexpr,
    HAS_ZERO_POINT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Loads the scales and the zero points (if there are none, the scales) of one head at `slots`: `[BLOCK_N]`
    float32, or where a head has several groups, `[BLOCK_N, groups]` as they are stored. `WIDTH`: words of the
    head's tile, of which `NUM_WORDS` are the head's."""
    if GROUPS == 1:
        places = scales + slots * stride_slot
        mask = valid
    else:
        group = tl.arange(0, WIDTH // _words_of_group(NUM_WORDS, GROUPS))
        places = scales + slots[:, None] * stride_slot + group[None, :]
        mask = valid[:, None] & (group < GROUPS)[None, :]
    if MASKED or GROUPS > 1:
        scale = tl.load(places, mask=mask, other=0.0)
        zero_point = scale
        if HAS_ZERO_POINT:
            zero_point = tl.load(places + GROUPS, mask=mask, other=0.0)
    else:
        scale = tl.load(places)
        zero_point = scale
        if HAS_ZERO_POINT:
            zero_point = tl.load(places + GROUPS)
    if GROUPS == 1:
        scale, zero_point = scale.to(tl.float32), zero_point.to(tl.float32)
    return scale, zero_point


@triton.constexpr_function
def fit_one_word(code, scale_bits):
    """Whether what stands beside a head of K and V is 64 bits, one scale and perhaps one zero point of each."""
    if k_groups(code) != 1 or v_groups(code) != 1 or code >> 3 & 1:
        return False
    return (4 if has_zero_point(code) else 2) * scale_bits == 64


@triton.jit
def load_scale_word(scales, slots, valid, stride_slot, MASKED: tl.constexpr):
    """Loads the scales and zero points of K and V of one head at `slots`, where they are one word: `[BLOCK_N]`
    int64. Copies of 2 bytes could not be started tiles ahead, and those of 8 can."""
    places = (scales + slots * stride_slot).to(tl.pointer_type(tl.int64))
    return tl.load(places, mask=valid, other=0) if MASKED else tl.load(places)


@triton.jit
def _scale_of(word, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the scale or zero point at a place of the word beside a head, as float32."""
    if DTYPE.primitive_bitwidth == 32:
        scale = (word >> 32 * PLACE).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        scale = (word >> 16 * PLACE).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return scale


@triton.jit
def scales_of(word, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Returns what `load_scales` does for K and for V, of the words of `load_scale_word`."""
    V: tl.constexpr = 2 if has_zero_point(FORMAT) else 1
    k_scale = _scale_of(word, 0, DTYPE)
    v_scale = _scale_of(word, V, DTYPE)
    k_zero_point, v_zero_point = k_scale, v_scale
    if has_zero_point(FORMAT):
        k_zero_point = _scale_of(word, 1, DTYPE)
        v_zero_point = _scale_of(word, V + 1, DTYPE)
    return (k_scale, k_zero_point), (v_scale, v_zero_point)


@triton.jit
def _for_words(scales, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Repeats `[BLOCK_N, groups]` for the words of each group, `[BLOCK_N, WIDTH]`."""
    GROUPS: tl.constexpr = scales.shape[1]
    repeated = tl.broadcast_to(scales.to(DTYPE)[:, :, None], (BLOCK_N, GROUPS, WIDTH // GROUPS))
    return tl.reshape(repeated, (BLOCK_N, WIDTH))


@triton.jit
def restore(numbers, beside, GROUPS: tl.constexpr, HAS_ZERO_POINT: tl.constexpr):
    """Applies the scales of groups to unpacked elements, which then are what was quantised, in their type."""
    if GROUPS > 1:
        BLOCK_N: tl.constexpr = numbers.shape[0]
        WIDTH: tl.constexpr = numbers.shape[1]
        numbers = numbers * _for_words(beside[0], BLOCK_N, WIDTH, numbers.dtype)
        if HAS_ZERO_POINT:
            numbers += _for_words(beside[1], BLOCK_N, WIDTH, numbers.dtype)
    return numbers
