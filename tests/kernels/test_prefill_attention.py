"""Compares `prefill_attention` with its reference, element by element, and the reference with dense attention.

The caches are those of `test_decode_attention`: shuffled slots, NaN in all free slots.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    _prefill_attention,
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.prefill.prefill_plan import TileSizes, _prefill_plan, prefill_plan
from lightkv.triton_kernels.attention.variants import (
    SinkLogits,
    Softcap,
    Window,
)
from lightkv.triton_kernels.write.inputs import StoredKV
from lightkv.triton_kernels.write.write_kv import write_kv
from tests.support.attention.caches import Cache, assert_close, poisoned_cache, starts
from tests.support.attention.log_sum_exps import lse_reference
from tests.support.attention.mixed_steps import make_step
from tests.support.combinations import each_value, slow

# (queries, tokens before them) of each request
FRESH = [(65, 0), (1, 0), (64, 0)]
CHUNKS = [(1, 63), (0, 40), (33, 64), (16, 1), (0, 0)]


def check(
    sequences: list[tuple[int, int]],
    *,
    window: int = 0,
    softcap: float = 0.0,
    spread: float = 1.0,
    **shape: Any,
) -> None:
    """Compares random queries with the reference; a few queries after the last request belong to none. `shape`:
    of `make_step`."""
    step = make_step(sequences, [], surplus=3, **{"group": 4, "num_kv_heads": 1, **shape})
    q, num_queries = step.q * spread, len(step.q) - 3
    out = q.new_full((*q.shape[:2], step.kv.v.shape[-1]), torch.nan)
    options = AttentionOptions().plus(
        Window(window) if window else None, Softcap(softcap) if softcap else None
    )
    args = (*step._replace(q=q), options)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    result = prefill_attention(*args, out=out, lse=lse)
    assert result is out
    assert_close(out[:num_queries], prefill_attention_reference(*args)[:num_queries])
    assert out[num_queries:].isnan().all()
    assert_close(lse[:num_queries], lse_reference(*args)[:num_queries])
    assert lse[num_queries:].isnan().all()


@each_value(group=[1, 3, 4, 16, *slow(8)], sequences=["chunks", "fresh"])
def test_query_heads_per_kv_head(device: torch.device, sequences: str, group: int) -> None:
    torch.manual_seed(group)
    check({"fresh": FRESH, "chunks": CHUNKS}[sequences], device=device, group=group)


@each_value(
    dims=[(64, 64), (80, 80), (256, 256), (192, 128), *slow((96, 96), (128, 128))],
    dtype=[torch.float32, torch.float16],
)
def test_head_dims(device: torch.device, dims: tuple[int, int], dtype: torch.dtype) -> None:
    key_dim, value_dim = dims
    torch.manual_seed(key_dim)
    check(
        [(20, 50), (3, 0)],
        device=device,
        dtype=dtype,
        group=2,
        num_kv_heads=2,
        key_dim=key_dim,
        value_dim=value_dim,
    )


@each_value(shift=[0, 4, 31], window=[20, 0, *slow(1, 64, 1000)], softcap=[5.0, 0.0])
def test_index_window_and_softcap(device: torch.device, shift: int, window: int, softcap: float) -> None:
    torch.manual_seed(window)
    sequences = [(40, 70), (0, 5), (65, 0)]
    check(sequences, device=device, group=2, shift=shift, window=window, softcap=softcap, spread=3.0)


@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.float16], ids=["float32", "float16"])
def test_many_key_tiles_full_and_masked(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check([(70, 300), (130, 0)], device=device, dtype=dtype, group=1, key_dim=32, value_dim=32)


def test_chunks_give_what_one_prefill_gives(device: torch.device) -> None:
    torch.manual_seed(2)
    num_tokens = 90
    cache = poisoned_cache([num_tokens], device=device)
    q = torch.randn(num_tokens, 4, 64, device=device)

    def prefill(begin: int, end: int) -> Tensor:
        lengths = torch.tensor([end], dtype=torch.int32, device=device)
        q_starts = starts([end - begin], device)
        return prefill_attention(q[begin:end], cache.kv, cache.rows, q_starts, lengths)

    whole = prefill(0, num_tokens)
    assert_close(torch.cat([prefill(0, 7), prefill(7, 71), prefill(71, 72), prefill(72, 90)]), whole)
    last = decode_attention(q[-1:], *cache)
    assert_close(last, whole[-1:])


def test_more_queries_than_tokens_gives_zeros_to_the_first(device: torch.device) -> None:
    torch.manual_seed(3)
    cache = poisoned_cache([2], device=device)
    q = torch.randn(5, 4, 64, device=device)
    args = (q, cache.kv, cache.rows, starts([5], device), cache.lengths)
    out = prefill_attention(*args, out=torch.full_like(q, torch.nan))
    assert not out[:3].any()
    assert_close(out, prefill_attention_reference(*args))


def test_the_reference_is_dense_causal_attention() -> None:
    torch.manual_seed(4)
    num_tokens, q_len = 30, 12
    k, v = torch.randn(2, num_tokens, 2, 64)
    k_cache, v_cache = torch.full((2, 100, 2, 64), torch.nan)
    slots = torch.randperm(99)[:num_tokens] + 1
    k_cache[slots], v_cache[slots] = k, v
    q = torch.randn(q_len, 6, 64)
    out = prefill_attention_reference(
        q,
        PagedKV(k_cache, v_cache, slots[None].int()),
        torch.tensor([0]),
        starts([q_len], "cpu"),
        torch.tensor([num_tokens], dtype=torch.int32),
    )
    mask = torch.ones(q_len, num_tokens, dtype=torch.bool).tril(num_tokens - q_len)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    assert_close(out, dense[0].transpose(0, 1))


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    cache = poisoned_cache([5, 6], device=device)
    q = torch.zeros(11, 4, 64, device=device)
    good = starts([5, 6], device)
    for match, q_starts, lse in [
        ("q_starts must be", good[:2], None),
        ("q_starts must be", good.long(), None),
        ("lse must be", good, torch.zeros(11, 3, device=device)),
        ("lse must be", good, torch.zeros(11, 4, dtype=torch.float16, device=device)),
    ]:
        with pytest.raises(ValueError, match=match):
            prefill_attention(q, cache.kv, cache.rows, q_starts, cache.lengths, lse=lse)


def test_refuses_a_plan_of_something_else(device: torch.device) -> None:
    cache = poisoned_cache([5, 6], device=device)
    q, q_starts = torch.zeros(4, 4, 64, device=device), starts([2, 2], device)
    heads = HeadShape.of(q, cache.kv)
    sizes = {"num_tokens": 4, "dtype": q.dtype}
    plan = prefill_plan(cache.rows, q_starts, cache.lengths, heads, **sizes, limits=(Window(3),))
    with pytest.raises(
        ValueError, match=r"\(2, \(Window\(size=3\),\), True\), and the call has \(2, \(\), True\)"
    ):
        prefill_attention(q, cache.kv, cache.rows, q_starts, cache.lengths, plan=plan)


def test_stays_one_operator_under_torch_compile(device: torch.device) -> None:
    torch.manual_seed(5)
    cache = poisoned_cache([20, 5], device=device)
    q = torch.randn(12, 4, 64, device=device)
    q_starts = starts([10, 2], device)
    plan = prefill_plan(
        cache.rows,
        q_starts,
        cache.lengths,
        HeadShape.of(q, cache.kv),
        num_tokens=12,
        dtype=q.dtype,
    )
    lse = torch.empty(12, 4, device=device)
    options = AttentionOptions().plus(Softcap(3.0), SinkLogits(torch.zeros(4, device=device)))
    op_args = _prefill_attention.flat(q, cache.kv, plan, torch.empty_like(q), lse, options)
    torch.library.opcheck(torch.ops.lightkv.prefill_attention.default, op_args)
    num_tiles = len(plan.items) - plan.num_shares
    numbers = plan.items.new_empty(len(plan.items) + num_tiles, 12)
    sizes = TileSizes(num_tiles, 10_000, 2, 2, plan.launch.block_m)
    shares = prefill_tuning.prefill_shares(tuning.device_class(device), plan.launch, 2)
    plan_args = cache.rows, q_starts, cache.lengths, numbers, plan.counters, sizes, (Window(9),), True, shares
    torch.library.opcheck(torch.ops.lightkv.prefill_plan.default, _prefill_plan.flat(*plan_args))

    def step(q: Tensor, k: Tensor, cache: Cache, slots: Tensor) -> Tensor:
        write_kv(k, -k, StoredKV(cache.kv.k, cache.kv.v), slots)
        return prefill_attention(q * 2, cache.kv, cache.rows, q_starts, cache.lengths) + 1

    # The write has to stay before the read.
    k = torch.randn(2, 2, 64, device=device)
    slots = cache.kv.index[cache.rows[0], :2].contiguous()
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, cache, slots)
    assert torch.equal(cache.kv.k[slots.long()], k)
    expected = prefill_attention_reference(q * 2, cache.kv, cache.rows, q_starts, cache.lengths)
    assert_close(out, expected + 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "head_dim", "shift"),
    [(1, 64, 0), (3, 128, 0), (4, 80, 0), (1, 128, 4), (3, 80, 4), (8, 256, 4), (1, 80, 31), (8, 64, 31)],
    ids=str,
)
def test_bfloat16(group: int, head_dim: int, shift: int) -> None:
    torch.manual_seed(group)
    sequences = [(900, 0), (37, 512), (64, 0), (333, 1300), (18, 3000), (1, 127), (0, 9), (128, 128)]
    shape = {"group": group, "num_kv_heads": 2, "key_dim": head_dim, "value_dim": head_dim, "shift": shift}
    check(sequences, device="cuda", dtype=torch.bfloat16, **shape)
    check(sequences, device="cuda", dtype=torch.bfloat16, **shape, window=100, softcap=20.0)


@pytest.mark.gpu
def test_large_tiles_of_a_full_device() -> None:
    torch.manual_seed(6)
    check([(1100, 200)] * 4, device="cuda", dtype=torch.bfloat16, num_kv_heads=8, key_dim=128, value_dim=128)


@pytest.mark.gpu
def test_after_a_million_keys() -> None:
    torch.manual_seed(9)
    check([(40, 2**20), (3, 5)], device="cuda", dtype=torch.bfloat16, group=2, key_dim=128, value_dim=128)
    check([(40, 2**20 - 9)], device="cuda", dtype=torch.bfloat16, group=2, key_dim=80, value_dim=80)


@pytest.mark.gpu
def test_pool_past_2_to_the_31_elements() -> None:
    torch.manual_seed(7)
    num_slots, length, q_len = 2**31 // (16 * 128) + 5000, 1500, 400
    buffer = torch.full((num_slots, 16, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    assert buffer.numel() > 2**31
    slots = num_slots - 1 - torch.randperm(length + 500, device="cuda")[:length]
    buffer[slots] = torch.randn(length, 16, 128, device="cuda").bfloat16()
    q = torch.randn(q_len, 32, 128, dtype=torch.bfloat16, device="cuda")
    args = (
        q,
        PagedKV(buffer[:, :8], buffer[:, 8:], slots[None].int()),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        starts([q_len], "cuda"),
        torch.tensor([length], dtype=torch.int32, device="cuda"),
    )
    out = prefill_attention(*args)
    assert_close(out, prefill_attention_reference(*args))


@pytest.mark.gpu
def test_captured_prefill_follows_lengths_rows_and_starts() -> None:
    torch.manual_seed(8)
    cache = poisoned_cache([300, 200, 100], device="cuda", dtype=torch.bfloat16)
    q = torch.randn(150, 8, 64, dtype=torch.bfloat16, device="cuda")
    q_starts = starts([50, 50, 50], "cuda")
    out = torch.empty_like(q)
    args = (q, cache.kv, cache.rows, q_starts, cache.lengths)
    prefill_attention(*args, out=out)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention(*args, out=out)
    q_starts.copy_(starts([100, 7, 43], "cuda"))
    cache.rows.copy_(cache.rows.flip(0))
    cache.lengths.copy_(torch.tensor([100, 150, 260], dtype=torch.int32, device="cuda"))
    out.fill_(torch.nan)
    graph.replay()
    assert_close(out, prefill_attention_reference(*args))


@pytest.mark.gpu
def test_never_synchronises() -> None:
    cache = poisoned_cache([100, 7], device="cuda", dtype=torch.bfloat16)
    q = torch.randn(27, 8, 64, dtype=torch.bfloat16, device="cuda")
    args = (q, cache.kv, cache.rows, starts([20, 7], "cuda"), cache.lengths)
    prefill_attention(*args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefill_attention(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
