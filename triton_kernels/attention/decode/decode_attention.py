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
    load_slopes,
    score_scales,
    start_softmax,
)
from lightkv.triton_kernels.attention.attention_inputs import check_attention_inputs
from lightkv.triton_kernels.attention.attention_mask import (
    AttentionMask,
    mask_reference,
    mask_rows,
    mask_strides,
)
from lightkv.triton_kernels.attention.attention_reference import attend_reference, find_slots_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV

from .decode_combine import combine_parts
from .decode_plan import ITEM_FIELDS, PART_FIELDS, SHARE_FIELDS, DecodePlan, decode_plan

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_PART_FIELDS = tl.constexpr(PART_FIELDS)


@triton.jit
def _load_item(item, is_item):
    """Returns the request (-1 - prefix for a shared prefix), row, first key and end of the keys of an item."""
    request = tl.load(item, mask=is_item, other=0)
    row = tl.load(item + 1, mask=is_item, other=0)
    begin = tl.load(item + 2, mask=is_item, other=0)
    end = tl.load(item + 3, mask=is_item, other=0)
    return request, row, begin, end


@triton.jit(
    do_not_specialize=["own_parts", "mask_width"],
    do_not_specialize_on_alignment=[
        "index", "items", "shares", "parts", "members", "lengths", "sink_logits", "alibi_slopes",
        "mask_columns",
    ],
)  # fmt: skip
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    index,
    items,  # [capacity, 4]
    shares,  # [workers + 1, 8]
    parts,  # [B, 4]
    members,  # [G, MEMBERS]
    lengths,  # [B]
    sink_logits,  # [H] float32; or None
    alibi_slopes,  # [H] float32; or None
    mask,  # [1 or H, B * num_queries, mask_width], of values or int32 words of bits; or None
    mask_columns,  # [B]; or None
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
    stride_out_b,
    stride_out_h,
    mask_width,
    stride_mask_h,
    stride_mask_t,
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
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AFTER: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    IS_TREE: tl.constexpr = mask is not None and mask.dtype.element_ty == tl.int32
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
        index_row = index + next_row.to(tl.int64) * stride_index
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
        if NUM_QUERIES > 1 or alibi_slopes is not None or IS_TREE:
            length = tl.load(lengths + tl.maximum(request, 0))
            if MEMBERS > 1:
                length = tl.where(is_prefix, end + NUM_QUERIES, length)  # every query sees all of its keys
            query_positions = length - NUM_QUERIES + queries
            visible_end = tl.minimum(end, length - NUM_QUERIES + (0 if IS_TREE else 1 + AFTER))
        else:
            query_positions = tl.zeros([BLOCK_M], tl.int32) + (end - 1)
            visible_end = end
        if (CHUNK > 0 and (NUM_QUERIES > 1 or MEMBERS > 1)) or (alibi_slopes is not None and MEMBERS > 1):
            own_length = tl.load(lengths + tl.where(in_tile, owner, 0))  # [BLOCK_M]
            query_positions = own_length - NUM_QUERIES + queries
        if CHUNK > 0 and (NUM_QUERIES > 1 or MEMBERS > 1):
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
        slopes = load_slopes(alibi_slopes, heads, in_tile)
        mask_tile = (None, None, None)
        if mask is not None:
            mask_pointers, mask_widths = mask_rows(
                mask, mask_columns, mask_width, stride_mask_h, stride_mask_t, heads, tokens, owner, in_tile
            )
            own_begin = end  # none of a request's queries is among the keys of a shared prefix
            if IS_TREE:
                own_begin = length - NUM_QUERIES
            mask_tile = (mask_pointers, mask_widths, own_begin)
            if (
                WINDOW == 0 and CHUNK == 0 and MEMBERS == 1
            ):  # such multiples: the mask is read in whole vectors
                begin = begin // 16 * 16
                full_end = full_end // 16 * 16
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
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
                slopes,
                mask_tile,
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
                AFTER,
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
    items: Tensor,
    shares: Tensor,
    parts: Tensor,
    split: Tensor,
    members: Tensor | None,
    lengths: Tensor,
    sink_logits: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    mask_columns: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    num_queries: int,
    scale: float,
    shift: int,
    window: int,
    chunk: int,
    after: int,
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
        device,
        together * group,
        together > 1,
        key_dim,
        value_dim,
        q.element_size(),
        0 if mask is None else mask.element_size(),
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
        items,
        shares,
        parts,
        members,
        lengths,
        sink_logits,
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
        index.stride(0),
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
        WINDOW=window,
        CHUNK=chunk,
        # A request's single query is its last token, so it sees all keys anyway.
        AFTER=after if num_queries > 1 else 0,
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
            2**shift, which is not checked. The output of a request of length 0 is zeros.
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
    if plan is not None and (plan.window, plan.chunk, plan.num_queries, len(plan.parts)) != (
        window,
        chunk,
        num_queries,
        len(rows),
    ):
        raise ValueError(
            f"the plan is for {len(plan.parts)} requests of {plan.num_queries} queries with a window of "
            f"{plan.window} and chunks of {plan.chunk}, but the call has {len(rows)} requests of {num_queries} "
            f"queries with a window of {window} and chunks of {chunk}; make a plan for this call"
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
        )
    _decode_attention(
        q,
        kv.k,
        kv.v,
        kv.index,
        plan.items,
        plan.shares,
        plan.parts,
        plan.split,
        plan.members,
        lengths,
        options.sink_logits,
        options.alibi_slopes,
        None if mask is None else mask.for_kernel(),
        None if mask is None else mask.columns,
        out,
        lse,
        num_queries,
        scale,
        kv.shift,
        window,
        chunk,
        options.after,
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
    mask: AttentionMask | None = None,
) -> Tensor:
    """Computes `decode_attention` in plain torch and float64, one request at a time. Reads lengths and rows on
    the host, so on a GPU it synchronises."""
    out = q.new_zeros((*q.shape[:2], kv.v.shape[2]))
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        queries = slice(request * num_queries, (request + 1) * num_queries)
        slots = find_slots_reference(kv.index[row], torch.arange(length, device=q.device), kv.shift)
        out[queries] = attend_reference(
            q[queries],
            kv.k[slots],
            kv.v[slots],
            torch.arange(length - num_queries, length, device=q.device),
            options,
            None if mask is None else mask_reference(mask, queries, request, length),
        ).to(q.dtype)
    return out
