"""What the attention operators take that is a record elsewhere: a layer's K/V and its variants. They are
flattened for registered operators, and rebuilt for kernels, here alone."""

from collections.abc import Sequence
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.lookups.lookup import FlatLookup
from lightkv.triton_kernels.attention.variants.variant import Flat, Variant, flatten, rebuild
from lightkv.triton_kernels.quantised.unpack import as_words

from .lookups import LOOKUPS
from .paged_kv import PagedKV
from .records import Cache, Index
from .variants import VARIANTS

_KV_TENSORS, _KV_NUMBERS = 5, 5  # those of the lookup and of the variants follow


class FlatOperands(NamedTuple):
    """K/V and variants as a registered operator takes them.

    `variants`: `Flat.names`. `tensors`: K, V (words where quantised), scales of K and of V, the index, and
    those of the lookup and of the variants. `numbers`: `format_code`, the bits of an element, which of
    `LOOKUPS` it is, how many tensors and numbers it has, its numbers, and those of the variants.
    """

    variants: str
    tensors: Sequence[Tensor | None]
    numbers: Sequence[float]


class Operands(NamedTuple):
    """K/V and variants as a launcher takes them."""

    cache: Cache
    index: Index  # type: ignore[assignment]  # hides the method of tuples
    variants: tuple[Variant, ...]
    format_code: int
    element_bits: int


def flatten_operands(kv: PagedKV, variants: Sequence[Variant]) -> FlatOperands:
    """Returns K/V and variants as an operator takes them."""
    lookup, flat, stored = kv.lookup.flat(), flatten(variants), kv.format.elements
    k, v = (as_words(cache, stored) for cache in (kv.k, kv.v))
    which = LOOKUPS.index(type(kv.lookup))
    sizes = len(lookup.tensors), len(lookup.numbers)
    return FlatOperands(
        flat.names,
        [k, v, kv.scales, kv.v_scales, kv.index, *lookup.tensors, *flat.tensors],
        [kv.format_code, stored.bits, which, *sizes, *lookup.numbers, *flat.numbers],
    )


def rebuild_operands(variants: str, tensors: Sequence[Tensor | None], numbers: Sequence[float]) -> Operands:
    """Returns what `flatten_operands` was given."""
    code, bits, which, num_tensors, num_numbers = map(int, numbers[:_KV_NUMBERS])
    k, v, scales, v_scales, index = tensors[:_KV_TENSORS]
    assert k is not None
    assert v is not None
    assert index is not None
    cache = Cache(
        k,
        v,
        scales,
        v_scales,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        None if scales is None else scales.stride(0),
        None if scales is None else scales.stride(1),
        tl.constexpr(code),
    )
    end_tensors, end_numbers = _KV_TENSORS + num_tensors, _KV_NUMBERS + num_numbers
    lookup = LOOKUPS[which].rebuild(
        FlatLookup(tensors[_KV_TENSORS:end_tensors], [int(one) for one in numbers[_KV_NUMBERS:end_numbers]])
    )
    found = Index(
        index, index.stride(0), tl.constexpr(lookup.page_shift), lookup.hooks, lookup.data(), lookup.kept()
    )
    flat = Flat(variants, list(tensors[end_tensors:]), list(numbers[end_numbers:]))  # type: ignore[arg-type]
    return Operands(cache, found, rebuild(flat, VARIANTS), code, bits)
