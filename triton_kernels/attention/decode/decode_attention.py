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

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attend_keys import (
    attend_keys,
    find_slots,
    first_key,
    score_scales,
    start_softmax,
)
from lightkv.triton_kernels.attention.attention_inputs import check_attention_inputs
from lightkv.triton_kernels.attention.attention_reference import attend_reference, slots_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV

from .decode_combine import combine_parts
from .decode_plan import ITEM_FIELDS, PART_FIELDS, SHARE_FIELDS, DecodePlan, decode_plan
from .decode_sinks import (
    SINK_TILE,
    SinkRotation,
    attend_ring_reference,
    attend_sinks,
    check_rotation,
)

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_PART_FIELDS = tl.constexpr(PART_FIELDS)
_SINK_TILE = tl.constexpr(SINK_TILE)


@triton.jit
def _load_item(item, is_item):
    """Returns the request (-1 - prefix for a shared prefix), row, first key and end of the keys of an item."""
    request = tl.load(item, mask=is_item, other=0)
    row = tl.load(item + 1, mask=is_item, other=0)
    begin = tl.load(item + 2, mask=is_item, other=0)
    end = tl.load(item + 3, mask=is_item, other=0)
    return request, row, begin, end


@triton.jit(
    do_not_specialize=["own_parts"],
    do_not_specialize_on_alignment=[
        "index",
        "indirection",
        "items",
        "shares",
        "parts",
        "members",
        "lengths",
        "sink_logits",
    ],
)
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    index,
    indirection,
    items,  # [capacity, 4]
    shares,  # [workers + 1, 8]
    parts,  # [B, 4]
    members,  # [G, MEMBERS]
    lengths,  # [B]
    sink_logits,  # [H] float32; or None
    sink_cos,  # [B, PAIRS] float32, of a ring's sinks; or None
    sink_sin,
    out,
    lse,  # [B * num_queries, H] float32, base 2
    partial_out,  # [parts, num_queries * H, DV] float32
    partial_lse,  # [parts, num_queries * H] float32, base 2
    own_parts,
    score_scale,
    cap_scale,
    stride_q_b,
    stride_q_h,
    stride_k_slot,
    stride_k_h,
    stride_v_slot,
    stride_v_h,
    stride_index,
    stride_indirection,
    stride_out_b,
    stride_out_h,
    GROUP: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    MEMBERS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
    SINKS: tl.constexpr,
    RING: tl.constexpr,  # 0: the rows are no rings
    SEES_SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    worker = tl.program_id(1)
    num_heads = tl.num_programs(0) * GROUP
    tile_rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + tile_rows % GROUP  # [BLOCK_M]
    queries = tile_rows // GROUP % NUM_QUERIES
    member = tile_rows // (GROUP * NUM_QUERIES)
    k_dims = tl.arange(0, BLOCK_DK)
    v_dims = tl.arange(0, BLOCK_DV)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    share = shares + worker * _SHARE_FIELDS
    first_item = tl.load(share)
    end_item = tl.load(share + _SHARE_FIELDS)
    next_request, next_row, next_begin, next_end = _load_item(share + 1, True)
    for item in range(first_item, end_item):
        request, begin, end = next_request.to(tl.int64), next_begin, next_end
        row = next_row.to(tl.int64)
        index_row = index + row * stride_index, indirection, stride_index, SINKS, RING
        if indirection is not None:
            index_row = index, indirection + row * stride_indirection, stride_index, SINKS, RING
        following = items + (item + 1) * _ITEM_FIELDS
        next_request, next_row, next_begin, next_end = _load_item(following, item + 1 < end_item)
        positions = begin + tl.arange(0, BLOCK_N)
        slots = find_slots(index_row, positions, positions < end, SHIFT)  # [BLOCK_N]
        is_prefix = request < 0
        of_request = parts + tl.maximum(request, 0) * _PART_FIELDS
        num_parts = tl.load(of_request + 1)
        part = own_parts + item  # the number of the partial output
        owner, in_tile = request, member < 1
        if MEMBERS > 1:
            num_parts = tl.where(is_prefix, 2, num_parts + tl.load(of_request + 3))
            part = tl.where(is_prefix, item * MEMBERS + member, part)
            listed = is_prefix & (member < MEMBERS)
            of_prefix = tl.load(members + (-1 - request) * MEMBERS + member, mask=listed, other=-1)
            owner = tl.where(is_prefix, of_prefix, tl.where(in_tile, request, -1))
            in_tile = owner >= 0
        tokens = owner * NUM_QUERIES + queries  # [BLOCK_M]
        q_tile = tl.load(
            q + tokens[:, None] * stride_q_b + heads[:, None] * stride_q_h + k_dims[None, :],
            mask=in_tile[:, None] & (k_dims < DK)[None, :],
            other=0.0,
        )  # [BLOCK_M, BLOCK_DK]

        # Every query sees the keys in [begin, full_end); only some queries see those in [full_end, end):
        #   begin ├──── not masked ────┤ full_end ├─ masked ─┤ end
        if NUM_QUERIES > 1:
            length = tl.load(lengths + tl.maximum(request, 0))
            if MEMBERS > 1:
                length = tl.where(is_prefix, end + NUM_QUERIES, length)  # every query sees all of its keys
            query_positions = length - NUM_QUERIES + queries
            visible_end = tl.minimum(end, length - NUM_QUERIES + 1)
        else:
            query_positions = tl.zeros([BLOCK_M], tl.int32) + (end - 1)
            visible_end = end
        if CHUNK > 0 and (NUM_QUERIES > 1 or MEMBERS > 1):
            own_length = tl.load(lengths + tl.where(in_tile, owner, 0))  # [BLOCK_M]
            query_positions = own_length - NUM_QUERIES + queries
            # If a query's chunk begins after `begin`, all tiles are masked.
            seen_from = tl.where(in_tile, first_key(query_positions, 0, CHUNK), 0)
            visible_end = tl.where(tl.max(seen_from, 0) > begin, begin, visible_end)
        full_end = begin
        if NUM_QUERIES == 1 or WINDOW == 0:
            full_end = begin + tl.maximum(visible_end - begin, 0) // BLOCK_N * BLOCK_N

        # Of a request's parts, the first one of its own is joined by the sinks.
        joins = in_tile
        if sink_logits is not None:
            joins = in_tile & (request >= 0) & (tl.load(of_request) == own_parts + item)
        peak, total = start_softmax(sink_logits, heads, joins, BLOCK_M)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if SEES_SINKS:  # in the request's first part
            is_first = tl.load(of_request) == own_parts + item
            num_sinks = tl.where(is_first, tl.minimum(tl.load(lengths + request), SINKS), 0)
            acc, total, peak = attend_sinks(
                q + request * stride_q_b + heads[:, None] * stride_q_h, in_tile, acc, total, peak,
                k_cache + kv_head * stride_k_h, v_cache + kv_head * stride_v_h, index_row, num_sinks,
                sink_cos + request * PAIRS if sink_cos is not None else None,
                sink_sin + request * PAIRS if sink_sin is not None else None,
                stride_k_slot, stride_v_slot, score_scale, cap_scale,
                DK, DV, BLOCK_DK, BLOCK_DV, SHIFT, SOFTCAP, PAIRS, _SINK_TILE,
            )  # fmt: skip
        for MASKED in tl.static_range(0, 2):
            acc, total, peak, slots = attend_keys(
                q_tile,
                acc,
                total,
                peak,
                slots,
                k_cache + kv_head * stride_k_h,
                v_cache + kv_head * stride_v_h,
                index_row,
                query_positions,
                full_end if MASKED else begin,
                end if MASKED else full_end,
                end,
                stride_k_slot,
                stride_v_slot,
                score_scale,
                cap_scale,
                DK,
                DV,
                BLOCK_DK,
                BLOCK_DV,
                BLOCK_N,
                SHIFT,
                # Where the queries are one request's single one, `begin` applies the window and the chunk.
                WINDOW if NUM_QUERIES > 1 else 0,
                CHUNK if NUM_QUERIES > 1 or MEMBERS > 1 else 0,
                SOFTCAP,
                MASKED == 1,
            )
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]

        out_mask = in_tile[:, None] & (v_dims < DV)[None, :]
        if num_parts == 1:
            pointers = out + tokens[:, None] * stride_out_b + heads[:, None] * stride_out_h + v_dims[None, :]
            tl.store(pointers, acc.to(out.dtype.element_ty), mask=out_mask)
            if HAS_LSE:
                tl.store(lse + tokens * num_heads + heads, peak + tl.log2(total), mask=in_tile)
        else:
            partials = (part * NUM_QUERIES + queries).to(tl.int64) * num_heads + heads  # [BLOCK_M]
            tl.store(partial_out + partials[:, None] * DV + v_dims[None, :], acc, mask=out_mask)
            tl.store(partial_lse + partials, peak + tl.log2(total), mask=in_tile)


