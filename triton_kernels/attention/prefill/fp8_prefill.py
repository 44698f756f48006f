"""Prefill attention in fp8: q, K and V in e4m3, both products on the tensor cores in e4m3, and, if asked for,
an output in e4m3.

    q       ≈ q_element * q_scale              one scale for the tensor
    k, v    ≈ element * scales[head]           a K scale and a V scale for each K/V head
    out     ≈ out_element * out_scale          if the output is e4m3

The first part of a layer is `restore_kv`, which lays K and V out as the products need them.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_inputs import REQUESTS
from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.records import Outputs
from lightkv.triton_kernels.attention.variants.variant import Scored, Variant, limits
from lightkv.triton_kernels.checks import Tensors

from . import prefill_tuning
from .prefill_combine import combine_tiles, empty_partials
from .prefill_plan import PrefillPlan, prefill_plan
from .restore_kv import FP8, Scratch

HEAD_DIMS = (64, 128)
LARGEST = 448.0  # of e4m3
_LARGEST = tl.constexpr(LARGEST)
_TAKEN = Tensors(
    lse="contiguous float32 [T, H]",
    q="float8_e4m3fn [T, H, D] with a last stride of 1",
    out="floats [T, H, D] with a last stride of 1",
)


def fp8_prefill_reason(device: torch.device, heads: HeadShape) -> str | None:
    """Returns why `fp8_prefill_attention` cannot run for such heads on a device; None where it can."""
    if device.type != "cuda" or tuning.device_class(device).major != 9:
        return f"it runs on GPUs of compute capability 9 (Hopper), and {device} is none"
    if heads.key_dim not in HEAD_DIMS or heads.value_dim != heads.key_dim:
        return f"it is for heads of {HEAD_DIMS} dims, and these have {heads.key_dim} and {heads.value_dim}"
    try:
        # The import takes time, and needs Gluon.
        from lightkv.triton_kernels.attention.prefill.hopper import prefill_fp8_hopper  # noqa: F401
    except ImportError as error:
        return f"it is written in Triton's Gluon, which cannot be imported ({error})"
    return None


def unknown_in_fp8(variants: Sequence[Variant]) -> list[str]:
    """Returns the names of the variants that `fp8_prefill_attention` does not know."""
    return [type(one).__name__ for one in variants if not one.runs_on_hopper(variants, 8)]


def fp8_prefill_attention(
    q: Tensor,
    scratch: Scratch,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    q_scale: float = 1.0,
    out: Tensor,
    out_scale: float = 1.0,
    plan: PrefillPlan | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Computes `prefill_attention` of requests whose keys are in `scratch`, in fp8.

    Args:
        q: e4m3 `[T, H, D]`, strides multiples of 16 except the last, which is 1; D is 64 or 128.
        scratch: filled; its requests are those of `lengths`, in their order.
        q_starts, lengths, options, lse: as in `prefill_attention`.
        q_scale: of q.
        out: `[T, H, D]` to write to, of a 16-bit type, float32 or e4m3.
        out_scale: an output of e4m3 is in units of it, and bounded; not used for other types.
        plan: the result of `prefill_plan` for 16-bit q, whose rows are 0, 1, 2 … for the requests; made here if
            None.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or the device do not fit.
    """
    heads = HeadShape(q.shape[1], scratch.k.shape[1], q.shape[2], scratch.v.shape[1])
    of_requests = {"q_starts": q_starts, "lengths": lengths}
    num_requests = len(scratch.begins)
    REQUESTS.check({"B": num_requests, "P": num_requests}, **of_requests)
    sizes = {"T": q.shape[0], "H": heads.num_heads, "D": scratch.k.shape[2]}
    _TAKEN.check(sizes, q=q, out=out, lse=lse)
    _check(q, out, heads, options, (q_scale, out_scale))
    if plan is not None:
        plan.check(num_requests, options)
    if reason := fp8_prefill_reason(q.device, heads):
        raise ValueError(f"prefill in fp8 cannot run: {reason}; use prefill_attention")
    launch = prefill_tuning.fp8_prefill_launch(heads.key_dim)
    if plan is None:
        plan = prefill_plan(
            torch.arange(num_requests, device=q.device),
            q_starts,
            lengths,
            heads,
            num_tokens=len(q),
            dtype=torch.bfloat16,
            limits=limits(options.variants),
            causal=options.causal,
            launch=launch,
        )
    if plan.launch.block_m != launch.block_m:
        raise ValueError(
            f"the plan has tiles of {plan.launch.block_m} rows, and prefill in fp8 {launch.block_m}; make it "
            "with the launch of `prefill_tuning.fp8_prefill_launch`"
        )
    if plan.num_shares == 0:
        return out
    # Triton's Gluon, which the kernel is written in, needs a GPU, and its import takes time.
    from lightkv.triton_kernels.attention.prefill.hopper.prefill_fp8_hopper import (
        Fp8Keys,
        Fp8Scales,
        launch_fp8_prefill,
    )

    partial_out = partial_lse = None
    if plan.num_workers:
        partial_out, partial_lse = empty_partials(
            plan.num_workers, heads.num_kv_heads, plan.launch.block_m, heads.value_dim, q.device
        )
    launch_fp8_prefill(
        q,
        Fp8Keys(scratch.k, scratch.v, scratch.begins, scratch.k.stride(0), scratch.v.stride(1)),
        plan,
        Outputs(out, out.stride(0), out.stride(1), lse, partial_out, partial_lse),
        launch,
        Fp8Scales(scratch.scales, q_scale, 1.0 / out_scale if out.dtype == FP8 else 1.0),
        options,
    )
    if partial_out is not None and partial_lse is not None:
        combine_tiles(partial_out, partial_lse, plan.items, out, lse)
    return out


