"""The size of a token's K/V, its layout in the pool, and how many tokens fit."""

import dataclasses

import numpy as np
import pytest
import torch

from lightkv import KVPool, KVSpec, OutOfMemory
from lightkv.layer_groups import FULL, Lifetime
from lightkv.memory.kv_pool import CPU_TOKENS, plan_pool

SPEC = KVSpec(num_layers=3, num_kv_heads=2, k_dim=6, v_dim=4, dtype=torch.float16)
CPU = torch.device("cpu")


def test_bytes_per_token_count_every_layer_head_and_dim() -> None:
    assert SPEC.bytes_per_token == 3 * 2 * (6 + 4) * 2
    assert KVPool(SPEC, 11, CPU).num_bytes == 11 * SPEC.bytes_per_token


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "k_dim", "v_dim"])
def test_spec_refuses_a_dimension_of_zero(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(SPEC, **{name: 0})


def test_spec_keeps_python_integers() -> None:
    """numpy's integers would overflow in a product with the number of tokens."""
    spec = KVSpec(np.int32(60), np.int32(8), np.int32(128), np.int32(128), torch.float32)
    assert spec.bytes_per_token * 1_000_000 == 491_520_000_000
    for wrong in (1.5, True, "4"):
        with pytest.raises(TypeError, match=r"num_layers is .*; give an integer"):
            dataclasses.replace(SPEC, num_layers=wrong)


def test_spec_refuses_integers() -> None:
    with pytest.raises(ValueError, match="int32"):
        dataclasses.replace(SPEC, dtype=torch.int32)


def test_k_and_v_are_views_of_one_buffer_side_by_side(device: torch.device) -> None:
    pool = KVPool(SPEC, 9, device)
    for layer_idx in range(SPEC.num_layers):
        pool.kv(layer_idx).zero_()
    pool.k(1)[5] = torch.arange(12, device=device).view(2, 6)
    pool.v(1)[5] = 100 + torch.arange(8, device=device).view(2, 4)
    expected = torch.zeros(9, 20, dtype=torch.float16)
    expected[5] = torch.tensor([*range(12), *range(100, 108)])
    assert torch.equal(pool.kv(1).cpu(), expected)
    assert not pool.kv(0).any()
    assert not pool.kv(2).any()


@pytest.mark.parametrize("lead", [(), (5,), (2, 5)])
def test_spec_splits_rows_of_any_shape_into_views(lead: tuple[int, ...]) -> None:
    rows = torch.arange(20, dtype=SPEC.dtype).expand(*lead, 20).clone()
    k, v = SPEC.split(rows, 0)
    assert torch.equal(k.float(), torch.arange(12.0).view(2, 6).expand(*lead, 2, 6))
    assert torch.equal(v.float(), torch.arange(12.0, 20.0).view(2, 4).expand(*lead, 2, 4))
    v.zero_()
    assert rows.sum() == k.sum()
    with pytest.raises(RuntimeError, match="unflatten"):
        SPEC.split(rows[..., :19], 0)


def test_equal_dims_are_the_two_kv_heads_layout(device: torch.device) -> None:
    pool = KVPool(dataclasses.replace(SPEC, v_dim=6), 4, device)
    heads = pool.kv(0).view(4, 4, 6)
    assert pool.k(0).data_ptr() == heads[:, :2].data_ptr()
    assert pool.v(0).data_ptr() == heads[:, 2:].data_ptr()
    assert pool.k(0).stride() == heads[:, :2].stride()


def test_slot_zero_is_zero(device: torch.device) -> None:
    pool = KVPool(SPEC, 4096, device)
    for layer_idx in range(SPEC.num_layers):
        assert not pool.kv(layer_idx)[0].any()


def test_pool_of_one_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        KVPool(SPEC, 1, CPU)


def test_refused_allocation_carries_the_numbers(device: torch.device) -> None:
    huge = dataclasses.replace(SPEC, num_kv_heads=1 << 30)
    with pytest.raises(OutOfMemory) as raised:
        KVPool(huge, 1 << 20, device)
    assert raised.value.bytes_per_token == huge.bytes_per_token
    assert raised.value.available > 0


def test_plan_uses_the_given_number() -> None:
    plan = plan_pool(SPEC, CPU, num_tokens=100)
    assert (plan.num_tokens, plan.num_slots) == (100, 101)
    assert plan.num_bytes == 101 * SPEC.bytes_per_token
    assert "100 tokens" in plan.why


def test_plan_on_a_cpu_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkv.memory.kv_pool.free_bytes", lambda device: 2**36)
    plan = plan_pool(SPEC, CPU)
    assert plan.num_tokens == CPU_TOKENS
    assert "default" in plan.why


def test_plan_on_a_cpu_uses_a_quarter_of_scarce_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkv.memory.kv_pool.free_bytes", lambda device: 100 * 4096)
    plan = plan_pool(SPEC, CPU, reserve=1000)
    assert plan.num_slots == (100 * 4096 // 4 - 1000) // SPEC.bytes_per_token
    assert plan.num_bytes <= 100 * 4096 // 4 - 1000
    assert "quarter" in plan.why


def test_plan_without_room_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightkv.memory.kv_pool.free_bytes", lambda device: 0)
    with pytest.raises(OutOfMemory, match=f"1 tokens takes {SPEC.bytes_per_token} bytes"):
        plan_pool(SPEC, CPU)


def test_a_plan_for_layer_groups_tells_tokens_and_slots_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(SPEC, lifetimes=[Lifetime("window", 4), FULL, Lifetime("window", 4)])
    assert spec.groups.num_groups == 3
    plan = plan_pool(spec, CPU, num_tokens=100)
    assert (plan.num_tokens, plan.why) == (300, "100 tokens were asked for")
    assert plan_pool(spec, CPU).why.endswith(f"at {spec.bytes_per_slot} bytes a slot")
    free = 4 * 3 * spec.bytes_per_slot  # slot 0, and two of the three slots of a token
    monkeypatch.setattr("lightkv.memory.kv_pool.free_bytes", lambda device: free)
    with pytest.raises(OutOfMemory, match=f"1 tokens takes {spec.bytes_per_token} bytes"):
        plan_pool(spec, CPU)
    with pytest.raises(OutOfMemory, match=f"4 tokens takes {4 * spec.bytes_per_token} bytes"):
        plan_pool(spec, CPU, num_tokens=4)


@pytest.mark.parametrize("wrong", [{"num_tokens": 0}, {"fraction": 0.0}, {"fraction": 1.5}])
def test_plan_refuses(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least one|fraction"):
        plan_pool(SPEC, CPU, **wrong)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_plan_on_cuda_counts_what_is_in_use(device: torch.device) -> None:
    free, total = torch.cuda.mem_get_info(device)
    room = int(total * 0.5) - (total - free)
    less = plan_pool(SPEC, device, fraction=0.5, reserve=1 << 30)
    plan = plan_pool(SPEC, device, fraction=0.5)
    assert plan.num_bytes == pytest.approx(room, abs=64 << 20)
    assert plan.num_bytes - less.num_bytes == pytest.approx(1 << 30, abs=64 << 20)
