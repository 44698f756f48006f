"""Computes linear attention whose state decays, token by token, for decodes and short pieces of prompts: reads
a sequence's state at one slot of a pool, and writes it at another or at the same."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.checks import Tensors

_BLOCK_V = 32
_TAKEN = Tensors(
    q="floats [T, HK, DK] with a last stride of 1",
    k="floats [T, HK, DK] with a last stride of 1",
    v="floats [T, HV, DV] with a last stride of 1",
    log_decay="float32 [T, HV]",
    states="float32 [slots, HV, DK, DV] with a last stride of 1",
    reads="contiguous int64 [n]",
    writes="contiguous int64 [n]",
    starts="contiguous int32 [n + 1]",
    places="contiguous int64 [packed]",
    out="contiguous [rows, HV, DV]",
)


@triton.jit(do_not_specialize_on_alignment=["reads", "writes", "starts", "places"])
def _decay_decode_kernel(
    q,  # [T, HK, DK]
    k,  # [T, HK, DK]
    v,  # [T, HV, DV]
    log_decay,  # [T, HV]
    states,  # [slots, HV, DK, DV]
    reads,  # [n]
    writes,  # [n]
    starts,  # [n + 1] or None
    places,  # [packed] or None
    out,  # [T, HV, DV], written
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
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
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    group = head // (HV // HK)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = keys < DK, values < DV
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    read = tl.load(reads + row)
    write = tl.load(writes + row)
    in_state = in_k[:, None] & in_v[None, :] & (write != 0)
    tile = states + head * DK * DV + keys[:, None] * DV + values[None, :]
    state = tl.load(tile + read * stride_slot, mask=in_state, other=0.0)
    first, end = row, row + 1
    if starts is not None:
        first, end = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    for token in range(first, end):
        place = token
        if places is not None:
            place = tl.load(places + token)
        decay = tl.load(log_decay + place * stride_decay + head * stride_decay_head)
        key_of, query_of = k + place * stride_k + group * stride_k_head, q + place * stride_q
        key = tl.load(key_of + keys, mask=in_k, other=0.0).to(tl.float32)
        query = tl.load(query_of + group * stride_q_head + keys, mask=in_k, other=0.0).to(tl.float32)
        value = tl.load(v + place * stride_v + head * stride_v_head + values, mask=in_v, other=0.0)
        state = state * tl.exp(decay) + key[:, None] * value.to(tl.float32)[None, :]
        total = tl.where(write != 0, tl.sum(state * query[:, None], 0), 0.0)
        tl.store(out + (place * HV + head) * DV + values, total.to(out.dtype.element_ty), mask=in_v)
    tl.store(tile + write * stride_slot, state, mask=in_state)


def decay_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    starts: Tensor | None = None,
    places: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the output of one token of each row, or of all tokens of each sequence, `[T, HV, DV]` in the type
    of v. A head's state S becomes exp(log_decay)·S + k·vᵀ, and its output is Sᵀq of the new S, in float32.

    Args:
        q, k: `[T, HK, DK]`. HV is a multiple of HK; head h of v has head h // (HV // HK) of q and k.
        v: `[T, HV, DV]`. log_decay: float32 `[T, HV]`.
        states: float32 `[num_slots, HV, DK, DV]`, each slot contiguous.
        reads: int64 `[n]`, the slot that holds each row's state.
        writes: int64 `[n]`, the slot to which its new state goes; 0 for a row of padding, whose output is 0 and
            which writes no state.
        starts: int32 `[n + 1]`, where the tokens of each sequence begin; None where each row has one token.
        places: int64 `[packed]`, where these tokens stand in q, k, v, log_decay and the output; None where they
            are packed there.
        out: where the output is written; other tokens of it stay. None for a new tensor, without `places`.

    A slot that one row writes must not be read by another. Nothing synchronises, so a CUDA graph can capture
    it. A model on a CPU calls the reference.

    Raises:
        ValueError: a tensor is none of these.
    """
    tokens, packed = {"q": q, "k": k, "v": v, "log_decay": log_decay}, {"starts": starts, "places": places}
    _TAKEN.check({}, **tokens, states=states, reads=reads, writes=writes, **packed, out=out)
    if v.shape[1] % q.shape[1] or not states[:1].is_contiguous():
        raise ValueError(
            f"q and k of {q.shape[1]} heads, v of {v.shape[1]} and states of strides {states.stride()} need a "
            "multiple of the former heads, and contiguous slots"
        )
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if len(reads):
        num_heads, key_dim, value_dim = states.shape[1:]
        _decay_decode_kernel[(triton.cdiv(value_dim, _BLOCK_V), num_heads, len(reads))](
            q,
            k,
            v,
            log_decay,
            states,
            reads,
            writes,
            starts,
            places,
            out,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    starts: Tensor | None = None,
    places: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Computes `decay_decode` in plain torch, one token of all sequences after the other."""
    if out is None:
        out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    bounds = torch.arange(len(reads) + 1, device=v.device) if starts is None else starts.long()
    state, lengths, repeats = states[reads], bounds.diff(), v.shape[1] // q.shape[1]
    for number in range(int(lengths.max()) if len(lengths) else 0):
        running = lengths > number
        token = (bounds[:-1] + number)[running]
        place = token if places is None else places[token]
        query, key = (part[place].float().repeat_interleave(repeats, 1) for part in (q, k))
        decayed = state[running] * log_decay[place].exp()[..., None, None]
        state[running] = decayed + key[..., None] * v[place].float()[..., None, :]
        total = (query[..., None, :] @ state[running])[..., 0, :]
        out[place] = total.masked_fill((writes[running] == 0)[:, None, None], 0.0).to(v.dtype)
    is_written = writes != 0
    states[writes[is_written]] = state[is_written]
    return out
