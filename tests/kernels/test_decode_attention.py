"""Compares `decode_attention` with its reference, element by element, and the reference with dense attention.

Slots are shuffled, every free slot holds NaN, slot 0 holds large finite garbage, and the output is NaN before
each run: a wrong slot, a missing mask or an unwritten element makes a test fail.
"""

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.decode.decode_attention import (
    _decode_attention,
    decode_attention,
    decode_attention_reference,
)
from lightkv.triton_kernels.attention.decode.decode_plan import SharedPrefixGroups, decode_plan
from lightkv.triton_kernels.attention.lookups import Pages
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.variants import SinkLogits, Softcap, Window
from tests.support.attention.caches import Cache, assert_close, poisoned_cache, share_first_keys
from tests.support.attention.log_sum_exps import assert_lse
from tests.support.combinations import each_value, slow

MIXED = [130, 0, 1, 64, 63, 65]


def check(
    cache: Cache,
    *,
    group: int = 4,
    window: int = 0,
    softcap: float = 0.0,
    spread: float = 1.0,
    num_queries: int = 1,
) -> None:
    """Compares random queries with the reference; `spread` widens the scores."""
    _, num_kv_heads, key_dim = cache.kv.k.shape
    dtype, device = cache.kv.k.dtype, cache.kv.k.device
    shape = len(cache.rows) * num_queries, group * num_kv_heads
    q = (torch.randn(*shape, key_dim) * spread).to(device, dtype)
    out = torch.full((*shape, cache.kv.v.shape[2]), torch.nan, dtype=dtype, device=device)
    lse = torch.full(shape, torch.nan, device=device)
    options = AttentionOptions().plus(
        Window(window) if window else None, Softcap(softcap) if softcap else None
    )
    result = decode_attention(q, *cache, options, num_queries=num_queries, out=out, lse=lse)
    assert result is out
    assert_close(out, decode_attention_reference(q, *cache, options, num_queries=num_queries))
    assert not out.unflatten(0, (-1, num_queries))[cache.lengths == 0].any()
    assert_lse(lse, q, cache, options, num_queries=num_queries)


@pytest.mark.parametrize("length", [0, 1, *slow(63), 64, 65], ids="len{}".format)
def test_lengths_around_a_tile(device: torch.device, length: int) -> None:
    torch.manual_seed(length)
    check(poisoned_cache([length], device=device))


@pytest.mark.parametrize("group", [1, 3, 20, *slow(4, 8, 16)], ids="group{}".format)
def test_query_heads_per_kv_head(device: torch.device, group: int) -> None:
    torch.manual_seed(group)
    check(poisoned_cache([70, 0, 33], device=device), group=group)


@each_value(
    dims=[(64, 64), (80, 80), (192, 128), (64, 80), *slow((96, 96), (128, 128), (256, 256))],
    dtype=[torch.float32, torch.float16],
)
def test_head_dims(device: torch.device, dims: tuple[int, int], dtype: torch.dtype) -> None:
    key_dim, value_dim = dims
    torch.manual_seed(key_dim)
    check(poisoned_cache([65, 1, 30], device=device, dtype=dtype, key_dim=key_dim, value_dim=value_dim))


@each_value(shift=[0, 4, 31], window=[40, 0, *slow(1, 64, 1000)], softcap=[5.0, 0.0])
def test_index_window_and_softcap(device: torch.device, shift: int, window: int, softcap: float) -> None:
    torch.manual_seed(window)
    cache = poisoned_cache([130, 0, 1, 65], device=device, num_kv_heads=1, shift=shift)
    check(cache, group=3, window=window, softcap=softcap, spread=3.0)


@each_value(shape=[(1, 0), *slow((4, 0)), (3, 40), (7, 1)], num_queries=[2, 4, 8])
def test_queries_of_a_request(device: torch.device, num_queries: int, shape: tuple[int, int]) -> None:
    group, window = shape
    torch.manual_seed(num_queries)
    cache = poisoned_cache([130, 0, 1, 3, 65], device=device, num_kv_heads=2)
    check(cache, group=group, window=window, num_queries=num_queries)


