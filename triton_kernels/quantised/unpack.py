"""Unpacks quantised K and V in a kernel: words of 16 bits become tiles of numbers, one tile for each field.

A word holds 2 or 4 neighbouring elements of a head. Tiles are loaded as words, because 16 bits are what matrix
units load and transpose, and the elements of one field of all words are a tile of their own:

    8 bits   word i:  ├─ element 2i ─┼─ element 2i + 1 ─┤           field 0: even dims, field 1: odd dims
    4 bits   word i:  ├ 4i ┼ 4i + 1 ┼ 4i + 2 ┼ 4i + 3 ┤             field f: dims 4i + f

So queries are split by their dims in the same way, and the output is put together when it is stored. In 16 bits
two words at a time are converted without a conversion instruction: bits of an element are put into the mantissa
of a constant, which is then subtracted. The specification is `unpack` in `quantise_reference.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_format import Elements, KVFormat

AS_COMPUTED, INT8, FP8, INT4 = range(4)
_INT8, _FP8, _INT4 = tl.constexpr(INT8), tl.constexpr(FP8), tl.constexpr(INT4)


def _kind(elements: Elements) -> int:
    if not elements.is_quantised:
        return AS_COMPUTED
    return INT4 if elements.bits == 4 else FP8 if elements.is_float else INT8


def format_code(layer_format: KVFormat, k_dim: int, v_dim: int) -> int:
    """Returns a layer's format as the number that kernels are compiled for; 0 if nothing is quantised.

    Bits from the lowest: kind of K (2), whether it has middles, kind of V (2), whether it has middles; from bit
    8, groups of a head of K; from bit 20, those of V.
    """
    k, v = layer_format.k, layer_format.v
    code = _kind(k) | k.has_middle << 2 | _kind(v) << 3 | v.has_middle << 5
    return code | k.groups(k_dim) << 8 | v.groups(v_dim) << 20


def as_words(cache: Tensor, elements: Elements) -> Tensor:
    """Returns a cache of elements `[num_slots, heads, dim]` as int16 words; one that is not quantised as it
    is."""
    return cache.view(torch.int16) if elements.is_quantised else cache


def is_packed(q: Tensor) -> bool:
    """Returns whether kernels unpack two words at a time: in 16 bits, by NVIDIA's assembly."""
    return q.element_size() == 2 and q.is_cuda and torch.version.cuda is not None


@triton.constexpr_function
def k_kind(code):
    return code & 3


@triton.constexpr_function
def v_kind(code):
    return code >> 3 & 3


@triton.constexpr_function
def k_has_middle(code):
    return bool(code >> 2 & 1)


@triton.constexpr_function
def v_has_middle(code):
    return bool(code >> 5 & 1)


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
def weight_factor(kind, dtype):
    """By what weights are multiplied beside their scale, so that float16 holds small ones precisely and large
    scales at all. A power of 2; 1 where the type has a float32's range."""
    return (1.0, 64.0, 256.0, 4.0)[kind] if dtype == tl.float16 else 1.0


