"""Attention over quantised K/V against float64 attention on what the elements and scales stand for.

Slots are shuffled, and the scales of all free slots are NaN. bfloat16, which the interpreter gets wrong, is
tested on a GPU.
"""

import pytest
import torch
from torch import Tensor

from lightkv import KVPool, KVSpec
from lightkv.triton_kernels.attention.decode.decode_attention import (
    decode_attention,
    decode_attention_reference,
)
from lightkv.triton_kernels.attention.decode.decode_plan import decode_plan
from lightkv.triton_kernels.attention.mixed_attention import mixed_attention, mixed_attention_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.variants import Alibi, Chunk, SinkLogits, Softcap, Window
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from lightkv.triton_kernels.quantised.kv_format import Elements, KVFormat
from tests.support.attention.caches import Cache, assert_close, share_first_keys
from tests.support.combinations import each_value, slow

COMMON = ("int8", "fp8-static", "int8-g8", "int4")
RARE = ("int8-hadamard", "int4-g16", KVFormat(Elements(4, group=8)))  # the last is OpenPPL's
NAMES = [*COMMON, *slow(*RARE)]
TYPES = [
    torch.float32,
    *slow(torch.float16),
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]


def quantised_cache(
    lengths: list[int],
    name: str | KVFormat,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int = 2,
    k_dim: int = 64,
    v_dim: int = 64,
    factor: float = 1.0,
) -> Cache:
    """Makes random K/V in shuffled slots of a pool, whose other slots have NaN for scales."""
    spec = KVSpec(1, num_kv_heads, k_dim, v_dim, dtype, name)
    num_slots = sum(lengths) + 20
    pool = KVPool(spec, num_slots, device)
    for buffer in pool.buffers:
        buffer.fill_(float("nan") if buffer.is_floating_point() else 0x7F)
    if spec.format.is_static:
        pool.set_static_scales(0, torch.tensor([0.01]), torch.rand(num_kv_heads) * 0.01 + 0.005)
    slots = 1 + torch.randperm(num_slots - 1)[: sum(lengths)]
    k, v = (torch.randn(len(slots), num_kv_heads, dim) + 0.5 for dim in (k_dim, v_dim))
    k[:, :, 3] *= 8  # an outlier
    k, v = k * factor, v * factor
    pool.write(0, slots.to(device), k.to(device, dtype), v.to(device, dtype))
    index = torch.zeros(len(lengths) + 1, max(*lengths, 1) + 3, dtype=torch.int32)
    rows = 1 + torch.randperm(len(lengths))
    for row, part in zip(rows.tolist(), slots.split(lengths), strict=True):
        index[row, : len(part)] = part.int()
    kv = PagedKV(pool.k(0), pool.v(0), index.to(device), scales=pool.scales(0), format=spec.format)
    return Cache(kv, rows.to(device), torch.tensor(lengths, dtype=torch.int32, device=device))


def queries(cache: Cache, num_tokens: int, dtype: torch.dtype, group: int = 4) -> Tensor:
    q = torch.randn(num_tokens, group * cache.kv.k.shape[1], cache.kv.key_dim)
    return q.to(cache.rows.device, dtype)


def starts(counts: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)


def check_decode(
    cache: Cache, dtype: torch.dtype, options: AttentionOptions = DEFAULT_OPTIONS, num_queries: int = 1
) -> None:
    q = queries(cache, num_queries * len(cache.rows), dtype)
    out = decode_attention(q, *cache, options, num_queries=num_queries)
    assert_close(out, decode_attention_reference(q, *cache, options, num_queries=num_queries))


def with_scales_apart(kv: PagedKV) -> PagedKV:
    """The same K/V with the scales of K and those of V in two tensors."""
    assert kv.scales is not None
    own = kv.format.elements.num_scales(kv.key_dim)
    apart = torch.stack((kv.scales[..., :own], kv.scales[..., own:]), 1)  # [slots, 2, heads, scales]
    return kv._replace(scales=apart[:, 0], v_scales=apart[:, 1])


