"""Compares the scratch of prefill in fp8 with its reference, byte by byte, and prefill in fp8 with float64 on
the rounded q, K and V. What rounds to fp8 runs on a GPU: the interpreter rounds otherwise."""

import pytest
import torch
from torch import Tensor

from lightkv import KVPool, KVSpec
from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill.fp8_prefill import (
    fp8_prefill_attention,
    fp8_prefill_attention_reference,
    to_fp8,
    to_fp8_reference,
)
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.attention.prefill.restore_kv import (
    FP8,
    Scratch,
    restore_kv,
    restore_kv_reference,
)
from lightkv.triton_kernels.attention.variants import Alibi, Chunk, SinkLogits, Softcap, Window
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from tests.support.combinations import each_value
from tests.support.random_kv import make_kv

FORMAT = KVFormat.parse("fp8-static")


def make_scratch(kv: PagedKV, lengths: list[int], capacity: int) -> Scratch:
    """Returns a scratch full of NaN, with the static scales of `kv`, or others if it has none."""
    device, heads = kv.k.device, kv.k.shape[1]
    ends = torch.tensor([-(-length // 128) * 128 for length in lengths]).cumsum(0)
    begins = (torch.cat((torch.zeros(1, dtype=torch.int64), ends))[:-1]).int().to(device)
    scales = torch.ones(heads, 2, device=device) if kv.scales is None else kv.scales[0].float().contiguous()
    shape = HeadShape(heads, heads, kv.key_dim, kv.value_dim)
    scratch = Scratch.empty(capacity, shape, FP8, begins, scales)
    for part in (scratch.k, scratch.v):
        part.view(torch.uint8).fill_(0x7F)
    return scratch


def filled(kv: PagedKV, rows: Tensor, lengths: list[int], capacity: int) -> tuple[Scratch, Scratch]:
    """Returns a scratch that the kernel has filled, and one that the reference has."""
    one, other = (make_scratch(kv, lengths, capacity) for _ in range(2))
    tokens = torch.tensor(lengths, dtype=torch.int32, device=kv.k.device)
    restore_kv(kv, rows, tokens, one)
    restore_kv_reference(kv, rows, tokens, other)
    return one, other


def assert_same(one: Scratch, other: Scratch) -> None:
    assert torch.equal(one.k.view(torch.uint8), other.k.view(torch.uint8))
    assert torch.equal(one.v.view(torch.uint8), other.v.view(torch.uint8))


@each_value(shift=[0, 4, 31], dims=[(64, 64), (128, 80)])
def test_a_scratch_holds_the_bytes_of_static_fp8(
    shift: int, dims: tuple[int, int], device: torch.device
) -> None:
    lengths = {0: [1, 130, 17], 4: [128, 1, 40, 129], 31: [64, 5]}[shift]
    kv, rows = make_kv("fp8-static", device, lengths=lengths, shift=shift, dims=dims)
    one, other = filled(kv, rows, lengths, 640)
    assert_same(one, other)
    k, v = one.read(1, lengths[1])
    wanted_k, wanted_v = kv.read(slots_reference(kv, int(rows[1]), torch.arange(lengths[1], device=device)))
    assert torch.equal(k, wanted_k)
    assert torch.equal(v, wanted_v)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    kv, rows = make_kv("fp8-static", "cpu", lengths=[5])
    scratch = make_scratch(kv, [5], 128)
    lengths = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match="give a multiple of 128"):
        make_scratch(kv, [5], 100)
    with pytest.raises(ValueError, match=r"lengths must be contiguous int32 \[B\]"):
        restore_kv(kv, rows, lengths.long(), scratch)
    int8, _ = make_kv("int8", "cpu", lengths=[5])
    odd, _ = make_kv("fp8-static", "cpu", lengths=[5], dims=(40, 40))
    with pytest.raises(ValueError, match="multiples of 16"):
        restore_kv(odd, rows, lengths, make_scratch(odd, [5], 128))
    with pytest.raises(ValueError, match="index must be int32"):
        restore_kv(kv._replace(index=kv.index.long()), rows, lengths, scratch)
    with pytest.raises(ValueError, match=r"k_cache must hold torch\.float8_e4m3fn"):
        restore_kv(kv._replace(k=kv.k.half()), rows, lengths, scratch)
    with pytest.raises(ValueError, match="fp8 with static scales"):
        restore_kv(int8, rows, lengths, scratch)
    q = torch.zeros(5, 2, 64).to(FP8)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    out = torch.zeros(5, 2, 64)
    with pytest.raises(ValueError, match=r"compute capability 9 .* use prefill_attention"):
        fp8_prefill_attention(q, scratch, starts, lengths, out=out)
    with pytest.raises(ValueError, match=r"q_starts must be contiguous int32 \[P \+ 1\].*got torch.int64"):
        fp8_prefill_attention(q, scratch, starts.long(), lengths, out=out)
    with pytest.raises(ValueError, match=r"lengths must be contiguous int32 \[B\], with B 1"):
        fp8_prefill_attention(q, scratch, starts, lengths.repeat(2), out=out)
    with pytest.raises(ValueError, match=r"lse must be contiguous float32 \[T, H\], with T 5, H 2"):
        fp8_prefill_attention(q, scratch, starts, lengths, out=out, lse=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"got 0\.02 of q and 0\.0 of the output"):
        fp8_prefill_attention(q, scratch, starts, lengths, q_scale=0.02, out=out, out_scale=0.0)
    sizes = {"num_tokens": 5, "dtype": torch.bfloat16}
    on_device = (one.to(device) for one in (rows, starts, lengths))
    plan = prefill_plan(*on_device, HeadShape(2, 2, 64, 64), **sizes, limits=(Window(3),))
    with pytest.raises(
        ValueError, match=r"\(1, \(Window\(size=3\),\), True\), and the call has \(1, \(\), True\)"
    ):
        fp8_prefill_attention(q, scratch, starts, lengths, out=out, plan=plan)


CASES = {
    "short": ([5, 1, 200], [5, 1, 200], DEFAULT_OPTIONS),
    "after a prefix": ([300, 1000, 129], [64, 130, 1], DEFAULT_OPTIONS),
    "few after many": ([6000], [16], DEFAULT_OPTIONS),
    "window": ([700, 300], [400, 300], AttentionOptions().plus(Window(150))),
    "chunks": ([700], [600], AttentionOptions().plus(Chunk(256))),
    "soft-cap": ([500], [500], AttentionOptions().plus(Softcap(20.0))),
    "not causal": ([300, 77], [300, 77], AttentionOptions(causal=False)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("extra", ["", "sinks", "alibi"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_float64_on_the_rounded_values(case: str, dim: int, extra: str) -> None:
    lengths, queries, options = CASES[case]
    device, num_heads = torch.device("cuda"), 8
    torch.manual_seed(1)
    if extra == "sinks":
        options = options.plus(SinkLogits(torch.randn(num_heads, device=device)))
    if extra == "alibi":
        options = options.plus(Alibi(alibi_slopes(num_heads, device=device)))
    scratch = random_scratch(lengths, HeadShape(num_heads, 2, dim, dim), device)
    q_scale = 0.02
    q = to_fp8(torch.randn(sum(queries), num_heads, dim, device=device), q_scale)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32, device=device)
    tokens = torch.tensor(lengths, dtype=torch.int32, device=device)
    lse = torch.empty(q.shape[:2], device=device)
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=device)
    fp8_prefill_attention(q, scratch, starts, tokens, options, q_scale=q_scale, out=out, lse=lse)
    wanted = fp8_prefill_attention_reference(
        q, scratch, starts, tokens, options, q_scale=q_scale, out=torch.empty_like(out, dtype=torch.float32)
    )
    # A weight has 4 significant bits, so its error is 2.5 % of it in the mean, and so is that of a weighted sum
    # of values whose signs are random.
    error = (out.float() - wanted).abs()
    assert float(error.mean()) < 0.03 * float(wanted.abs().mean())
    assert float(error.max()) < 0.06 * float(wanted.abs().max())
    assert bool(lse.isfinite().all())
    small = fp8_prefill_attention(
        q, scratch, starts, tokens, options, q_scale=q_scale, out=torch.empty_like(q), out_scale=0.01
    )
    assert (
        float((small.float() * 0.01 - out.float()).abs().max()) < 0.0625 * float(wanted.abs().max()) + 0.005
    )


def random_scratch(lengths: list[int], heads: HeadShape, device: torch.device) -> Scratch:
    """Returns a scratch of random keys, filled by the reference; what no key has is NaN."""
    num_slots = sum(lengths) + 1
    spec = KVSpec(1, heads.num_kv_heads, heads.key_dim, heads.value_dim, torch.bfloat16, FORMAT)
    pool = KVPool(spec, num_slots, device)
    pool.set_static_scales(0, torch.tensor([0.02, 0.03]), torch.tensor([0.01]))
    slots = torch.randperm(num_slots - 1, device=device) + 1
    pool.write(0, slots, *torch.randn(2, num_slots - 1, heads.num_kv_heads, heads.key_dim, device=device))
    index = torch.zeros(len(lengths), max(lengths), dtype=torch.int32, device=device)
    for row, part in enumerate(slots.split(lengths)):
        index[row, : len(part)] = part.int()
    kv = PagedKV(pool.k(0), pool.v(0), index, scales=pool.scales(0), format=FORMAT)
    scratch = make_scratch(kv, lengths, sum(-(-length // 128) * 128 for length in lengths))
    tokens = torch.tensor(lengths, dtype=torch.int32, device=device)
    restore_kv_reference(kv, torch.arange(len(lengths), device=device), tokens, scratch)
    return scratch


@pytest.mark.gpu
def test_many_keys_are_added_in_two_levels() -> None:
    # Equal scores: every weight is the same, and the output is the mean of V, which is 1. Sums of 14 bits, as
    # the tensor cores make, would stop growing.
    device = torch.device("cuda")
    length, heads = 65536, HeadShape(4, 1, 128, 128)
    begins = torch.zeros(1, dtype=torch.int32, device=device)
    scratch = Scratch.empty(length, heads, FP8, begins, torch.ones(1, 2, device=device))
    scratch.k.view(torch.uint8).zero_()
    scratch.v.copy_(torch.ones_like(scratch.v, dtype=torch.float32))
    q = to_fp8(torch.randn(128, 4, 128, device=device), 1.0)
    starts = torch.tensor([0, 128], dtype=torch.int32, device=device)
    out = torch.empty(q.shape, dtype=torch.float32, device=device)
    fp8_prefill_attention(
        q, scratch, starts, torch.tensor([length], dtype=torch.int32, device=device), out=out
    )
    assert float((out - 1).abs().max()) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    heads = torch.randn(70, 3, 2, 96, device="cuda").to(dtype)[:, :, 0] * 200
    assert torch.equal(to_fp8(heads, 0.7).view(torch.uint8), to_fp8_reference(heads, 0.7).view(torch.uint8))