@triton.constexpr_function
def _assembly(kind, field, is_bfloat16):
    """Converts a register of two words to two numbers of bfloat16 or float16."""
    shift = field * (4 if kind == INT4 else 8)
    shifted = f"shr.b32 x, $1, {shift};" if shift else "mov.b32 x, $1;"
    if is_bfloat16:
        if kind == INT8:  # 128 + the low 7 bits, less 128, or less 256 where the sign is set
            body = (
                f"mov.b32 z, 0xBF80BF80; {shifted} lop3.b32 y, x, 0x007F007F, 0x43004300, 0xEA; "
                "lop3.b32 x, x, 0x00800080, 0x43004300, 0xEA; fma.rn.bf16x2 $0, x, z, y;"
            )
        elif kind == INT4:  # 128 + the element + 8, less 136
            body = (
                f"mov.b32 z, 0xC308C308; {shifted} lop3.b32 y, x, 0x000F000F, 0x43084308, 0x6A; "
                "mov.b32 x, 0x3F803F80; fma.rn.bf16x2 $0, y, x, z;"
            )
        else:  # the bits of e4m3 in those of bfloat16, times 2 to the difference of the exponents' biases
            body = (
                f"mov.b32 z, 0x80008000; {'mov' if field else 'shl'}.b32 x, $1{'' if field else ', 8'}; "
                "shr.b32 y, x, 4; and.b32 x, x, 0x80008000; lop3.b32 y, y, 0x07F007F0, x, 0xEA; "
                "mov.b32 x, 0x7B807B80; fma.rn.bf16x2 $0, y, x, z;"
            )
    elif kind == INT8:  # 1024 + the element + 128, less 1152
        body = (
            f"mov.b32 z, 0xE480E480; {shifted} lop3.b32 y, x, 0x00FF00FF, 0x64806480, 0x6A; "
            "add.rn.f16x2 $0, y, z;"
        )
    elif kind == INT4:  # 1024 + the element + 8, less 1032
        body = (
            f"mov.b32 z, 0xE408E408; {shifted} lop3.b32 y, x, 0x000F000F, 0x64086408, 0x6A; "
            "add.rn.f16x2 $0, y, z;"
        )
    else:
        body = (
            f"mov.b32 z, 0x5C005C00; {'mov' if field else 'shl'}.b32 x, $1{'' if field else ', 8'}; "
            "shr.b32 y, x, 1; and.b32 x, x, 0x80008000; lop3.b32 y, y, 0x3F803F80, x, 0xEA; "
            "mul.rn.f16x2 $0, y, z;"
        )
    return "{ .reg .b32 x, y, z; " + body + " }"


@triton.jit
def unpack(words, FIELD: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Returns the elements in a field of int16 words, as DTYPE, in a tile of the same shape; words as they are
    (in DTYPE) if they are no quantised ones. PACKED: in 16 bits, by the assembly of NVIDIA's GPUs."""
    if KIND == 0:
        numbers = words.to(DTYPE)
    elif PACKED and DTYPE == tl.bfloat16:
        numbers = tl.inline_asm_elementwise(
            _assembly(KIND, FIELD, True), "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif PACKED:
        numbers = tl.inline_asm_elementwise(
            _assembly(KIND, FIELD, False), "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    elif KIND == _INT8:
        numbers = ((words.to(tl.int32) << (24 - 8 * FIELD)) >> 24).to(tl.float32).to(DTYPE)
    elif KIND == _INT4:
        numbers = ((words.to(tl.int32) << (28 - 4 * FIELD)) >> 28).to(tl.float32).to(DTYPE)
    else:
        byte = words.to(tl.int32) >> (8 * FIELD)
        half = ((byte & 0x80) << 8 | (byte & 0x7F) << 7).to(tl.uint16).to(tl.float16, bitcast=True)
        numbers = (half.to(tl.float32) * 256.0).to(DTYPE)
    return numbers


@triton.jit
def load_columns(
    columns, slots, valid, stride_slot, GROUPS: tl.constexpr, WIDTH: tl.constexpr, NUM_WORDS: tl.constexpr,
    MIDDLE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Loads the scales and the middles (if there are none, the scales) of one head at `slots`, float32:
    `[BLOCK_N]`, or where a head has several groups, `[BLOCK_N, WIDTH]`, one for each word of the head."""
    if GROUPS == 1:
        places = columns + slots * stride_slot
        mask = valid
    else:
        word = tl.arange(0, WIDTH)
        places = columns + slots[:, None] * stride_slot + (word * GROUPS // NUM_WORDS)[None, :]
        mask = valid[:, None] & (word < NUM_WORDS)[None, :]
    if MASKED or GROUPS > 1:
        scale = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        middle = scale
        if MIDDLE:
            middle = tl.load(places + GROUPS, mask=mask, other=0.0).to(tl.float32)
    else:
        scale = tl.load(places).to(tl.float32)
        middle = scale
        if MIDDLE:
            middle = tl.load(places + GROUPS).to(tl.float32)
    return scale, middle


@triton.jit
def restore(numbers, beside, GROUPS: tl.constexpr, MIDDLE: tl.constexpr):
    """Applies the scales of groups to unpacked elements, which then are what was quantised."""
    if GROUPS > 1:
        restored = numbers.to(tl.float32) * beside[0]
        if MIDDLE:
            restored += beside[1]
        numbers = restored.to(numbers.dtype)
    return numbers
