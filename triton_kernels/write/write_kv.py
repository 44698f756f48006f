"""Writes new K/V to a layer's slots in one pass from the projection: adds biases, normalises q and k, applies
rotary positions, quantises where the layer's format does, and scatters by slot. Any frequencies and any scaling
of them are tables of cosines and sines here."""

from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.norms import Norm, norm_reference
from lightkv.triton_kernels.operators import operator
from lightkv.triton_kernels.quantised.kv_format import Elements, KVFormat

from .computed_heads import AS_COMPUTED
from .head_tiles import constants_of
from .inputs import UNCHANGED, Biases, Changes, HeadNorms, Rotation, StoredKV, check_inputs
from .launch import computed_launch, quantised_launch, token_launch
from .load_heads import OVER_ALL, PER_HEAD
from .quantised_heads import QUANTISED
from .records import Angles, NewHeads, NormConstants, Shape, StoredHeads, Tile


@triton.jit
def _write_stored(heads, stored, head, slot, angles, tile, store):
    """Writes head number `head` of each token's K or V to its slot [BLOCK_T, 1]."""
    head = head.to(tl.int64)
    source = heads.data + tile.token[:, None] * heads.stride_token + head * heads.stride_head
    store.write(source, stored, slot, heads, head, angles, tile, False)


@triton.jit
def _write_token(heads, stored, token, slot, rotation, store, IN_PLACE: tl.constexpr):
    """Writes all heads of a token, which are the rows of the program."""
    ROWS: tl.constexpr = triton.next_power_of_2(heads.NORM.HEADS)
    head = tl.arange(0, ROWS).to(tl.int64)
    tile = Tile(token + tl.zeros([ROWS], tl.int64), head < heads.NORM.HEADS)
    head = head[:, None]
    source = heads.data + token * heads.stride_token + head * heads.stride_head
    angles = store.angles(rotation, tile, heads.PAIRS)
    store.write(source, stored, slot + tl.zeros_like(head), heads, head, angles, tile, IN_PLACE)


