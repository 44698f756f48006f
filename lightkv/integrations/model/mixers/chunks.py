"""Pieces of prompts from their states on: all side by side by a library's kernels, or one by one in torch."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from lightkv.errors import MissingExtra
from lightkv.memory.state_passes import StatePass

# Takes the parts of the tokens, and states before pieces. Returns the output, and the states after the pieces.
ByKernels = Callable[..., tuple[Tensor, Tensor]]
Reference = Callable[..., tuple[Tensor, Tensor]]


def compute_chunks(
    kernels: ByKernels, reference: Reference, parts: tuple[Tensor, ...], one: StatePass, state: Tensor
) -> Tensor:
    """Computes the pieces of a pass, and returns their output, of the shape of `parts[2]`. `state`: float32
    `[num_slots, heads, k dim, v dim]`, read and written at the slots of the pass.

    `kernels` get the parts, the pass and the states before its pieces, `reference` those of one piece."""
    reads, writes = one.slots
    if state.is_cuda:
        _require_fla()
        out, after = kernels(*parts, one, state[reads])
        # What a padding piece leaves is not kept: slot 0 stays zero.
        state.index_copy_(0, writes, after.masked_fill_((writes == 0)[:, None, None, None], 0.0))
        return out
    out = torch.zeros_like(parts[2], memory_format=torch.contiguous_format)
    bounds = one.starts.tolist()
    for begin, end, read, write in zip(bounds, bounds[1:], reads.tolist(), writes.tolist(), strict=False):
        if begin == end:
            continue  # the place of a prompt that there is not
        out[begin:end], after = reference(*(part[begin:end] for part in parts), state[read])
        if write:
            state[write] = after
    return out


@cache
def _require_fla() -> None:
    """Raises MissingExtra where fla-core is not installed."""
    if find_spec("fla") is None:
        raise MissingExtra("fla-core", "hybrid", "a model with recurrent layers on a GPU")
