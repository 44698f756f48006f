"""What a decode step over rings needs once for all layers, computed on the device: the slots that it writes to,
and the angles by which its queries are rotated back for the sinks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.layout.ring import Ring

from .decode_sinks import SinkRotation


@triton.jit(do_not_specialize_on_alignment=["index", "rows", "positions", "slots"])
def _slots_kernel(
    index,
    rows,
    positions,
    slots,
    stride_index,
    num_tokens,
    SINKS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = token < num_tokens
    row = tl.load(rows + token, mask=valid, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=valid, other=0)
    entry = tl.where(position < SINKS, position, SINKS + (position - SINKS) % RING)
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
            RING=ring.size,
            BLOCK=64,
        )


def ring_slots_reference(index: Tensor, rows: Tensor, positions: Tensor, ring: Ring, slots: Tensor) -> None:
    """Computes `ring_slots` in plain torch."""
    within = ring.sinks + (positions - ring.sinks) % ring.size
    entries = torch.where(positions < ring.sinks, positions, within)
    slots.copy_(index[rows.long(), entries.long()])


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


def sink_rotation(lengths: Tensor, ring: Ring, inverse: Tensor) -> SinkRotation:
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


def sink_rotation_reference(lengths: Tensor, ring: Ring, inverse: Tensor) -> SinkRotation:
    """Computes `sink_rotation` in plain torch."""
    angles = dropped_tokens(lengths, ring).double()[:, None] * inverse
    return SinkRotation(angles.cos().float(), angles.sin().float())


def dropped_tokens(lengths: Tensor, ring: Ring) -> Tensor:
    """Returns what `Ring.dropped` says of the newest token of each ring of so many tokens, int64 `[B]`."""
    beyond = lengths.long() - 1 - ring.capacity
    return torch.where(beyond < 0, 0, (beyond // ring.stride + 1) * ring.stride)
