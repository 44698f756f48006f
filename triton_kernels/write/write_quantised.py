"""Writes new K/V to a quantised cache in one pass from the projection: adds biases, applies rotary positions,
finds the scales, and scatters elements and scales by slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layout.strides import has_unit_stride
from lightkv.triton_kernels.quantised.kv_format import Elements, KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import quantise, split_columns

from .head_tiles import constants_of, write_elements
from .write_inputs import check_inputs
from .write_kv_reference import rotate_reference


@triton.jit
def _load_dims(source, bias, dims, in_head, valid):
    """Loads `dims` of a head of each token, float32 [BLOCK_T, dims], with the bias added, if there is one."""
    tile = tl.load(source + dims[None, :], mask=valid[:, None] & in_head[None, :], other=0.0).to(tl.float32)
    if bias is not None:
        tile += tl.load(bias + dims, mask=in_head, other=0.0).to(tl.float32)[None, :]
    return tile


@triton.jit
def _load_head(
    source,  # [BLOCK_T, 1] pointers to the head of each token
    bias,  # the head's, or None
    cos,  # [BLOCK_T, 1] pointers to the row of each token
    sin,
    valid,  # [BLOCK_T]
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Loads a head of each token, float32 [BLOCK_T, BLOCK_D]; adds the bias, and rotates the first 2 * PAIRS
    dims. A dim and its partner are both loaded by index, so that no tile has to be cut."""
    dims = tl.arange(0, BLOCK_D)
    tile = _load_dims(source, bias, dims, dims < D, valid)
    if PAIRS > 0:
        is_paired = dims < 2 * PAIRS
        if INTERLEAVED:
            is_first = dims % 2 == 0
            partner, pair = dims ^ 1, dims // 2
        else:
            is_first = dims < PAIRS
            pair = tl.where(is_first, dims, dims - PAIRS)
            partner = tl.where(is_first, dims + PAIRS, pair)
        partners = _load_dims(source, bias, partner, is_paired, valid)
        is_loaded = valid[:, None] & is_paired[None, :]
        cosines = tl.load(cos + pair[None, :], mask=is_loaded, other=0.0).to(tl.float32)
        sines = tl.load(sin + pair[None, :], mask=is_loaded, other=0.0).to(tl.float32)
        rotated = tile * cosines + partners * tl.where(is_first[None, :], -sines, sines)
        tile = tl.where(is_paired[None, :], rotated, tile)
    return tile


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots", "positions"])
def _write_quantised_kernel(
    q,  # None: q_out is rotated in place
    k,
    v,
    q_bias,  # each [heads, D], or None
    k_bias,
    v_bias,
    q_out,  # None: there is no q
    k_cache,
    v_cache,
    scales,
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
    stride_scales_slot,
    stride_scales_h,
    stride_cos,
    stride_sin,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K_ELEMENTS: tl.constexpr,
    V_ELEMENTS: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Heads run fastest, so neighbouring programs write neighbouring heads: those of K, of V, and of q.
    program = tl.program_id(0) % (2 * KV_HEADS + HEADS)
    block = tl.program_id(0) // (2 * KV_HEADS + HEADS)
    token = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    valid = token < num_tokens
    if PAIRS > 0:
        row = token if positions is None else tl.load(positions + token, mask=valid, other=0).to(tl.int64)
        cos += row[:, None] * stride_cos
        sin += row[:, None] * stride_sin

    if program < 2 * KV_HEADS:
        slot = tl.load(slots + token, mask=valid, other=0).to(tl.int64)[:, None]  # [BLOCK_T, 1]
        if program < KV_HEADS:
            head = program.to(tl.int64)
            k_tile = _load_head(
                k + token[:, None] * stride_k_t + head * stride_k_h,
                k_bias + head * stride_k_bias if k_bias is not None else None,
                cos,
                sin,
                valid,
                DK,
                BLOCK_DK,
                PAIRS,
                INTERLEAVED,
            )
            write_elements(
                k_tile,
                k_cache + slot * stride_kc_slot + head * stride_kc_h,
                scales + slot * stride_scales_slot + head * stride_scales_h,
                valid,
                K_ELEMENTS,
                DK,
                BLOCK_DK,
                BLOCK_T,
            )
        else:
            head = (program - KV_HEADS).to(tl.int64)
            v_tile = _load_head(
                v + token[:, None] * stride_v_t + head * stride_v_h,
                v_bias + head * stride_v_bias if v_bias is not None else None,
                cos,
                sin,
                valid,
                DV,
                BLOCK_DV,
                0,
                INTERLEAVED,
            )
            write_elements(
                v_tile,
                v_cache + slot * stride_vc_slot + head * stride_vc_h,
                scales + slot * stride_scales_slot + head * stride_scales_h + K_COLUMNS,
                valid,
                V_ELEMENTS,
                DV,
                BLOCK_DV,
                BLOCK_T,
            )
    elif HEADS > 0:
        head = (program - 2 * KV_HEADS).to(tl.int64)
        target = q_out + token[:, None] * stride_out_t + head * stride_out_h
        tile = _load_head(
            target if q is None else q + token[:, None] * stride_q_t + head * stride_q_h,
            q_bias + head * stride_q_bias if q_bias is not None else None,
            cos,
            sin,
            valid,
            DK,
            BLOCK_DK,
            PAIRS,
            INTERLEAVED,
        )
        if q is None:
            tl.debug_barrier()  # other threads read the elements that a thread writes
        dims = tl.arange(0, BLOCK_DK)
        in_head = valid[:, None] & (dims < DK)[None, :]
        tl.store(target + dims[None, :], tile.to(q_out.dtype.element_ty), mask=in_head)


# No defaults, as in `write_kv`. `elements`: the fields of K's and then of V's Elements.
@torch.library.custom_op(
    "lightkv::write_quantised_kv", mutates_args=("k_cache", "v_cache", "scales", "q_out")
)
def _write_quantised_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: Tensor,
    elements: list[int],
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
    of_k, of_v = (
        _elements_of(fields) for fields in (elements[: len(elements) // 2], elements[len(elements) // 2 :])
    )
    num_heads = 0 if q_out is None else q_out.shape[1]
    device = tuning.device_class(k.device)
    block_dk, block_dv = tuning.padded_dim(key_dim), tuning.padded_dim(value_dim)
    launch = tuning.quantised_write_launch(max(block_dk, block_dv))
    early = tuning.has_early_launch(device)
    options = {"launch_pdl": True} if early else {}
    grid = ((2 * num_kv_heads + num_heads) * triton.cdiv(num_tokens, launch.block_m),)
    _write_quantised_kernel[grid](
        q,
        k,
        v,
        q_bias,
        k_bias,
        v_bias,
        q_out,
        k_cache,
        v_cache,
        scales,
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
        0 if of_k.is_static or of_v.is_static else scales.stride(0),
        scales.stride(1),
        *_strides(cos, 1),
        *_strides(sin, 1),
        KV_HEADS=num_kv_heads,
        HEADS=num_heads,
        DK=key_dim,
        DV=value_dim,
        K_ELEMENTS=constants_of(of_k, key_dim),
        V_ELEMENTS=constants_of(of_v, value_dim),
        K_COLUMNS=of_k.columns(key_dim),
        PAIRS=0 if cos is None else cos.shape[1],
        INTERLEAVED=interleaved,
        BLOCK_T=launch.block_m,
        BLOCK_DK=block_dk,
        BLOCK_DV=block_dv,
        EARLY=early,
        num_warps=launch.num_warps,
        enable_fp_fusion=False,  # as in torch, a product is rounded before it is added, so the bits are equal
        **options,
    )


_write_quantised_kv.register_fake(lambda *_, **__: None)  # the outputs are arguments


def _elements_of(fields: list[int]) -> Elements:
    bits, is_float, group, has_middle, is_static, is_rotated = fields
    return Elements(bits, bool(is_float), group, bool(has_middle), bool(is_static), bool(is_rotated))


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()[:count]


def write_quantised_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: Tensor,
    layer_format: KVFormat,
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
    """Writes each token's K and V to its slot as `layer_format` stores them, with their scales. Biases are
    added to q, k and v before, and q and k are rotated by their positions, where these are given, as in
    `write_kv`; what is quantised then is not rounded in between. k and v themselves stay unchanged.

    Everything that varies from step to step is read on the device: nothing synchronises, and a captured launch
    may be replayed. The values of slots and positions are not checked. Elements and scales are those of
    `quantise`, bit for bit; where a format rotates heads, sums are in another order, so an element may be off
    by one.

    Args:
        k: `[T, num_kv_heads, Dk]`, any strides, except that the last one is 1.
        v: `[T, num_kv_heads, Dv]`, likewise.
        k_cache: `[num_slots, num_kv_heads, Dk]` of the stored type (`KVPool.k`), with half the dims where two
            elements share a byte; any strides, except that the last one is 1. Written in place.
        v_cache: `[num_slots, num_kv_heads, Dv]`, likewise; both may be views of one buffer.
        scales: `[num_slots, num_kv_heads, columns]` of `layer_format.scale_dtype`, the last stride 1
            (`KVPool.scales`): K's scales and middles, then V's. Written in place; static ones, whose stride of
            slots is 0, are read.
        layer_format: how K and V are stored; at least one of them is quantised.
        slots: int32 or int64 `[T]`, distinct, except that slot 0, the padding, may occur any number of times;
            its elements and scales need not be of the same token afterwards.
        q, q_out, positions, cos, sin, interleaved, q_bias, k_bias, v_bias: as in `write_kv`.

    Raises:
        ValueError: shapes, strides or dtypes do not fit, groups are not a power of 2 of elements, or q is given
            without tables and without a bias. Nothing is written then.
    """
    _check_caches(k, v, k_cache, v_cache, scales, layer_format)
    check_inputs(k, v, slots, q, q_out, positions, cos, sin, q_bias, k_bias, v_bias)
    if q_out is None or q_out is q:
        q, q_out = None, q  # the operator must not have the same tensor as an input and as an output
    if layer_format.is_static:
        scales = scales[:1]  # the operator must not write to a tensor that overlaps itself
    _write_quantised_kv(
        k,
        v,
        k_cache,
        v_cache,
        scales,
        [int(field) for elements in (layer_format.k, layer_format.v) for field in elements],
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


def _check_caches(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scales: Tensor, layer_format: KVFormat
) -> None:
    """Raises ValueError where k, v and the caches do not fit each other or the format."""
    both = (("k", k, k_cache, layer_format.k), ("v", v, v_cache, layer_format.v))
    for name, new, cache, elements in both:
        if new.dim() != 3:
            raise ValueError(f"{name} must be [tokens, kv_heads, dim], got {tuple(new.shape)}")
        constants_of(elements, new.shape[2])
        width = new.shape[2] // 2 if elements.bits == 4 else new.shape[2]
        if cache.dim() != 3 or cache.shape[1:] != (new.shape[1], width):
            raise ValueError(
                f"the cache of {name} {tuple(new.shape)} must be [slots, kv_heads, dim], with {new.shape[1]} "
                f"heads and a last dim of {width}; got {tuple(cache.shape)}"
            )
        fits = cache.dtype == elements.stored if elements.is_quantised else cache.is_floating_point()
        if not fits:
            wanted = elements.stored if elements.is_quantised else "of a floating type"
            raise ValueError(f"the cache of {name} must be {wanted} in this format, got {cache.dtype}")
        if not (has_unit_stride(new) and has_unit_stride(cache)):
            raise ValueError(f"the last stride of {name} and of its cache must be 1; make it contiguous")
    if not layer_format.is_quantised:
        raise ValueError("neither K nor V is quantised in this format; write it by write_kv")
    if layer_format.is_static and any(e.is_quantised and not e.is_static for e in layer_format[:2]):
        raise ValueError("static scales of K or V alone; either both are static or none")
    columns = layer_format.columns(k.shape[2], v.shape[2])
    if (
        scales.shape != (len(k_cache), k.shape[1], columns)
        or len(v_cache) != len(k_cache)
        or scales.dtype != layer_format.scale_dtype
        or not has_unit_stride(scales)
    ):
        raise ValueError(
            f"scales must be {layer_format.scale_dtype} [slots, kv_heads, columns] "
            f"{(len(k_cache), k.shape[1], columns)} with a last stride of 1, and the caches of as many slots; "
            f"got {scales.dtype} {tuple(scales.shape)} with strides {scales.stride()}"
        )


def write_quantised_kv_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: Tensor,
    layer_format: KVFormat,
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
    """Computes `write_quantised_kv` in plain torch."""

    def prepared(x: Tensor, bias: Tensor | None, rotated: bool) -> Tensor:
        if bias is not None:
            x = x.float() + bias.float()
        if rotated and cos is not None and sin is not None:
            tables = (cos, sin) if positions is None else (cos[positions.long()], sin[positions.long()])
            x = rotate_reference(x, *tables, interleaved)
        return x

    if q is not None:
        (q if q_out is None else q_out).copy_(prepared(q, q_bias, True))
    parts = split_columns(scales, layer_format, k.shape[2])
    heads = (prepared(k, k_bias, True), prepared(v, v_bias, False))
    slots = slots.long()
    for x, cache, columns, elements in zip(heads, (k_cache, v_cache), parts, layer_format[:2], strict=True):
        if not elements.is_quantised:
            cache[slots] = x.to(cache.dtype)
            continue
        x, found = quantise(x, elements, scales.dtype, columns[0] if elements.is_static else None)
        cache.view(torch.uint8)[slots] = x.view(torch.uint8)
        if not elements.is_static:
            columns[slots] = found