def _check(
    q: Tensor, out: Tensor, heads: HeadShape, options: AttentionOptions, scales: tuple[float, float]
) -> None:
    """Raises ValueError for numbers and variants that the kernel does not take. `scales`: of q and of `out`."""
    if unknown := unknown_in_fp8(options.variants):
        raise ValueError(f"prefill in fp8 does not know {', '.join(unknown)}; use prefill_attention")
    if not all(0 < scale < math.inf for scale in scales):
        raise ValueError(
            f"scales must be finite and above 0, got {scales[0]} of q and {scales[1]} of the output"
        )
    multiples = *q.stride()[:2], *out.stride()[:2], q.data_ptr()
    if heads.num_heads % heads.num_kv_heads or any(one % 16 for one in multiples):
        raise ValueError(
            f"{heads.num_heads} heads of q must be a multiple of {heads.num_kv_heads}, and strides of q and "
            f"out and the address of q multiples of 16; got {multiples}"
        )


def fp8_prefill_attention_reference(
    q: Tensor,
    scratch: Scratch,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions = DEFAULT_OPTIONS,
    *,
    q_scale: float = 1.0,
    out: Tensor,
    out_scale: float = 1.0,
) -> Tensor:
    """Computes `fp8_prefill_attention` in float64, with weights that are not rounded. Synchronises."""
    starts = q_starts.tolist()
    for request, length in enumerate(lengths.tolist()):
        queries = slice(starts[request], starts[request + 1])
        scored = Scored.of_last(queries, request, length, q.device)
        found = attend_reference(
            q[queries].float() * q_scale, *scratch.read(request, length), options, scored
        )
        out[queries] = to_fp8_reference(found, out_scale) if out.dtype == FP8 else found.to(out.dtype)
    return out


def to_fp8_reference(x: Tensor, scale: float) -> Tensor:
    """Returns x in e4m3 in units of `scale`, rounded to even and bounded."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


@triton.jit(do_not_specialize=["num_rows"])
def _quantise_kernel(
    x, out, num_rows, scale, stride_t, stride_h, H: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (dims < D)[None, :]
    source = x + (rows // H).to(tl.int64)[:, None] * stride_t + (rows % H)[:, None] * stride_h + dims[None, :]
    kind: tl.constexpr = out.dtype.element_ty
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32) / scale
    values = tl.clamp(values, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL).to(kind)
    tl.store(out + rows.to(tl.int64)[:, None] * D + dims[None, :], values, mask=mask)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """Returns heads `[T, H, D]`, whose last stride is 1, in e4m3 in units of `scale`, contiguous."""
    num_tokens, num_heads, dim = x.shape
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    block_d = tuning.padded_dim(dim)
    block_r = max(1, 4096 // block_d)
    if num_tokens:
        _quantise_kernel[(triton.cdiv(num_tokens * num_heads, block_r),)](
            x, out, num_tokens * num_heads, scale, *x.stride()[:2], num_heads, dim, block_r, block_d
        )
    return out