@torch.library.custom_op("lightkv::decode_attention", mutates_args=("out", "lse"))
def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
    out: Tensor,
    lse: Tensor | None,
    num_queries: int,
    scale: float,
    shift: int,
    ring: list[int],
    sees_sinks: bool,
    window: int,
    chunk: int,
    softcap: float,
) -> None:
    num_tokens, num_heads, key_dim = q.shape
    num_kv_heads, value_dim = v_cache.shape[1:]
    if num_tokens == 0:
        return
    plan = DecodePlan(items, shares, parts, split, members)
    group, together = num_heads // num_kv_heads, plan.num_members * num_queries
    device = tuning.device_class(q.device)
    launch = tuning.decode_launch(
        device, together * group, together > 1, key_dim, value_dim, q.element_size()
    )
    early = tuning.has_early_launch(device)
    options = {"launch_pdl": True} if early else {}
    partial_shape = plan.num_parts, num_queries * num_heads
    partial_lse = torch.empty(partial_shape, dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*partial_shape, value_dim), dtype=torch.float32, device=q.device)
    score_scale, cap_scale = score_scales(scale, softcap)
    _decode_kernel[(num_kv_heads, shares.shape[0] - 1)](
        q,
        k_cache,
        v_cache,
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
        index.stride(0),
        None if indirection is None else indirection.stride(0),
        *out.stride()[:2],
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
        SOFTCAP=softcap != 0.0,
        HAS_LSE=lse is not None,
        EARLY=early,
        num_warps=launch.num_warps,
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
        options: scale, window, soft-cap, chunk and sinks.
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

    Returns:
        `[B * num_queries, H, Dv]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    scale = check_attention_inputs(q, kv, rows, lengths, options, out, lse)
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
    if plan is not None and (plan.window, plan.chunk, plan.num_queries, len(plan.parts), plan.ring) != (
        window,
        chunk,
        num_queries,
        len(rows),
        ring,
    ):
        raise ValueError(
            f"the plan is for {len(plan.parts)} requests of {plan.num_queries} queries with a window of "
            f"{plan.window}, chunks of {plan.chunk} and {plan.ring}, but the call has {len(rows)} requests of "
            f"{num_queries} queries with a window of {window}, chunks of {chunk} and {ring}; make a plan for "
            "this call"
        )
    if out is None:
        out = q.new_empty((*q.shape[:2], kv.v.shape[2]))
    if plan is None:
        plan = decode_plan(
            rows,
            lengths,
            num_kv_heads=kv.k.shape[1],
            window=window,
            chunk=chunk,
            num_queries=num_queries,
            key_bytes=HeadShape.of(q, kv).key_bytes(q.dtype),
            ring=ring,
        )
    _decode_attention(
        q,
        kv.k,
        kv.v,
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
        out,
        lse,
        num_queries,
        scale,
        kv.shift,
        kv.ring_sizes,
        ring is not None and ring.sinks > 0,
        window,
        chunk,
        options.softcap,
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
) -> Tensor:
    """Computes `decode_attention` in plain torch and float64, one request at a time. Reads lengths and rows on
    the host, so on a GPU it synchronises."""
    out = q.new_zeros((*q.shape[:2], kv.v.shape[2]))
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
            kv.k[slots],
            kv.v[slots],
            torch.arange(length - num_queries, length, device=q.device),
            options,
        ).to(q.dtype)
    return out
