"""Decode attention: each request's newest tokens (one or a few) attend to its K/V, which is found by an index.

A program attends to a share of all the batch's keys (`decode_plan.py`), item by item. An item is some keys of
one request, or of a prefix that several requests share. If a request is a single item, its output is written at
once. Otherwise each item writes a part (a normalised partial output and the log-sum-exp of its scores, base 2),
and a second kernel combines the parts (`decode_combine.py`).

The keys of an item are read once for all rows of its tile:

    tile rows   ├─ heads of query 0 ─┼─ heads of query 1 ─┼ … ┼─ heads of query 0 ─┼ …
                ├─────────────────── member 0 ────────────────┼─────── member 1 ───── …

The heads share a K/V head; the members are the requests that share the item's prefix.

The loop over keys, the checks and the float64 attention of the reference are in `attend_keys.py`.
"""

from typing import Any

import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attend_keys import score_scales
from lightkv.triton_kernels.attention.attention_inputs import check_attention_inputs
from lightkv.triton_kernels.attention.attention_mask import AttentionMask, mask_reference, mask_strides
from lightkv.triton_kernels.attention.attention_reference import attend_reference, slots_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.quantised.unpack import as_words, is_packed, most_warps

from .decode_combine import combine_parts
from .decode_kernel import decode_kernel
from .decode_plan import DecodePlan, decode_plan, num_programs_for
from .decode_sinks import SinkRotation, attend_ring_reference, check_rotation


@torch.library.custom_op("lightkv::decode_attention", mutates_args=("out", "lse"))
def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    columns: Tensor | None,
    v_columns: Tensor | None,
    index: Tensor,
    indirection: Tensor | None,
    items: Tensor,
    shares: Tensor,
    parts: Tensor,
    split: Tensor,
    members: Tensor | None,
    lengths: Tensor,
    sink_logits: Tensor | None,
    sink_cos: Tensor | None,
    sink_sin: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    mask_columns: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    num_queries: int,
    scale: float,
    shift: int,
    ring: list[int],
    sees_sinks: bool,
    window: int,
    chunk: int,
    after: int,
    softcap: float,
    layer_format: int,
    element_bits: list[int],
) -> None:
    num_tokens, num_heads, key_dim = q.shape
    num_kv_heads, value_dim = v_cache.shape[1], out.shape[2]
    if num_tokens == 0:
        return
    plan = DecodePlan(items, shares, parts, split, members)
    group, together = num_heads // num_kv_heads, plan.num_members * num_queries
    device = tuning.device_class(q.device)
    grouped = max(layer_format >> 8 & 4095, layer_format >> 20) > 1
    launch = tuning.decode_launch(
        device,
        together * group,
        together > 1,
        key_dim,
        value_dim,
        q.element_size(),
        element_bits,
        0 if mask is None else mask.element_size(),
        grouped,
    )
    early = tuning.has_early_launch(device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    if early and min(element_bits) < 16:
        options["maxnreg"] = tuning.quantised_decode(
            together * group, together > 1, key_dim, value_dim, element_bits, grouped
        ).max_registers
    partial_shape = plan.num_parts, num_queries * num_heads
    partial_lse = torch.empty(partial_shape, dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*partial_shape, value_dim), dtype=torch.float32, device=q.device)
    score_scale, cap_scale = score_scales(scale, softcap)
    decode_kernel[(num_kv_heads, shares.shape[0] - 1)](
        q,
        k_cache,
        v_cache,
        columns,
        v_columns,
        index,
        indirection,
        items,
        shares,
        parts,
        members,
        lengths,
        sink_logits,
        sink_cos,
        sink_sin,
        alibi_slopes,
        mask,
        mask_columns,
        out,
        lse,
        partial_out,
        partial_lse,
        plan.own_parts,
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
        GROUP=group,
        NUM_QUERIES=num_queries,
        MEMBERS=plan.num_members,
        DK=key_dim,
        DV=value_dim,
        BLOCK_M=launch.block_m,
        BLOCK_DK=tuning.padded_dim(key_dim),
        BLOCK_DV=tuning.padded_dim(value_dim),
        BLOCK_N=launch.block_n,
        SHIFT=shift,
        SINKS=ring[0],
        RING=ring[1],
        SEES_SINKS=sees_sinks,
        PAIRS=0 if sink_cos is None else sink_cos.shape[1],
        WINDOW=window,
        CHUNK=chunk,
        # A request's single query is its last token, so it sees all keys anyway.
        AFTER=after if num_queries > 1 else 0,
        SOFTCAP=softcap != 0.0,
        HAS_LSE=lse is not None,
        EARLY=early,
        FORMAT=layer_format,
        PACKED=layer_format != 0 and is_packed(q),
        num_warps=min(launch.num_warps, most_warps(layer_format)),
        num_stages=launch.num_stages,
        **options,
    )
    combine_parts(partial_out, partial_lse, plan, out, lse, num_queries)


_decode_attention.register_fake(lambda *_: None)  # the outputs are arguments


