"""Tiles that are higher than a program of the general kernel: several programs compute one."""

import pytest
import torch

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.attention.variants import SinkLogits, Window
from lightkv.triton_kernels.attention.variants.variant import limits
from tests.support.attention.caches import poisoned_cache, starts
from tests.support.attention.log_sum_exps import lse_reference
from tests.support.combinations import each_value


@each_value(num_workers=[0, 6], window=[0, 20])
def test_programs_of_a_tile(num_workers: int, window: int, device: torch.device) -> None:
    torch.manual_seed(0)
    sequences = [(21, 90), (5, 0), (40, 30), (1, 60)]
    cache = poisoned_cache([sum(one) for one in sequences], device=device.type, key_dim=16, value_dim=16)
    q_starts, num_queries = starts([q_len for q_len, _ in sequences], device.type), 67
    q = torch.randn(num_queries, 6, 16, device=device)
    sinks = SinkLogits(torch.linspace(-1.0, 4.0, 6, device=device))
    options = AttentionOptions().plus(sinks, Window(window) if window else None)
    shares = prefill_tuning.NO_SHARES
    if num_workers:
        shares = prefill_tuning.PrefillShares(num_workers, 8, 32, 1, -(2**30))
    plan = prefill_plan(
        cache.rows,
        q_starts,
        cache.lengths,
        HeadShape.of(q, cache.kv),
        num_tokens=num_queries,
        dtype=q.dtype,
        limits=limits(options.variants),
        launch=tuning.Launch(48, 16, 4, 2),
        shares=shares,
    )
    assert prefill_tuning.general_rows(48) == 16
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    args = q, cache.kv, cache.rows, q_starts, cache.lengths
    out = prefill_attention(*args, options, plan=plan, lse=lse)
    torch.testing.assert_close(out, prefill_attention_reference(*args, options), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lse, lse_reference(*args, options), atol=1e-4, rtol=1e-4)


def test_a_plan_of_prefill_in_fp8_is_refused(device: torch.device) -> None:
    cache = poisoned_cache([9], device=device)
    q, q_starts = torch.zeros(9, 4, 64, device=device), torch.tensor([0, 9], dtype=torch.int32, device=device)
    plan = prefill_plan(
        cache.rows, q_starts, cache.lengths, HeadShape.of(q, cache.kv),
        num_tokens=9, dtype=q.dtype, launch=prefill_tuning.fp8_prefill_launch(64),
    )  # fmt: skip
    with pytest.raises(ValueError, match="the plan's tiles of 128 rows are those of prefill in fp8"):
        prefill_attention(q, cache.kv, cache.rows, q_starts, cache.lengths, plan=plan)


def test_head_dim_64_has_three_warpgroups_on_compute_capability_9() -> None:
    h200 = tuning.DeviceClass(num_multiprocessors=132, shared_memory=232448, major=9)
    assert prefill_tuning.prefill_launch(h200, 1, 8, 4096, 64, 64, 2).block_m == 192
    # Windows and quantised K/V are faster with two.
    assert prefill_tuning.prefill_launch(h200, 1, 8, 4096, 64, 64, 2, is_plain=False).block_m == 128
    for block_m, num_warps in ((192, 16), (128, 12)):
        launch = prefill_tuning.hopper_prefill_launch(h200, 64, 64, 2, block_m)
        assert launch is not None
        assert (launch.block_m, launch.num_warps) == (block_m, num_warps)
    assert prefill_tuning.hopper_prefill_launch(h200, 64, 64, 2, 64) is None
    assert prefill_tuning.hopper_prefill_launch(h200, 128, 128, 2, 192) is None
    assert prefill_tuning.general_rows(192) == 64
    assert prefill_tuning.fp8_prefill_launch(64).block_m == 128