def check_shared(
    cache: Cache, prefixes: SharedPrefixGroups, *, group: int, num_queries: int, softcap: float = 0.0
) -> None:
    """Compares random queries of requests that share prefixes with the reference."""
    _, num_kv_heads, key_dim = cache.kv.k.shape
    shape = len(cache.rows) * num_queries, group * num_kv_heads
    q = torch.randn(*shape, key_dim).to(cache.kv.k)
    out, lse = torch.full_like(q, torch.nan), torch.full(shape, torch.nan, device=q.device)
    options = AttentionOptions().plus(Softcap(softcap) if softcap else None)
    plan = decode_plan(
        cache.rows,
        cache.lengths,
        HeadShape.of(q, cache.kv),
        dtype=q.dtype,
        num_queries=num_queries,
        shared_prefixes=prefixes,
    )
    decode_attention(q, *cache, options, num_queries=num_queries, plan=plan, out=out, lse=lse)
    assert_close(out, decode_attention_reference(q, *cache, options, num_queries=num_queries))
    assert_lse(lse, q, cache, options, num_queries=num_queries)


@each_value(shape=[(4, 1, 0, 0.0), (1, 3, 0, 5.0), (3, 2, 4, 0.0)], num_splits=[3, 1, 20])
def test_shared_prefixes_are_read_once(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    num_splits: int,
    shape: tuple[int, int, int, float],
) -> None:
    group, num_queries, shift, softcap = shape
    torch.manual_seed(num_splits)
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_splits)
    cache = poisoned_cache(
        [140, 170, 132, 0, 131, 150, 40, 180, 160, 135, 67], device=device, shift=shift, num_kv_heads=1
    )
    sets = [(128, [1, 2, 4, 5, 7, 9]), (64, [8, 10])]
    prefixes = share_first_keys(cache, sets, min(decode_tuning.prefix_members(num_queries, group), 5))
    check_shared(cache, prefixes, group=group, num_queries=num_queries, softcap=softcap)


@each_value(num_splits=[1, *slow(2), 5, 40], window=[0, 50])
def test_any_number_of_splits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_splits: int, window: int
) -> None:
    torch.manual_seed(num_splits)
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_splits)
    cache = poisoned_cache([*MIXED, 1300], device=device, num_kv_heads=1, key_dim=16, value_dim=16)
    check(cache, group=2, window=window)


def test_large_scores_neither_overflow_nor_lose_a_split(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: 3)
    cache = poisoned_cache([190], device=device, num_kv_heads=1)
    q = torch.randn(1, 2, 64, device=device) * 100  # scores of a few hundred: one key takes all
    options = AttentionOptions(scale=1.0)
    expected = decode_attention_reference(q, *cache, options)
    torch.testing.assert_close(decode_attention(q, *cache, options), expected, atol=1e-3, rtol=1e-3)


def test_padded_requests_share_row_0(device: torch.device) -> None:
    torch.manual_seed(1)
    cache = poisoned_cache([20, 30, 40], device=device)
    padded = cache._replace(
        rows=torch.cat([cache.rows, cache.rows.new_zeros(2)]).int(),
        lengths=torch.cat([cache.lengths, cache.lengths.new_tensor([0, 1])]),
    )
    check(padded)


