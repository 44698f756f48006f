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

from collections.abc import Sequence
from typing import Any, Optional

import torch
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_inputs import check_attention_inputs
from lightkv.triton_kernels.attention.attention_reference import attend_reference, slots_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.records import (
    FlatKV,
    Outputs,
    Together,
    flatten_kv,
    heads_record,
    kv_records,
    shape_record,
)
from lightkv.triton_kernels.attention.variants import VARIANTS
from lightkv.triton_kernels.attention.variants.variant import (
    Flat,
    Scored,
    Variant,
    bind,
    flatten,
    limits,
    rebuild,
)
from lightkv.triton_kernels.layout.ring import Ring
from lightkv.triton_kernels.quantised.unpack import most_warps

from .decode_combine import combine_parts
from .decode_kernel import decode_kernel
from .decode_plan import DecodePlan, decode_plan, num_programs_for
from .decode_sinks import RingSinks, SinkRotation, attend_ring_reference, check_rotation


@torch.library.custom_op("lightkv::decode_attention", mutates_args=("out", "lse"))
def _decode_attention(
    q: Tensor,
    kv_tensors: Sequence[Optional[Tensor]],  # noqa: UP045  # the form that torch reads
    kv_numbers: Sequence[int],
    items: Tensor,
    shares: Tensor,
    parts: Tensor,
    split: Tensor,
    members: Tensor | None,
    lengths: Tensor,
    variants: str,
    variant_tensors: Sequence[Tensor],
    variant_numbers: Sequence[float],
    sink_cos: Tensor | None,
    sink_sin: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    num_queries: int,
    scale: float,
    causal: bool,
    sees_sinks: bool,
) -> None:
    num_tokens, num_heads = q.shape[:2]
    if num_tokens == 0:
        return
    flat, value_dim = FlatKV(list(kv_tensors), list(kv_numbers)), out.shape[2]
    cache, index = kv_records(flat)
    layer_format, element_bits = kv_numbers[3], kv_numbers[4:]
    plan = DecodePlan(items, shares, parts, split, members)
    together = plan.num_members * num_queries
    used = rebuild(Flat(variants, list(variant_tensors), list(variant_numbers)), VARIANTS)
    is_aligned = not limits(used) and plan.num_members == 1
    if together == 1:  # the plan has applied what limits the first key
        used = tuple(one for one in used if not one.flags.has_first_key)
    bound, score_scale = bind(used, scale)
    launch, options = _launch(q, value_dim, cache.k.shape[1], together, layer_format, element_bits, used)
    shape = shape_record(q, flat, value_dim, launch.block_m, launch.block_n, causal)
    partial_shape = plan.num_parts, num_queries * num_heads
    partial_lse = torch.empty(partial_shape, dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*partial_shape, value_dim), dtype=torch.float32, device=q.device)
    num_pairs = 0 if sink_cos is None else sink_cos.shape[1]
    sinks = RingSinks(sink_cos, sink_sin, tl.constexpr(sees_sinks), tl.constexpr(num_pairs))
    decode_kernel[(cache.k.shape[1], shares.shape[0] - 1)](
        heads_record(q),
        cache,
        index,
        items,
        shares,
        parts,
        members,
        lengths,
        plan.own_parts,
        Outputs(out, out.stride(0), out.stride(1), lse, partial_out, partial_lse),
        score_scale,
        bound,
        sinks,
        Together(tl.constexpr(num_queries), tl.constexpr(plan.num_members), tl.constexpr(is_aligned)),
        shape,
        EARLY="launch_pdl" in options,
        num_warps=min(launch.num_warps, most_warps(layer_format)),
        num_stages=launch.num_stages,
        **options,
    )
    combine_parts(partial_out, partial_lse, plan, out, lse, num_queries)


_decode_attention.register_fake(lambda *_: None)  # the outputs are arguments


