"""The sinks of a ring: decode's queries attend to them from the positions that they would have if the dropped
tokens had never been there.

Keys of sinks stay as they were computed. A query is rotated back by the number of tokens that were dropped, and
attends to the sinks before it attends, unrotated, to the window: both are parts of one softmax.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.attend_keys import attend_keys, find_slots, query_for, sum_query
from lightkv.triton_kernels.attention.records import Shape, Sums
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.layout.ring import Ring
from lightkv.triton_kernels.quantised.unpack import fields_of, kind_of, word_block, words_of

_SINK_TILE = tl.constexpr(16)  # keys; the fewest that a dot product takes


class SinkRotation(NamedTuple):
    """By which angles each request's query is rotated back for the sinks.

    `cos`, `sin`: float32 `[B, n]`, contiguous, of the angles of n pairs, dims i and i + n of a head (NeoX's
    layout); dims from 2n on are not rotated.
    """

    cos: Tensor
    sin: Tensor


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
    KIND: tl.constexpr = kind_of(FORMAT)
    FIELDS: tl.constexpr = fields_of(KIND)
    words = tl.arange(0, word_block(shape.BLOCK_DK, KIND))
    in_head = words < words_of(shape.DK, KIND)
    tiles = ()  # type: tuple
    for field in tl.static_range(FIELDS):
        dims = FIELDS * words + field
        tiles += (_load_rotated_back(heads, dims, in_head, cos, sin, in_tile, PAIRS, KIND, PACKED),)
    return tiles


@triton.jit
def attend_sinks(
    query,  # `KeptQuery`
    sums,  # `Sums`
    cache,  # `Cache`
    index,  # `Index`, whose data are those of `RingRows`
    row,
    variants,
    states,
    score_scale,
    shape,
):
    """Attends from one request's query, rotated back, to the sinks; in the request's first part alone. Returns
    `Sums`."""
    TILE: tl.constexpr = _SINK_TILE
    PAIRS: tl.constexpr = index.data.PAIRS
    count = tl.where(query.is_first, tl.minimum(tl.load(query.lengths + query.request), index.data.SEEN), 0)
    here = query.in_tile & (count > 0)
    cos = index.kept[0]
    sin = index.kept[1]
    if cos is not None:
        cos += query.request * PAIRS
        sin += query.request * PAIRS
    q = _load_query_rotated_back(query.heads, cos, sin, here, PAIRS, shape)
    positions = tl.arange(0, TILE)
    slots = find_slots(index, row, positions, positions < count)
    newest = tl.zeros_like(sums.total).to(tl.int32) + (count - 1)  # every sink is visible
    found = attend_keys(
        q,
        sum_query(q, shape.FORMAT, shape.PACKED),
        Sums(sums.acc, sums.total, sums.peak, slots),
        cache,
        query.kv_head,
        index,
        row,
        newest,
        variants,
        states,
        0,
        count,
        count,
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


_ANGLES = Tensors(cos="contiguous float32 [T, n]", sin="contiguous float32 [T, n]")


def check_rotation(rotation: SinkRotation, num_tokens: int, key_dim: int) -> None:
    """Raises ValueError unless these are angles for `num_tokens` queries of `key_dim` dims."""
    _ANGLES.check({"T": num_tokens}, **rotation._asdict())
    if 2 * rotation.cos.shape[1] > key_dim:
        raise ValueError(f"a rotation of {rotation.cos.shape[1]} pairs; a key has {key_dim // 2}")


def turn_forward(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns keys `[L, num_kv_heads, Dk]` rotated by the angles of pairs, `[n]`: a query that is rotated back
    sees a key as the query itself sees the key rotated forward."""
    num_pairs = len(cos)
    first, second, rest = k[..., :num_pairs], k[..., num_pairs : 2 * num_pairs], k[..., 2 * num_pairs :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def _rotation_kernel(
    lengths,
    inverse,  # [PAIRS] float64, radians a position
    cos,  # [B, PAIRS] float32
    sin,
    CAPACITY: tl.constexpr,
    STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    pairs = tl.arange(0, BLOCK)
    beyond = tl.load(lengths + request) - 1 - CAPACITY
    dropped = tl.where(beyond < 0, 0, (beyond // STRIDE + 1) * STRIDE)
    # float32 would leave the angles of far positions no fraction.
    angles = dropped.to(tl.float64) * tl.load(inverse + pairs, mask=pairs < PAIRS, other=0.0)
    tl.store(cos + request * PAIRS + pairs, tl.cos(angles).to(tl.float32), mask=pairs < PAIRS)
    tl.store(sin + request * PAIRS + pairs, tl.sin(angles).to(tl.float32), mask=pairs < PAIRS)


def rotation_for(lengths: Tensor, ring: Ring, inverse: Tensor) -> SinkRotation:
    """Returns the angles by which the newest token of each ring is rotated back for the sinks, in one launch.

    `lengths`: int32 `[B]`, tokens so far, the newest included. `inverse`: float64 `[n]`, contiguous, radians
    per position of each pair.
    """
    num_requests, num_pairs = len(lengths), len(inverse)
    cos, sin = (torch.empty(num_requests, num_pairs, device=lengths.device) for _ in range(2))
    if num_requests:
        _rotation_kernel[(num_requests,)](
            lengths,
            inverse,
            cos,
            sin,
            CAPACITY=ring.capacity,
            STRIDE=ring.stride,
            PAIRS=num_pairs,
            BLOCK=triton.next_power_of_2(num_pairs),
            num_warps=1,
        )
    return SinkRotation(cos, sin)


def rotation_reference(lengths: Tensor, ring: Ring, inverse: Tensor) -> SinkRotation:
    """Computes `rotation_for` in plain torch."""
    angles = dropped_tokens(lengths, ring).double()[:, None] * inverse
    return SinkRotation(angles.cos().float(), angles.sin().float())


def dropped_tokens(lengths: Tensor, ring: Ring) -> Tensor:
    """Returns what `Ring.dropped` says of the newest token of each ring of so many tokens, int64 `[B]`."""
    beyond = lengths.long() - 1 - ring.capacity
    return torch.where(beyond < 0, 0, (beyond // ring.stride + 1) * ring.stride)
