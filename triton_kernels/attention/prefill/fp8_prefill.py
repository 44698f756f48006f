"""Prefill attention in fp8: q, K and V in e4m3, both products on the tensor cores in e4m3, and, if asked for,
an output in e4m3.

    q       ≈ q_element * q_scale              one scale for the tensor
    k, v    ≈ element * scales[head]           a K scale and a V scale for each K/V head
    out     ≈ out_element * out_scale          if the output is e4m3

The first part of a layer is `fill_fp8_scratch`, which lays K and V out as the products need them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.prefill.hopper.hopper_features import FP8_VARIANTS
from lightkv.triton_kernels.attention.records import Outputs
from lightkv.triton_kernels.attention.variants.variant import Scored, Variant, limits

from . import prefill_tuning
from .fp8_scratch import Fp8Scratch, to_fp8_reference
from .prefill_combine import combine_tiles, empty_partials
from .prefill_plan import PrefillPlan, prefill_plan

HEAD_DIMS = (64, 128)
_FP8 = torch.float8_e4m3fn


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
    return [type(one).__name__ for one in variants if not isinstance(one, FP8_VARIANTS)]


def fp8_prefill_attention(
    q: Tensor,
    scratch: Fp8Scratch,
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
    if unknown := unknown_in_fp8(options.variants):
        raise ValueError(f"prefill in fp8 does not know {', '.join(unknown)}; use prefill_attention")
    heads = HeadShape(q.shape[1], scratch.k.shape[1], q.shape[2], scratch.v.shape[1])
    _check_requests(q, scratch, q_starts, lengths, options, plan, lse)
    if not (0 < q_scale < math.inf and 0 < out_scale < math.inf):
        raise ValueError(
            f"scales must be finite and above 0, got {q_scale} of q and {out_scale} of the output"
        )
    strides = *q.stride()[:2], *out.stride()[:2]
    if q.dtype != _FP8 or q.shape[2] != scratch.k.shape[2] or heads.num_heads % heads.num_kv_heads:
        raise ValueError(
            f"q must be e4m3 [T, H, {scratch.k.shape[2]}] with H a multiple of {heads.num_kv_heads}, got "
            f"{q.dtype} {tuple(q.shape)}; to_fp8 rounds it"
        )
    if (
        out.shape != q.shape
        or any(stride % 16 for stride in strides)
        or out.stride(2) != 1
        or q.stride(2) != 1
        or q.data_ptr() % 16
    ):
        raise ValueError(
            f"out must be {tuple(q.shape)}, strides multiples of 16 except the last, which is 1, and q at a "
            f"multiple of 16 bytes; got {tuple(out.shape)} with {out.stride()}, and q with {q.stride()} at "
            f"{q.data_ptr()}"
        )
    if reason := fp8_prefill_reason(q.device, heads):
        raise ValueError(f"prefill in fp8 cannot run: {reason}; use prefill_attention")
    if plan is None:
        plan = prefill_plan(
            torch.arange(len(lengths), device=q.device),
            q_starts,
            lengths,
            heads,
            num_tokens=len(q),
            dtype=torch.bfloat16,
            limits=limits(options.variants),
            causal=options.causal,
            launch=prefill_tuning.fp8_prefill_launch(heads.key_dim),
        )
    launch = prefill_tuning.fp8_prefill_launch(heads.key_dim)
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
        Fp8Scales(scratch.scales, q_scale, 1.0 / out_scale if out.dtype == _FP8 else 1.0),
        options,
    )
    if partial_out is not None and partial_lse is not None:
        combine_tiles(partial_out, partial_lse, plan.items, out, lse)
    return out


def _check_requests(
    q: Tensor,
    scratch: Fp8Scratch,
    q_starts: Tensor,
    lengths: Tensor,
    options: AttentionOptions,
    plan: PrefillPlan | None,
    lse: Tensor | None,
) -> None:
    """Raises ValueError where what describes the requests does not fit the scratch, q or the plan."""
    num_requests = len(scratch.begins)
    for name, tensor, count in (("q_starts", q_starts, num_requests + 1), ("lengths", lengths, num_requests)):
        if tensor.dtype != torch.int32 or tensor.shape != (count,) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 [{count}], as the scratch has {num_requests} requests; got "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    if lse is not None and (
        lse.dtype != torch.float32 or lse.shape != q.shape[:2] or not lse.is_contiguous()
    ):
        raise ValueError(
            f"lse must be contiguous float32 {tuple(q.shape[:2])}, got {lse.dtype} {tuple(lse.shape)}"
        )
    if plan is None:
        return
    asked = num_requests, limits(options.variants), options.causal
    made = plan.num_requests, plan.limits, plan.causal
    if made != asked:
        raise ValueError(
            f"the plan is for (requests, limits, causal) {made}, and the call has "
            f"{asked}; make a plan for this call"
        )


def fp8_prefill_attention_reference(
    q: Tensor,
    scratch: Fp8Scratch,
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
        out[queries] = to_fp8_reference(found, out_scale) if out.dtype == _FP8 else found.to(out.dtype)
    return out
