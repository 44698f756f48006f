"""Compares `paged_attention_v1` and `paged_attention_v2` with their references, and the reference with
attention over slots.

Blocks are shuffled. Free blocks, the rest of a sequence's last block, and the output before each run hold NaN.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bench.kernels.attention_batches import copy_to_blocks
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants import Alibi
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from lightkv.triton_kernels.classic.paged_attention_inputs import PagedInputs
from lightkv.triton_kernels.classic.paged_attention_kernel import Partials, paged_attention_launch
from lightkv.triton_kernels.classic.paged_attention_v1 import paged_attention_v1, paged_attention_v1_reference
from lightkv.triton_kernels.classic.paged_attention_v2 import (
    _paged_attention_v2,
    fitting_partition_size,
    paged_attention_v2,
    paged_attention_v2_reference,
)
from tests.support.attention.caches import assert_close, poisoned_cache
from tests.support.combinations import slow

MIXED = [130, 0, 1, 64, 63, 65, 16]


class Blocks(NamedTuple):
    """K/V in blocks, with tables and lengths: the operator's arguments after q, in order."""

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


def poisoned_blocks(
    lengths: list[int],
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
) -> Blocks:
    """Makes random K/V in shuffled blocks. Table entries past a sequence's end name a block far outside."""
    most = max(-(-length // block_size) for length in lengths) + 2
    order = torch.randperm(len(lengths) * most + 1)
    x = 16 // dtype.itemsize
    k_cache = torch.full((len(order), num_kv_heads, head_dim // x, block_size, x), torch.nan)
    v_cache = torch.full((len(order), num_kv_heads, head_dim, block_size), torch.nan)
    tables = torch.full((len(lengths), most), 2**31 - 1, dtype=torch.int32)
    for seq, length in enumerate(lengths):
        for first in range(0, length, block_size):
            block, filled = int(order[seq * most + first // block_size]), min(block_size, length - first)
            tables[seq, first // block_size] = block
            k_cache[block, :, :, :filled] = torch.randn(num_kv_heads, head_dim // x, filled, x)
            v_cache[block, :, :, :filled] = torch.randn(num_kv_heads, head_dim, filled)
    return Blocks(
        k_cache.to(device, dtype),
        v_cache.to(device, dtype),
        tables.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def inputs_of(q: Tensor, blocks: Blocks, scale: float, slopes: Tensor | None = None) -> PagedInputs:
    return PagedInputs(q, *blocks, AttentionOptions(scale).plus(None if slopes is None else Alibi(slopes)))


def check(
    blocks: Blocks,
    *,
    group: int = 2,
    spread: float = 1.0,
    partition_sizes: tuple[int | None, ...] = (0, 64, None),
    slopes: Tensor | None = None,
) -> None:
    """Compares random queries with the reference, in one partition and in several."""
    num_kv_heads, head_dim = blocks.v_cache.shape[1:3]
    dtype, device = blocks.v_cache.dtype, blocks.v_cache.device
    q = (torch.randn(len(blocks.seq_lens), group * num_kv_heads, head_dim) * spread).to(device, dtype)
    scale = head_dim**-0.5
    expected = paged_attention_v1_reference(inputs_of(q, blocks, scale, slopes))
    assert not expected.isnan().any()
    for size in partition_sizes:
        out = torch.full_like(q, torch.nan)
        settings: dict[str, Any] = {"scale": scale, "alibi_slopes": slopes, "partition_size": size}
        result = paged_attention_v1(q, *blocks, **settings, out=out)
        assert result is out
        assert_close(out, expected)
        assert not out[blocks.seq_lens == 0].any()


@pytest.mark.parametrize("block_size", [8, *slow(1, 16, 32, 128)], ids="block{}".format)
@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.float16])
def test_block_sizes(device: torch.device, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(block_size)
    blocks = poisoned_blocks(MIXED, device=device, dtype=dtype, block_size=block_size)
    check(blocks, partition_sizes=(0, max(32, block_size)))


@pytest.mark.parametrize("head_dim", [80, 256, *slow(64, 96, 112, 128, 192)], ids="dim{}".format)
@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.float16])
def test_head_dims(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    check(poisoned_blocks([70, 5, 0], device=device, dtype=dtype, head_dim=head_dim))


@pytest.mark.parametrize("group", [1, 3, *slow(4, 8)], ids="group{}".format)
def test_query_heads_per_kv_head(device: torch.device, group: int) -> None:
    torch.manual_seed(group)
    check(poisoned_blocks([33, 64], device=device), group=group)


@pytest.mark.parametrize("length", [0, 1, 64, 129, *slow(63, 65, 127, 128, 300)], ids="len{}".format)
def test_lengths_around_tiles_and_partitions(device: torch.device, length: int) -> None:
    torch.manual_seed(length)
    blocks = poisoned_blocks([length], device=device, num_kv_heads=1)
    check(blocks, group=1, partition_sizes=(0, 16, 128, 512))


def test_scores_far_apart(device: torch.device) -> None:
    torch.manual_seed(1)
    check(poisoned_blocks([200, 40], device=device), spread=30.0)


def test_agrees_with_attention_over_a_pool_of_slots(device: torch.device) -> None:
    torch.manual_seed(2)
    lengths, block_size = [50, 16, 3, 0], 16
    cache = poisoned_cache(lengths, device=device)
    num_blocks = -(-max(lengths) // block_size)
    # Each sequence's tokens fill its blocks in order; slot 0 follows them.
    slots = torch.zeros(len(lengths), num_blocks * block_size, dtype=torch.int64, device=device)
    for seq, length in enumerate(lengths):
        slots[seq, :length] = cache.kv.index[cache.rows[seq], :length]
    tables = torch.arange(len(lengths) * num_blocks, dtype=torch.int32, device=device).view(len(lengths), -1)
    k_cache, v_cache = copy_to_blocks(*cache.kv[:2], slots.view(-1, block_size))
    assert k_cache.shape == (len(lengths) * num_blocks, 2, 64 // 4, block_size, 4)
    assert v_cache.shape == (len(lengths) * num_blocks, 2, 64, block_size)
    token = cache.kv.k[slots[0, 21]]
    assert torch.equal(k_cache[1, :, :, 5].flatten(1), token)

    q = torch.randn(len(lengths), 4, 64, device=device)
    expected = decode_attention_reference(q, *cache)
    arguments = (q, k_cache, v_cache, tables, cache.lengths)
    assert_close(paged_attention_v1_reference(PagedInputs(*arguments, AttentionOptions(0.125))), expected)
    assert_close(paged_attention_v1(*arguments, scale=0.125), expected)
    assert_close(paged_attention_v1(*arguments, scale=0.125, partition_size=32), expected)


def test_strides_and_a_bound_on_the_lengths(device: torch.device) -> None:
    torch.manual_seed(3)
    blocks = poisoned_blocks([70, 5], device=device)
    wide = torch.stack((blocks.v_cache, torch.full_like(blocks.v_cache, torch.nan)), dim=1)
    q = torch.randn(2, 2, 4, 64, device=device)[:, 1]
    out = torch.full((2, 4, 96), torch.nan, device=device)
    arguments = (q, blocks.k_cache, wide[:, 0], *blocks[2:])
    expected = paged_attention_v1_reference(inputs_of(q, blocks, 0.125))
    settings = {"scale": 0.125, "partition_size": 32, "max_seq_len": 70, "out": out[..., :64]}
    assert_close(paged_attention_v1(*arguments, **settings), expected)
    assert out[..., 64:].isnan().all()
    assert_close(paged_attention_v1(*arguments, scale=0.125), expected)


def test_no_sequences(device: torch.device) -> None:
    blocks = poisoned_blocks([5], device=device)
    empty = torch.zeros(0, 4, 64, device=device)
    for partition_size in (0, 32):
        out = paged_attention_v1(
            empty, *blocks[:2], *(x[:0] for x in blocks[2:]), scale=1.0, partition_size=partition_size
        )
        assert out.shape == (0, 4, 64)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    blocks = poisoned_blocks([40, 3], device=device)
    good: dict[str, Any] = blocks._asdict() | {"q": torch.zeros(2, 4, 64, device=device), "scale": 1.0}
    q, k_cache, v_cache, tables, lens = (
        good[name] for name in ("q", "k_cache", "v_cache", "block_tables", "seq_lens")
    )
    for match, change in [
        ("q must be", {"q": q[0]}),
        ("k_cache must be", {"k_cache": k_cache[0]}),
        ("v_cache must be", {"v_cache": v_cache[1:]}),
        ("v_cache must be", {"v_cache": v_cache[..., :8]}),
        ("v_cache must be", {"q": q[..., :32]}),
        ("evenly", {"q": q[:, :3]}),
        ("powers of two", {"k_cache": k_cache[:, :, :, :12], "v_cache": v_cache[..., :12]}),
        ("contiguous", {"k_cache": k_cache[:, :, :, :8], "v_cache": v_cache[..., :8]}),
        ("block_tables must be", {"block_tables": tables.long()}),
        ("block_tables must be", {"block_tables": tables[:, ::2]}),
        ("seq_lens must be", {"seq_lens": lens.long()}),
        ("seq_lens must be .*S 2", {"seq_lens": lens[:1]}),
        ("block_tables must be .*S 2", {"block_tables": tables[:1]}),
        ("out must be", {"out": q[:1]}),
        ("q must be .*make it contiguous", {"q": q.mT.contiguous().mT}),
        ("out must be .*make it contiguous", {"out": q.mT.contiguous().mT}),
        ("scale must be positive", {"scale": 0.0}),
        ("multiple of the 16 tokens", {"partition_size": 24}),
        ("multiple of the 16 tokens", {"partition_size": -16}),
        ("at most the 80 tokens", {"partition_size": 32, "max_seq_len": 81}),
    ]:
        with pytest.raises(ValueError, match=match):
            paged_attention_v1(**good | change)
    slots = torch.zeros(1, 16, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="multiple of 4 dims"):
        copy_to_blocks(torch.zeros(3, 2, 6, device=device), torch.zeros(3, 2, 6, device=device), slots)


@pytest.mark.parametrize("group", [3, *slow(1, 8)])
def test_alibi(device: torch.device, group: int) -> None:
    torch.manual_seed(7)
    blocks = poisoned_blocks(MIXED, device=device)
    check(blocks, group=group, slopes=alibi_slopes(2 * group, device=device))


def test_groups_of_more_heads_than_a_tile(device: torch.device) -> None:
    torch.manual_seed(8)
    assert paged_attention_launch(tuning.device_class(device), 71, 64, 2).block_m == 64
    check(poisoned_blocks([33, 0, 70], device=device, num_kv_heads=1), group=71)


@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.float16])
@pytest.mark.parametrize("biased", [*slow(False), True])
def test_what_a_partition_writes(device: torch.device, dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(9)
    blocks = poisoned_blocks(MIXED, device=device, dtype=dtype)
    q = torch.randn(len(MIXED), 4, 64).to(device, dtype)
    slopes = alibi_slopes(4, device=device) if biased else None
    settings = {"scale": 0.125, "partition_size": 32, "alibi_slopes": slopes}
    names = ("exp_sums", "max_logits", "tmp_out")
    partials = {name: torch.zeros(len(MIXED), 4, 7, device=device) for name in names[:2]}
    partials["tmp_out"] = torch.zeros(len(MIXED), 4, 7, 64, dtype=dtype, device=device)
    out = paged_attention_v2(q, *blocks, **settings, **partials)
    inputs = inputs_of(q, blocks, 0.125, slopes)
    assert_close(out, paged_attention_v1_reference(inputs))
    expected = paged_attention_v2_reference(inputs, 32, num_partitions=7)
    for name, one in zip(names, expected, strict=True):
        torch.testing.assert_close(partials[name], one.to(partials[name].dtype), rtol=5e-3, atol=5e-3)


def test_partitions_fill_the_device() -> None:
    hopper = tuning.DeviceClass(132, 227 * 1024, 9)
    for num_programs, num_tokens, size in [(8, 1024, 32), (8, 8192, 128), (64, 4096, 512), (512, 8192, 512)]:
        assert fitting_partition_size(hopper, num_programs, num_tokens, 16) == size
    assert fitting_partition_size(hopper, 8, 1024, 128) == 128


@pytest.mark.parametrize(("size", "partitions"), [(0, 1), (16, 5)])
def test_a_partition_size_of_0_makes_one_partition(
    size: int, partitions: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Partials] = []
    monkeypatch.setattr(
        "lightkv.triton_kernels.classic.paged_attention_v2.attend_partitions",
        lambda _inputs, partials, _size, _out: made.append(partials),
    )
    blocks = poisoned_blocks([40, 3], device=device)  # with room for 5 blocks
    q = torch.zeros(2, 4, 64, device=device)
    paged_attention_v1(q, *blocks, scale=1.0, partition_size=size)
    assert [one.exp_sums.shape for one in made] == [(2, 4, partitions)]


def test_refuses_partials_that_do_not_fit(device: torch.device) -> None:
    blocks = poisoned_blocks([40, 3], device=device)
    q = torch.zeros(2, 4, 64, device=device)
    sums, tmp_out = torch.zeros(2, 4, 3, device=device), torch.zeros(2, 4, 3, 64, device=device)
    good = {"exp_sums": sums, "max_logits": sums.clone(), "tmp_out": tmp_out, "partition_size": 32}
    assert not paged_attention_v2(q, *blocks[:3], blocks.seq_lens * 0, scale=1.0, **good).any()
    for match, change in [
        ("together", {"tmp_out": None}),
        ("together", {"exp_sums": None}),
        ("give at least 5", {"partition_size": 16}),
        ("tmp_out must be .*D 64", {"tmp_out": tmp_out[..., :32]}),
        ("max_logits must be contiguous", {"max_logits": sums.double()}),
        ("tmp_out must be contiguous", {"tmp_out": tmp_out.int()}),
        ("got 0", {"partition_size": 0}),
        ("got 24", {"partition_size": 24}),
    ]:
        with pytest.raises(ValueError, match=match):
            paged_attention_v2(q, *blocks, scale=1.0, **good | change)
    for match, wrong in [
        ("must be positive", {"scale": -1.0}),
        ("float32 \\[H\\], with H 4", {"alibi_slopes": torch.zeros(3, device=device)}),
        ("one dtype", {"k_cache": blocks.k_cache.double()}),
    ]:
        with pytest.raises(ValueError, match=match):
            paged_attention_v1(**{"q": q, **blocks._asdict(), "scale": 1.0} | wrong)


def test_stays_one_operator_under_torch_compile(device: torch.device) -> None:
    torch.manual_seed(4)
    blocks = poisoned_blocks([40, 3], device=device)
    q = torch.randn(2, 4, 64, device=device)
    k_cache, v_cache = blocks.k_cache.nan_to_num(), blocks.v_cache.nan_to_num()
    whole = blocks._replace(k_cache=k_cache, v_cache=v_cache, block_tables=blocks.block_tables.clamp(max=0))
    inputs = inputs_of(q, whole, 0.125, alibi_slopes(4, device=device))
    # Zeros, since opcheck compares all elements, also those that no partition writes.
    out, sums = torch.zeros_like(q), torch.zeros(2, 4, 3, device=device)
    partials = sums, sums.clone(), torch.zeros(2, 4, 3, 64, device=device)
    arguments = _paged_attention_v2.flat(inputs, Partials(*partials), 32, out)
    torch.library.opcheck(torch.ops.lightkv.paged_attention_v2.default, arguments)

    forms: list[dict[str, Any]] = [{}, {"partition_size": 32}, {"partition_size": 0}]

    def step(q: Tensor) -> list[Tensor]:
        return [paged_attention_v1(q * 2, *blocks, scale=0.125, **form) + 1 for form in forms]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(got, wanted) for got, wanted in zip(compiled(q), step(q), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["one partition", "partitions"])
def test_captured_follows_its_lengths(form: str) -> None:
    torch.manual_seed(5)
    blocks = poisoned_blocks([700, 300, 0, 1025], device="cuda", dtype=torch.bfloat16, head_dim=128)
    q = torch.randn(4, 8, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.full_like(q, torch.nan)

    def step() -> None:
        settings: dict[str, Any] = {"scale": 128**-0.5, "out": out}
        settings["partition_size"] = 512 if form == "partitions" else 0
        paged_attention_v1(q, *blocks, **settings)

    step()  # compiles outside the capture
    assert_close(out, paged_attention_v1_reference(inputs_of(q, blocks, 128**-0.5)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    blocks.seq_lens.copy_(torch.tensor([513, 0, 0, 1000], device="cuda"))
    out.fill_(torch.nan)
    graph.replay()
    assert_close(out, paged_attention_v1_reference(inputs_of(q, blocks, 128**-0.5)))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_bfloat16_on_a_gpu(head_dim: int, block_size: int) -> None:
    torch.manual_seed(10)
    blocks = poisoned_blocks(
        [1, 700, 33, 0, 2048], device="cuda", dtype=torch.bfloat16, head_dim=head_dim, block_size=block_size
    )
    check(blocks, group=4, partition_sizes=(0, 512), slopes=alibi_slopes(8, device="cuda"))
    check(blocks, group=8, partition_sizes=(0, 512))


@pytest.mark.gpu
def test_bfloat16_in_caches_past_2_to_the_31_elements() -> None:
    torch.manual_seed(6)
    num_blocks = 2**31 // (8 * 128 * 16) + 100
    k_cache = torch.full((num_blocks, 8, 16, 16, 8), torch.nan, dtype=torch.bfloat16, device="cuda")
    v_cache = torch.full((num_blocks, 8, 128, 16), torch.nan, dtype=torch.bfloat16, device="cuda")
    tables = (num_blocks - 1 - torch.randperm(50, device="cuda")[:12]).int().view(2, 6)
    k_cache[-50:], v_cache[-50:] = torch.randn_like(k_cache[-50:]), torch.randn_like(v_cache[-50:])
    lens = torch.tensor([96, 81], dtype=torch.int32, device="cuda")
    q = torch.randn(2, 32, 128, dtype=torch.bfloat16, device="cuda")
    blocks = Blocks(k_cache, v_cache, tables, lens)
    expected = paged_attention_v1_reference(inputs_of(q, blocks, 128**-0.5))
    forms: list[dict[str, Any]] = [{}, {"partition_size": 64}, {"partition_size": 0}]
    for form in forms:
        out = paged_attention_v1(q, k_cache, v_cache, tables, lens, scale=128**-0.5, **form)
        assert_close(out, expected)
