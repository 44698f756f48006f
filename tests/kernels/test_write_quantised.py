"""Compares `write_kv` with its reference where K or V is quantised: bytes, scales and the slots that are not
written, in every format, with biases and rotary positions. Where heads are multiplied by a Hadamard matrix,
sums are in another order, so there an element may be off by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightkv import KVPool, KVSpec
from lightkv.triton_kernels.quantised.kv_format import Elements, KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import hadamard, split_scales, unpack
from lightkv.triton_kernels.write.inputs import UNCHANGED, Biases, Changes, Rotation, StoredKV
from lightkv.triton_kernels.write.write_kv import _write_kv, split_qkv, write_kv, write_kv_reference
from tests.support.combinations import each_value, slow

NUM_SLOTS = 64
SYMMETRIC = KVFormat(Elements(4, group=8))
# The interpreter rounds to fp8 in another way.
INTEGERS = ("int8", "int8-g8", "int4", "int4-g16", SYMMETRIC)
FORMATS = [*INTEGERS, pytest.param("fp8-static", marks=pytest.mark.gpu)]
# One with a scale for each head, and one of packed elements with several.
SOME_FORMATS = ["int8", "int4-g16", *slow("int8-g8", "int4", SYMMETRIC), FORMATS[-1]]


def make_pool(
    name: str | KVFormat, heads: int, dims: tuple[int, int], dtype: torch.dtype, device: Any
) -> KVPool:
    """Returns a pool of one layer whose every byte is the same."""
    pool = KVPool(KVSpec(1, heads, *dims, dtype, name), NUM_SLOTS, torch.device(device))
    for buffer in pool.buffers:
        buffer.view(torch.uint8).fill_(0x35)
    if pool.format(0).is_static:
        pool.set_static_scales(0, torch.tensor([0.013]), 0.01 * torch.arange(1.0, heads + 1))
    return pool


def stored_in(pool: KVPool) -> StoredKV:
    """Returns the pool's layer, as both functions take it."""
    return StoredKV(pool.k(0), pool.v(0), pool.scales(0), pool.format(0))


