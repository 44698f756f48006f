"""Write new K/V into the cache: one scatter by slot.

Knows slots and strides. Not which sequence a token belongs to, nor how its slot was found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tuning import padded_dim

_BLOCK_T = 16  # tokens a program writes


@triton.jit
def _copy_rows(
    source,
    cache,
    tokens,
    slots,
    valid,
    head,
    stride_source_t,
    stride_source_h,
    stride_cache_slot,
    stride_cache_h,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dims < D)[None, :]  # [BLOCK_T, BLOCK_D]
    source += head * stride_source_h + dims[None, :]
    cache += head * stride_cache_h + dims[None, :]
    tile = tl.load(source + tokens[:, None] * stride_source_t, mask=mask, other=0.0)  # [BLOCK_T, BLOCK_D]
    tl.store(cache + slots[:, None] * stride_cache_slot, tile.to(cache.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    num_tokens,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_kc_slot,
    stride_kc_h,
    stride_vc_slot,
    stride_vc_h,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    valid = tokens < num_tokens
    slot = tl.load(slots + tokens, mask=valid, other=0).to(tl.int64)  # [BLOCK_T]
    _copy_rows(
        k,
        k_cache,
        tokens,
        slot,
        valid,
        head,
        stride_k_t,
        stride_k_h,
        stride_kc_slot,
        stride_kc_h,
        DK,
        BLOCK_DK,
    )
    _copy_rows(
        v,
        v_cache,
        tokens,
        slot,
        valid,
        head,
        stride_v_t,
        stride_v_h,
        stride_vc_slot,
        stride_vc_h,
        DV,
        BLOCK_DV,
    )


@torch.library.custom_op("lightkv::write_kv", mutates_args=("k_cache", "v_cache"))
def _write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    num_tokens, num_kv_heads, key_dim = k.shape
    value_dim = v.shape[2]
    if num_tokens == 0:
        return
    # Heads run fastest: programs side by side write side by side.
    _write_kv_kernel[(num_kv_heads, triton.cdiv(num_tokens, _BLOCK_T))](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        num_tokens,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        DK=key_dim,
        DV=value_dim,
        BLOCK_DK=padded_dim(key_dim),
        BLOCK_DV=padded_dim(value_dim),
        BLOCK_T=_BLOCK_T,
    )


_write_kv.register_fake(lambda *_: None)  # the output is an argument


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write each token's K and V to its slot, cast to the dtype of the cache.

    Args:
        k: `[T, num_kv_heads, Dk]`, any strides but a last one of 1.
        v: `[T, num_kv_heads, Dv]`, likewise.
        k_cache: `[num_slots, num_kv_heads, Dk]`, any strides but a last one of 1; written in place.
        v_cache: `[num_slots, num_kv_heads, Dv]`, likewise; both may be views of one buffer.
        slots: int32 or int64 `[T]`. Distinct, but for slot 0, the padding, which may occur any number of
            times and holds one of its writers' values after, whichever came last.

    Raises:
        ValueError: shapes, strides or dtypes do not fit. Slots are not read, so not checked.
    """
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dim() != 3 or cache.dim() != 3 or new.shape[1:] != cache.shape[1:]:
            raise ValueError(
                f"{name} must be [tokens, kv_heads, dim] and its cache [slots, kv_heads, dim], with the same "
                f"heads and dim; got {tuple(new.shape)} and {tuple(cache.shape)}"
            )
        if new.stride(2) != 1 or cache.stride(2) != 1:
            raise ValueError(f"the last stride of {name} and of its cache must be 1; make it contiguous")
    if slots.shape != k.shape[:1] or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"k, v and slots must agree on the number of tokens, k and v on that of heads; got "
            f"{tuple(k.shape)}, {tuple(v.shape)} and {tuple(slots.shape)}"
        )
    if slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 or int64, got {slots.dtype}")
    _write_kv(k, v, k_cache, v_cache, slots)


def write_kv_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """The specification of `write_kv`, in plain torch."""
    k_cache[slots.long()] = k.to(k_cache.dtype)
    v_cache[slots.long()] = v.to(v_cache.dtype)
