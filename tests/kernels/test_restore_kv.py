"""Compares `restore_kv` with its reference, bit by bit: formats, page sizes, lengths, gaps, and a scratch that
is too small. Slots that no sequence holds are NaN, or the bytes of one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightkv import KVPool, KVSpec
from lightkv.triton_kernels.attention.lookups import BeamTable, RingRows
from lightkv.triton_kernels.attention.paged_kv import PagedKV
from lightkv.triton_kernels.attention.prefill.restore_kv import Scratch, restore_kv, restore_kv_reference
from lightkv.triton_kernels.layout.ring import Ring
from lightkv.triton_kernels.quantised.kv_format import Elements, KVFormat
from tests.support.combinations import each_value
from tests.support.random_kv import make_kv

SYMMETRIC = KVFormat(Elements(4, group=8))
INTEGERS = ("int8", "int8-g8", "int4", "int4-g16", SYMMETRIC)
# The interpreter reads fp8 in another way.
FORMATS = [*INTEGERS, pytest.param("fp8-static", marks=pytest.mark.gpu)]


def starts_of(lengths: list[int], gap: int = 0) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length + gap)
    return starts[:-1]


def check(
    kv: PagedKV,
    rows: Tensor,
    lengths: list[int],
    *,
    capacity: int,
    gap: int = 0,
    dtype: torch.dtype = torch.float16,
) -> tuple[Tensor, Tensor]:
    """Restores to views of one buffer and compares all of it; returns K and V."""
    device, heads = rows.device, kv.k.shape[1]
    settings = torch.tensor([lengths, starts_of(lengths, gap)], dtype=torch.int32, device=device)
    sizes = heads * kv.key_dim, heads * kv.value_dim
    results = []
    for restore in (restore_kv, restore_kv_reference):
        buffer = torch.full((capacity, sum(sizes)), torch.nan, dtype=dtype, device=device)
        outs = [part.unflatten(1, (heads, -1)) for part in buffer.split(sizes, 1)]
        restore(kv, rows, settings[0], Scratch(*outs, settings[1]))
        results.append(outs)
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.0, atol=0.0, equal_nan=True)
    k, v = results[0]
    assert k[:, 0, 0].isfinite().sum() <= sum(lengths)
    return k, v


@each_value(name=FORMATS, dims=[(64, 64), (80, 80), (192, 128)])
def test_formats(name: str | KVFormat, dims: tuple[int, int], device: torch.device) -> None:
    torch.manual_seed(dims[0])
    lengths = [37, 5, 70]
    kv, rows = make_kv(name, device, lengths=lengths, dims=dims)
    k, v = check(kv, rows, lengths, capacity=130)
    assert k[:112].isfinite().all()
    assert v[:112].isfinite().all()
    assert k[112:].isnan().all()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("shift", [0, 4, 31])
def test_pages(name: str, shift: int, device: torch.device) -> None:
    torch.manual_seed(shift)
    lengths = [50, 1, 16, 17]
    kv, rows = make_kv(name, device, lengths=lengths, shift=shift)
    check(kv, rows.int(), lengths, capacity=84)


@pytest.mark.parametrize(
    "lengths",
    [[1], [63], [64], [65, 0, 127, 128], [0, 0, 9, 0], [0], [2] * 20, [1, 0, 1] * 30],
    ids=lambda lengths: f"{len(lengths)}of{max(lengths)}",
)
def test_lengths(lengths: list[int], device: torch.device) -> None:
    torch.manual_seed(1)
    kv, rows = make_kv("int8-g8", device, lengths=lengths, heads=1)
    check(kv, rows, lengths, capacity=sum(lengths) + 3)


def test_gaps_between_requests_and_tokens_beyond_the_scratch(device: torch.device) -> None:
    torch.manual_seed(2)
    lengths = [40, 0, 33, 60]
    kv, rows = make_kv(SYMMETRIC, device, lengths=lengths)
    k, _ = check(kv, rows, lengths, capacity=200, gap=7)
    assert k[40:54].isnan().all()
    for capacity in (1, 39, 64, 100):
        k, _ = check(kv, rows, lengths, capacity=capacity)
        assert k.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_types_of_the_scratch(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(3)
    for name in INTEGERS:
        kv, rows = make_kv(name, device, lengths=[30, 9], dtype=dtype)
        check(kv, rows, [30, 9], capacity=40, dtype=dtype)


def test_nothing_is_quantised(device: torch.device) -> None:
    torch.manual_seed(4)
    kv, rows = make_kv("auto", device, lengths=[30, 9])
    assert kv.scales is None
    check(kv, rows, [30, 9], capacity=40)


def test_an_empty_batch_and_an_empty_scratch(device: torch.device) -> None:
    kv, rows = make_kv("int8", device, lengths=[3])
    check(kv, rows, [3], capacity=0)
    check(kv, rows[:0], [], capacity=0)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    outs = torch.ones(2, 4, 2, 64, device=device).unbind()
    restore_kv(kv, rows[:0], nothing, Scratch(*outs, nothing))
    assert (outs[0] == 1).all()


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    kv, rows = make_kv("int8", device, lengths=[3, 4])
    one = torch.zeros(2, dtype=torch.int32, device=device)
    out = torch.zeros(9, 2, 64, device=device)
    good: dict[str, Any] = {
        "kv": kv,
        "rows": rows,
        "lengths": one,
    }
    scratch = Scratch(out, out.clone(), one)
    for change, told in (
        ({"kv": kv._replace(lookup=RingRows(Ring(0, 8)))}, "K/V that RingRows finds"),
        ({"kv": kv._replace(lookup=BeamTable(kv.index))}, "K/V that BeamTable finds"),
        ({"kv": kv._replace(index=kv.index.long())}, "index must be int32"),
        ({"kv": kv._replace(scales=None)}, "pass KVPool.scales"),
        ({"kv": kv._replace(format=KVFormat.parse("int8-g8"))}, "scales must be"),
        ({"rows": rows.float()}, "rows must be"),
        ({"lengths": one.long()}, "lengths must be"),
        ({"scratch": scratch._replace(begins=one[:1])}, "begins must be"),
        ({"scratch": scratch._replace(k=out[:, :1])}, "k must be"),
        ({"scratch": scratch._replace(v=out[:5])}, "v must be"),
        ({"scratch": scratch._replace(v=out.int())}, "v must be floats"),
        ({"scratch": scratch._replace(v=out.half())}, "has one type"),
    ):
        with pytest.raises(ValueError, match=told):
            restore_kv(**good | {"scratch": scratch} | change)


@pytest.mark.gpu
def test_captured_restore_follows_its_requests() -> None:
    torch.manual_seed(5)
    kv, rows = make_kv("int8", "cuda", lengths=[40, 60, 30], dtype=torch.bfloat16)
    given = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    ours, theirs = torch.full((2, 2, 150, 2, 64), torch.nan, dtype=torch.bfloat16, device="cuda").unbind()
    restore_kv(kv, rows, given[0], Scratch(*ours.unbind(), given[1]))  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            restore_kv(kv, rows, given[0], Scratch(*ours.unbind(), given[1]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    given.copy_(torch.tensor([[40, 55, 30], [0, 40, 95]]))
    graph.replay()
    restore_kv_reference(kv, rows, given[0], Scratch(*theirs.unbind(), given[1]))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.gpu
def test_slots_past_2_to_the_31_bytes() -> None:
    num_slots = 2**31 // (2 * 8 * 128) + 1000
    pool = KVPool(
        KVSpec(1, 8, 128, 128, torch.bfloat16, KVFormat.parse("int8")), num_slots, torch.device("cuda")
    )
    slots = num_slots - 1 - torch.randperm(500, device="cuda")[:100]
    k, v = torch.randn(2, 100, 8, 128, dtype=torch.bfloat16, device="cuda")
    pool.write(0, slots, k, v)
    kv = PagedKV(pool.k(0), pool.v(0), slots[None].int(), scales=pool.scales(0), format=pool.format(0))
    k, _ = check(kv, torch.zeros(1, dtype=torch.int64, device="cuda"), [100], capacity=100, dtype=k.dtype)
    assert k.isfinite().all()