def decode_attention(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    num_queries: int = 1,
    plan: DecodePlan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sink_rotation: SinkRotation | None = None,
    mask: AttentionMask | None = None,
) -> Tensor:
    """Computes the attention of each request's newest tokens to its tokens in the cache, themselves included.

    Everything that varies from step to step (lengths, rows, the index) is read on the device: nothing
    synchronises, and a captured launch may be replayed with other values in the same tensors.

    Args:
        q: `[B * num_queries, H, Dk]`, request after request; H is a multiple of num_kv_heads, and query head h
            reads K/V head h // (H / num_kv_heads).
        kv: the layer's K/V and the index that finds it. The dot products run in the dtype of q and accumulate
            in float32.
        rows: int32 or int64 `[B]`, each request's row of the index.
        lengths: int32 `[B]`, the number of tokens to attend to, the newest included; at most num_entries *
            2**shift, which is not checked, or in a ring any number. The output of a request of length 0 is
            zeros.
        options: scale, windows, soft-cap, chunk, sinks, ALiBi, and whether the layer is causal. If it is not,
            the keys may be those of another sequence, of any length.
        num_queries: queries of each request, at its last positions: 1, or the number of drafted tokens to
            verify and one more. A query whose position would be negative gets zeros.
        plan: the result of `decode_plan` for the same rows, lengths, window, chunk and num_queries. One plan
            serves all layers of a step, and contains the requests' shared prefixes, if there are any. If None,
            a plan without shared prefixes is made.
        out: `[B * num_queries, H, Dv]` to write to; allocated in the dtype of q if None.
        lse: float32 `[B * num_queries, H]`, contiguous, to write the log-sum-exp of the scores to, in base 2,
            the head's sink included; -inf where a query sees no key and has no sink. Not written if None.
        sink_rotation: where the rows are rings and the layer has no window, the angles by which each request's
            query is rotated back for the sinks; None for sinks that are attended to as all other keys.
        mask: what hides keys or changes scores beside the options, with a row for each query of q.

    Returns:
        `[B * num_queries, H, Dv]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    scale = check_attention_inputs(q, kv, rows, lengths, options, out, lse, mask)
    if num_queries < 1 or q.shape[0] != rows.shape[0] * num_queries:
        raise ValueError(
            f"q must hold {num_queries} queries for each of {rows.shape[0]} rows, at least one; "
            f"got {q.shape[0]}"
        )
    window, chunk = options.window, options.chunk
    group = q.shape[1] // kv.k.shape[1]
    if group * num_queries > tuning.MOST_DECODE_ROWS:
        raise ValueError(
            f"{num_queries} queries of {group} heads to a K/V head are {group * num_queries} rows, and a tile "
            f"holds {tuning.MOST_DECODE_ROWS}; use prefill_attention, which takes any number of queries"
        )
    ring = None if window else kv.ring  # whose sinks and window the queries see
    if sink_rotation is not None:
        check_rotation(sink_rotation, len(q), q.shape[2])
        if ring is None or not ring.sinks:
            raise ValueError("a rotation for sinks, but the layer sees no ring's sinks; pass none")
        if kv.format.k.is_rotated:
            raise ValueError(
                "a rotation for sinks of keys that are rotated by a Hadamard matrix; choose another format of K"
            )
    if ring is not None and (mask is not None or (ring.sinks and options.alibi_slopes is not None)):
        raise ValueError(
            f"{ring} with a mask, or sinks with ALiBi: both count true positions; leave them out"
        )
    if plan is not None and (plan.window, plan.chunk, plan.num_queries, len(plan.parts), plan.ring) != (
        window,
        chunk,
        num_queries,
        len(rows),
        ring,
    ):
        raise ValueError(
            f"the plan is for {len(plan.parts)} requests of {plan.num_queries} queries with a window of "
            f"{plan.window} and chunks of {plan.chunk}, but the call has {len(rows)} requests of {num_queries} "
            f"queries with a window of {window} and chunks of {chunk} ({plan.ring} and {ring}); make a plan "
            "for this call"
        )
    if out is None:
        out = q.new_empty((*q.shape[:2], kv.value_dim))
    if plan is None:
        plan = decode_plan(
            rows,
            lengths,
            num_kv_heads=kv.k.shape[1],
            window=window,
            chunk=chunk,
            num_queries=num_queries,
            key_bytes=HeadShape.of(q, kv).key_bytes(q.dtype),
            num_programs=num_programs_for(HeadShape.of(q, kv), kv.format, num_queries),
            ring=ring,
        )
    _decode_attention(
        q,
        as_words(kv.k, kv.format.k),
        as_words(kv.v, kv.format.v),
        kv.scales,
        kv.v_scales,
        kv.index,
        kv.indirection,
        plan.items,
        plan.shares,
        plan.parts,
        plan.split,
        plan.members,
        lengths,
        options.sink_logits,
        *(sink_rotation or (None, None)),
        options.alibi_slopes,
        None if mask is None else mask.for_kernel(),
        None if mask is None else mask.columns,
        out,
        lse,
        num_queries,
        scale,
        kv.shift,
        kv.ring_sizes,
        ring is not None and ring.sinks > 0,
        window,
        chunk,
        options.after,
        options.softcap,
        kv.format_code,
        [kv.format.k.bits, kv.format.v.bits],
    )
    return out


def decode_attention_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    num_queries: int = 1,
    sink_rotation: SinkRotation | None = None,
    mask: AttentionMask | None = None,
) -> Tensor:
    """Computes `decode_attention` in plain torch and float64, one request at a time. Reads lengths and rows on
    the host, so on a GPU it synchronises."""
    out = q.new_zeros((*q.shape[:2], kv.value_dim))
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        queries = slice(request * num_queries, (request + 1) * num_queries)
        if kv.ring is not None and not options.window:
            angles = (
                None if sink_rotation is None else (sink_rotation.cos[request], sink_rotation.sin[request])
            )
            out[queries] = attend_ring_reference(q[queries], kv, row, length, angles, options).to(q.dtype)
            continue
        slots = slots_reference(kv, row, torch.arange(length, device=q.device))
        out[queries] = attend_reference(
            q[queries],
            *kv.read(slots),
            torch.arange(length - num_queries, length, device=q.device),
            options,
            None if mask is None else mask_reference(mask, queries, request, length),
        ).to(q.dtype)
    return out
