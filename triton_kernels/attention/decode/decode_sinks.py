"""What decode does for the sinks of a ring: its queries attend to them from the positions that they would have
if the dropped tokens had never been there.

Keys of sinks stay as they were computed. A query is rotated back by the number of tokens that were dropped, and
attends to the sinks before it attends, unrotated, to the window: both are parts of one softmax.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.attend_keys import attend_keys, find_slots, query_for, sum_query
from lightkv.triton_kernels.attention.attention_reference import attend_reference, slots_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.records import Shape, Sums
from lightkv.triton_kernels.attention.variants.variant import Scored
from lightkv.triton_kernels.quantised.unpack import fields_of, k_kind, tuple_of, word_block, words_of

_SINK_TILE = tl.constexpr(16)  # keys; the fewest that a dot product takes


class SinkRotation(NamedTuple):
    """By which angles each request's query is rotated back for the sinks.

    `cos`, `sin`: float32 `[B, n]`, contiguous, of the angles of n pairs, dims i and i + n of a head (NeoX's
    layout); dims from 2n on are not rotated.
    """

    cos: Tensor
    sin: Tensor


class RingSinks(NamedTuple):
    """The sinks of rows that are rings: the rotation `SinkRotation` of each request's query, which is as it is
    where `cos` is None. `ARE_SEEN`: whether there are any for the layer. `PAIRS`: of dims that are rotated."""

    cos: Any
    sin: Any
    ARE_SEEN: Any
    PAIRS: Any


@triton.jit
def _load_rotated_back(
    heads, dims, in_head, cos, sin, in_tile, PAIRS: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr
):
    """Loads some dims of the query heads that the pointers `heads`, [BLOCK_M, 1], begin at, rotated back by the
    angles of `cos` and `sin`; as they are where they are None."""
    valid = in_tile[:, None] & in_head[None, :]
    tile = tl.load(heads + dims[None, :], mask=valid, other=0.0)
    if cos is not None:
        is_paired = dims < 2 * PAIRS
        is_first = dims < PAIRS
        pair = tl.where(is_first, dims, dims - PAIRS)
        partner = tl.where(is_first, dims + PAIRS, pair)
        partners = tl.load(heads + partner[None, :], mask=valid & is_paired[None, :], other=0.0)
        cosines = tl.load(cos + pair, mask=is_paired, other=1.0)
        sines = tl.load(sin + pair, mask=is_paired, other=0.0)
        sines = tl.where(is_first, sines, -sines)
        rotated = tile.to(tl.float32) * cosines[None, :] + partners.to(tl.float32) * sines[None, :]
        tile = rotated.to(tile.dtype)
    return query_for(tile, KIND, PACKED)


@triton.jit
def _load_query_rotated_back(heads, cos, sin, in_tile, PAIRS: tl.constexpr, shape):
    """Loads what `load_query` loads, rotated back."""
    FORMAT: tl.constexpr = shape.FORMAT
    PACKED: tl.constexpr = shape.PACKED
    KIND: tl.constexpr = k_kind(FORMAT)
    FIELDS: tl.constexpr = fields_of(KIND)
    words = tl.arange(0, word_block(shape.BLOCK_DK, KIND))
    in_head = words < words_of(shape.DK, KIND)
    dims = FIELDS * words
    return tuple_of(
        _load_rotated_back(heads, dims, in_head, cos, sin, in_tile, PAIRS, KIND, PACKED),
        _load_rotated_back(heads, dims + 1, in_head, cos, sin, in_tile, PAIRS, KIND, PACKED)
        if FIELDS >= 2
        else None,
        _load_rotated_back(heads, dims + 2, in_head, cos, sin, in_tile, PAIRS, KIND, PACKED)
        if FIELDS == 4
        else None,
        _load_rotated_back(heads, dims + 3, in_head, cos, sin, in_tile, PAIRS, KIND, PACKED)
        if FIELDS == 4
        else None,
    )


@triton.jit
def attend_sinks(
    heads,  # [BLOCK_M, 1] pointers to the query's heads
    in_tile,  # [BLOCK_M]
    request,
    sums,  # `Sums`
    cache,  # `Cache`
    kv_head,
    index,  # `Index`
    row,
    num_sinks,  # that the query sees here; with 0 nothing is done
    sinks,  # `RingSinks`
    variants,
    states,
    score_scale,
    shape,
):
    """Attends from one request's query, rotated back, to its first `num_sinks` keys. Returns `Sums`."""
    TILE: tl.constexpr = _SINK_TILE
    here = in_tile & (num_sinks > 0)
    cos = sinks.cos
    sin = sinks.sin
    if cos is not None:
        cos += request * sinks.PAIRS
        sin += request * sinks.PAIRS
    q = _load_query_rotated_back(heads, cos, sin, here, sinks.PAIRS, shape)
    positions = tl.arange(0, TILE)
    slots = find_slots(index, row, positions, positions < num_sinks)
    newest = tl.zeros_like(sums.total).to(tl.int32) + (num_sinks - 1)  # every sink is visible
    found = attend_keys(
        q,
        sum_query(q, shape.FORMAT, shape.PACKED),
        Sums(sums.acc, sums.total, sums.peak, slots),
        cache,
        kv_head,
        index,
        row,
        newest,
        variants,
        states,
        0,
        num_sinks,
        num_sinks,
        score_scale,
        # Assigned to a variable, its constants would be none.
        Shape(
            shape.GROUP,
            shape.DK,
            shape.DV,
            shape.BLOCK_M,
            shape.BLOCK_DK,
            shape.BLOCK_DV,
            TILE,
            shape.CAUSAL,
            shape.FORMAT,
            shape.PACKED,
        ),
        True,
    )
    return Sums(found.acc, found.total, found.peak, sums.slots)


