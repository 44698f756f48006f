"""The pieces of a pass, each of which goes on from the state in one slot and leaves its own in another."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightkv.memory.state_passes import StatePass

# Returns the output of one piece and the state after it, from the parts of its tokens and the state before it.
ComputePiece = Callable[..., tuple[Tensor, Tensor]]


def one_by_one(compute: ComputePiece, parts: Sequence[Tensor], one: StatePass, state: Tensor) -> Tensor:
    """Returns the output of a pass, whose pieces `compute` takes one by one. `parts`: each `[T, …]`."""
    assert one.counts is not None
    found = []
    pieces = zip(*(part.split(one.counts) for part in parts), strict=True)
    for piece, read, write in zip(pieces, *(slots.tolist() for slots in one.slots), strict=True):
        out, after = compute(*piece, state[read])
        if write:
            state[write] = after
        found.append(out)
    return torch.cat(found)


def keep(state: Tensor, writes: Tensor, after: Tensor) -> None:
    """Puts the states `after` all pieces, `[n, heads, k dim, v dim]`, into their slots. Slot 0, which padding
    writes, stays 0."""
    state.index_copy_(0, writes, torch.where((writes > 0)[:, None, None, None], after, 0.0))
