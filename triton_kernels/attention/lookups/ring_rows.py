"""Rows that are rings (`layout/ring.py`): a new token has the entry of the oldest one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.variants.hooks import Flags, Hooks
from lightkv.triton_kernels.attention.variants.variant import Variant, limits
from lightkv.triton_kernels.layout.ring import Ring
from lightkv.triton_kernels.quantised.kv_format import KVFormat

from .lookup import Lookup, LookupHooks
from .ring_sinks import SinkRotation, attend_sinks, check_rotation, rotation_for, turn_forward


class _Data(NamedTuple):
    """`PAIRS`: of dims that the rotation turns. `SEEN`: the sinks that the
    layer sees, all or none."""

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
        sums = attend_sinks(query, sums, cache, index, row, variants, states, score_scale, shape)
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
        """Returns it for decode whose queries are rotated back for the sinks, in one launch, if there are any.
        `lengths`: int32 `[B]`, tokens so far, the newest included. `inverse`: float64 `[n]`, contiguous,
        radians per position of each pair of dims."""
        return replace(self, rotation=rotation_for(lengths, self.ring, inverse)) if self.ring.sinks else self

    def check(self, index: Tensor, variants: Sequence[Variant]) -> None:
        check_held(self.ring, variants)

    def check_decode(self, q: Tensor, variants: Sequence[Variant], stored: KVFormat) -> None:
        is_limited, ring = bool(limits(variants)), self.ring
        if self.rotation is not None:
            check_rotation(self.rotation, len(q), q.shape[2])
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
        cos, sin = (part[request].double() for part in self.rotation)
        return torch.cat((turn_forward(k[:sinks].double(), cos, sin), k[sinks:].double()))


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
