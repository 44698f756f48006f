"""Flattens a layer's K/V for registered operators, and rebuilds it for kernels."""

import triton.language as tl

from lightkv.triton_kernels.quantised.unpack import as_words

from .lookups import LOOKUPS
from .lookups.lookup import FlatLookup
from .paged_kv import PagedKV
from .records import Cache, FlatKV, Index

_OWN_TENSORS, _OWN_NUMBERS = 5, 4  # of `FlatKV`; those of the lookup follow


def flatten_kv(kv: PagedKV) -> FlatKV:
    """Returns `kv` as an operator takes it."""
    k, v = as_words(kv.k, kv.format.k), as_words(kv.v, kv.format.v)
    tensors, numbers = kv.lookup.flat()
    return FlatKV(
        [k, v, kv.scales, kv.v_scales, kv.index, *tensors],
        [kv.format_code, kv.format.k.bits, kv.format.v.bits, LOOKUPS.index(type(kv.lookup)), *numbers],
    )


def kv_records(flat: FlatKV) -> tuple[Cache, Index]:
    """Returns what `flatten_kv` was given as kernels take it."""
    k, v, scales, v_scales, index = flat.tensors[:_OWN_TENSORS]
    assert k is not None
    assert v is not None
    assert index is not None
    stride_scales_slot, stride_scales_head = (None, None) if scales is None else scales.stride()[:2]
    cache = Cache(
        k,
        v,
        scales,
        v_scales,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        stride_scales_slot,
        stride_scales_head,
        tl.constexpr(flat.format_code),
    )
    of_lookup = FlatLookup(flat.tensors[_OWN_TENSORS:], flat.numbers[_OWN_NUMBERS:])
    lookup = LOOKUPS[flat.numbers[_OWN_NUMBERS - 1]].rebuild(of_lookup)
    rows = Index(index, index.stride(0), tl.constexpr(lookup.page_shift), lookup.hooks, lookup.data())
    return cache, rows
