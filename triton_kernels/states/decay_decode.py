"""Computes one token of linear attention whose state decays for each row of a batch: reads the row's state at
one slot of a pool, and writes it at another or at the same."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.checks import Tensors

_BLOCK_V = 32
_TAKEN = Tensors(
    q="floats [n, HK, DK] with a last stride of 1",
    k="floats [n, HK, DK] with a last stride of 1",
    v="contiguous floats [n, HV, DV]",
    log_decay="float32 [n, HV]",
    states="float32 [slots, HV, DK, DV] with a last stride of 1",
    reads="contiguous int64 [n]",
    writes="contiguous int64 [n]",
)


@triton.jit(do_not_specialize_on_alignment=["reads", "writes"])
def _decay_decode_kernel(
    q,  # [n, HK, DK]
    k,  # [n, HK, DK]
    v,  # [n, HV, DV]
    log_decay,  # [n, HV]
    states,  # [slots, HV, DK, DV]
    reads,  # [n]
    writes,  # [n]
    out,  # [n, HV, DV], written
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_decay,
    stride_decay_head,
    stride_slot,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group = head // (HV // HK)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = keys < DK, values < DV
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    read = tl.load(reads + row)
    write = tl.load(writes + row)
    place = (row * HV + head) * DV + values
    if write == 0:
        tl.store(out + place, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=in_v)
        return
    in_state = in_k[:, None] & in_v[None, :]
    tile = states + head * DK * DV + keys[:, None] * DV + values[None, :]
    state = tl.load(tile + read * stride_slot, mask=in_state, other=0.0)
    decay = tl.load(log_decay + row * stride_decay + head * stride_decay_head)
    query = tl.load(q + row * stride_q + group * stride_q_head + keys, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(k + row * stride_k + group * stride_k_head + keys, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(v + place, mask=in_v, other=0.0).to(tl.float32)
    state = state * tl.exp(decay) + key[:, None] * value[None, :]
    tl.store(tile + write * stride_slot, state, mask=in_state)
    tl.store(out + place, tl.sum(state * query[:, None], 0).to(out.dtype.element_ty), mask=in_v)


def decay_decode(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, states: Tensor, reads: Tensor, writes: Tensor
) -> Tensor:
    """Returns the output of one token of each row, `[n, HV, DV]` in the dtype of v. A head's state S becomes
    exp(log_decay)·S + k·vᵀ, and its output is Sᵀq of the new S, computed in float32.

    Args:
        q, k: `[n, HK, DK]`. HV is a multiple of HK; head h of v has head h // (HV // HK) of q and k.
        v: `[n, HV, DV]`. log_decay: float32 `[n, HV]`.
        states: float32 `[num_slots, HV, DK, DV]`, each slot contiguous.
        reads: int64 `[n]`, the slot that holds each row's state.
        writes: int64 `[n]`, the slot to which its new state goes; 0 for a row of padding, whose output is 0 and
            which writes no state.

    A slot that one row writes must not be read by another. Nothing synchronises, so a CUDA graph can capture
    it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor is none of these.
    """
    rows = {"q": q, "k": k, "v": v, "log_decay": log_decay}
    _TAKEN.check({}, **rows, states=states, reads=reads, writes=writes)
    if v.shape[1] % q.shape[1] or not states[:1].is_contiguous():
        raise ValueError(
            f"q and k of {q.shape[1]} heads, v of {v.shape[1]} and states of strides {states.stride()} need a "
            "multiple of the former heads, and contiguous slots"
        )
    out = torch.empty_like(v)
    if len(v):
        num_heads, key_dim, value_dim = states.shape[1:]
        _decay_decode_kernel[(len(v), num_heads, triton.cdiv(value_dim, _BLOCK_V))](
            q,
            k,
            v,
            log_decay,
            states,
            reads,
            writes,
            out,
            *q.stride()[:2],
            *k.stride()[:2],
            *log_decay.stride(),
            states.stride(0),
            HK=q.shape[1],
            HV=num_heads,
            DK=key_dim,
            DV=value_dim,
            BLOCK_K=triton.next_power_of_2(key_dim),
            BLOCK_V=_BLOCK_V,
            **tuning.early_options(v.device),
        )
    return out


def decay_decode_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, states: Tensor, reads: Tensor, writes: Tensor
) -> Tensor:
    """Computes `decay_decode` in plain torch."""
    query, key = (part.float().repeat_interleave(v.shape[1] // q.shape[1], 1) for part in (q, k))
    state = states[reads] * log_decay.exp()[..., None, None] + key[..., None] * v.float()[..., None, :]
    is_written = writes != 0
    states[writes[is_written]] = state[is_written]
    out = (query[..., None, :] @ state)[..., 0, :]
    return out.masked_fill(~is_written[:, None, None], 0.0).to(v.dtype)
