"""Linear attention whose state decays: what Mamba-2 and lightning attention compute of a pass.

    S ← exp(log_decay)·S + k·vᵀ;   out = Sᵀq

Prompts are computed in chunks: by fla's kernels on a GPU, in plain torch on a CPU.
"""

import torch
from torch import Tensor

from lightkv.memory.state_passes import StatePass
from lightkv.triton_kernels.states.decay_decode import decay_decode, decay_decode_reference

from .pieces import keep, one_by_one

_CHUNK = 64


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, one: StatePass, state: Tensor
) -> Tensor:
    """Computes the pieces of a pass, and returns their output `[T, heads, v dim]`, in the type of v.

    q, k: `[T, groups, k dim]`, each group for as many heads; v: `[T, heads, v dim]`; log_decay: float32
    `[T, heads]`. state: float32 `[num_slots, heads, k dim, v dim]`, read and written at the slots of the pass.
    """
    if one.counts is None:
        function = decay_decode if q.is_cuda else decay_decode_reference
        return function(q, k, v, log_decay, state, *one.slots)
    if not q.is_cuda:
        return one_by_one(decayed_chunks_reference, (q, k, v, log_decay), one, state)
    from fla.ops.simple_gla import chunk_simple_gla

    q, k = (part.repeat_interleave(v.shape[1] // part.shape[1], 1)[None] for part in (q, k))
    out, after = chunk_simple_gla(
        q,
        k,
        v[None],
        log_decay[None],
        scale=1.0,
        initial_state=state[one.slots.reads],
        output_final_state=True,
        cu_seqlens=one.starts.long(),
    )
    keep(state, one.slots.writes, after)
    return out[0]


def decayed_chunks_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output of one piece, in the type of v, and the state after it, from `state`, float32 `[heads,
    k dim, v dim]`. Shapes as in `decayed_attention`."""
    repeats = v.shape[1] // q.shape[1]
    heads = (
        *(part.float().transpose(0, 1).repeat_interleave(repeats, 0).split(_CHUNK, 1) for part in (q, k)),
        v.float().transpose(0, 1).split(_CHUNK, 1),
        log_decay.T.split(_CHUNK, 1),
    )
    found = []
    for queries, keys, values, decays in zip(*heads, strict=True):  # each [heads, tokens, …]
        total = decays.cumsum(1)
        between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, i, j], 0 for j > i
        found.append(total.exp()[..., None] * (queries @ state) + (queries @ keys.mT * between) @ values)
        left = (total[:, -1:] - total).exp()[..., None]
        state = total[:, -1].exp()[:, None, None] * state + (keys * left).mT @ values
    return torch.cat(found, 1).transpose(0, 1).to(v.dtype), state
