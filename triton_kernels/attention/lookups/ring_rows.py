"""Rows that are rings (`layout/ring.py`): a new token has the entry of the oldest one.

Decode's queries attend to the sinks of a ring from the positions that they would have if the dropped tokens
had never been there. Keys of sinks stay as they were computed. A query is rotated back by the number of tokens
that were dropped, and attends to the sinks before it attends, unrotated, to the window: both are parts of one
softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.attend_keys import attend_keys, find_slots, query_for, sum_query
from lightkv.triton_kernels.attention.records import Shape, Sums
from lightkv.triton_kernels.attention.variants.hooks import Flags, Hooks
from lightkv.triton_kernels.attention.variants.variant import Variant, limits
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.layout.ring import Ring
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from lightkv.triton_kernels.quantised.unpack import fields_of, kind_of, word_block, words_of
from lightkv.triton_kernels.write.inputs import Rotation
from lightkv.triton_kernels.write.write_kv import rotate_reference

from .lookup import Lookup, LookupHooks

_SINK_TILE = tl.constexpr(16)  # keys; the fewest that a dot product takes
_ANGLES = Tensors(cos="contiguous float32 [T, n]", sin="contiguous float32 [T, n]")


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
def _attend_sinks(
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
        0,
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
        1,
    )
    return Sums(found.acc, found.total, found.peak, sums.slots)


class _Data(NamedTuple):
    """`PAIRS`: of dims that the rotation turns. `SEEN`: the sinks that the layer sees, all or none."""

    SINKS: Any
    SIZE: Any
    SEEN: Any
    PAIRS: Any


@triton.jit
def _entries_of(positions, SINKS: tl.constexpr, SIZE: tl.constexpr):
    within = SINKS + (positions - SINKS) % SIZE
    return tl.where(positions < SINKS, positions, within)


@triton.jit
def _place(index, row, positions, valid):
    return index.entries + row * index.stride, _entries_of(positions, index.data.SINKS, index.data.SIZE)


@triton.jit
def _attend_kept(query, sums, cache, index, row, variants, states, score_scale, shape):
    if index.data.SEEN > 0:
        sums = _attend_sinks(query, sums, cache, index, row, variants, states, score_scale, shape)
    return sums


class _HeldData(NamedTuple):
    SINKS: Any
    SIZE: Any
    STRIDE: Any


@triton.jit
def _first_held(data, first, positions):
    beyond = positions - (data.SINKS + data.SIZE)
    return data.SINKS + tl.where(beyond < 0, 0, (beyond // data.STRIDE + 1) * data.STRIDE)


@dataclass(frozen=True)
class HeldTokens(Variant):
    """What a plan of decode has to know of a ring: a query sees the tokens that are held, from
    `Ring.first_key` on. The ring's numbers; only plans of one query for each request apply it."""

    sinks: int
    size: int
    stride: int

    hooks = Hooks(first_key=tl.constexpr(_first_held))
    flags = Flags(has_first_key=True, is_short=True)
    is_for_one_query = True

    def data(self, scale: float) -> _HeldData:
        return _HeldData(tl.constexpr(self.sinks), tl.constexpr(self.size), tl.constexpr(self.stride))

    def first_key(self, position: int) -> int:
        return Ring(self.sinks, self.size, self.stride).first_key(position)