def assert_equal_heads(
    ours: Tensor, theirs: Tensor, our_scales: Tensor, their_scales: Tensor, elements: Elements
) -> None:
    """Compares stored heads and what stands beside them."""
    assert ours.dtype == theirs.dtype
    if not elements.has_hadamard:
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert torch.equal(our_scales, their_scales)
        return
    # Each scale that is rounded to the next number of float16 moves the zero point by 8 times as much.
    scales = their_scales.float().split(elements.groups(ours.shape[-1] * 8 // elements.bits), -1)
    for our_part, part in zip(our_scales.float().split(scales[0].shape[-1], -1), scales, strict=True):
        assert ((our_part - part).abs() <= 2**-9 * (8 * scales[0] + part.abs())).all()
    assert (our_scales != their_scales).sum() <= 1 + their_scales.numel() * 0.02
    difference = (unpack(ours, elements) - unpack(theirs, elements)).abs()
    assert (difference <= 1).all()
    assert (difference > 0).sum() <= 1 + difference.numel() * 0.005


def check(
    name: str | KVFormat,
    *,
    device: torch.device | str,
    num_tokens: int = 20,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    dims: tuple[int, int] = (64, 64),
    num_pairs: int = 32,
    interleaved: bool = False,
    biases: str = "",
    with_q: bool = True,
    dtype: torch.dtype = torch.float32,
    slot_dtype: torch.dtype = torch.int64,
    table_dtype: torch.dtype = torch.float32,
) -> None:
    """Writes views of a fused projection to one pool by the kernel, and to another one by the reference."""
    sizes = (num_heads, num_kv_heads, *dims)
    width = num_heads * dims[0] + num_kv_heads * sum(dims)
    qkv = (torch.randn(num_tokens, width) * 3 + 1).to(device, dtype)
    split_bias = split_qkv(torch.randn(width).to(device, dtype), *sizes)
    settings: dict[str, Any] = {
        "biases": Biases(*(x if one in biases else None for one, x in zip("qkv", split_bias, strict=True)))
    }
    if num_pairs:
        cos, sin = torch.randn(num_tokens, 2, num_pairs, device=device).to(table_dtype).unbind(1)
        settings["rotation"] = Rotation(cos.contiguous(), sin, interleaved)  # rows of two strides
    slots = (torch.randperm(NUM_SLOTS - 1, device=device)[:num_tokens] + 1).to(slot_dtype)

    pools, queries = [], []
    for write in (write_kv, write_kv_reference):
        pool = make_pool(name, num_kv_heads, dims, dtype, device)
        q, k, v = split_qkv(qkv.clone(), *sizes)
        write(k, v, stored_in(pool), slots, q if with_q else None, Changes(**settings))
        pools.append(pool)
        queries.append((q, k, v))
    for ours, theirs in zip(*queries, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(queries[0][1], split_qkv(qkv, *sizes)[1])
    others = torch.ones(NUM_SLOTS, dtype=torch.bool, device=device).index_fill_(0, slots.long(), False)
    for buffer in pools[0].buffers:
        assert (buffer.view(torch.uint8)[others] == 0x35).all()
    written = slots.long()
    ours, theirs = map(stored_in, pools)
    layer_format = ours[3]
    scales = (split_scales(one[2][written], layer_format, dims[0]) for one in (ours, theirs))
    for one, other, *of_one in zip(ours[:2], theirs[:2], *scales, strict=True):
        assert_equal_heads(one[written], other[written], *of_one, layer_format.elements)


@each_value(name=FORMATS, dim=[64, 80, 128])
def test_formats(name: str | KVFormat, dim: int, device: torch.device) -> None:
    torch.manual_seed(dim)
    check(name, device=device, dims=(dim, dim), num_pairs=dim // 2)


@pytest.mark.parametrize(
    "name",
    [
        "int8",
        "int4",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8-g8", "int4-g16", SYMMETRIC)),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
def test_partial_rotary_dims_and_biases(
    name: str | KVFormat, interleaved: bool, device: torch.device
) -> None:
    torch.manual_seed(1)
    settings: dict[str, Any] = {"interleaved": interleaved, "device": device}
    check(name, dims=(80, 80), num_pairs=16, biases="qkv", **settings)
    check(name, dims=(64, 64), num_pairs=24, biases="k", **settings)


@pytest.mark.parametrize("name", SOME_FORMATS)
def test_dims_of_k_and_v_differ(name: str | KVFormat, device: torch.device) -> None:
    torch.manual_seed(2)
    check(name, device=device, dims=(192, 128), num_pairs=32)
    check(name, device=device, dims=(32, 96), num_pairs=16, num_kv_heads=3, num_heads=3)


@pytest.mark.parametrize("name", SOME_FORMATS)
def test_without_rotary_positions(name: str | KVFormat, device: torch.device) -> None:
    torch.manual_seed(3)
    check(name, device=device, num_pairs=0, with_q=False)
    check(name, device=device, num_pairs=0, biases="qv", slot_dtype=torch.int32)


@each_value(name=INTEGERS, num_tokens=[0, 1, 15, 16, 33])
def test_numbers_of_tokens(name: str | KVFormat, num_tokens: int, device: torch.device) -> None:
    torch.manual_seed(num_tokens)
    check(name, device=device, num_tokens=num_tokens, slot_dtype=torch.int32, num_heads=1, num_kv_heads=1)


@pytest.mark.parametrize("name", INTEGERS)
def test_float16_with_a_row_of_angles_for_each_token(name: str | KVFormat, device: torch.device) -> None:
    torch.manual_seed(4)
    check(name, device=device, dtype=torch.float16, table_dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*INTEGERS, "fp8-static"])
def test_bfloat16(name: str | KVFormat) -> None:
    torch.manual_seed(5)
    check(name, device="cuda", dtype=torch.bfloat16, table_dtype=torch.bfloat16)
    check(name, device="cuda", dtype=torch.bfloat16, dims=(256, 256), num_pairs=128, num_tokens=50)


@pytest.mark.parametrize("name", ["int8", "int8-g8", "int4", "int4-g16"])
def test_heads_of_zeros_tiny_and_huge_values(name: str, device: torch.device) -> None:
    for value in (0.0, 1e-30, 2.0, 65_280.0, -65_504.0, 65_505.0, -1e6, 1e30):
        # The Hadamard transform makes ± value of it exactly, in any order of its sums.
        k = torch.zeros(3, 1, 64, device=device)
        k[:, :, 5] = 8 * value
        slots = torch.tensor([4, 9, 1], device=device)
        pools = [make_pool(name, 1, (64, 64), torch.float32, device) for _ in range(2)]
        for pool, write in zip(pools, (write_kv, write_kv_reference), strict=True):
            write(k, k, stored_in(pool), slots)
        ours, theirs = map(stored_in, pools)
        for one, other in zip(ours[:3], theirs[:3], strict=True):
            assert torch.equal(one, other)
        assert ours[2].isfinite().all()


def test_slot_0_takes_any_number_of_padding_tokens(device: torch.device) -> None:
    k = torch.arange(1.0, 41.0, device=device)[:, None, None] * torch.linspace(-1, 1, 64, device=device)
    slots = torch.zeros(40, dtype=torch.int32, device=device)
    slots[3] = 5
    for name in ("int8", SYMMETRIC):
        pool = make_pool(name, 1, (64, 64), torch.float32, device)
        expected = make_pool(name, 1, (64, 64), torch.float32, device)
        write_kv(k, -k, stored_in(pool), slots)
        write_kv_reference(k[3:4], -k[3:4], stored_in(expected), slots[3:4])
        for ours, theirs in zip(pool.buffers, expected.buffers, strict=True):
            assert torch.equal(ours[1:], theirs[1:])


def test_the_transform_is_that_of_hadamard(device: torch.device) -> None:
    layer_format = KVFormat.parse("int8-hadamard")
    for dim in (64, 80, 96):
        torch.manual_seed(dim)
        k, v = torch.randn(2, 6, 2, dim, device=device)
        caches = torch.zeros(2, NUM_SLOTS, 2, dim, dtype=torch.int8, device=device).unbind()
        scales = torch.zeros(NUM_SLOTS, 2, 2, device=device)
        slots = torch.arange(1, 7, device=device)
        write_kv(k, v, StoredKV(*caches, scales, layer_format), slots)
        expected = k @ hadamard(dim, k.device)
        step = scales[slots, :, :1]
        torch.testing.assert_close(step, expected.abs().amax(-1, keepdim=True) / 127, rtol=1e-4, atol=0.0)
        assert ((caches[0][slots] * step - expected).abs() <= 0.501 * step).all()


@pytest.mark.parametrize("name", ["auto", "int8"])
def test_tokens_after_the_last_one_are_left_alone(name: str, device: torch.device) -> None:
    torch.manual_seed(9)
    qkv = torch.randn(9, 3, 16, device=device)
    before, slots = qkv.clone(), torch.arange(1, 10, device=device)
    pool = make_pool(name, 1, (16, 16), torch.float32, device)
    q, k, v = split_qkv(qkv[:5].flatten(1), 1, 1, 16)
    by = Rotation(*torch.randn(2, 5, 8, device=device))
    write_kv(k, v, stored_in(pool), slots[:5], q=q, by=Changes(by))
    assert torch.equal(qkv[5:], before[5:])
    assert not torch.equal(qkv[4, 0], before[4, 0])
    for buffer in pool.buffers:
        stored = buffer.view(torch.uint8)
        assert (stored[6:] == 0x35).all()
        assert (stored[1:6] != 0x35).any()


def test_static_scales_are_read_and_stay(device: torch.device) -> None:
    torch.manual_seed(8)
    elements = Elements(8, is_static=True)
    k, v = torch.randn(2, 6, 2, 16, device=device)
    scales = torch.tensor([[0.01, 0.02], [0.03, 0.04]], device=device)  # of K and V, for each head
    slots = torch.tensor([3, 61, 9, 2, 7, 8], device=device)
    caches, others = torch.zeros(2, 2, NUM_SLOTS, 2, 16, dtype=torch.int8, device=device)
    before, of_every_slot = scales.clone(), scales.expand(NUM_SLOTS, 2, 2)
    write_kv(k, v, StoredKV(*caches, of_every_slot, KVFormat(elements)), slots)
    for x, cache, scale in zip((k, v), caches, scales.unbind(1), strict=True):
        expected = (x * (1 / scale[:, None])).round().clamp(-127, 127)
        assert torch.equal(cache[slots].float(), expected)
    assert torch.equal(scales, before)
    # Compiled, the operator may get the scales with another stride of slots.
    stored = StoredKV(*others, before[None], KVFormat(elements))
    torch.ops.lightkv.write_kv(*_write_kv.flat(k, v, stored, slots, None, UNCHANGED))
    assert torch.equal(caches, others)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    k = torch.zeros(4, 2, 80, device=device)
    pool = make_pool("int8", 2, (80, 80), torch.float32, device)
    stored = stored_in(pool)
    assert stored.scales is not None
    bytes_of_k, scales = stored.k.view(torch.uint8), stored.scales
    strided = stored.v.transpose(1, 2).contiguous().transpose(1, 2)
    slots = torch.arange(1, 5, device=device)
    good: dict[str, Any] = {"k": k, "v": k, "stored": stored, "slots": slots}
    before = pool.kv(0).clone()
    for change, told in (
        ({"k": k[0]}, r"k must be \[T, h, Dk\]"),
        ({"v": k[:3]}, "v must be"),
        ({"stored": stored._replace(v=stored.v[:, :1])}, "stored_v must be .* h 2"),
        ({"stored": stored._replace(format=KVFormat.parse("int4"))}, "Wk 40"),
        ({"stored": stored._replace(k=bytes_of_k)}, "k must be torch.int8 in this format, got torch.uint8"),
        ({"stored": StoredKV(stored.k, stored.v)}, "k must be of a floating type"),
        ({"stored": stored._replace(v=strided)}, "last stride"),
        (
            {"stored": stored._replace(scales=scales.half())},
            r"scales must be float32 .*got torch.float16",
        ),
        ({"stored": stored._replace(scales=scales[:9])}, "scales must be"),
        ({"stored": stored._replace(scales=scales[..., :1])}, "scales must be"),
        ({"stored": stored._replace(scales=None)}, "no scales, and"),
        ({"stored": stored._replace(format=KVFormat.parse("int8-g40"))}, "powers of 2"),
        ({"stored": stored._replace(format=KVFormat.parse("int8-g7"))}, "do not fit 7 elements"),
        ({"stored": StoredKV(k, k, scales)}, "or no scales"),
        ({"slots": slots[:3]}, "slots must be"),
        ({"slots": slots.float()}, "int32 or int64"),
        ({"q": k}, "nothing is to be done to q"),
        ({"by": Changes(Rotation(k[:, 0, :41], k[:, 0, :41]))}, "41 columns, and 80 dims"),
        ({"by": Changes(biases=Biases(k=k[0, :1]))}, "bias_k must be"),
    ):
        for write in (write_kv, write_kv_reference):
            with pytest.raises(ValueError, match=told):
                write(**good | change)
    assert torch.equal(pool.kv(0), before)


def test_stays_one_operator_under_torch_compile(device: torch.device) -> None:
    torch.manual_seed(6)
    k, v = torch.randn(2, 6, 1, 16, device=device)
    slots = torch.tensor([3, 1, 9, 2, 7, 8], device=device)
    ours, theirs = (make_pool("int8-g8", 1, (16, 16), torch.float32, device) for _ in range(2))
    layer_format = ours.format(0)
    caches = [cache.clone() for cache in stored_in(ours)[:3]]  # compiled, views of two types may not share
    copies = [cache.clone() for cache in caches]
    arguments = _write_kv.flat(k, v, StoredKV(*copies, layer_format), slots, None, UNCHANGED)
    torch.library.opcheck(torch.ops.lightkv.write_kv.default, arguments)

    def step(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scales: Tensor) -> Tensor:
        write_kv(k * 2, v, StoredKV(k_cache, v_cache, scales, layer_format), slots)
        return scales.sum()

    total = torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, *caches)
    write_kv_reference(k * 2, v, stored_in(theirs), slots)
    for one, other in zip(caches, stored_in(theirs)[:3], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(total, caches[2].sum())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int8", "int4", "fp8-static"])
def test_captured_write_follows_its_slots(name: str) -> None:
    torch.manual_seed(7)
    k, v = torch.randn(2, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    ours, theirs = (make_pool(name, 2, (64, 64), torch.bfloat16, "cuda") for _ in range(2))
    slots = torch.zeros(8, dtype=torch.int32, device="cuda")
    write_kv(k, v, stored_in(ours), slots)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            write_kv(k, v, stored_in(ours), slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    slots.copy_(torch.tensor([9, 3, 60, 5, 0, 0, 0, 0], device="cuda"))
    graph.replay()
    write_kv(k, v, stored_in(theirs), slots)
    for one, other in zip(ours.buffers, theirs.buffers, strict=True):
        assert torch.equal(one[1:], other[1:])
