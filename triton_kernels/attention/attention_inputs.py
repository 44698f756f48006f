"""Checks of what the attention operators get: shapes, strides, dtypes and numbers, but no tensor's contents."""

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Variant, limits
from lightkv.triton_kernels.layout.strides import has_unit_stride

from .paged_kv import AttentionOptions, PagedKV
from .variants import in_order


def check_requests(rows: Tensor, lengths: Tensor) -> None:
    """Raises ValueError unless these are `[B]` of their types. Reads no tensor's contents."""
    if rows.dtype not in (torch.int32, torch.int64) or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous int32 or int64, got {rows.dtype}")
    if lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise ValueError(f"lengths must be contiguous int32, got {lengths.dtype}")
    if rows.dim() != 1 or rows.shape != lengths.shape:
        raise ValueError(f"rows and lengths must be [B], got {tuple(rows.shape)} and {tuple(lengths.shape)}")


def check_starts(name: str, tensor: Tensor, length: int) -> None:
    """Raises ValueError unless this is contiguous int32 `[length]`. Reads no tensor's contents."""
    if tensor.dtype != torch.int32 or tensor.shape != (length,) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous int32 [{length}], got {tensor.dtype} {tuple(tensor.shape)}"
        )


def check_attention_inputs(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
    out: Tensor | None,
    lse: Tensor | None,
) -> float:
    """Returns the layer's scale. Raises ValueError where shapes, strides, dtypes or numbers do not fit; reads
    no tensor's contents."""
    k_cache, v_cache, index = kv[:3]
    if q.dim() != 3 or k_cache.dim() != 3 or v_cache.dim() != 3:
        raise ValueError(
            f"q must be [tokens, heads, dim] and the caches [slots, kv_heads, dim]; got {tuple(q.shape)}, "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    num_heads, key_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[1]
    if kv.key_dim != key_dim or v_cache.shape[:2] != k_cache.shape[:2] or num_heads % num_kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)} must have the head dim of k_cache {tuple(k_cache.shape)} and a multiple of "
            f"its heads, and v_cache {tuple(v_cache.shape)} as many slots and heads; K/V is {kv.format}"
        )
    check_scales(kv)
    out_shape = (*q.shape[:2], kv.value_dim)
    if out is not None and tuple(out.shape) != out_shape:
        raise ValueError(f"out must have shape {out_shape}, got {tuple(out.shape)}")
    for name, tensor in (
        ("q", q),
        ("k_cache", k_cache),
        ("v_cache", v_cache),
        ("index", index),
        ("out", out),
    ):
        if tensor is not None and not has_unit_stride(tensor):
            raise ValueError(
                f"the last stride of {name} must be 1, got {tensor.stride()}; make it contiguous"
            )
    if lse is not None and (
        lse.dtype != torch.float32 or lse.shape != q.shape[:2] or not lse.is_contiguous()
    ):
        raise ValueError(
            f"lse must be contiguous float32 {tuple(q.shape[:2])}, got {lse.dtype} {tuple(lse.shape)}"
        )
    if index.dim() != 2 or index.dtype != torch.int32:
        raise ValueError(f"index must be int32 [rows, entries], got {index.dtype} {tuple(index.shape)}")
    kv.lookup.check(index, options.variants)
    check_requests(rows, lengths)
    scale = options.scale_for(key_dim)
    if not scale > 0:
        raise ValueError(f"scale must be positive; got {scale}")
    check_variants(options.variants, q, len(rows))
    if not options.causal and any(not one.flags.is_short for one in limits(options.variants)):
        raise ValueError(f"a layer with chunks is causal; got {options}")
    return scale


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
    if not kv.format.is_quantised:
        if kv.scales is not None or kv.v_scales is not None:
            raise ValueError("scales, but K and V are not quantised; give the format")
        return
    elements = kv.format.elements
    for name, cache in (("k_cache", kv.k), ("v_cache", kv.v)):
        if cache.dtype != elements.stored or cache.stride(1) % 2:
            raise ValueError(
                f"{name} must hold {elements.stored} at even bytes for {elements}, got {cache.dtype} with "
                f"strides {cache.stride()}; use the views of a KVPool"
            )
    if kv.v_scales is not None:
        check_scales_apart(kv)
        return
    scales, dtype = kv.scales, kv.format.scale_dtype
    shape = *kv.k.shape[:2], kv.format.num_scales(kv.key_dim, kv.value_dim)
    if scales is None or scales.shape != shape or scales.dtype != dtype or not has_unit_stride(scales):
        found = None if scales is None else (scales.dtype, tuple(scales.shape), scales.stride())
        raise ValueError(
            f"scales must be {dtype} {shape} with a last stride of 1 for {kv.format}, got {found}"
        )


def check_scales_apart(kv: PagedKV) -> None:
    """Raises ValueError where the scales of K and those of V, which stand apart, do not fit the format."""
    elements = kv.format.elements
    wanted = tuple((*kv.k.shape[:2], elements.num_scales(dim)) for dim in (kv.key_dim, kv.value_dim))
    given = [scales for scales in (kv.scales, kv.v_scales) if scales is not None]
    fits = all(
        scales.shape == shape
        and scales.dtype in (torch.float32, torch.float16)
        and scales.dtype == given[0].dtype
        and scales.stride()[:2] == given[0].stride()[:2]
        and has_unit_stride(scales)
        for scales, shape in zip(given, wanted, strict=False)
    )
    if len(given) < 2 or not fits:
        found = [(scales.dtype, tuple(scales.shape), scales.stride()) for scales in given]
        raise ValueError(
            f"scales of K and of V that stand apart must be float32 or float16 {wanted[0]} and {wanted[1]} "
            f"with equal strides, the last 1, for {kv.format}; got {found}"
        )
