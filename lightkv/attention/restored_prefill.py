"""Prefill over quantised K/V: the keys of a step's prefills are restored to a scratch once in each layer, and
the kernels for 16 bits read them there.

A scratch has room for `capacity` tokens. Whether a step's keys fit is known on the device alone, so both ways
are launched, and the queries of the one that is not taken are none: all begin where the last one ends.

    keys fit       q_starts of the scratch: 0 5 9      of the pool: 9 9 9
    they do not                             9 9 9                   0 5 9

Where a layer computes prefill in fp8, the scratch holds e4m3, as the pool does, and queries are rounded to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.lookups import CONTIGUOUS
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.fp8_prefill import fp8_prefill_attention, to_fp8
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention
from lightkv.triton_kernels.attention.prefill.prefill_plan import PrefillPlan, prefill_plan
from lightkv.triton_kernels.attention.prefill.restore_kv import ALIGNMENT, FP8, Scratch, restore_kv
from lightkv.triton_kernels.attention.variants.variant import limits

SCRATCH_BYTES = 256 * 2**20


def scratch_tokens(heads: HeadShape, dtype: torch.dtype) -> int:
    """Returns the tokens of a scratch of `SCRATCH_BYTES`, whose elements are of `dtype`."""
    tokens = SCRATCH_BYTES // (heads.num_kv_heads * heads.key_bytes(dtype))
    return tokens // ALIGNMENT * ALIGNMENT if dtype.itemsize == 1 else tokens


class RestoredPrefill(NamedTuple):
    """What the layers of a step share.

    `begins`: int32 `[P]`, where each prefill's keys begin in the scratch; `lengths`, `q_starts`, `plan`: of
    prefill over the scratch; `pool_starts`: int32 `[P + 1]`, q_starts of prefill over the pool.
    """

    capacity: int
    rows: Tensor
    begins: Tensor
    lengths: Tensor
    q_starts: Tensor
    pool_starts: Tensor
    plan: PrefillPlan

    @classmethod
    def make(
        cls,
        rows: Tensor,
        lengths: Tensor,
        q_starts: Tensor,
        heads: HeadShape,
        options: AttentionOptions,
        *,
        num_tokens: int,
        dtype: torch.dtype,
        capacity: int,
        alignment: int = 1,
    ) -> "RestoredPrefill":
        """Makes it for P prefills: rows int64 `[P]`, lengths int32 `[P]` and q_starts int32 `[P + 1]`, as
        `prefill_attention` takes them. `num_tokens`, `dtype`: of q. `capacity`: tokens of the scratch.
        `alignment`: each prefill's keys begin at a multiple of it, `restore_kv.ALIGNMENT` for fp8.
        """
        room = (lengths + (alignment - 1)) // alignment * alignment
        ends = room.cumsum(0)
        fits = ends[-1] <= capacity
        nothing = q_starts[-1:].expand_as(q_starts)
        restored_starts = torch.where(fits, q_starts, nothing)
        lengths_there = torch.where(fits, lengths, 0)
        plan = prefill_plan(
            torch.arange(len(rows), device=rows.device),
            restored_starts,
            lengths_there,
            heads,
            num_tokens=num_tokens,
            dtype=dtype,
            limits=limits(options.variants),
            causal=options.causal,
            launch=prefill_tuning.fp8_prefill_launch(heads.key_dim) if alignment > 1 else None,
        )
        begins = torch.where(fits, ends - room, 0).int()
        pool_starts = torch.where(fits, nothing, q_starts)
        return cls(capacity, rows, begins, lengths_there, restored_starts, pool_starts, plan)

    def attend(
        self, q: Tensor, kv: PagedKV, options: AttentionOptions, out: Tensor, q_scale: float | None = None
    ) -> None:
        """Restores the keys of a layer, whose K/V is `kv`, and writes the attention of q `[T, H, Dk]` to `out`
        `[T, H, Dv]`, unless the keys do not fit. `q_scale`: attention is computed in fp8, in units of it for
        queries; `kv` is e4m3 with static scales then."""
        heads = HeadShape.of(q, kv)
        dtype, scales = (q.dtype, None) if q_scale is None or kv.scales is None else (FP8, kv.scales[0])
        scratch = Scratch.empty(self.capacity, heads, dtype, self.begins, scales)
        restore_kv(kv, self.rows, self.lengths, scratch)
        of_requests = self.q_starts, self.lengths, options
        if q_scale is None:
            rows = torch.arange(len(self.rows), device=q.device)
            restored = PagedKV(scratch.k, scratch.v, self.begins[:, None], lookup=CONTIGUOUS)
            prefill_attention(q, restored, rows, *of_requests, plan=self.plan, out=out)
        else:
            rounded = to_fp8(q, q_scale)
            fp8_prefill_attention(rounded, scratch, *of_requests, q_scale=q_scale, out=out, plan=self.plan)