def test_the_reference_is_dense_attention() -> None:
    torch.manual_seed(2)
    cache = poisoned_cache([50], device="cpu", shift=4)
    q = torch.randn(1, 6, 64)
    row = cache.kv.index[cache.rows[0]].long()
    slots = (row[:, None] + torch.arange(16)).flatten()[:50]
    k, v = (c[slots].transpose(0, 1)[None] for c in cache.kv[:2])  # [1, heads, 50, 64]
    dense = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    assert_close(decode_attention_reference(q, *cache), dense)
    last = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], k[:, :, -7:], v[:, :, -7:], enable_gqa=True
    )[:, :, 0]
    assert_close(decode_attention_reference(q, *cache, AttentionOptions().plus(Window(7))), last)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    cache = poisoned_cache([5, 6], device=device)
    q = torch.zeros(2, 4, 64, device=device)
    long_index = cache._replace(kv=cache.kv._replace(index=cache.kv.index.long()))
    long_lengths = cache._replace(lengths=cache.lengths.long())
    shifted = cache._replace(kv=cache.kv._replace(lookup=Pages(32)))
    for match, bad_q, bad_cache, options, out in [
        ("a multiple of", q[:, :3], cache, AttentionOptions(), None),
        (r"q must be \[T, H, Dk\] .*Dk 64", q[:, :, :32], cache, AttentionOptions(), None),
        ("last stride", q.mT.contiguous().mT, cache, AttentionOptions(), None),
        ("index must be int32", q, long_index, AttentionOptions(), None),
        ("lengths must be contiguous int32", q, long_lengths, AttentionOptions(), None),
        ("1 queries for each of 2 rows", q[:1], cache, AttentionOptions(), None),
        ("scale must be positive", q, cache, AttentionOptions(scale=0.0), None),
        ("must be in 0..31", q, shifted, AttentionOptions(), None),
        ("out must be", q, cache, AttentionOptions(), q[:, :2]),
    ]:
        with pytest.raises(ValueError, match=match):
            decode_attention(bad_q, *bad_cache, options, out=out)


def test_refuses_a_plan_of_something_else(device: torch.device) -> None:
    cache = poisoned_cache([5, 6], device=device)
    q = torch.zeros(2, 4, 64, device=device)
    plan = decode_plan(
        cache.rows, cache.lengths, HeadShape.of(q, cache.kv), dtype=q.dtype, limits=(Window(3),)
    )
    with pytest.raises(ValueError, match=r"\(2, 1, \(Window\(size=3\),\)\), and the call has \(2, 1, \(\)\)"):
        decode_attention(q, *cache, plan=plan)
    with pytest.raises(ValueError, match=r"the plan is for \(requests, queries, limits\) \(2, 1"):
        decode_attention(
            q.repeat(2, 1, 1), *cache, AttentionOptions().plus(Window(3)), num_queries=2, plan=plan
        )
    one = cache._replace(rows=cache.rows[:1], lengths=cache.lengths[:1])
    with pytest.raises(ValueError, match=r"the call has \(1, 1"):
        decode_attention(q[:1], *one, AttentionOptions().plus(Window(3)), plan=plan)
    with pytest.raises(ValueError, match="300 queries of 2 heads to a K/V head are 600 rows"):
        decode_attention(q.repeat(300, 1, 1), *cache, num_queries=300)


def test_stays_one_operator_under_torch_compile(device: torch.device) -> None:
    torch.manual_seed(3)
    cache = poisoned_cache([20, 5], device=device)
    q = torch.randn(2, 4, 64, device=device)
    out = torch.empty_like(q)
    plan = decode_plan(cache.rows, cache.lengths, HeadShape.of(q, cache.kv), dtype=q.dtype)
    options = AttentionOptions().plus(Softcap(3.0), SinkLogits(torch.zeros(4, device=device)))
    arguments = _decode_attention.flat(q, cache.kv, plan, cache.lengths, out, None, 1, options)
    torch.library.opcheck(torch.ops.lightkv.decode_attention.default, arguments)

    def step(q: Tensor, cache: Cache) -> Tensor:
        return decode_attention(q * 2, *cache) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_close(compiled(q, cache), decode_attention_reference(q * 2, *cache) + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 16], ids="group{}".format)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256], ids="dim{}".format)
@pytest.mark.parametrize("shift", [0, 4, 31], ids=["tokens", "pages_of_16", "one_run"])
def test_bfloat16(group: int, head_dim: int, shift: int) -> None:
    torch.manual_seed(group)
    cache = poisoned_cache(
        [*MIXED, 3000, 517],
        device="cuda",
        dtype=torch.bfloat16,
        key_dim=head_dim,
        value_dim=head_dim,
        shift=shift,
    )
    check(cache, group=group)
    check(cache, group=group, window=100, softcap=20.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "num_queries"), [(1, 1), (4, 1), (8, 1), (4, 5)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="dim{}".format)