def check_rotation(rotation: SinkRotation, num_tokens: int, key_dim: int) -> None:
    """Raises ValueError unless these are angles for `num_tokens` queries of `key_dim` dims."""
    for angles in rotation:
        if angles.dtype != torch.float32 or not angles.is_contiguous() or angles.shape != rotation.cos.shape:
            raise ValueError(
                f"cos and sin of a rotation must be contiguous float32 of one shape, got {angles.dtype} "
                f"{tuple(angles.shape)}"
            )
    if rotation.cos.dim() != 2 or len(rotation.cos) != num_tokens or 2 * rotation.cos.shape[1] > key_dim:
        raise ValueError(
            f"a rotation must be [{num_tokens}, n], with n at most {key_dim // 2}; got "
            f"{tuple(rotation.cos.shape)}"
        )


def attend_ring_reference(
    q: Tensor,
    kv: PagedKV,
    row: int,
    length: int,
    angles: tuple[Tensor, Tensor] | None,
    options: AttentionOptions,
) -> Tensor:
    """Computes what the newest token of a row that is a ring attends to, in float64: q `[1, H, Dk]` ->
    `[1, H, Dv]`. `angles`: cos and sin of this query's rotation, `[n]` each."""
    assert kv.ring is not None
    sinks = torch.arange(min(kv.ring.sinks, length), device=q.device)
    window = torch.arange(min(kv.ring.first_key(length - 1), length), length, device=q.device)
    slots = slots_reference(kv, row, torch.cat((sinks, window)))
    k, v = kv.read(slots)
    k = k.double()
    if angles is not None:  # q rotated back sees a key as q sees the key rotated forward
        cos, sin = (part.double() for part in angles)
        num_pairs = len(cos)
        first, second = (
            k[: len(sinks), :, :num_pairs].clone(),
            k[: len(sinks), :, num_pairs : 2 * num_pairs].clone(),
        )
        k[: len(sinks), :, :num_pairs] = first * cos - second * sin
        k[: len(sinks), :, num_pairs : 2 * num_pairs] = second * cos + first * sin
    return attend_reference(q, k, v, options, Scored.of_last(slice(0, 1), 0, len(slots), q.device))
