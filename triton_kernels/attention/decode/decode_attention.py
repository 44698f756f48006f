"""Decode attention: each request's newest tokens (one or a few) attend to its K/V, which is found by an index.

A program attends to a share of all the batch's keys (`decode_plan.py`), item by item. An item is some keys of
one request, or of a prefix that several requests share. If a request is a single item, its output is written at
once. Otherwise each item writes a part (a normalised partial output and the log-sum-exp of its scores, base 2),
and a second kernel combines the parts (`decode_combine.py`).

The keys of an item are read once for all rows of its tile:

    tile rows   ├─ heads of query 0 ─┼─ heads of query 1 ─┼ … ┼─ heads of query 0 ─┼ …
                ├─────────────────── member 0 ────────────────┼─────── member 1 ───── …

The heads share a K/V head; the members are the requests that share the item's prefix.

The loop over keys is in `attend_keys.py`.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_inputs import Call, check_plan
from lightkv.triton_kernels.attention.attention_reference import queries_between, requests_reference
from lightkv.triton_kernels.attention.paged_kv import (
    DEFAULT_OPTIONS,
    RECORDS,
    AttentionOptions,
    HeadShape,
    PagedKV,
)
from lightkv.triton_kernels.attention.records import Outputs, Together, heads_record, shape_record
from lightkv.triton_kernels.attention.variants.variant import Variant, bind, limits
from lightkv.triton_kernels.operators import operator

from . import decode_tuning
from .decode_combine import combine_partials
from .decode_kernel import decode_kernel
from .decode_plan import DecodePlan, decode_plan


@operator("decode_attention", writes=("out", "lse"), records=(*RECORDS, DecodePlan))
def _decode_attention(
    q: Tensor,
    kv: PagedKV,
    plan: DecodePlan,
    lengths: Tensor,
    out: Tensor,
    lse: Tensor | None,
    num_queries: int,
    options: AttentionOptions,
) -> None:
    num_tokens, num_heads = q.shape[:2]
    if num_tokens == 0:
        return
    value_dim, used = out.shape[2], options.variants
    cache, index = kv.for_kernels()
    together = plan.num_members * num_queries
    is_aligned = not limits(used) and plan.num_members == 1
    if together == 1:  # the plan has applied what limits the first key
        used = tuple(one for one in used if not one.flags.has_first_key)
    bound, score_scale = bind(used, options.scale_for(q.shape[2]))
    launch, launch_options = _launch(q, kv, together, used)
    # A request's single query is its last token, so it sees all keys anyway.
    causal = options.causal or num_queries == 1
    tiles = launch.block_m, launch.block_n
    shape = shape_record(q, cache.k.shape[1], value_dim, *tiles, causal, cache.FORMAT.value)
    partial_shape = plan.num_parts, num_queries * num_heads
    partial_lse = torch.empty(partial_shape, dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*partial_shape, value_dim), dtype=torch.float32, device=q.device)
    decode_kernel[(cache.k.shape[1], plan.shares.shape[0] - 1)](
        heads_record(q),
        cache,
        index,
        plan.items,
        plan.shares,
        plan.parts,
        plan.members,
        lengths,
        plan.own_parts,
        Outputs(out, out.stride(0), out.stride(1), lse, partial_out, partial_lse),
        score_scale,
        bound,
        Together(tl.constexpr(num_queries), tl.constexpr(plan.num_members), tl.constexpr(is_aligned)),
        shape,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch_options,
    )
    combine_partials(partial_out, partial_lse, plan, out, lse, num_queries)


def _launch(
    q: Tensor, kv: PagedKV, together: int, variants: tuple[Variant, ...]
) -> tuple[tuning.Launch, dict[str, Any]]:
    """Returns the tiles of a launch, and Triton's options for it. `together`: queries that share an item."""
    device, elements = tuning.device_class(q.device), kv.format.elements
    num_rows = together * q.shape[1] // kv.k.shape[1]
    dims = kv.key_dim, kv.value_dim
    grouped = max(map(elements.groups, dims)) > 1
    launch = decode_tuning.decode_launch(
        device,
        num_rows,
        together > 1,
        *dims,
        q.element_size(),
        elements.bits,
        max((one.loaded_bytes for one in variants), default=0),
        grouped,
    )
    options = tuning.early_options(q.device)
    if options["EARLY"] and elements.is_quantised:
        options["maxnreg"] = decode_tuning.quantised_decode(
            num_rows, together > 1, *dims, elements.bits, grouped
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
            2**page_shift, which is not checked, or any number where the lookup has entries for any. The output
            of a request of length 0 is zeros.
        options: the scale, whether the layer is causal, and its variants. If it is not causal, the keys may be
            those of another sequence, of any length.
        num_queries: queries of each request, at its last positions: 1, or the number of drafted tokens to
            verify and one more. A query whose position would be negative gets zeros.
        plan: the result of `decode_plan` for the same rows, lengths and num_queries, and for the layer's limits
            as the lookup changes them (`Lookup.limits`). One plan serves all layers of a step, and contains the
            requests' shared prefixes, if there are any. If None, a plan without shared prefixes is made.
        out: `[B * num_queries, H, Dv]` to write to; allocated in the dtype of q if None.
        lse: float32 `[B * num_queries, H]`, contiguous, to write the log-sum-exp of the scores to, in base 2,
            the head's sink included; -inf where a query sees no key and has no sink. Not written if None.

    Returns:
        `[B * num_queries, H, Dv]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    call = Call.of(q, kv, rows, lengths, options, out, lse)
    if num_queries < 1 or q.shape[0] != rows.shape[0] * num_queries:
        raise ValueError(
            f"q must hold {num_queries} queries for each of {rows.shape[0]} rows, at least one; "
            f"got {q.shape[0]}"
        )
    check_decodes(call, num_queries, plan)
    attend_decodes(call, num_queries, plan)
    return call.out


def check_decodes(call: Call, num_queries: int, plan: DecodePlan | None) -> None:
    """Raises ValueError for what decode alone cannot do, or a plan that is for another call."""
    q, kv, variants = call.q, call.kv, call.options.variants
    group = q.shape[1] // kv.k.shape[1]
    if group * num_queries > decode_tuning.MOST_DECODE_ROWS:
        raise ValueError(
            f"{num_queries} queries of {group} heads to a K/V head are {group * num_queries} rows, and a tile "
            f"holds {decode_tuning.MOST_DECODE_ROWS}; use prefill_attention, which takes any number of queries"
        )
    kv.lookup.check_decode(q, variants, kv.format)
    if plan is not None:
        asked = len(call.rows), num_queries, kv.lookup.limits(limits(variants))
        check_plan((len(plan.parts), plan.num_queries, plan.limits), asked, "requests, queries, limits")


def attend_decodes(call: Call, num_queries: int, plan: DecodePlan | None) -> None:
    """Computes `decode_attention` of what `check_decodes` has passed."""
    q, kv, rows, lengths, options, out, lse = call
    own_limits = limits(options.variants)
    if plan is None:
        plan = decode_plan(
            rows,
            lengths,
            HeadShape.of(q, kv),
            dtype=q.dtype,
            limits=kv.lookup.limits(own_limits),
            num_queries=num_queries,
            layer_format=kv.format,
        )
    kv = kv._replace(lookup=kv.lookup.of_layer(own_limits))
    _decode_attention(q, kv, plan, lengths, out, lse, num_queries, options)


def decode_attention_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    num_queries: int = 1,
) -> Tensor:
    """Computes `decode_attention` as `requests_reference`."""
    queries = queries_between(range(0, len(q) + 1, num_queries))
    return requests_reference(q, kv, rows, lengths, options, queries)
