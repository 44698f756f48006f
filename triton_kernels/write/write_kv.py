"""Writes new K/V to the cache in one pass from the projection: adds biases, applies rotary positions, and
scatters by slot. Any frequencies and any scaling of them are tables of cosines and sines here."""

from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layout.strides import has_unit_stride

from .write_inputs import check_inputs


@triton.jit
def _load_dims(source, bias, dims, valid, END: tl.constexpr):
    """Loads `dims` of a head of each token, [BLOCK_T, dims]; in float32 with the bias added, if there is
    one."""
    in_head = dims < END
    tile = tl.load(source + dims[None, :], mask=valid[:, None] & in_head[None, :], other=0.0)
    if bias is not None:
        tile = tile.to(tl.float32) + tl.load(bias + dims, mask=in_head, other=0.0).to(tl.float32)[None, :]
    return tile


@triton.jit
def _store_dims(target, tile, dims, valid, END: tl.constexpr):
    tile = tile.to(target.dtype.element_ty)
    tl.store(target + dims[None, :], tile, mask=valid[:, None] & (dims < END)[None, :])


@triton.jit
def _write_head(
    source,  # [BLOCK_T, 1] pointers to the head of each token
    bias,  # the head's, or None
    target,  # [BLOCK_T, 1] pointers
    cos,  # [BLOCK_T, BLOCK_PAIRS] float32
    sin,
    valid,  # [BLOCK_T]
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Writes a head of each token: adds the bias, rotates the first 2 * PAIRS dims, and copies the other
    dims."""
    HAS_REST: tl.constexpr = 2 * PAIRS < D and not (IN_PLACE and bias is None)
    pairs = tl.arange(0, BLOCK_PAIRS)
    both = tl.arange(0, 2 * BLOCK_PAIRS)
    rest_dims = 2 * PAIRS + tl.arange(0, BLOCK_REST)
    if HAS_REST:
        rest = _load_dims(source, bias, rest_dims, valid, D)
    if PAIRS > 0:
        if INTERLEAVED:
            tile = _load_dims(source, bias, both, valid, 2 * PAIRS).to(tl.float32)
            first, second = tl.split(tl.reshape(tile, [BLOCK_T, BLOCK_PAIRS, 2]))  # [BLOCK_T, BLOCK_PAIRS]
        else:
            first = _load_dims(source, bias, pairs, valid, PAIRS).to(tl.float32)
            second_bias = bias + PAIRS if bias is not None else None
            second = _load_dims(source + PAIRS, second_bias, pairs, valid, PAIRS).to(tl.float32)
        rotated_first = first * cos - second * sin
        rotated_second = second * cos + first * sin
    if IN_PLACE:
        tl.debug_barrier()  # several threads read an element of a small tile, and one writes it
    if HAS_REST:
        _store_dims(target, rest, rest_dims, valid, D)
    if PAIRS > 0:
        if INTERLEAVED:
            rotated = tl.reshape(tl.join(rotated_first, rotated_second), [BLOCK_T, 2 * BLOCK_PAIRS])
            _store_dims(target, rotated, both, valid, 2 * PAIRS)
        else:
            _store_dims(target, rotated_first, pairs, valid, PAIRS)
            _store_dims(target + PAIRS, rotated_second, pairs, valid, PAIRS)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots", "positions"])
def _write_kv_kernel(
    q,  # None: q_out is rotated in place
    k,
    v,
    q_bias,  # each [heads, D], or None
    k_bias,
    v_bias,
    q_out,  # None: there is no q
    k_cache,
    v_cache,
    slots,
    positions,
    cos,
    sin,
    num_tokens,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_q_bias,
    stride_k_bias,
    stride_v_bias,
    stride_out_t,
    stride_out_h,
    stride_kc_slot,
    stride_kc_h,
    stride_vc_slot,
    stride_vc_h,
    stride_cos,
    stride_sin,
    KV_PROGRAMS: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_K_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Heads run fastest, so neighbouring programs write neighbouring heads.
    program = tl.program_id(0) % (KV_PROGRAMS + Q_PROGRAMS)
    block = tl.program_id(0) // (KV_PROGRAMS + Q_PROGRAMS)
    token = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    valid = token < num_tokens
    cosines = 0.0
    sines = 0.0
    if PAIRS > 0:
        row = token if positions is None else tl.load(positions + token, mask=valid, other=0).to(tl.int64)
        pair = tl.arange(0, BLOCK_PAIRS)
        is_pair = valid[:, None] & (pair < PAIRS)[None, :]
        cosines = tl.load(cos + row[:, None] * stride_cos + pair[None, :], mask=is_pair, other=0.0)
        sines = tl.load(sin + row[:, None] * stride_sin + pair[None, :], mask=is_pair, other=0.0)
        cosines, sines = cosines.to(tl.float32), sines.to(tl.float32)

    if program < KV_PROGRAMS:
        slot = tl.load(slots + token, mask=valid, other=0).to(tl.int64)  # [BLOCK_T]
        for i in tl.static_range(0, HEADS):
            head = (program * HEADS + i).to(tl.int64)
            _write_head(
                k + token[:, None] * stride_k_t + head * stride_k_h,
                k_bias + head * stride_k_bias if k_bias is not None else None,
                k_cache + slot[:, None] * stride_kc_slot + head * stride_kc_h,
                cosines,
                sines,
                valid,
                DK,
                PAIRS,
                INTERLEAVED,
                False,
                BLOCK_T,
                BLOCK_PAIRS,
                BLOCK_K_REST,
            )
            _write_head(
                v + token[:, None] * stride_v_t + head * stride_v_h,
                v_bias + head * stride_v_bias if v_bias is not None else None,
                v_cache + slot[:, None] * stride_vc_slot + head * stride_vc_h,
                cosines,
                sines,
                valid,
                DV,
                0,
                INTERLEAVED,
                False,
                BLOCK_T,
                BLOCK_PAIRS,
                BLOCK_DV,
            )
    elif Q_PROGRAMS > 0:
        for i in tl.static_range(0, HEADS):
            head = ((program - KV_PROGRAMS) * HEADS + i).to(tl.int64)
            target = q_out + token[:, None] * stride_out_t + head * stride_out_h
            _write_head(
                target if q is None else q + token[:, None] * stride_q_t + head * stride_q_h,
                q_bias + head * stride_q_bias if q_bias is not None else None,
                target,
                cosines,
                sines,
                valid,
                DK,
                PAIRS,
                INTERLEAVED,
                q is None,
                BLOCK_T,
                BLOCK_PAIRS,
                BLOCK_K_REST,
            )


# No defaults: torch 2.11 does not fill them in where it records which tensors an operator wrote to.
@torch.library.custom_op("lightkv::write_kv", mutates_args=("k_cache", "v_cache", "q_out"))
def _write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q: Tensor | None,
    q_out: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
) -> None:
    num_tokens, num_kv_heads, key_dim = k.shape
    value_dim = v.shape[2]
    if num_tokens == 0:
        return
    num_heads = 0 if q_out is None else q_out.shape[1]
    num_pairs = 0 if cos is None else cos.shape[1]
    device = tuning.device_class(k.device)
    block_t, heads = tuning.write_launch(device, num_tokens, num_kv_heads, num_heads, num_pairs)
    early = tuning.has_early_launch(device)
    options = {"launch_pdl": True} if early else {}
    kv_programs, q_programs = num_kv_heads // heads, num_heads // heads
    _write_kv_kernel[((kv_programs + q_programs) * triton.cdiv(num_tokens, block_t),)](
        q,
        k,
        v,
        q_bias,
        k_bias,
        v_bias,
        q_out,
        k_cache,
        v_cache,
        slots,
        positions,
        cos,
        sin,
        num_tokens,
        *_strides(q, 2),
        *k.stride()[:2],
        *v.stride()[:2],
        *_strides(q_bias, 1),
        *_strides(k_bias, 1),
        *_strides(v_bias, 1),
        *_strides(q_out, 2),
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        *_strides(cos, 1),
        *_strides(sin, 1),
        KV_PROGRAMS=kv_programs,
        Q_PROGRAMS=q_programs,
        HEADS=heads,
        DK=key_dim,
        DV=value_dim,
        PAIRS=num_pairs,
        INTERLEAVED=interleaved,
        BLOCK_T=block_t,
        BLOCK_PAIRS=triton.next_power_of_2(max(num_pairs, 1)),
        BLOCK_K_REST=tuning.padded_dim(key_dim - 2 * num_pairs),
        BLOCK_DV=tuning.padded_dim(value_dim),
        EARLY=early,
        enable_fp_fusion=False,  # as in torch, a product is rounded before it is added, so the bits are equal
        **options,
    )


_write_kv.register_fake(lambda *_, **__: None)  # the outputs are arguments


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()[:count]


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
) -> None:
    """Writes each token's K and V to its slot, cast to the dtype of the cache. Biases are added to q, k and v
    before, and q and k are rotated by their positions, where these are given. k and v themselves stay
    unchanged.

    Everything that varies from step to step is read on the device: nothing synchronises, nothing is allocated,
    and a captured launch may be replayed. Sums and products are float32, rounded once at the end. The values of
    slots and positions are not checked.

    Args:
        k: `[T, num_kv_heads, Dk]`, any strides, except that the last one is 1. `split_qkv` makes it, q and v as
            views of a fused projection.
        v: `[T, num_kv_heads, Dv]`, likewise.
        k_cache: `[num_slots, num_kv_heads, Dk]`, any strides, except that the last one is 1; written in place.
        v_cache: `[num_slots, num_kv_heads, Dv]`, likewise; both may be views of one buffer.
        slots: int32 or int64 `[T]`, distinct, except that slot 0, the padding, may occur any number of times;
            it holds the values of one of its tokens afterwards.
        q: `[T, H, Dk]`, likewise; rotated, with its bias added. None if q needs neither.
        q_out: `[T, H, Dk]` of any floating type, likewise, to write q to; it must not overlap q. If None, q is
            written in place.
        positions: int32 or int64 `[T]`, each token's row of the tables. If None, the tables have a row per
            token.
        cos: `[num_positions, rotary_dim / 2]`, float32 or of k's type, any strides, except that the last one is
            1: the cosine of each position's angle for each pair of dims, times the scaling's attention factor.
            Dims from rotary_dim on are not rotated. None for no rotation.
        sin: likewise.
        interleaved: pair dims 2i and 2i + 1 (GPT-J); otherwise dims i and i + rotary_dim / 2 (NeoX).
        q_bias: `[H, Dk]` of any floating type, any strides, except that the last one is 1; None for no bias.
        k_bias: `[num_kv_heads, Dk]`, likewise.
        v_bias: `[num_kv_heads, Dv]`, likewise.

    Raises:
        ValueError: shapes, strides or dtypes do not fit, or q is given without tables and without a bias.
            Nothing is written then.
    """
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if new.dim() != 3 or cache.dim() != 3 or new.shape[1:] != cache.shape[1:]:
            raise ValueError(
                f"{name} must be [tokens, kv_heads, dim] and its cache [slots, kv_heads, dim], with the same "
                f"heads and dim; got {tuple(new.shape)} and {tuple(cache.shape)}"
            )
        if not (has_unit_stride(new) and has_unit_stride(cache)):
            raise ValueError(f"the last stride of {name} and of its cache must be 1; make it contiguous")
    check_inputs(k, v, slots, q, q_out, positions, cos, sin, q_bias, k_bias, v_bias)
    if q_out is None or q_out is q:
        q, q_out = None, q  # the operator must not have the same tensor as an input and as an output
    _write_kv(
        k,
        v,
        k_cache,
        v_cache,
        slots,
        q,
        q_out,
        positions,
        cos,
        sin,
        interleaved,
        q_bias,
        k_bias,
        v_bias,
    )


def split_qkv(
    qkv: Tensor, num_heads: int, num_kv_heads: int, key_dim: int, value_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a fused projection, or its bias, `[..., H * Dk + num_kv_heads * (Dk + Dv)]`, into views `[..., H,
    Dk]`, `[..., num_kv_heads, Dk]` and `[..., num_kv_heads, Dv]`. A `value_dim` of None means `key_dim`. Raises
    ValueError if the last dim does not fit."""
    value_dim = key_dim if value_dim is None else value_dim
    shapes = ((num_heads, key_dim), (num_kv_heads, key_dim), (num_kv_heads, value_dim))
    ends = list(accumulate((heads * dim for heads, dim in shapes), initial=0))
    if qkv.shape[-1] != ends[-1]:
        raise ValueError(
            f"qkv must have {ends[-1]} dims for {num_heads} heads of {key_dim} and {num_kv_heads} of {key_dim} "
            f"and of {value_dim}, got {tuple(qkv.shape)}"
        )
    q, k, v = (
        qkv[..., begin:end].unflatten(-1, shape)
        for (begin, end), shape in zip(pairwise(ends), shapes, strict=True)
    )
    return q, k, v