def _launch(
    q: Tensor,
    value_dim: int,
    num_kv_heads: int,
    together: int,
    layer_format: int,
    element_bits: Sequence[int],
    variants: Sequence[Variant],
) -> tuple[tuning.Launch, dict[str, Any]]:
    """Returns the tiles of a launch, and Triton's options for it. `together`: queries that share an item."""
    device, num_rows, key_dim = (
        tuning.device_class(q.device),
        together * q.shape[1] // num_kv_heads,
        q.shape[2],
    )
    grouped = max(layer_format >> 8 & 4095, layer_format >> 20) > 1
    launch = tuning.decode_launch(
        device,
        num_rows,
        together > 1,
        key_dim,
        value_dim,
        q.element_size(),
        element_bits,
        max((one.loaded_bytes for one in variants), default=0),
        grouped,
    )
    options: dict[str, Any] = {}
    if tuning.has_early_launch(device):
        options["launch_pdl"] = True
        if min(element_bits) < 16:
            options["maxnreg"] = tuning.quantised_decode(
                num_rows, together > 1, key_dim, value_dim, element_bits, grouped
            ).max_registers
    return launch, options


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
        options: the scale, whether the layer is causal, and its variants. If it is not causal, the keys may be
            those of another sequence, of any length.
        num_queries: queries of each request, at its last positions: 1, or the number of drafted tokens to
            verify and one more. A query whose position would be negative gets zeros.
        plan: the result of `decode_plan` for the same rows, lengths, limits and num_queries. One plan serves
            all layers of a step, and contains the requests' shared prefixes, if there are any. If None, a plan
            without shared prefixes is made.
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
    limited = limits(options.variants)
    group = q.shape[1] // kv.k.shape[1]
    if group * num_queries > tuning.MOST_DECODE_ROWS:
        raise ValueError(
            f"{num_queries} queries of {group} heads to a K/V head are {group * num_queries} rows, and a tile "
            f"holds {tuning.MOST_DECODE_ROWS}; use prefill_attention, which takes any number of queries"
        )
    ring = None if limited else kv.ring  # whose sinks and window the queries see
    _check_ring(ring, q, kv, options, sink_rotation)
    if plan is not None and (plan.limits, plan.num_queries, len(plan.parts), plan.ring) != (
        limited,
        num_queries,
        len(rows),
        ring,
    ):
        raise ValueError(
            f"the plan is for {len(plan.parts)} requests of {plan.num_queries} queries with {plan.limits}, but "
            f"the call has {len(rows)} requests of {num_queries} queries with {limited} ({plan.ring} and "
            f"{ring}); make a plan for this call"
        )
    if out is None:
        out = q.new_empty((*q.shape[:2], kv.value_dim))
    if plan is None:
        plan = decode_plan(
            rows,
            lengths,
            num_kv_heads=kv.k.shape[1],
            limits=limited,
            num_queries=num_queries,
            key_bytes=HeadShape.of(q, kv).key_bytes(q.dtype),
            num_programs=num_programs_for(HeadShape.of(q, kv), kv.format, num_queries),
            ring=ring,
        )
    _decode_attention(
        q,
        *flatten_kv(kv),
        plan.items,
        plan.shares,
        plan.parts,
        plan.split,
        plan.members,
        lengths,
        *flatten(options.variants),
        *(sink_rotation or (None, None)),
        out,
        lse,
        num_queries,
        scale,
        # A request's single query is its last token, so it sees all keys anyway.
        options.causal or num_queries == 1,
        ring is not None and ring.sinks > 0,
    )
    return out


def _check_ring(
    ring: Ring | None, q: Tensor, kv: PagedKV, options: AttentionOptions, rotation: SinkRotation | None
) -> None:
    """Raises ValueError where the layer, which sees `ring`, or the rotation of its sinks does not fit it."""
    if rotation is not None:
        check_rotation(rotation, len(q), q.shape[2])
        if ring is None or not ring.sinks:
            raise ValueError("a rotation for sinks, but the layer sees no ring's sinks; pass none")
        if kv.format.k.is_rotated:
            raise ValueError(
                "a rotation for sinks of keys that are rotated by a Hadamard matrix; choose another format of K"
            )
    if ring is None:
        return
    for one in options.variants:
        flags = one.flags
        if flags.has_load or flags.hides_own or (ring.sinks and flags.reads_positions):
            raise ValueError(
                f"{ring} with {type(one).__name__}, which counts true positions; leave one of them out"
            )


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
    out = q.new_zeros((*q.shape[:2], kv.value_dim))
    for request, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        queries = slice(request * num_queries, (request + 1) * num_queries)
        if kv.ring is not None and not limits(options.variants):
            angles = (
                None if sink_rotation is None else (sink_rotation.cos[request], sink_rotation.sin[request])
            )
            out[queries] = attend_ring_reference(q[queries], kv, row, length, angles, options).to(q.dtype)
            continue
        slots = slots_reference(kv, row, torch.arange(length, device=q.device))
        out[queries] = attend_reference(
            q[queries],
            *kv.read(slots),
            options,
            Scored.of_last(queries, request, length, q.device),
        ).to(q.dtype)
    return out
