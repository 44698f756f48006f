"""The gated delta rule over prompts, in chunks of 64 tokens: fla's kernels on a GPU, plain torch on a CPU."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from lightkv.memory.state_passes import CHUNK, StatePass
from lightkv.triton_kernels.states.gated_delta_decode import DeltaGates
from lightkv.triton_kernels.states.gated_norm import gated_norm

from .chunks import compute_chunks

_EPS = 1e-6  # of the norm of q and k


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gates: DeltaGates, one: StatePass, state: Tensor
) -> Tensor:
    """Computes the pieces of a pass, and returns their output `[T, v heads, v dim]`.

    q, k: `[T, k heads, k dim]`, not normalised; v: `[T, v heads, v dim]`; a, b: `[T, v heads]`. state: float32
    `[num_slots, v heads, k dim, v dim]`, read and written at the slots of the pass.
    """
    kernels, reference = partial(_by_fla, gates), partial(delta_chunks_reference, gates)
    return compute_chunks(kernels, reference, (q, k, v, a, b), one, state)


def _by_fla(
    gates: DeltaGates, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, one: StatePass, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the chunks of a pass by fla's kernels, from the states `before`, float32 `[n, v heads, k dim, v
    dim]`. Returns the output and the states after it."""
    from fla.ops.common.gate import fused_beta_sigmoid_fwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    dim = q.shape[-1]
    root = q.new_full((dim,), dim**-0.5)  # a vector by its length is one by its root mean square, by this
    _, out, _, after, _, _ = chunk_gated_delta_rule_fwd(
        q=gated_norm(q, None, root, _EPS / dim)[None],
        k=gated_norm(k, None, root, _EPS / dim)[None],
        v=v[None].contiguous(),
        g=a[None].contiguous(),
        beta=fused_beta_sigmoid_fwd(b[None].contiguous(), gates.beta_scale),
        scale=dim**-0.5,
        initial_state=before,
        output_final_state=True,
        cu_seqlens=one.chunks.bounds,
        chunk_indices=one.chunks.places,
        use_gate_in_kernel=True,
        A_log=gates.a_log,
        dt_bias=gates.dt_bias,
        chunk_size=CHUNK,
    )
    return out[0], after


def delta_chunks_reference(
    gates: DeltaGates, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output of one piece, in the type of v, and the state after it, from `state`, float32 `[v
    heads, k dim, v dim]`. Shapes as in `delta_chunks`.

    In a chunk, with G the sum of log_decay up to a token: the corrections u of all its tokens solve
    (1 + L)·u = beta·(v − exp(G)·Sᵀk) at once, where L[i, j] = beta[i]·exp(G[i] − G[j])·k[i]·k[j] for j < i
    (Gated Delta Networks, arXiv 2412.06464).
    """
    num_heads, k_dim, _ = state.shape
    log_decay = -gates.a_log.float().exp() * functional.softplus(a.float() + gates.dt_bias.float())
    beta = gates.beta_scale * b.float().sigmoid()
    repeats = num_heads // q.shape[1]
    heads = [part.float().transpose(0, 1) for part in (q, k, v)]  # [heads, T, dim]
    q_heads, k_heads = (
        (part * (part.square().sum(-1, keepdim=True) + _EPS).rsqrt()).repeat_interleave(repeats, 0)
        for part in heads[:2]
    )
    found = []
    tokens = zip(
        *(part.split(CHUNK, 1) for part in (q_heads * k_dim**-0.5, k_heads, heads[2], log_decay.T, beta.T)),
        strict=True,
    )
    for queries, keys, values, decays, betas in tokens:
        total = decays.cumsum(1)
        between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # [heads, i, j], 0 for j > i
        lower = (betas[..., None] * (keys @ keys.mT) * between).tril(-1)
        wanted = betas[..., None] * (values - total.exp()[..., None] * (keys @ state))
        added = torch.linalg.solve_triangular(lower, wanted, upper=False, unitriangular=True)
        inside = (queries @ keys.mT) * between
        found.append(total.exp()[..., None] * (queries @ state) + inside @ added)
        left = (total[:, -1:] - total).exp()[..., None]
        state = total[:, -1].exp()[:, None, None] * state + (keys * left).mT @ added
    return torch.cat(found, 1).transpose(0, 1).to(v.dtype), state
