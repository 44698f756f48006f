"""States that are a matrix for each head: a pool of them, and the tile that a program holds of one."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors

TAKEN = Tensors(states="float32 [slots, HV, DK, DV] with a last stride of 1", out="contiguous [rows, HV, DV]")


class Matrices(NamedTuple):
    """A pool of states `[slots, HV, DK, DV]`, of which a program holds BLOCK_V values of a head. HK: heads of q
    and k."""

    data: Any
    stride_slot: Any
    HK: Any
    HV: Any
    DK: Any
    DV: Any
    BLOCK_K: Any
    BLOCK_V: Any


def record(states: Tensor, num_k_heads: int, block_v: int) -> Matrices:
    """Returns a pool of states as kernels take it. Raises ValueError where its slots are not contiguous, or its
    heads no multiple of `num_k_heads`."""
    num_heads, key_dim, value_dim = states.shape[1:]
    if num_heads % num_k_heads or not states[:1].is_contiguous():
        raise ValueError(
            f"states need contiguous slots, and a multiple of the {num_k_heads} heads of q and k as heads; got "
            f"strides {states.stride()} and {num_heads} heads"
        )
    numbers = num_k_heads, num_heads, key_dim, value_dim, triton.next_power_of_2(key_dim), block_v
    return Matrices(states, states.stride(0), *map(tl.constexpr, numbers))


@triton.jit
def dims_of(states):
    """Returns a program's head, and the key dims and value dims of its tile."""
    values = tl.program_id(0) * states.BLOCK_V + tl.arange(0, states.BLOCK_V)
    return tl.program_id(1), tl.arange(0, states.BLOCK_K), values


@triton.jit
def load_state(states, reads, writes, head, keys, values):
    """Returns a tile of a row's state, pointers to where the new one goes, which of it exists, none of a row of
    padding, and the slot that the row writes."""
    row = tl.program_id(2)
    write = tl.load(writes + row)
    in_state = (keys < states.DK)[:, None] & (values < states.DV)[None, :] & (write != 0)
    tile = states.data + head * states.DK * states.DV + keys[:, None] * states.DV + values[None, :]
    state = tl.load(tile + tl.load(reads + row) * states.stride_slot, mask=in_state, other=0.0)
    return state, tile + write * states.stride_slot, in_state, write


@triton.jit
def store_output(out, states, place, head, values, state, query, write):
    """Stores Sᵀq of a token's head; zeros where `write` is 0."""
    total = tl.where(write != 0, tl.sum(state * query[:, None], 0), 0.0)
    target = out + (place * states.HV + head) * states.DV + values
    tl.store(target, total.to(out.dtype.element_ty), mask=values < states.DV)
