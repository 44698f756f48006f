"""Linear attention whose state decays: what Mamba-2 and lightning attention compute of a pass.

    S ← exp(log_decay)·S + k·vᵀ;   out = Sᵀq

Prompts are computed in chunks: by fla's kernels on a GPU, in plain torch on a CPU.
"""

import torch
from torch import Tensor

from lightkv.memory.state_passes import CHUNK, StatePass
from lightkv.triton_kernels.states.decay_decode import decay_decode, decay_decode_reference

from .chunks import compute_chunks


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, one: StatePass, state: Tensor, out: Tensor
) -> None:
    """Writes the output of a pass to its places in `out`, `[T, heads, v dim]` in the type of v.

    q, k: `[T, groups, k dim]`, each group for as many heads; v: `[T, heads, v dim]`; log_decay: float32
    `[T, heads]`. state: float32 `[num_slots, heads, k dim, v dim]`, read and written at the slots of the pass.
    """
    parts, tokens = (q, k, v, log_decay), one.tokens
    if one.most_chunks:
        of_pass = tuple(part[tokens] for part in parts)
        out[tokens] = compute_chunks(_by_fla, decayed_chunks_reference, of_pass, one, state)
        return
    function = decay_decode if q.is_cuda else decay_decode_reference
    q, k, v, log_decay, out = one.own(*parts, out)
    function(q, k, v, log_decay, state, one.recurrent_rows, out)


def _by_fla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, one: StatePass, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the chunks of a pass by fla's kernels, which keep a state in float32 between chunks, from the
    states `before`, float32 `[n, heads, k dim, v dim]`. Returns the output and the states after it."""
    from fla.ops.common.fused_chunk import fused_chunk_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    bounds, places = one.chunks
    decays = log_decay[None].contiguous()
    total = chunk_local_cumsum(decays, CHUNK, scale=RCP_LN2, cu_seqlens=bounds, chunk_indices=places)
    repeats = v.shape[1] // q.shape[1]
    out, after = fused_chunk_fwd(
        *(part.repeat_interleave(repeats, 1)[None] for part in (q, k)),
        v[None].contiguous(),
        g=total,
        scale=1.0,
        initial_state=before,
        output_final_state=True,
        cu_seqlens=bounds,
        chunk_size=CHUNK,
    )
    return out[0], after


def decayed_chunks_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output of one piece, in the type of v, and the state after it, from `state`, float32 `[heads,
    k dim, v dim]`. Shapes as in `decayed_attention`."""
    repeats = v.shape[1] // q.shape[1]
    heads = (
        *(part.float().transpose(0, 1).repeat_interleave(repeats, 0).split(CHUNK, 1) for part in (q, k)),
        v.float().transpose(0, 1).split(CHUNK, 1),
        log_decay.T.split(CHUNK, 1),
    )
    found = []
    for queries, keys, values, decays in zip(*heads, strict=True):  # each [heads, tokens, …]
        total = decays.cumsum(1)
        between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, i, j], 0 for j > i
        found.append(total.exp()[..., None] * (queries @ state) + (queries @ keys.mT * between) @ values)
        left = (total[:, -1:] - total).exp()[..., None]
        state = total[:, -1].exp()[:, None, None] * state + (keys * left).mT @ values
    return torch.cat(found, 1).transpose(0, 1).to(v.dtype), state