@dataclass(frozen=True, eq=False)
class RingRows(Lookup):
    """Rows of a token table that are rings.

    `rotation`: the angles by which each request's query is rotated back for the sinks; None for sinks that are
    attended to as all other keys. `is_limited`: whether the layer has limits of its own, and so sees no sinks.
    """

    ring: Ring
    rotation: SinkRotation | None = None
    is_limited: bool = False

    hooks = LookupHooks(place=tl.constexpr(_place), attend_kept=tl.constexpr(_attend_kept))

    def rotated(self, lengths: Tensor, inverse: Tensor) -> "RingRows":
        return replace(self, rotation=rotation_for(lengths, self.ring, inverse)) if self.ring.sinks else self

    def check(self, index: Tensor, variants: Sequence[Variant]) -> None:
        check_held(self.ring, variants)

    def check_decode(self, q: Tensor, variants: Sequence[Variant], stored: KVFormat) -> None:
        is_limited, ring = bool(limits(variants)), self.ring
        if self.rotation is not None:
            pairs = _ANGLES.check({"T": len(q)}, **self.rotation._asdict())["n"]
            if 2 * pairs > q.shape[2]:
                raise ValueError(f"a rotation of {pairs} pairs; a key has {q.shape[2] // 2}")
            if is_limited or not ring.sinks:
                raise ValueError("a rotation for sinks, but the layer sees no ring's sinks; pass none")
            if stored.elements.has_hadamard:
                raise ValueError(
                    f"sinks of {ring} over keys that were multiplied by a Hadamard matrix, for which a query "
                    "cannot be rotated: store K/V as int8 or int8-gN, or have a ring without sinks"
                )
        if is_limited:
            return
        for one in variants:
            flags = one.flags
            if flags.has_load or flags.hides_own or (ring.sinks and flags.reads_positions):
                raise ValueError(
                    f"{ring} with {type(one).__name__}, which counts true positions; leave one of them out"
                )

    def check_prefill(self, variants: Sequence[Variant], causal: bool) -> None:
        masked = any(one.flags.has_load or one.flags.hides_own for one in variants)
        if not limits(variants) or not causal or masked:
            raise ValueError(
                f"prefill over rows that are rings, {self.ring}, is for a causal layer with a window, which "
                "says what each query sees, and without a mask; add a Window"
            )

    def limits(self, limits: tuple[Variant, ...]) -> tuple[Variant, ...]:
        return limits or (HeldTokens(self.ring.sinks, self.ring.size, self.ring.stride),)

    def of_layer(self, limits: tuple[Variant, ...]) -> "RingRows":
        return replace(self, is_limited=True) if limits else self

    def data(self) -> _Data:
        numbers = (
            self.ring.sinks,
            self.ring.size,
            0 if self.is_limited else self.ring.sinks,
            0 if self.rotation is None else self.rotation.cos.shape[1],
        )
        return _Data(*map(tl.constexpr, numbers))

    def kept(self) -> SinkRotation | tuple[None, None]:
        return self.rotation or (None, None)

    def slots_reference(self, index: Tensor, rows: int | Tensor, positions: Tensor) -> Tensor:
        return index[rows, self.ring.entries(positions)].long()

    def keys_reference(self, length: int, device: torch.device) -> Tensor:
        if self.is_limited:
            return torch.arange(length, device=device)
        sinks = torch.arange(min(self.ring.sinks, length), device=device)
        held = torch.arange(min(self.ring.first_key(length - 1), length), length, device=device)
        return torch.cat((sinks, held))

    def rotate_reference(self, k: Tensor, request: int) -> Tensor:
        if self.rotation is None:
            return k
        sinks = min(self.ring.sinks, len(k))
        # A query that is rotated back sees a key as the query itself sees the key rotated forward.
        cos, sin = (part[request : request + 1] for part in self.rotation)
        return torch.cat((rotate_reference(k[:sinks].double(), Rotation(cos, sin)), k[sinks:].double()))


def check_held(ring: Ring, variants: Sequence[Variant], num_held: int | None = None) -> None:
    """Raises ValueError for a layer that sees more than `num_held` tokens of the ring, by default its size."""
    held = ring.size if num_held is None else num_held
    for one in limits(variants):
        most = one.most_keys()
        if not one.flags.is_short or most is None or most > held:
            raise ValueError(
                f"a layer with {one} over {held} tokens of {ring}: make the ring as large as the window, and "
                "have no chunks"
            )


@triton.jit(do_not_specialize_on_alignment=["index", "rows", "positions", "slots"])
def _slots_kernel(
    index,
    rows,
    positions,
    slots,
    stride_index,
    num_tokens,
    SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = token < num_tokens
    row = tl.load(rows + token, mask=valid, other=0).to(tl.int64)
    entry = _entries_of(tl.load(positions + token, mask=valid, other=0), SINKS, SIZE)
    slot = tl.load(index + row * stride_index + entry, mask=valid, other=0)
    tl.store(slots + token, slot.to(slots.dtype.element_ty), mask=valid)


def ring_slots(index: Tensor, rows: Tensor, positions: Tensor, ring: Ring, slots: Tensor) -> None:
    """Writes the slots of tokens at `positions` of rows that are rings to `slots`, in one launch.

    `index`: int32 `[num_rows, num_entries]`, a slot for each entry; rows: int `[T]`; positions: int `[T]`, at
    least 0; slots: int32 or int64 `[T]`; all contiguous but `index`. Contents are not checked.
    """
    num_tokens = len(rows)
    if num_tokens:
        _slots_kernel[(triton.cdiv(num_tokens, 64),)](
            index,
            rows,
            positions,
            slots,
            index.stride(0),
            num_tokens,
            SINKS=ring.sinks,
            SIZE=ring.size,
            BLOCK=64,
        )


def ring_slots_reference(index: Tensor, rows: Tensor, positions: Tensor, ring: Ring, slots: Tensor) -> None:
    """Computes `ring_slots` in plain torch."""
    slots.copy_(index[rows.long(), ring.entries(positions.long())])


# --------------------------------------------------------------------------------
# The rotation of sinks


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
    beyond = lengths.long() - 1 - ring.capacity
    dropped = torch.where(beyond < 0, 0, (beyond // ring.stride + 1) * ring.stride)  # as of `Ring.dropped`
    angles = dropped.double()[:, None] * inverse
    return SinkRotation(angles.cos().float(), angles.sin().float())
