"""The second half of decode: adds up the partial outputs of each request that is in several parts, with
weights.

A part is a normalised output and the log-sum-exp of its scores (base 2). With m the largest log-sum-exp, a
part's weight is 2**(lse - m). The plan says where a request's parts are (`decode_plan.py`); those of its shared
prefix have the parts of the other members in between:

    parts      │ m0 m1 m2 │ m0 m1 m2 │ …  │ own 0 │ own 0 │ own 1 │ …
    request 0    ▲          ▲                ▲       ▲               with 3 members, of which it is the first
"""

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.merge_states import merge_states

from . import decode_tuning
from .decode_plan import PART_FIELDS, DecodePlan


@triton.jit(do_not_specialize_on_alignment=["parts", "split"])
def _combine_kernel(
    partial_out,  # [num_parts, num_queries * H, DV] float32
    partial_lse,  # [num_parts, num_queries * H] float32, base 2
    parts,  # [B, 4]
    split,  # [n]
    out,
    lse,  # [B * num_queries, H] float32, base 2
    stride_out_b,
    stride_out_h,
    NUM_QUERIES: tl.constexpr,
    MEMBERS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1)
    num_heads = tl.num_programs(0)
    # The plan was complete before attention began, so only the parts have to be waited for.
    request = tl.load(split + tl.program_id(2)).to(tl.int64)
    of_request = parts + request * PART_FIELDS
    first = tl.load(of_request, mask=request >= 0, other=0)
    num_own = tl.load(of_request + 1, mask=request >= 0, other=0)
    num_parts = num_own
    if MEMBERS > 1:
        first_of_prefix = tl.load(of_request + 2, mask=request >= 0, other=0)
        num_parts += tl.load(of_request + 3, mask=request >= 0, other=0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if request < 0:
        return
    token = request * NUM_QUERIES + query

    dims = tl.arange(0, BLOCK_DV)
    peak = -1.0e30
    total = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        rank = start + tl.arange(0, BLOCK_P)  # [BLOCK_P], among the request's parts
        is_part = rank < num_parts
        part = first + rank
        if MEMBERS > 1:
            part = tl.where(rank < num_own, part, first_of_prefix + (rank - num_own) * MEMBERS)
        partials = (part.to(tl.int64) * NUM_QUERIES + query) * num_heads + head
        part_lse = tl.load(partial_lse + partials, mask=is_part, other=float("-inf"))
        tile = tl.load(
            partial_out + partials[:, None] * DV + dims[None, :],
            mask=is_part[:, None] & (dims < DV)[None, :],
            other=0.0,
        )  # [BLOCK_P, BLOCK_DV]
        new_peak = tl.maximum(peak, tl.max(part_lse, 0))
        weights = tl.exp2(part_lse - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * tile, 0)
        peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(
        out + token * stride_out_b + head * stride_out_h + dims, acc.to(out.dtype.element_ty), mask=dims < DV
    )
    if HAS_LSE:
        tl.store(lse + token * num_heads + head, peak + tl.log2(total))


def combine_partials(
    partial_out: Tensor,
    partial_lse: Tensor,
    plan: DecodePlan,
    out: Tensor,
    lse: Tensor | None,
    num_queries: int,
) -> None:
    """Writes the outputs of the requests that have several parts in the plan.

    Args:
        partial_out: float32 `[plan.num_parts, num_queries * H, Dv]`, contiguous.
        partial_lse: float32 `[plan.num_parts, num_queries * H]`, contiguous; -inf where a query saw no key.
        plan: the plan of the step.
        out: `[B * num_queries, H, Dv]`, to write to.
        lse: float32 `[B * num_queries, H]`, contiguous, to write the log-sum-exp of all parts to, in base 2; or
            None.
        num_queries: queries of each request.
    """
    num_heads, value_dim = out.shape[1:]
    launch = decode_tuning.combine_launch(out.shape[0] // num_queries)
    _combine_kernel[(num_heads, num_queries, plan.split.shape[0])](
        partial_out,
        partial_lse,
        plan.parts,
        plan.split,
        out,
        lse,
        *out.stride()[:2],
        NUM_QUERIES=num_queries,
        MEMBERS=plan.num_members,
        DV=value_dim,
        BLOCK_DV=tuning.padded_dim(value_dim),
        BLOCK_P=launch.block_n,
        HAS_LSE=lse is not None,
        num_warps=launch.num_warps,
        **tuning.early_options(out.device),
    )


def combine_parts_reference(
    partial_out: Tensor, partial_lse: Tensor, plan: DecodePlan, num_queries: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """Computes `combine_partials` in plain torch: for each request that has several parts, its output
    `[num_queries, H, Dv]` and log-sum-exp `[num_queries, H]`, float32."""
    combined = {}
    for request, (first, count, first_of_prefix, of_prefix) in enumerate(plan.parts.tolist()):
        if count + of_prefix > 1:
            chosen = [*range(first, first + count)]
            chosen += [first_of_prefix + rank * plan.num_members for rank in range(of_prefix)]
            part_lse = partial_lse[chosen].unflatten(1, (num_queries, -1))  # [parts, num_queries, H]
            part_out = partial_out[chosen].unflatten(1, (num_queries, -1))
            combined[request] = merge_states(part_out, part_lse)
    return combined
