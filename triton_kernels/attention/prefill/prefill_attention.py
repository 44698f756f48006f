"""Prefill attention: many queries per request over a cached prefix and the new tokens alike.

The new tokens' K/V is in the cache before the call, so a whole prefill, a chunk of one and the verification of
drafted tokens are the same operation: a request's last n tokens attend to all its tokens, found through the
index.

    keys      0 ├──────── prefix ────────┤──────── n queries' own ────────┤ length
    query i     ├─────────── sees these ─────────────┤ prefix + i + 1

A tile's rows are queries times the query heads that share a K/V head: K and V are gathered once for all of
them, and a few queries still fill the tile. The tiles are a work list (`prefill_plan.py`). Where they are too
few to fill the device, as with a few queries after many keys, the keys of a tile are shared out among several
programs, which write partial outputs, and a second kernel combines these (`prefill_combine.py`).

The kernel of `prefill_kernel.py` runs wherever Triton does. On compute capability 9 `prefill_hopper.py` goes
through the same work list, where types, head dim and strides allow.
"""

from functools import cache
from types import ModuleType

import torch
import triton
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attend_keys import score_scales
from lightkv.triton_kernels.attention.attention_inputs import check_attention_inputs
from lightkv.triton_kernels.attention.attention_mask import AttentionMask, mask_reference, mask_strides
from lightkv.triton_kernels.attention.attention_reference import attend_reference, slots_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.quantised.unpack import as_words, is_packed, most_warps

from .prefill_combine import combine_tiles, empty_parts
from .prefill_kernel import prefill_kernel
from .prefill_plan import PrefillPlan, prefill_plan


@cache
def _hopper() -> ModuleType | None:
    """Returns the module of the kernel for compute capability 9; None in Triton's interpreter, or where this
    version of Triton has no Gluon."""
    if not isinstance(prefill_kernel, triton.JITFunction):
        return None
    try:
        from . import prefill_hopper
    except ImportError:
        return None
    return prefill_hopper


def _hopper_launch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, mask: Tensor | None = None
) -> tuning.Launch | None:
    """Returns the tiles that `prefill_hopper` would use; None if it cannot run, as it copies 16 bytes at a
    time, converts no types, and knows no masks but trees."""
    if not q.dtype == k_cache.dtype == v_cache.dtype or (mask is not None and mask.dtype != torch.int32):
        return None
    for tensor in (q, k_cache, v_cache, out):
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in tensor.stride()[:2]):
            return None
    device = tuning.device_class(q.device)
    return tuning.hopper_prefill_launch(device, q.shape[2], v_cache.shape[2], q.element_size())


@torch.library.custom_op("lightkv::prefill_attention", mutates_args=("counters", "out", "lse"))
def _prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    columns: Tensor | None,
    v_columns: Tensor | None,
    index: Tensor,
    indirection: Tensor | None,
    items: Tensor,
    counters: Tensor,
    sink_logits: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    mask_columns: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    num_shares: int,
    num_workers: int,
    block_m: int,
    block_n: int,
    num_warps: int,
    num_stages: int,
    scale: float,
    shift: int,
    ring: list[int],
    window: int,
    chunk: int,
    after: int,
    softcap: float,
    layer_format: int,
) -> None:
    num_heads, key_dim = q.shape[1:]
    num_kv_heads, value_dim = v_cache.shape[1], out.shape[2]
    if num_shares == 0:
        return
    score_scale, cap_scale = score_scales(scale, softcap)
    partial_out = partial_lse = None
    if num_workers:
        partial_out, partial_lse = empty_parts(num_workers, num_kv_heads, block_m, value_dim, q.device)
    hopper_launch = _hopper_launch(q, k_cache, v_cache, out, mask)
    if hopper_launch is not None and hopper_launch.block_m == block_m and (hopper := _hopper()) is not None:
        hopper.launch_hopper_prefill(
            q,
            k_cache,
            v_cache,
            index,
            indirection,
            items,
            counters,
            sink_logits,
            alibi_slopes,
            mask,
            out,
            lse,
            partial_out,
            partial_lse,
            hopper_launch,
            num_shares=num_shares,
            score_scale=score_scale,
            cap_scale=cap_scale,
            shift=shift,
            ring=ring,
            window=window,
            chunk=chunk,
            after=after,
            softcap=softcap != 0.0,
        )
    else:
        if mask is not None:
            launch = tuning.Launch(block_m, block_n, num_warps, num_stages)
            _, block_n, num_warps, num_stages = tuning.masked_prefill_launch(launch)
        if num_warps > most_warps(layer_format):
            block_n, num_warps, num_stages = 32, most_warps(layer_format), 2
        prefill_kernel[(num_kv_heads * num_shares,)](
            q,
            k_cache,
            v_cache,
            columns,
            v_columns,
            index,
            indirection,
            items,
            sink_logits,
            alibi_slopes,
            mask,
            mask_columns,
            out,
            lse,
            partial_out,
            partial_lse,
            num_kv_heads,
            score_scale,
            cap_scale,
            *q.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *(None, None) if columns is None else columns.stride()[:2],
            index.stride(0),
            None if indirection is None else indirection.stride(0),
            *out.stride()[:2],
            *mask_strides(mask),
            GROUP=num_heads // num_kv_heads,
            DK=key_dim,
            DV=value_dim,
            BLOCK_M=block_m,
            BLOCK_DK=tuning.padded_dim(key_dim),
            BLOCK_DV=tuning.padded_dim(value_dim),
            BLOCK_N=block_n,
            SHIFT=shift,
            SINKS=ring[0],
            RING=ring[1],
            WINDOW=window,
            CHUNK=chunk,
            AFTER=after,
            SOFTCAP=softcap != 0.0,
            HAS_LSE=lse is not None,
            SHARES=num_workers > 0,
            FORMAT=layer_format,
            PACKED=layer_format != 0 and is_packed(q),
            num_warps=num_warps,
            num_stages=num_stages,
        )
    if partial_out is not None and partial_lse is not None:
        combine_tiles(partial_out, partial_lse, items, out, lse)


