"""Attention of one step that has prefills and decodes: the one call that a layer makes.

The packed queries are first the prefills' tokens, any number per request, then the decodes' tokens, the same
number for each:

    q        ├──── request 0 ────┼─ 1 ─┼────── 2 ──────┼ 3 ┼ 4 ┼ 5 ┼ 6 ┤
             └───────── prefills, by q_starts ─────────┘ └── decodes ──┘

Prefills and decodes each have a work list and kernels of their own, which are launched one after the other
(`prefill_attention.py`, `decode_attention.py`).

A CUDA graph has a fixed number of decodes, and where prefills begin is known on the device alone. With
`decodes_first`, the decodes' queries are the first of q. Prefills are computed after decodes and write their
output over that of unused decodes:

    q        ┤ 3 ┼ 4 ┼ unused ┼ unused ┤
                     ├──── request 0 ──┼─ 1 ─┼────── 2 ──────┤
                  q_starts[0]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.decode.decode_attention import attend_decodes, check_decodes
from lightkv.triton_kernels.attention.decode.decode_plan import DecodePlan, SharedPrefixGroups, decode_plan
from lightkv.triton_kernels.attention.prefill.prefill_attention import attend_prefills, check_prefills
from lightkv.triton_kernels.attention.prefill.prefill_plan import PrefillPlan, prefill_plan
from lightkv.triton_kernels.attention.variants.variant import limits
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat

from .attention_inputs import Call
from .attention_reference import queries_between, requests_reference
from .lookups import TOKEN_TABLE, Lookup
from .paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV


class MixedPlan(NamedTuple):
    """The work lists of a step's prefills and of its decodes; None where there are none."""

    prefill: PrefillPlan | None
    decode: DecodePlan | None


def mixed_plan(
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    heads: HeadShape,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    options: AttentionOptions = DEFAULT_OPTIONS,
    num_queries: int = 1,
    shared_prefixes: SharedPrefixGroups | None = None,
    decodes_first: bool = False,
    layer_format: KVFormat = AS_COMPUTED,
    lookup: Lookup = TOKEN_TABLE,
) -> MixedPlan:
    """Makes the work lists of a step, which serve all layers with these heads and limits.

    Args:
        rows, q_starts, lengths, num_queries, decodes_first: as in `mixed_attention`; read on the device.
        heads: of the layers.
        num_tokens: T of q.
        dtype: of q.
        options: of the layers; what limits the first key that a query sees, and causality count.
        shared_prefixes: of the decodes, which are numbered from 0; as in `decode_plan`.
        layer_format: how the layers' K/V is stored.
        lookup: how the layers find it, which may limit the first key of a decode (`Lookup.limits`).
    """
    num_prefills, num_requests = q_starts.shape[0] - 1, rows.shape[0]
    num_decodes = 0 if decodes_first else num_requests - num_prefills
    prefill = decode = None
    limited = limits(options.variants)
    if num_prefills:
        prefill = prefill_plan(
            rows[:num_prefills],
            q_starts,
            lengths[:num_prefills],
            heads,
            num_tokens=num_tokens - num_decodes * num_queries,
            dtype=dtype,
            limits=limited,
            causal=options.causal,
            layer_format=layer_format,
        )
    if num_requests > num_prefills:
        decode = decode_plan(
            rows[num_prefills:],
            lengths[num_prefills:],
            heads,
            dtype=dtype,
            limits=lookup.limits(limited),
            num_queries=num_queries,
            shared_prefixes=shared_prefixes,
            layer_format=layer_format,
        )
    return MixedPlan(prefill, decode)


def mixed_attention(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    num_queries: int = 1,
    plan: MixedPlan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    decodes_first: bool = False,
) -> Tensor:
    """Computes attention of each request's last tokens to all its tokens. Their K/V is in the cache before the
    call.

    Args:
        q: `[T, H, Dk]`: the queries of P prefills, request after request, then `num_queries` of each of the B -
            P decodes; H is a multiple of num_kv_heads.
        kv, options, out, lse: as in `decode_attention`, for the T queries.
        rows: int32 or int64 `[B]`, each request's row of the index, the prefills first.
        q_starts: int32 `[P + 1]`: the queries of prefill p are q[q_starts[p] : q_starts[p + 1]]. The decodes'
            queries are the last of q, wherever the prefills' end; queries in between belong to no request, and
            their part of the output is not written.
        lengths: int32 `[B]`, tokens in the cache, the queries' own included; at most num_entries * 2**shift,
            which is not checked.
        num_queries: queries of each decode, at its last positions.
        plan: the result of `mixed_plan` for the same rows, q_starts, lengths, limits, num_queries and shapes;
            it serves all layers of a step, one after the other. If None, a plan is made here.
        decodes_first: the decodes' queries are the first of q instead of the last, and q_starts[0] may be any
            of T. A query of both a prefill and a decode gets the output of the prefill.

    Returns:
        `[T, H, Dv]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit; nothing has been launched.
    """
    call = Call.of(q, kv, rows, lengths, options, out, lse, q_starts)
    num_tokens, num_prefills, num_requests = q.shape[0], q_starts.shape[0] - 1, rows.shape[0]
    num_decodes = num_requests - num_prefills
    if not 0 <= num_prefills <= num_requests:
        raise ValueError(
            f"q_starts must have an entry more than there are prefills among {num_requests} requests, got "
            f"{num_prefills + 1} entries"
        )
    num_decoded = num_decodes * num_queries  # tokens
    first_decode = 0 if decodes_first else num_tokens - num_decoded
    if num_queries < 1 or num_decoded > num_tokens or (num_prefills == 0 and num_decoded < num_tokens):
        raise ValueError(
            f"q must hold {num_queries} queries, at least one, for each of {num_decodes} decodes behind those "
            f"of {num_prefills} prefills; got {num_tokens}"
        )
    prefill, decode = (None, None) if plan is None else plan
    decodes = call.of_some(slice(first_decode, first_decode + num_decoded), num_prefills, num_requests)
    prefills = call.of_some(slice(num_tokens if decodes_first else first_decode), 0, num_prefills)
    if num_decodes:
        check_decodes(decodes, num_queries, decode)
    if num_prefills:
        check_prefills(prefills, prefill)
    if num_decodes:
        attend_decodes(decodes, num_queries, decode)
    if num_prefills:
        attend_prefills(prefills, q_starts, prefill)
    return call.out


def mixed_attention_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    num_queries: int = 1,
    decodes_first: bool = False,
) -> Tensor:
    """Computes `mixed_attention` as `requests_reference`; reads q_starts on the host, too."""
    num_decoded = (len(rows) - len(q_starts) + 1) * num_queries
    first_decode = 0 if decodes_first else len(q) - num_decoded
    decodes = queries_between(range(first_decode, first_decode + num_decoded + 1, num_queries))
    return requests_reference(q, kv, rows, lengths, options, [*queries_between(q_starts.tolist()), *decodes])
