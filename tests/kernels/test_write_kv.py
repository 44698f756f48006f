"""Compares `write_kv` with its reference, bit by bit: scattered slots, strided inputs and caches, casts,
padding."""

import pytest
import torch

from lightkv.triton_kernels.write.inputs import UNCHANGED, StoredKV
from lightkv.triton_kernels.write.write_kv import _write_kv, write_kv, write_kv_reference

NUM_SLOTS = 64


def check(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache_dtype: torch.dtype) -> None:
    """Writes to both caches, views of one buffer where the dims allow, and compares all slots except slot 0."""
    heads, key_dim, value_dim = k.shape[1], k.shape[2], v.shape[2]
    caches = []
    for write in (write_kv, write_kv_reference):
        if key_dim == value_dim:
            buffer = torch.full((NUM_SLOTS, 2 * heads, key_dim), 7.0, dtype=cache_dtype, device=k.device)
            k_cache, v_cache = buffer[:, :heads], buffer[:, heads:]
        else:
            k_cache = torch.full((NUM_SLOTS, heads, key_dim), 7.0, dtype=cache_dtype, device=k.device)
            v_cache = torch.full((NUM_SLOTS, heads, value_dim), 7.0, dtype=cache_dtype, device=k.device)
        write(k, v, StoredKV(k_cache, v_cache), slots)
        caches.append((k_cache, v_cache))
    for ours, reference in zip(*caches, strict=True):
        assert torch.equal(ours[1:], reference[1:])


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 50], ids="T{}".format)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_scatters_to_shuffled_slots(device: torch.device, num_tokens: int, slot_dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    k = torch.randn(num_tokens, 2, 64, device=device)
    v = torch.randn(num_tokens, 2, 64, device=device)
    slots = (torch.randperm(NUM_SLOTS - 1, device=device)[:num_tokens] + 1).to(slot_dtype)
    check(k, v, slots, torch.float32)


@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim"),
    [(1, 64, 64), (3, 80, 80), (2, 96, 96), (2, 192, 128), (1, 16, 256), (2, 1, 3)],
    ids=str,
)
def test_dims_that_are_no_power_of_two_and_differ(
    device: torch.device, heads: int, key_dim: int, value_dim: int
) -> None:
    torch.manual_seed(1)
    k = torch.randn(5, heads, key_dim, device=device)
    v = torch.randn(5, heads, value_dim, device=device)
    check(k, v, torch.tensor([9, 63, 1, 30, 31], device=device), torch.float32)


def test_casts_to_the_cache_and_reads_views_of_a_fused_projection(device: torch.device) -> None:
    torch.manual_seed(2)
    qkv = torch.randn(20, 8, 64, device=device)  # 4 query, 2 key and 2 value heads
    slots = torch.randperm(NUM_SLOTS - 1, device=device)[:20] + 1
    check(qkv[:, 4:6], qkv[:, 6:], slots, torch.float16)
    heads_first = torch.randn(2, 20, 64, device=device).transpose(0, 1)
    check(heads_first, heads_first, slots, torch.float32)


def test_slot_0_takes_any_number_of_padding_tokens(device: torch.device) -> None:
    k = torch.arange(1.0, 41.0, device=device)[:, None, None].expand(40, 1, 16).contiguous()
    cache = torch.zeros(NUM_SLOTS, 2, 16, device=device)
    slots = torch.zeros(40, dtype=torch.int32, device=device)
    slots[3] = 5
    write_kv(k, -k, StoredKV(cache[:, :1], cache[:, 1:]), slots)
    assert torch.equal(cache[5], torch.stack([k[3, 0], -k[3, 0]]))
    padding = cache[0, 0, 0].item()
    assert padding in set(range(1, 41)) - {4}
    assert not cache[1:5].any()
    assert not cache[6:].any()


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    k = torch.zeros(4, 2, 16, device=device)
    cache = torch.zeros(NUM_SLOTS, 2, 16, device=device)
    slots = torch.arange(1, 5, device=device)
    with pytest.raises(ValueError, match=r"stored_k must be \[slots, h, Wk\].* h 2, Wk 16"):
        write_kv(k, k, StoredKV(cache[:, :1], cache), slots)
    with pytest.raises(ValueError, match=r"slots must be .* T 4"):
        write_kv(k, k, StoredKV(cache, cache), slots[:3])
    with pytest.raises(ValueError, match="int32 or int64"):
        write_kv(k, k, StoredKV(cache, cache), slots.float())
    with pytest.raises(ValueError, match="last stride"):
        write_kv(k.transpose(1, 2).contiguous().transpose(1, 2), k, StoredKV(cache, cache), slots)