_prefill_attention.register_fake(lambda *_: None)  # the outputs are arguments


def prefill_attention(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    plan: PrefillPlan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    mask: AttentionMask | None = None,
) -> Tensor:
    """Computes attention of each request's last tokens to all its tokens. Their K/V is in the cache before the
    call.

    The n queries of a request are at its last n positions; each attends to itself and to the tokens before it,
    in a layer that is not causal to those after it, too. The output of a query whose position would be negative
    (more queries than tokens) is zeros if the layer is causal. If it is not, the keys may be those of another
    sequence, of any length.

    Args:
        q: `[T, H, Dk]`, request after request; H is a multiple of num_kv_heads.
        kv: the layer's K/V and the index that finds it. The dot products run in the dtype of q and accumulate
            in float32.
        rows: int32 or int64 `[B]`, each request's row of the index.
        q_starts: int32 `[B + 1]`: the queries of request b are q[q_starts[b] : q_starts[b + 1]]. Queries from
            q_starts[B] on belong to no request, and their part of the output is not written.
        lengths: int32 `[B]`, the request's tokens in the cache, the queries' own included; at most num_entries
            * 2**shift, which is not checked. If the rows are rings, n queries need a ring of `window` + n - 1
            tokens, which is not checked either.
        options: scale, windows, soft-cap, chunk, sinks, ALiBi, and whether the layer is causal.
        plan: the result of `prefill_plan` for the same rows, q_starts, lengths, windows, chunk and shapes; it
            serves all layers of a step, one after the other. If None, a plan is made here.
        out: `[T, H, Dv]` to write to; allocated in the dtype of q if None.
        lse: float32 `[T, H]`, contiguous, to write the log-sum-exp of the scores to, in base 2, the head's
            sink included; -inf where a query sees no key and has no sink. Not written if None.
        mask: what hides keys or changes scores beside the options, with a row for each query of q.

    Returns:
        `[T, H, Dv]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    scale = check_attention_inputs(q, kv, rows, lengths, options, out, lse, mask)
    if kv.ring is not None and (not options.window or options.after or mask is not None):
        raise ValueError(
            f"prefill over rows that are rings, {kv.ring}, is for a causal layer with a window, which says "
            "what each query sees, and without a mask; set options.window"
        )
    if (
        q_starts.dtype != torch.int32
        or q_starts.shape != (rows.shape[0] + 1,)
        or not q_starts.is_contiguous()
    ):
        raise ValueError(
            f"q_starts must be contiguous int32 [{rows.shape[0] + 1}], got {q_starts.dtype} "
            f"{tuple(q_starts.shape)}"
        )
    window, chunk, after = options.window, options.chunk, options.after
    if plan is not None and (plan.window, plan.chunk, plan.after, plan.num_requests) != (
        window,
        chunk,
        after,
        len(rows),
    ):
        raise ValueError(
            f"the plan is for {plan.num_requests} requests with a window of {plan.window}, {plan.after} tokens "
            f"after the query and chunks of {plan.chunk}, but the call has {len(rows)} requests with a window "
            f"of {window}, {after} tokens after the query and chunks of {chunk}; make a plan for this call"
        )
    if out is None:
        out = q.new_empty((*q.shape[:2], kv.value_dim))
    if plan is None:
        plan = prefill_plan(
            rows,
            q_starts,
            lengths,
            HeadShape.of(q, kv),
            num_tokens=q.shape[0],
            dtype=q.dtype,
            window=window,
            chunk=chunk,
            after=after,
        )
    _prefill_attention(
        q,
        as_words(kv.k, kv.format.k),
        as_words(kv.v, kv.format.v),
        kv.scales,
        kv.v_scales,
        kv.index,
        kv.indirection,
        plan.items,
        plan.counters,
        options.sink_logits,
        options.alibi_slopes,
        None if mask is None else mask.for_kernel(),
        None if mask is None else mask.columns,
        out,
        lse,
        plan.num_shares,
        plan.num_workers,
        *plan.launch,
        scale,
        kv.shift,
        kv.ring_sizes,
        window,
        chunk,
        after,
        options.softcap,
        kv.format_code,
    )
    return out


def prefill_attention_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    mask: AttentionMask | None = None,
) -> Tensor:
    """Computes `prefill_attention` in plain torch and float64, one request at a time; the output of queries
    that belong to no request is zero. Reads lengths, rows and q_starts on the host, so on a GPU it
    synchronises."""
    out = q.new_zeros((*q.shape[:2], kv.value_dim))
    starts = q_starts.tolist()
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        queries = slice(starts[request], starts[request + 1])
        q_len = queries.stop - queries.start
        slots = slots_reference(kv, row, torch.arange(length, device=q.device))
        out[queries] = attend_reference(
            q[queries],
            *kv.read(slots),
            torch.arange(length - q_len, length, device=q.device),
            options,
            None if mask is None else mask_reference(mask, queries, request, length),
        ).to(q.dtype)
    return out
