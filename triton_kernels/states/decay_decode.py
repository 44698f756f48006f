"""Computes linear attention whose state decays, token by token, for decodes and short pieces of prompts: reads
a sequence's state at one slot of a pool, and writes it at another or at the same."""

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.records import heads_record
from lightkv.triton_kernels.checks import Tensors

from . import matrices
from .rows import StateRows, place_of, tokens_of

_BLOCK_V = 32
_TAKEN = Tensors(
    q="floats [T, HK, DK] with a last stride of 1",
    k="floats [T, HK, DK] with a last stride of 1",
    v="floats [T, HV, DV] with a last stride of 1",
    log_decay="float32 [T, HV]",
)


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "starts", "places"])
def _decay_decode_kernel(q, k, v, log_decay, states, reads, writes, starts, places, out, EARLY: tl.constexpr):
    """`q`, `k`, `v` and `log_decay`: `Heads`; `states`: `Matrices`."""
    head, keys, values = matrices.dims_of(states)
    group = head // (states.HV // states.HK)
    tuning.wait_early(EARLY)
    state, target, in_state, write = matrices.load_state(states, reads, writes, head, keys, values)
    first, end = tokens_of(starts)
    for token in range(first, end):
        place = place_of(places, token, token < end)
        decay = tl.load(log_decay.data + place * log_decay.stride_token + head * log_decay.stride_head)
        key_of = k.data + place * k.stride_token + group * k.stride_head
        query_of = q.data + place * q.stride_token + group * q.stride_head
        value_of = v.data + place * v.stride_token + head * v.stride_head
        key = tl.load(key_of + keys, mask=keys < states.DK, other=0.0).to(tl.float32)
        query = tl.load(query_of + keys, mask=keys < states.DK, other=0.0).to(tl.float32)
        value = tl.load(value_of + values, mask=values < states.DV, other=0.0).to(tl.float32)
        state = state * tl.exp(decay) + key[:, None] * value[None, :]
        matrices.store_output(out, states, place, head, values, state, query, write)
    tl.store(target, state, mask=in_state)


def decay_decode(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, states: Tensor, rows: StateRows, out: Tensor
) -> None:
    """Writes the outputs of all tokens of rows to `out`. A head's state S becomes exp(log_decay)·S + k·vᵀ, and
    its output is Sᵀq of the new S, in float32.

    Args:
        q, k: `[T, HK, DK]`. HV is a multiple of HK; head h of v has head h // (HV // HK) of q and k.
        v: `[T, HV, DV]`. log_decay: float32 `[T, HV]`.
        states: float32 `[num_slots, HV, DK, DV]`, each slot contiguous.
        rows: the slots that they read and write, and where their tokens stand in q, k, v, log_decay and `out`.
        out: `[T, HV, DV]`. A row of padding gets zeros, and tokens of no row stay.

    Nothing synchronises, so a CUDA graph can capture it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor is none of these.
    """
    tokens = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    rows.check()
    matrices.TAKEN.check(_TAKEN.check({}, **tokens), states=states, out=out)
    pool = matrices.record(states, q.shape[1], _BLOCK_V)
    if len(rows.reads):
        grid = triton.cdiv(v.shape[2], _BLOCK_V), v.shape[1], len(rows.reads)
        heads = map(heads_record, tokens.values())
        _decay_decode_kernel[grid](*heads, pool, *rows, out, **tuning.early_options(v.device))


def decay_decode_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, states: Tensor, rows: StateRows, out: Tensor
) -> None:
    """Computes `decay_decode` in plain torch."""
    repeats = v.shape[1] // q.shape[1]

    def step(place: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (part[place].float().repeat_interleave(repeats, 1) for part in (q, k))
        decayed = state * log_decay[place].exp()[..., None, None]
        state = decayed + key[..., None] * v[place].float()[..., None, :]
        return state, (query[..., None, :] @ state)[..., 0, :]

    rows.recur_reference(states, step, out)
