"""Prefill over quantised K/V that is restored to a scratch, against float64 attention."""

import pytest
import torch

from lightkv import KVPool, KVSpec
from lightkv.attention import Batch, LayerShape, Step
from lightkv.attention.restored_prefill import RestoredPrefill
from lightkv.attention.triton_backend import TritonAttention
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention_reference
from lightkv.triton_kernels.attention.variants import Window
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from tests.support.combinations import each_value

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@each_value(
    name=["int8", "int4", "int8-g8"],
    window=[0, 20],
    dtype=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_prefill_over_a_scratch(name: str, dtype: torch.dtype, window: int, device: torch.device) -> None:
    torch.manual_seed(1)
    lengths, counts = [90, 40, 7], [50, 40, 2]
    pool = KVPool(KVSpec(1, 2, 64, 64, dtype, KVFormat.parse(name)), 200, device)
    slots = 1 + torch.randperm(199)[: sum(lengths)].to(device)
    k, v = torch.randn(2, len(slots), 2, 64).to(device, dtype)
    pool.write(0, slots, k, v)
    index = torch.zeros(4, 90, dtype=torch.int32, device=device)
    for row, part in enumerate(slots.split(lengths), 1):
        index[row, : len(part)] = part.int()
    kv = PagedKV(pool.k(0), pool.v(0), index, scales=pool.scales(0), format=pool.format(0))
    rows, on_device = (
        torch.tensor([1, 2, 3], device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    q = torch.randn(sum(counts), 8, 64).to(device, dtype)
    q_starts = torch.tensor([0, 50, 90, 92], dtype=torch.int32, device=device)
    options, heads = AttentionOptions().plus(Window(window) if window else None), HeadShape(8, 2, 64, 64)
    expected = prefill_attention_reference(q, kv, rows, q_starts, on_device, options)
    for capacity in (137, 136):
        restored = RestoredPrefill.make(
            rows, on_device, q_starts, heads, options, num_tokens=92, dtype=dtype, capacity=capacity
        )
        out = torch.full((92, 8, 64), 7.0, dtype=dtype, device=device)
        restored.attend(q, kv, options, out)
        if capacity < sum(lengths):  # left to prefill over the pool
            assert (out == 7.0).all()
            assert torch.equal(restored.pool_starts, q_starts)
        else:
            torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            assert (restored.pool_starts == 92).all()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 100])
def test_prefill_in_fp8_over_a_scratch(window: int) -> None:
    torch.manual_seed(1)
    device, dtype = torch.device("cuda"), torch.bfloat16
    lengths, counts = [500, 140, 7], [300, 140, 2]
    pool = KVPool(KVSpec(1, 2, 64, 64, dtype, KVFormat.parse("fp8-static")), 700, device)
    pool.set_static_scales(0, torch.tensor([0.01, 0.02]), torch.tensor([0.03]))
    slots = 1 + torch.randperm(699)[: sum(lengths)].to(device)
    pool.write(0, slots, *torch.randn(2, len(slots), 2, 64).to(device, dtype))
    index = torch.zeros(4, 500, dtype=torch.int32, device=device)
    for row, part in enumerate(slots.split(lengths), 1):
        index[row, : len(part)] = part.int()
    kv = PagedKV(pool.k(0), pool.v(0), index, scales=pool.scales(0), format=pool.format(0))
    rows = torch.tensor([1, 2, 3], device=device)
    on_device = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.randn(sum(counts), 8, 64).to(device, dtype)
    q_starts = torch.tensor([0, 300, 440, 442], dtype=torch.int32, device=device)
    options, heads = AttentionOptions().plus(Window(window) if window else None), HeadShape(8, 2, 64, 64)
    expected = prefill_attention_reference(q, kv, rows, q_starts, on_device, options).float()
    for capacity in (896, 768):
        restored = RestoredPrefill.make(
            rows,
            on_device,
            q_starts,
            heads,
            options,
            num_tokens=442,
            dtype=dtype,
            capacity=capacity,
            alignment=128,
        )
        out = torch.full((442, 8, 64), 7.0, dtype=dtype, device=device)
        restored.attend(q, kv, options, out, 0.02)
        if capacity < 896:  # left to prefill over the pool
            assert (out == 7.0).all()
            assert torch.equal(restored.pool_starts, q_starts)
        else:  # queries and weights are rounded to 4 significant bits
            error = (out.float() - expected).abs()
            assert float(error.mean()) < 0.05 * float(expected.abs().mean())
            assert (restored.pool_starts == 442).all()


def test_layers_in_fp8_and_in_16_bits_have_work_lists_of_their_own(device: torch.device) -> None:
    """A step's keys may fit the scratch of one and not that of the other, whose prefill then reads the pool."""
    memory = KVMemory(KVSpec(2, 1, 16, 16, torch.float32), 100, 4, 32, device)
    in_fp8, in_16_bits = (TritonAttention(layer, LayerShape(1, 16, 1)) for layer in range(2))
    in_fp8._fp8_q_scale = 1.0
    step = Step.of(Batch.of([1], [0], [9], 1), memory)
    q, lengths = torch.zeros(9, 1, 16, device=device), step.kv_lens
    plan = in_fp8.mixed_plan(q, torch.full_like(step.q_starts, 9), lengths, step)
    other = in_16_bits.mixed_plan(q, step.q_starts, lengths, step)
    assert plan.prefill is not None
    assert other.prefill is not None
    assert int(plan.prefill.items[0, 0]) == -1  # no queries
    assert int(other.prefill.items[0, 0]) == 0
