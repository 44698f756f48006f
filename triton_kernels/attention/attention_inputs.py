"""Checks of what the attention operators get: shapes, strides, dtypes and numbers, but no tensor's contents."""

from typing import NamedTuple

from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Variant, limits
from lightkv.triton_kernels.checks import Tensors

from .paged_kv import AttentionOptions, PagedKV
from .variants import in_order

# T queries of H heads, B requests, of which P have queries of any number, and h K/V heads.
REQUESTS = Tensors(
    rows="contiguous int32 or int64 [B]",
    lengths="contiguous int32 [B]",
    q_starts="contiguous int32 [P + 1]",
    begins="contiguous int32 [B]",
    index="int32 [rows, entries] with a last stride of 1",
)
_ATTENTION = Tensors(
    k_cache="[slots, h, Wk] with a last stride of 1",
    v_cache="[slots, h, Wv] with a last stride of 1",
    q="[T, H, Dk] with a last stride of 1",
    out="[T, H, Dv] with a last stride of 1",
    lse="contiguous float32 [T, H]",
)
_APART = Tensors(
    scales="float32 or float16 [slots, h, Sk] with a last stride of 1",
    v_scales="float32 or float16 [slots, h, Sv] with a last stride of 1",
)


class Call(NamedTuple):
    """A call of attention, whose arguments fit each other: q `[T, H, Dk]`, K and V, the rows and lengths of B
    requests, the options, and where the output `[T, H, Dv]` and the log-sum-exps `[T, H]`, if asked for, are
    written."""

    q: Tensor
    kv: PagedKV
    rows: Tensor
    lengths: Tensor
    options: AttentionOptions
    out: Tensor
    lse: Tensor | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        kv: PagedKV,
        rows: Tensor,
        lengths: Tensor,
        options: AttentionOptions,
        out: Tensor | None,
        lse: Tensor | None,
        q_starts: Tensor | None = None,
        num_prefills: int | None = None,
    ) -> "Call":
        """Returns the call, with a new output of the type of q where `out` is None. `num_prefills`: requests
        that `q_starts` is for; None for any number. Raises ValueError where shapes, strides, dtypes or numbers
        do not fit; reads no tensor's contents."""
        dims = {"Dk": kv.key_dim, "Dv": kv.value_dim}
        sizes = _ATTENTION.check(dims, q=q, k_cache=kv.k, v_cache=kv.v, out=out, lse=lse)
        if sizes["H"] % sizes["h"]:
            raise ValueError(
                f"q has {sizes['H']} heads, which is not a multiple of the {sizes['h']} K/V heads"
            )
        sizes = {} if num_prefills is None else {"P": num_prefills}
        REQUESTS.check(sizes, rows=rows, lengths=lengths, q_starts=q_starts, index=kv.index)
        check_scales(kv)
        kv.lookup.check(kv.index, options.variants)
        if not options.scale_for(q.shape[2]) > 0:
            raise ValueError(f"scale must be positive; got {options.scale}")
        check_variants(options.variants, q, len(rows))
        if not options.causal and any(not one.flags.is_short for one in limits(options.variants)):
            raise ValueError(f"a layer with chunks is causal; got {options}")
        out = q.new_empty((*q.shape[:2], kv.value_dim)) if out is None else out
        return cls(q, kv, rows, lengths, options, out, lse)

    def of_some(self, queries: slice, begin: int, end: int) -> "Call":
        """Returns the call for some queries, those of the requests [begin, end)."""
        options = self.options.of_queries(queries.start or 0, queries.stop).of_requests(begin, end)
        lse = None if self.lse is None else self.lse[queries]
        rows, lengths = self.rows[begin:end], self.lengths[begin:end]
        return Call(self.q[queries], self.kv, rows, lengths, options, self.out[queries], lse)


def check_plan(made: tuple[object, ...], asked: tuple[object, ...], names: str) -> None:
    """Raises ValueError unless a plan was made for what a call asks; `names` says what the two consist of."""
    if made != asked:
        raise ValueError(
            f"the plan is for ({names}) {made}, and the call has {asked}; make a plan for this call"
        )


def check_variants(variants: tuple[Variant, ...], q: Tensor, num_requests: int) -> None:
    """Raises ValueError where a variant does not fit q `[T, H, D]` of so many requests, or another variant."""
    for one in variants:
        one.check(q, num_requests)
    if len({type(one) for one in variants}) < len(variants) or in_order(variants) != variants:
        names = [type(one).__name__ for one in variants]
        raise ValueError(f"variants are given once each and in the order of VARIANTS; got {names}")
    check_limits(limits(variants))
    positional = [one for one in variants if one.flags.reads_positions or one.flags.has_first_key]
    if positional and any(one.flags.hides_own for one in variants):
        raise ValueError(
            "a tree of guesses is for layers without a window, chunks or ALiBi: a guess's position is its "
            "depth in the tree, and these would count its place among the queries; verify guesses in a line"
        )


def check_limits(limits: tuple[Variant, ...]) -> None:
    """Raises ValueError for more than one variant that limits the first key that a query sees."""
    if len(limits) > 1:
        raise ValueError(f"a layer has a window, or chunks, or neither; got {limits}")


def check_scales(kv: PagedKV) -> None:
    """Raises ValueError where the scales or the caches do not fit the format."""
    elements = kv.format.elements
    for name, cache in (("k_cache", kv.k), ("v_cache", kv.v)):
        if elements.is_quantised and (cache.dtype != elements.stored or cache.stride(1) % 2):
            raise ValueError(
                f"{name} must hold {elements.stored} at even bytes for {elements}, got {cache.dtype} with "
                f"strides {cache.stride()}; use the views of a KVPool"
            )
    if kv.v_scales is None or kv.scales is None or not elements.is_quantised:
        kv.format.check_scales(
            kv.scales if kv.v_scales is None else kv.v_scales, kv.k, kv.key_dim, kv.value_dim
        )
        return
    counts = {"Sk": elements.num_scales(kv.key_dim), "Sv": elements.num_scales(kv.value_dim)}
    _APART.check({"slots": len(kv.k), "h": kv.k.shape[1], **counts}, scales=kv.scales, v_scales=kv.v_scales)
    both = [(scales.dtype, scales.stride()[:2]) for scales in (kv.scales, kv.v_scales)]
    if both[0] != both[1]:
        raise ValueError(f"scales and v_scales must have one type and equal strides, got {both}")
