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

The kernel of `prefill_kernel.py` runs wherever Triton does. On compute capability 9 `hopper/prefill_hopper.py`
goes through the same work list, where types, head dim and strides allow.
"""

from functools import cache
from types import ModuleType

import triton
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_inputs import Call
from lightkv.triton_kernels.attention.attention_reference import queries_between, requests_reference
from lightkv.triton_kernels.attention.paged_kv import (
    DEFAULT_OPTIONS,
    RECORDS,
    AttentionOptions,
    HeadShape,
    PagedKV,
)
from lightkv.triton_kernels.attention.records import Outputs, heads_record, shape_record
from lightkv.triton_kernels.attention.variants.variant import bind, limits
from lightkv.triton_kernels.operators import operator

from . import prefill_tuning
from .prefill_combine import combine_tiles, empty_partials
from .prefill_kernel import prefill_kernel
from .prefill_plan import PrefillPlan, prefill_plan


@cache
def _hopper() -> ModuleType | None:
    """Returns the module of the kernel for compute capability 9; None in Triton's interpreter, or where this
    version of Triton has no Gluon."""
    if not isinstance(prefill_kernel, triton.JITFunction):
        return None
    try:
        from lightkv.triton_kernels.attention.prefill.hopper import prefill_hopper
    except ImportError:
        return None
    return prefill_hopper


def _hopper_launch(
    q: Tensor, kv: PagedKV, out: Tensor, options: AttentionOptions, block_m: int
) -> tuple[ModuleType, tuning.Launch] | None:
    """Returns the module `prefill_hopper` and how it computes tiles of `block_m` rows; None if it cannot, as it
    copies 16 bytes at a time, converts no types, and does not know all variants."""
    if not q.dtype == kv.k.dtype == kv.v.dtype:
        return None
    for tensor in (q, kv.k, kv.v, out):
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in tensor.stride()[:2]):
            return None
    device = tuning.device_class(q.device)
    dims = q.shape[2], kv.v.shape[2]
    launch = prefill_tuning.hopper_prefill_launch(device, *dims, q.element_size(), block_m)
    if launch is None or (hopper := _hopper()) is None:
        return None
    return (hopper, launch) if hopper.knows_all(options.variants, device, launch, dims) else None


@operator(
    "prefill_attention",
    writes=("plan", "out", "lse"),  # of the plan its counters
    records=(*RECORDS, PrefillPlan, tuning.Launch),
)
def _prefill_attention(
    q: Tensor, kv: PagedKV, plan: PrefillPlan, out: Tensor, lse: Tensor | None, options: AttentionOptions
) -> None:
    num_shares, num_workers = plan.num_shares, plan.num_workers
    if num_shares == 0:
        return
    cache, index = kv.for_kernels()
    num_kv_heads, value_dim, scale = cache.k.shape[1], out.shape[2], options.scale_for(q.shape[2])
    block_m, block_n, num_warps, num_stages = plan.launch
    partial_out = partial_lse = None
    if num_workers:
        partial_out, partial_lse = empty_partials(num_workers, num_kv_heads, block_m, value_dim, q.device)
    outputs = Outputs(out, out.stride(0), out.stride(1), lse, partial_out, partial_lse)
    hopper = _hopper_launch(q, kv, out, options, block_m)
    if hopper is not None:
        hopper[0].launch_hopper_prefill(q, cache, index, plan, outputs, hopper[1], options)
    else:
        if num_warps & (num_warps - 1):
            raise ValueError(
                f"the plan's tiles of {block_m} rows are those of prefill in fp8, and this call is in "
                f"{q.dtype} at head dim {q.shape[2]}; make a plan for it without `launch`"
            )
        if any(one.loaded_bytes for one in options.variants):
            _, block_n, num_warps, num_stages = prefill_tuning.masked_prefill_launch(plan.launch)
        bound, score_scale = bind(options.variants, scale)
        rows = prefill_tuning.general_rows(block_m)
        prefill_kernel[(num_kv_heads * num_shares * (block_m // rows),)](
            heads_record(q),
            cache,
            index,
            plan.items,
            outputs,
            num_kv_heads,
            score_scale,
            bound,
            shape_record(q, num_kv_heads, value_dim, rows, block_n, options.causal, cache.FORMAT.value),
            PROGRAMS=block_m // rows,
            SHARES=num_workers > 0,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    if partial_out is not None and partial_lse is not None:
        combine_tiles(partial_out, partial_lse, plan.items, out, lse)


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
) -> Tensor:
    """Computes attention of each request's last tokens to all its tokens. Their K/V is in the cache before the
    call.

    The n queries of a request are at its last n positions; each attends to itself and to the tokens before it,
    in a layer that is not causal to those after it, too. The output of a query whose position would be negative
    (more queries than tokens) is zeros if the layer is causal. If it is not, the keys may be those of another
    sequence, of any length.

    Args:
        q: `[T, H, Dk]`, request after request; H is a multiple of num_kv_heads.
        kv, rows, options, out, lse: as in `decode_attention`, for the T queries.
        q_starts: int32 `[B + 1]`: the queries of request b are q[q_starts[b] : q_starts[b + 1]]. Queries from
            q_starts[B] on belong to no request, and their part of the output is not written.
        lengths: int32 `[B]`, the request's tokens in the cache, the queries' own included; at most num_entries
            * 2**page_shift, which is not checked. A lookup that has entries for a number of tokens alone has to
            have them for the windows of all queries, which is not checked either.
        plan: the result of `prefill_plan` for the same rows, q_starts, lengths, limits and shapes; it serves
            all layers of a step, one after the other. If None, a plan is made here.

    Returns:
        `[T, H, Dv]`, `out`.

    Raises:
        ValueError: shapes, strides, dtypes or numbers do not fit.
    """
    num_requests = rows.numel()
    call = Call.of(q, kv, rows, lengths, options, out, lse, q_starts, num_requests)
    check_prefills(call, plan)
    attend_prefills(call, q_starts, plan)
    return call.out


def check_prefills(call: Call, plan: PrefillPlan | None) -> None:
    """Raises ValueError for what prefill alone cannot do, or a plan that is for another call."""
    options = call.options
    call.kv.lookup.check_prefill(options.variants, options.causal)
    if plan is not None:
        plan.check(len(call.rows), options)


def attend_prefills(call: Call, q_starts: Tensor, plan: PrefillPlan | None) -> None:
    """Computes `prefill_attention` of what `check_prefills` has passed."""
    q, kv, rows, lengths, options, out, lse = call
    if plan is None:
        plan = prefill_plan(
            rows,
            q_starts,
            lengths,
            HeadShape.of(q, kv),
            num_tokens=q.shape[0],
            dtype=q.dtype,
            limits=limits(options.variants),
            causal=options.causal,
            layer_format=kv.format,
        )
    _prefill_attention(q, kv, plan, out, lse, options)


def prefill_attention_reference(
    q: Tensor,
    kv: PagedKV,
    rows: Tensor,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Computes `prefill_attention` as `requests_reference`; reads q_starts on the host, too."""
    return requests_reference(q, kv, rows, lengths, options, queries_between(q_starts.tolist()))