@triton.jit
def _write_tokens(queries, keys, values, stored_keys, stored_values, rotation, slots, store, shape):
    """Writes all heads of q, or of K and V, of one token."""
    token = (tl.program_id(0) // (shape.KV_PROGRAMS + 1)).to(tl.int64)
    program = tl.program_id(0) % (shape.KV_PROGRAMS + 1)
    slot = tl.load(slots + token).to(tl.int64)
    if program == shape.KV_PROGRAMS:
        _write_token(queries, stored_keys, token, slot, rotation, store, True)
    else:
        if program == 0:
            _write_token(keys, stored_keys, token, slot, rotation, store, False)
        if program == shape.KV_PROGRAMS - 1:
            _write_token(values, stored_values, token, slot, rotation, store, False)


@triton.jit
def _write_heads(
    queries, keys, values, stored_keys, stored_values, rotation, slots, num_tokens, store, shape
):
    """Writes some heads of q, or of K and V, of some tokens."""
    # Heads run fastest, so neighbouring programs write neighbouring heads: those of K and V, and of q.
    program = tl.program_id(0) % (shape.KV_PROGRAMS + shape.Q_PROGRAMS)
    block = tl.program_id(0) // (shape.KV_PROGRAMS + shape.Q_PROGRAMS)
    token = block.to(tl.int64) * shape.BLOCK_T + tl.arange(0, shape.BLOCK_T)  # [BLOCK_T]
    tile = Tile(token, token < num_tokens)
    angles = store.angles(rotation, tile, keys.PAIRS)

    if program < shape.KV_PROGRAMS:
        slot = tl.load(slots + token, mask=tile.valid, other=0).to(tl.int64)[:, None]  # [BLOCK_T, 1]
        if store.APART:
            KV_HEADS: tl.constexpr = shape.KV_PROGRAMS // 2
            if program < KV_HEADS:
                _write_stored(keys, stored_keys, program, slot, angles, tile, store)
            else:
                _write_stored(values, stored_values, program - KV_HEADS, slot, angles, tile, store)
        else:
            for i in tl.static_range(0, shape.HEADS):
                head = (program * shape.HEADS + i).to(tl.int64)
                _write_stored(keys, stored_keys, head, slot, angles, tile, store)
                _write_stored(values, stored_values, head, slot, angles, tile, store)
    elif shape.Q_PROGRAMS > 0:
        for i in tl.static_range(0, shape.HEADS):
            head = ((program - shape.KV_PROGRAMS) * shape.HEADS + i).to(tl.int64)
            place = queries.data + token[:, None] * queries.stride_token + head * queries.stride_head
            store.write(place, stored_keys, place, queries, head, angles, tile, True)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _write_kv_kernel(
    queries,  # NewHeads, written in place
    keys,  # NewHeads
    values,
    stored_keys,  # StoredHeads
    stored_values,
    rotation,  # Angles
    slots,
    num_tokens,
    store,  # Store
    shape,  # Shape
):
    if shape.EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if keys.NORM.WHOLE:
        _write_tokens(queries, keys, values, stored_keys, stored_values, rotation, slots, store, shape)
    else:
        _write_heads(
            queries, keys, values, stored_keys, stored_values, rotation, slots, num_tokens, store, shape
        )


@operator(
    "write_kv",
    writes=("stored", "q"),
    records=(StoredKV, KVFormat, Elements, Changes, Rotation, Biases, HeadNorms, Norm),
)
def _write_kv(k: Tensor, v: Tensor, stored: StoredKV, slots: Tensor, q: Tensor | None, by: Changes) -> None:
    rotation, biases, norms = by
    num_tokens, num_kv_heads, key_dim = k.shape
    if num_tokens == 0:
        return
    value_dim = v.shape[2]
    scales, elements = stored.scales, stored.format.elements
    cos, sin, interleaved = rotation or (None, None, False)
    num_heads, num_pairs = 0 if q is None else q.shape[1], 0 if cos is None else cos.shape[1]
    of_q, of_k, whole = norms or (None, None, False)
    device = tuning.device_class(k.device)
    if whole:
        launch = token_launch(max(num_heads, num_kv_heads) * max(key_dim, value_dim))
        store = AS_COMPUTED if scales is None else QUANTISED
        kv_programs = 2 if store.APART.value else 1
    elif scales is None:
        launch = computed_launch(device, num_tokens, num_kv_heads, num_heads, num_pairs)
        store, kv_programs = AS_COMPUTED, num_kv_heads // launch.heads
    else:
        launch = quantised_launch(max(tuning.padded_dim(key_dim), tuning.padded_dim(value_dim)))
        store, kv_programs = QUANTISED, 2 * num_kv_heads
    q_programs, options = 1 if whole else num_heads // launch.heads, tuning.early_options(k.device)
    early, is_static = options.pop("EARLY"), elements.is_static
    _write_kv_kernel[((kv_programs + q_programs) * triton.cdiv(num_tokens, launch.block_t),)](
        _new_heads(q, biases.q, of_q, whole, (key_dim, num_pairs, interleaved, Elements())),
        _new_heads(k, biases.k, of_k, whole, (key_dim, num_pairs, interleaved, elements)),
        _new_heads(v, biases.v, None, whole, (value_dim, 0, False, elements)),
        _stored_heads(stored.k, scales, is_static, 0),
        _stored_heads(stored.v, scales, is_static, elements.num_scales(key_dim)),
        Angles(cos, sin, *_strides(cos, 1), *_strides(sin, 1)),
        slots,
        num_tokens,
        store,
        _shape(kv_programs, q_programs, launch.heads, launch.block_t, early),
        num_warps=launch.num_warps,
        enable_fp_fusion=False,  # as in torch, a product is rounded before it is added, so the bits are equal
        **options,
    )


def _strides(tensor: Tensor | None, count: int) -> tuple[int | None, ...]:
    return (None,) * count if tensor is None else tensor.stride()[:count]


@cache  # here and below: constants are made once, and not at each launch
def _norm_constants(
    flags: tuple[bool, ...] | None, has_weight: bool, whole: bool, num_heads: int
) -> NormConstants:
    """Returns the constants `NORM` of `NewHeads`. `flags`: the fields of a `Norm` from `centred` on."""
    kind = 0 if flags is None else OVER_ALL if whole else PER_HEAD
    numbers = kind, whole, has_weight, *(flags or (False,) * 3), num_heads if whole else 1
    return NormConstants(*map(tl.constexpr, numbers))


@cache
def _constants(
    has_bias: bool, dim: int, pairs: int, interleaved: bool, elements: Elements
) -> tuple[Any, ...]:
    of_elements = tuple(map(tl.constexpr, constants_of(elements, dim)))
    return *map(tl.constexpr, (has_bias, dim, pairs, interleaved)), of_elements


@cache
def _shape(*numbers: int) -> Shape:
    return Shape(*map(tl.constexpr, numbers))


def _new_heads(
    heads: Tensor | None,
    bias: Tensor | None,
    norm: Norm | None,
    whole: bool,
    constants: tuple[int, int, bool, Elements],
) -> NewHeads:
    """Returns q, k or v, its bias and its norm as the kernel takes them. `whole`: a program writes all heads of
    a token."""
    weight = None if norm is None else norm.weight
    stride_token, stride_head = _strides(heads, 2)
    (stride_bias,) = _strides(bias, 1)
    stride_norm = None if weight is None else 0 if weight.dim() == 1 else weight.stride(0)
    num_heads = heads.shape[1] if whole and heads is not None else 1
    of_norm = _norm_constants(None if norm is None else norm[3:], weight is not None, whole, num_heads)
    return NewHeads(
        heads,
        stride_token,
        stride_head,
        bias,
        stride_bias,
        weight,
        stride_norm,
        None if norm is None else norm.eps,
        *(*_constants(bias is not None, *constants), of_norm),
    )


def _stored_heads(data: Tensor, scales: Tensor | None, is_static: bool, first_scale: int) -> StoredHeads:
    """Returns stored K or V and its scales as the kernel takes them."""
    has_scales = scales is not None
    stride_slot, stride_head = _strides(scales, 2)
    stride_slot = 0 if is_static else stride_slot
    return StoredHeads(
        data,
        data.stride(0),
        data.stride(1),
        scales,
        stride_slot,
        stride_head,
        tl.constexpr(has_scales),
        tl.constexpr(first_scale),
    )


def write_kv(
    k: Tensor, v: Tensor, stored: StoredKV, slots: Tensor, q: Tensor | None = None, by: Changes = UNCHANGED
) -> None:
    """Writes each token's K and V to its slot, as the layer's format stores them, with their scales, after
    the changes `by` of q, k and v. q is written in place; k and v themselves stay unchanged.

    Everything that varies from step to step is read on the device: nothing synchronises, nothing is allocated,
    and a captured launch may be replayed. Sums and products are float32, rounded once at the end; what is
    quantised is not rounded in between. A norm rounds its result, as the module of a model does. Elements and
    scales are those of `quantise`, bit for bit; where a format multiplies heads by a Hadamard matrix, and where
    heads are normalised, sums are in another order, so an element may be off by one.
    The values of slots are not checked.

    Args:
        k: `[T, num_kv_heads, Dk]`, any strides, except that the last one is 1. `split_qkv` makes it, q and v as
            views of a fused projection.
        v: `[T, num_kv_heads, Dv]`, likewise.
        stored: the layer's K and V, and their format; written in place.
        slots: int32 or int64 `[T]`, distinct, except that slot 0, the padding, may occur any number of times:
            its elements and scales need not be of the same token afterwards.
        q: `[T, H, Dk]`, likewise; None if it is not to be changed.
        by: biases, norms and a rotation.

    Raises:
        ValueError: shapes, strides or dtypes do not fit, groups are not a power of 2 of elements, q is given
            and nothing to be done to it, or norms are given without q. Nothing is written then.
    """
    check_inputs(k, v, stored, slots, q, by)
    if stored.format.is_static and stored.scales is not None:
        # All slots share one row of scales, and an operator must not write to a tensor that overlaps itself.
        stored = stored._replace(scales=stored.scales[:1])
    _write_kv(k, v, stored, slots, q, by)


def write_kv_reference(
    k: Tensor, v: Tensor, stored: StoredKV, slots: Tensor, q: Tensor | None = None, by: Changes = UNCHANGED
) -> None:
    """Computes `write_kv` in plain torch."""
    check_inputs(k, v, stored, slots, q, by)
    rotation, biases, norms = by

    def prepared(x: Tensor, bias: Tensor | None, norm: Norm | None, by: Rotation | None) -> Tensor:
        dtype = x.dtype
        x = x if bias is None else x.float() + bias.float()
        x = x if norms is None or norm is None else norm_reference(x, norm, dtype, norms.dims)
        return x if by is None else rotate_reference(x, by)

    of_q, of_k, _ = norms or (None, None, False)
    if q is not None:
        q.copy_(prepared(q, biases.q, of_q, rotation))
    stored.write(slots.long(), prepared(k, biases.k, of_k, rotation), prepared(v, biases.v, None, None))


def rotate_reference(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the first 2n dims of `x` `[T, H, D]` by the angles of tables `[T, n]`, or of `[1, n]` for all
    tokens; returns float32, or float64 where x is."""
    rotated = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    rotate_in_place(rotated, rotation)
    return rotated


def rotate_in_place(x: Tensor, rotation: Rotation) -> None:
    """Does what `rotate_reference` does to x itself, which is float32 or float64."""
    cos, sin = (table.to(x.dtype)[:, None] for table in rotation[:2])  # [T, 1, n]
    rotary = x[..., : 2 * cos.shape[2]]
    first, second = (rotary[..., ::2], rotary[..., 1::2]) if rotation.interleaved else rotary.chunk(2, dim=2)
    from_second, from_first = second * sin, first * sin
    first.mul_(cos).sub_(from_second)
    second.mul_(cos).add_(from_first)


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