@pytest.mark.parametrize("name", [*slow("int8"), "int8-g8"])
def test_scales_of_k_and_v_may_stand_apart(name: str, device: torch.device) -> None:
    torch.manual_seed(11)
    cache = quantised_cache([35, 0, 9], name, device)
    kv = with_scales_apart(cache.kv)
    q = queries(cache, 3, torch.float32)
    assert torch.equal(decode_attention(q, kv, *cache[1:]), decode_attention(q, *cache))
    q = queries(cache, 9, torch.float32)
    begins = starts([5, 0, 4], device)
    of_rows = (cache.rows, begins, cache.lengths)
    assert torch.equal(prefill_attention(q, kv, *of_rows), prefill_attention(q, cache.kv, *of_rows))
    assert torch.equal(
        prefill_attention_reference(q, kv, *of_rows), prefill_attention_reference(q, cache.kv, *of_rows)
    )
    with pytest.raises(ValueError, match="scales must be float32 or float16"):
        decode_attention(q[:3], kv._replace(scales=cache.kv.scales), *cache[1:])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_decode(name: str | KVFormat, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(1)
    check_decode(quantised_cache([0, 1, 133], name, device, dtype=dtype), dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.parametrize("name", ["int4", *slow("int4-g16")])
@pytest.mark.parametrize("factor", [*slow(1e4), 1e5])
def test_values_beyond_float16_give_no_nan(
    factor: float, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(12)
    cache = quantised_cache([70, 33], name, device, dtype=dtype, factor=factor)
    q = queries(cache, 2, dtype) / factor
    decoded = decode_attention(q, *cache)
    prefilled = prefill_attention(q, cache.kv, cache.rows, starts([1, 1], device), cache.lengths)
    expected = decode_attention_reference(q, *cache)
    for out in (decoded, prefilled):
        assert out.isfinite().all()
        if device.type == "cpu":  # a GPU rounds queries to float16, and these are tiny
            assert_close(out / factor, expected / factor)


@each_value(name=["int8", "int4", *slow("int8-g8")], dims=[(80, 80), (96, 64), *slow((16, 16), (128, 128))])
def test_head_dims(name: str, dims: tuple[int, int], device: torch.device) -> None:
    k_dim, v_dim = dims
    torch.manual_seed(2)
    cache = quantised_cache([70, 33], name, device, k_dim=k_dim, v_dim=v_dim, dtype=torch.float16)
    check_decode(cache, torch.float16)


# In 16 bits a single query has a narrow tile, and in float32 it has not.
@each_value(
    variant=[Window(20), Softcap(5.0), Chunk(32)],
    name=["int8", "int4"],
    num_queries=[1, 3],
    dtype=[torch.float32, torch.float16],
)
def test_decode_options(
    variant: Window | Softcap | Chunk, name: str, num_queries: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(3)
    cache = quantised_cache([5, 133], name, device, dtype=dtype)
    check_decode(cache, dtype, AttentionOptions().plus(variant), num_queries)


@each_value(variant=["alibi", "sinks"], dtype=[torch.float32, torch.float16])
def test_decode_with_sinks_and_alibi(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(4)
    slopes, sinks = alibi_slopes(8, device=device), torch.randn(8, device=device)
    cache = quantised_cache([5, 133], "int4", device, dtype=dtype)
    added = Alibi(slopes) if variant == "alibi" else SinkLogits(sinks)
    check_decode(cache, dtype, AttentionOptions().plus(added))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_prefill(name: str | KVFormat, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(5)
    cache = quantised_cache([70, 20, 7], name, device, dtype=dtype)
    counts = [30, 20, 2]
    q, q_starts = queries(cache, sum(counts), dtype), starts(counts, device)
    out = prefill_attention(q, cache.kv, cache.rows, q_starts, cache.lengths)
    assert_close(out, prefill_attention_reference(q, cache.kv, cache.rows, q_starts, cache.lengths))


@pytest.mark.parametrize("name", [*slow("int8"), "int4"])
def test_a_step_of_prefills_and_decodes(name: str, device: torch.device) -> None:
    torch.manual_seed(6)
    cache = quantised_cache([60, 9, 70, 33], name, device)
    q, q_starts = queries(cache, 32, torch.float32), starts([25, 5], device)
    arguments = q, cache.kv, cache.rows, q_starts, cache.lengths
    assert_close(mixed_attention(*arguments), mixed_attention_reference(*arguments))


@pytest.mark.parametrize("name", [*slow("int8"), "int4"])
def test_shared_prefixes(name: str, device: torch.device) -> None:
    torch.manual_seed(8)
    cache = quantised_cache([80, 75, 90], name, device)
    scales = cache.kv.scales
    assert scales is not None
    # The scales of the slots that are no longer used become NaN.
    prefixes = share_first_keys(
        cache._replace(kv=cache.kv._replace(k=scales, v=scales)), [(64, [0, 1, 2])], 4
    )
    plan = decode_plan(
        cache.rows, cache.lengths, HeadShape(2, 2, 128, 128), dtype=torch.float16, shared_prefixes=prefixes
    )
    q = queries(cache, 3, torch.float32)
    out = decode_attention(q, *cache, plan=plan)
    assert_close(out, decode_attention_reference(q, *cache))


def test_caches_and_scales_that_do_not_fit_are_refused(device: torch.device) -> None:
    cache = quantised_cache([20], "int8", device)
    q, kv = queries(cache, 1, torch.float32), cache.kv
    assert kv.scales is not None
    for wrong, told in (
        (kv._replace(scales=None), "no scales, and"),
        (kv._replace(scales=kv.scales.half()), "scales must be float32"),
        (kv._replace(scales=kv.scales[:, :, :1]), "scales must be"),
        (kv._replace(k=kv.k.float()), "k_cache must hold torch.int8"),
        (kv._replace(format=KVFormat()), "give their format"),
    ):
        with pytest.raises(ValueError, match=told):
            decode_attention(q, wrong, cache.rows, cache.lengths)