def test_shared_prefixes_in_bfloat16(group: int, num_queries: int, head_dim: int) -> None:
    torch.manual_seed(group)
    lengths = [2000 + 37 * request for request in range(40)]
    cache = poisoned_cache(lengths, device="cuda", dtype=torch.bfloat16, key_dim=head_dim, value_dim=head_dim)
    sets = [(1950, list(range(0, 40, 2))), (333, [1, 5, 9])]
    prefixes = share_first_keys(cache, sets, decode_tuning.prefix_members(num_queries, group))
    check_shared(cache, prefixes, group=group, num_queries=num_queries)


@pytest.mark.gpu
def test_captured_decode_follows_its_shared_prefixes() -> None:
    torch.manual_seed(6)
    cache = poisoned_cache([700] * 6, device="cuda", dtype=torch.bfloat16)
    prefixes = share_first_keys(cache, [(512, [0, 1, 2, 3, 4, 5])], decode_tuning.prefix_members(1, 4))
    q = torch.randn(6, 8, 64, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)

    def step() -> None:
        plan = decode_plan(
            cache.rows,
            cache.lengths,
            HeadShape.of(q, cache.kv),
            dtype=q.dtype,
            shared_prefixes=prefixes,
        )
        decode_attention(q, *cache, plan=plan, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for keys, members in ((512, [5, 4, 2]), (100, [0, 1]), (0, [])):
        members = torch.tensor(members, dtype=torch.int32, device="cuda")
        prefixes.keys.zero_()
        prefixes.members.fill_(-1)
        prefixes.place.fill_(-1)
        prefixes.keys[0] = keys
        prefixes.members[0, : len(members)] = members
        prefixes.place[members] = torch.arange(len(members), dtype=torch.int32, device="cuda")
        cache.lengths.copy_(torch.randint(520, 700, (6,)))
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, decode_attention_reference(q, *cache))


@pytest.mark.gpu
def test_pool_past_2_to_the_31_elements() -> None:
    torch.manual_seed(4)
    num_slots, length = 2**31 // (16 * 128) + 5000, 4000
    buffer = torch.full((num_slots, 16, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    assert buffer.numel() > 2**31
    slots = num_slots - 1 - torch.randperm(length + 500, device="cuda")[:length]
    buffer[slots] = torch.randn(length, 16, 128, device="cuda").bfloat16()
    cache = Cache(
        PagedKV(buffer[:, :8], buffer[:, 8:], slots[None].int()),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        torch.tensor([length], dtype=torch.int32, device="cuda"),
    )
    check(cache)


@pytest.mark.gpu
def test_a_million_keys() -> None:
    torch.manual_seed(5)
    cache = poisoned_cache([2**20, 5, 2**20 - 37], device="cuda", dtype=torch.bfloat16, num_kv_heads=1)
    check(cache, group=2)
    check(cache, group=2, num_queries=3)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [3, 200], ids=["splits", "one_split"])
def test_captured_decode_follows_lengths_and_rows(batch: int) -> None:
    torch.manual_seed(5)
    before = [int(n) for n in torch.randint(0, 300, (batch,))]
    after = [int(n) for n in torch.randint(0, 300, (batch,))]
    # Every request has K/V for the longer of its two lengths.
    cache = poisoned_cache(
        [max(pair) for pair in zip(before, after, strict=True)], device="cuda", dtype=torch.bfloat16
    )
    cache.lengths.copy_(torch.tensor(before))
    q = torch.randn(batch, 8, 64, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    decode_attention(q, *cache, out=out)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(q, *cache, out=out)
    order = torch.randperm(batch, device="cuda")
    cache.lengths.copy_(torch.tensor(after, device="cuda", dtype=torch.int32)[order])
    cache.rows.copy_(cache.rows[order])
    q.normal_()
    out.fill_(torch.nan)
    graph.replay()
    assert_close(out, decode_attention_reference(q, *cache))


@pytest.mark.gpu
def test_never_synchronises() -> None:
    cache = poisoned_cache([100, 7], device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 8, 64, dtype=torch.bfloat16, device="cuda")
    decode_attention(q, *cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode_attention(q, *cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
