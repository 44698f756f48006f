"""What the attention operators share: where a layer's K/V is, its heads, and how the layer attends."""

from typing import NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Variant
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, Elements, KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import dequantise, split_scales
from lightkv.triton_kernels.quantised.unpack import as_words, format_code

from . import lookups
from .lookups import TOKEN_TABLE, Lookup
from .records import Cache, Index
from .variants import VARIANTS, in_order

Chosen = TypeVar("Chosen", bound=Variant)


class PagedKV(NamedTuple):
    """K/V of one layer, and the index in which a lookup finds the slot of each token.

    `k`: `[num_slots, num_kv_heads, Dk]`, `v`: `[num_slots, num_kv_heads, Dv]`, with any strides except that the
    last one is 1; both may be views of one buffer. Two elements of 4 bits share a byte, so there the last dim
    is half of Dk or Dv.
    `index`: int32 `[num_rows, num_entries]`, the first slot of each `2**lookup.page_shift` tokens of a row.
    `lookup`: which entry the token at a position of a row has, one of `LOOKUPS`.
    `format`: how K and V are stored. Where a Hadamard matrix multiplied them, queries and the output have to be
    multiplied, too (`apply_hadamard`).
    `scales`: `[num_slots, num_kv_heads, num_scales]` of `format.scale_dtype`, the last stride 1: the scales and
    zero points of K, and those of V. A stride of 0 for slots stands for static scales. None if nothing is
    quantised.
    `v_scales`: where V's stand apart from K's, those of V, with the strides of `scales`, which has K's alone
    then; both are float32 or float16, whatever `format.scale_dtype` says. None where they stand beside K's.
    """

    k: Tensor
    v: Tensor
    index: Tensor  # type: ignore[assignment]  # hides the method of tuples
    lookup: Lookup = TOKEN_TABLE
    scales: Tensor | None = None
    format: KVFormat = AS_COMPUTED
    v_scales: Tensor | None = None

    @property
    def key_dim(self) -> int:
        """The dims of a head of K."""
        return self.k.shape[-1] * (2 if self.format.elements.bits == 4 else 1)

    @property
    def value_dim(self) -> int:
        """The dims of a head of V."""
        return self.v.shape[-1] * (2 if self.format.elements.bits == 4 else 1)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns K and V of slots, int64 `[n]`, `[n, num_kv_heads, Dk]` and `[n, num_kv_heads, Dv]`, in plain
        torch: float32 where quantised, and products with a Hadamard matrix as they are."""
        k, v = self.k[slots], self.v[slots]
        if self.scales is None:
            return k, v
        if self.v_scales is None:
            of_k, of_v = split_scales(self.scales[slots], self.format, self.key_dim)
        else:
            of_k, of_v = self.scales[slots], self.v_scales[slots]
        elements = self.format.elements
        return dequantise(k, of_k, elements), dequantise(v, of_v, elements)

    def for_kernels(self) -> tuple[Cache, Index]:
        """Returns K/V and the index as kernels take them."""
        k, v = (as_words(cache, self.format.elements) for cache in (self.k, self.v))
        of_scales = (None, None) if self.scales is None else self.scales.stride()[:2]
        strides = *k.stride()[:2], *v.stride()[:2], *of_scales
        code = format_code(self.format, self.key_dim, self.value_dim, apart=self.v_scales is not None)
        cache = Cache._make((k, v, self.scales, self.v_scales, *strides, tl.constexpr(code)))
        lookup, shift = self.lookup, tl.constexpr(self.lookup.page_shift)
        return cache, Index(
            self.index, self.index.stride(0), shift, lookup.hooks, lookup.data(), lookup.kept()
        )


class HeadShape(NamedTuple):
    """The heads of a layer: their numbers, and the dims of a head of q and K, and of V."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, q: Tensor, kv: PagedKV) -> "HeadShape":
        """Returns the heads of q `[T, num_heads, key_dim]` and of `kv`."""
        return cls(q.shape[1], kv.k.shape[1], q.shape[2], kv.value_dim)

    def key_bytes(self, dtype: torch.dtype, layer_format: KVFormat = AS_COMPUTED) -> int:
        """Returns the bytes of K and V of a token for one K/V head, computed in `dtype`."""
        return layer_format.elements.head_bytes(self.key_dim + self.value_dim, dtype)


class AttentionOptions(NamedTuple):
    """How a layer attends.

    `scale`: multiplies q·k, positive; None stands for head_dim ** -0.5.
    `causal`: whether a query sees no key after itself. False: it sees all keys of its request, as in an
    encoder, or as with the keys of another sequence, where positions mean nothing.
    `variants`: what changes scores and hides keys, in the order of `variants.VARIANTS`.
    """

    scale: float | None = None
    causal: bool = True
    variants: tuple[Variant, ...] = ()

    def scale_for(self, head_dim: int) -> float:
        """Returns `scale`, or its default for heads of `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale

    @property
    def most_keys(self) -> int | None:
        """The most tokens that a query sees; None for any number."""
        bounds = [most for one in self.variants if (most := one.most_keys()) is not None]
        return min(bounds, default=None)

    @property
    def counts_positions(self) -> bool:
        """Whether what a query sees depends on true positions, of itself and of keys after it, too."""
        return not self.causal or any(
            one.flags.has_first_key or one.flags.reads_positions for one in self.variants
        )

    def plus(self, *variants: Variant | None) -> "AttentionOptions":
        """Returns the options with more variants."""
        more = tuple(one for one in variants if one is not None)
        return self._replace(variants=in_order((*self.variants, *more))) if more else self

    def without(self, *kinds: type[Variant]) -> "AttentionOptions":
        """Returns the options without the variants of these classes."""
        return self._replace(variants=tuple(one for one in self.variants if not isinstance(one, kinds)))

    def of_queries(self, begin: int, end: int) -> "AttentionOptions":
        """Returns the options for the queries [begin, end) of q alone."""
        return self._replace(variants=tuple(one.of_queries(begin, end) for one in self.variants))

    def of_requests(self, begin: int, end: int) -> "AttentionOptions":
        """Returns the options for the requests [begin, end) alone."""
        return self._replace(variants=tuple(one.of_requests(begin, end) for one in self.variants))

    def of(self, kind: type[Chosen]) -> Chosen | None:
        """Returns the variant of a class; None if there is none."""
        return next((one for one in self.variants if isinstance(one, kind)), None)


DEFAULT_OPTIONS = AttentionOptions()
# The records that K/V, options and the limits of plans consist of, for operators that take these.
RECORDS = (PagedKV, KVFormat, Elements, AttentionOptions, *lookups.RECORDS, *VARIANTS)