def test_stays_one_operator_under_torch_compile(device: torch.device) -> None:
    torch.manual_seed(3)
    k, v = torch.randn(2, 6, 1, 16, device=device)
    slots = torch.tensor([3, 1, 9, 2, 7, 8], device=device)
    buffer = torch.zeros(10, 2, 16, device=device)
    expected = buffer.clone()
    stored = StoredKV(buffer[:, :1], buffer[:, 1:])
    arguments = _write_kv.flat(k, v, stored, slots, None, UNCHANGED)
    torch.library.opcheck(torch.ops.lightkv.write_kv.default, arguments)

    def step(k: torch.Tensor, v: torch.Tensor, buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        write_kv(k * 2, v, StoredKV(buffer[:, :1], buffer[:, 1:]), slots)
        return buffer.sum()

    total = torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, buffer, slots)
    write_kv_reference(k * 2, v, StoredKV(expected[:, :1], expected[:, 1:]), slots)
    assert torch.equal(buffer, expected)
    assert torch.equal(total, expected.sum())


@pytest.mark.gpu
def test_more_tokens_than_the_second_axis_of_a_grid_has_programs() -> None:
    num_tokens = 16 * 65536 + 5
    k = torch.arange(num_tokens, device="cuda").remainder(251).half()[:, None, None].repeat(1, 2, 16)
    cache = torch.zeros(num_tokens + 1, 4, 16, dtype=torch.float16, device="cuda")
    write_kv(k, -k, StoredKV(cache[:, :2], cache[:, 2:]), torch.arange(1, num_tokens + 1, device="cuda"))
    assert torch.equal(cache[1:, :2], k)
    assert torch.equal(cache[1:, 2:], -k)


@pytest.mark.gpu
def test_bfloat16_in_a_pool_past_2_to_the_31_elements() -> None:
    torch.manual_seed(4)
    num_slots = 2**31 // (16 * 128) + 1000
    buffer = torch.zeros(num_slots, 16, 128, dtype=torch.bfloat16, device="cuda")
    assert buffer.numel() > 2**31
    k, v = torch.randn(2, 100, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = num_slots - 1 - torch.randperm(500, device="cuda")[:100].int()
    write_kv(k, v, StoredKV(buffer[:, :8], buffer[:, 8:]), slots)
    assert torch.equal(buffer[slots.long(), :8], k)
    assert torch.equal(buffer[slots.long(), 8:], v)
    assert not buffer[: num_slots - 500].any()


@pytest.mark.gpu
def test_captured_write_follows_its_slots() -> None:
    torch.manual_seed(5)
    k, v = torch.randn(2, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(NUM_SLOTS, 4, 64, dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(8, dtype=torch.int32, device="cuda")
    write_kv(k, v, StoredKV(cache[:, :2], cache[:, 2:]), slots)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv(k, v, StoredKV(cache[:, :2], cache[:, 2:]), slots)
    slots.copy_(torch.tensor([9, 3, 60, 5, 0, 0, 0, 0], device="cuda"))
    cache.zero_()
    graph.replay()
    expected = torch.zeros_like(cache)
    write_kv_reference(k, v, StoredKV(expected[:, :2], expected[:, 2:]), slots)
    assert torch.equal(cache[1:], expected[1:])


@pytest.mark.gpu
def test_never_synchronises() -> None:
    k, v = torch.randn(2, 8, 2, 64, device="cuda")
    cache = torch.zeros(NUM_SLOTS, 4, 64, device="cuda")
    slots = torch.arange(1, 9, device="cuda")
    write_kv(k, v, StoredKV(cache[:, :2], cache[:, 2:]), slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        write_kv(k, v, StoredKV(cache[:, :2], cache[:, 2:]), slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
